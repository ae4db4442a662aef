"""Nearest neighbours against loops."""

from __future__ import annotations

import pytest
import torch

from oracles import centroids as oracle
from usfan.maths import neighbours
from usfan.maths.neighbours import nearest_neighbours, unit_features


def test_unit_features():
    torch.testing.assert_close(
        unit_features(torch.tensor([[3.0, 0.0], [0.0, 0.0]])),
        torch.tensor([[3.0, 0.0, 1.0], [0.0, 0.0, 10**0.5]]) / 10**0.5,
    )


@pytest.mark.parametrize("chunk", [4096, 7])
def test_neighbours(monkeypatch, chunk):
    monkeypatch.setattr(neighbours, "CPU_ROWS", chunk)
    features = torch.randn(40, 5)
    places, similarities = nearest_neighbours(features, 5)
    links = oracle.neighbours(features.tolist(), 5)
    assert places.tolist() == [[j for j, _ in near] for near in links]
    torch.testing.assert_close(
        similarities, torch.tensor([[s for _, s in near] for near in links]), atol=1e-6, rtol=0
    )


def test_neighbours_of_few_samples():
    places, similarities = nearest_neighbours(torch.randn(3, 5), 10)
    assert places.shape == similarities.shape == (3, 2)
    assert nearest_neighbours(torch.randn(1, 5), 10)[0].shape == (1, 0)
