"""Tables do not outlive their code: small cells run again on the code as it is, and rows of other code are marked."""

from __future__ import annotations

import inspect
import json
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent.parent))

from studies import code
from studies.paper import canaries, canary_row

ROOT = Path(__file__).parent.parent
ROWS = json.loads((ROOT / "docs" / "results" / "paper.json").read_text(encoding="utf-8"))[
    "rows"
]
SMALL = {row["case"]: row for row in ROWS if row["table"] == "canary"}
CELLS = ("u-sfan (default)", "u-sfan (authors)", "u-sfan (paper)", "upa", "lsc", "u-sfan, open")
"""One or more of each table; `python -m studies.paper CACHE OUT.jsonl canary` runs them all."""
NOISE = 3.0
"""Points between two machines."""


def test_every_case_of_the_tables_has_a_small_cell():
    assert set(SMALL) == set(canaries())
    for row in ROWS:
        assert {"commit", "settings", "code", "seconds"} <= row.keys()


@pytest.mark.parametrize("case", CELLS)
def test_the_code_still_gives_what_the_row_says(case):
    row = canary_row(case)
    for figure in ("accuracy", "os", "hos"):
        if figure in row:
            assert abs(row[figure] - SMALL[case][figure]) <= NOISE, figure


@pytest.mark.parametrize(
    ("before", "after", "same"),
    [
        ('"""Predictions agree', '"""Other words', True),
        ("return torch.where(", "# a comment\n    return torch.where(", True),
        ("1.0, weak", "2.0, weak", False),
    ],
)
def test_a_change_of_the_code_changes_its_digest(monkeypatch, before, after, same):
    digest = code.code_of("nrc")
    assert digest != code.code_of("aad")
    source = inspect.getsource(sys.modules["usfan.adaptation.terms.nrc"])
    assert before in source
    changed = code.plain.__wrapped__
    monkeypatch.setattr(inspect, "getsource", lambda module: source.replace(before, after))
    syntax = changed("usfan.adaptation.terms.nrc")
    assert (syntax == code.plain("usfan.adaptation.terms.nrc")) == same
