"""Features on a CPU: each thread takes a piece of a batch through the network, and nothing else changes."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor, nn

from usfan.data.store import Store
from usfan.data.views import InputSpec
from usfan.engine.features import BackboneAlone, features_of
from usfan.engine.inference import PIECE
from usfan.engine.runtime import Runtime

CPU = Runtime(torch.device("cpu"))
SPEC = InputSpec(3, 72, 72, (0.5,) * 3, (0.5,) * 3, "resized-crop")


class Noting(nn.Module):
    """Keeps something in itself between two layers, as a user's network may."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, 2)
        self.norm = nn.BatchNorm2d(8)
        self.last = nn.Conv2d(8, 6, 3, 2)
        self.noted = torch.zeros(0)
        self.seen: list[tuple[int, int, bool]] = []

    def forward(self, images: Tensor) -> Tensor:
        self.seen.append((threading.get_ident(), len(images), torch.is_grad_enabled()))
        if len(images) == 13:
            raise ValueError("thirteen images")
        self.noted = self.norm(self.first(images)).relu()
        torch.ones(200_000).exp().sum()  # time for another thread to come between
        return self.last(self.noted).mean(dim=(2, 3)) + len(self.noted) - len(images)


def store(count: int) -> Store:
    return Store(torch.randint(256, (count, 3, 72, 72), dtype=torch.uint8), torch.arange(count))


def test_pieces_have_the_features_of_whole_batches(four_threads: None) -> None:
    network = Noting()
    images = store(150)
    found = features_of(BackboneAlone(network), images, SPEC, CPU).values
    with torch.no_grad():
        whole = network.eval()((images.values.float() / 255 - 0.5) / 0.5)
    torch.testing.assert_close(found, whole, rtol=1e-4, atol=1e-4)
    assert not found.requires_grad
    assert torch.get_num_threads() == 4


def test_threads_take_a_piece_each_in_networks_of_their_own(four_threads: None) -> None:
    network = Noting()
    seen = network.seen
    network.__dict__["seen"] = seen_by_all = SharedList(seen)
    features_of(BackboneAlone(network), store(150), SPEC, CPU)
    assert {size for _, size, _ in seen_by_all} == {3, PIECE, 150 % 64}
    assert len({thread for thread, _, _ in seen_by_all}) > 1
    assert not any(graph for _, _, graph in seen_by_all)


class SharedList(list[tuple[int, int, bool]]):
    """Copies of the network share it."""

    def __deepcopy__(self, memo: object) -> SharedList:
        return self


def test_hooks_are_not_called_by_two_threads(four_threads: None) -> None:
    """A hook belongs to all copies of a network: what it writes for one piece, another would read."""
    network = nn.Sequential(nn.Conv2d(3, 8, 3, 2), nn.Conv2d(8, 6, 3, 2), Kept({}))
    images = store(150)
    kept = {}
    network[2].kept = kept

    def keep(module: nn.Module, given: tuple[Tensor, ...], made: Tensor) -> None:
        kept["first"] = made
        torch.ones(200_000).exp().sum()

    network[0].register_forward_hook(keep)
    found = features_of(BackboneAlone(network), images, SPEC, CPU).values
    with torch.no_grad():
        whole = network.eval()((images.values.float() / 255 - 0.5) / 0.5)
    torch.testing.assert_close(found, whole, rtol=1e-4, atol=1e-4)


class Kept(nn.Module):
    """Adds what a hook kept, as networks that collect the outputs of their layers do."""

    def __init__(self, kept: dict[str, Tensor]) -> None:
        super().__init__()
        self.kept = kept

    def forward(self, last: Tensor) -> Tensor:
        return last.mean(dim=(2, 3)) + self.kept["first"].mean(dim=(1, 2, 3))[:, None]

    def __deepcopy__(self, memo: object) -> Kept:
        return self


def test_a_network_that_cannot_be_copied_takes_one_piece_after_another(
    four_threads: None,
) -> None:
    network = Noting()
    network.lock = threading.Lock()
    features_of(BackboneAlone(network), store(70), SPEC, CPU)
    assert [size for _, size, _ in network.seen] == [3, 16, 16, 16, 16, 6]
    assert len({thread for thread, _, _ in network.seen[1:]}) == 1


def test_one_thread_takes_one_piece_after_another() -> None:
    network = Noting()
    features_of(BackboneAlone(network), store(70), SPEC, CPU)
    assert [size for _, size, _ in network.seen] == [3, 16, 16, 16, 16, 6]


def test_an_error_in_a_thread_is_raised_and_the_threads_are_given_back(
    four_threads: None,
) -> None:
    with pytest.raises(ValueError, match="thirteen images"):
        features_of(BackboneAlone(Noting()), store(64 + 13), SPEC, CPU)
    assert torch.get_num_threads() == 4
