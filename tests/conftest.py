"""What every test shares: the oracles on the path, fixed seeds, and where the real data lies."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = (
    "1"  # two workers on two cores: threads of one would wait for those of the other
)

import pytest
import torch

# A shell starts background jobs (`make test &`) with Ctrl-C ignored, and children inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

TESTS = Path(__file__).resolve().parent
sys.path.insert(0, str(TESTS))
torch.set_num_threads(1)
LONG = (
    "study/test_cluster.py",
    "study/test_predict_on_ray.py",
    "engine/test_processes.py",
    "test_pages.py",
    "reliability/test_reliability_soak.py",
    "reliability/test_reliability_kill.py",
    "reliability/test_reliability_disk.py",
    "store/test_run_folder.py",
    "reliability/test_supply.py",
    "reliability/test_reliability_numbers.py",
    "study/test_digits.py",
    "study/test_toy.py",
    "study/test_suite.py",
    "report/test_report_browser.py",
    "report/test_report_scale.py",
    "test_cli_runs.py",
    "engine/test_kept_memory.py",
    "reliability/test_reliability_fuzz.py",
    "test_flow.py",
    "test_notebook.py",
    "reliability/test_strangers.py",
    "reliability/test_reliability_hostile.py",
    "labelling/test_board.py",
    "labelling/test_page.py",
    "labelling/test_page_browser.py",
    "adaptation/test_user_labels.py",
    "adaptation/test_field_methods.py",
    "adaptation/test_adaptation.py",
    "test_several_sources.py",
    "test_wheel.py",
)
"""Files that take longest, the longest first: begun last, one of them would keep one of two processes busy alone."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The long files first."""
    ranks = {TESTS / name: rank for rank, name in enumerate(LONG)}
    items.sort(key=lambda item: ranks.get(item.path, len(LONG)))


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def four_threads() -> Iterator[None]:
    """Four threads of torch, one for the tests after it."""
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real data sets beside the checkout."""
    folder = TESTS.parent.parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip(f"no real data at {folder}")
    return folder


@pytest.fixture
def refused(capsys):
    """Runs a command that must be refused: exit code 2, one line on stderr, no traceback. Gives the line."""

    def run(*arguments: object) -> str:
        capsys.readouterr()
        from small_runs import usfan

        assert usfan(*arguments) == 2
        lines = capsys.readouterr().err.strip().splitlines()
        assert len(lines) == 1, lines
        assert "Traceback" not in lines[0]
        return lines[0]

    return run
