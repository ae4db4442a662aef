"""The tables of a study on its page: what is averaged, what is best, and strange files."""

from __future__ import annotations

import json
from pathlib import Path

from usfan.report.study import method_table, study_blocks, study_line, study_rows


def cell(method: str, task: str, seed: int, accuracy: float, ece: float, seconds: float = 1.0) -> dict:
    return {"method": method, "task": task, "seed": seed, "accuracy": accuracy, "ece": ece, "seconds": seconds}


ROWS = [
    cell("plain", "A→B", 0, 50, 9), cell("plain", "B→A", 0, 70, 5), cell("plain", "A→B", 1, 54, 7),
    cell("plain", "B→A", 1, 74, 3), cell("ours", "A→B", 0, 80, 20, 3), cell("ours", "B→A", 0, 80, 10, 5),
]  # fmt: skip


def texts(table) -> list[list[str]]:
    return [[c.text + ("*" if c.mark == "best" else "") for c in row] for row in table.rows]


def test_methods_over_tasks_and_seeds():
    table = method_table("x", ROWS, "accuracy", {"plain": {"avg": 81.25}})
    assert table.columns == ["method", "Accuracy (%)", "± over seeds", "ECE (%)", "seconds", "seeds agree (%)"]
    assert texts(table) == [["plain", "62", "2.828", "6*", "1", "81.2"], ["ours", "80*", "–", "15", "4", "–"]]


def test_a_study_that_is_still_running_and_strange_files(tmp_path: Path):
    cells = tmp_path / "cells"
    cells.mkdir()
    for number, row in enumerate([*ROWS, {"method": "no task"}, cell("ours", "A→B", 1, float("nan"), 1)]):
        (cells / f"{number}.json").write_text(json.dumps(row))
    (tmp_path / "agreement.json").write_text(json.dumps({"plain": 3, "ours": {"A→B": "<b>", "avg": None}}))
    (tmp_path / "study.json").write_text(json.dumps({"source": [], "hardware": "a GPU"}))
    problems: list[str] = []
    rows = study_rows(tmp_path, problems)
    assert len(rows) == len(ROWS) + 1
    assert study_line(tmp_path, rows, problems) == "7 cells: 2 methods, 2 tasks, 2 seeds; on a GPU."
    blocks = study_blocks("x", tmp_path, rows, problems)
    assert [block.title for block in blocks] == ["Methods", "Methods and tasks", "Agreement between seeds"]
