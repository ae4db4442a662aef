"""The process that decodes: started by `pool`, it reads jobs, writes pixels to shared memory, and answers.

A job is a line of JSON, {"start": first place in the shared memory, "paths": […], "side": null}. For each path it
answers with one line of JSON: null when the pixels are in place, or the reason why there are none. If "side" is a
number, it answers {"jpeg": a thumbnail in base64} instead. It loads neither torch nor numpy, so a start takes 0.1 s
instead of seconds, and it ends when its standard input does: it cannot outlive its parent.

A file has `SECONDS` of CPU time (a busy machine does not count) and `MEMORY` bytes: small files can ask for much. The
system ends the process that uses more time, in whatever loop it is.
"""

from __future__ import annotations

import base64
import contextlib
import io
import json
import mmap
import os
import resource
import signal
import sys
import warnings

from PIL import Image

from usfan.data.decoding.decode import UnreadableImage, decode_file, planes, squared

SECONDS = 5.0
"""Twice what the largest picture takes (67 million pixels, lossless WebP)."""
MEMORY = 2 << 30
"""Address space besides the shared memory. The largest picture, with transparency, takes 0.9 GiB."""


def main() -> None:
    memory_handle, size, channels = map(int, sys.argv[1:])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # on Ctrl-C the parent decides
    warnings.simplefilter("ignore")
    answers = os.dup(1)
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)  # nothing a codec prints may reach the answers
    memory = mmap.mmap(memory_handle, 0)
    with contextlib.suppress(OSError, ValueError):  # not every system has that limit
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY + len(memory),) * 2)
    step = channels * size * size
    os.write(answers, b"ready\n")
    os.dup2(quiet, 2)  # until here, errors at start-up are kept for the parent to show
    for line in sys.stdin.buffer:
        job = json.loads(line)
        for place, path in enumerate(job["paths"], start=job["start"]):
            answer: str | dict[str, str] | None = None
            signal.setitimer(signal.ITIMER_PROF, SECONDS)
            try:
                image = decode_file(path, channels)
                if job["side"]:
                    answer = {"jpeg": thumbnail(image, job["side"])}
                else:
                    memory[place * step : (place + 1) * step] = planes(squared(image, size))
            except UnreadableImage as error:
                answer = error.reason
            except MemoryError:
                answer = "not enough memory"
            signal.setitimer(signal.ITIMER_PROF, 0)
            content = json.dumps(answer).encode() + b"\n"
            while content:
                content = content[os.write(answers, content) :]


def thumbnail(image: Image.Image, side: int) -> str:
    image.thumbnail((side, side), Image.Resampling.BICUBIC)
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=80, optimize=True)
    return base64.b64encode(buffer.getvalue()).decode("ascii")


if __name__ == "__main__":
    main()
