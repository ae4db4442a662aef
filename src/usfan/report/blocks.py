"""The parts of a page: charts, tables, galleries and notes, in sections. The template draws each kind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from markupsafe import Markup


@dataclass(frozen=True)
class Chart:
    """An inline SVG. The caption holds the numbers that matter, for those who do not see the picture."""

    kind: ClassVar[str] = "chart"
    id: str
    title: str
    svg: Markup
    caption: str


@dataclass(frozen=True)
class Picture:
    """A picture file of a run, as a data URI."""

    kind: ClassVar[str] = "picture"
    id: str
    title: str
    uri: str
    size: tuple[int, int]


@dataclass(frozen=True)
class Cell:
    """A table cell: its text, and the value it sorts by."""

    text: str
    value: float | str | None = None
    mark: str = ""
    """CSS class."""


def text_cell(text: object, mark: str = "") -> Cell:
    """A cell of words, which sorts by them."""
    return Cell(str(text), str(text), mark=mark)


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
    wide: bool = False


def table_of(
    id: str,
    title: str,
    caption: str,
    heading: str,
    names: Sequence[str],
    columns: Mapping[str, Sequence[Cell]],
    *,
    wide: bool = True,
) -> Table:
    """A table by its columns; `names` are the headings of its rows."""
    rows = []
    for i, name in enumerate(names):
        rows.append([text_cell(name), *(cells[i] for cells in columns.values())])
    return Table(
        id,
        title,
        caption,
        [heading, *columns],
        rows,
        wide=wide,
    )


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
    items: Sequence[tuple[int, str, str]]
    """(class, CSS colour, name)."""


@dataclass(frozen=True)
class Note:
    """A line of text, for example on a part that is not there."""

    kind: ClassVar[str] = "note"
    text: str


Block = Chart | Picture | Table | Gallery | Picker | Note


@dataclass
class Section:
    id: str
    title: str
    intro: str = ""
    blocks: list[Block] = field(default_factory=list)
    columns: int = 3
    """Blocks side by side on a wide screen."""
