"""Devices, processes and seeds."""

from __future__ import annotations

import pytest
import torch

from usfan.config import RuntimeConfig
from usfan.engine.processes import process_count
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
    assert process_count() == 1
    monkeypatch.setenv("WORLD_SIZE", "6")
    assert process_count() == 1
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    assert process_count() == 6
