"""The table as a plot: a group of bars per task, a whisker for the spread over seeds, a dash for the paper's number."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

from usfan.files import whole_file
from usfan.reproduce.results import Table

LONGEST = 8
"""Letters of a task that fit on one line below its bars."""


def table_figure(table: Table, path: Path) -> None:
    methods = list(table.cells)
    columns = [c for c in table.columns if any(c in table.cells[m] for m in methods)]
    if not columns:
        return
    width = 0.8 / len(methods)
    figure, axis = plt.subplots(figsize=(max(6, 1.2 * len(columns) + 2), 3.6), constrained_layout=True)
    colours = plt.get_cmap("viridis")(np.linspace(0.1, 0.9, len(methods)))
    for i, method in enumerate(methods):
        cells = [table.cells[method].get(c) for c in columns]
        places = np.arange(len(columns)) + (i - (len(methods) - 1) / 2) * width
        means = [np.nan if c is None else c.mean for c in cells]
        spread = [0.0 if c is None or c.std is None else c.std for c in cells]
        axis.bar(places, means, width, yerr=spread, color=colours[i], label=method, error_kw={"lw": 0.8})
        printed = [table.paper.get(method, {}).get(c, np.nan) for c in columns]
        axis.plot(places, printed, "_", color="black", markersize=9)
    lowest = min(c.mean for row in table.cells.values() for c in row.values())
    axis.set_ylim(max(0, lowest - 10), 100)
    wide = max(map(len, columns)) > LONGEST
    axis.set_xticks(np.arange(len(columns)), [plain(c.replace("→", "→\n") if wide else c) for c in columns])
    axis.set_ylabel(table.metric.replace("_", " ") + " (%)")
    axis.set_title(plain(f"{table.title} (dash: the paper)" if table.paper else table.title))
    figure.legend(loc="outside lower center", frameon=False, fontsize=8, ncols=len(methods))
    axis.spines[["top", "right"]].set_visible(False)
    with whole_file(path) as unfinished:
        figure.savefig(unfinished, dpi=150, format="png")
    plt.close(figure)


def plain(text: str) -> str:
    """Names of folders are no formulas."""
    return text.replace("$", r"\$")
