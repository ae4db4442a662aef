"""The plan of an adaptation: every setting has a value before anything is computed.

    settings of the user, facts about the source model  →  Plan

A value comes from the user, else from the preset, else from the row of the method, else it follows from the facts. Two
choices may be left to the images: `setting`, which classes occur, and `tune`, which parameters are trained. A plan
holds the method under every setting that the images can show, so that nothing is resolved a second time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from usfan.adaptation.methods import METHODS, Method, find_method
from usfan.adaptation.run_facts import RunFacts
from usfan.adaptation.thresholds import MOVING_LABEL_WEIGHT
from usfan.adaptation.tune import TuneChoice
from usfan.adaptation.witness import has_witness
from usfan.config import SETTINGS, AdaptConfig, make_config, read_preset, unknown_setting
from usfan.errors import ConfigError, option
from usfan.store.model import came_pretrained

SHORT_FORMS = {"open_set": "open", "partial_set": "partial"}
"""Flags that stand for a setting."""


@dataclass(frozen=True)
class SourceFacts:
    """Facts about a source model that settings depend on. A model folder tells them before the network is loaded."""

    pretrained: bool
    """Whether the backbone started from pretrained weights."""
    classes: int
    witness: bool
    """Whether a pretrained network can be the witness."""

    @classmethod
    def of(
        cls, architecture: dict[str, Any], summary: dict[str, Any], classes: int, channels: int
    ) -> SourceFacts:
        witness = has_witness(architecture, summary, channels)
        return cls(came_pretrained(architecture), classes, witness)


@dataclass(frozen=True)
class Plan:
    """Everything that an adaptation will do, as far as it can be known before the images are seen."""

    config: AdaptConfig
    """`setting` and `tune` may be "auto": then the images decide."""
    methods: Mapping[str, Method]
    """The method under every setting, with its own settings decided."""
    facts: SourceFacts
    tune_reason: str = ""

    @property
    def method(self) -> Method:
        """The method under the setting of the plan; while that is undecided, the method for a closed set."""
        return self.methods["closed" if self.config.setting == "auto" else self.config.setting]

    @property
    def frozen(self) -> bool:
        """Whether the backbone stays as it is, so that its features can be computed once."""
        stages = [stage.stage.get("tune", self.config.tune) for stage in self.method.stages]
        return all(tune == "new" for tune in stages) and not self.needs_pixels

    @property
    def needs_pixels(self) -> bool:
        return any(term.needs_pixels for term in self.method.all_terms)

    def with_setting(self, setting: str) -> Plan:
        return dataclasses.replace(
            self, config=dataclasses.replace(self.config, setting=setting)
        )

    def with_tune(self, choice: TuneChoice) -> Plan:
        """The same plan with `tune`, and the learning rates that follow from it, decided."""
        config = self.config
        scale = choice.backbone_lr_scale or (0.1 if self.facts.pretrained else 1.0)
        weight = 1.0 if choice.tune == "new" else MOVING_LABEL_WEIGHT
        config = dataclasses.replace(
            config,
            tune=choice.tune,
            backbone_lr_scale=first_value(config.backbone_lr_scale, scale),
            given_label_weight=first_value(config.given_label_weight, weight),
        )
        return dataclasses.replace(self, config=config, tune_reason=choice.reason)

    def settings(self) -> dict[str, Any]:
        """All values as a flat table: config.yaml holds them, and they repeat the run. A value that depends on a
        setting that is undecided is None, so that a resumed run decides it again."""
        table = {**dataclasses.asdict(self.config), **self.method.settings()}
        if self.config.setting == "auto":
            for method in self.methods.values():
                for name, value in method.settings().items():
                    if table[name] != value:
                        table[name] = None
        return table


def plan_adaptation(settings: Mapping[str, Any], facts: SourceFacts) -> Plan:
    """The plan for these settings: fields of `AdaptConfig`, or settings of the method. `open_set` and `partial_set` are
    short forms of `setting`."""
    settings = {name: value for name, value in settings.items() if value is not None}
    settings = expand_short_forms(settings)
    preset = read_preset(str(settings.get("preset", "default")), "adapt")
    if settings.get("method", "auto") == "auto":
        witness = settings.get("witness", "auto")
        is_available = facts.witness if witness == "auto" else witness != "none"
        default = "u-sfan++" if is_available else "u-sfan"
        settings["method"] = preset.get("method", default)
    method = find_method(str(settings["method"]))
    preset |= read_preset(str(settings.get("preset", "default")), method.name)
    config, method = split_settings(settings, preset, method)
    known = (facts.pretrained, facts.classes, config.batch_size, config.epochs)
    methods = {setting: method.decide(RunFacts(*known, setting)) for setting in SETTINGS[1:]}
    plan = Plan(config, methods, facts)
    if config.tune == "auto" and facts.pretrained:
        return plan
    tune = "all" if config.tune == "auto" else config.tune
    return plan.with_tune(TuneChoice(tune, ""))


def split_settings(
    settings: Mapping[str, Any], preset: Mapping[str, Any], method: Method
) -> tuple[AdaptConfig, Method]:
    """The user's settings over the preset's over those of the method's row: the config, and the method with its part
    of them. A setting that neither has is refused."""
    fields = adapt_fields()
    names = method.settings().keys() - fields
    for name in settings.keys() - fields - names:
        refuse_setting(name, method)
    values = {**method.stage, **preset, **settings}
    config = {name: value for name, value in values.items() if name in fields}
    more = {name: value for name, value in values.items() if name in names}
    return make_config(AdaptConfig, config), method.with_settings(more)


def adapt_fields() -> set[str]:
    return {field.name for field in dataclasses.fields(AdaptConfig)}


def expand_short_forms(settings: Mapping[str, Any]) -> dict[str, Any]:
    """`open_set` and `partial_set` as `setting`."""
    settings = dict(settings)
    chosen = [setting for name, setting in SHORT_FORMS.items() if settings.pop(name, False)]
    if len(chosen) > 1:
        raise ConfigError(
            f"open-set and partial-set exclude each other: choose one, or {option('setting', 'universal')}"
        )
    for setting in chosen:
        other = settings.setdefault("setting", setting)
        if other != setting:
            raise ConfigError(
                f"{option(f'{setting}_set', True)} and {option('setting', other)} exclude each other: choose one"
            )
    return settings


def settings_of_method(method: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Those settings that this method has: a study passes the same ones to every method."""
    names = adapt_fields() | METHODS[method].settings().keys()
    return {name: value for name, value in settings.items() if name in names}


def refuse_setting(name: str, method: Method) -> None:
    others = sorted(row.name for row in METHODS.values() if name in row.settings())
    if others:
        raise ConfigError(
            f"{method.name} has no setting {name!r}; it belongs to {', '.join(others)}"
        )
    names = method.settings()
    hint = f"the settings of {method.name} are {', '.join(names)}"
    raise unknown_setting(name, {*adapt_fields(), *names}, hint)


def first_value(value: float | None, otherwise: float) -> float:
    return otherwise if value is None else value
