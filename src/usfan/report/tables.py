"""Tables of one run: classes, confusions, calibration, settings, and whatever else metrics.json holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from usfan.evaluation.metrics import confusion, unknown_name
from usfan.report.blocks import Cell, Note, Table, is_number, number, plain_name
from usfan.report.read_run import Run
from usfan.report.read_samples import Samples

WIDEST_MATRIX = 16
"""With more classes than this, only the largest confusions are shown."""
CONFUSIONS = 20
CALIBRATION = {
    "ece": "ECE (%)",
    "adaptive_ece": "adaptive ECE (%)",
    "nll": "NLL",
    "brier": "Brier",
    "aurc": "AURC (%)",
}


def figure_cell(value: Any, mark: str = "") -> Cell:
    if not is_number(value):
        return Cell("–" if value is None else str(value), mark=mark)
    return Cell(number(value), float(value), mark=mark)


def column_cells(values: Sequence[Any], marks: Sequence[str] | None = None) -> list[Cell]:
    """A column of figures, all with the same decimals."""
    marks = marks or [""] * len(values)
    numbers = [v for v in values if is_number(v)]
    if any(v != round(v) for v in numbers) and 0.01 <= max(map(abs, numbers)) < 1000:
        decimals = 1 if max(map(abs, numbers)) >= 10 else 3
        shown = [f"{v:.{decimals}f}".replace("-", "−") if is_number(v) else "" for v in values]
        return [Cell(s, float(v), mark=m) if s else Cell("–") for s, v, m in zip(shown, values, marks, strict=True)]
    return [figure_cell(v, m) for v, m in zip(values, marks, strict=True)]


def percent_cell(value: Any) -> Cell:
    return Cell(f"{value:.1f}", float(value)) if is_number(value) else Cell("–")


def change_cell(before: Any, after: Any, *, higher_is_better: bool = True) -> Cell:
    if not (is_number(before) and is_number(after)):
        return Cell("–")
    change = after - before
    good = (change > 0) == higher_is_better
    mark = "" if abs(change) < 0.05 else "better" if good else "worse"
    return Cell(f"{change:+.1f}".replace("-", "−"), change, mark=mark)


def decisions(samples: Samples, when: str) -> Tensor:
    """The predicted class; K if the final model flagged the image as unknown."""
    predicted = samples.predicted[when]
    if when == "after" and samples.unknown is not None:
        predicted = torch.where(samples.unknown, len(samples.classes), predicted)
    return predicted


def class_table(prefix: str, run: Run, samples: Samples) -> Table:
    """How often each class is predicted, how certain and, if labels exist, how accurate."""
    K, names = len(samples.classes), list(samples.classes)
    open_set = samples.unknown is not None or (samples.labels is not None and int(samples.labels.max()) == K)
    names += [unknown_name(names)] if open_set else []
    rows = [[Cell(name, name)] for name in names]
    columns = ["class"]
    if samples.labels is not None:
        columns += ["images", "accuracy before (%)", "accuracy after (%)", "change"]
        images = count(samples.labels, K).tolist()
        stored = (run.figures(when).get("per_class_accuracy") for when in ("before", "after"))
        accuracy = [found if isinstance(found, dict) else {} for found in stored]
        for k, name in enumerate(names):
            before, after = (known.get(name) for known in accuracy)
            rows[k] += [figure_cell(images[k]), percent_cell(before), percent_cell(after), change_cell(before, after)]
    for when in samples.predicted:
        columns.append(f"predicted {when}")
        given = count(decisions(samples, when), K).tolist()
        for k, row in enumerate(rows):
            row.append(figure_cell(given[k]))
    weight = samples.get("weight")
    if weight is not None and "after" in samples.predicted:
        columns.append("mean weight")
        decided = decisions(samples, "after")
        sums = torch.bincount(decided, weights=weight.double(), minlength=K + 1)
        means = (sums / count(decided, K)).tolist()  # nan for a class that nobody got
        for k, row in enumerate(rows):
            row.append(Cell(f"{means[k]:.2f}", means[k]) if is_number(means[k]) else Cell("–"))
    return Table(f"{prefix}-classes", "By class", "Press a heading to sort by it.", columns, rows, wide=True)


def count(index: Tensor, K: int) -> Tensor:
    return torch.bincount(index.long(), minlength=K + 1)


def confusion_tables(prefix: str, samples: Samples) -> list[Table | Note]:
    """The matrix after adaptation if it fits, and the largest confusions."""
    if samples.labels is None or "after" not in samples.predicted:
        return []
    K = len(samples.classes)
    open_set = samples.unknown is not None or int(samples.labels.max()) == K
    names = [*samples.classes, unknown_name(samples.classes)] if open_set else list(samples.classes)
    tables = {w: confusion(samples.labels, decisions(samples, w), K + 1) for w in samples.predicted}
    blocks: list[Table | Note] = []
    if len(names) <= WIDEST_MATRIX:
        blocks.append(matrix_table(f"{prefix}-confusion", tables["after"][: len(names), : len(names)], names))
    blocks.append(largest_confusions(f"{prefix}-confusions", tables, names, wide=not blocks))
    return blocks


def matrix_table(id: str, counts: Tensor, names: list[str]) -> Table:
    shares = counts.double() / counts.sum(dim=1, keepdim=True).clamp_min(1)
    rows = [
        [Cell(name)]
        + [Cell(number(n) if n else "·", shade=s) for n, s in zip(counts[i].tolist(), shares[i].tolist(), strict=True)]
        for i, name in enumerate(names)
    ]
    right, total = int(counts.diagonal().sum()), int(counts.sum())
    caption = (
        f"Rows: true class; columns: predicted after adaptation. {right:,} of {total:,} images lie on the diagonal."
    )
    return Table(id, "Confusion", caption, ["true \\ predicted", *names], rows, sortable=False, matrix=True)


def largest_confusions(id: str, tables: dict[str, Tensor], names: list[str], *, wide: bool) -> Table | Note:
    after = tables["after"].clone().fill_diagonal_(0)
    values, places = after.flatten().topk(min(CONFUSIONS, after.numel()))
    rows = []
    for value, place in zip(values.tolist(), places.tolist(), strict=True):
        if value:
            true, given = divmod(place, len(after))
            share = 100 * value / max(int(tables["after"][true].sum()), 1)
            cells = [Cell(names[true], names[true]), Cell(names[given], names[given])]
            if "before" in tables:
                cells.append(figure_cell(int(tables["before"][true, given])))
            rows.append([*cells, figure_cell(value), percent_cell(share)])
    if not rows:
        return Note("No image is given to a wrong class after adaptation.")
    columns = ["true class", "predicted", *(["before"] if "before" in tables else []), "after", "of the class (%)"]
    return Table(id, "Largest confusions", "Images of one class that are given to another.", columns, rows, wide=wide)


def calibration_table(prefix: str, run: Run) -> Table | None:
    """ECE and its kin: before and after, point estimate against posterior."""
    before, after = run.figures("before"), run.figures("after")
    rows = []
    for key, name in CALIBRATION.items():
        values = [d.get(k) for k in (key, f"posterior_{key}") for d in (before, after)]
        if any(is_number(v) for v in values):
            rows.append([Cell(name, name), *(figure_cell(v) for v in values)])
    if not rows:
        return None
    columns = ["figure", "point, before", "point, after", "posterior, before", "posterior, after"]
    caption = "Lower is better in every row. The predicted class is the point estimate's."
    return Table(f"{prefix}-calibration", "Calibration figures", caption, columns, rows, sortable=False, wide=True)


def metrics_tables(prefix: str, metrics: dict[str, Any]) -> list[Table]:
    """Any metrics.json: plain figures in one table, a mapping of mappings in one table each."""
    plain = [[Cell(plain_name(k), k), figure_cell(v)] for k, v in metrics.items() if is_number(v) or isinstance(v, str)]
    tables = []
    if plain:
        tables.append(Table(f"{prefix}-figures", "Figures", "From metrics.json.", ["figure", "value"], plain))
    for key, value in metrics.items():
        if isinstance(value, dict) and value:
            tables.append(nested_table(f"{prefix}-figures-{len(tables)}", key, value))
    return tables


def nested_table(id: str, title: str, value: dict[str, Any]) -> Table:
    inner = {k: v for k, v in value.items() if isinstance(v, dict)}
    if inner:
        columns = list(dict.fromkeys(c for row in inner.values() for c, v in row.items() if is_number(v)))
        cells = [column_cells([row.get(c) for row in inner.values()]) for c in columns]
        rows = [[Cell(str(k), str(k)), *(column[i] for column in cells)] for i, k in enumerate(inner)]
        return Table(id, str(title), "From metrics.json.", ["name", *map(plain_name, columns)], rows)
    rows = [[Cell(plain_name(str(k)), str(k)), figure_cell(v)] for k, v in value.items()]
    return Table(id, plain_name(str(title)), "From metrics.json.", ["figure", "value"], rows)
