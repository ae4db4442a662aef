"""Images in folders: one folder per class, or one flat folder without labels."""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple, NoReturn

from usfan.budget import check_cost
from usfan.data.decoding.decode import SUFFIXES, one_line
from usfan.data.labels import name_key
from usfan.errors import DataError, printable

MOST_FOLDERS = 20_000
"""In all. A link may lead to the root of the disk."""


class NoImages(DataError):
    """A folder without images."""


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
    search = _Search()
    images, folders = next(search.walk(folder, set()))
    names: list[str] = []
    paths: list[str] = []
    for name in sorted(folders, key=name_key):
        below: list[str] = []
        for files, _ in search.walk(os.path.join(folder, name), {_identity(folder)}):
            below += files
        paths += sorted(below)
        names += [name] * len(below)
    if not images and not paths:
        raise NoImages(_nothing(folder, search.others))
    if unlabelled or not paths:
        return Folder(images + paths, None)
    if images:
        first = one_line(os.path.basename(images[0]))
        beside = (
            f"{len(images)} images (such as {first}) beside {len(set(names))} class folders"
        )
        advice = "move them into a class folder, or give a list file, or take all images without labels (unlabelled)"
        raise DataError(f"{one_line(folder)} holds {beside}: {advice}")
    return Folder(paths, names)


class _Search:
    """Counts the folders that are visited, and the files that are no images, by suffix."""

    def __init__(self) -> None:
        self.others: Counter[str] = Counter()
        self.counter = itertools.count()

    def walk(
        self, top: str, visited: set[tuple[int, int]]
    ) -> Iterator[tuple[list[str], list[str]]]:
        """The images (paths) and the folders (names) in a folder, and in each folder below it, sorted.

        Links may lead to a folder again and again, or round in a circle: each folder counts once.
        """
        places = [top]  # no recursion: folders may be thousands deep
        while places:
            place = places.pop()
            identity = _identity(place)
            if identity in visited:
                continue
            visited.add(identity)
            folders, files = _entries(place)
            subject = f"{printable(top, 300)}: folders below it"
            check_cost(subject, next(self.counter), MOST_FOLDERS, "or more", DataError)
            places += [os.path.join(place, name) for name in reversed(folders)]
            images = []
            for name in files:
                suffix = os.path.splitext(name)[1].lower()
                if suffix in SUFFIXES:
                    images.append(os.path.join(place, name))
                else:
                    self.others[suffix or "no suffix"] += 1
            yield images, folders


def _entries(folder: str) -> tuple[list[str], list[str]]:
    """Names of the folders and of the files in a folder, sorted."""
    folders: list[str] = []
    files: list[str] = []
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                is_folder = os.path.isdir(entry.path)  # false for a link that leads nowhere
                (folders if is_folder else files).append(entry.name)
    except OSError as error:
        _refuse(error)
    return _visible(folders), _visible(files)


def _visible(names: list[str]) -> list[str]:
    return sorted(name for name in names if not name.startswith(".") and name != "__MACOSX")


def _identity(folder: str) -> tuple[int, int]:
    try:
        status = os.stat(folder)
    except OSError as error:
        _refuse(error)
    return status.st_dev, status.st_ino


def _refuse(error: OSError) -> NoReturn:
    folder = printable(error.filename, 300)
    reason = (error.strerror or str(error)).lower()
    raise DataError(f"cannot read the folder {folder}: {reason}") from error


def _nothing(folder: str, others: Counter[str]) -> str:
    expected = "expected class folders with images, or images (.jpg, .png, …)"
    if not others:
        return f"{one_line(folder)} holds no images: {expected}"
    kinds = ", ".join(f"{count} {one_line(suffix)}" for suffix, count in others.most_common(3))
    return f"{one_line(folder)} holds no images, but {others.total()} other files ({kinds}): {expected}"
