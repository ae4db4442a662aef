"""List files: one image per line, `path label` or `path` (the format of SHOT's lists).

- The label is the last word of the line: a number that counts from 0, or a class name. Paths may hold spaces.
- A last word that ends like an image file, or holds a slash, belongs to the path: that line has no label.
- All lines have a label, or none has. If every label is a number, labels are numbers, else names.
- Numbers are matched with the classes of a model by position; `classes=` gives them names.
- Relative paths count from the list's own folder, or from `root`. With `root` no path may leave it.

A table with commas, semicolons or tabs is understood too: a file named `.csv` or `.tsv`, or any list whose first line
names its columns (`path,label`). Known names are those of `PATH_COLUMNS` and `LABEL_COLUMNS`; other columns are passed
over. Without names the first column is the path, the second the label.
"""

from __future__ import annotations

import csv
import os
import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from usfan.budget import allowed, check_cost
from usfan.data.decoding.decode import is_image_name, one_line
from usfan.data.labels import checked_classes
from usfan.errors import DataError
from usfan.files import parse_json, read_named

_LINE = re.compile(r"(?P<path>.*?)[ \t]+(?P<word>[^ \t]+)")
_NUMBER = re.compile(r"[+-]?[0-9]{1,12}")
"""A longer row of digits is a name, such as that of a product."""
PATH_COLUMNS = [
    "path",
    "file",
    "filename",
    "file_name",
    "filepath",
    "file_path",
    "image",
    "image_path",
    "img",
    "name",
]
LABEL_COLUMNS = [
    "label",
    "class",
    "class_name",
    "classname",
    "category",
    "target",
    "true_label",
    "truth",
]
"""Of several, the first of these names counts."""
MOST_LIST = 128 << 20
MOST_LINES = 3_000_000
"""Bytes and lines of a list: twice those of ImageNet."""
LIST_KIND = "a folder, or a list with `path label` lines"


class Entry(NamedTuple):
    place: str
    """File and line, for messages; ends in a colon."""
    path: str
    label: str | None = None
    question: str | None = None
    """Why the label was asked for, in a table with this column."""


def parse(text: str, file: str = "list") -> list[Entry]:
    """The entries of a list; blank lines are passed over."""
    entries = []
    for number, line in enumerate(text.split("\n"), start=1):
        line = line.strip(" \t\r")
        place = f"{file}, line {number}: "
        parts = _LINE.fullmatch(line)
        if parts is not None and not _is_path(parts["word"]):
            entries.append(Entry(place, parts["path"], parts["word"]))
        elif line:
            entries.append(Entry(place, line))
    return entries


def entries_of(text: str, file: str) -> list[Entry]:
    """The entries of a list, or of a table with columns."""
    name = one_line(file)
    first = text.lstrip("\r\n").split("\n", 1)[0]
    separator = next((mark for mark in "\t;," if mark in first), ",")
    cells = [cell.strip(' "\r\t').casefold() for cell in first.split(separator)]
    path_column = _column(cells, PATH_COLUMNS)
    label_column = _column(cells, LABEL_COLUMNS)
    question_column = _column(cells, ["question"])
    has_names = path_column < len(cells) and not any(map(_is_path, cells))
    if not has_names:
        if separator not in first or not file.lower().endswith((".csv", ".tsv")):
            return parse(text, name)
        path_column = 0
        label_column = 1
        question_column = 2
    entries = []
    try:
        for line, row in enumerate(csv.reader(text.splitlines(), delimiter=separator), start=1):
            place = f"{name}, line {line}: "
            row += [""] * (1 + max(path_column, label_column, question_column) - len(row))
            path = row[path_column].strip()
            if path:
                label = row[label_column].strip() or None
                question = row[question_column].strip() or None
                entries.append(Entry(place, path, label, question))
            elif any(map(str.strip, row)):
                raise DataError(f"{place}no path in it")
    except csv.Error as error:
        raise DataError(f"{name} cannot be read as a table: {error}") from None
    return entries[1:] if has_names else entries


def _column(cells: Sequence[str], names: Sequence[str]) -> int:
    """The column with the first of these names that occurs; one after the last if none does."""
    return next((cells.index(name) for name in names if name in cells), len(cells))


def read(file: str, root: str | None) -> tuple[list[str], list[str] | list[int] | None]:
    """Absolute paths and labels of a list file; every file is checked to be there."""
    entries = entries_of(read_text(file), file)
    if not entries:
        raise DataError(
            f"{one_line(file)} is empty: expected lines of `path label` or `path`, or a table with these columns"
        )
    return paths_of(entries, os.path.dirname(file), root), _labels(entries)


def read_frame(
    frame: Any, name: str, root: str | None
) -> tuple[list[str], list[str] | list[int] | None]:
    """Absolute paths and labels of a pandas DataFrame, by the names of its columns."""
    columns = [str(column).casefold() for column in frame.columns]
    chosen = [_column(columns, names) for names in (PATH_COLUMNS, LABEL_COLUMNS)]
    if chosen[0] == len(columns):
        raise DataError(
            f"{name} has no column of paths: its columns are {', '.join(columns)}; rename one to path"
        )
    part = frame.iloc[:, [column for column in chosen if column < len(columns)]]
    part.columns = ["path", "label"][: part.shape[1]]
    entries = entries_of(part.to_csv(index=False), name)
    return paths_of(entries, os.getcwd(), root), _labels(entries)


def paths_of(entries: Sequence[Entry], base: str, root: str | None) -> list[str]:
    """Absolute paths of files that are there; relative ones count from `root`, or from `base`."""
    paths = []
    missing = []
    for place, path, *_ in entries:
        path = os.path.abspath(os.path.join(root or base, path))
        check_root([path], root, place)
        if not os.path.isfile(path):
            missing.append(f"{place}no such file: {one_line(path)}")
        paths.append(path)
    if missing:
        raise DataError(f"{missing[0]} ({len(missing)} of {len(entries)} files are missing)")
    return paths


def absolute(path: str | os.PathLike[str]) -> str:
    return os.path.abspath(os.path.expanduser(os.fspath(path)))


def inside(path: str, root: str) -> bool:
    """Whether a path stays below the root once links and `..` are followed."""
    if "\0" in path:
        return False
    real = os.path.realpath(root)
    return os.path.commonpath([real, os.path.realpath(path)]) == real


def check_root(
    paths: Iterable[str],
    root: str | None,
    place: str = "",
) -> None:
    if root is None:
        return
    for path in paths:
        if not inside(path, root):
            raise DataError(f"{place}{one_line(path)} leaves the root {one_line(root)}")


def read_text(file: str, kind: str = LIST_KIND) -> str:
    """The text of a file that the user named."""
    try:
        return text_of(read_named(file, allowed(MOST_LIST)), file, kind)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise DataError(f"cannot read {one_line(file)}: {reason}") from error


def text_of(content: bytes, file: str, kind: str = LIST_KIND) -> str:
    """The text that a file holds; it was expected to be of this `kind`."""
    name = one_line(file)
    check_cost(
        f"{name}: a list of lines", content.count(b"\n"), MOST_LINES, "in number", DataError
    )
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError:
        problem = "is an image" if is_image_name(file) else "is not a text file in UTF-8"
        raise DataError(f"{name} {problem}: expected {kind}") from None


def _is_path(word: str) -> bool:
    return "/" in word or os.sep in word or is_image_name(word)


def label_values(
    words: Sequence[str | None], places: Sequence[str]
) -> list[str] | list[int] | None:
    """Labels as numbers if all are, else as names; None if there is none. `places` say where each word would stand."""
    labels = [word for word in words if word is not None]
    if not labels:
        return None
    if len(labels) < len(words):
        raise DataError(f"{places[words.index(None)]}no label, but others have one")
    if all(_NUMBER.fullmatch(word) for word in labels):
        return [int(word) for word in labels]
    return labels


def _labels(entries: list[Entry]) -> list[str] | list[int] | None:
    return label_values([entry.label for entry in entries], [entry.place for entry in entries])


def read_classes(path: str | os.PathLike[str]) -> tuple[str, ...]:
    """The names of a text file (one per line) or a JSON list."""
    text = read_text(str(path), "one class name per line")
    if not text.lstrip().startswith(("[", "{")):
        return checked_classes(line.strip() for line in text.splitlines() if line.strip())
    try:
        value = parse_json(text.encode())
    except ValueError:
        value = None
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise DataError(
            f"{one_line(str(path))} must hold class names: one per line, or a JSON list of them"
        )
    return checked_classes(value)
