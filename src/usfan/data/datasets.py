"""Dataset objects: torch and torchvision datasets, sequences of images, and Hugging Face `datasets`."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Sequence, Sized
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    TensorDataset,
)

from usfan.data.arrays import one_image
from usfan.data.decoding.decode import UnreadableImage
from usfan.data.images import BROKEN_FILE, DatasetImages, FileImages, Images, image_and_label
from usfan.data.labels import Labels, from_values
from usfan.errors import DataError

WHOLE = (SequentialSampler, RandomSampler)
"""The samplers of a `DataLoader` that stands for its dataset; any other is iterated."""
MOST_BYTES = 2**34
"""An iterable without an end must not fill the memory."""

Content = tuple[Images, Labels | None]


def read_dataset(
    source: Any,
    classes: Sequence[str] | None,
    name: str,
) -> Content:
    """Images and labels of any object that hands out items."""
    if isinstance(source, dict):
        raise DataError(
            f"{name} is a dict (of splits?): give one of its datasets, such as data['train']"
        )
    if isinstance(source, DataLoader) and isinstance(source.sampler, WHOLE):
        source = source.dataset
    if hasattr(source, "features") and hasattr(source, "column_names"):
        return from_hugging_face(source, classes, name)
    if hasattr(source, "__getitem__") and not isinstance(source, IterableDataset):
        return from_dataset(source, classes, name)
    if isinstance(source, Iterable):
        return from_iterable(source, classes, name)
    raise DataError(
        f"cannot take images from a {name}: expected a folder, a list file, an array, a dataset or paths"
    )


def from_dataset(
    source: Any,
    classes: Sequence[str] | None,
    name: str,
) -> Content:
    """Labels come from `.targets` or `.labels` if the dataset has them; else every item is read once."""
    count = _length(source, name)
    whole = source
    rows: Sequence[int] = range(count)
    while isinstance(whole, Subset):
        rows = [whole.indices[i] for i in rows]
        whole = whole.dataset
    files = _files(whole)
    images: Images = DatasetImages(source, name)
    if files is not None:
        images = FileImages([files[i] for i in rows])
    table = _label_list(whole)
    if table is None:
        table = _labels_of_items(source, count, name)
    elif whole is not source:
        table = [table[i] for i in rows]
    classes = classes or getattr(whole, "classes", None) or None
    return images, _labels(table, classes, count, name)


def from_iterable(
    source: Iterable[Any],
    classes: Sequence[str] | None,
    name: str,
) -> Content:
    """Images, `(image, label)` pairs, or batches of them, read once and held as uint8 in memory."""
    images: list[Any] = []
    values: list[Any] = []
    size = 0
    for image, label in _single_items(source):
        if isinstance(image, (np.ndarray, torch.Tensor)):
            image = one_image(image, f"{name}[{len(images)}]")
            size += image.nbytes
        else:
            size += 3 * math.prod(getattr(image, "size", (1,)))
        images.append(image)
        if size > MOST_BYTES:
            raise DataError(
                f"{name} gave {len(images)} images, {size >> 30} GiB, and no end: write them to a folder"
            )
        values.append(label)
    if not images:
        raise DataError(f"{name} holds no images (a generator that was used up before?)")
    return DatasetImages(images, name), _labels(values, classes, len(images), name)


def _single_items(source: Iterable[Any]) -> Iterator[tuple[Any, Any]]:
    """Image by image with its label or None; batches are taken apart."""
    for item in source:
        image, label = image_and_label(item)
        if getattr(image, "ndim", 0) == 4:
            labels = [None] * len(image) if label is None else list(label)
            yield from zip(image, labels, strict=True)
        else:
            yield image, label


def from_hugging_face(
    source: Any,
    classes: Sequence[str] | None,
    name: str,
) -> Content:
    """The image column and the class column are found by the type of their features, then by their usual names."""
    count = _length(source, name)
    features = dict(source.features or {})
    image_column = _column(features, "Image", ("image", "img"), name)
    if image_column is None:
        columns = ", ".join(map(str, source.column_names))
        raise DataError(f"{name} has no image column: its columns are {columns}")
    images = DatasetImages(source, name, image_column)
    label_column = _column(features, "ClassLabel", ("label", "labels"), name)
    if label_column is None:
        return images, None
    if classes is None:
        classes = getattr(features[label_column], "names", None)
    return images, _labels(list(source[label_column]), classes, count, name)


def _column(
    features: dict[str, Any],
    kind: str,
    usual_names: tuple[str, str],
    name: str,
) -> str | None:
    typed = [column for column, feature in features.items() if type(feature).__name__ == kind]
    for column in usual_names:
        if column in (typed or features):
            return column
    if len(typed) > 1:
        subject = usual_names[0]
        raise DataError(
            f"{name} has {len(typed)} {subject} columns ({', '.join(typed)}): "
            f"rename the one to use to '{subject}'"
        )
    return typed[0] if typed else None


def _length(source: Any, name: str) -> int:
    try:
        count = len(source)
    except TypeError:
        raise DataError(
            f"{name} has no length: give a dataset with `len` and indexing, or a list of its items"
        ) from None
    if count == 0:
        raise DataError(f"{name} holds no images")
    return count


def _labels(
    values: Any,
    classes: Sequence[str] | None,
    count: int,
    name: str,
) -> Labels | None:
    """None for labels that are all −1: torchvision and Hugging Face mark unlabelled splits so."""
    if values is None:
        return None
    values = [value.item() if hasattr(value, "item") else value for value in values]
    missing = sum(value is None for value in values)
    if missing and missing < count:
        labelled = f"{count - missing} of its {count} images have a label"
        raise DataError(f"{name}: {labelled}: expected all or none")
    if set(values) <= {None, -1}:
        return None
    return from_values(values, classes, count, name)


def _files(source: Any) -> list[str] | None:
    """The paths of a plain image folder dataset: they can be decoded by worker processes, its items cannot."""
    loader = getattr(getattr(source, "loader", None), "__name__", None)
    samples = getattr(source, "samples", None)
    if loader != "default_loader" or source.transform is not None or samples is None:
        return None
    return [os.path.abspath(path) for path, _ in samples]


def _label_list(source: Any) -> Any:
    if isinstance(source, TensorDataset):
        return source.tensors[1] if len(source.tensors) > 1 else None
    if getattr(source, "target_transform", None) is not None:
        return None
    for attribute in ("targets", "labels"):
        values = getattr(source, attribute, None)
        if isinstance(values, Sized) and len(values) == len(source):
            return values
    return None


def _labels_of_items(source: Any, count: int, name: str) -> list[Any] | None:
    """The label of every item. Costs a pass over the data, with decoding."""
    values: list[Any] = []
    for i in range(count):
        try:
            values.append(image_and_label(source[i])[1])
        except BROKEN_FILE as error:
            reason = f"{error} (asked for its label: a dataset with `.targets` is not)"
            raise UnreadableImage(f"{name}[{i}]", reason) from error
        if values[0] is None:
            return None
    return values
