"""The variance of the logits against J Σ Jᵀ with a dense inverse, and the low-rank basis of its square root."""

from __future__ import annotations

import pytest
import torch

from oracles import dense
from oracles.last_layer import last_layer, shifted
from usfan.uncertainty.kronecker import KroneckerPosterior


@pytest.mark.parametrize("damping", ["exact", "factored"])
@pytest.mark.parametrize("prior", [5e-4, 1.0, 1e4])
@pytest.mark.parametrize("bias", [True, False])
def test_logit_variance_is_the_dense_one(damping, prior, bias):
    layer = last_layer(50, 6, 4)
    head = (layer.weight, layer.bias if bias else None)
    logits = layer.logits if bias else layer.features @ layer.weight.T
    posterior = KroneckerPosterior.fit(layer.features, logits, *head, prior, damping=damping)
    a, b = dense.factors(layer.features, logits, bias)
    covariance = torch.linalg.inv(dense.precision(a, b, prior, damping))
    new = shifted(layer.features, 9)
    expected = dense.logit_variance(dense.extended(new, bias), covariance, 4)
    torch.testing.assert_close(
        posterior.logit_variance(new), expected, rtol=1e-7, atol=1e-9 / prior
    )


@pytest.mark.parametrize("variance", [5e-4, 1e-3, 1.0])
@pytest.mark.parametrize("bias", [True, False])
def test_the_authors_posterior_is_the_dense_one(variance, bias):
    """Fitted so, or another posterior of the same data turned into it."""
    layer = last_layer(50, 6, 4)
    head = (layer.weight, layer.bias if bias else None)
    logits = layer.logits if bias else layer.features @ layer.weight.T
    covariance = torch.linalg.inv(
        dense.authors_precision(layer.features, logits, variance, bias)
    )
    new = shifted(layer.features, 9)
    expected = dense.logit_variance(dense.extended(new, bias), covariance, 4)
    form = {"damping": "factored", "curvature": "mean"}
    fitted = KroneckerPosterior.fit(layer.features, logits, *head, 1 / variance, **form)
    other = KroneckerPosterior.fit(layer.features, logits, *head).with_prior(
        1 / variance, **form
    )
    for posterior in (fitted, other):
        torch.testing.assert_close(
            posterior.logit_variance(new), expected, rtol=1e-9, atol=1e-12
        )


def test_point_estimate_is_the_layer():
    layer = last_layer(20, 6, 4)
    posterior = KroneckerPosterior.fit(*layer.given)
    torch.testing.assert_close(posterior.logits(layer.features), layer.logits)


def spread(
    samples: int, decades: float, constant: int = 0, dimensions: int = 64
) -> torch.Tensor:
    """Features whose second moment has eigenvalues over so many decades, the first columns constant."""
    generator = torch.Generator().manual_seed(3)
    scale = torch.logspace(0, -decades / 2, dimensions, dtype=torch.float64)
    turn = torch.linalg.qr(
        torch.randn(dimensions, dimensions, generator=generator, dtype=torch.float64)
    ).Q
    features = (
        torch.randn(samples, dimensions, generator=generator, dtype=torch.float64) * scale
    ) @ turn
    features[:, :constant] = 1.0
    return features


def basis_error(posterior: KroneckerPosterior, features: torch.Tensor) -> float:
    """The worst relative error of √s as the basis gives it, apart from the all-ones direction (no softmax sees it)."""
    vectors = posterior.class_vectors
    seen = (vectors - vectors.mean(dim=0)).norm(dim=0) > 0.5
    root = posterior.eigen_variance(features).sqrt()
    error = (root @ posterior.basis.T @ posterior.basis - root)[:, seen]
    return float((error.norm(dim=1) / root[:, seen].norm(dim=1)).max())


@pytest.mark.parametrize("classes", [3, 65, 345])
@pytest.mark.parametrize("decades", [0.0, 8.0])
@pytest.mark.parametrize("constant", [0, 8])
def test_basis_of_the_standard_deviation(classes, decades, constant):
    features = spread(800, decades, constant)
    generator = torch.Generator().manual_seed(4)
    weight = 0.75 * torch.randn(classes, 64, generator=generator, dtype=torch.float64)
    fitted = KroneckerPosterior.fit(
        features, features @ weight.T, weight, torch.zeros(classes).double(), 1.0
    )
    far = 1 + 3 * torch.randn(100, 64, generator=generator, dtype=torch.float64)
    for prior in (1e-8, 5e-4, 1.0, 50.0, 1e4):
        posterior = fitted.with_prior(prior)
        assert basis_error(posterior, torch.cat([features[:100], far])) < 1e-3
        assert len(posterior.basis) <= min(24, classes)


@pytest.mark.parametrize("rare", [1, 20])
def test_basis_with_classes_that_hardly_occur(rare):
    """Their directions have hundreds of times the variance of the others, which must not be lost beside them."""
    layer = last_layer(800, 64, 65)
    bias = layer.bias.clone()
    bias[:rare] -= 25
    posterior = KroneckerPosterior.fit(
        layer.features, layer.features @ layer.weight.T + bias, layer.weight, bias, 0.1
    )
    root = posterior.eigen_variance(layer.features[:100]).sqrt()[:, 1:]
    given = (
        posterior.eigen_variance(layer.features[:100]).sqrt()
        @ posterior.basis.T
        @ posterior.basis
    )[:, 1:]
    assert float((given / root - 1).abs().max()) < 1e-2


def test_factored_damping_needs_one_basis_function():
    posterior = KroneckerPosterior.fit(*last_layer(200, 16, 12).given, damping="factored")
    assert posterior.basis.shape == (1, 12)
    assert basis_error(posterior, posterior.weight) < 1e-12
