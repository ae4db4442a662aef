"""`ImageData`: a set of images, with or without labels, from whatever the user has."""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from usfan.data import datasets, folders, lists
from usfan.data.arrays import image_array
from usfan.data.decoding.decode import SUFFIXES, one_line, to_tensor
from usfan.data.images import ArrayImages, FileImages, Images
from usfan.data.labels import Labels, canonical, checked_classes, from_given, from_names, match, share_no_name, some
from usfan.errors import DataError

log = logging.getLogger(__name__)


class ImageData:
    """Images and, if they are known, their classes.

    `source` is one of

    - a folder of class folders (`class/*.jpg`, at any depth below), or a flat folder of images (no labels);
    - one image file, or a list file with `path label` or `path` lines or CSV columns, see `usfan.data.lists`;
    - an array or tensor, N×H×W, N×H×W×C or N×C×H×W, uint8 or floats in [0, 1], with `labels=` if there are any, or
      both as a pair;
    - a torch or torchvision dataset, a Hugging Face dataset, or a sequence of images or `(image, label)` pairs;
    - a `DataLoader`, a generator or any other iterable of images, of `(image, label)` pairs, or of batches of either;
    - a sequence of paths, with `labels=` if there are any.

    Classes are in case-insensitive alphabetical order.

    Args:
        source: See above.
        labels: One label per image, for arrays and sequences of paths.
        classes: Another order of the classes, or names for numbered labels.
        unlabelled: Ignore labels, and take folders of any name and depth.
        root: Folder that relative paths start from, and that no image may leave.
        strict: Whether an unreadable image is an error instead of being skipped.
        name: What messages call the data.
    """

    classes: tuple[str, ...] | None
    """The class names; without labels None, or those that were given."""
    labels: Tensor | None
    """LongTensor[N], indices into `classes`; after `match_classes(open_set=True)`, K = len(classes) is unknown."""
    paths: list[str] | None
    """Absolute paths of file-backed images, else None."""
    unreadable: dict[str, str]
    """The images that were found unreadable when they were decoded, and why. Subsets and copies share it."""

    def __init__(
        self,
        source: Any,
        labels: Any = None,
        *,
        classes: Sequence[str] | None = None,
        unlabelled: bool = False,
        root: str | os.PathLike[str] | None = None,
        strict: bool = False,
        name: str | None = None,
    ):
        if unlabelled and labels is not None:
            raise DataError("unlabelled= says to ignore labels, and labels= gives some: choose one")
        base = None if root is None else os.path.abspath(os.fspath(root))
        found = _find(source, labels, None if unlabelled else classes, base, name, unlabelled)
        self._images = found.images
        self.name = found.name
        self.strict = strict
        self.unreadable = {}
        self.paths = found.images.paths if isinstance(found.images, FileImages) else None
        self._set_labels(None if unlabelled else found.labels)
        if classes is not None and self.labels is None:
            self.classes = checked_classes(classes)

    def _set_labels(self, labels: Labels | None) -> None:
        self.labels = None if labels is None else labels.labels
        self.classes = None if labels is None else labels.classes
        self._named = labels is not None and labels.named
        self._guessed = labels is not None and labels.guessed

    def __len__(self) -> int:
        return len(self._images)

    def __repr__(self) -> str:
        classes = "no labels" if self.labels is None else f"{len(self.classes or ())} classes"
        return f"ImageData({self.name!r}: {len(self)} images, {classes})"

    @property
    def images(self) -> Images:
        """The pictures behind this data."""
        return self._images

    def load(self, i: int, channels: int = 3) -> Tensor:
        """Image `i` as uint8 channels×H×W, RGB (3) or grey (1). Raises `UnreadableImage`, which names the file."""
        if not 0 <= i < len(self):
            raise IndexError(f"{self.name} has {len(self)} images: there is no image {i}")
        return to_tensor(self._images.picture(i, channels))

    def where(self, i: int) -> str:
        """The path of image `i`, or its place in the array or dataset."""
        return self._images.where(i)

    def subset(self, indices: Any) -> ImageData:
        """The images at these positions, in this order; a boolean mask works too. The classes stay the same."""
        index = torch.as_tensor(indices)
        if index.dtype == torch.bool:
            if index.shape != (len(self),):
                raise DataError(f"a mask over {self.name} needs {len(self)} entries, not {tuple(index.shape)}")
            index = index.nonzero().flatten()
        index = index.to("cpu", torch.long).flatten()
        if len(index) == 0:
            raise DataError(f"no images of {self.name} were chosen")
        if int(index.min()) < 0 or int(index.max()) >= len(self):
            raise DataError(f"{self.name} has {len(self)} images: positions must be from 0 to {len(self) - 1}")
        part = copy.copy(self)
        part._images = self._images.take(index.tolist())
        part.paths = part._images.paths if isinstance(part._images, FileImages) else None
        part.labels = None if self.labels is None else self.labels[index]
        return part

    def without_labels(self) -> ImageData:
        """The same images, unlabelled."""
        part = copy.copy(self)
        part._set_labels(None)
        return part

    def with_class_names(self, classes: Sequence[str]) -> ImageData:
        """The same images without labels, which keep these names for a model that has none."""
        part = self.without_labels()
        part.classes = checked_classes(classes)
        return part

    def for_model(self, classes: Sequence[str], open_set: bool = False) -> ImageData:
        """`match_classes` if the labels are of the model's classes; the images without labels if no name is.

        Folders of a camera (`100CANON`) are no classes: such images are unlabelled, and one line in the log says so.
        """
        if self.labels is None or self.classes is None:
            return self
        table = checked_classes(classes)
        present = [self.classes[i] for i in self.labels.unique().tolist() if i < len(self.classes)]
        if self._named and not self._guessed and share_no_name(present, table):
            log.warning(
                "%s: none of its folders or labels (%s) is named as a class of the model (%s): taken as unlabelled",
                *(self.name, some(present), some(table)),
            )
            return self.without_labels()
        return self.match_classes(table, open_set=open_set)

    def unknown_names(self, classes: Sequence[str]) -> list[str]:
        """Its class names that are not among `classes`; none if no name is, or if labels are numbers. The labels
        themselves are not looked at."""
        names = self.classes if self._named and not self._guessed else None
        if names is None or share_no_name(names, classes):
            return []
        known = {canonical(name) for name in classes}
        return [name for name in names if canonical(name) not in known]

    def match_classes(self, classes: Sequence[str], open_set: bool = False) -> ImageData:
        """The same images with labels that index `classes`, a model's class list.

        Classes are matched by name, never by position; only labels that are mere numbers go by position. Images of
        other classes get the label `len(classes)` with `open_set`; without it they are an error.
        """
        table = checked_classes(classes)
        if self.labels is None or self.classes is None:
            raise DataError(f"{self.name} has no labels to match: expected class folders, or a list with labels")
        labels = match(Labels(self.labels, self.classes, self._named, self._guessed), table, open_set, self.name)
        part = copy.copy(self)
        part._set_labels(Labels(labels, table, True))
        return part

    def fingerprint(self) -> str:
        """A hex digest of the images; labels, names and the place of the folder do not count.

        Files: path below their common folder, size, time of change, and the content of a few; see `FileImages.digest`.
        Arrays: every byte. Dataset objects: every picture, so each is decoded for it.
        """
        return self._images.digest()


class _Found(NamedTuple):
    images: Images
    labels: Labels | None
    name: str


def _find(
    source: Any, labels: Any, classes: Sequence[str] | None, root: str | None, name: str | None, unlabelled: bool
) -> _Found:
    if labels is None and _is_pair(source):
        source, labels = source
    if isinstance(source, (str, os.PathLike)):
        if not os.fspath(source):
            raise DataError("the path of the data is empty: expected a folder, an image or a list file")
        if labels is not None:
            raise DataError("labels= goes with arrays and sequences of paths; folders and lists bring their own")
        return _from_path(os.path.abspath(os.path.expanduser(os.fspath(source))), classes, root, name, unlabelled)
    if _is_paths(source):
        return _from_paths([os.fspath(path) for path in source], labels, classes, root, name or "paths")
    if root is not None:
        raise DataError("root= goes with folders, lists and paths, not with images in memory")
    if isinstance(source, (np.ndarray, torch.Tensor)):
        name = name or "array"
        pixels = image_array(source, name)
        own = None if labels is None else from_given(labels, classes, len(pixels), name)
        return _Found(ArrayImages(pixels, name), own, name)
    if labels is not None:
        raise DataError("labels= goes with arrays and sequences of paths; a dataset brings its own")
    name = name or type(source).__name__
    if isinstance(source, dict):
        raise DataError(f"{name} is a dict (of splits?): give one of its datasets, such as data['train']")
    if isinstance(source, ImageData):
        raise DataError("this is an ImageData already: use it as it is")
    source = datasets.behind_loader(source)
    if datasets.is_hugging_face(source):
        return _Found(*datasets.from_hugging_face(source, classes, name), name)
    if hasattr(source, "__getitem__") and not isinstance(source, IterableDataset):
        return _Found(*datasets.from_dataset(source, classes, name), name)
    if isinstance(source, Iterable):
        return _Found(*datasets.from_iterable(source, classes, name), name)
    raise DataError(f"cannot take images from a {name}: expected a folder, a list file, an array, a dataset or paths")


def _from_path(
    path: str, classes: Sequence[str] | None, root: str | None, name: str | None, unlabelled: bool
) -> _Found:
    if os.path.isdir(path):
        name = name or os.path.basename(path) or path
        found = folders.scan(path, unlabelled=unlabelled)
        own = None if found.names is None else from_names(found.names, classes, name)
        lists.check_root(found.paths, root)
        return _Found(FileImages(found.paths), own, name)
    if path.lower().endswith(tuple(SUFFIXES)) and os.path.isfile(path):
        lists.check_root([path], root)
        return _Found(FileImages([path]), None, name or os.path.basename(path))
    if os.path.isfile(path):
        name = name or os.path.splitext(os.path.basename(path))[0]
        paths, own = lists.read(path, root, classes)
        return _Found(FileImages(paths), own, name)
    raise DataError(f"no such folder, image or list file: {one_line(path)}")


def _from_paths(given: list[str], labels: Any, classes: Sequence[str] | None, root: str | None, name: str) -> _Found:
    paths = lists.resolve(given, root or os.getcwd())
    lists.check_root(paths, root)
    for i, path in enumerate(paths):
        if not os.path.isfile(path):
            raise DataError(f"{name}: no such file: {one_line(path)} (item {i})")
    own = None if labels is None else from_given(labels, classes, len(paths), name)
    return _Found(FileImages(paths), own, name)


def _is_pair(source: Any) -> bool:
    """Whether these are images and their labels: an array of pictures, and a row of numbers or names."""
    if not isinstance(source, tuple) or len(source) != 2 or not isinstance(source[0], (np.ndarray, torch.Tensor)):
        return False
    images, labels = source
    row = getattr(labels, "ndim", 0) == 1 or (
        isinstance(labels, (list, tuple)) and all(isinstance(label, (int, str)) for label in labels)
    )
    return images.ndim >= 3 and row


def _is_paths(source: Any) -> bool:
    if isinstance(source, np.ndarray):
        return source.dtype.kind == "U" and source.ndim == 1
    return (
        isinstance(source, (list, tuple)) and len(source) > 0 and all(isinstance(p, (str, os.PathLike)) for p in source)
    )
