"""WebDataset shards: tar files in which files of one name and several endings are one sample.

    000012.jpg  000012.cls        the picture, and its class: a number from 0, or a name

The name goes up to the first dot after the last slash. A picture has one of the endings of image files, in upper or
lower case; other files of a sample are passed over. All samples with a picture have a class, or none has.

Shards are indexed once: only the place of each picture in the file is kept. Nothing is unpacked to the disk, so a name
in a shard is no more than a name. Packed shards (.tar.gz) are refused: a few kilobytes could unpack to gigabytes.
"""

from __future__ import annotations

import os
import tarfile
from collections.abc import Iterator, Sequence
from typing import BinaryIO, cast

from usfan.budget import check_cost
from usfan.data.decoding.decode import SUFFIXES, FilePart, is_image_name, one_line
from usfan.data.images import Content, PackedImages
from usfan.data.lists import label_values
from usfan.errors import DataError, printable

SHARD = ".tar"
MOST_FILES = 6_000_000
"""Files in all shards: two for each image of twice ImageNet."""
MOST_LABEL = 4_096
"""Bytes of a class."""
MOST_READ = 1 << 20
"""Bytes that the index reads at a time: a header is 512, a name may be some thousand."""


class HeaderReader:
    """A file of which only small pieces are read: a header may claim gigabytes for a name."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file

    def read(self, size: int = -1) -> bytes:
        if not 0 <= size <= MOST_READ:
            raise tarfile.ReadError("a header is too large")
        return self.file.read(size)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        return self.file.seek(offset, whence)

    def tell(self) -> int:
        return self.file.tell()


def is_shard(path: str) -> bool:
    return path.lower().endswith(SHARD)


def shards_in(folder: str) -> list[str]:
    """The shards of a folder without images and folders in it; hidden files do not count."""
    try:
        names = sorted(name for name in os.listdir(folder) if not name.startswith("."))
    except OSError:  # whoever reads the folder next says why
        return []
    paths = [os.path.join(folder, name) for name in names]
    if any(is_image_name(path) or os.path.isdir(path) for path in paths):
        return []
    return [path for path in paths if is_shard(path) and os.path.isfile(path)]


def read_shards(paths: Sequence[str]) -> Content:
    """The pictures of these shards, in order, and their classes."""
    pictures: list[FilePart] = []
    words: list[str | None] = []
    count = 0
    for path in paths:
        samples: dict[str, list[FilePart | None]] = {}
        for part in parts_of(path):
            count += 1
            subject = f"{one_line(path)}: files in shards"
            check_cost(subject, count, MOST_FILES, "in number", DataError)
            key, ending = split_name(part.name)
            if f".{ending}" in SUFFIXES:
                place = 0
            elif ending == "cls":
                place = 1
            else:
                continue
            sample = samples.setdefault(key, [None, None])
            if sample[place] is not None:
                kind = "class" if place else "picture"
                raise DataError(f"{one_line(part.label)}: a second {kind} of one sample")
            sample[place] = part
        for picture, label in samples.values():
            if picture is not None:
                pictures.append(picture)
                words.append(None if label is None else read_label(label))
    if not pictures:
        names = ", ".join(map(one_line, paths[:3]))
        raise DataError(
            f"no pictures in {names}: expected pairs such as 000012.jpg and 000012.cls"
        )
    places = [f"{one_line(picture.label)}: " for picture in pictures]
    return Content(PackedImages(pictures), label_values(words, places))


def parts_of(path: str) -> Iterator[FilePart]:
    """The plain files in a shard. What else a tar file can hold (links, devices) is passed over."""
    if not os.path.isfile(path):
        raise DataError(f"no such file: {one_line(path)}")
    try:
        size = os.path.getsize(path)
        with open(path, "rb") as file:
            reader = cast(BinaryIO, HeaderReader(file))
            with tarfile.open(fileobj=reader, mode="r:", errors="replace") as archive:
                place = -1
                while (member := archive.next()) is not None:
                    archive.members.clear()  # type: ignore[attr-defined]  # it would keep them all
                    if member.size < 0 or archive.offset <= place:
                        raise tarfile.ReadError("a file in it has a negative size")
                    place = archive.offset
                    is_plain = member.type in (tarfile.REGTYPE, tarfile.AREGTYPE)
                    if not is_plain or member.issparse():
                        continue
                    if member.offset_data + member.size > size:
                        raise tarfile.ReadError("a file in it lies outside of it")
                    yield FilePart(path, member.offset_data, member.size, member.name)
                file.seek(archive.offset)
                if file.read(tarfile.BLOCKSIZE).strip(b"\0"):  # tarfile takes it for the end
                    raise tarfile.ReadError("a header in it is damaged")
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise DataError(f"cannot read {one_line(path)}: {reason}") from error
    except (tarfile.TarError, ValueError, RecursionError) as error:
        raise DataError(
            f"{one_line(path)} is damaged, packed, or no tar file: {printable(error, 200)}"
        ) from error


def split_name(name: str) -> tuple[str, str]:
    """Name and ending of a file in a shard: `a/b.seg.png` → `a/b`, `seg.png`."""
    folder, slash, file = name.rpartition("/")
    stem, _, ending = file.partition(".")
    return f"{folder}{slash}{stem}", ending.lower()


def read_label(part: FilePart) -> str:
    """The class of a sample."""
    if part.size > MOST_LABEL:
        raise DataError(f"{one_line(part.label)}: a class of {part.size} bytes")
    try:
        text = part.read().decode("utf-8").strip()
    except ValueError:
        text = ""
    if not text or not text.isprintable():
        raise DataError(f"{one_line(part.label)}: expected a class, one number or name")
    return text
