"""Rows of numbers that later runs use again: decoded images, or features of them.

    KEY.npy    N rows, in numpy's own format
    KEY.json   skipped = [[position, reason], …], checksums = CRC-32 of every CHECKED rows, and a digest of both

Each file gets its name only once it is complete and on the disk, the JSON file last, so a build that was cut off leaves
nothing that could be taken for a cache. A reader trusts neither file: it knows the shape that it expects, compares
sizes before it takes memory, and checks the rows against the checksums (of a file that stays on the disk, a sample).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import json
import logging
import math
import os
import shutil
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from usfan.data.memory import Place
from usfan.errors import ArtifactError
from usfan.files import Folder, read_json_in, write_json

VERSION = 2
"""Part of every key: files of another version are not looked at."""
CHECKED = 64
"""Rows per checksum."""
SAMPLED = 16
"""Checksums looked at in a file that stays on the disk."""

Skips = list[tuple[int, str]]
"""Positions of the images that have no row, in order, and why."""

_log = logging.getLogger(__name__)


def cache_folder(chosen: str | os.PathLike[str] | None) -> Path:
    """The folder that the user chose, $USFAN_CACHE, or ~/.cache/usfan."""
    return Path(chosen or os.environ.get("USFAN_CACHE") or "~/.cache/usfan").expanduser()


def digest(value: object) -> str:
    return blake2b(json.dumps(value).encode(), digest_size=16).hexdigest()


def allocate(
    count: int,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    place: Place,
) -> Tensor:
    """Memory for so many rows, on the device or the host."""
    where = device if place == "device" else torch.device("cpu")
    return torch.empty((count, *shape), dtype=dtype, device=where, pin_memory=place == "pinned")


class RowCache:
    """The two files of one key. `count` images have a row of this shape and type each, unless they were skipped."""

    def __init__(
        self,
        folder: Path,
        key: str,
        count: int,
        shape: tuple[int, ...],
        dtype: torch.dtype,
    ) -> None:
        self.folder = folder
        self.key = key
        self.count = count
        self.shape = shape
        self.dtype = dtype
        self._numpy_type = torch.empty(0, dtype=dtype).numpy().dtype
        self._row_bytes = math.prod(shape) * dtype.itemsize
        self.table = folder / f"{key}.npy"
        self.header = folder / f"{key}.json"

    def read_or_build(
        self,
        device: torch.device,
        place: Place,
        batches: Callable[[Skips], Iterable[Tensor]],
    ) -> tuple[Tensor, Skips]:
        """The rows and the skipped images. `batches` gives CHECKED rows at a time, and notes skipped images."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _cannot_write(error, self.folder) from error
        with _locked(self.folder, f"{self.key}.lock") as is_locked:
            rows = self.read(device, place)
            if rows is not None:
                return rows
            if is_locked:
                self._remove_parts()
            try:
                self._build(batches)
            except OSError as error:
                raise _cannot_write(error, self.table) from error
            rows = self.read(device, place)
        if rows is None:
            reason = "the image cache cannot be read back right after it was written"
            raise OSError(errno.EIO, reason, str(self.table))
        return rows

    def read(self, device: torch.device, place: Place) -> tuple[Tensor, Skips] | None:
        """The rows, in memory or mapped; None if there are none, or they are damaged. Links are not followed."""
        if not os.path.lexists(self.header):
            return None
        try:
            with Folder(self.folder) as folder:
                skips, checksums = self._parse(read_json_in(folder, self.header.name))
                with folder.open(self.table.name) as file:
                    table = self._map(file, self.count - len(skips))
        except ArtifactError as error:
            _log.warning("building the cache file %s again: %s", self.table, error)
            return None
        rows = table
        step = max(1, len(checksums) // SAMPLED)
        if place != "disk":
            rows = allocate(len(table), self.shape, self.dtype, device, place)
            step = 1
        for number in {*range(0, len(checksums), step), len(checksums) - 1}:
            block = slice(number * CHECKED, (number + 1) * CHECKED)
            if zlib.crc32(_bytes_of(table[block])) != checksums[number]:
                _log.warning(
                    "building the cache file %s again: its rows are damaged", self.table
                )
                return None
            if rows is not table:
                rows[block] = table[block]
        return rows, skips

    def _parse(self, header: Any) -> tuple[Skips, list[int]]:
        """The skipped images and the checksums; the digest says that they are those of this key."""
        try:
            content = header["content"]
            if header["digest"] != digest([self.key, content]):
                raise ArtifactError(f"{self.header.name} is damaged, or of other images")
            skips = [(int(position), str(reason)) for position, reason in content["skipped"]]
            checksums = [int(value) for value in content["checksums"]]
        except (ValueError, KeyError, TypeError) as error:
            raise ArtifactError(f"{self.header.name} cannot be read") from error
        count = self.count - len(skips)
        positions = {position for position, _ in skips}
        is_valid = len(positions) == len(skips) and positions <= set(range(self.count))
        if not is_valid or count < 1 or len(checksums) != math.ceil(count / CHECKED):
            raise ArtifactError(f"{self.header.name} does not fit {self.count} images")
        return skips, checksums

    def _numpy_header(self, count: int) -> bytes:
        """The bytes before the rows. numpy pads them, so that their length does not depend on the count."""
        buffer = io.BytesIO()
        kind = np.lib.format.dtype_to_descr(self._numpy_type)
        fields = {"shape": (count, *self.shape), "fortran_order": False, "descr": kind}
        np.lib.format.write_array_header_1_0(buffer, fields)
        return buffer.getvalue()

    def _map(self, file: BinaryIO, count: int) -> Tensor:
        """The rows without reading them: pages come from the disk as they are used."""
        header = self._numpy_header(count)
        size = os.fstat(file.fileno()).st_size
        expected = len(header) + count * self._row_bytes
        if size != expected:
            raise ArtifactError(f"it has {size} bytes instead of {expected}")
        if file.read(len(header)) != header:
            raise ArtifactError("its header is damaged")
        # Read-only: Linux refuses a private writable mapping that is larger than the memory, and such files end here.
        table = np.memmap(file, self._numpy_type, "r", len(header), (count, *self.shape))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
            return torch.from_numpy(table)

    def _build(self, batches: Callable[[Skips], Iterable[Tensor]]) -> None:
        needed = self.count * self._row_bytes
        free = shutil.disk_usage(self.folder).free
        if free < needed:
            sizes = f"{needed >> 20} MiB needed, {free >> 20} MiB free"
            raise OSError(errno.ENOSPC, f"No space left on device ({sizes})")
        skips: Skips = []
        checksums: list[int] = []
        count = 0
        with (
            Folder(self.folder) as folder,
            folder.replacing(self.table.name) as part,
            open(part, "wb") as file,
        ):
            file.write(self._numpy_header(self.count))
            for batch in batches(skips):
                content = _bytes_of(batch.cpu().contiguous())
                checksums.append(zlib.crc32(content))
                file.write(content)
                count += len(batch)
            file.seek(0)
            file.write(self._numpy_header(count))
        header = {"skipped": skips, "checksums": checksums}
        write_json(self.header, {"content": header, "digest": digest([self.key, header])})

    def _remove_parts(self) -> None:
        """Remove what killed builds left behind. Only the holder of the lock may."""
        for part in self.folder.glob(f".{self.key}.*.part"):
            part.unlink(missing_ok=True)


def _bytes_of(rows: Tensor) -> memoryview:
    return rows.numpy().data.cast("B")


@contextlib.contextmanager
def _locked(path: Path, name: str) -> Iterator[bool]:
    """One builder at a time; others wait, then find the files. The system drops the lock of a process that dies.

    If files cannot be locked (False), two may build at once: each writes under a name of its own, and both end with
    the same files.
    """
    with contextlib.ExitStack() as stack:
        is_locked = False
        with contextlib.suppress(OSError):
            folder = stack.enter_context(Folder(path))
            file = stack.enter_context(folder.in_place(name, append=True))
            fcntl.flock(file, fcntl.LOCK_EX)
            is_locked = True
        yield is_locked


def _cannot_write(error: OSError, path: Path) -> OSError:
    advice = (
        "free some space, or choose another folder (cache_dir, or the variable USFAN_CACHE)"
    )
    reason = f"cannot write the image cache: {error.strerror or error}; {advice}"
    return OSError(error.errno, reason, str(path))
