"""The top of a run's page: headline, status, main figures, facts. And its settings."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from usfan.adaptation.methods import METHODS
from usfan.config import AdaptConfig, RuntimeConfig, TrainConfig, field_docs
from usfan.maths.validators import is_certain
from usfan.report.blocks import Table, text_cell
from usfan.report.formatting import is_number, mapping, number, percent, seconds
from usfan.report.run import Run, is_epoch

KINDS = {
    "adapt": "adaptation",
    "train": "training of a source model",
    "posterior": "posterior of a trained model",
    "evaluate": "evaluation",
}
CONFIGS: dict[str, tuple[type, ...]] = {
    "adapt": (AdaptConfig, RuntimeConfig),
    "train": (TrainConfig, RuntimeConfig),
}
"""The settings of a command: fields with defaults and docs."""
TILES = {
    "hos": "HOS",
    "accuracy": "accuracy",
    "ece": "ECE, point estimate",
    "posterior_ece": "ECE, posterior",
}
VALIDATOR_TILES = {
    "certain": "certain predictions",
    "drift": "predictions changed",
    "coverage": "classes predicted",
}
BAD_ECE = 15.0
"""Percent: a calibration error from here on is bad, even if it was worse before."""


@dataclass(frozen=True)
class Tile:
    """One large figure, with a detail below it; `mark` (better, worse) colours the detail."""

    label: str
    value: str
    detail: str = ""
    mark: str = ""


@dataclass(frozen=True)
class Overview:
    """The top of a run's page."""

    headline: str
    status: tuple[str, str]
    reason: str
    tiles: list[Tile]
    facts: list[tuple[str, str]]


def overview(run: Run) -> Overview:
    return Overview(headline(run), status(run), guard_reason(run), tiles(run), facts(run))


def kept_epoch(run: Run) -> int | None:
    return first_epoch(
        run.metrics.get("kept_epoch"), run.selection.get("epoch"), run.metrics.get("best_epoch")
    )


def planned_epochs(run: Run) -> int | None:
    return first_epoch(run.metrics.get("epochs"), run.settings.get("epochs"))


def first_epoch(*values: object) -> int | None:
    return next((value for value in values if is_epoch(value)), None)


def guard_reason(run: Run) -> str:
    reason = mapping(run.metrics.get("guard")).get("reason") or run.selection.get("reason")
    texts = [str(text) for text in (reason, run.metrics.get("warning")) if text]
    return ". Beware: ".join(texts)


def main_figure(run: Run) -> tuple[str, object, object]:
    """The figure of the headline, before and after."""
    after = run.figures("after")
    key = "hos" if is_number(after.get("hos")) else "accuracy"
    return key, run.figures("before").get(key), after.get(key)


def headline(run: Run) -> str:
    """`Accuracy 40.8 % → 78.5 %: kept epoch 4 of 6`."""
    epoch = kept_epoch(run)
    planned = planned_epochs(run)
    ending = ""
    if epoch is not None and planned:
        ending = f"kept epoch {epoch} of {planned}" if epoch else "source model kept"
    key, before, after = main_figure(run)
    accuracy = run.metrics.get("accuracy", run.metrics.get("validation_accuracy"))
    certain = certain_share(run)
    result = KINDS.get(run.kind, "run")
    if is_number(before) and is_number(after):
        result = f"{TILES[key]} {percent(before)} → {percent(after)}"
    elif run.kind == "adapt" and certain is not None:
        result = f"{percent(100 * certain, 0)} of predictions certain"
    elif run.kind == "adapt" and not ending:
        result = "adaptation, not finished"
    elif is_number(accuracy):
        result = f"accuracy {percent(accuracy)}"
    text = f"{result}: {ending}" if ending else result
    return text[:1].upper() + text[1:]


def certain_share(run: Run) -> float | None:
    """The share of the images that the posterior is certain of."""
    share = mapping(run.metrics.get("validators")).get("certain")
    if is_number(share):
        return float(share)
    if run.images is None:
        return None
    return float(is_certain(run.images.tensors["posterior_after"]).double().mean())


def status(run: Run) -> tuple[str, str]:
    """How far to trust the result: (good, warn or plain; a few words)."""
    if run.kind != "adapt":
        return "plain", KINDS.get(run.kind, "run")
    if "collapse" in guard_reason(run).lower():
        return "warn", "adaptation collapsed"
    if kept_epoch(run) == 0 and planned_epochs(run):
        return "warn", "adaptation was not trusted"
    _, before, after = main_figure(run)
    if is_number(before) and is_number(after) and after < before - 1:
        return "warn", "below the source model"
    if mapping(run.metrics.get("guard")).get("on") is False:
        return "plain", "last iterate, guard off"
    if not kept_epoch(run):
        return "plain", "adaptation"
    if mapping(run.metrics.get("validators")).get("drift") == 0:
        return "plain", "adapted: no prediction changed"
    return "good", "adapted"


def tiles(run: Run) -> list[Tile]:
    """The main figures: with labels, those before and after; without, what the validators say."""
    tiles = []
    before = run.figures("before")
    after = run.figures("after")
    for key in TILES:
        value = after.get(key)
        if is_number(value):
            tiles.append(before_after_tile(key, before.get(key), value))
    validators = mapping(run.metrics.get("validators"))
    for key, label in VALIDATOR_TILES.items():
        value = validators.get(key)
        if is_number(value):
            tiles.append(Tile(label, percent(100 * value, 0)))
    return tiles


def before_after_tile(
    key: str,
    before: object,
    after: float,
) -> Tile:
    """A figure after adaptation, with the one before; green if it is better, unless it is still bad."""
    if not is_number(before):
        return Tile(TILES[key], percent(after))
    is_error = "ece" in key
    improved = (after < before) == is_error
    mark = "better" if improved else "worse"
    if abs(after - before) < 0.05 or (improved and is_error and after > BAD_ECE):
        mark = ""
    return Tile(TILES[key], percent(after), f"{percent(before)} before", mark)


def facts(run: Run) -> list[tuple[str, str]]:
    """The data, the model and the method of the run."""
    settings = run.settings
    metrics = run.metrics
    network = mapping(run.model.get("architecture"))
    classes = run.model.get("classes")
    target_classes = mapping(metrics.get("classes"))
    setting = settings.get("setting")
    if target_classes:
        setting = f"{target_classes.get('setting')}: {target_classes.get('reason')}"
    values = {
        "method": settings.get("method", metrics.get("method")),
        "classes of the target": setting,
        "source model": settings.get("source", settings.get("model")),
        "data": settings.get("data"),
        "images": number(metrics.get("images")),
        "unreadable images": number(metrics.get("skipped") or None),
        "labels given": number(mapping(metrics.get("labels")).get("count")),
        "network": network.get("backbone", network.get("module")),
        "classes": len(classes) if isinstance(classes, list) else None,
        "seed": settings.get("seed"),
        "duration": seconds(metrics.get("seconds")),
        "when": run.started,
    }
    return [
        (name, str(value)) for name, value in values.items() if value not in (None, "", "–")
    ]


def settings_table(prefix: str, run: Run) -> list[Table]:
    """Every setting; those that differ from the default come first."""
    if not run.settings:
        return []
    defaults: dict[str, object] = {}
    docs: dict[str, str] = {}
    for config in CONFIGS.get(run.kind, ()):
        defaults |= {field.name: field.default for field in dataclasses.fields(config)}
        docs |= field_docs(config)
    method = METHODS.get(str(run.settings.get("method")))
    if run.kind == "adapt" and method is not None:
        defaults |= method.settings()
        docs |= method.setting_docs()
    rows = []
    for name, value in run.settings.items():
        changed = defaults.get(name) not in (None, value)
        cell = text_cell(setting_text(value), "changed" if changed else "")
        rows.append([text_cell(name), cell, text_cell(docs.get(name, ""))])
    rows.sort(key=lambda row: row[1].mark != "changed")
    caption = "From config.yaml. Settings that differ from the default come first, in bold."
    columns = ["setting", "value", "meaning"]
    return [
        Table(
            f"{prefix}-settings",
            "All settings",
            caption,
            columns,
            rows,
            wide=True,
        )
    ]


def setting_text(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, (list, tuple, dict)):
        return ", ".join(str(item) for item in value)
    return "not given" if value is None else str(value)
