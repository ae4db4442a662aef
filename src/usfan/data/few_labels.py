"""Labels of a few target images, for `adapt` and `evaluate`: a table, a list or a mapping of paths and classes.

Paths are those of the images of the data. A relative path counts from the table's folder, the working folder or the
data's folder, whichever has the image. A row without a label is passed over, so that `label_first.csv` of a run can be
filled in as far as one likes.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import SupportsInt

import torch
from torch import Tensor

from usfan.data.decoding.decode import one_line
from usfan.data.images import common_folder
from usfan.data.labels import ClassNames, some
from usfan.data.lists import absolute, entries_of, read_text
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


def few_labels(
    labels: UserLabelSource,
    data: ImageData | Store,
    classes: Sequence[str],
    *,
    open_set: bool = False,
) -> Tensor:
    """LongTensor, one entry per image of `data`: an index into `classes`, or −1 for an image without a label.

    With `open_set`, other names are new classes, and get the index len(classes).
    """
    if not isinstance(labels, Tensor):
        labels = _table(labels, data, classes, open_set)
    table = labels.detach().cpu().long()
    if table.shape != (len(data),):
        raise DataError(
            f"labels must have one entry per image, {len(data)}, with −1 for none; got {tuple(table.shape)}"
        )
    highest = len(classes) - 1 + open_set
    if bool((table < NONE).any() | (table > highest).any()):
        raise DataError(f"labels must be from 0 to {highest}, or −1 for none")
    if not bool((table >= 0).any()):
        raise DataError("no label is given: fill in the column `label` of some images")
    return table


def only_labelled(
    data: ImageData,
    labels: UserLabelSource,
    classes: Sequence[str],
    *,
    open_set: bool = False,
) -> ImageData:
    """The images of `data` that the user labelled, with these labels."""
    table = few_labels(labels, data, classes, open_set=open_set)
    labelled = table >= 0
    part = data.subset(labelled)
    return part._with(labels=table[labelled], classes=tuple(classes), named=True)


def _table(
    labels: object,
    data: ImageData | Store,
    classes: Sequence[str],
    open_set: bool,
) -> Tensor:
    model = ClassNames(classes)
    positions = {path: position for position, path in enumerate(data.paths or ())}
    folders = [os.getcwd()]
    if isinstance(labels, (str, os.PathLike)):
        folders.insert(0, os.path.dirname(absolute(labels)))
    if data.paths:
        folders.append(common_folder(data.paths))
    table = torch.full((len(data),), NONE)
    for place, image, name in _rows(labels):
        position = _position(place, image, data, positions, folders)
        number = _class_number(place, name, model, open_set)
        previous = int(table[position])
        if previous not in (NONE, number):
            before = [*classes, "unknown"][previous]
            raise DataError(
                f"{place}{one_line(str(image))} is {name} here and {before} before: keep one"
            )
        table[position] = number
    return table


def _rows(labels: object) -> Iterator[tuple[str, ImageName, str]]:
    """Place, image and class name of the labels in a file, a mapping or pairs."""
    if isinstance(labels, (str, os.PathLike)):
        file = absolute(labels)
        for place, path, name in entries_of(read_text(file), os.path.basename(file)):
            if name is not None:
                yield place, path, name
        return
    items = labels.items() if isinstance(labels, Mapping) else labels
    if not isinstance(items, Iterable):
        kind = type(labels).__name__
        raise DataError(
            f"labels must be a file, or pairs of an image and its class; got a {kind}"
        )
    for number, item in enumerate(items):
        place = f"labels, item {number}: "
        if not isinstance(item, (tuple, list)) or len(item) != 2:
            raise DataError(f"{place}expected an image (a path or a position) and its class")
        yield place, item[0], str(item[1])


def _position(
    place: str,
    image: ImageName,
    data: ImageData | Store,
    positions: dict[str, int],
    folders: list[str],
) -> int:
    """The position of an image, which is named by its path (from one of the folders) or its position."""
    name = getattr(data, "name", "the data")
    if positions and isinstance(image, (str, os.PathLike)):
        path = os.path.expanduser(image)
        for folder in folders:
            position = positions.get(os.path.abspath(os.path.join(folder, path)))
            if position is not None:
                return position
        problem = f"{one_line(path)} is not an image of {name}"
        raise DataError(f"{place}{problem}: give labels of images in it")
    try:
        position = int(image)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        position = -1
    if not 0 <= position < len(data):
        expected = f"{name} has images 0 to {len(data) - 1}"
        raise DataError(f"{place}{expected}, no {image!r}")
    return position


def _class_number(place: str, name: str, model: ClassNames, open_set: bool) -> int:
    """The index of a class; with `open_set` that of a new one if no class has the name in any case."""
    number = model.number(name)
    if number is not None:
        return number
    if open_set and not model.has_any([name]):
        return len(model.index)
    similar = model.similar(name)
    hint = (
        f"did you mean {similar}?" if similar else f"its classes are {some(list(model.index))}"
    )
    raise DataError(f"{place}the model has no class {one_line(name)}: {hint}")
