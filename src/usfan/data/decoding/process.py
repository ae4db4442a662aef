"""The process that decodes: started by `decoder_pool`, it reads jobs, writes pixels to shared memory, and answers.

A job is a line of JSON, {"start": first place in the shared memory, "paths": […]}. For each path it answers with one
line of JSON: null when the pixels are in place, or the reason why there are none. It loads neither torch nor numpy,
so a start takes 0.1 s instead of seconds, and it ends when its standard input does: it cannot outlive its parent.
"""

from __future__ import annotations

import json
import mmap
import os
import signal
import sys
import warnings

from usfan.data.decoding.decode import UnreadableImage, decode_file, planes, squared


def main() -> None:
    memory_handle, size, channels = map(int, sys.argv[1:])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # on Ctrl-C the parent decides
    warnings.simplefilter("ignore")
    answers = os.dup(1)
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)  # nothing a codec prints may reach the answers
    memory = mmap.mmap(memory_handle, 0)
    step = channels * size * size
    os.write(answers, b"ready\n")
    os.dup2(quiet, 2)  # until here, errors at start-up are kept for the parent to show
    for line in sys.stdin.buffer:
        job = json.loads(line)
        for place, path in enumerate(job["paths"], start=job["start"]):
            reason = None
            try:
                memory[place * step : (place + 1) * step] = planes(squared(decode_file(path, channels), size))
            except UnreadableImage as error:
                reason = error.reason
            os.write(answers, json.dumps(reason).encode() + b"\n")


if __name__ == "__main__":
    main()
