"""List files: one image per line, `path label` or `path` (the format of SHOT's lists).

- The label is the last word of the line: a number that counts from 0, or a class name. Paths may hold spaces.
- A last word that ends like an image file, or holds a slash, belongs to the path: that line has no label.
- All lines have a label, or none has. If every label is a number, labels are numbers, else names.
- Numbers are named after the folder the images of each lie in, where that is one folder per number; so a list and the
  folder it points to give the same data set. If a model knows none of these names, the numbers are its own.
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
from typing import NamedTuple

from usfan.budget import allowed, check_cost
from usfan.data.decoding.decode import SUFFIXES, one_line
from usfan.data.images import below, common_folder
from usfan.data.labels import MAX_CLASSES, Labels, from_names, from_numbers
from usfan.errors import DataError
from usfan.files import read_named

_LINE = re.compile(r"(?P<path>.*?)[ \t]+(?P<word>[^ \t]+)")
_NUMBER = re.compile(r"[+-]?[0-9]+")
PATH_COLUMNS = ("path", "file", "filename", "file_name", "filepath", "file_path", "image", "image_path", "img", "name")
LABEL_COLUMNS = ("label", "class", "class_name", "classname", "category", "target", "true_label", "truth")
MOST_LIST = 128 << 20
MOST_LINES = 3_000_000
"""Bytes and lines of a list: twice those of ImageNet."""


class Entry(NamedTuple):
    line: int
    """Counts from 1."""
    path: str
    label: str | None


def parse(text: str) -> list[Entry]:
    """The entries of a list; blank lines are passed over."""
    entries = []
    for number, line in enumerate(text.split("\n"), start=1):
        line = line.strip(" \t\r")
        if not line:
            continue
        parts = _LINE.fullmatch(line)
        if parts is None or _is_path(parts["word"]):
            entries.append(Entry(number, line, None))
        else:
            entries.append(Entry(number, parts["path"], parts["word"]))
    return entries


def entries_of(text: str, file: str) -> list[Entry]:
    """The entries of a list, or of a table with columns."""
    first = next((line for line in text.split("\n") if line.strip()), "")
    mark = next((m for m in ("\t", ";", ",") if m in first), "")
    tabular = bool(mark) and file.lower().endswith((".csv", ".tsv"))
    if tabular or _names_columns([cell.strip(' "\r\t') for cell in first.split(mark or ",")]):
        return parse_table(text, mark or ",", one_line(file))
    return parse(text)


def parse_table(text: str, mark: str, shown: str) -> list[Entry]:
    """The entries of a table: its named columns, or the first (path) and the second (label)."""
    try:
        rows = [(i, [c.strip() for c in row]) for i, row in enumerate(csv.reader(text.splitlines(), delimiter=mark), 1)]
    except csv.Error as error:
        raise DataError(f"{shown} cannot be read as a table: {error}") from None
    rows = [(line, row) for line, row in rows if any(row)]
    path, label = 0, 1
    if rows and _names_columns(rows[0][1]):
        names = [name.casefold() for name in rows.pop(0)[1]]
        path = next(names.index(name) for name in PATH_COLUMNS if name in names)
        label = next((names.index(name) for name in LABEL_COLUMNS if name in names), len(names))
    entries = []
    for line, row in rows:
        if path >= len(row) or not row[path]:
            raise DataError(f"{shown}, line {line}: no path in it")
        entries.append(Entry(line, row[path], (row[label] or None) if label < len(row) else None))
    return entries


def _names_columns(row: Sequence[str]) -> bool:
    """Whether a row is the names of columns: one of a path, and no cell that looks like a path."""
    names = [name.casefold() for name in row]
    return any(name in PATH_COLUMNS for name in names) and not any(_is_path(name) for name in names)


def read(file: str, root: str | None, classes: Sequence[str] | None) -> tuple[list[str], Labels | None]:
    """Absolute paths and labels of a list file; every file is checked to be there."""
    shown = one_line(file)
    entries = entries_of(read_text(file), file)
    if not entries:
        raise DataError(f"{shown} is empty: expected lines of `path label` or `path`, or a table with these columns")
    paths = resolve([entry.path for entry in entries], root or os.path.dirname(file))
    for entry, path in zip(entries, paths, strict=True):
        if "\0" in path:
            raise DataError(f"{shown}, line {entry.line}: a path with a NUL character")
        if root is not None and not inside(path, root):
            raise DataError(f"{shown}, line {entry.line}: {one_line(entry.path)} leaves the root {one_line(root)}")
    missing = [(entry, path) for entry, path in zip(entries, paths, strict=True) if not os.path.isfile(path)]
    if missing:
        entry, path = missing[0]
        more = f" ({len(missing)} of {len(entries)} files are missing)" if len(missing) > 1 else ""
        raise DataError(f"{shown}, line {entry.line}: no such file: {one_line(path)}{more}")
    return paths, _labels(entries, paths, classes, shown)


def resolve(paths: Sequence[str], base: str) -> list[str]:
    """Absolute paths; relative ones count from `base`."""
    return [os.path.abspath(os.path.join(base, path)) for path in paths]


def inside(path: str, root: str) -> bool:
    """Whether a path stays below the root once links and `..` are followed."""
    real = os.path.realpath(root)
    return os.path.commonpath([real, os.path.realpath(path)]) == real


def check_root(paths: Iterable[str], root: str | None) -> None:
    for path in paths if root is not None else ():
        if not inside(path, root):  # type: ignore[arg-type]
            raise DataError(f"{one_line(path)} leaves the root {one_line(str(root))}")


def read_text(file: str) -> str:
    try:
        content = read_named(file, allowed(MOST_LIST))
        check_cost(f"{one_line(file)}: a list of lines", content.count(b"\n"), MOST_LINES, "in number", DataError)
        return content.decode("utf-8-sig")
    except UnicodeDecodeError:
        what = "is an image" if file.lower().endswith(tuple(SUFFIXES)) else "is not a text file in UTF-8"
        raise DataError(f"{one_line(file)} {what}: expected a folder, or a list with `path label` lines") from None
    except OSError as error:
        raise DataError(f"cannot read {one_line(file)}: {(error.strerror or str(error)).lower()}") from error


def _is_path(word: str) -> bool:
    return "/" in word or os.sep in word or word.lower().endswith(tuple(SUFFIXES))


def _labels(entries: list[Entry], paths: list[str], classes: Sequence[str] | None, shown: str) -> Labels | None:
    first = entries[0].label
    for entry in entries:
        if (entry.label is None) != (first is None):
            has, rest = ("no label", "have one") if entry.label is None else ("a label", "have none")
            raise DataError(f"{shown}, line {entry.line} has {has}, but the lines before it {rest}")
    words = [entry.label for entry in entries if entry.label is not None]
    if not words:
        return None
    if not all(_NUMBER.fullmatch(word) for word in words):
        return from_names(words, classes, shown)
    for entry in entries:
        word = entry.label or "0"
        if len(word) > 12 or not 0 <= int(word) < MAX_CLASSES:
            raise DataError(f"{shown}, line {entry.line}: the label {word} is not between 0 and {MAX_CLASSES - 1}")
    numbers = [int(word) for word in words]
    names = _folder_names(numbers, paths) if classes is None else None
    return from_numbers(numbers, names if classes is None else classes, shown)._replace(guessed=names is not None)


def _folder_names(numbers: list[int], paths: list[str]) -> list[str] | None:
    """A name for each number: the topmost folder that its images share and no others, else the folder they lie in."""
    common = common_folder(paths)
    tops = [below(path, common).split(os.sep)[0] for path in paths]
    nested = all(os.path.dirname(path) != common for path in paths)
    parents = [os.path.basename(os.path.dirname(path)) for path in paths]
    for folders, usable in ((tops, nested), (parents, all(parents))):
        pairs = set(zip(numbers, folders, strict=True))
        if usable and len(pairs) == len({number for number, _ in pairs}) == len({name for _, name in pairs}):
            names = dict(pairs)
            table = [names.get(number, str(number)) for number in range(max(numbers) + 1)]
            if len(set(table)) == len(table):  # a number without images must not take another's name
                return table
    return None
