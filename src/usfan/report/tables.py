"""Tables of one run: classes, confusions, calibration, and any metrics.json."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from usfan.metrics.metrics import confusion, unknown_name
from usfan.report.blocks import Cell, Table, table_of, text_cell
from usfan.report.formatting import is_number, mapping, number, plain_name
from usfan.report.image_table import ImageTable
from usfan.report.run import Figures, Run

MOST_CONFUSIONS = 20


def figure_cell(value: object, mark: str = "") -> Cell:
    return Cell(number(value), float(value) if is_number(value) else None, mark=mark)


def column_cells(values: Sequence[object], marks: Sequence[str] = ()) -> list[Cell]:
    """A column of figures, all with the same decimals."""
    numbers = [value for value in values if is_number(value)]
    largest = max(map(abs, numbers), default=0)
    has_fractions = any(value != round(value) for value in numbers)
    cells = []
    for i, value in enumerate(values):
        mark = marks[i] if marks else ""
        if is_number(value) and has_fractions and 0.01 <= largest < 1000:
            decimals = 1 if largest >= 10 else 3
            text = f"{value:.{decimals}f}".replace("-", "−")
            cells.append(Cell(text, float(value), mark=mark))
        else:
            cells.append(figure_cell(value, mark))
    return cells


def change_cells(before: Sequence[object], after: Sequence[object]) -> list[Cell]:
    """By how much each figure rose."""
    cells = []
    for old, new in zip(before, after, strict=True):
        if not is_number(old) or not is_number(new):
            cells.append(Cell("–"))
            continue
        change = new - old
        mark = "better" if change > 0 else "worse"
        text = f"{change:+.1f}".replace("-", "−")
        cells.append(Cell(text, change, mark=mark if abs(change) >= 0.05 else ""))
    return cells


def decisions(images: ImageTable, when: str) -> Tensor:
    """The predicted class; K if the final model flagged the image as unknown."""
    predicted = images.predicted[when]
    if when == "after" and images.unknown is not None:
        return torch.where(images.unknown, len(images.classes), predicted)
    return predicted


def row_names(images: ImageTable) -> list[str]:
    """The classes, and the unknown class of an open set."""
    names = list(images.classes)
    labels = images.labels
    if images.unknown is not None or (labels is not None and int(labels.max()) == len(names)):
        names.append(unknown_name(names))
    return names


def class_table(
    prefix: str,
    run: Run,
    images: ImageTable,
) -> Table:
    """How often each class is predicted, how certain and, if labels exist, how accurate."""
    names = row_names(images)
    length = len(images.classes) + 1
    columns: dict[str, list[Cell]] = {}
    if images.labels is not None:
        counts = torch.bincount(images.labels, minlength=length)
        columns["images"] = column_cells(counts.tolist())
        accuracy: dict[str, list[object]] = {}
        for when in ("before", "after"):
            by_class = mapping(run.figures(when).get("per_class_accuracy"))
            accuracy[when] = [by_class.get(name) for name in names]
            columns[f"accuracy {when} (%)"] = column_cells(accuracy[when])
        columns["change"] = change_cells(accuracy["before"], accuracy["after"])
    for when in images.predicted:
        counts = torch.bincount(decisions(images, when), minlength=length)
        columns[f"predicted {when}"] = column_cells(counts.tolist())
    weight = images.tensors["weight"].double()
    sums = torch.bincount(decisions(images, "after"), weights=weight, minlength=length)
    means = sums / counts  # nan for an empty class
    columns["mean weight"] = column_cells([m if is_number(m) else None for m in means.tolist()])
    caption = "Press a heading to sort by it."
    return table_of(
        f"{prefix}-classes",
        "By class",
        caption,
        "class",
        names,
        columns,
    )


def confusion_table(prefix: str, images: ImageTable) -> list[Table]:
    """The largest confusions after adaptation."""
    if images.labels is None:
        return []
    names = row_names(images)
    size = len(images.classes) + 1
    counts = confusion(images.labels, decisions(images, "after"), size)
    totals = counts.sum(dim=1).tolist()
    wrong = counts.fill_diagonal_(0).flatten()
    entries, positions = wrong.topk(min(MOST_CONFUSIONS, len(wrong)))
    rows = []
    for entry, position in zip(entries.tolist(), positions.tolist(), strict=True):
        if entry:
            true, predicted = divmod(position, size)
            share = figure_cell(100 * entry / totals[true])
            classes = [text_cell(names[true]), text_cell(names[predicted])]
            rows.append([*classes, figure_cell(entry), share])
    caption = "Images of one class that are assigned to another after adaptation."
    columns = ["true class", "predicted", "images", "share of the class (%)"]
    id = f"{prefix}-confusions"
    return [
        Table(
            id,
            "Largest confusions",
            caption,
            columns,
            rows,
            wide=True,
        )
    ]


def before_after_table(prefix: str, run: Run) -> list[Table]:
    """Every figure of the evaluations before and after adaptation."""
    evaluations = {when: run.figures(when) for when in ("before", "after")}
    names = [name for name, value in evaluations["after"].items() if is_number(value)]
    columns = {}
    for when, figures in evaluations.items():
        columns[when] = [figure_cell(figures.get(name)) for name in names]
    title = "Figures before and after"
    rows = [plain_name(name) for name in names]
    return (
        [
            table_of(
                f"{prefix}-evaluations",
                title,
                "",
                "figure",
                rows,
                columns,
            )
        ]
        if rows
        else []
    )


def metrics_tables(prefix: str, metrics: Figures) -> list[Table]:
    """Any metrics.json: plain figures in one table, each mapping in its own."""
    plain: Figures = {}
    tables: list[Table] = []
    for key, value in metrics.items():
        if is_number(value) or isinstance(value, str):
            plain[key] = value
        elif isinstance(value, dict) and value:
            id = f"{prefix}-figures-{len(tables)}"
            tables.append(nested_table(id, plain_name(str(key)), value))
    if plain:
        tables.insert(0, plain_table(f"{prefix}-figures", "Figures", plain))
    return tables


def plain_table(
    id: str,
    title: str,
    figures: Figures,
) -> Table:
    names = [plain_name(str(name)) for name in figures]
    columns = {"value": [figure_cell(value) for value in figures.values()]}
    return table_of(
        id,
        title,
        "From metrics.json.",
        "figure",
        names,
        columns,
        wide=False,
    )


def nested_table(
    id: str,
    title: str,
    figures: Figures,
) -> Table:
    """A mapping of mappings has one row for each of them; any other mapping is a plain table."""
    inner = {str(name): value for name, value in figures.items() if isinstance(value, dict)}
    if not inner:
        return plain_table(id, title, figures)
    keys: dict[str, None] = {}
    for row in inner.values():
        keys |= {key: None for key, value in row.items() if is_number(value)}
    columns = {}
    for key in keys:
        columns[plain_name(str(key))] = column_cells([row.get(key) for row in inner.values()])
    return table_of(
        id,
        title,
        "From metrics.json.",
        "name",
        list(inner),
        columns,
        wide=False,
    )
