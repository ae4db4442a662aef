"""The table of a study on its page: means, the best of a column, and strange files."""

from __future__ import annotations

import json
from pathlib import Path

from page_parser import Element, parse

from usfan.files import write_json
from usfan.report.page import write_report


def cell(
    method: str, task: str, seed: int, accuracy: float, ece: float, seconds: float = 1.0
) -> dict:
    return {
        "method": method,
        "task": task,
        "seed": seed,
        "accuracy": accuracy,
        "ece": ece,
        "seconds": seconds,
    }


ROWS = [
    cell("plain", "A→B", 0, 50, 9), cell("plain", "B→A", 0, 70, 5), cell("plain", "A→B", 1, 54, 7),
    cell("plain", "B→A", 1, 74, 3), cell("ours", "A→B", 0, 80, 20, 3), cell("ours", "B→A", 0, 80, 10, 5),
]  # fmt: skip


def page_of(study: Path) -> Element:
    return parse(write_report([study], study / "page.html"))


def test_methods_over_tasks_and_seeds(tmp_path: Path) -> None:
    write_json(tmp_path / "results.json", {"rows": ROWS})
    table = page_of(tmp_path).one("all-study")
    assert [name.removesuffix(" ↕") for name in table.head()] == [
        "method",
        "A→B",
        "B→A",
        "mean",
        "ECE (%)",
        "seconds",
    ]
    assert table.rows() == [
        ["plain", "52", "72", "62", "6", "1"],
        ["ours", "80", "80", "80", "15", "4"],
    ]
    assert [c.text for c in table.all("td", "best")] == ["6", "80", "80", "80"]


def test_a_study_that_is_still_running_and_strange_files(tmp_path: Path) -> None:
    cells = tmp_path / "cells"
    cells.mkdir()
    strange = [{"method": "no task"}, cell("ours", "A→B", 1, float("nan"), 1)]
    for number, row in enumerate([*ROWS, *strange]):
        (cells / f"{number}.json").write_text(json.dumps(row))
    (cells / "broken.json").write_text("{")
    (tmp_path / "study.json").write_text("[]")
    page = page_of(tmp_path)
    assert page.one("all-study").rows()[1][:4] == ["ours", "80", "80", "80"]
    assert "mean of 2 seeds" in page.one("all-study").text
    assert "broken.json cannot be read" in page.text
