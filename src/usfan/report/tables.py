"""Tables of one run: classes, confusions, calibration, settings, and any metrics.json."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from usfan.metrics.metrics import confusion
from usfan.metrics.stored_images import ImageTable
from usfan.report.blocks import Table
from usfan.report.formatting import is_number, mapping, plain_name
from usfan.report.run import Run

MOST_CONFUSIONS = 20


def class_table(prefix: str, run: Run, images: ImageTable) -> Table:
    """How often each class is predicted, how certain and, if labels exist, how accurate."""
    names = images.names
    columns: dict[str, list[object]] = {"class": [*names]}
    if images.labels is not None:
        columns["images"] = torch.bincount(images.labels, minlength=len(names)).tolist()
        for when in ("before", "after"):
            by_class = mapping(run.figures(when).get("per_class_accuracy"))
            columns[f"accuracy {when} (%)"] = [by_class.get(name) for name in names]
        columns["change"] = changes(*list(columns.values())[-2:])
    for when in images.predicted:
        counts = torch.bincount(images.decisions(when), minlength=len(names))
        columns[f"predicted {when}"] = counts.tolist()
    weight = images.tensors["weight"].double()
    sums = torch.bincount(images.decisions("after"), weights=weight, minlength=len(names))
    means = sums / counts  # nan for an empty class
    columns["mean weight"] = [mean if is_number(mean) else None for mean in means.tolist()]
    return Table(f"{prefix}-classes", "By class", columns)


def changes(before: Sequence[object], after: Sequence[object]) -> list[object]:
    """By how much each figure rose."""
    result: list[object] = []
    for old, new in zip(before, after, strict=True):
        result.append(new - old if is_number(old) and is_number(new) else None)
    return result


def confusion_table(prefix: str, images: ImageTable) -> list[Table]:
    """The largest confusions after adaptation."""
    if images.labels is None:
        return []
    names = images.names
    counts = confusion(images.labels, images.decisions("after"), len(names))
    totals = counts.sum(dim=1)
    wrong = counts.fill_diagonal_(0).flatten()
    entries, positions = wrong.topk(min(MOST_CONFUSIONS, int(wrong.count_nonzero())))
    true = positions // len(names)
    predicted = positions % len(names)
    columns: dict[str, list[object]] = {
        "true class": [names[k] for k in true],
        "predicted": [names[k] for k in predicted],
        "images": entries.tolist(),
        "share of the class (%)": (100 * entries / totals[true]).tolist(),
    }
    caption = "Images of one class that are assigned to another after adaptation."
    return [Table(f"{prefix}-confusions", "Largest confusions", columns, caption)]


def before_after_table(prefix: str, run: Run) -> list[Table]:
    """Every figure of the evaluations before and after adaptation."""
    before = run.figures("before")
    after = run.figures("after")
    names = [name for name, value in after.items() if is_number(value)]
    if not names:
        return []
    columns: dict[str, list[object]] = {
        "figure": [plain_name(name) for name in names],
        "before": [before.get(name) for name in names],
        "after": [after[name] for name in names],
    }
    return [Table(f"{prefix}-evaluations", "Figures before and after", columns)]


def metrics_tables(prefix: str, metrics: Mapping[str, object]) -> list[Table]:
    """Any metrics.json: plain figures in one table, each mapping in its own."""
    plain: dict[str, object] = {}
    tables: list[Table] = []
    for name, value in metrics.items():
        if isinstance(value, dict) and value:
            tables.append(figures_table(f"{prefix}-figures-{len(tables)}", name, value))
        elif is_number(value) or isinstance(value, str):
            plain[name] = value
    if plain:
        tables.insert(0, figures_table(f"{prefix}-figures", "Figures", plain))
    return tables


def figures_table(id: str, title: str, figures: Mapping[str, object]) -> Table:
    """A row for each name, with its value or, if that is a mapping, the figures in it."""
    rows = []
    headings: dict[str, None] = {}
    for value in figures.values():
        row = value if isinstance(value, dict) else {"value": value}
        rows.append(row)
        headings |= dict.fromkeys(row)
    columns: dict[str, list[object]] = {"name": list(figures)}
    for heading in headings:
        values = [row.get(heading) for row in rows]
        if any(is_number(value) or isinstance(value, str) for value in values):
            columns[heading] = values
    return Table(id, title, columns)


def settings_table(prefix: str, run: Run) -> list[Table]:
    if not run.settings:
        return []
    columns = {
        "setting": list(run.settings),
        "value": [setting_text(value) for value in run.settings.values()],
    }
    return [Table(f"{prefix}-settings", "From config.yaml", columns)]


def setting_text(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, (list, tuple, dict)):
        return ", ".join(str(item) for item in value)
    return "not given" if value is None else str(value)


FIGURES = {
    "accuracy": "accuracy (%)",
    "hos": "HOS (%)",
    "ece": "ECE (%)",
    "posterior_ece": "posterior ECE (%)",
    "nll": "NLL",
    "posterior_nll": "posterior NLL",
    "images": "images",
    "seconds": "seconds",
}
"""Figures by which runs are compared, and their headings."""


def comparison_table(runs: list[Run]) -> Table:
    """A row for each run: its figures after adaptation, and the settings in which the runs differ."""
    columns: dict[str, list[object]] = {"run": [run.name for run in runs]}
    for key, heading in FIGURES.items():
        values = [run.figures("after").get(key, run.metrics.get(key)) for run in runs]
        if any(is_number(value) for value in values):
            columns[heading] = values
    names: dict[str, None] = {}
    for run in runs:
        names |= dict.fromkeys(run.settings)
    for name in names:
        texts = [setting_text(run.settings.get(name, "–")) for run in runs]
        if len(set(texts)) > 1:
            columns[name] = [*texts]
    return Table("compare-runs", "Figures, and settings that differ", columns)
