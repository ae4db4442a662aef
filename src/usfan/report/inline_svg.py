"""matplotlib figures as SVG inside the page. Their colours become CSS variables, so that they follow the theme."""

from __future__ import annotations

import io
import re
from contextlib import AbstractContextManager

import matplotlib
from markupsafe import Markup
from matplotlib import style
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.typing import RcStyleType

from usfan.report.figures import PALETTE

TEXT = "#555d66"
GRID = "#e8e6df"
THEME = {colour: f"var(--k{i})" for i, colour in enumerate(PALETTE)}
THEME |= {TEXT: "var(--soft)", GRID: "var(--grid)"}
STYLE: RcStyleType = {
    "axes.axisbelow": True,
    "axes.edgecolor": TEXT,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.labelcolor": TEXT,
    "axes.spines.left": False,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "figure.figsize": (5, 3.2),
    "font.size": 11,
    "grid.color": GRID,
    "svg.fonttype": "none",
    "text.color": TEXT,
    "text.parse_math": False,
    "xtick.color": TEXT,
    "xtick.major.pad": 6,
    "xtick.major.size": 0,
    "ytick.color": TEXT,
    "ytick.major.size": 0,
}
CHANGES = {
    "<style.*?</style>": "",
    " xlink:href=": " href=",
    r' id="class-(\d+)"': r' class="spots" data-class="\1"',
    ' id="(?![mp][0-9a-f]{10}")[^"]*"': "",  # nothing refers to it
}
"""Patterns in matplotlib's text, and what stands there in a page."""


def report_style() -> AbstractContextManager[None]:
    """matplotlib's defaults with the report's style. The caller's settings are back after the block."""
    return style.context(STYLE, after_reset=True)


def inline_svg(
    figure: Figure,
    id: str,
    label: str,
) -> Markup:
    """The `<svg>` element of a figure: the same every time, with ids that no other figure has."""
    figure.set_layout_engine("none")  # fixed margins: they take half the time
    (axes,) = figure.axes
    axes.set_position((0.15, 0.17, 0.81, 0.8) if axes.axison else (0, 0, 1, 1))
    for part in (figure.patch, axes.patch):
        part.set(facecolor="none", edgecolor="none")
    buffer = io.StringIO()
    no_metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    with matplotlib.rc_context({"svg.hashsalt": id}):
        # savefig would draw it twice
        FigureCanvasSVG(figure).print_svg(buffer, metadata=no_metadata)
    _, size, text = re.split('<svg .*?viewBox="(.*?)".*?>', buffer.getvalue(), maxsplit=1)
    for pattern, replacement in CHANGES.items():
        text = re.sub(pattern, replacement, text)
    text = re.sub("#[0-9a-f]{6}", themed, text)
    start = Markup('<svg viewBox="{}" role="img" aria-label="{}">').format(size, label)
    return start + Markup(text)


def themed(colour: re.Match[str]) -> str:
    return THEME.get(colour[0], colour[0])
