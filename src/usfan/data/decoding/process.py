"""The process that decodes: started by `pool`, it reads jobs and answers with pixels.

A job is a line of JSON, {"paths": […], "size": S, "channels": C} or {"paths": […], "side": pixels}. For each path it
answers with JSON, its length before it: null, followed by the C·S·S bytes of the picture; {"jpeg": a thumbnail in
base64}; or the reason why there is neither. It loads neither torch nor numpy, so a start takes 0.1 s instead of
seconds, and it ends when its standard input does: it cannot outlive its parent.

A file has `SECONDS` of CPU time (a busy machine does not count) and `MEMORY` bytes: small files can ask for much. The
system ends the process that uses more time, in whatever loop it is.
"""

from __future__ import annotations

import base64
import contextlib
import io
import json
import os
import resource
import signal
import struct
import sys
import warnings
from typing import Any, BinaryIO

from PIL import Image

from usfan.data.decoding.decode import UnreadableImage, decode_file, planes, squared

SECONDS = 5.0
"""Twice what the largest picture takes (67 million pixels, lossless WebP)."""
MEMORY = 2 << 30
"""Address space. The largest picture, with transparency, takes 0.9 GiB."""
Answer = str | dict[str, str] | None
HEADER = struct.Struct("I")
"""The length of an answer."""


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # on Ctrl-C the parent decides
    warnings.simplefilter("ignore")
    answers = os.fdopen(os.dup(1), "wb")
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)  # nothing a codec prints may reach the answers
    with contextlib.suppress(OSError, ValueError):  # not every system has that limit
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    send(answers, "ready")
    os.dup2(quiet, 2)  # until here, errors at start-up are kept for the parent to show
    for line in sys.stdin.buffer:
        job = json.loads(line)
        for path in job["paths"]:
            signal.setitimer(signal.ITIMER_PROF, SECONDS)
            answer, pixels = decoded(path, job)
            signal.setitimer(signal.ITIMER_PROF, 0)
            send(answers, answer, pixels)


def send(file: BinaryIO, answer: Answer, pixels: bytes = b"") -> None:
    content = json.dumps(answer).encode()
    file.write(HEADER.pack(len(content)) + content)
    file.write(pixels)
    file.flush()


def decoded(path: str, job: dict[str, Any]) -> tuple[Answer, bytes]:
    """The answer for a path, and its pixels."""
    try:
        if "side" in job:
            return {"jpeg": thumbnail(decode_file(path), job["side"])}, b""
        image = decode_file(path, job["channels"])
        return None, planes(squared(image, job["size"]))
    except UnreadableImage as error:
        return error.reason, b""
    except MemoryError:
        return "not enough memory", b""


def thumbnail(image: Image.Image, side: int) -> str:
    image.thumbnail((side, side), Image.Resampling.BICUBIC)
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=80, optimize=True)
    return base64.b64encode(buffer.getvalue()).decode("ascii")


if __name__ == "__main__":
    main()
