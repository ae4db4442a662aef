"""What an uncertainty promises, kept by the Kronecker posterior; its draws against the dense posterior in float64."""

from __future__ import annotations

import pytest
import torch

from oracles import dense
from oracles.last_layer import last_layer, shifted
from usfan.uncertainty.base import Uncertainty
from usfan.uncertainty.kronecker import KroneckerPosterior

K = 3
D = 4
M = 40_000


def test_the_kronecker_posterior_is_an_uncertainty():
    layer = last_layer(80, D, K)
    posterior: Uncertainty = KroneckerPosterior.fit(*layer.given)
    assert isinstance(posterior, Uncertainty)
    assert posterior.kind == "kronecker"
    features = shifted(layer.features, 7)
    probs, information = posterior.moments(features, 0.4, 64)
    torch.testing.assert_close(probs, posterior.predictive(features, 0.4, 64))
    assert (probs.shape, information.shape) == ((7, K), (7,))
    torch.testing.assert_close(probs.sum(dim=1), torch.ones(7, dtype=torch.float64))
    torch.testing.assert_close(
        posterior.certainty(features, 0.4, 64), torch.exp((probs * probs.log()).sum(dim=1))
    )
    assert posterior.draws(features, 5).shape == (7, 5, K)
    assert isinstance(posterior.to("cpu"), Uncertainty)


@pytest.mark.parametrize("damping", ["exact", "factored"])
@pytest.mark.parametrize("bias", [True, False])
def test_drawn_heads_have_the_mean_and_covariance_of_the_posterior(damping, bias):
    """Whitened by the dense precision H = LLᵀ they are standard normal: Lᵀ(θ_m − θ) has mean 0 and covariance I."""
    layer = last_layer(60, D, K)
    prior = 0.7
    head = (layer.weight, layer.bias if bias else None)
    logits = layer.logits if bias else layer.features @ layer.weight.T
    posterior = KroneckerPosterior.fit(layer.features, logits, *head, prior, damping=damping)
    a, b = dense.factors(layer.features, logits, bias)
    factor = torch.linalg.cholesky(dense.precision(a, b, prior, damping))
    heads = posterior.draw_heads(M)
    assert heads.shape == (M, K, D + bias)
    assert heads.dtype == torch.float64
    white = (heads - dense.parameters(*head)).flatten(start_dim=1) @ factor
    error = 1 / M**0.5
    assert float(white.mean(dim=0).abs().max()) < 5 * error
    torch.testing.assert_close(
        white.T @ white / M, torch.eye(white.shape[1]).double(), rtol=0, atol=7 * error
    )


@pytest.mark.parametrize("bias", [True, False])
def test_draws_are_the_logits_of_the_drawn_heads(bias):
    layer = last_layer(60, D, K)
    head = (layer.weight, layer.bias if bias else None)
    logits = layer.logits if bias else layer.features @ layer.weight.T
    posterior = KroneckerPosterior.fit(layer.features, logits, *head, 0.7)
    features = shifted(layer.features, 9)
    found = posterior.draws(features, 6)
    heads = posterior.draw_heads(6)
    expected = torch.stack([dense.extended(features, bias) @ theta.T for theta in heads], dim=1)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    assert torch.equal(found, posterior.draws(features, 6))
    assert not torch.equal(found, posterior.draws(features, 6, seed=7))
    torch.testing.assert_close(
        found[3:5], posterior.draws(features[3:5], 6)
    )  # the same heads for every sample
    assert not found.requires_grad


def test_draws_spread_as_the_variance_of_the_logits():
    layer = last_layer(60, D, K)
    posterior = KroneckerPosterior.fit(*layer.given, 0.7)
    features = shifted(layer.features, 4)
    found = posterior.draws(features, M)
    torch.testing.assert_close(
        found.mean(dim=1), posterior.logits(features), rtol=0.05, atol=0.05
    )
    away = found - posterior.logits(features)[:, None]
    spread = torch.einsum("bmi,bmj->bij", away, away) / M
    torch.testing.assert_close(spread, posterior.logit_variance(features), rtol=0.05, atol=0.05)


def test_draws_agree_with_the_predictive():
    """Eq. 6 in logit space, and by heads: the same mean prediction up to the noise of the draws."""
    layer = last_layer(200, D, K)
    posterior = KroneckerPosterior.fit(*layer.given, 1.0)
    features = shifted(layer.features, 20)
    by_heads = (posterior.draws(features, M) / 0.4).softmax(dim=-1).mean(dim=1)
    torch.testing.assert_close(
        by_heads, posterior.predictive(features, 0.4, 4096), rtol=0, atol=0.01
    )
