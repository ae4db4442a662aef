"""SIGKILL at random moments, then the same call again: it goes on, and ends with the same bits. On the CPU.

    python tests/reliability/kill_and_resume.py --kills 50

Over train, posterior, adapt, suite (`usfan reproduce`) and the build of the image cache, in equal shares. Some runs are
killed a second time while they resume.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import measuring

from lookalikes import make
from small_runs import TINY, class_folder, forkserver, in_child, train_tiny

SMALL = ("--batch-size", 16, *TINY)
VARYING = ("seconds", "commit", "time")
"""Figures of the clock and the checkout, which no two runs share."""


@dataclass
class Stage:
    """How to start it into a folder, anew or again, and which of its files must come out the same."""

    name: str
    start: Callable[[Path, bool], Any]
    same: tuple[str, ...] = ("*.safetensors", "metrics.json", "config.json")


def build_cache(data: str, folder: str) -> None:
    from usfan.data.cache import open_store
    from usfan.data.sources import ImageData

    open_store(ImageData(data), size=96, cache_dir=folder, workers=2)


def start_cache(data: Path, folder: Path) -> Any:
    process = forkserver().Process(target=build_cache, args=(str(data), str(folder)))
    process.start()
    return process


def stages(root: Path) -> list[Stage]:
    source_data = class_folder(root / "source", images=20)
    target = class_folder(root / "target", images=20, domain=3)
    many = class_folder(root / "many", images=400)
    digits = make("digits", root / "digits")
    source = train_tiny(source_data, root / "model")
    train = ("train", source_data, "--backbone", "digits-cnn", "--epochs", 6, *SMALL)
    adapt = ("adapt", source, target, "--method", "u-sfan+", "--epochs", 6, *SMALL)
    posterior = ("posterior", source, many, *TINY)
    suite = (
        "reproduce",
        "digits",
        "--data",
        digits,
        "--backbone",
        "lenet",
        "--source-epochs",
        2,
        "--epochs",
        2,
    )
    suite = (
        *suite,
        "--pairs",
        "U-M",
        "--methods",
        "shot-im",
        "u-sfan",
        "--seeds",
        0,
        "--allow-classes",
        *TINY,
    )

    def run(command: tuple) -> Callable[[Path, bool], Any]:
        return lambda out, again: in_child(
            *command, "--out", out, *(["--resume"] if again else [])
        )

    return [
        Stage("train", run(train)),
        Stage("posterior", run(posterior)),
        Stage("cache build", lambda out, again: start_cache(many, out), ("*.rows", "*.json")),
        Stage("adapt", run(adapt)),
        Stage(
            "suite",
            lambda out, again: in_child(*suite, "--out", out),
            ("models/*/*.safetensors", "cells/*", "table.md", "results.json"),
        ),
    ]


def without_clock(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: without_clock(v) for k, v in value.items() if k not in VARYING}
    return [without_clock(v) for v in value] if isinstance(value, list) else value


def content(folder: Path, stage: Stage) -> dict[str, str]:
    """A digest of each file that must come out the same."""
    found = {}
    for path in sorted({p for pattern in stage.same for p in folder.glob(pattern)}):
        raw = path.read_bytes()
        if path.suffix == ".json":
            raw = json.dumps(without_clock(json.loads(raw))).encode()
        found[str(path.relative_to(folder))] = hashlib.sha256(raw).hexdigest()
    return found


def half_written(folder: Path) -> list[str]:
    """Files under their own name that are not whole."""
    from safetensors import SafetensorError, safe_open

    bad = []
    for path in folder.rglob("*"):
        if ".part" in (path.suffix, path.parent.suffix) or not path.is_file():
            continue
        try:
            if path.suffix == ".json":
                json.loads(path.read_text())
            elif path.suffix == ".safetensors":
                with safe_open(path, "pt") as file:
                    [file.get_tensor(name) for name in file.keys()]  # noqa: SIM118
        except (ValueError, SafetensorError):
            bad.append(path.name)
    return bad


def children(pid: int) -> list[int]:
    try:
        return [
            int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        ]
    except OSError:
        return []


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def outlived(pids: list[int], seconds: float = 60) -> int:
    """How many decoding processes of a killed parent do not end by themselves."""
    until = time.perf_counter() + seconds
    while any(map(lives, pids)) and time.perf_counter() < until:
        time.sleep(0.05)
    return sum(map(lives, pids))


def kill(process: Any, after: float, orphans: list[int]) -> bool:
    """Whether it was still running; its own child processes are noted."""
    process.join(after)
    running = process.is_alive()
    orphans += children(process.pid)
    process.kill()
    process.join()
    return running


def one_case(stage: Stage, out: Path, seconds: float, rng: random.Random) -> dict[str, Any]:
    share = rng.uniform(0.02, 0.98)
    orphans: list[int] = []
    while True:
        shutil.rmtree(out, ignore_errors=True)
        if kill(stage.start(out, False), share * seconds, orphans):
            break
        share *= 0.7
    kills = 1
    there = out.exists()
    bad = half_written(out)
    if rng.random() < 0.3:
        kills += kill(stage.start(out, True), rng.uniform(0.02, 0.9) * seconds, orphans)
        bad += half_written(out)
    stage_of = sorted(p.name for p in out.rglob("*") if p.is_file()) if out.exists() else []
    last = stage.start(out, True)
    last.join(300)
    return {
        "kills": kills,
        "share": round(share, 3),
        "left_something": there and len(stage_of) > 0,
        "exit": last.exitcode,
        "half_written": bad,
        "parts_left": len(list(out.rglob("*.part"))),
        "decoders": len(orphans),
        "decoders_left": outlived(orphans),
        "content": content(out, stage),
    }


def study(stage: Stage, kills: int, root: Path, rng: random.Random) -> dict[str, Any]:
    whole = root / f"whole-{stage.name.replace(' ', '-')}"
    warm = forkserver().Process(target=int)  # the server is up: what follows is timed
    warm.start()
    warm.join()
    began = time.perf_counter()
    first = stage.start(whole, False)
    first.join()
    seconds = time.perf_counter() - began
    assert first.exitcode == 0, stage.name
    expected = content(whole, stage)
    cases = []
    assert expected, stage.name
    while sum(case["kills"] for case in cases) < kills:
        cases.append(one_case(stage, root / "killed", seconds, rng))
    return {
        "kills": sum(case["kills"] for case in cases),
        "runs": len(cases),
        "whole_run_seconds": round(seconds, 2),
        "files_compared": len(expected),
        "left_something": sum(case["left_something"] for case in cases),
        "resumed": sum(case["exit"] == 0 for case in cases),
        "bit_identical": sum(case["content"] == expected for case in cases),
        "half_written_files": sum(len(case["half_written"]) for case in cases),
        "parts_left": sum(case["parts_left"] for case in cases),
        "decoders_of_killed": sum(case["decoders"] for case in cases),
        "decoders_left": sum(case["decoders_left"] for case in cases),
    }


def passed(figures: dict[str, Any]) -> bool:
    clean = not (
        figures["half_written_files"] or figures["parts_left"] or figures["decoders_left"]
    )
    return clean and figures["resumed"] == figures["bit_identical"] == figures["runs"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    rng = random.Random(given.seed)
    with tempfile.TemporaryDirectory() as place:
        all_stages = stages(Path(place))
        share = -(-given.kills // len(all_stages))
        figures = {stage.name: study(stage, share, Path(place), rng) for stage in all_stages}
    good = all(map(passed, figures.values()))
    measuring.save(
        "kill",
        {"kills": sum(f["kills"] for f in figures.values()), "passed": good, "stages": figures},
    )
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
