"""A few processes that decode files in parallel and hand the pixels over in order.

Why not a torch DataLoader: its workers are forks (unsafe beside threads, and a warning from Python 3.12 on) or import
torch and the user's own script again (2 s of start-up each, and a script without an `if __name__ == "__main__"` guard
breaks); its pixels pass through /dev/shm (64 MB in a container). These processes are plain children that know Pillow
only, and are spoken to in JSON. One that crashes or hangs on a file is replaced, and the file is named.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import mmap
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Generator, Sequence
from typing import BinaryIO, NamedTuple, cast

import torch
from torch import Tensor

from usfan.data.decoding.process import SECONDS

CHUNK = 16
"""Images per job."""
CHUNK_BYTES = 64 << 20
"""Bytes of pixels per job: a job has fewer images if they are large."""
AHEAD = 2
"""Jobs a process has at a time: the one at work and the one after it."""
PATIENCE = 30.0
"""Seconds without an answer after which a process counts as hung."""
MOST_RESTARTS = 20
"""More crashes than this mean that the machine is at fault, not the files."""

# glibc hands every freed picture back to the system, and each new one then costs 50 page faults: a third of the time.
_KEEP_FREED_MEMORY = {
    "MALLOC_TRIM_THRESHOLD_": str(2**27),
    "MALLOC_MMAP_THRESHOLD_": str(2**25),
}
# numpy's library reserves memory for a thread per core, which would take most of what a decoder may have.
_ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
_CODE = "from usfan.data.decoding.process import main; main()"


class _Died(Exception):
    """A decoding process ended, or had to be ended; the text is the reason to give for its file."""


class _TookLong(_Died):
    """It used up the time of a file, which is certainly to blame."""


class _Job(NamedTuple):
    start: int
    paths: Sequence[str]
    side: int | None = None
    """Asks for thumbnails of this side."""


Answer = str | dict[str, str] | None


def decode_in_processes(
    paths: Sequence[str],
    *,
    size: int,
    channels: int,
    workers: int,
) -> Generator[tuple[int, list[str | None], Tensor], None, None]:
    """Yield, chunk by chunk and in order: the first position, a reason or None per path, and uint8 n×C×size×size.

    The tensor is a view of shared memory, valid until the next chunk is asked for. Memory: `workers` × `AHEAD` chunks.
    """
    step = max(1, min(CHUNK, CHUNK_BYTES // (channels * size * size)))
    chunks = [paths[at : at + step] for at in range(0, len(paths), step)]
    workers = max(1, min(workers, len(chunks)))
    slots = workers * AHEAD
    with _shared_file(slots * step * channels * size * size) as file:
        # Never closed by hand: it goes with the last tensor that looks at it.
        memory = mmap.mmap(file.fileno(), 0)
        pixels = torch.frombuffer(memory, dtype=torch.uint8).view(
            slots, step, channels, size, size
        )
        pool: list[_Process] = []
        try:
            for _ in range(workers):
                pool.append(_Process(file.fileno(), size, channels))
            for number in range(min(slots, len(chunks))):
                pool[number % workers].send(_Job(number % slots * step, chunks[number]))
            for number, chunk in enumerate(chunks):
                process = pool[number % workers]
                reasons = [
                    None if answer is None else str(answer) for answer in process.receive()
                ]
                yield number * step, reasons, pixels[number % slots, : len(chunk)]
                if number + slots < len(chunks):  # the slot is free again
                    process.send(_Job(number % slots * step, chunks[number + slots]))
        finally:
            for process in pool:
                process.stop()


def thumbnails(paths: Sequence[str], side: int) -> list[Answer]:
    """For each file {"jpeg": base64}, or the reason why there is none; one process, with the limits of all decoding."""
    with _shared_file(mmap.PAGESIZE) as file:
        process = _Process(file.fileno(), 1, 3)
        try:
            process.send(_Job(0, list(paths), side))
            return process.receive()
        finally:
            process.stop()


class _Process:
    """One decoding process, with its jobs in order; replaced by a fresh one when it dies."""

    def __init__(
        self,
        memory_handle: int,
        size: int,
        channels: int,
    ):
        self.memory_handle = memory_handle
        self.arguments = [str(memory_handle), str(size), str(channels)]
        self.jobs: deque[_Job] = deque()
        self.restarts = 0
        self.suspects: set[str] = set()
        self.start()

    def start(self) -> None:
        search = os.pathsep.join(str(path) or os.getcwd() for path in sys.path)
        self.errors = tempfile.TemporaryFile()  # noqa: SIM115 (closed in stop)
        self.child = subprocess.Popen(
            [sys.executable, "-P", "-W", "ignore", "-c", _CODE, *self.arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            pass_fds=[self.memory_handle],
            env=os.environ | _KEEP_FREED_MEMORY | _ONE_THREAD | {"PYTHONPATH": search},
        )
        assert self.child.stdout is not None
        self.selector = selectors.DefaultSelector()
        self.selector.register(self.child.stdout, selectors.EVENT_READ)
        self.unread = b""
        self.ready = False

    def send(self, job: _Job) -> None:
        self.jobs.append(job)
        self._write(job)

    def _write(self, job: _Job) -> None:
        assert self.child.stdin is not None
        # If the process has died, `receive` notices that and sends the job again.
        with contextlib.suppress(BrokenPipeError):
            self.child.stdin.write(json.dumps(job._asdict()).encode() + b"\n")
            self.child.stdin.flush()

    def receive(self) -> list[Answer]:
        """The answers to the oldest job: None, or the reason why a file could not be read."""
        job = self.jobs[0]
        reasons: list[Answer] = []
        while len(reasons) < len(job.paths):
            try:
                reasons.append(self._answer())
            except _Died as death:
                # A process can be killed from outside, so a file is blamed only when it is there a second time.
                path = job.paths[len(reasons)]
                if path in self.suspects or isinstance(death, _TookLong):
                    reasons.append(str(death))
                self.suspects.add(path)
                done = len(reasons)
                self._restart(
                    job._replace(start=job.start + done, paths=job.paths[done:]), path
                )
        self.jobs.popleft()
        return reasons

    def _answer(self) -> Answer:
        if not self.ready:
            if self._line(2 * PATIENCE) != b"ready":
                raise OSError("a decoding process did not start as expected")
            self.ready = True
        answer: str | dict[str, str] | None = json.loads(self._line(PATIENCE))
        return answer

    def _line(self, patience: float) -> bytes:
        deadline = time.monotonic() + patience
        while b"\n" not in self.unread:
            if not self.selector.select(max(0.0, deadline - time.monotonic())):
                raise _Died(f"decoding took over {patience:.0f} s")
            assert self.child.stdout is not None
            more = os.read(self.child.stdout.fileno(), 65536)
            if not more:
                code = self.child.wait()
                if code == -signal.SIGPROF:
                    raise _TookLong(f"decoding took over {SECONDS:.0f} s")
                status = f"signal {-code}" if code < 0 else f"exit code {code}"
                raise _Died(f"the decoder crashed ({status})")
            self.unread += more
        line, _, self.unread = self.unread.partition(b"\n")
        return line

    def _restart(self, rest: _Job, path: str) -> None:
        self.restarts += 1
        started = self.ready
        report = self.stop()
        if not started or self.restarts > MOST_RESTARTS:
            fault = f"crashed {self.restarts} times, the last time on {path}"
            if not started:
                fault = "could not start"
            raise OSError(f"a decoding process {fault}: {report} (--workers 0 does without)")
        self.start()
        for job in (rest, *list(self.jobs)[1:]):
            self._write(job)

    def stop(self) -> str:
        """End the process; returns the last line it wrote to its error output while it started. Twice does no harm."""
        if self.errors.closed:
            return ""
        self.child.kill()
        self.selector.close()
        for pipe in (self.child.stdin, self.child.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):  # a job may still be in the buffer
                pipe.close()
        self.child.wait()
        self.errors.seek(0)
        lines = self.errors.read().decode(errors="replace").split("\n")
        self.errors.close()
        return next((line for line in reversed(lines) if line.strip()), "it left no message")


def _shared_file(size: int) -> BinaryIO:
    """An unnamed file of this size: in memory if the system supports it, else in the temporary folder."""
    if hasattr(os, "memfd_create"):
        file: BinaryIO = os.fdopen(os.memfd_create("usfan-pixels"), "r+b")
    else:
        file = cast(BinaryIO, tempfile.TemporaryFile())  # noqa: SIM115 (the caller closes it)
    if (
        file.fileno() < 3
    ):  # a standard handle was closed, and the child gets its own in that place
        with file:
            file = os.fdopen(fcntl.fcntl(file.fileno(), fcntl.F_DUPFD_CLOEXEC, 3), "r+b")
    file.truncate(size)
    return file
