"""OUT.part: the rows of a table that is being written, for a run that continues it.

Its first line names the job, a digest; each of the others is the record of one image, as JSON.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from usfan.errors import ConfigError, UsfanError
from usfan.files import Folder, named_errors, parse_json

BATCH = 64
"""Images in a batch of the model."""
MOST_LINE = 1 << 20
"""Bytes of a record: far more than those of a long path."""
Record = dict[str, Any]
Check = Callable[[int, object], bool]
"""Whether a value may be the record of the image at a position."""


class PartialTable:
    """The open file."""

    def __init__(
        self, file: BinaryIO, path: str, job: str, fits: Check, *, resume: bool
    ) -> None:
        self.file = file
        self.fits = fits
        self.header = json.dumps({"job": job}).encode() + b"\n"
        self.count = 0
        """Records that it holds."""
        end = self.end_of_batches(path) if resume else 0
        file.truncate(end)
        file.seek(end)
        if not end:
            file.write(self.header)

    def end_of_batches(self, path: str) -> int:
        """Where the last whole batch ends: a continued run has the batches of an uninterrupted one."""
        header = self.file.readline(MOST_LINE)
        if not header.endswith(b"\n"):
            return 0
        if header != self.header:
            raise ConfigError(
                f"{path} is of other images, another model or another engine: start again without resume"
            )
        end = self.file.tell()
        readable = 0
        for rows, record in enumerate(self.whole_records(), start=1):
            readable += record["error"] is None
            if readable and readable % BATCH == 0:
                end = self.file.tell()
                self.count = rows
        return end

    def whole_records(self) -> Iterator[Record]:
        """Those up to the first that is cut off, damaged, or of another image."""
        position = 0
        while line := self.file.readline(MOST_LINE):
            try:
                record = parse_json(line)
            except ValueError:
                return
            if not line.endswith(b"\n") or not self.fits(position, record):
                return
            yield record
            position += 1

    def append(self, record: Record) -> None:
        self.file.write(json.dumps(record).encode() + b"\n")
        self.count += 1
        if self.count % BATCH == 0:
            self.file.flush()

    def records(self) -> Iterator[Record]:
        self.file.seek(len(self.header))
        for line in self.file:
            yield json.loads(line)


@contextlib.contextmanager
def partial_table(out: Path, job: str, fits: Check, *, resume: bool) -> Iterator[PartialTable]:
    """The rows of the table `out` so far; those of another run count if they fit their images. They stay only if the
    block is interrupted, or the machine is at fault."""
    name = f"{out.name}.part"
    with Folder(out.parent, create=True) as folder, contextlib.ExitStack() as stack:
        try:
            stack.callback(os.close, folder.lock(name))
        except BlockingIOError:
            raise ConfigError(f"another process writes {out}: name another file") from None
        with named_errors(f"{out}.part"), folder.in_place(name, append=False) as file:
            table = PartialTable(file, f"{out}.part", job, fits, resume=resume)
            try:
                yield table
            except UsfanError:  # it would come again
                folder.remove(name)
                raise
        folder.remove(name)
