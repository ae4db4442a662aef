"""Forecast of an adaptation in words, before it is run: its steps and how long it will take.

Seconds are those of a few images through the network, times the number of images and of passes.
"""

from __future__ import annotations

from usfan.adaptation.plan import Plan
from usfan.adaptation.schedule import Schedule
from usfan.adaptation.tune import full_training, seconds_per_image
from usfan.data.store import Store
from usfan.engine.runtime import Runtime
from usfan.store.model import SourceModel

HEAD_STEP = 4e-3
"""Seconds of a step that trains only the layers after the backbone, on a CPU."""

SETTING_RULE = "estimated from the images: which of the model's classes occur, and whether there are new ones"
TUNE_RULE = (
    "new (the layers after the backbone) if the source model explains at least half of the target's structure or "
    "there are few images per class, or on a CPU; else all"
)


def describe_plan(
    plan: Plan, source: SourceModel, few: Store, count: int, runtime: Runtime
) -> list[str]:
    """Lines about the method, the classes, the trained parameters, the passes and the time."""
    config = plan.config
    seconds = seconds_per_image(source.classifier, source.spec, few, runtime)
    frozen = plan.frozen or config.tune == "auto"
    setting = SETTING_RULE if config.setting == "auto" else config.setting
    tune = TUNE_RULE if config.tune == "auto" else config.tune
    passes = 1 if frozen else config.epochs + 1
    schedule = Schedule.of(plan, count, labelled=False)
    lines = [
        f"method: {plan.method.name}, {plan.method.summary}",
        f"classes: {setting}",
        f"trained: {tune}",
        f"passes of the model over {count:,} images: {passes}, {seconds * count:.0f} s each",
        f"training: {schedule.epochs} epochs, {schedule.steps:,} steps",
    ]
    networks = 3  # the model, the witness and the judge look at the images once each
    if frozen:
        total = schedule.steps * HEAD_STEP + networks * count * seconds
        lines.append(f"expected: about {total:.0f} s if the backbone stays frozen")
    if not plan.frozen and (config.tune != "auto" or runtime.device.type != "cpu"):
        all_layers = full_training(seconds, count, schedule.epochs) + networks * count * seconds
        lines.append(f"expected: about {all_layers:.0f} s if all layers are trained")
    return lines
