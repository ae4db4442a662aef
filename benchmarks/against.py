"""This checkout against another one, in the same run: seconds, CPU seconds and peak memory of whole commands.

    python benchmarks/against.py OUT.jsonl --other CHECKOUT --images FOLDER [--packed FOLDER] [--cases adapt predict …]

CHECKOUT is a working tree of another commit; without one, this checkout is measured alone. Packages that only one side
needs go in front of its path: --more DIR for this one (OpenVINO), --other-more DIR for the other. FOLDER is
`domain/class/*.jpg` of Office-31 for the commands, and for `six` what `studies.pack` makes. The sides take turns. On a
machine that others use too, CPU seconds say more than seconds, and ratios more than either. Memory is the proportional
set size of the whole process tree, sampled ten times a second, so a page that two processes share counts once.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

HERE = Path(__file__).resolve().parent.parent
SIDE = 256
NETWORK = ("--backbone", "tf_efficientnet_lite0", "--pretrained", "offline")
COUNTS = (1_000, 10_000)


@dataclass(frozen=True)
class Side:
    """A checkout."""

    name: str
    root: Path
    more: str | None

    def environment(self) -> dict[str, str]:
        paths = [str(self.root / "src"), str(self.root), *([self.more] if self.more else [])]
        return os.environ | {"PYTHONPATH": os.pathsep.join(paths)}

    def usfan(self, *words: object) -> list[str]:
        return [sys.executable, "-m", "usfan", *map(str, words)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--other", type=Path)
    parser.add_argument("--images", type=Path, required=True)
    parser.add_argument("--packed", type=Path)
    parser.add_argument("--more")
    parser.add_argument("--other-more")
    parser.add_argument(
        "--cases", nargs="+", default=["adapt", "predict", "check", "first", "six"]
    )
    parser.add_argument("--counts", nargs="+", type=int, default=COUNTS)
    parser.add_argument("--work", type=Path)
    options = parser.parse_args()
    sides = [Side("this", HERE, options.more)]
    if options.other is not None:
        sides.append(Side("other", options.other.resolve(), options.other_more))
    with tempfile.TemporaryDirectory() as name:
        work = options.work or Path(name)
        rows = []
        for row in measurements(sides, options, work):
            print(row, flush=True)
            rows.append(row)
            options.out.write_text("".join(json.dumps(row) + "\n" for row in rows))


def measurements(
    sides: list[Side], options: argparse.Namespace, work: Path
) -> Iterator[dict[str, object]]:
    model = work / "model"
    if not model.is_dir():  # by the other side: formats are read by what is newer
        data = options.images / "webcam"
        call = sides[-1].usfan("train", data, "--out", model, *NETWORK, "--epochs", 10)
        run(call, sides[-1])
    for case in options.cases:
        for count in options.counts if case in ("adapt", "predict", "check") else [1]:
            data = files(options.images, work, count)
            for side in sides:
                if case == "check" and not has_command(side, "check"):
                    continue
                row: dict[str, object] = {"case": case, "images": count, "side": side.name}
                row["engine"] = "OpenVINO" if side.more and side.name == "this" else "torch"
                yield row | measure(case, side, options, work, model, data)


def measure(
    case: str, side: Side, options: argparse.Namespace, work: Path, model: Path, data: Path
) -> dict[str, object]:
    out = work / f"{case}-{side.name}-{time.monotonic_ns()}"
    if case == "first":
        return first_row(side, side.usfan("predict", model, data, "--json"))
    if case == "six":
        study = [sys.executable, "-m", "studies.six_tasks", str(out), "--device", "cpu"]
        figures = run([*study, "--packed", str(options.packed.resolve())], side)
        return figures | json.loads(out.read_text())
    calls = {
        "adapt": ("adapt", model, data, "--out", out, "--epochs", 5, "--seed", 0),
        "predict": ("predict", model, data, "--out", out.with_suffix(".csv")),
        "check": ("check", model, data, "--out", out.with_suffix(".json")),
    }
    return run(side.usfan(*calls[case]), side)


def has_command(side: Side, name: str) -> bool:
    call = side.usfan(name, "--help")
    return not subprocess.run(call, env=side.environment(), capture_output=True).returncode


def files(images: Path, work: Path, count: int) -> Path:
    """So many JPEGs of 256 × 256 pixels in class folders: Office-31, then turned copies; one photograph alone."""
    originals = sorted(images.glob("*/*/*.jpg"))
    if count == 1:
        return originals[0]
    folder = work / f"images-{count}"
    if not folder.is_dir():
        step = max(1, len(originals) // count)
        for number in range(count):
            place = number * step
            path = originals[place % len(originals)]
            image = Image.open(path).convert("RGB").resize((SIDE, SIDE))
            target = folder / path.parent.name / f"{number:05}.jpg"
            target.parent.mkdir(parents=True, exist_ok=True)
            image.rotate(7 * (place // len(originals))).save(target, quality=85)
    return folder


def run(call: list[str], side: Side) -> dict[str, object]:
    """Seconds, CPU seconds with those of all children, and the peak of memory."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    started = time.perf_counter()
    peak = 0
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(
            call,
            env=side.environment(),
            cwd=side.root,
            stdout=subprocess.DEVNULL,
            stderr=errors,
        ) as process,
    ):
        while process.poll() is None:
            peak = max(peak, sum(map(proportional_size, descendants(process.pid))))
            time.sleep(0.1)
        seconds = time.perf_counter() - started
        errors.seek(0)
        if process.returncode:
            raise SystemExit(f"{' '.join(call)} failed:\n{errors.read()[-2000:]}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    load = round(os.getloadavg()[0], 1)
    return {
        "seconds": round(seconds, 1),
        "cpu": round(cpu, 1),
        "peak_mib": peak >> 10,
        "load": load,
    }


def first_row(side: Side, call: list[str]) -> dict[str, object]:
    """Until the first row is there, the best of three."""
    times = []
    for _ in range(3):
        started = time.perf_counter()
        with subprocess.Popen(
            call,
            env=side.environment(),
            cwd=side.root,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        ) as process:
            assert process.stdout is not None
            assert process.stdout.readline()
            times.append(time.perf_counter() - started)
            process.stdout.read()
    return {"seconds": round(min(times), 2), "load": round(os.getloadavg()[0], 1)}


def descendants(process: int) -> list[int]:
    """The process and all that it started."""
    processes = [process]
    for number in processes:
        for path in Path(f"/proc/{number}/task").glob("*/children"):
            try:
                processes += map(int, path.read_text().split())
            except OSError:  # it has ended
                continue
    return processes


def proportional_size(process: int) -> int:
    """KiB; 0 if it has ended."""
    try:
        for line in Path(f"/proc/{process}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1])
    except OSError:
        pass
    return 0


if __name__ == "__main__":
    main()
