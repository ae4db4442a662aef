"""Inputs of `usfan predict`: photographs, folders, lists, and paths on standard input."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from typing import Any, TextIO

from usfan.data.decoding.decode import SUFFIXES, one_line
from usfan.data.images import FileImages
from usfan.data.lists import check_root
from usfan.data.sources import ImageData
from usfan.errors import DataError


def open_inputs(
    given: Sequence[str], *, root: str | None = None, strict: bool = False, standard_input: TextIO | None = None
) -> ImageData:
    """All named images, without labels, in order. `-` stands for one path per line of standard input.

    A missing photograph stays in the list, and its row says so. A missing folder or list is an error.
    """
    if len(given) == 1 and given[0] != "-" and not _is_photograph(given[0]):
        return ImageData(given[0], unlabelled=True, root=root, strict=strict)
    paths: list[str] = []
    for one in _expanded(given, standard_input):
        if _is_photograph(one):
            paths.append(os.path.abspath(os.path.expanduser(one)))
        else:
            paths += ImageData(one, unlabelled=True, root=root).paths or []
    if not paths:
        raise DataError("no image was given: name photographs, a folder or a list, or write paths to standard input")
    if len(paths) == 1 and not os.path.isfile(paths[0]):
        raise DataError(f"no such image: {one_line(paths[0])}")
    check_root(paths, root)
    there = next((path for path in paths if os.path.isfile(path)), None)
    if there is None:
        raise DataError(f"none of the {len(paths)} images is there: {one_line(paths[0])}, …")
    data = ImageData([there], strict=strict, name=given[0] if len(given) == 1 else f"{len(paths)} images")
    data._images, data.paths = FileImages(paths), paths  # which may be missing
    return data


def _is_photograph(path: str) -> bool:
    return path.lower().endswith(tuple(SUFFIXES)) and not os.path.isdir(path)


def _expanded(given: Iterable[str], standard_input: Any) -> Iterable[str]:
    for one in given:
        if one != "-":
            yield one
            continue
        for line in standard_input or sys.stdin:
            if line.strip():
                yield line.strip("\r\n")
