"""Dataset objects: torch and torchvision datasets, sequences of images, and Hugging Face `datasets`."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler, Subset, TensorDataset

from usfan.data.arrays import one_image
from usfan.data.decoding.decode import UnreadableImage
from usfan.data.images import DatasetImages, FileImages, Images, image_of
from usfan.data.labels import Labels, from_given
from usfan.errors import DataError

MOST_BYTES = 2**34
"""An iterable without an end must not fill the memory."""


class Read(NamedTuple):
    images: Images
    labels: Labels | None


def is_hugging_face(source: Any) -> bool:
    return hasattr(source, "features") and hasattr(source, "column_names")


def from_dataset(source: Any, classes: Sequence[str] | None, name: str) -> Read:
    """Labels come from `.targets` or `.labels` if the dataset has them; else every item is read once."""
    count = _length(source, name)
    if classes is None:
        classes = _own_classes(source)
    files = _files(source)
    images: Images = FileImages(files) if files is not None else DatasetImages(source, name)
    values = _known_labels(source)
    if values is None:
        values = _asked_labels(source, count, name)
    return Read(images, _given(values, classes, count, name))


def behind_loader(source: Any) -> Any:
    """The dataset of a `DataLoader` that hands out all of it; any other loader, and anything else, as it is."""
    if not isinstance(source, DataLoader) or isinstance(source.dataset, IterableDataset):
        return source
    sampler = getattr(source, "sampler", None)
    whole = isinstance(sampler, SequentialSampler) or (
        isinstance(sampler, RandomSampler) and not sampler.replacement and sampler.num_samples == len(source.dataset)  # type: ignore[arg-type]
    )
    return source.dataset if whole else source


def from_iterable(source: Iterable[Any], classes: Sequence[str] | None, name: str) -> Read:
    """Images, `(image, label)` pairs, or batches of them, read once and kept as uint8 in memory."""
    images: list[Any] = []
    values: list[Any] = []
    size = 0
    for image, label in _single(source):
        where = f"{name}[{len(images)}]"
        image = one_image(image, where) if isinstance(image, (np.ndarray, torch.Tensor)) else image
        images.append(image)
        size += image.nbytes if isinstance(image, np.ndarray) else math.prod(getattr(image, "size", (1,))) * 3
        if size > MOST_BYTES:
            raise DataError(f"{name} gave {len(images)} images, {size >> 30} GiB, and no end: write them to a folder")
        if label is not None:
            values.append(label)
    if not images:
        raise DataError(f"{name} holds no images (a generator that was used up before?)")
    if values and len(values) != len(images):
        raise DataError(f"{name}: {len(values)} of its {len(images)} images have a label: expected all or none")
    return Read(DatasetImages(images, name), _given(values or None, classes, len(images), name))


def _single(source: Iterable[Any]) -> Iterator[tuple[Any, Any]]:
    """Image by image with its label or None; batches are taken apart."""
    for item in source:
        pair = isinstance(item, (tuple, list)) and len(item) == 2
        image, label = item if pair else (item, None)
        if isinstance(item, dict):
            image, label = image_of(item), item.get("label", item.get("labels"))
        if isinstance(image, (list, tuple)) and len(image) == 1 and label is None:
            image = image[0]  # what a loader makes of a TensorDataset without labels
        if getattr(image, "ndim", 0) == 4:
            labels = [None] * len(image) if label is None else list(label)
            yield from zip(image, labels, strict=True)
        else:
            yield image, label


def from_hugging_face(source: Any, classes: Sequence[str] | None, name: str) -> Read:
    """The image column and the class column are found by the type of their features, then by their usual names."""
    count = _length(source, name)
    features = dict(source.features or {})
    kinds = {column: type(feature).__name__ for column, feature in features.items()}
    image = _column(kinds, "Image", ("image", "img"), "image", name)
    if image is None:
        raise DataError(f"{name} has no image column: its columns are {', '.join(map(str, source.column_names))}")
    column = _column(kinds, "ClassLabel", ("label", "labels"), "label", name)
    if column is None:
        return Read(DatasetImages(source, name, image), None)
    if classes is None:
        classes = getattr(features[column], "names", None)
    return Read(DatasetImages(source, name, image), _given(list(source[column]), classes, count, name))


def _column(kinds: dict[str, str], kind: str, usual: tuple[str, ...], what: str, name: str) -> str | None:
    found = [column for column, its in kinds.items() if its == kind]
    named = [column for column in usual if column in (found or kinds)]
    if len(found) > 1 and not named:
        raise DataError(
            f"{name} has {len(found)} {what} columns ({', '.join(found)}): rename the one to use to '{what}'"
        )
    return named[0] if named else found[0] if found else None


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


def _given(values: Any, classes: Sequence[str] | None, count: int, name: str) -> Labels | None:
    """None for labels that are all −1: torchvision and Hugging Face mark unlabelled splits so."""
    if values is None:
        return None
    values = [value.item() if hasattr(value, "item") else value for value in values]
    return None if values and all(value == -1 for value in values) else from_given(values, classes, count, name)


def _own_classes(source: Any) -> Sequence[str] | None:
    while isinstance(source, Subset):
        source = source.dataset
    own = getattr(source, "classes", None)
    return [str(name) for name in own] if isinstance(own, (list, tuple)) and own else None


def _files(source: Any) -> list[str] | None:
    """The paths of a plain image folder dataset: they can be decoded by worker processes, its items cannot."""
    if isinstance(source, Subset):
        below = _files(source.dataset)
        return None if below is None else [below[i] for i in source.indices]
    samples = getattr(source, "samples", None)
    plain = getattr(source, "transforms", None) is None and getattr(source, "transform", None) is None
    loader = getattr(getattr(source, "loader", None), "__name__", None)
    if not plain or loader != "default_loader" or not isinstance(samples, list):
        return None
    if not all(isinstance(sample, tuple) and isinstance(sample[0], (str, os.PathLike)) for sample in samples):
        return None
    return [os.path.abspath(os.fspath(sample[0])) for sample in samples]


def _known_labels(source: Any) -> Any:
    if isinstance(source, Subset):
        values = _known_labels(source.dataset)
        return None if values is None else [values[i] for i in source.indices]
    if isinstance(source, TensorDataset):
        return source.tensors[1] if len(source.tensors) > 1 else None
    if getattr(source, "target_transform", None) is not None:
        return None
    for attribute in ("targets", "labels"):
        values = getattr(source, attribute, None)
        if values is not None and hasattr(values, "__len__") and len(values) == len(source):
            return values
    return None


def _asked_labels(source: Any, count: int, name: str) -> list[Any] | None:
    """The label of every item. Costs a pass over the data, with decoding."""
    values: list[Any] = []
    for i in range(count):
        try:
            item = source[i]
        except (OSError, SyntaxError) as error:  # what Pillow raises for broken files
            reason = f"{error} (asked for its label: a dataset with `.targets` is not)"
            raise UnreadableImage(f"{name}[{i}]", reason) from error
        if isinstance(item, dict):
            label = item.get("label", item.get("labels"))
        else:
            label = item[1] if isinstance(item, (tuple, list)) and len(item) > 1 else None
        if label is None:
            if values:
                raise DataError(f"{name}: item {i} has no label, but the items before it have one")
            return None
        values.append(label)
    return values
