"""Images in folders: one folder per class, or one flat folder without labels."""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from usfan.budget import check_cost
from usfan.data.decoding.decode import SUFFIXES, one_line
from usfan.data.labels import name_key
from usfan.errors import DataError, shown

MOST_FOLDERS = 20_000
"""In all. A link may lead to the root of the disk."""


class Folder(NamedTuple):
    paths: list[str]
    """Absolute, class by class, sorted within each."""
    names: list[str] | None
    """The class folder of each image; None for a flat folder."""


def scan(folder: str, *, unlabelled: bool = False) -> Folder:
    """Find the images. Hidden files and folders are skipped; symbolic links are followed.

    Class folders without images are skipped too. Images beside class folders are refused: they have no class.
    With `unlabelled` all images are taken, at any depth, and folder names mean nothing (`DCIM/100CANON`).
    """
    images, folders, others = _listing(folder)
    names: list[str] = []
    paths: list[str] = []
    counted = itertools.count(1)
    for name in sorted(folders, key=name_key):
        below = _below(os.path.join(folder, name), others, _identity(folder), counted)
        paths += below
        names += [name] * len(below)
    if unlabelled and (images or paths):
        return Folder([os.path.join(folder, name) for name in images] + paths, None)
    if images and names:
        count = len(set(names))
        beside = f"{len(images)} images (such as {one_line(images[0])}) beside {count} class folders"
        advice = "move them into a class folder, or give a list file, or take all images without labels (unlabelled)"
        raise DataError(f"{one_line(folder)} holds {beside}: {advice}")
    if names:
        return Folder(paths, names)
    if images:
        return Folder([os.path.join(folder, name) for name in images], None)
    raise DataError(_nothing(folder, others))


def holds_images(folder: str) -> bool:
    """Whether there is an image in the folder, at any depth."""
    images, inner, others = _listing(folder)
    count = itertools.count(1)
    return bool(images) or any(_below(os.path.join(folder, n), others, _identity(folder), count) for n in inner)


def _below(folder: str, others: Counter[str], above: tuple[int, int], count: Iterator[int]) -> list[str]:
    """All images below a class folder, at any depth, sorted by path. Links may lead to a folder again and again, or
    round in a circle: each folder counts once, under the first name that leads to it."""
    seen, waiting, paths = {above}, [folder], []
    while waiting:
        found = []
        for place in waiting:
            identity = _identity(place)
            if identity in seen:
                continue
            seen.add(identity)
            check_cost(f"{shown(folder, 300)}: folders below it", next(count), MOST_FOLDERS, "or more", DataError)
            images, folders, _ = _listing(place, others)
            paths += [os.path.join(place, name) for name in images]
            found += [os.path.join(place, name) for name in folders]
        waiting = found
    return sorted(paths)


def _identity(folder: str) -> tuple[int, int]:
    try:
        status = os.stat(folder)
    except OSError as error:
        raise _cannot_read(folder, error) from error
    return status.st_dev, status.st_ino


def _cannot_read(folder: str, error: OSError) -> DataError:
    return DataError(f"cannot read the folder {shown(folder, 300)}: {(error.strerror or str(error)).lower()}")


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link that leads to itself
        return False


def _listing(folder: str, others: Counter[str] | None = None) -> tuple[list[str], list[str], Counter[str]]:
    """The images and the folders in a folder, sorted, and a count of what else is there by suffix."""
    others = Counter() if others is None else others
    images, folders = [], []
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                suffix = os.path.splitext(entry.name)[1].lower()
                if entry.name.startswith(".") or entry.name == "__MACOSX":
                    continue
                if _is_folder(entry):
                    folders.append(entry.name)
                elif suffix in SUFFIXES:
                    images.append(entry.name)
                else:
                    others[suffix or "no suffix"] += 1
    except OSError as error:
        raise _cannot_read(folder, error) from error
    return sorted(images), sorted(folders), others


def _nothing(folder: str, others: Counter[str]) -> str:
    expected = "expected class folders with images, or images (.jpg, .png, …)"
    if not others:
        return f"{one_line(folder)} holds no images: {expected}"
    found = ", ".join(f"{count} {one_line(suffix)}" for suffix, count in others.most_common(3))
    return f"{one_line(folder)} holds no images, but {sum(others.values())} other files ({found}): {expected}"
