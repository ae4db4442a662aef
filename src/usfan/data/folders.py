"""Images in folders: one folder per class, or one flat folder without labels."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from typing import NoReturn

from usfan.budget import check_cost
from usfan.data.decoding.decode import SUFFIXES, one_line
from usfan.data.labels import name_key
from usfan.errors import DataError, printable

MOST_FOLDERS = 20_000
"""In all. A link may lead to the root of the disk."""


class NoImages(DataError):
    """A folder without images."""


def scan(folder: str, *, unlabelled: bool = False) -> tuple[list[str], list[str] | None]:
    """The paths of the images, class by class, and the class folder of each; None for a flat folder.

    Hidden files and folders are skipped, class folders without images too; symbolic links are followed. Images beside
    class folders are refused: they have no class. With `unlabelled` all images are taken, at any depth, and folder
    names mean nothing (`DCIM/100CANON`).
    """
    beside: list[str] = []
    names: list[str] = []
    paths: list[str] = []
    others: Counter[str] = Counter()
    for class_name, path in _walk(folder):
        suffix = os.path.splitext(path)[1].lower()
        if suffix not in SUFFIXES:
            others[suffix or "no suffix"] += 1
        elif class_name == os.curdir:
            beside.append(path)
        else:
            names.append(class_name)
            paths.append(path)
    if not beside and not paths:
        raise NoImages(_nothing(folder, others))
    if unlabelled or not paths:
        return beside + paths, None
    if beside:
        first = one_line(os.path.basename(beside[0]))
        count = f"{len(beside)} images (such as {first}) beside {len(set(names))} class folders"
        advice = "move them into a class folder, or give a list file, or take all images without labels (unlabelled)"
        raise DataError(f"{one_line(folder)} holds {count}: {advice}")
    order = sorted(range(len(paths)), key=lambda i: (name_key(names[i]), paths[i]))
    return [paths[i] for i in order], [names[i] for i in order]


def _walk(top: str) -> Iterator[tuple[str, str]]:
    """The class and the path of every file; those in the top folder itself come first, with the class `.`.

    Links may lead to a folder again and again, or round in a circle: each folder counts once for a class.
    """
    visited: set[tuple[str, int, int]] = set()
    waiting = [(os.curdir, top)]
    while waiting:
        class_name, place = waiting.pop()
        # One level at a time: below a thousand levels, os.walk would exceed Python's limit on recursion.
        _, folders, files = next(os.walk(place, onerror=_refuse))
        status = os.stat(place)
        identities = {(name, status.st_dev, status.st_ino) for name in (os.curdir, class_name)}
        if visited & identities:
            continue
        visited.add((class_name, status.st_dev, status.st_ino))
        subject = f"{printable(top, 300)}: folders below it"
        check_cost(subject, len(visited) - 1, MOST_FOLDERS, "or more", DataError)
        for name in reversed(_visible(folders)):
            waiting.append((name if place == top else class_name, os.path.join(place, name)))
        for name in _visible(files):
            yield class_name, os.path.join(place, name)


def _visible(names: list[str]) -> list[str]:
    return sorted(name for name in names if not name.startswith(".") and name != "__MACOSX")


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
