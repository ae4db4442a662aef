"""Disks that are full, quotas, folders without rights, files that vanish, clocks that jump.

    python tests/reliability/disk.py            # as root: the full disk is a small tmpfs

A fault is one clear line and exit code 1; what other runs left is untouched; and when the fault is gone, the same call
goes on and ends with the same bits.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import measuring
from faults import YEAR, Outcome, attempt, finish, remount, small_disk, start
from kill_and_resume import Stage, content

from lookalikes import make
from small_runs import TINY, class_folder, train_tiny

STAGE = Stage(
    "run",
    lambda *_: None,
    ("model.safetensors", "posterior.safetensors", "samples.safetensors", "*.csv"),
)
SUITE = Stage("suite", lambda *_: None, ("models/*/*.safetensors", "cells/*.json", "table.md"))


class Bench:
    """Small data, a source model, and the commands to try."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.runs: dict[str, Path] = {}
        self.data = class_folder(root / "source", images=20)
        self.target = class_folder(root / "target", images=20, domain=3)
        self.source = train_tiny(self.data, root / "model")
        digits = make("digits", root / "digits")
        many = root / "many.txt"
        many.write_text(
            "".join(f"{file}\n" for file in sorted(self.target.rglob("*.png"))) * 50
        )
        run = ("--epochs", 3, "--batch-size", 16, *TINY)
        suite = (
            "reproduce",
            "digits",
            "--data",
            digits,
            "--backbone",
            "lenet",
            "--source-epochs",
            1,
            "--epochs",
            1,
        )
        suite += (
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
        self.commands: dict[str, tuple] = {
            "train": ("train", self.data, "--backbone", "digits-cnn", *run),
            "posterior": ("posterior", self.source, self.data, *TINY),
            "adapt": ("adapt", self.source, self.target, *run),
            "adapt with a cache": (
                "adapt",
                self.source,
                self.target,
                *run,
                "--set",
                "cache=OUT/cache",
            ),
            "predict": ("predict", self.source, many, *TINY),
            "suite": suite,
        }

    def arguments(self, name: str, folder: Path, *, again: bool = False) -> tuple:
        out = folder / ("run.csv" if name == "predict" else "run")
        words = [str(w).replace("OUT", str(folder)) for w in self.commands[name]]
        resume = ["--resume"] if again and name not in ("predict", "suite") else []
        return (*words, "--out", out, *resume)

    def result(self, name: str, folder: Path) -> dict[str, str]:
        if name == "predict":
            return content(folder, STAGE)
        return content(folder / "run", SUITE if name == "suite" else STAGE)

    def whole(self, name: str) -> Path:
        """The folder of a run without a fault, which each command has once."""
        if name not in self.runs:
            self.runs[name] = Path(tempfile.mkdtemp(dir=self.root))
            done = attempt(*self.arguments(name, self.runs[name]))
            assert done.code == 0, done.text
        return self.runs[name]

    def expected(self, name: str) -> dict[str, str]:
        found = self.result(name, self.whole(name))
        assert found, name
        return found

    def needed(self, name: str) -> tuple[int, int]:
        """The bytes of the largest file and of all files that the command leaves."""
        sizes = [p.stat().st_size for p in self.whole(name).rglob("*") if p.is_file()]
        return max(sizes), sum(sizes)


def earlier_run(bench: Bench, folder: Path) -> dict[str, bytes]:
    """A finished run beside the one that fails; and what is in it."""
    shutil.copytree(bench.source, folder / "earlier")
    return contents(folder / "earlier")


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()
    }


def verdict(
    bench: Bench, name: str, folder: Path, failed: Outcome, again: Outcome, expected: dict
) -> dict[str, Any]:
    return {
        "command": name,
        "failed": failed.code != 0,
        "clear": failed.clear,
        "said": failed.text.strip().splitlines()[-1][-160:] if failed.text.strip() else "",
        "resumed": again.code == 0,
        "same": bench.result(name, folder) == expected,
    }


def file_size_limit(bench: Bench, name: str, shares: tuple[float, ...]) -> list[dict[str, Any]]:
    """A quota on file sizes, at shares of the largest file."""
    expected = bench.expected(name)
    rows = []
    largest, _ = bench.needed(name)
    for share in shares:
        folder = Path(tempfile.mkdtemp(dir=bench.root))
        before = earlier_run(bench, folder)
        failed = attempt(*bench.arguments(name, folder), limit=int(share * largest))
        intact = contents(folder / "earlier") == before
        again = attempt(*bench.arguments(name, folder, again=True))
        rows.append({**verdict(bench, name, folder, failed, again, expected), "intact": intact})
    return rows


def full_disk(bench: Bench, name: str, shares: tuple[float, ...]) -> list[dict[str, Any]]:
    """A disk with room for a share of what the command leaves; then with room enough."""
    expected = bench.expected(name)
    rows = []
    _, all_bytes = bench.needed(name)
    taken = sum(len(v) + 4096 for v in contents(bench.source).values())
    for share in shares:
        folder = Path(tempfile.mkdtemp(dir=bench.root)) / "disk"
        with small_disk(folder, taken + 16_384 + int(share * all_bytes)):
            before = earlier_run(bench, folder)
            failed = attempt(*bench.arguments(name, folder))
            intact = contents(folder / "earlier") == before
            remount(folder, "size=200m")
            again = attempt(*bench.arguments(name, folder, again=True))
            rows.append(
                {**verdict(bench, name, folder, failed, again, expected), "intact": intact}
            )
    return rows


def read_only(bench: Bench, name: str) -> list[dict[str, Any]]:
    """A folder without the right to write."""
    expected = bench.expected(name)
    folder = Path(tempfile.mkdtemp(dir=bench.root))
    before = earlier_run(bench, folder)
    folder.chmod(0o555)
    failed = attempt(*bench.arguments(name, folder), rights=True)
    folder.chmod(0o755)
    intact = contents(folder / "earlier") == before
    again = attempt(*bench.arguments(name, folder, again=True))
    return [{**verdict(bench, name, folder, failed, again, expected), "intact": intact}]


def vanishing_run(bench: Bench, name: str) -> list[dict[str, Any]]:
    """The run folder is moved away while the command runs. It fails, or makes the folder anew and ends there."""
    expected = bench.expected(name)
    folder = Path(tempfile.mkdtemp(dir=bench.root))
    before = earlier_run(bench, folder)
    process, reader = start(*bench.arguments(name, folder))
    mark = folder / "run" / ("cells" if name == "suite" else "log.jsonl")
    until = time.perf_counter() + 60
    while not mark.exists() and process.is_alive() and time.perf_counter() < until:
        time.sleep(0.01)
    os.rename(folder / "run", folder / "gone")
    failed = finish(process, reader)
    intact = contents(folder / "earlier") == before
    shutil.rmtree(folder / "run", ignore_errors=True)
    again = attempt(*bench.arguments(name, folder))
    return [{**verdict(bench, name, folder, failed, again, expected), "intact": intact}]


def vanishing_images(bench: Bench) -> dict[str, Any]:
    """Files that a list names and that go before they are read are skipped by name; so are unreadable ones."""
    folder = Path(tempfile.mkdtemp(dir=bench.root))
    shutil.copytree(bench.target, folder / "data")
    files = sorted((folder / "data").rglob("*.png"))
    for file in files[:3]:
        file.unlink()
        file.symlink_to(folder / "nowhere")
    done = attempt(
        "adapt", bench.source, folder / "data", "--out", folder / "run", "--epochs", 1, *TINY
    )
    images = (
        json.loads((folder / "run" / "metrics.json").read_text())["images"]
        if done.code == 0
        else 0
    )
    return {
        "vanished": 3,
        "exit": done.code,
        "images": images,
        "named": "skipped 3" in done.text,
        "of": len(files),
    }


def jumping_clocks(bench: Bench, name: str, seeds: tuple[int, ...]) -> list[dict[str, Any]]:
    """The time of day leaps during the run, and the times of all files lie in the past and the future."""
    expected = bench.expected(name)
    rows = []
    for seed in seeds:
        folder = Path(tempfile.mkdtemp(dir=bench.root))
        done = attempt(*bench.arguments(name, folder), clock=seed)
        for number, path in enumerate(sorted(folder.rglob("*"))):
            when = 0 if number % 2 else time.time() + 50 * YEAR
            os.utime(path, (when, when))
        again = attempt(*bench.arguments(name, folder, again=True), clock=seed + 1)
        same = bench.result(name, folder) == expected
        rows.append({"command": name, "exit": done.code, "again": again.code, "same": same})
    return rows


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    hit = [row for row in rows if row["failed"]]
    return {
        "cases": len(rows),
        "failed": len(hit),
        "clear_line_and_exit_1": sum(row["clear"] for row in hit),
        "earlier_results_intact": sum(row["intact"] for row in rows),
        "resumed": sum(row["resumed"] for row in rows),
        "same_bits": sum(row["same"] for row in rows),
        "commands": dict(Counter(row["command"] for row in rows)),
        "not_clear": [
            row for row in rows if (row["failed"] and not row["clear"]) or not row["same"]
        ][:8],
        "said": sorted(
            {row["said"].split(": ")[1][:60] for row in hit if row["said"].count(": ") > 1}
        ),
    }


def passed(figures: dict[str, Any]) -> bool:
    return (
        figures["failed"] == figures["clear_line_and_exit_1"]
        and figures["cases"]
        == figures["earlier_results_intact"]
        == figures["resumed"]
        == figures["same_bits"]
    )


def main() -> int:
    argparse.ArgumentParser(description=__doc__).parse_args()
    shares = (0.0, 0.1, 0.4, 0.8, 0.95)
    runs = ("train", "adapt", "suite")
    with tempfile.TemporaryDirectory() as place:
        bench = Bench(Path(place))
        faults = {
            "file size limit": summary(
                [r for name in bench.commands for r in file_size_limit(bench, name, shares)]
            ),
            "full disk": summary(
                [r for name in bench.commands for r in full_disk(bench, name, shares)]
            ),
            "read-only folder": summary(
                [r for name in bench.commands for r in read_only(bench, name)]
            ),
            "run folder removed": summary(
                [r for name in runs for r in vanishing_run(bench, name)]
            ),
        }
        clocks = [r for name in bench.commands for r in jumping_clocks(bench, name, (1, 2))]
        images = vanishing_images(bench)
    good = all(map(passed, faults.values())) and all(
        r["exit"] == r["again"] == 0 and r["same"] for r in clocks
    )
    steady = {"cases": len(clocks), "same_bits": sum(r["same"] for r in clocks)}
    measuring.save(
        "disk",
        {"passed": good, "faults": faults, "clock jumps": steady, "vanished images": images},
    )
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
