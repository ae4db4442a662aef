"""Plans of an adaptation, made from settings and a few facts."""

from typing import Any

from usfan.adaptation.methods import Method
from usfan.adaptation.plan import Plan, SourceFacts, plan_adaptation
from usfan.config import AdaptConfig


def make_plan(
    settings: dict[str, Any], *, pretrained: bool, classes: int, witness: bool = False
) -> Plan:
    return plan_adaptation(settings, SourceFacts(pretrained, classes, witness))


def resolve(settings: dict[str, Any], **facts: Any) -> tuple[AdaptConfig, Method]:
    """The config and the method of the plan."""
    plan = make_plan(settings, **facts)
    return plan.config, plan.method
