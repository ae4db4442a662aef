"""Cells of a study in several processes on one machine: a small network does not fill a large GPU.

Each child opens the same study, is told a group (a seed and a source) at a time on its standard input, and answers with
its rows, a line of JSON each. What a child wrote before it died stays: the next call goes on from there.
"""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from usfan.errors import UsfanError

if TYPE_CHECKING:
    from usfan.reproduce.suite import Suite

Show = Callable[[dict[str, Any], bool], None]


def run_jobs(study: Suite, show: Show) -> None:
    """Every group of the study, `study.jobs` at a time; `show` gets each row, and whether it is new."""
    waiting: queue.SimpleQueue[tuple[int, str]] = queue.SimpleQueue()
    for group in study.groups():
        waiting.put(group)
    failures: list[Exception] = []
    lock = threading.Lock()
    threads = [
        threading.Thread(target=feed, args=(study, show, waiting, failures, lock), daemon=True)
        for _ in range(min(study.jobs, len(study.groups())))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        kind = UsfanError if isinstance(failures[0], UsfanError) else OSError
        raise kind(f"{len(failures)} of {len(threads)} jobs failed; the first said: {failures[0]}")


def feed(
    study: Suite, show: Show, waiting: queue.SimpleQueue[Any], failures: list[Exception], lock: threading.Lock
) -> None:
    """One child: give it groups until none is left, and show what it answers."""
    with subprocess.Popen(
        [sys.executable, "-m", "usfan.reproduce.job"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        try:
            tell(child, description(study))
            while not waiting.empty():
                seed, source = waiting.get_nowait()
                tell(child, {"seed": seed, "source": source})
                while "row" in (answer := hear(child)):
                    with lock:
                        show(answer["row"], answer["fresh"])
                if "error" in answer:
                    failures.append(UsfanError(answer["error"]) if answer["mistake"] else OSError(answer["error"]))
                    break
        except queue.Empty:
            pass
        except (OSError, ValueError) as error:
            failures.append(OSError(f"a job ended early ({error})"))


def description(study: Suite) -> dict[str, Any]:
    runtime: dict[str, Any] = {"device": study.runtime.device.type, "precision": study.runtime.precision}
    runtime |= {"compile": study.runtime.compile, "workers": study.runtime.workers, "cache": study.runtime.cache}
    return {"name": study.name, "given": study.given, "out": str(study.out), "runtime": runtime}


def tell(child: subprocess.Popen[str], what: dict[str, Any]) -> None:
    assert child.stdin is not None
    child.stdin.write(json.dumps(what, default=str) + "\n")
    child.stdin.flush()


def hear(child: subprocess.Popen[str]) -> dict[str, Any]:
    assert child.stdout is not None
    line = child.stdout.readline()
    if not line:
        raise ValueError(f"exit code {child.wait()}")
    answer: dict[str, Any] = json.loads(line)
    return answer
