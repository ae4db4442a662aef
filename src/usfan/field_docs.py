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
    """The docstring under each field, those of the parent classes included; nothing if there is no source."""
    docs: dict[str, str] = {}
    for parent in reversed(kind.__mro__):
        if not dataclasses.is_dataclass(parent):
            continue
        file = getattr(sys.modules.get(parent.__module__), "__file__", "")
        body = class_bodies(file).get(parent.__name__, [])
        for field, text in itertools.pairwise(body):
            match field, text:
                case ast.AnnAssign(target=ast.Name(name)), ast.Expr(ast.Constant(str(doc))):
                    docs[name] = " ".join(doc.split())
    return docs


@functools.cache
def class_bodies(file: str) -> dict[str, list[ast.stmt]]:
    """The body of every class in a file. One look at the file serves all of them."""
    bodies = {}
    nodes: list[ast.AST] = [ast.parse("".join(linecache.getlines(file)))]
    for node in nodes:  # grows: statements inside functions and classes are added
        if isinstance(node, ast.ClassDef):
            bodies[node.name] = node.body
        nodes += getattr(node, "body", [])
    return bodies
