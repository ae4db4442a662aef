"""What was run, on what, and how it ended: headline, status, the main figures, the settings."""

from __future__ import annotations

import dataclasses
import datetime
from dataclasses import dataclass
from typing import Any

from usfan.adaptation.methods import METHODS
from usfan.config import AdaptConfig, RuntimeConfig, TrainConfig, field_docs
from usfan.report.blocks import Cell, Table, is_number, number, percent, seconds
from usfan.report.read_run import Run, is_epoch
from usfan.scoring.validators import is_certain

KINDS = {
    "adapt": "adaptation",
    "train": "training of a source model",
    "posterior": "posterior of a trained model",
    "evaluate": "evaluation",
}


BAD_ECE = 15.0
"""Percent: a calibration error from here on is bad, even if it was worse before."""


@dataclass(frozen=True)
class Tile:
    """One large figure; `change` is shown beside it, `mark` (better, worse) colours that."""

    label: str
    value: str
    detail: str = ""
    mark: str = ""


def kept_epoch(run: Run) -> int | None:
    value = run.metrics.get("kept_epoch", run.kept.get("epoch", run.metrics.get("best_epoch")))
    return value if is_epoch(value) else None


def planned_epochs(run: Run) -> int | None:
    value = run.metrics.get("epochs", run.kept.get("of", run.settings.get("epochs")))
    return value if is_epoch(value) else None


def guard_reason(run: Run) -> str:
    guard = run.metrics.get("guard")
    reason = guard.get("reason") if isinstance(guard, dict) else None
    warning = run.metrics.get("warning")
    return ". Beware: ".join(str(text) for text in (reason or run.kept.get("reason"), warning) if text)


def main_figure(run: Run) -> tuple[str, str]:
    """Key and name of the figure that stands in the headline."""
    return ("hos", "HOS") if is_number(run.figures("after").get("hos")) else ("accuracy", "accuracy")


def headline(run: Run) -> str:
    kept, planned = kept_epoch(run), planned_epochs(run)
    if kept == 0 and planned:
        ending = "source model kept"
    elif kept is not None and planned:
        ending = f"kept epoch {kept} of {planned}"
    else:
        ending = ""
    if run.kind == "adapt":
        key, name = main_figure(run)
        before, after = run.figures("before").get(key), run.figures("after").get(key)
        if is_number(before) and is_number(after):
            text = f"{name} {percent(before)} → {percent(after)}"
            return sentence(f"{text}: {ending}" if ending else text)
        certain = certain_share(run)
        parts = [ending, f"{percent(100 * certain, 0)} of predictions certain" if certain is not None else ""]
        return sentence("; ".join(p for p in parts if p) or "adaptation, not finished")
    accuracy = run.metrics.get("accuracy", run.metrics.get("validation_accuracy"))
    if run.kind in ("evaluate", "train") and is_number(accuracy):
        return sentence(f"accuracy {percent(accuracy)}{f': {ending}' if ending else ''}")
    if run.kind == "posterior" and is_number(run.metrics.get("prior_precision")):
        return f"Prior precision {number(run.metrics['prior_precision'])}"
    return sentence(KINDS.get(run.kind, "run") + (f": {ending}" if ending else ""))


def sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def certain_share(run: Run) -> float | None:
    validators = run.metrics.get("validators")
    if isinstance(validators, dict) and is_number(validators.get("certain")):
        return float(validators["certain"])
    table = run.samples.get("posterior_after") if run.samples is not None else None
    if table is None:
        return None
    return float(is_certain(table).double().mean())


def status(run: Run) -> tuple[str, str]:
    """How far to trust the result: (good, warn or plain; a few words)."""
    if run.kind != "adapt":
        return "plain", KINDS.get(run.kind, "run")
    if "collapse" in guard_reason(run).lower():
        return "warn", "adaptation collapsed"
    if kept_epoch(run) == 0 and planned_epochs(run):
        return "warn", "adaptation was not trusted"
    key, _ = main_figure(run)
    before, after = run.figures("before").get(key), run.figures("after").get(key)
    if is_number(before) and is_number(after) and after < before - 1:
        return "warn", "below the source model"
    guard = run.metrics.get("guard")
    if isinstance(guard, dict) and guard.get("on") is False:
        return "plain", "last iterate, guard off"
    if not kept_epoch(run):
        return "plain", "adaptation"
    return ("plain", "adapted: no prediction changed") if nothing_changed(run) else ("good", "adapted")


def nothing_changed(run: Run) -> bool:
    """Whether every prediction is the source model's, by what the run kept of each image or by its validators."""
    predicted = run.samples.predicted if run.samples is not None else {}
    if {"before", "after"} <= predicted.keys():
        return bool((predicted["before"] == predicted["after"]).all())
    validators = run.metrics.get("validators")
    return isinstance(validators, dict) and validators.get("drift") == 0


def tiles(run: Run) -> list[Tile]:
    """The main figures, with labels those before and after."""
    before, after = run.figures("before"), run.figures("after")
    shown: list[Tile] = []
    wanted = [
        ("hos", "HOS"),
        ("accuracy", "accuracy"),
        ("ece", "ECE, point estimate"),
        ("posterior_ece", "ECE, posterior"),
    ]
    for key, name in wanted:
        old, new = before.get(key), after.get(key)
        if is_number(new):
            detail, mark = "", ""
            if is_number(old):
                better = (new > old) == (key in ("hos", "accuracy"))
                detail = f"{percent(old)} before"
                mark = "" if abs(new - old) < 0.05 else "better" if better else "worse"
                if mark == "better" and "ece" in key and new > BAD_ECE:
                    mark, detail = "", f"{detail}; still high"
            shown.append(Tile(name, percent(new), detail, mark))
    certain = certain_share(run) if run.kind == "adapt" else None
    if certain is not None:
        shown.append(Tile("certain predictions", percent(100 * certain, 0), "by the posterior; see Terms"))
    validators = run.metrics.get("validators")
    if not after and isinstance(validators, dict):
        for key, name in (("coverage", "classes predicted"), ("drift", "left the source prediction")):
            if is_number(validators.get(key)):
                shown.append(Tile(name, percent(100 * validators[key], 0)))
    shown += given_labels(run.metrics.get("labels"))
    images = run.metrics.get("images", len(run.samples) if run.samples is not None else None)
    if is_number(images):
        skipped = run.metrics.get("skipped")
        shown.append(Tile("images", number(images), f"{number(skipped)} unreadable" if skipped else ""))
    if is_number(run.metrics.get("seconds")):
        shown.append(Tile("time", seconds(run.metrics["seconds"])))
    return shown


def given_labels(labels: Any) -> list[Tile]:
    """How many labels the user gave, and what they are worth."""
    if not isinstance(labels, dict) or not is_number(labels.get("count")):
        return []
    left, without = labels.get("left_out"), labels.get("without")
    worth = ""
    if is_number(left) and is_number(without):
        worth = f"left out in turn, {percent(left, 0)} right with the others, {percent(without, 0)} without any"
    return [Tile("labels given", number(labels["count"]), worth)]


def facts(run: Run) -> list[tuple[str, str]]:
    """What was run and on what."""
    model, settings = run.model, run.settings
    network = model.get("architecture") if isinstance(model.get("architecture"), dict) else {}
    classes = run.samples.classes if run.samples is not None else model.get("classes")
    seen = run.metrics.get("classes")
    told = f"{seen.get('setting')}: {seen.get('reason')}" if isinstance(seen, dict) else settings.get("setting")
    found: list[tuple[str, Any]] = [
        ("what", KINDS.get(run.kind, "run")),
        ("method", settings.get("method", run.metrics.get("method", model.get("method")))),
        ("classes of the target", told),
        ("source model", settings.get("source", settings.get("model"))),
        ("data", settings.get("data")),
        ("network", (network or {}).get("backbone", (network or {}).get("module"))),
        ("classes", class_list(classes)),
        ("seed", settings.get("seed")),
        ("run folder", run.name),
        ("when", when(run)),
    ]
    return [(name, str(value)) for name, value in found if value is not None and value != ""]


def class_list(classes: Any) -> str | None:
    if not isinstance(classes, (list, tuple)) or not classes:
        return None
    shown = ", ".join(str(c) for c in classes[:8])
    return f"{len(classes)}: {shown}{', …' if len(classes) > 8 else ''}"


def when(run: Run) -> str | None:
    if run.times is None:
        return None
    try:
        start, end = (datetime.datetime.fromtimestamp(t, datetime.UTC) for t in run.times)
    except (OverflowError, ValueError, OSError):
        return None
    return f"{start:%Y-%m-%d %H:%M} to {end:%H:%M} UTC"


def settings_table(prefix: str, run: Run) -> Table | None:
    """Every setting; those that differ from the default come first."""
    if not run.settings:
        return None
    kinds = {"adapt": (AdaptConfig, RuntimeConfig), "train": (TrainConfig, RuntimeConfig)}.get(run.kind, ())
    defaults = {f.name: f.default for kind in kinds for f in dataclasses.fields(kind)}
    docs = {name: text for kind in kinds for name, text in field_docs(kind).items()}
    method = METHODS.get(str(run.settings.get("method")))
    if run.kind == "adapt" and method is not None:
        defaults |= method.settings()
        docs |= method.setting_docs()
    rows = []
    for name, value in run.settings.items():
        changed = name in defaults and defaults[name] is not None and value != defaults[name]
        shown = setting(value)
        rows.append([Cell(name, name), Cell(shown, shown, mark="changed" if changed else ""),
                     Cell(docs.get(name, ""), docs.get(name, ""))])  # fmt: skip
    rows.sort(key=lambda row: row[1].mark != "changed")
    caption = "From config.yaml. Settings that differ from the default come first, in bold."
    return Table(f"{prefix}-settings", "All settings", caption, ["setting", "value", "meaning"], rows, wide=True)


def setting(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, (list, tuple, dict)):
        return ", ".join(str(item) for item in value)
    return "not given" if value is None else str(value)
