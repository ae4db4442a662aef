"""A report as a browser's parser sees it, for tests without a browser."""

from __future__ import annotations

from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path

VOID = {"meta", "link", "img", "br"}


@dataclass
class Element:
    tag: str
    attributes: dict[str, str]
    children: list[Element] = field(default_factory=list)
    words: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """All text inside, spaces made plain."""
        return " ".join(" ".join([*self.words, *(c.text for c in self.children)]).split())

    def all(self, tag: str = "", css: str = "") -> list[Element]:
        found = []
        for child in self.children:
            if tag in ("", child.tag) and (
                not css or css in child.attributes.get("class", "").split()
            ):
                found.append(child)
            found += child.all(tag, css)
        return found

    def one(self, id: str) -> Element:
        return next(e for e in self.all() if e.attributes.get("id") == id)

    def rows(self) -> list[list[str]]:
        """The body of a table, as text."""
        body = self.all("tbody")[0]
        return [[cell.text for cell in row.children] for row in body.children]

    def head(self) -> list[str]:
        return [cell.text for cell in self.all("thead")[0].all("th")]


class Parser(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.root = Element("", {})
        self.open = [self.root]
        self.glued = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "wbr":  # a place where a name may be broken is no end of it
            self.glued = True
            return
        element = Element(tag, {k: v or "" for k, v in attrs})
        self.open[-1].children.append(element)
        if tag not in VOID:
            self.open.append(element)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.open[-1].children.append(Element(tag, {k: v or "" for k, v in attrs}))

    def handle_endtag(self, tag: str) -> None:
        assert self.open[-1].tag == tag, f"</{tag}> closes <{self.open[-1].tag}>"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        words = self.open[-1].words
        if self.glued and words:
            words[-1] += data
        else:
            words.append(data)
        self.glued = False


def parse(page: Path) -> Element:
    """The document; a tag that is not closed, or closed twice, is an error."""
    parser = Parser()
    parser.feed(page.read_text(encoding="utf-8"))
    parser.close()
    assert len(parser.open) == 1
    return parser.root
