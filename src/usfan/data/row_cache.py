"""Rows of numbers that later runs use again: decoded images, or features of them.

    KEY.rows   the bytes of N rows
    KEY.json   skipped = [[position, reason], …], checksums = CRC-32 of every CHECKED rows, and a digest of both

Each file gets its name only once it is complete and on the disk, the JSON file last, so a build that was cut off leaves
nothing that could be taken for a cache. A reader trusts neither file: it knows the shape that it expects, compares
sizes before it takes memory, and checks the rows against the checksums (of a file that stays on the disk, a sample).
In a folder that users share, files of other users are not read.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import math
import os
import shutil
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from torch import Tensor

from usfan.data.memory import choose_place
from usfan.errors import ArtifactError
from usfan.files import Folder, read_in, remove_tree, write_json

VERSION = 4
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


@dataclass(frozen=True)
class RowCache:
    """The two files of one key. `count` images have a row of this shape and type each, unless they were skipped."""

    folder: Path
    key: str
    count: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    def size(self, count: int) -> int:
        """Bytes of so many rows."""
        return count * math.prod(self.shape) * self.dtype.itemsize

    def read(self, device: torch.device) -> Tensor | None:
        """The rows that an earlier run cached; None if there are none."""
        if not self.folder.is_dir():
            return None
        with Folder(self.folder) as folder:
            rows = self._read(folder, device)
        return None if rows is None else rows[0]

    def read_or_build(
        self,
        device: torch.device,
        batches: Callable[[Skips], Iterable[Tensor]],
    ) -> tuple[Tensor, Skips]:
        """The rows, on the device if they fit, and the skipped images. `batches` gives CHECKED rows at a time, and
        notes skipped images."""
        table = self.folder / f"{self.key}.rows"
        try:
            with Folder(self.folder, create=True) as folder, self._lock(folder):
                rows = self._read(folder, device)
                if rows is None:
                    self._build(folder, batches)
                    rows = self._read(folder, device, is_new=True)
        except OSError as error:
            advice = "free some space, or choose another folder (cache_dir, or the variable USFAN_CACHE)"
            reason = f"cannot write the image cache: {error.strerror or error}; {advice}"
            raise OSError(error.errno, reason, str(table)) from error
        if rows is None:
            reason = "the image cache cannot be read back right after it was written"
            raise OSError(errno.EIO, reason, str(table))
        return rows

    @contextlib.contextmanager
    def _lock(self, folder: Folder) -> Iterator[None]:
        """One builder at a time; others wait, then find the files. The system drops the lock of a process that dies,
        and the next one removes what it left behind.

        If files cannot be locked, two may build at once: each writes under a name of its own, and both end with the
        same files.
        """
        with contextlib.ExitStack() as stack:
            with contextlib.suppress(OSError):
                stack.callback(os.close, folder.lock(f"{self.key}.lock", wait=True))
                for name in folder.names():
                    if name.startswith(f".{self.key}."):
                        remove_tree(folder, name)
            yield

    def _read(
        self, folder: Folder, device: torch.device, *, is_new: bool = False
    ) -> tuple[Tensor, Skips] | None:
        """The rows, in memory or mapped; None if there are none, or they are damaged or, unless this process has just
        written them, somebody else's. Links are not followed."""
        names = (f"{self.key}.json", f"{self.key}.rows")
        if folder.kind(names[0]) == "missing":
            return None
        try:
            if not is_new and not {folder.owner(name) for name in names} <= {0, os.geteuid()}:
                raise ArtifactError("another user wrote it")
            skips, checksums = self._read_header(folder)
            with folder.open(f"{self.key}.rows") as file:
                table = self._map(file, self.count - len(skips))
            rows = table
            step = max(1, len(checksums) // SAMPLED)
            place = choose_place(self.size(len(table)), device)
            if place is not None:
                rows = torch.empty_like(table, device=place)
                step = 1
            for number in {*range(0, len(checksums), step), len(checksums) - 1}:
                block = slice(number * CHECKED, (number + 1) * CHECKED)
                if zlib.crc32(_bytes_of(table[block])) != checksums[number]:
                    raise ArtifactError("its rows are damaged")
                if rows is not table:
                    rows[block] = table[block]
        except ArtifactError as error:
            _log.warning("building the cache file %s.rows again: %s", self.key, error)
            return None
        return rows, skips

    def _read_header(self, folder: Folder) -> tuple[Skips, list[int]]:
        """The skipped images and the checksums; the digest says that they are those of this key."""
        name = f"{self.key}.json"
        header = read_in(folder, name)
        try:
            content = header["content"]
            if header["digest"] != digest([self.key, content]):
                raise ArtifactError(f"{name} is damaged, or of other images")
            skips = [(int(position), str(reason)) for position, reason in content["skipped"]]
            checksums = [int(value) for value in content["checksums"]]
        except (ValueError, KeyError, TypeError) as error:
            raise ArtifactError(f"{name} cannot be read") from error
        count = self.count - len(skips)
        positions = {position for position, _ in skips}
        is_valid = len(positions) == len(skips) and positions <= set(range(self.count))
        if not is_valid or count < 1 or len(checksums) != math.ceil(count / CHECKED):
            raise ArtifactError(f"{name} does not fit {self.count} images")
        return skips, checksums

    def _map(self, file: BinaryIO, count: int) -> Tensor:
        """The rows without reading them: pages come from the disk as they are used."""
        size = os.fstat(file.fileno()).st_size
        if size != self.size(count):
            raise ArtifactError(f"it has {size} bytes instead of {self.size(count)}")
        # Read-only: Linux refuses a private writable mapping that is larger than the memory, and such files end here.
        content = np.memmap(file, np.uint8, "r")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
            return torch.from_numpy(content).view(self.dtype).view(count, *self.shape)

    def _build(self, folder: Folder, batches: Callable[[Skips], Iterable[Tensor]]) -> None:
        needed = self.size(self.count)
        free = shutil.disk_usage(self.folder).free
        if free < needed:
            sizes = f"{needed >> 20} MiB needed, {free >> 20} MiB free"
            raise OSError(errno.ENOSPC, f"No space left on device ({sizes})")
        skips: Skips = []
        checksums: list[int] = []
        with folder.replacing(f"{self.key}.rows") as part, open(part, "wb") as file:
            for batch in batches(skips):
                row_bytes = _bytes_of(batch.cpu().contiguous())
                checksums.append(zlib.crc32(row_bytes))
                file.write(row_bytes)
        content = {"skipped": skips, "checksums": checksums}
        header = {"content": content, "digest": digest([self.key, content])}
        write_json(self.folder / f"{self.key}.json", header)


def _bytes_of(rows: Tensor) -> memoryview:
    return rows.numpy().data.cast("B")
