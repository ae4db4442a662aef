"""Memory of the predictive grows with M·B·K, never with K·D·M: every tensor that is made is measured."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from oracles.last_layer import last_layer
from usfan.uncertainty.kronecker import KroneckerPosterior
from usfan.uncertainty.predictive import CHUNK_ELEMENTS

CLASSES = 65
DIMENSIONS = 256
BATCH = 16
SAMPLES = 128


class Largest(TorchDispatchMode):
    """The most elements any tensor had that an operation gave back."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        storages = (
            t.untyped_storage().nbytes() // t.element_size()
            for t in tree_leaves(result)
            if torch.is_tensor(t)
        )
        self.elements = max(self.elements, *storages, 0)
        return result


def fitted(dimensions: int = DIMENSIONS, damping: str = "exact") -> KroneckerPosterior:
    layer = last_layer(
        400, dimensions, CLASSES, separation=8 / dimensions**0.5, dtype=torch.float32
    )
    return KroneckerPosterior.fit(*layer.given, 10.0, damping=damping)


def largest(
    posterior: KroneckerPosterior,
    batch: int = BATCH,
    samples: int = SAMPLES,
    seed: int | None = None,
) -> int:
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    features = torch.randn(
        batch, posterior.weight.shape[1], generator=torch.Generator().manual_seed(0)
    )
    with Largest() as measured:
        posterior.certainty(features, samples=samples, generator=generator)
    return measured.elements


def test_the_measure_sees_a_draw_of_the_weights():
    with Largest() as measured:
        torch.randn(SAMPLES, CLASSES, DIMENSIONS + 1).softmax(dim=-1)
    assert measured.elements == SAMPLES * CLASSES * (DIMENSIONS + 1)


@pytest.mark.parametrize("damping", ["exact", "factored"])
@pytest.mark.parametrize("seed", [None, 0])
def test_no_tensor_is_as_large_as_the_draws_of_the_weights(damping, seed):
    posterior = fitted(damping=damping)
    rank = len(posterior.basis)
    first = largest(posterior, seed=seed)
    later = largest(posterior, seed=seed)
    limit = max(BATCH, rank) * SAMPLES * CLASSES
    assert later <= limit
    # The first call also makes the basis, of a table D' × K and not of the draws.
    assert first <= max(limit, 3 * (DIMENSIONS + 1) * CLASSES)
    assert first < SAMPLES * CLASSES * DIMENSIONS / 8


def test_it_grows_with_batch_draws_and_classes_alone():
    posterior = fitted()
    assert largest(posterior) == BATCH * SAMPLES * CLASSES
    assert largest(posterior, batch=3 * BATCH) == 3 * BATCH * SAMPLES * CLASSES
    assert largest(posterior, samples=2 * SAMPLES) == 2 * BATCH * SAMPLES * CLASSES
    assert largest(fitted(dimensions=2 * DIMENSIONS)) == BATCH * SAMPLES * CLASSES


def test_a_large_batch_is_worked_off_in_parts(monkeypatch):
    posterior = fitted()
    monkeypatch.setitem(CHUNK_ELEMENTS, "cpu", 20 * SAMPLES * CLASSES)
    assert largest(posterior, batch=500) == 20 * SAMPLES * CLASSES
