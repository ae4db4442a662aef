"""A few labels of a user's own images, for `adapt` and `evaluate`: a table, a list or a mapping of paths and classes.

Paths are those of the images of the data. A relative path counts from the table's own folder, the data's folder or the
working folder, whichever has the image. A row without a label is passed over, so that `label_first.csv` of a run can be
filled in as far as one likes.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from usfan.data.decoding.decode import one_line
from usfan.data.images import common_folder
from usfan.data.labels import Labels, canonical, some
from usfan.data.lists import entries_of, inside, read_text
from usfan.errors import DataError

NONE = -1
"""Stands for an image without a label."""


class Row(NamedTuple):
    place: str
    """Where it stands, for messages."""
    image: Any
    """A path, or a position in the data."""
    name: Any


def few_labels(
    given: Any, data: Any, classes: Sequence[str], *, root: str | None = None, open_set: bool = False
) -> Tensor:
    """LongTensor, one entry per image of `data`: an index into `classes`, or −1 if no label is given.

    `given` is a file, a mapping from paths or positions to class names, a sequence of such pairs, or this tensor.
    With `root` no path may leave it. With `open_set`, other names are new classes, and get the index len(classes).
    """
    count, most = len(data), len(classes) + open_set
    if isinstance(given, Tensor):
        return checked(given, count, most)
    folders = [os.getcwd()]
    if isinstance(given, (str, os.PathLike)):
        file = os.path.abspath(os.path.expanduser(os.fspath(given)))
        folders = [os.path.dirname(file), *folders]
        rows: Iterable[Row] = file_rows(file)
    else:
        rows = pairs(given)
    found = torch.full((count,), NONE)
    places = Places(data, folders, root)
    names = {canonical(name): number for number, name in enumerate(classes)}
    for row in rows:
        position, label = places.find(row), find_class(row, names, open_set=open_set)
        if found[position] not in (NONE, label):
            first = [*classes, "unknown"][int(found[position])]
            raise DataError(f"{row.place}: {one_line(str(row.image))} is {row.name} here and {first} before: keep one")
        found[position] = label
    return checked(found, count, most)


def only_labelled(
    data: Any, given: Any, classes: Sequence[str], *, root: str | None = None, open_set: bool = False
) -> Any:
    """The images of `data` whose labels are given, with these labels."""
    found = few_labels(given, data, classes, root=root, open_set=open_set)
    part = data.subset(found >= 0)
    part._set_labels(Labels(found[found >= 0], tuple(classes), True))
    return part


def checked(labels: Tensor, count: int, classes: int) -> Tensor:
    labels = labels.detach().cpu().long()
    if labels.shape != (count,):
        raise DataError(f"labels must have one entry per image, {count}, with −1 for none; got {tuple(labels.shape)}")
    if bool((labels < NONE).any() | (labels >= classes).any()):
        raise DataError(f"labels must be from 0 to {classes - 1}, or −1 for none")
    if not bool((labels >= 0).any()):
        raise DataError("no label is given: fill in the column `label` of some images")
    return labels


def file_rows(file: str) -> Iterator[Row]:
    if os.path.isdir(file) or not os.path.exists(file):
        raise DataError(f"no such file of labels: {one_line(file)}")
    shown = one_line(os.path.basename(file))
    for entry in entries_of(read_text(file), file):
        if entry.label is not None:
            yield Row(f"{shown}, line {entry.line}", entry.path, entry.label)


def pairs(given: Any) -> Iterator[Row]:
    items = given.items() if isinstance(given, Mapping) else given
    if not isinstance(items, Iterable):
        raise DataError(f"labels must be a file, or pairs of an image and its class; got a {type(given).__name__}")
    for number, item in enumerate(items):
        if not isinstance(item, (tuple, list)) or len(item) != 2:
            raise DataError(f"labels, item {number}: expected an image (a path or a position) and its class")
        yield Row(f"labels, item {number}", *item)


class Places:
    """Finds images in the data by their paths or positions."""

    def __init__(self, data: Any, folders: list[str], root: str | None) -> None:
        self.count, self.name, self.root = len(data), getattr(data, "name", "the data"), root
        paths = data.paths or []
        self.positions = {path: position for position, path in enumerate(paths)}
        self.folders = [*folders, *([common_folder(paths)] if paths else [])]

    def find(self, row: Row) -> int:
        if isinstance(row.image, (str, os.PathLike)):
            return self.by_path(row, os.path.expanduser(os.fspath(row.image)))
        try:
            position = int(row.image)
        except (TypeError, ValueError):
            position = -1
        if not 0 <= position < self.count:
            raise DataError(f"{row.place}: {self.name} has images 0 to {self.count - 1}, no {row.image!r}")
        return position

    def by_path(self, row: Row, path: str) -> int:
        if not self.positions:
            if path.isdigit() and int(path) < self.count:
                return int(path)
            raise DataError(f"{row.place}: {self.name} has no files: name images by position, 0 to {self.count - 1}")
        for folder in self.folders:
            place = os.path.abspath(os.path.join(folder, path))
            if place in self.positions:
                if self.root is not None and not inside(place, self.root):
                    raise DataError(f"{row.place}: {one_line(path)} leaves the root {one_line(self.root)}")
                return self.positions[place]
        raise DataError(f"{row.place}: {one_line(path)} is not an image of {self.name}: give labels of images in it")


def find_class(row: Row, names: dict[str, int], *, open_set: bool = False) -> int:
    name = canonical(str(row.name))
    if name in names:
        return names[name]
    folded = {known.casefold(): known for known in names}
    if open_set and name.casefold() not in folded:
        return len(names)
    near = difflib.get_close_matches(name.casefold(), folded, n=1)
    hint = f"did you mean {folded[near[0]]}?" if near else f"its classes are {some(list(names))}"
    raise DataError(f"{row.place}: the model has no class {one_line(name)}: {hint}")
