"""A file of class names in the order of a model's outputs: one name per line, or JSON."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from usfan.data.decoding.decode import one_line
from usfan.data.labels import checked_classes
from usfan.errors import DataError
from usfan.files import parse_json, read_named

MOST_BYTES = 16 << 20
"""Limit of a file of class names, as for a model's config."""


def read_classes(path: str | Path) -> tuple[str, ...]:
    """The names of a text file (one per line), a JSON list, or a JSON table: torchvision's `class_to_idx`, or numbers
    to names."""
    shown = one_line(str(path))
    try:
        content = read_named(path, MOST_BYTES)
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise DataError(f"{shown} is not a text file in UTF-8: expected one class name per line") from None
    except OSError as error:
        raise DataError(f"cannot read the class names of {shown}: {(error.strerror or str(error)).lower()}") from None
    if text.lstrip()[:1] in ("[", "{"):
        try:
            value = parse_json(text.encode())
        except ValueError:
            raise DataError(f"{shown} looks like JSON, but cannot be read as such") from None
        return checked_classes(names_of(value, shown))
    return checked_classes(line.strip() for line in text.splitlines() if line.strip())


def names_of(value: Any, shown: str) -> list[str]:
    if isinstance(value, dict):
        pairs = [(v, k) if isinstance(v, int) else (k, v) for k, v in value.items()]
        table = {int(number): name for number, name in pairs if str(number).isdigit()}
        value = [table.get(i) for i in range(len(value))]
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise DataError(f"{shown} must hold class names: a list, or a table of names and numbers that count from 0")
    return value
