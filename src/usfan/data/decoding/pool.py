"""A few processes that decode files in parallel and hand the pixels over in order.

Why not a torch DataLoader: its workers are forks (unsafe beside threads, and a warning from Python 3.12 on) or import
torch and the user's own script again (2 s of start-up each, and a script without an `if __name__ == "__main__"` guard
breaks); its pixels pass through /dev/shm (64 MB in a container). These processes are plain children that know Pillow
only, and take their jobs as JSON. One that crashes or hangs on a file is replaced, and the file is named.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import select
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from usfan.data.decoding.decode import FilePart
from usfan.data.decoding.process import HEADER, SECONDS
from usfan.errors import option

CHUNK = 16
"""Images per job."""
CHUNK_BYTES = 64 << 20
"""Bytes of pixels per job: a job has fewer images if they are large."""
AHEAD = 2
"""Jobs per process: the one at work and the one after it."""
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

Files = Sequence[str] | Sequence[FilePart]
Form = dict[str, int | str | None]
"""Size, channels and resampling of a job."""
Answer = bytearray | str
"""The content of a picture, or the reason why it cannot be read."""


class _Died(Exception):
    """A decoding process ended, or had to be ended; the text is the reason to give for its file."""


class _TookLong(_Died):
    """It used up the time of a file, which is certainly to blame."""


def decode_in_processes(
    paths: Files,
    *,
    size: int,
    channels: int | None,
    workers: int,
    resampling: str = "bilinear",
) -> Generator[Answer, None, None]:
    """Yield, in order, channels×size×size bytes for each file, or the reason why there are none.

    With `channels` None the bytes are those of a JPEG that fits into size×size. Memory: `workers` × `AHEAD` jobs.
    """
    if not paths:
        return
    step = max(1, min(CHUNK, CHUNK_BYTES // (3 * size * size)))
    starts = range(0, len(paths), step)
    workers = min(workers, len(starts))
    form: Form = {"size": size, "channels": channels, "resampling": resampling}
    pool = [_Process() for _ in range(workers)]
    free: queue.SimpleQueue[_Process] = queue.SimpleQueue()
    for process in pool:
        free.put(process)

    def decode(start: int) -> list[Answer]:
        process = free.get()
        try:
            return process.decode(paths[start : start + step], form)
        finally:
            free.put(process)

    coming: deque[Future[list[Answer]]] = deque()
    with contextlib.ExitStack() as stack:
        for process in pool:
            stack.callback(process.close)
        threads = stack.enter_context(ThreadPoolExecutor(workers))
        stack.callback(_stop, pool, coming)
        for start in starts:
            coming.append(threads.submit(decode, start))
            if len(coming) == workers * AHEAD:
                yield from coming.popleft().result()
        while coming:
            yield from coming.popleft().result()


def _stop(pool: list[_Process], coming: deque[Future[list[Answer]]]) -> None:
    """No more answers are wanted: threads that wait for one go on."""
    for answers in coming:
        answers.cancel()
    for process in pool:
        process.is_over = True
        process.child.kill()


class _Process:
    """One decoding process, replaced by a fresh one when it dies."""

    def __init__(self) -> None:
        self.restarts = 0
        self.is_over = False
        self.start()

    def start(self) -> None:
        search = os.pathsep.join(str(path) or os.getcwd() for path in sys.path)
        self.child = subprocess.Popen(
            [sys.executable, "-P", "-W", "ignore", "-c", _CODE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=os.environ | _KEEP_FREED_MEMORY | _ONE_THREAD | {"PYTHONPATH": search},
        )
        assert self.child.stdout is not None
        self.poll = select.poll()
        self.poll.register(self.child.stdout, select.POLLIN)
        self.ready = False

    def decode(self, paths: Files, form: Form) -> list[Answer]:
        """The answers for some files."""
        answers: list[Answer] = []
        suspect = None
        while len(answers) < len(paths):
            try:
                self.ask(paths[len(answers) :], form)
                while len(answers) < len(paths):
                    answers.append(self.answer())
            except _Died as death:
                path = paths[len(answers)]
                self.restart(path)
                # A process can be killed from outside, so a file is blamed only when it is there a second time.
                if path == suspect or isinstance(death, _TookLong):
                    answers.append(str(death))
                suspect = path
        return answers

    def ask(self, paths: Files, form: Form) -> None:
        assert self.child.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # if it has died, reading says so
            self.child.stdin.write(json.dumps({**form, "paths": paths}).encode() + b"\n")
            self.child.stdin.flush()
        if not self.ready:
            self.answer()
            self.ready = True

    def answer(self) -> Answer:
        is_picture, length = HEADER.unpack(self.read(HEADER.size))
        content = self.read(length)
        return content if is_picture else content.decode()

    def read(self, count: int) -> bytearray:
        """The next bytes."""
        assert self.child.stdout is not None
        patience = PATIENCE if self.ready else 2 * PATIENCE
        content = bytearray(count)
        room = memoryview(content)
        while room:
            if not self.poll.poll(1000 * patience):
                raise _Died(f"decoding took over {patience:.0f} s")
            received = os.readv(self.child.stdout.fileno(), [room])
            if not received:
                raise self.death()
            room = room[received:]
        return content

    def death(self) -> _Died:
        code = self.child.wait()
        if code == -signal.SIGPROF:
            return _TookLong(f"decoding took over {SECONDS:.0f} s")
        status = f"signal {-code}" if code < 0 else f"exit code {code}"
        return _Died(f"the decoder crashed ({status})")

    def restart(self, path: str | FilePart) -> None:
        self.restarts += 1
        report = self.close()
        if self.is_over or not self.ready or self.restarts > MOST_RESTARTS:
            label = path if isinstance(path, str) else path.label
            fault = f"crashed {self.restarts} times, the last time on {label}"
            if not self.ready:
                fault = "could not start"
            raise OSError(
                f"a decoding process {fault}: {report} ({option('workers', 0)} does without)"
            )
        self.start()

    def close(self) -> str:
        """End the process; returns the last line it wrote to its error output while it started. Twice does no harm."""
        self.child.kill()
        _, report = self.child.communicate()
        lines = report.decode(errors="replace").split("\n")
        return next((line for line in reversed(lines) if line.strip()), "it left no message")
