"""The table of a study on its page: the means that the study wrote, and strange files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from page_parser import Element, parse

from usfan.files import write_json
from usfan.report.page import write_report

AVERAGES = {
    "plain": {"A→B": {"mean": 52.0, "std": 2.8, "seeds": 2}, "avg": {"mean": 61.25}},
    "ours": {"A→B": {"mean": 80.0}, "A→*": {"mean": 80.0}, "avg": {"mean": 100.0}},
}
TABLE = {
    "title": "Office-31, closed set",
    "metric": "accuracy",
    "columns": ["A→B", "avg"],
    "results": AVERAGES,
}


def page_of(study: Path) -> Element:
    return parse(write_report([study], study / "page.html"))


def test_methods_over_tasks(tmp_path: Path) -> None:
    """The folder of a study holds settings and a log too, and is no run."""
    write_json(tmp_path / "table.json", TABLE)
    write_json(tmp_path / "study.json", {"benchmark": "office31"})
    (tmp_path / "config.yaml").write_text("command: reproduce\n")
    (tmp_path / "log.jsonl").write_text("")
    page = page_of(tmp_path)
    assert not page.all("article")
    table = page.one("all-study")
    assert table.head() == ["name", "A→B", "avg"]
    assert table.rows() == [["plain", "52.0", "61.2"], ["ours", "80.0", "100.0"]]
    assert "Office-31, closed set: accuracy" in table.text


@pytest.mark.parametrize(
    "change",
    [
        {"results": None},
        {"results": [1]},
        {"results": {"a": 1, "b": {"A→B": "x"}, "c": {"A→B": {"mean": [{}]}}}},
        {"columns": {"A→B": 1}},
        {"columns": [["A→B"], None, "A→B"]},
        {"title": ["<b>"], "metric": {}},
    ],
)
def test_strange_tables(tmp_path: Path, change: dict) -> None:
    (tmp_path / "table.json").write_text(json.dumps(TABLE | change))
    assert page_of(tmp_path).one("all-study")


def test_a_table_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "table.json").write_text("{")
    write_json(tmp_path / "study.json", {})
    assert "table.json cannot be read" in page_of(tmp_path).text
