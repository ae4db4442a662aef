"""matplotlib figures as SVG inside the page. Their colours become CSS variables, so that they follow the theme."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Iterator
from xml.etree import ElementTree

import matplotlib
from markupsafe import Markup
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.typing import RcKeyType

from usfan.report.figures import PALETTE

TEXT = "#555d66"
GRID = "#e8e6df"
THEME = {colour: f"var(--k{i})" for i, colour in enumerate(PALETTE)}
THEME |= {TEXT: "var(--soft)", GRID: "var(--grid)"}
STYLE: dict[RcKeyType, object] = {
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
COORDINATES = {"d", "x", "y", "width", "height", "transform"}
REFERENCE = re.compile("[mp][0-9a-f]{10}")
"""Ids of markers and clip paths, which other elements refer to."""


@contextlib.contextmanager
def report_style() -> Iterator[None]:
    """matplotlib's defaults with the report's style. The caller's settings are back after the block."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(STYLE)
        yield


def inline_svg(
    figure: Figure,
    id: str,
    label: str,
) -> Markup:
    """The `<svg>` element of a figure: small, the same every time, with ids that no other figure has."""
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
    text = re.sub(r' xmlns="[^"]*"|<style.*?</style>|xlink:(?=href)', "", buffer.getvalue())
    root = ElementTree.fromstring(text)
    for element in reversed(list(root.iter())):
        clean(element)
    for name in ("width", "height", "version"):
        del root.attrib[name]
    root.attrib |= {"role": "img", "aria-label": label}
    return Markup(re.sub(r"\s*\n\s*", "", ElementTree.tostring(root, encoding="unicode")))


def clean(element: ElementTree.Element) -> None:
    """Drop ids that nothing refers to, round coordinates, and replace colours by those of the theme."""
    attributes = element.attrib
    id = attributes.pop("id", "")
    if id.startswith("class-"):
        attributes |= {"class": "spots", "data-class": id.removeprefix("class-")}
    elif REFERENCE.fullmatch(id):
        attributes["id"] = id
    for name in COORDINATES & attributes.keys():
        attributes[name] = re.sub(r"\d+\.\d+", rounded, attributes[name])
    if "style" in attributes:
        style = re.sub("font-family:[^;]*(; )?", "", attributes["style"])
        attributes["style"] = re.sub("#[0-9a-f]{6}", themed, style)
    styles = {child.get("style", "") for child in element if child.tag == "use"}
    if len(styles) == 1 and all(child.tag == "use" for child in element):
        attributes["style"] = styles.pop()
        for child in element:
            child.attrib.pop("style", None)


def rounded(digits: re.Match[str]) -> str:
    return f"{float(digits[0]):.2f}".rstrip("0").rstrip(".")


def themed(colour: re.Match[str]) -> str:
    return THEME.get(colour[0], colour[0])
