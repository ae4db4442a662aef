"""Imports point one way: the graph computed from the source has no cycle, and no edge against CONTRIBUTING's drawing.

Lazy imports count, in functions and in `importlib.import_module("usfan.…")`; those under `if TYPE_CHECKING` do not.
"""

from __future__ import annotations

import ast
import graphlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ABOVE = ("usfan", "usfan.__main__")
"""The public API and the entry point may import everything; nothing imports them."""


def module_name(path: Path, package: Path) -> str:
    parts = [package.name, *path.relative_to(package).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(tree: ast.AST, module: str, is_package: bool) -> Iterator[tuple[str, list[str]]]:
    """(module, names taken from it) of every import that runs."""
    stack: list[ast.AST] = [tree]
    while stack:
        node = stack.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            stack.extend(node.orelse)
            continue
        stack.extend(ast.iter_child_nodes(node))
        if isinstance(node, ast.Import):
            yield from ((alias.name, []) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = module.split(".")
            base = parts[: len(parts) - node.level + is_package] if node.level else []
            yield (
                ".".join([*base, *([node.module] if node.module else [])]),
                [alias.name for alias in node.names],
            )
        elif isinstance(node, ast.Call) and "import_module" in ast.unparse(node.func):
            yield from (
                (a.value, [])
                for a in node.args
                if isinstance(a, ast.Constant) and isinstance(a.value, str)
            )


def import_graph(package: Path) -> dict[str, set[str]]:
    """Module → modules of the same package that it imports."""
    files = {module_name(path, package): path for path in sorted(package.rglob("*.py"))}
    graph: dict[str, set[str]] = {}
    for module, path in files.items():
        tree = ast.parse(path.read_text(encoding="utf-8"))
        found: set[str] = set()
        for base, names in imported(tree, module, path.name == "__init__.py"):
            if names == ["__version__"]:  # a number, no code
                continue
            inner = {f"{base}.{name}" for name in names} & files.keys()
            found |= inner | ({base} if not names or len(inner) < len(names) else set())
        graph[module] = (found & files.keys()) - {module}
    return graph


def cycle(graph: dict[str, set[str]]) -> list[str]:
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return error.args[1]
    return []


def drawn_order() -> dict[str, int]:
    """Package or module → its line in the drawing of CONTRIBUTING."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    (drawing,) = re.findall(r"## The house\n\n[^\n]+\n\n((?:    [^\n]+\n)+)", text)
    names = [re.split(r"\s{2,}", line.strip())[0].split(", ") for line in drawing.splitlines()]
    return {name: line for line, row in enumerate(names) for name in row}


def against(graph: dict[str, set[str]], order: dict[str, int]) -> list[str]:
    """The imports that point from a line of the drawing to a later one, or to the public API."""

    def line(module: str) -> int:
        return len(order) if module in ABOVE else order[module.split(".")[1]]

    edges = [
        (module, other) for module, others in sorted(graph.items()) for other in sorted(others)
    ]
    return [f"{a} imports {b}" for a, b in edges if line(b) > line(a)]


GRAPH = import_graph(ROOT / "src" / "usfan")


def test_the_drawing_is_of_this_house():
    parts = {path.name.removesuffix(".py") for path in (ROOT / "src" / "usfan").iterdir()}
    parts -= {"__init__", "__main__", "__pycache__", "py.typed"}
    assert parts == set(drawn_order())
    assert len(GRAPH) > 100


def test_no_two_modules_import_each_other():
    assert cycle(GRAPH) == []


def test_no_import_points_against_the_drawing():
    assert against(GRAPH, drawn_order()) == []


def test_packages_have_empty_doors():
    """What a package's __init__ imports, each of its modules would import with it."""
    doors = {m for m in GRAPH if (ROOT / "src" / Path(*m.split(".")) / "__init__.py").is_file()}
    assert {m: GRAPH[m] for m in doors if GRAPH[m] and m != "usfan"} == {}


FAULTS = {
    "lazy": (
        "def f():\n    from usfan.cli import main\n",
        "usfan.data.a imports usfan.cli.main",
    ),
    "plain": ("import usfan.cli.main\n", "usfan.data.a imports usfan.cli.main"),
    "by name": (
        "import importlib\nimportlib.import_module('usfan.cli.main')\n",
        "usfan.data.a imports usfan.cli.main",
    ),
    "relative": ("from ..cli.main import run\n", "usfan.data.a imports usfan.cli.main"),
    "the public API": ("from usfan import adapt\n", "usfan.data.a imports usfan"),
    "only for types": (
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import usfan.cli.main\n",
        None,
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_each_kind_of_import_is_seen(tmp_path, fault):
    text, expected = FAULTS[fault]
    for name, content in {
        "__init__": "",
        "data/__init__": "",
        "data/a": text,
        "cli/__init__": "",
        "cli/main": "",
    }.items():
        file = tmp_path / "usfan" / f"{name}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)
    graph = import_graph(tmp_path / "usfan")
    assert against(graph, {"data": 0, "cli": 1}) == ([expected] if expected else [])
    assert (
        cycle({**graph, "usfan.cli.main": {"usfan.data.a"}, "usfan": {"usfan.data.a"}}) != []
        or expected is None
    )
