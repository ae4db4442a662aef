"""Which code a row was measured with: a digest of the modules that a method is made of.

A page marks a row whose digest is not that of the code as it is now (`docs/make_tables.py`). Comments, docstrings and
layout do not count. What lies outside these modules is guarded by the cells that `tests/test_tables.py` runs again.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import sys

from usfan.adaptation.methods import METHODS
from usfan.adaptation.terms.term import Term


@functools.cache
def code_of(method: str) -> str:
    """A digest of the modules of the method's terms, weights and split, and of its row."""
    row = METHODS[method]
    modules = set()
    for part in (*row.parts, *row.all_terms):
        for kind in type(part).__mro__:
            is_part = kind.__module__ != Term.__module__
            if is_part and kind.__module__.startswith("usfan.adaptation"):
                modules.add(kind.__module__)
    texts = [plain(name) for name in sorted(modules)]
    texts.append(repr((sorted(row.settings().items()), sorted(row.stage.items()), row.settles)))
    return hashlib.sha256("".join(texts).encode()).hexdigest()[:12]


@functools.cache
def plain(module: str) -> str:
    """The syntax of a module without its docstrings."""
    tree = ast.parse(inspect.getsource(sys.modules[module]))
    for node in ast.walk(tree):
        for field in ("body", "orelse"):
            lines = getattr(node, field, None)
            if isinstance(lines, list):
                kept = [line for line in lines if not is_text(line)]
                setattr(node, field, kept)
    return written(tree)


def written(value: object) -> str:
    """A syntax tree as text, the same in every version of Python (`ast.dump` is not): as 3.11 writes it."""
    if isinstance(value, list):
        return f"[{', '.join(map(written, value))}]"
    if not isinstance(value, ast.AST):
        return repr(value)
    fields = []
    for name, part in ast.iter_fields(value):
        is_absent = part is None and getattr(type(value), name, ...) is None
        if name != "type_params" and not is_absent:  # parameters of types came with 3.12
            fields.append(f"{name}={written(part)}")
    return f"{type(value).__name__}({', '.join(fields)})"


def is_text(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )
