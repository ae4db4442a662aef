"""A run of VisDA's size: 55,000 images, 12 classes."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from report_runs import write_adapt_run

from small_runs import forkserver
from usfan.report.page import write_report


def memory(field: str) -> float:
    """MiB of this process alone: ru_maxrss would begin with the peak of the test run that started it."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) / 1024


def measure(small: Path, large: Path, out: Path) -> None:
    write_report([small], out)  # a run of a few images loads what is imported late
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before = memory("VmRSS")
    started = time.process_time()
    write_report([large], out)
    seconds = time.process_time() - started
    figures = {"seconds": seconds, "mebibytes": memory("VmHWM") - before}
    out.with_suffix(".json").write_text(json.dumps(figures))


@pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(),
    reason="memory is measured through Linux's /proc",
)
def test_55000_images_take_under_30_cpu_seconds_and_2_gigabytes(tmp_path: Path) -> None:
    small = write_adapt_run(tmp_path / "small", N=60)
    large = write_adapt_run(tmp_path / "large", N=55_000, K=12, open_set=True)
    out = tmp_path / "large.html"
    process = forkserver().Process(target=measure, args=(small, large, out))
    process.start()
    process.join()
    assert process.exitcode == 0
    measured = json.loads(out.with_suffix(".json").read_text())
    assert measured["seconds"] < 30
    assert measured["mebibytes"] < 2048
    assert out.stat().st_size < 5_000_000
    assert "55,000 images, 4,000 of them drawn" in out.read_text(encoding="utf-8")
