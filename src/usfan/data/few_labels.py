"""Labels of a few target images, for `adapt` and `evaluate`: a table, a list or a mapping of paths and classes.

Paths are those of the images of the data. A relative path counts from the table's folder, the working folder or the
data's folder, whichever has the image. A row without a label is passed over, so that `label_first.csv` of a run can be
filled in as far as one likes.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, SupportsInt

import torch
from torch import Tensor

from usfan.data.decoding.decode import one_line
from usfan.data.images import common_folder
from usfan.data.labels import ClassNames, Labels, some
from usfan.data.lists import check_root, entries_of, read_text
from usfan.data.sources import ImageData
from usfan.data.store import Store
from usfan.errors import DataError

NONE = -1
"""Stands for an image without a label."""

ImageName = str | os.PathLike[str] | SupportsInt
"""A path, or a position in the data."""
UserLabelSource = (
    str
    | os.PathLike[str]
    | Mapping[ImageName, object]
    | Iterable[tuple[ImageName, object]]
    | Tensor
)
"""A file, a mapping from images to class names, pairs of both, or a tensor with −1 for images without a label."""


class Row(NamedTuple):
    place: str
    """File and line of the label, for messages."""
    image: ImageName
    class_name: str


def few_labels(
    labels: UserLabelSource,
    data: ImageData | Store,
    classes: Sequence[str],
    *,
    root: str | None = None,
    open_set: bool = False,
) -> Tensor:
    """LongTensor, one entry per image of `data`: an index into `classes`, or −1 for an image without a label.

    With `root` no path may leave it. With `open_set`, other names are new classes, and get the index len(classes).
    """
    if isinstance(labels, Tensor):
        return _checked(labels, len(data), len(classes) + open_set)
    model = ClassNames(classes)
    images = ImageFinder(data, labels, root)
    table = torch.full((len(data),), NONE)
    for row in _rows(labels):
        position = images.position(row)
        number = class_number(row, model, open_set)
        previous = int(table[position])
        if previous not in (NONE, number):
            image = one_line(str(row.image))
            name = [*classes, "unknown"][previous]
            raise DataError(
                f"{row.place}: {image} is {row.class_name} here and {name} before: keep one"
            )
        table[position] = number
    return _checked(table, len(data), len(classes) + open_set)


def only_labelled(
    data: ImageData,
    labels: UserLabelSource,
    classes: Sequence[str],
    *,
    root: str | None = None,
    open_set: bool = False,
) -> ImageData:
    """The images of `data` that the user labelled, with these labels."""
    table = few_labels(labels, data, classes, root=root, open_set=open_set)
    part = data.subset(table >= 0)
    part._set_labels(Labels(table[table >= 0], tuple(classes), True))
    return part


def _checked(
    table: Tensor,
    count: int,
    classes: int,
) -> Tensor:
    table = table.detach().cpu().long()
    if table.shape != (count,):
        shape = tuple(table.shape)
        raise DataError(
            f"labels must have one entry per image, {count}, with −1 for none; got {shape}"
        )
    if bool((table < NONE).any() | (table >= classes).any()):
        raise DataError(f"labels must be from 0 to {classes - 1}, or −1 for none")
    if not bool((table >= 0).any()):
        raise DataError("no label is given: fill in the column `label` of some images")
    return table


def _rows(labels: object) -> Iterator[Row]:
    """The labels of a file, a mapping or pairs."""
    if isinstance(labels, (str, os.PathLike)):
        file = _absolute(labels)
        name = one_line(os.path.basename(file))
        for entry in entries_of(read_text(file), file):
            if entry.label is not None:
                yield Row(f"{name}, line {entry.line}", entry.path, entry.label)
        return
    items = labels.items() if isinstance(labels, Mapping) else labels
    if not isinstance(items, Iterable):
        kind = type(labels).__name__
        raise DataError(
            f"labels must be a file, or pairs of an image and its class; got a {kind}"
        )
    for number, item in enumerate(items):
        place = f"labels, item {number}"
        if not isinstance(item, (tuple, list)) or len(item) != 2:
            raise DataError(f"{place}: expected an image (a path or a position) and its class")
        yield Row(place, item[0], str(item[1]))


class ImageFinder:
    """Finds images in the data by their paths or positions."""

    def __init__(
        self,
        data: ImageData | Store,
        labels: object,
        root: str | None,
    ) -> None:
        self.count = len(data)
        self.name = getattr(data, "name", "the data")
        self.root = root
        paths = data.paths or []
        self.positions = {path: position for position, path in enumerate(paths)}
        self.folders = [os.getcwd()]
        if isinstance(labels, (str, os.PathLike)):
            self.folders.insert(0, os.path.dirname(_absolute(labels)))
        if paths:
            self.folders.append(common_folder(paths))

    def position(self, row: Row) -> int:
        if self.positions and isinstance(row.image, (str, os.PathLike)):
            return self.by_path(row)
        try:
            position = int(row.image)  # type: ignore[arg-type]
        except (TypeError, ValueError):
            position = -1
        if 0 <= position < self.count:
            return position
        expected = f"{self.name} has images 0 to {self.count - 1}"
        raise DataError(f"{row.place}: {expected}, no {row.image!r}")

    def by_path(self, row: Row) -> int:
        path = os.path.expanduser(str(row.image))
        for folder in self.folders:
            candidate = os.path.abspath(os.path.join(folder, path))
            if candidate in self.positions:
                check_root([candidate], self.root, f"{row.place}: ")
                return self.positions[candidate]
        problem = f"{one_line(path)} is not an image of {self.name}"
        raise DataError(f"{row.place}: {problem}: give labels of images in it")


def class_number(row: Row, model: ClassNames, open_set: bool) -> int:
    """The index of the row's class; with `open_set` that of a new one if no class has the name in any case."""
    number = model.number(row.class_name)
    if number is not None:
        return number
    if open_set and model.whatever_case(row.class_name) is None:
        return len(model.index)
    similar = model.similar(row.class_name)
    hint = (
        f"did you mean {similar}?" if similar else f"its classes are {some(list(model.index))}"
    )
    raise DataError(f"{row.place}: the model has no class {one_line(row.class_name)}: {hint}")


def _absolute(path: str | os.PathLike[str]) -> str:
    return os.path.abspath(os.path.expanduser(os.fspath(path)))
