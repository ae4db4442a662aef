"""SIGINT and SIGTERM at random moments over train, adapt, predict, report and export. On the CPU.

    python tests/reliability/signals.py --signals 100

A command that is asked to end must end within 10 s, with exit code 130 or 143 (0 if it was done already), one line and
no traceback, and leave no half-written file. Interrupted runs are resumed, and must end with the same bits.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import measuring
from kill_and_resume import Stage, content, half_written

from small_runs import TINY, class_folder, forkserver, train_tiny

MOST_SECONDS = 10.0
CODES = {signal.SIGINT: 130, signal.SIGTERM: 143}


def run_main(arguments: list[str], errors: str, begun: Any) -> None:
    """What the process does: the command, from the moment that it says it has begun."""
    import torch

    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores it
    handle = os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(handle, 2)
    from usfan import progress
    from usfan.cli import ending
    from usfan.cli import main as module

    progress.console.file = sys.stderr = os.fdopen(2, "w", closefd=False)
    original = ending.stoppable

    @contextlib.contextmanager
    def told() -> Iterator[None]:
        with original():
            begun.set()
            yield

    module.stoppable = told  # type: ignore[assignment]
    raise SystemExit(module.main(arguments))


def start(command: Sequence[object], errors: Path) -> Any:
    begun = forkserver().Event()
    process = forkserver().Process(
        target=run_main, args=([str(word) for word in command], str(errors), begun)
    )
    process.start()
    begun.wait(60)
    return process


def commands(root: Path) -> dict[str, list[object]]:
    """Each without its output, which comes last."""
    source_data = class_folder(root / "source", images=12)
    target = class_folder(root / "target", images=12, domain=3)
    many = class_folder(root / "many", images=150)
    model = train_tiny(source_data, root / "model")
    rest = ["--epochs", 4, "--batch-size", 16, *TINY, "--out"]
    run = root / "adapted"
    from small_runs import adapt_tiny

    adapt_tiny(model, target, run)
    return {
        "train": ["train", source_data, "--backbone", "digits-cnn", *rest],
        "adapt": ["adapt", model, target, *rest],
        "predict": ["predict", model, many, "--device", "cpu", "--out"],
        "report": ["report", run, "--out"],
        "export": ["export", model, "--onnx"],
    }


def one_case(
    command: list[object], out: Path, seconds: float, number: signal.Signals, rng: random.Random
) -> dict:
    shutil.rmtree(out, ignore_errors=True)
    out.unlink(missing_ok=True)
    errors = out.parent / "errors.txt"
    process = start([*command, out], errors)
    time.sleep(rng.uniform(0, 0.95) * seconds)
    running = process.is_alive()
    if running:
        os.kill(process.pid, number)
    asked = time.perf_counter()
    process.join(60)
    took = time.perf_counter() - asked
    process.kill()
    process.join()
    said = errors.read_text(errors="replace")
    return {
        "running": running,
        "code": process.exitcode,
        "seconds": took,
        "traceback": "Traceback" in said or "Exception ignored" in said,
        "half_written": len(half_written(out)) if out.is_dir() else 0,
        "said": said[-300:],
    }


def study(
    name: str, command: list[object], signals: int, root: Path, rng: random.Random
) -> dict[str, Any]:
    out = root / f"out-{name}"
    resumable = name in ("train", "adapt")
    start(
        [*command, root / f"first-{name}"], root / "errors.txt"
    ).join()  # loads what is imported late
    began = time.perf_counter()
    whole = root / f"whole-{name}"
    process = start([*command, whole], root / "errors.txt")
    process.join()
    seconds = time.perf_counter() - began
    assert process.exitcode == 0, (root / "errors.txt").read_text()
    stage = Stage(name, lambda *_: None)
    expected = content(whole, stage) if resumable else {}
    cases = []
    same = 0
    resumed = 0
    while sum(case["running"] for case in cases) < signals and len(cases) < 4 * signals:
        number = (signal.SIGINT, signal.SIGTERM)[sum(case["running"] for case in cases) % 2]
        case = one_case(command, out, seconds, number, rng)
        seconds *= 1.0 if case["running"] else 0.9  # the machine was busy when it was timed
        case["right_code"] = (
            case["code"] == (CODES[number] if case["running"] else 0) or case["code"] == 0
        )
        cases.append(case)
        if resumable and case["code"] != 0:
            again = start([*command, out, "--resume"], root / "errors.txt")
            again.join()
            resumed += 1
            same += again.exitcode == 0 and content(out, stage) == expected
    wrong = [
        c for c in cases if not c["right_code"] or c["seconds"] > MOST_SECONDS or c["traceback"]
    ]
    return {
        "signals": sum(case["running"] for case in cases),
        "codes": dict(Counter(str(case["code"]) for case in cases)),
        "slowest_end_seconds": round(max(case["seconds"] for case in cases), 2),
        "tracebacks": sum(case["traceback"] for case in cases),
        "half_written": sum(case["half_written"] for case in cases),
        "failures": len(wrong),
        "resumed": resumed,
        "bit_identical": same,
        "whole_seconds": round(seconds, 2),
        "examples": [{k: c[k] for k in ("code", "seconds", "said")} for c in wrong[:5]],
    }


def passed(figures: dict[str, Any]) -> bool:
    return (
        not (figures["failures"] or figures["half_written"])
        and figures["resumed"] == figures["bit_identical"]
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--signals", type=int, default=100, help="Of each command.")
    parser.add_argument("--only", nargs="+", default=None)
    given = parser.parse_args()
    rng = random.Random(0)
    figures = {}
    with tempfile.TemporaryDirectory() as place:
        for name, command in commands(Path(place)).items():
            if given.only is None or name in given.only:
                figures[name] = study(name, command, given.signals, Path(place), rng)
                print(name, figures[name], flush=True)
    file = measuring.RESULTS / "reliability-signals.json"
    before = json.loads(file.read_text())["commands"] if file.is_file() and given.only else {}
    figures = before | figures  # of commands that were not run again, the figures stay
    good = all(map(passed, figures.values()))
    total = sum(own["signals"] for own in figures.values())
    measuring.save("signals", {"signals": total, "passed": good, "commands": figures})
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
