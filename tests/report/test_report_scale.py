"""A run of VisDA's size: 55,000 images, 12 classes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from report_runs import write_adapt_run

MEASURE = """
import json, sys, time
from pathlib import Path
import usfan.report.page as page

def memory(field):  # of this process alone: ru_maxrss would begin with the peak of the test run that started it
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) / 1024

page.write_report([Path(sys.argv[1])], Path(sys.argv[2]))  # a run of a few images loads what is imported late
Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
before, started = memory("VmRSS"), time.process_time()
page.write_report([Path(sys.argv[3])], Path(sys.argv[4]))
print(json.dumps({"seconds": time.process_time() - started, "mebibytes": memory("VmHWM") - before}))
"""


@pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(),
    reason="memory is measured through Linux's /proc",
)
def test_55000_images_take_under_30_cpu_seconds_and_2_gigabytes(tmp_path: Path) -> None:
    small = write_adapt_run(tmp_path / "small", N=60)
    large = write_adapt_run(tmp_path / "large", N=55_000, K=12, open_set=True)
    out = tmp_path / "large.html"
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, small, tmp_path / "small.html", large, out],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    measured = json.loads(done.stdout)
    assert measured["seconds"] < 30
    assert measured["mebibytes"] < 2048
    assert out.stat().st_size < 5_000_000
    assert "55,000 images, 4,000 of them drawn" in out.read_text(encoding="utf-8")
    print(measured, out.stat().st_size)
