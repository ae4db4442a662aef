"""`ImageData`: a set of images, with or without labels, from whatever the user has."""

from __future__ import annotations

import copy
import logging
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeGuard

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from usfan.data import folders, lists, shards
from usfan.data.datasets import read_dataset
from usfan.data.decoding.decode import is_image_name, one_line, to_tensor
from usfan.data.images import (
    ArrayImages,
    Content,
    FileImages,
    Images,
    PackedImages,
    image_array,
)
from usfan.data.incoming import incoming
from usfan.data.labels import (
    ClassNames,
    Labels,
    LabelValues,
    check_numbering,
    checked_classes,
    match,
    read_labels,
    some,
)
from usfan.errors import DataError
from usfan.shield import shielded

log = logging.getLogger(__name__)

ImageSource = (
    str
    | os.PathLike[str]
    | Sequence[str | os.PathLike[str]]
    | np.ndarray
    | Tensor
    | tuple[np.ndarray | Tensor, LabelValues]
    | FileImages
    | Dataset[object]
    | Iterable[object]
)
"""Whatever `ImageData` takes: a path, paths, an array, an array with labels, or an object that hands out images."""


class ImageData:
    """Images and, if they are known, their classes.

    `source` is one of

    - a folder of class folders (`class/*.jpg`, at any depth below), or a flat folder of images (no labels);
    - a WebDataset shard (`.tar`), a folder of them, or a sequence of them, see `usfan.data.shards`;
    - one image file, or a list file with `path label` or `path` lines or CSV columns, see `usfan.data.lists`;
    - an array or tensor, N×H×W, N×H×W×C or N×C×H×W, uint8 or floats in [0, 1], with `labels=` if there are any, or
      both as a pair;
    - a torch or torchvision dataset, a Hugging Face dataset, or a sequence of images or `(image, label)` pairs;
    - a `DataLoader`, a generator or any other iterable of images, of `(image, label)` pairs, or of batches of either;
    - a sequence of paths, with `labels=` if there are any;
    - a pandas DataFrame with a column of paths, and one of labels if there are any (names as in list files).

    A `Normalize` in a dataset's transforms is undone, because it is part of the model.

    Classes are in case-insensitive alphabetical order.

    Args:
        source: See above.
        labels: One label per image, if the source brings none.
        classes: Another order of the classes, or names for numbered labels.
        unlabelled: Ignore labels, and take folders of any name and depth.
        root: Folder that relative paths start from, and that no image may leave.
        strict: Whether an unreadable image is an error instead of being skipped.
        name: What messages call the data.
    """

    images: Images
    """The pictures behind this data."""
    classes: tuple[str, ...] | None
    """The class names; without labels None, or those that were given."""
    labels: Tensor | None
    """LongTensor[N], indices into `classes`; after `match_classes(open_set=True)`, K = len(classes) is unknown."""
    named: bool
    """False if the classes are plain numbers: such labels are matched by position."""
    unreadable: dict[str, str]
    """The images that were found unreadable when they were decoded, and why. Subsets and copies share it."""

    @shielded
    def __init__(
        self,
        source: ImageSource,
        labels: LabelValues | None = None,
        *,
        classes: Sequence[str] | None = None,
        unlabelled: bool = False,
        root: str | os.PathLike[str] | None = None,
        strict: bool = False,
        name: str | None = None,
    ):
        if unlabelled and labels is not None:
            raise DataError(
                "unlabelled= says to ignore labels, and labels= gives some: choose one"
            )
        base = None if root is None else os.path.abspath(os.fspath(root))
        if labels is None and _is_pair(source):
            source, labels = source
        content, self.name = _open(source, base, name, unlabelled)
        self.images, values, names = content
        if labels is not None and values is not None:
            raise DataError(f"labels= goes with images that have none; {self.name} has its own")
        values = values if labels is None else labels
        self.strict = strict
        self.unreadable = {}
        self.labels = None
        self.classes = None if classes is None else checked_classes(classes)
        self.named = True
        if values is None or unlabelled:
            return
        table = read_labels(values, len(self), self.name)
        if table is not None:
            self.labels, self.classes, self.named = table
            names = names if classes is None else classes
            if names is not None:
                self.classes = checked_classes(names)
                self.labels = match(table, self.classes, False, self.name)
                self.named = True

    def _with(self, **fields: object) -> ImageData:
        """A copy with other fields."""
        part = copy.copy(self)
        vars(part).update(fields)
        return part

    def __len__(self) -> int:
        return len(self.images)

    def __repr__(self) -> str:
        classes = "no labels" if self.labels is None else f"{len(self.classes or ())} classes"
        return f"ImageData({self.name!r}: {len(self)} images, {classes})"

    def load(self, i: int, channels: int = 3) -> Tensor:
        """Image `i` as uint8 channels×H×W, RGB (3) or grey (1). Raises `UnreadableImage`, which names the file."""
        return to_tensor(self.images.picture(i, channels))

    def where(self, i: int) -> str:
        """The path of image `i`, or its place in the array or dataset."""
        return self.images.where(i)

    @property
    def paths(self) -> list[str] | None:
        """Absolute paths of file-backed images, else None."""
        return self.images.paths if isinstance(self.images, FileImages) else None

    def subset(
        self, indices: Sequence[int] | Sequence[bool] | np.ndarray | Tensor
    ) -> ImageData:
        """The images at these positions, in this order; a boolean mask works too. The classes stay the same."""
        index = torch.as_tensor(indices).cpu()
        if index.dtype == torch.bool:
            if len(index) != len(self):
                raise DataError(
                    f"a mask over {self.name} needs {len(self)} entries, not {len(index)}"
                )
            index = index.nonzero()
        index = index.long().flatten()
        if not len(index):
            raise DataError(f"no images of {self.name} were chosen")
        if int(index.min()) < 0 or int(index.max()) >= len(self):
            raise DataError(f"{self.name} has images 0 to {len(self) - 1}, and no others")
        labels = None if self.labels is None else self.labels[index]
        return self._with(images=self.images.take(index.tolist()), labels=labels)

    def without_labels(self, classes: Sequence[str] | None = None) -> ImageData:
        """The same images, unlabelled; they keep these names for a model that has none."""
        return self._with(
            labels=None, classes=None if classes is None else checked_classes(classes)
        )

    def for_model(self, classes: Sequence[str], open_set: bool = False) -> ImageData:
        """`match_classes` if the labels are of the model's classes; the images without labels if no name is.

        Folders of a camera (`100CANON`) are no classes: such images are unlabelled, and one line in the log says so.
        """
        if self.labels is None or self.classes is None:
            return self
        table = checked_classes(classes)
        numbers = self.labels.unique().tolist()
        present = [self.classes[i] for i in numbers if i < len(self.classes)]
        if self.named and not ClassNames(table).has_any(present):
            log.warning(
                "%s: none of its folders or labels (%s) is named as a class of the model (%s): taken as unlabelled",
                *(self.name, some(present), some(table)),
            )
            return self.without_labels()
        return self.match_classes(table, open_set=open_set)

    def unknown_names(self, classes: Sequence[str]) -> list[str]:
        """Its class names that are not among `classes`; none if no name is, or if labels are numbers. The labels
        themselves are not looked at."""
        model = ClassNames(classes)
        names = self.classes or ()
        if self.labels is None or not self.named or not model.has_any(names):
            return []
        return [name for name in names if model.number(name) is None]

    def match_classes(self, classes: Sequence[str], open_set: bool = False) -> ImageData:
        """The same images with labels that index `classes`, a model's class list.

        Classes are matched by name, never by position; only labels that are mere numbers go by position. Images of
        other classes get the label `len(classes)` with `open_set`; without it they are an error.
        """
        table = checked_classes(classes)
        if self.labels is None or self.classes is None:
            raise DataError(
                f"{self.name} has no labels to match: expected class folders, or a list with labels"
            )
        content = Labels(self.labels, self.classes, self.named)
        labels = match(content, table, open_set, self.name)
        if not self.named and self.paths is not None:
            check_numbering(self.paths, labels, table, self.name)
        return self._with(labels=labels, classes=table, named=True)

    def fingerprint(self) -> str:
        """A hex digest of the images; labels, names and the place of the folder do not count.

        Files: path below their common folder, size, time of change, and the content of a few; see `FileImages.digest`.
        Arrays: every byte. Dataset objects: every picture, so each is decoded for it.
        """
        return self.images.digest()


def _open(
    source: Any, root: str | None, name: str | None, unlabelled: bool
) -> tuple[Content, str]:
    """Images of the source, and its name in messages."""
    if isinstance(source, ImageData):
        raise DataError("this is an ImageData already: use it as it is")
    if isinstance(source, (str, os.PathLike)):
        content = _from_path(os.fspath(source), root, unlabelled)
        name = name or os.path.basename(lists.absolute(source)) or str(source)
    elif isinstance(source, FileImages):
        content = Content(source)
        name = name or "files"
    elif _is_paths(source) and all(shards.is_shard(os.fspath(path)) for path in source):
        name = name or "shards"
        content = shards.read_shards([lists.absolute(path) for path in source])
    elif _is_paths(source):
        name = name or "paths"
        entries = [
            lists.Entry(f"{name}[{i}]: ", os.fspath(path)) for i, path in enumerate(source)
        ]
        content = Content(FileImages(lists.paths_of(entries, os.getcwd(), root)))
    elif hasattr(source, "to_csv") and hasattr(source, "columns"):
        name = name or type(source).__name__
        paths, labels = lists.read_frame(source, name, root)
        content = Content(FileImages(paths), labels)
    elif isinstance(source, (np.ndarray, Tensor)):
        name = name or "array"
        content = Content(ArrayImages(image_array(source, name), name))
    else:
        name = name or type(source).__name__
        content = read_dataset(source, name)
    if isinstance(content.images, FileImages):
        lists.check_root(content.images.paths, root)
    elif isinstance(content.images, PackedImages):
        lists.check_root({part.path for part in content.images.files}, root)
    elif root is not None:
        raise DataError("root= goes with folders, lists and paths, not with images in memory")
    return content, name


def _from_path(path: str, root: str | None, unlabelled: bool) -> Content:
    if not path:
        raise DataError(
            "the path of the data is empty: expected a folder, an image or a list file"
        )
    path = lists.absolute(path)
    labels: LabelValues | None = None
    if os.path.isdir(path):
        archives = shards.shards_in(path)
        if archives:
            return shards.read_shards(archives)
        paths, labels = folders.scan(path, unlabelled=unlabelled)
    elif not os.path.isfile(path):
        raise DataError(f"no such folder, image or list file: {one_line(path)}")
    elif shards.is_shard(path):
        return shards.read_shards([path])
    elif is_image_name(path):
        paths = [path]
    else:
        paths, labels = lists.read(path, root)
    return Content(FileImages(paths), labels)


def _is_pair(source: object) -> TypeGuard[tuple[np.ndarray | Tensor, LabelValues]]:
    """Whether these are images and their labels: an array of pictures, and a row of numbers or names."""
    if not isinstance(source, tuple) or len(source) != 2:
        return False
    images, labels = source
    is_array = isinstance(images, (np.ndarray, Tensor)) and images.ndim >= 3
    return is_array and np.ndim(labels) == 1


def _is_paths(source: object) -> bool:
    if isinstance(source, np.ndarray):
        return source.dtype.kind == "U" and source.ndim == 1
    if not isinstance(source, (list, tuple)) or not source:
        return False
    return all(isinstance(path, (str, os.PathLike)) for path in source)


def open_inputs(
    inputs: Sequence[str],
    *,
    root: str | None = None,
    strict: bool = False,
) -> ImageData:
    """All named images, without labels, in order. `-` stands for one path per line of standard input.

    A missing photograph stays in the list, and its row says so. A missing folder or list is an error.
    """
    names: list[str] = []
    for path in inputs:
        names += (
            [line for lines in incoming(sys.stdin) for line in lines] if path == "-" else [path]
        )
    images = open_files(names, root=root, strict=strict)
    paths = images.paths
    if paths is not None and not any(os.path.isfile(path) for path in paths):
        raise DataError(f"no such image: {some(paths)}")
    return images


def open_stream(*, root: str | None = None, strict: bool = False) -> Iterator[ImageData]:
    """The images whose paths come from standard input, some at a time."""
    lines: list[str] = []
    for lines in incoming(sys.stdin):
        yield open_files(lines, root=root, strict=strict)
    if not lines:
        raise DataError("no image was given: write paths to standard input")


def open_files(names: Sequence[str], *, root: str | None, strict: bool) -> ImageData:
    """The images of photographs, folders and list files, or of shards alone."""
    paths: list[str] = []
    for path in names:
        if is_image_name(path) and not os.path.isdir(path):
            paths.append(lists.absolute(path))
            continue
        data = ImageData(path, unlabelled=True, root=root, strict=strict)
        if data.paths is None and len(names) > 1:
            raise DataError(f"{one_line(path)} holds shards: they go alone, one file or folder")
        if data.paths is None:
            return data
        paths += data.paths
    if not paths:
        raise DataError(
            "no image was given: name photographs, a folder or a list, or write paths to standard input"
        )
    name = names[0] if len(names) == 1 else f"{len(paths)} images"
    return ImageData(FileImages(paths), root=root, name=name, strict=strict)
