"""Inputs of `usfan predict`: photographs, folders, lists, and paths on standard input."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Sequence

from usfan.data.decoding.decode import is_image_name
from usfan.data.images import FileImages
from usfan.data.labels import some
from usfan.data.sources import ImageData
from usfan.errors import DataError


def open_inputs(
    inputs: Sequence[str],
    *,
    root: str | None = None,
    strict: bool = False,
    standard_input: Iterable[str] | None = None,
) -> ImageData:
    """All named images, without labels, in order. `-` stands for one path per line of standard input.

    A missing photograph stays in the list, and its row says so. A missing folder or list is an error.
    """
    paths: list[str] = []
    for path in _expanded(inputs, standard_input):
        if is_image_name(path) and not os.path.isdir(path):
            paths.append(os.path.abspath(os.path.expanduser(path)))
            continue
        data = ImageData(path, unlabelled=True, root=root, strict=strict)
        if len(inputs) == 1 and path == inputs[0]:
            return data
        paths += data.paths or []
    if not paths:
        raise DataError(
            "no image was given: name photographs, a folder or a list, or write paths to standard input"
        )
    if not any(os.path.isfile(path) for path in paths):
        raise DataError(f"no such image: {some(paths)}")
    name = inputs[0] if len(inputs) == 1 else f"{len(paths)} images"
    return ImageData(FileImages(paths), root=root, name=name, strict=strict)


def _expanded(inputs: Iterable[str], standard_input: Iterable[str] | None) -> Iterator[str]:
    for path in inputs:
        if path != "-":
            yield path
            continue
        for line in standard_input or sys.stdin:
            if line.strip():
                yield line.strip("\r\n")
