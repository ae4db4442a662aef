"""Several runs side by side: their figures, and the settings they differ in."""

from __future__ import annotations

from collections.abc import Sequence

from usfan.report.blocks import Block, Cell, Note, Section, Table, table_of, text_cell
from usfan.report.formatting import is_number
from usfan.report.overview import certain_share, kept_epoch, setting_text
from usfan.report.run import Run
from usfan.report.tables import change_cells, column_cells

COLUMNS = {
    "accuracy": ("accuracy (%)", "high"),
    "mean_class_accuracy": ("mean class accuracy (%)", "high"),
    "hos": ("HOS (%)", "high"),
    "ece": ("ECE (%)", "low"),
    "posterior_ece": ("posterior ECE (%)", "low"),
    "nll": ("NLL", "low"),
    "posterior_nll": ("posterior NLL", "low"),
    "images": ("images", ""),
    "seconds": ("seconds", "low"),
}
"""Key → heading, and whether high or low values are good."""


def comparison(runs: list[Run]) -> Section:
    blocks: list[Block] = [figures_table(runs), settings_table(runs)]
    intro = f"{len(runs)} runs: what they reached, and how they differ."
    return Section("compare", "Side by side", intro, blocks, 2)


def figures_table(runs: list[Run]) -> Table:
    """One row per run; the best value of a column is marked."""
    columns: dict[str, list[Cell]] = {}
    for key, (heading, good) in COLUMNS.items():
        values = [run.figures("after").get(key, run.metrics.get(key)) for run in runs]
        if not any(is_number(value) for value in values):
            continue
        columns[heading] = marked_cells(values, good)
        if key == "accuracy":
            source = [run.figures("before").get(key) for run in runs]
            columns["against source"] = change_cells(source, values)
    shares = [certain_share(run) for run in runs]
    columns["certain (%)"] = column_cells([None if s is None else 100 * s for s in shares])
    columns["kept epoch"] = column_cells([kept_epoch(run) for run in runs])
    caption = "After adaptation; the best in bold. Press a heading to sort."
    names = [run.name for run in runs]
    return table_of(
        "compare-figures",
        "Figures",
        caption,
        "run",
        names,
        columns,
    )


def marked_cells(values: Sequence[object], good: str) -> list[Cell]:
    """A column with its best value marked; `good` is high, low, or empty if no value is better than another."""
    numbers = [value for value in values if is_number(value)]
    best = None
    if good and len(numbers) > 1:
        best = max(numbers) if good == "high" else min(numbers)
    marks = ["best" if is_number(value) and value == best else "" for value in values]
    return column_cells(values, marks)


def settings_table(runs: list[Run]) -> Table | Note:
    names: dict[str, None] = {}
    for run in runs:
        names |= dict.fromkeys(run.settings)
    rows = []
    for name in names:
        values = [setting_text(run.settings.get(name, "–")) for run in runs]
        if len(set(values)) > 1:
            rows.append([text_cell(name), *map(text_cell, values)])
    if not names:
        return Note("No run has a config.yaml: how their settings differ is not known.")
    if not rows:
        return Note("All runs have the same settings.")
    caption = "From each run's config.yaml."
    columns = ["setting", *(run.name for run in runs)]
    return Table(
        "compare-settings",
        "Settings that differ",
        caption,
        columns,
        rows,
        wide=True,
    )
