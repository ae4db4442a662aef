"""Threads of the CPU: small operations get one, large ones all, and torch has as many afterwards as before."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

import usfan
from usfan import threads
from usfan.data.store import Store
from usfan.maths import neighbours
from usfan.models.backbones import create_backbone
from usfan.threads import LARGE, threads_for


def test_small_work_gets_one_thread_and_large_work_within_it_all(four_threads: None) -> None:
    with threads_for(LARGE - 1):
        assert torch.get_num_threads() == 1
        with threads_for(LARGE):
            assert torch.get_num_threads() == 4
            with threads_for(0):
                assert torch.get_num_threads() == 1
            assert torch.get_num_threads() == 4
        with threads_for(LARGE):
            assert torch.get_num_threads() == 4
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 4


def test_an_error_gives_the_threads_back(four_threads: None) -> None:
    with pytest.raises(ZeroDivisionError), threads_for(0):
        raise ZeroDivisionError
    assert torch.get_num_threads() == 4


def test_an_interrupt_on_the_way_in_leaves_no_block_behind(
    four_threads: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = threads.use
    calls = []

    def interrupted(count: int) -> None:
        calls.append(count)
        if len(calls) == 1:
            raise KeyboardInterrupt
        real(count)

    monkeypatch.setattr(threads, "use", interrupted)
    with pytest.raises(KeyboardInterrupt), threads_for(0):
        pass
    what_the_user_chose_since_counts()


def test_what_the_user_chose_since_counts(four_threads: None) -> None:
    with threads_for(0):
        pass
    what_the_user_chose_since_counts()


def what_the_user_chose_since_counts() -> None:
    torch.set_num_threads(3)
    with threads_for(0), threads_for(LARGE):
        assert torch.get_num_threads() == 3
    assert torch.get_num_threads() == 3


def test_two_runs_at_a_time_give_all_threads_back(four_threads: None) -> None:
    """The second run begins while the first has one thread, and ends after it."""
    inside = threading.Event()
    go_on = threading.Event()
    seen = []

    def second() -> None:
        with threads_for(0):
            inside.set()
            go_on.wait(10)
        seen.append(torch.get_num_threads())

    with threads_for(0):
        thread = threading.Thread(target=second)
        thread.start()
        assert inside.wait(10)
    go_on.set()
    thread.join()
    assert (torch.get_num_threads(), seen) == (4, [4])


def test_training_and_adapting_on_features_keep_to_one_thread(four_threads: None) -> None:
    labels = torch.arange(60) % 3
    width = create_backbone("digits-cnn", "none").features
    features = torch.rand(60, width) + labels[:, None]
    store = Store(features, torch.arange(60), labels, ("a", "b", "c"))
    steps: set[int] = set()
    epochs: set[int] = set()

    def note(done: int, count: int, figures: dict[str, float]) -> None:
        (epochs if "epoch" in figures else steps).add(torch.get_num_threads())

    settings: dict[str, Any] = {"tune": "new", "epochs": 2, "batch_size": 16, "progress": note}
    model = usfan.train_source(store, backbone="digits-cnn", bottleneck=8, **settings)
    assert (steps, epochs) == ({1}, {4})
    epochs.clear()
    usfan.adapt(model, store, "shot-im", guard=False, **settings)
    assert (steps, epochs) == (
        {1},
        {1},
    )  # between epochs too: draws, clusters and the guard are as small
    assert torch.get_num_threads() == 4


@pytest.mark.parametrize(("rows", "count"), [(40, 1), (600, 4)])
def test_many_neighbours_are_searched_with_all_threads(
    four_threads: None, monkeypatch: pytest.MonkeyPatch, rows: int, count: int
) -> None:
    plain = neighbours.torch.arange
    seen = []
    monkeypatch.setattr(
        neighbours.torch,
        "arange",
        lambda *a, **k: (seen.append(torch.get_num_threads()), plain(*a, **k))[1],
    )
    with threads_for(0):
        neighbours.nearest_neighbours(torch.rand(rows, 1800), 3)
    assert set(seen) == {count}
