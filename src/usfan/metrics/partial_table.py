"""OUT.part: the rows of a table that is being written, for a run that continues it.

Its first line names the job, a digest; each of the others is the record of one image, as JSON.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from usfan.errors import ConfigError, UsfanError
from usfan.files import Folder

BATCH = 64
"""Images in a batch of the model."""
Record = dict[str, Any]


class PartialTable:
    """The open file."""

    def __init__(self, file: BinaryIO, path: str, job: str, *, resume: bool) -> None:
        self.file = file
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
        header = self.file.readline()
        if not header.endswith(b"\n"):
            return 0
        if header != self.header:
            raise ConfigError(
                f"{path} is of other images, another model or another engine: start again without resume"
            )
        end = self.file.tell()
        position = end
        readable = 0
        for rows, line in enumerate(self.file, start=1):
            try:
                record = json.loads(line)
            except ValueError:  # cut off, or damaged
                break
            position += len(line)
            readable += record["error"] is None
            if readable and readable % BATCH == 0:
                end = position
                self.count = rows
        return end

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
def partial_table(out: Path, job: str, *, resume: bool) -> Iterator[PartialTable]:
    """The rows of the table `out` so far. They stay only if the block is interrupted, or the machine is at fault."""
    name = f"{out.name}.part"
    with Folder(out.parent, create=True) as folder, contextlib.ExitStack() as stack:
        try:
            stack.callback(os.close, folder.lock(name))
        except BlockingIOError:
            raise ConfigError(f"another process writes {out}: name another file") from None
        with folder.in_place(name, append=False) as file:
            table = PartialTable(file, f"{out}.part", job, resume=resume)
            try:
                yield table
            except UsfanError:  # it would come again
                folder.remove(name)
                raise
        folder.remove(name)
