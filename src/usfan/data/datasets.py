"""Dataset objects: torch and torchvision datasets, sequences of images, and Hugging Face `datasets`."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Sequence, Sized
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
)

from usfan.data.decoding.decode import UnreadableImage
from usfan.data.images import (
    BROKEN_FILE,
    Content,
    DatasetImages,
    FileImages,
    Images,
    Normalisation,
    image_and_label,
    normalisation_of,
    one_image,
    plain,
)
from usfan.errors import DataError

WHOLE = (SequentialSampler, RandomSampler)
"""The samplers of a `DataLoader` that stands for its dataset; any other is iterated."""
MOST_BYTES = 2**34
"""An iterable without an end must not fill the memory."""


def read_dataset(source: Any, name: str) -> Content:
    """Images and labels of any object that hands out items."""
    if isinstance(source, dict):
        raise DataError(
            f"{name} is a dict (of splits?): give one of its datasets, such as data['train']"
        )
    normalisation = normalisation_of(source)
    if isinstance(source, DataLoader) and isinstance(source.sampler, WHOLE):
        source = source.dataset
    has_items = hasattr(source, "__getitem__") and hasattr(source, "__len__")
    if not has_items or isinstance(source, IterableDataset):
        if not isinstance(source, Iterable):
            raise DataError(
                f"cannot take images from a {name}: expected a folder, a list file, an array, a dataset or paths"
            )
        source = _items(source, name, normalisation)
    if len(source) == 0:
        raise DataError(f"{name} holds no images")
    if hasattr(source, "features") and hasattr(source, "column_names"):
        return _from_hugging_face(source, name)
    return _from_dataset(source, name, normalisation)


def _from_dataset(source: Any, name: str, normalisation: Normalisation | None) -> Content:
    """Labels come from `.targets` or `.labels` if the dataset has them; else every item is read once."""
    whole = source
    rows: Sequence[int] = range(len(source))
    while isinstance(whole, Subset):
        rows = [whole.indices[i] for i in rows]
        whole = whole.dataset
    files = _files(whole)
    images: Images = DatasetImages(source, name, normalisation)
    if files is not None:
        images = FileImages([files[i] for i in rows])
    table = _label_list(whole)
    values = _labels_of_items(source, name) if table is None else [table[i] for i in rows]
    return Content(images, values, getattr(whole, "classes", None) or None)


class OneColumn:
    """A column of a table with rows as dicts, item by item."""

    def __init__(self, table: Any, column: str) -> None:
        self.table = table
        self.column = column

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, position: int) -> Any:
        return self.table[position][self.column]


def _from_hugging_face(source: Any, name: str) -> Content:
    """Columns go by their usual names, else by their features: the only `Image`, and the only `ClassLabel`, whose names
    are the classes."""
    column = _column(source, ("image", "img"), "Image")
    if column is None:
        columns = ", ".join(source.column_names)
        raise DataError(
            f"{name} has no image column: its columns are {columns}; rename one to image"
        )
    images = DatasetImages(OneColumn(source, column), name)
    label = _column(source, ("label", "labels"), "ClassLabel")
    if label is None:
        return Content(images)
    classes = getattr(source.features[label], "names", None)
    return Content(images, list(source[label]), classes)


def _column(table: Any, names: Sequence[str], kind: str) -> str | None:
    """The first of these names that is a column, else the only column with this kind of feature."""
    columns: list[str] = list(table.column_names)
    usual = [name for name in names if name in columns]
    fitting = [name for name in columns if type(table.features[name]).__name__ == kind]
    if usual or len(fitting) != 1:
        return usual[0] if usual else None
    return fitting[0]


def _items(
    source: Iterable[Any], name: str, normalisation: Normalisation | None
) -> list[tuple[Any, Any]]:
    """Images with their labels or None, of single items or batches of them: read once, and held as uint8."""
    items: list[tuple[Any, Any]] = []
    size = 0
    for image, label in _single_items(source):
        if isinstance(image, (np.ndarray, Tensor)):
            image = one_image(plain(image, normalisation), f"{name}[{len(items)}]")
            size += image.nbytes
        else:
            size += 3 * math.prod(getattr(image, "size", (1,)))
        items.append((image, label))
        if size > MOST_BYTES:
            raise DataError(
                f"{name} gave {len(items)} images, {size >> 30} GiB, and no end: write them to a folder"
            )
    return items


def _single_items(source: Iterable[Any]) -> Iterator[tuple[Any, Any]]:
    """Image by image with its label or None; batches are taken apart."""
    for item in source:
        image, label = image_and_label(item)
        if getattr(image, "ndim", 0) == 4:
            labels = [None] * len(image) if label is None else list(label)
            yield from zip(image, labels, strict=True)
        else:
            yield image, label


def _files(source: Any) -> list[str] | None:
    """The paths of a plain image folder dataset: they can be decoded by worker processes, its items cannot."""
    loader = getattr(getattr(source, "loader", None), "__name__", None)
    samples = getattr(source, "samples", None)
    if loader != "default_loader" or source.transform is not None or samples is None:
        return None
    return [os.path.abspath(path) for path, _ in samples]


def _label_list(source: Any) -> Any:
    if getattr(source, "target_transform", None) is not None:
        return None
    for attribute in ("targets", "labels"):
        values = getattr(source, attribute, None)
        if isinstance(values, Sized) and len(values) == len(source):
            return values
    return None


def _labels_of_items(source: Any, name: str) -> list[Any] | None:
    """The label of every item. Costs a pass over the data, with decoding."""
    values: list[Any] = []
    for i in range(len(source)):
        try:
            values.append(image_and_label(source[i])[1])
        except BROKEN_FILE as error:
            reason = f"{error} (asked for its label: a dataset with `.targets` is not)"
            raise UnreadableImage(f"{name}[{i}]", reason) from error
        if values[0] is None:
            return None
    return values
