"""Several runs side by side: their figures, and the settings they differ in."""

from __future__ import annotations

from typing import Any

import numpy as np

from usfan.report.blocks import Block, Cell, Figure, Note, Section, Table, is_number, percent
from usfan.report.overview import certain_share, kept_epoch, main_figure, setting
from usfan.report.read_run import Run
from usfan.report.svg import Axes, f1
from usfan.report.tables import change_cell, column_cells

COLUMNS = {
    "accuracy": "accuracy (%)",
    "mean_class_accuracy": "mean class accuracy (%)",
    "hos": "HOS (%)",
    "ece": "ECE (%)",
    "posterior_ece": "posterior ECE (%)",
    "nll": "NLL",
    "posterior_nll": "posterior NLL",
}
MOST_COMPARED = 12
"""Runs whose predictions are compared pair by pair."""


def comparison(runs: list[Run]) -> Section:
    blocks: list[Block] = [figures_table(runs)]
    figure = shift_figure(runs)
    if figure is not None:
        blocks.append(figure)
    blocks += [settings_table(runs), *agreement(runs)]
    return Section("compare", "Side by side", f"{len(runs)} runs: what they reached, and how they differ.", blocks, 2)


def figures_table(runs: list[Run]) -> Table:
    """One row per run; the best value of a column is marked."""
    columns: dict[str, list[Any]] = {}
    for key, name in COLUMNS.items():
        values = [run.figures("after").get(key, run.metrics.get(key)) for run in runs]
        columns[name] = values
    columns["certain (%)"] = [None if (c := certain_share(r)) is None else 100 * c for r in runs]
    columns["kept epoch"] = [kept_epoch(run) for run in runs]
    columns["images"] = [run.metrics.get("images", run.metrics.get("count")) for run in runs]
    columns["seconds"] = [run.metrics.get("seconds") for run in runs]
    columns = {n: v for n, v in columns.items() if any(is_number(x) for x in v)}
    best = {name: best_of(name, values) for name, values in columns.items()}
    rows = [[Cell(run.name, run.name)] for run in runs]
    for name, values in columns.items():
        marks = ["best" if is_number(v) and v == best[name] else "" for v in values]
        for i, cell in enumerate(column_cells(values, marks)):
            rows[i].append(cell)
            if name == COLUMNS["accuracy"]:
                rows[i].append(change_cell(runs[i].figures("before").get("accuracy"), values[i]))
    titles = ["run"]
    for name in columns:
        titles += [name, "against source"] if name == COLUMNS["accuracy"] else [name]
    return Table("compare-figures", "Figures", "After adaptation; the best in bold. Press a heading to sort.",
                 titles, rows, wide=True)  # fmt: skip


def best_of(name: str, values: list[Any]) -> float | None:
    found = [v for v in values if is_number(v)]
    if len(found) < 2 or name in ("kept epoch", "images", "certain (%)"):
        return None
    higher = "accuracy" in name or "HOS" in name
    return max(found) if higher else min(found)


def shift_figure(runs: list[Run]) -> Figure | None:
    """Before and after, a line of two dots for each run."""
    pairs = []
    for run in runs:
        key, _ = main_figure(run)
        before, after = run.figures("before").get(key), run.figures("after").get(key)
        if is_number(before) and is_number(after):
            pairs.append((run.name, before, after))
    if len(pairs) < 2:
        return None
    low = min(min(b, a) for _, b, a in pairs)
    axes = Axes((max(0.0, low - 5), 100), (0, len(pairs)), (360, 50 + 34 * len(pairs)), left=12)
    axes.frame("%", "", y_ticks=[])
    for i, (name, before, after) in enumerate(pairs):
        y = len(pairs) - i - 0.7
        axes.add(
            '<path class="join" d="M{} {}H{}"/>', f1(axes.across(before)), f1(axes.down(y)), f1(axes.across(after))
        )
        axes.dot(before, y, "c-before", f"{name}, before: {percent(before)}", 4)
        axes.dot(after, y, "c-after", f"{name}, after: {percent(after)}", 5)
        short = name if len(name) <= 44 else f"…{name[-43:]}"
        axes.add('<text class="tick" x="{}" y="{}">{}</text>', axes.left, f1(float(axes.down(y)) - 9), short)
    told = "; ".join(f"{name} {percent(before)} → {percent(after)}" for name, before, after in pairs)
    name = "HOS" if any(main_figure(r)[0] == "hos" for r in runs) else "Accuracy"
    return Figure("compare-shift", f"{name} before and after", axes.size, axes.body(), f"{told}.",
                  f"Before and after adaptation: {told}.", (("c-before", "before"), ("c-after", "after")))  # fmt: skip


def settings_table(runs: list[Run]) -> Table | Note:
    names = list(dict.fromkeys(name for run in runs for name in run.settings))
    rows = []
    for name in names:
        values = [run.settings.get(name, "–") for run in runs]
        if any(value != values[0] for value in values):
            rows.append([Cell(name, name), *(Cell(setting(v), setting(v)) for v in values)])
    if not any(run.settings for run in runs):
        return Note("No run has a config.yaml: how their settings differ is not known.")
    if not rows:
        return Note("All runs have the same settings.")
    caption = "From each run's config.yaml."
    header = ["setting", *(run.name for run in runs)]
    return Table("compare-settings", "Settings that differ", caption, header, rows, wide=True)


def agreement(runs: list[Run]) -> list[Block]:
    """How often two runs on the same images give the same class."""
    usable = [(r.name, r.samples) for r in runs if r.samples is not None and "after" in r.samples.predicted]
    if not usable:
        return []
    _, first = usable[0]
    same = [(name, s) for name, s in usable if s.classes == first.classes and s.paths == first.paths]
    if not 2 <= len(same) <= MOST_COMPARED or first.paths is None:
        return []
    predicted = [samples.predicted["after"] for _, samples in same]
    shares = np.array([[float((a == b).double().mean()) for b in predicted] for a in predicted])
    rows = [
        [Cell(name), *(Cell(f"{100 * s:.1f}", shade=float(s)) for s in row)]
        for (name, _), row in zip(same, shares, strict=True)
    ]
    return [Table("compare-agreement", "Agreement (%)", "Share of the images that two runs give the same class.",
                  ["run", *(name for name, _ in same)], rows, sortable=False, wide=True)]  # fmt: skip
