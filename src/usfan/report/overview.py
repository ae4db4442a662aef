"""The top of a run's page: headline, status, main figures and facts."""

from __future__ import annotations

from dataclasses import dataclass

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
VALIDATOR_TILES = {
    "certain": "certain predictions",
    "drift": "predictions changed",
    "coverage": "classes predicted",
}
GUARD_STATUS = {
    "adapted": ("good", "adapted"),
    "source": ("warn", "source model kept"),
    "undecided": ("warn", "undecided: source model kept"),
}


@dataclass(frozen=True)
class Overview:
    """The top of a run's page."""

    headline: str
    status: tuple[str, str]
    """How far to trust the result: good, warn or plain; and in a few words."""
    reason: str
    tiles: list[tuple[str, str, str]]
    """Label, figure, detail."""
    facts: list[tuple[str, str]]


def overview(run: Run) -> Overview:
    return Overview(headline(run), status(run), guard_reason(run), tiles(run), facts(run))


def kept_epoch(run: Run) -> int | None:
    epoch = run.metrics.get("kept_epoch", run.metrics.get("best_epoch"))
    return epoch if is_epoch(epoch) else None


def guard_reason(run: Run) -> str:
    reason = mapping(run.metrics.get("guard")).get("reason")
    texts = [str(text) for text in (reason, run.metrics.get("warning")) if text]
    return ". Beware: ".join(texts)


def main_figure(run: Run) -> tuple[str, object, object]:
    """The figure of the headline, before and after."""
    after = run.figures("after")
    key = "hos" if is_number(after.get("hos")) else "accuracy"
    return key, run.figures("before").get(key), after.get(key)


def headline(run: Run) -> str:
    """`Accuracy 40.8 % → 78.5 %`; without labels, the certain predictions."""
    key, before, after = main_figure(run)
    accuracy = run.metrics.get("accuracy", run.metrics.get("validation_accuracy"))
    certain = mapping(run.metrics.get("validators")).get("certain")
    text = KINDS.get(run.kind, "run")
    if is_number(before) and is_number(after):
        text = f"{TILES[key]} {percent(before)} → {percent(after)}"
    elif is_number(certain):
        text = f"{percent(100 * certain, 0)} of predictions certain"
    elif is_number(accuracy):
        text = f"accuracy {percent(accuracy)}"
    return text[:1].upper() + text[1:]


def status(run: Run) -> tuple[str, str]:
    """The guard's decision, unless labels or the predictions say that it did no good."""
    guard = mapping(run.metrics.get("guard"))
    _, before, after = main_figure(run)
    if is_number(before) and is_number(after) and after < before - 1:
        return "warn", "below the source model"
    if guard.get("on") is False:
        return "plain", "last iterate, guard off"
    if mapping(run.metrics.get("validators")).get("drift") == 0:
        return "plain", "no prediction changed"
    plain = ("plain", KINDS.get(run.kind, "run"))
    return GUARD_STATUS.get(str(guard.get("kept")), plain)


def tiles(run: Run) -> list[tuple[str, str, str]]:
    """The main figures: with labels, those before and after; and what the validators say."""
    tiles = []
    before = run.figures("before")
    after = run.figures("after")
    for key, label in TILES.items():
        if is_number(after.get(key)):
            detail = f"{percent(before[key])} before" if is_number(before.get(key)) else ""
            tiles.append((label, percent(after[key]), detail))
    validators = mapping(run.metrics.get("validators"))
    for key, label in VALIDATOR_TILES.items():
        value = validators.get(key)
        if is_number(value):
            tiles.append((label, percent(100 * value, 0), ""))
    return tiles


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
