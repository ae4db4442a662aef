"""A file of class names in the order of a model's outputs: one name per line, or JSON."""

from __future__ import annotations

from pathlib import Path

from usfan.data.decoding.decode import one_line
from usfan.data.labels import checked_classes
from usfan.data.lists import read_text
from usfan.errors import DataError
from usfan.files import parse_json


def read_classes(path: str | Path) -> tuple[str, ...]:
    """The names of a text file (one per line), a JSON list, or a JSON table: torchvision's `class_to_idx`, or numbers
    to names."""
    text = read_text(str(path), "one class name per line")
    if text.lstrip()[:1] not in ("[", "{"):
        return checked_classes(line.strip() for line in text.splitlines() if line.strip())
    name = one_line(str(path))
    try:
        value = parse_json(text.encode())
    except ValueError:
        raise DataError(f"{name} looks like JSON, but cannot be read as such") from None
    if isinstance(value, dict):
        numbers = {str(number): name for name, number in value.items()}
        table = value if "0" in value else numbers
        value = [table.get(str(number)) for number in range(len(table))]
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise DataError(
            f"{name} must hold class names: a list, or a table of names and numbers that count from 0"
        )
    return checked_classes(value)
