"""A and B against sums written out, the dense GGN where the factorisation is exact, and laplace-torch."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

from oracles import dense
from oracles.last_layer import last_layer
from usfan.uncertainty.fit import CHUNK, batch_factors


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("bias", [True, False])
def test_factors_equal_the_sums(bias):
    layer = last_layer(60, 7, 5)
    found = batch_factors(layer.features, layer.logits, bias=bias)
    a, b = dense.factors(layer.features, layer.logits, bias)
    torch.testing.assert_close(found.A, a, rtol=0, atol=1e-10)
    torch.testing.assert_close(found.B, b, rtol=0, atol=1e-10)


def test_factors_equal_the_sums_over_several_chunks():
    layer = last_layer(2 * CHUNK + 3, 3, 4)
    found = batch_factors(layer.features, layer.logits, bias=True)
    a, b = dense.factors(layer.features, layer.logits)
    torch.testing.assert_close(found.A, a, rtol=0, atol=1e-10)
    torch.testing.assert_close(found.B, b, rtol=0, atol=1e-10)


def test_factors_of_one_sample_are_the_dense_ggn():
    layer = last_layer(1, 4, 3)
    check_dense(dense.parameters(layer.weight, layer.bias), layer.features)


def test_factors_of_equal_probabilities_are_the_dense_ggn():
    layer = last_layer(12, 4, 3)
    theta = dense.parameters(torch.zeros_like(layer.weight), layer.bias)
    check_dense(theta, layer.features)


def test_factors_of_equal_features_are_the_dense_ggn():
    layer = last_layer(5, 4, 3)
    same = layer.features[:1].expand(5, -1)
    check_dense(dense.parameters(layer.weight, layer.bias), same)


def test_factors_are_an_approximation_elsewhere():
    layer = last_layer(12, 4, 3)
    theta = dense.parameters(layer.weight, layer.bias)
    found = batch_factors(layer.features, layer.logits, bias=True)
    exact = dense.ggn(theta, dense.extended(layer.features))
    assert 1e-3 < relative(torch.kron(found.B, found.A), exact) < 1
    # Summing the probabilities' part apart from the features' keeps the trace only on average.
    assert float(torch.kron(found.B, found.A).trace() / exact.trace()) == pytest.approx(
        1, abs=0.3
    )


def check_dense(theta: torch.Tensor, features: torch.Tensor) -> None:
    phis = dense.extended(features)
    found = batch_factors(features, phis @ theta.T, bias=True)
    torch.testing.assert_close(
        torch.kron(found.B, found.A), dense.ggn(theta, phis), rtol=0, atol=1e-10
    )


def test_factors_of_many_samples_are_summed_in_parts(monkeypatch):
    layer = last_layer(500, 6, 4)
    given = (layer.features, layer.logits)
    whole = batch_factors(*given, bias=True, labels=layer.labels)
    monkeypatch.setattr("usfan.uncertainty.fit.CHUNK", 128)
    parts = batch_factors(*given, bias=True, labels=layer.labels)
    torch.testing.assert_close(parts.A, whole.A, rtol=1e-12, atol=0)
    torch.testing.assert_close(parts.B, whole.B, rtol=1e-12, atol=1e-12)
    assert parts.count == 500
    assert parts.log_likelihood == pytest.approx(whole.log_likelihood, rel=1e-12)


@pytest.mark.parametrize("margin", [4.0, 12.0, 20.0])
def test_float32_factors_of_a_very_sure_classifier(margin):
    """diag(p) − ppᵀ cancels where p ≈ 1: of a network that fits its training data, float32 must leave something."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(31, (4000,), generator=generator)
    logits = torch.randn(4000, 31, generator=generator, dtype=torch.float64)
    logits[torch.arange(4000), labels] += margin
    features = torch.randn(4000, 8, generator=generator)
    _, b = dense.factors(features, logits)
    found = batch_factors(features, logits.float(), bias=True).B
    assert relative(found, b) < 1e-6
    assert float(found.sum(dim=1).abs().max()) < 1e-12 * float(found.norm())


def test_weight_block_agrees_with_laplace_torch():
    """laplace-torch keeps the bias as a block of its own: A without its last row and column, and the same B."""
    pytest.importorskip("laplace", reason="needs usfan[peers]")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from laplace import Laplace
        from laplace.curvature import CurvlinopsGGN
        from torch.utils.data import DataLoader, TensorDataset

        layer = last_layer(300, 10, 5, dtype=torch.float32)
        head = nn.Linear(10, 5)
        head.weight.data = layer.weight
        head.bias.data = layer.bias
        peer = Laplace(
            nn.Sequential(nn.Identity(), head),
            "classification",
            subset_of_weights="last_layer",
            hessian_structure="kron",
            backend=CurvlinopsGGN,
        )
        peer.fit(DataLoader(TensorDataset(layer.features, layer.labels), batch_size=300))
    (class_factor, feature_factor), (bias_block,) = peer.H_facs.kfacs
    found = batch_factors(layer.features, layer.logits, bias=True)
    ours = torch.kron(found.B, found.A[:-1, :-1])
    assert relative(torch.kron(class_factor, feature_factor).double(), ours) < 1e-5
    assert relative(bias_block.double(), found.B * found.A[-1, -1]) < 1e-5
