"""The docstrings under the fields of a dataclass, which Python itself does not keep."""

from __future__ import annotations

import ast
import dataclasses
import functools
import itertools
import linecache
import sys


@functools.cache
def field_docs(kind: type) -> dict[str, str]:
    """The docstring under each field, those of the parent classes included. None if there is no source."""
    docs: dict[str, str] = {}
    for cls in reversed([c for c in kind.__mro__ if dataclasses.is_dataclass(c)]):
        file = getattr(sys.modules.get(cls.__module__), "__file__", None)
        for item, after in itertools.pairwise(bodies(file or "").get(cls.__qualname__, ())):
            if (
                isinstance(item, ast.AnnAssign)
                and isinstance(item.target, ast.Name)
                and isinstance(after, ast.Expr)
                and isinstance(after.value, ast.Constant)
            ):
                docs[item.target.id] = " ".join(str(after.value.value).split())
    return docs


@functools.cache
def bodies(file: str) -> dict[str, list[ast.stmt]]:
    """The body of every class in a file, by its qualified name. One look at the file serves all of them."""
    found: dict[str, list[ast.stmt]] = {}

    def visit(node: ast.AST, place: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef):
                found[place + child.name] = child.body
                visit(child, f"{place}{child.name}.")
            elif isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
                visit(child, f"{place}{child.name}.<locals>.")
            elif not isinstance(child, ast.expr):
                visit(child, place)

    visit(ast.parse("".join(linecache.getlines(file))), "")
    return found
