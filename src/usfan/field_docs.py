"""The docstrings under the fields of a dataclass, which Python itself does not keep."""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import itertools


@functools.cache
def field_docs(kind: type) -> dict[str, str]:
    """The docstring under each field, those of the parent classes included."""
    docs: dict[str, str] = {}
    for cls in reversed([c for c in kind.__mro__ if dataclasses.is_dataclass(c)]):
        body = ast.parse(inspect.getsource(cls)).body[0].body  # type: ignore[attr-defined]
        for item, after in itertools.pairwise(body):
            if (
                isinstance(item, ast.AnnAssign)
                and isinstance(after, ast.Expr)
                and isinstance(after.value, ast.Constant)
            ):
                docs[item.target.id] = str(after.value.value)  # type: ignore[union-attr]
    return docs
