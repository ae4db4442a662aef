"""The process that decodes: started by `pool`, it reads jobs and answers with pixels.

A job is a line of JSON, {"paths": […], "size": S, "channels": C, "resampling": R}. A path is a text, or the fields of
a `FilePart`. For each it answers with the
C·S·S bytes of the picture; with C = null, with a JPEG that fits into S×S; or with the reason why there is neither. It
loads neither torch nor numpy, so a start takes 0.1 s instead of seconds, and it ends when its standard input does: it
cannot outlive its parent.

A file has `SECONDS` of CPU time (a busy machine does not count) and `MEMORY` bytes: small files can ask for much. The
system ends the process that uses more time, in whatever loop it is.
"""

from __future__ import annotations

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

from usfan.data.decoding.decode import (
    FilePart,
    UnreadableImage,
    decode_file,
    decode_part,
    planes,
    squared,
)

SECONDS = 5.0
"""Twice what the largest picture takes (67 million pixels, lossless WebP)."""
MEMORY = 2 << 30
"""Address space. The largest picture, with transparency, takes 0.9 GiB."""
HEADER = struct.Struct("?I")
"""Whether an answer is a picture, and its length."""


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # on Ctrl-C the parent decides
    warnings.simplefilter("ignore")
    answers = os.fdopen(os.dup(1), "wb")
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)  # nothing a codec prints may reach the answers
    with contextlib.suppress(OSError, ValueError):  # not every system has that limit
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    send(answers, b"ready", True)
    os.dup2(quiet, 2)  # until here, errors at start-up are kept for the parent to show
    for line in sys.stdin.buffer:
        job = json.loads(line)
        for path in job["paths"]:
            signal.setitimer(signal.ITIMER_PROF, SECONDS)
            try:
                content = decoded(path, job["size"], job["channels"], job["resampling"])
                reason = ""
            except UnreadableImage as error:
                reason = error.reason
            except MemoryError:
                reason = "not enough memory"
            signal.setitimer(signal.ITIMER_PROF, 0)
            send(answers, reason.encode() or content, not reason)


def send(file: BinaryIO, content: bytes, is_picture: bool) -> None:
    file.write(HEADER.pack(is_picture, len(content)))
    file.write(content)
    file.flush()


def decoded(path: str | list[Any], size: int, channels: int | None, resampling: str) -> bytes:
    if isinstance(path, str):
        image = decode_file(path, channels or 3, size)
    else:
        image = decode_part(FilePart(*path), channels or 3, size)
    if channels is not None:
        return planes(squared(image, size, resampling))
    image.thumbnail((size, size), Image.Resampling.BICUBIC)
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=80, optimize=True)
    return buffer.getvalue()
