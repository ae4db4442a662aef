"""The parts of a page: charts, tables, galleries and notes, in sections. The template draws each kind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
class Table:
    """Columns of equal length, by their headings: numbers, words, or None. The first column names the rows. A table
    sorts when a heading is pressed."""

    kind: ClassVar[str] = "table"
    id: str
    title: str
    columns: Mapping[str, Sequence[object]]
    caption: str = ""

    @property
    def rows(self) -> list[tuple[object, ...]]:
        return list(zip(*self.columns.values(), strict=True))


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


Block = Chart | Table | Gallery | Picker | Note


@dataclass(frozen=True)
class Section:
    id: str
    title: str
    blocks: Sequence[Block]
    intro: str = ""
    columns: int = 3
    """Blocks side by side on a wide screen."""
    folded: bool = False
    """Whether it opens only when its title is pressed."""
