"""The file that keeps decoded images between runs.

    8 bytes   magic
    8 + 8     where the header starts, and its length (little-endian)
    32 bytes  BLAKE2b of the header
    zeros up to 4096
    pixels    uint8 N×C×S×S
    header    JSON: version, key, shape, dropped = [[position, reason], …], checksums = CRC-32 of every CHECKED images

The header comes last because only the end of the decoding knows it. The first 4096 bytes are written after everything
else, and the file gets its name only once it is complete and on the disk, so a build that was cut off leaves nothing
that could be taken for a cache. A reader believes nothing: sizes are compared before memory is taken, and pixels that
go to memory are checked against the CRCs (all of them; of a file that stays on the disk, a sample).
"""

from __future__ import annotations

import contextlib
import json
import logging
import mmap
import os
import struct
import warnings
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from usfan.files import Folder, NotAFile, whole_file

VERSION = 1
CHECKED = 64
"""Images per checksum."""
SAMPLED = 16
"""Checksums looked at in a file that stays on the disk."""

_log = logging.getLogger(__name__)
_MAGIC = b"usfanpx\n"
_PREFIX = struct.Struct("<8sQQ32s")
_START = 4096
_MOST_HEADER = 2**28


class BadCacheFile(Exception):
    """The file is not a whole cache of the images asked for; it is built again."""


@dataclass(frozen=True)
class Header:
    """What the pixels are: `shape` N×C×S×S, `dropped` the positions and reasons of images that could not be read."""

    key: str
    shape: tuple[int, int, int, int]
    dropped: list[tuple[int, str]]
    checksums: list[int]


class Writer:
    """Writes pixels as they come, then the header. Writes to a temporary name that the caller renames."""

    def __init__(self, file: BinaryIO):
        self.file = file
        self.count = 0
        self.checksums: list[int] = []
        file.write(bytes(_START))

    def append(self, pixels: Tensor) -> None:
        """Full batches of `CHECKED` images, but for the last."""
        content = pixels.contiguous().numpy().data.cast("B")
        self.checksums.append(zlib.crc32(content))
        self.file.write(content)
        self.count += len(pixels)

    def finish(self, key: str, shape: tuple[int, int, int], dropped: list[tuple[int, str]]) -> None:
        start = self.file.tell()
        fields = {"version": VERSION, "key": key, "shape": [self.count, *shape], "dropped": dropped}
        header = json.dumps(fields | {"checksums": self.checksums}).encode()
        self.file.write(header)
        self.file.seek(0)
        self.file.write(_PREFIX.pack(_MAGIC, start, len(header), blake2b(header, digest_size=32).digest()))


def read(
    path: Path, key: str, total: int, form: tuple[int, int, int], room: Callable[[int], Tensor] | None
) -> tuple[Header, Tensor] | None:
    """What a kept file holds, in the tensor that `room` makes for so many images, or mapped if there is no room.

    None if there is no file, or it is not what it should be. A link is not followed.
    """
    if not os.path.lexists(path):
        return None
    try:
        with Folder(path.parent) as folder, folder.open(path.name) as file:
            header = read_header(file, key, total, form)
            if room is None:
                return header, mapped(file, header)
            pixels = room(header.shape[0])
            read_into(file, header, pixels)
            return header, pixels
    except (BadCacheFile, NotAFile) as error:
        _log.warning("building the cache file %s again: %s", path, error)
        return None


def read_header(file: BinaryIO, key: str, total: int, form: tuple[int, int, int]) -> Header:
    """The header of an open file, if the file is the whole cache of `total` images of this form, under this key."""
    size = os.fstat(file.fileno()).st_size
    prefix = file.read(_PREFIX.size)
    if len(prefix) < _PREFIX.size:
        raise BadCacheFile("it is cut short")
    magic, start, length, digest = _PREFIX.unpack(prefix)
    if magic != _MAGIC:
        raise BadCacheFile("it is not complete, or not a cache")
    if length > _MOST_HEADER or start + length != size:
        raise BadCacheFile(f"it has {size} bytes instead of {start + length}")
    file.seek(start)
    content = file.read(length)
    if blake2b(content, digest_size=32).digest() != digest:
        raise BadCacheFile("its header is damaged")
    header = _parsed(content)
    count = header.shape[0]
    dropped = {position for position, _ in header.dropped if 0 <= position < total}
    if header.key != key or header.shape[1:] != form or count + len(dropped) != total or count < 1:
        raise BadCacheFile("it holds other images, or other settings")
    if start != _START + count * form[0] * form[1] * form[2] or len(header.checksums) != -(-count // CHECKED):
        raise BadCacheFile("its size does not fit its header")
    return header


def _parsed(content: bytes) -> Header:
    try:
        fields = json.loads(content)
        if fields["version"] != VERSION:
            raise BadCacheFile(f"it has the format {fields['version']}, not {VERSION}")
        shape = tuple(int(side) for side in fields["shape"])
        dropped = [(int(position), str(reason)) for position, reason in fields["dropped"]]
        checksums = [int(value) for value in fields["checksums"]]
        if len(shape) != 4:
            raise BadCacheFile("its header has no shape")
        return Header(str(fields["key"]), (shape[0], shape[1], shape[2], shape[3]), dropped, checksums)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise BadCacheFile("its header cannot be read") from error


def read_into(file: BinaryIO, header: Header, pixels: Tensor) -> None:
    """Fill a tensor, on any device, and check every checksum on the way."""
    file.seek(_START)
    for start, stop, checksum in _blocks(header):
        host = pixels.device.type == "cpu"
        block = pixels[start:stop] if host else torch.empty((stop - start, *header.shape[1:]), dtype=torch.uint8)
        content = block.numpy().data.cast("B")
        if file.readinto(content) != len(content) or zlib.crc32(content) != checksum:  # type: ignore[attr-defined]
            raise BadCacheFile(f"the pixels of images {start} to {stop - 1} are damaged")
        if not host:
            pixels[start:stop] = block


def mapped(file: BinaryIO, header: Header) -> Tensor:
    """The pixels without reading them: pages come from the disk as they are used. A sample of checksums is checked."""
    # Read-only: of a private writable mapping Linux refuses one larger than the memory, and such files end here.
    memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    count = header.shape[0] * header.shape[1] * header.shape[2] * header.shape[3]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        pixels = torch.frombuffer(memory, dtype=torch.uint8, count=count, offset=_START).view(header.shape)
    blocks = list(_blocks(header))
    step = max(1, len(blocks) // SAMPLED)
    for start, stop, checksum in [*blocks[::step], blocks[-1]]:
        if zlib.crc32(pixels[start:stop].numpy().data.cast("B")) != checksum:
            raise BadCacheFile(f"the pixels of images {start} to {stop - 1} are damaged")
    return pixels


def _blocks(header: Header) -> Iterator[tuple[int, int, int]]:
    for number, checksum in enumerate(header.checksums):
        yield number * CHECKED, min((number + 1) * CHECKED, header.shape[0]), checksum


@contextlib.contextmanager
def locked(path: Path) -> Iterator[bool]:
    """One builder at a time; others wait, then find the file. The system drops the lock of a process that dies.

    If files cannot be locked (False), two may build at once: each writes under a name of its own, and both end with
    the same file.
    """
    with contextlib.ExitStack() as stack:
        try:
            import fcntl

            folder = stack.enter_context(Folder(path.parent))
            fcntl.flock(stack.enter_context(folder.in_place(path.name, append=True)), fcntl.LOCK_EX)
            held = True
        except (ImportError, OSError):
            held = False
        yield held


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A temporary file to write to; it gets its own name at the end, or is removed if something fails."""
    with whole_file(path) as part, open(part, "wb") as file:
        yield file


def remove_parts(path: Path) -> None:
    """Remove what killed builds of this file left. Only for the holder of the lock."""
    for part in path.parent.glob(f".{path.name}.*.part"):
        part.unlink(missing_ok=True)
