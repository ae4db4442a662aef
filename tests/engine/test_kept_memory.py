"""On a CPU freed memory is kept for the next layer: what a layer takes is not fetched from the system again."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

SCRIPT = """
import resource, threading, torch
from usfan.engine.runtime import keep_freed_memory
keep_freed_memory()
faults = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def work():
    for _ in range(20):  # a small block may settle in a freed hole: the heap grows a few times at first
        torch.ones(4 << 20)
    before = faults()
    for _ in range(10):
        torch.ones(4 << 20)
    print(faults() - before)

work()
thread = threading.Thread(target=work)
thread.start()
thread.join()
"""
PAGES = 10 * (16 << 20) // os.sysconf("SC_PAGE_SIZE")
"""What ten tensors of 16 MiB touch."""


def page_faults(**environment: str) -> list[int]:
    """In the first thread, and in another."""
    kept = {
        k: v
        for k, v in os.environ.items()
        if not k.startswith("MALLOC_") and k != "GLIBC_TUNABLES"
    }
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env={**kept, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return [int(line) for line in done.stdout.split()]


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's memory")
def test_large_blocks_are_kept_unless_the_user_tuned_it() -> None:
    assert max(page_faults()) < PAGES / 5
    assert min(page_faults(MALLOC_MMAP_THRESHOLD_=str(1 << 20))) > PAGES / 2
