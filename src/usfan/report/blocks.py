"""What a report is made of: figures, tables, galleries and notes, in sections. The template draws each kind."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeGuard

from markupsafe import Markup

from usfan.progress import duration


@dataclass(frozen=True)
class Figure:
    """An inline SVG with its caption. `alt` holds the numbers that matter, for those who do not see the picture."""

    kind: ClassVar[str] = "figure"
    id: str
    title: str
    size: tuple[int, int]
    body: Markup
    caption: str
    alt: str
    legend: tuple[tuple[str, str], ...] = ()
    """(CSS class of the swatch, label)."""


@dataclass(frozen=True)
class Picture:
    """A picture that a run left as a file, as a data URI."""

    kind: ClassVar[str] = "picture"
    id: str
    title: str
    uri: str
    size: tuple[int, int]
    caption: str
    alt: str


@dataclass(frozen=True)
class Cell:
    """A table cell: what is shown, what it sorts by, and how strongly it is shaded (0 to 1)."""

    text: str
    value: float | str | None = None
    shade: float | None = None
    mark: str = ""
    """CSS class."""


@dataclass(frozen=True)
class Table:
    """The first cell of each row is its heading. Sortable tables sort when a column heading is pressed."""

    kind: ClassVar[str] = "table"
    id: str
    title: str
    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    sortable: bool = True
    matrix: bool = False
    """Narrow columns with upright headings."""
    wide: bool = False


@dataclass(frozen=True)
class Thumbnail:
    """One image of a gallery; without a `uri`, `problem` says why."""

    label: str
    truth: str
    """The true class, if it differs."""
    detail: str
    path: str
    uri: str = ""
    problem: str = ""
    mark: str = ""


@dataclass(frozen=True)
class Gallery:
    kind: ClassVar[str] = "gallery"
    id: str
    title: str
    caption: str
    items: Sequence[Thumbnail]


@dataclass(frozen=True)
class Picker:
    """Buttons that bring out one class on the maps of the same section."""

    kind: ClassVar[str] = "picker"
    items: Sequence[tuple[int, str, str, str]]
    """(class, CSS class and style of its colour, name)."""


@dataclass(frozen=True)
class Note:
    """A line of text: what is left out, and why."""

    kind: ClassVar[str] = "note"
    text: str


Block = Figure | Picture | Table | Gallery | Picker | Note


@dataclass
class Section:
    id: str
    title: str
    intro: str = ""
    blocks: list[Block] = field(default_factory=list)
    columns: int = 3
    """Beside each other on a wide screen."""


def number(value: Any, digits: int = 3) -> str:
    """A figure for reading: 31.2, 0.0123, 1.2e-05, 12,345."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return "–" if value is None else str(value)
    if not is_number(value):
        return str(value)[:40]
    if value < 0:
        return f"−{number(-value, digits)}"
    if isinstance(value, int) or (value == round(value) and value < 1e9):
        return f"{int(value):,}"
    if value >= 1000:
        return f"{value:,.0f}"
    if value >= 10:
        return f"{value:.1f}"
    if value >= 1e-3:
        return f"{value:.{digits}g}"
    return f"{value:.1e}"


def percent(value: Any, digits: int = 1) -> str:
    """A percentage that is already between 0 and 100; its sign stays on the same line."""
    return f"{value:.{digits}f}\u00a0%" if is_number(value) else "–"


def seconds(value: Any) -> str:
    if not is_number(value):
        return "–"
    return f"{value:.1f} s" if round(value) < 60 else duration(value)


def is_number(value: Any) -> TypeGuard[float]:
    """A finite figure; None, text, flags and whole numbers too long for a float are not."""
    if isinstance(value, int):
        return not isinstance(value, bool) and abs(value) < 2**63
    return isinstance(value, float) and math.isfinite(value)


def plain_name(key: str) -> str:
    """A key of a file as words: `kept_epoch` → kept epoch."""
    return key.replace("_", " ")
