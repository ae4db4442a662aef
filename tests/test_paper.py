"""The page "Is this the paper?" points at code that exists; tables are marked when their code has changed."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "paper.md").read_text(encoding="utf-8")
POINTERS = re.findall(r"`((?:\w+/)*\w+\.(?:py|json|yaml))(?:: ([^`]+))?`", PAGE)


def names_in(file: Path) -> set[str]:
    """Functions, classes and fields of a module; words of any other file."""
    text = file.read_text(encoding="utf-8")
    if file.suffix != ".py":
        return set(re.findall(r"[\w-]+", text))
    names = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
    return names


def test_pointers_of_the_page_lead_to_code():
    assert len(POINTERS) > 20
    for path, names in POINTERS:
        file = (
            ROOT / path if path.startswith(("tests", "studies")) else ROOT / "src/usfan" / path
        )
        assert file.is_file(), path
        for name in filter(None, names.split(", ")):
            assert name in names_in(file), f"{path}: {name}"


def test_each_equation_table_and_figure_has_a_line():
    for number in (1, 2, 3, 7):
        assert f"| Eq. {number}" in PAGE
    for label in (
        "Eqs. 4, 5",
        "Eq. 6",
        "Algorithm 1",
        "Table 1",
        "Tables 2 to 4 and A3",
    ):
        assert f"| {label}" in PAGE
    for label in ("Table A1", "Table A2", "Fig. 4", "Fig. 5"):
        assert f"| {label}" in PAGE
