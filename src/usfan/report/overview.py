"""The top of a run's page: headline, status, main figures and facts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from usfan.adaptation.verdict import NO_DIFFERENCE, WIDEST_INTERVAL
from usfan.report.formatting import is_number, mapping, number, percent, seconds
from usfan.report.run import Run, is_epoch

KINDS = {
    "adapt": "adaptation",
    "train": "training of a source model",
    "posterior": "posterior of a trained model",
    "evaluate": "evaluation",
}
TILES = {
    "hos": "HOS",
    "accuracy": "accuracy",
    "ece": "ECE, point estimate",
    "posterior_ece": "ECE, posterior",
}
VERDICTS = {
    "better": ("good", "better", "The adapted model is better"),
    "worse": ("warn", "worse", "The adapted model is worse"),
    "unknown": ("warn", "not known", "Not known whether adapting helped"),
}
"""Of a verdict: its colour, its badge, and the headline of a run without labels."""
SAME = ("plain", "no difference", "No difference worth having")
"""The same of models that do not differ."""


@dataclass(frozen=True)
class Overview:
    """The top of a run's page."""

    headline: str
    status: tuple[str, str]
    """How far to trust the result: good, warn or plain; and in a few words."""
    reason: str
    next: str
    """Next step, with the command; empty if there is none."""
    tiles: list[tuple[str, str, str]]
    """Label, figure, detail."""
    facts: list[tuple[str, str]]


def overview(run: Run) -> Overview:
    return Overview(
        headline(run), status(run), reason(run), next_step(run), tiles(run), facts(run)
    )


def kept_epoch(run: Run) -> int | None:
    epoch = run.metrics.get("kept_epoch", run.metrics.get("best_epoch"))
    return epoch if is_epoch(epoch) else None


def reason(run: Run) -> str:
    """The sentence of the verdict."""
    sentence = str(mapping(run.metrics.get("verdict")).get("sentence", ""))
    warning = run.metrics.get("warning")
    return f"{sentence} Beware: {warning}" if warning else sentence


def next_step(run: Run) -> str:
    following = str(mapping(run.metrics.get("verdict")).get("next", ""))
    return f"{following[:1].upper()}{following[1:]}".replace("RUN", run.folder)


def main_figure(run: Run) -> tuple[str, object, object]:
    """The figure of the headline, before and after."""
    after = run.figures("after")
    key = "hos" if is_number(after.get("hos")) else "accuracy"
    return key, run.figures("before").get(key), after.get(key)


def verdict(run: Run) -> tuple[str, str, str] | None:
    if reason(run).startswith(NO_DIFFERENCE):
        return SAME
    return VERDICTS.get(str(mapping(run.metrics.get("verdict")).get("value")))


def headline(run: Run) -> str:
    """`Accuracy 40.8 % → 78.5 %`; without labels of the target, the verdict."""
    key, before, after = main_figure(run)
    accuracy = run.metrics.get("accuracy", run.metrics.get("validation_accuracy"))
    words = verdict(run)
    text = KINDS.get(run.kind, "run")
    if is_number(before) and is_number(after):
        text = f"{TILES[key]} {percent(before)} → {percent(after)}"
    elif words is not None:
        text = words[2]
    elif is_number(accuracy):
        text = f"accuracy {percent(accuracy)}"
    return text[:1].upper() + text[1:]


def status(run: Run) -> tuple[str, str]:
    """The verdict, unless labels or the predictions say that adapting did no good."""
    _, before, after = main_figure(run)
    if is_number(before) and is_number(after) and after < before - 1:
        return "warn", "below the source model"
    if mapping(run.metrics.get("validators")).get("drift") == 0:
        return "plain", "no prediction changed"
    words = verdict(run)
    if words is not None:
        return words[0], words[1]
    return "plain", KINDS.get(run.kind, "run")


def tiles(run: Run) -> list[tuple[str, str, str]]:
    """The main figures before and after: by the target's labels, by those that the user gave, or estimated."""
    before = run.figures("before")
    after = run.figures("after")
    tiles = []
    for key, label in TILES.items():
        if is_number(after.get(key)):
            detail = f"{percent(before[key])} before" if is_number(before.get(key)) else ""
            tiles.append((label, percent(after[key]), detail))
    if not tiles:
        tiles = labelled_tiles(run) or estimate_tiles(run)
    changed = mapping(run.metrics.get("validators")).get("drift")
    if is_number(changed):
        tiles.append(("predictions changed", percent(100 * changed, 0), ""))
    return tiles


def labelled_tiles(run: Run) -> list[tuple[str, str, str]]:
    """Accuracy of both models by the user's labels."""
    labelled = mapping(run.metrics.get("labelled"))
    labels = f"by {number(labelled.get('number'))} labels"
    tiles = []
    for model in ("source", "adapted"):
        accuracy = mapping(labelled.get(model))
        if not is_number(accuracy.get("value")):
            continue
        figure, range_text = with_interval(accuracy)
        low, high = accuracy.get("low"), accuracy.get("high")
        if is_number(low) and is_number(high) and high - low >= 100 * WIDEST_INTERVAL:
            figure = "not known"
        tiles.append((f"accuracy, {model} model, {labels}", figure, range_text))
    return tiles


def estimate_tiles(run: Run) -> list[tuple[str, str, str]]:
    """Accuracy as estimated without labels, or why it cannot be told."""
    estimates = mapping(run.metrics.get("estimated_accuracy"))
    tiles = []
    for when in ("before", "after"):
        estimate = mapping(estimates.get(when))
        possible = mapping(mapping(estimates.get("possible")).get(when))
        low, high = possible.get("low"), possible.get("high")
        label = f"estimated accuracy {when}"
        if is_number(estimate.get("value")):
            tiles.append((label, *with_interval(estimate)))
        elif is_number(low) and is_number(high):
            ends = f"{low:.0f} to {percent(high, 0)}"
            tiles.append((label, ends, "cannot be told closer without labels"))
        elif when in estimates:
            tiles.append((label, "not known", "cannot be told without labels"))
    return tiles


def with_interval(figure: Mapping[str, object]) -> tuple[str, str]:
    """`45.0 %`, and `32 to 58 %`."""
    low, high = figure.get("low"), figure.get("high")
    if not (is_number(low) and is_number(high)):
        return percent(figure["value"], 0), ""
    return percent(figure["value"], 0), f"{low:.0f} to {percent(high, 0)}"


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
        "guard": mapping(metrics.get("guard")).get("reason"),
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
