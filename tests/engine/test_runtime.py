"""Devices, processes and seeds."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from usfan.config import RuntimeConfig
from usfan.engine import processes
from usfan.engine.processes import process_counts, start_processes
from usfan.engine.runtime import permutation, seed_everything, start_runtime
from usfan.errors import ConfigError


def test_order_changes_with_epoch_and_seed_only() -> None:
    assert permutation(50, 1, 2).equal(permutation(50, 1, 2))
    assert not permutation(50, 1, 2).equal(permutation(50, 1, 3))
    assert not permutation(50, 1, 2).equal(permutation(50, 2, 2))


def test_processes_draw_apart_and_the_first_as_one_would() -> None:
    draws = []
    for part in (0, 1, 2):
        seed_everything(3, 4, part=part)
        draws.append(torch.rand(4))
    seed_everything(3, 4)
    assert torch.rand(4).equal(draws[0])
    assert not draws[0].equal(draws[1])
    assert not draws[1].equal(draws[2])


def test_runtime_of_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = start_runtime(RuntimeConfig(device="cpu"))
    assert (runtime.rank, runtime.world, runtime.precision, runtime.fast) == (0, 1, "32", False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="no CUDA device"):
        start_runtime(RuntimeConfig(device="cuda"))


def test_torchrun_says_how_many(monkeypatch: pytest.MonkeyPatch) -> None:
    started = {"WORLD_SIZE": "6", "LOCAL_WORLD_SIZE": "3"}
    for name, value in started.items():
        monkeypatch.setenv(name, value)
    assert process_counts(RuntimeConfig()) == (3, 2)
    assert process_counts(RuntimeConfig(devices=3, nodes=2)) == (3, 2)
    with pytest.raises(ConfigError, match="torchrun started 6 processes"):
        process_counts(RuntimeConfig(devices=4))


FAILING = """
import os, sys, time
from usfan.engine.processes import start_processes

if os.environ.get("LOCAL_RANK") == "1":
    sys.exit(3)
start_processes(2, 1)
time.sleep(100)
"""


def test_a_process_that_fails_ends_the_others(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(FAILING)
    assert (
        subprocess.run([sys.executable, str(script)], timeout=90, check=False).returncode == 1
    )


def test_processes_need_a_script_and_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(ConfigError, match=r"--nodes 2: .* torchrun"):
        start_processes(1, 2)
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
    monkeypatch.setattr(sys, "argv", ["-c"])
    with pytest.raises(ConfigError, match="torchrun"):
        start_processes(2, 1)
    monkeypatch.setattr(processes, "in_notebook", lambda: True)
    monkeypatch.setattr(sys, "argv", [__file__])
    with pytest.raises(ConfigError, match="torchrun"):
        start_processes(2, 1)
