"""The predictive in logit space: against draws of all the weights, against many random draws, and its promises."""

from __future__ import annotations

import math

import pytest
import torch

from oracles import dense
from oracles.last_layer import LastLayer, last_layer, shifted
from usfan.maths.objectives import certainty_weights, entropy
from usfan.uncertainty.kronecker import KroneckerPosterior
from usfan.uncertainty.predictive import CHUNK_ELEMENTS, sobol_normal


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def many_random(
    posterior: KroneckerPosterior, features: torch.Tensor, samples: int
) -> torch.Tensor:
    """The predictive of so many random draws, a few thousand at a time."""
    generator = seeded(1)
    part = 5000
    parts = [
        posterior.predictive(features, samples=part, generator=generator).double()
        for _ in range(samples // part)
    ]
    return torch.stack(parts).mean(dim=0)


@pytest.mark.parametrize("damping", ["exact", "factored"])
@pytest.mark.parametrize("temperature", [0.4, 1.0])
def test_predictive_is_that_of_draws_of_the_weights(damping, temperature):
    layer = last_layer(40, 3, 4, separation=0.8)
    posterior = KroneckerPosterior.fit(*layer.given, 1.5, damping=damping)
    new = shifted(layer.features, 6)
    a, b = dense.factors(layer.features, layer.logits)
    theta = dense.parameters(layer.weight, layer.bias)
    precision = dense.precision(a, b, 1.5, damping)
    draws = dense.theta_predictive(
        theta, precision, dense.extended(new), temperature, 200_000, seeded(5)
    )
    found, information = posterior.moments(
        new, temperature, samples=200_000, generator=seeded(6)
    )
    noise = draws.std(dim=0) * math.sqrt(2 / 200_000)
    assert float(((found - draws.mean(dim=0)) / noise).abs().max()) < 4.5
    expected = entropy(draws.mean(dim=0)) - entropy(draws).mean(dim=0)
    torch.testing.assert_close(information, expected, rtol=0, atol=5e-3)
    # The fixed draws stand for the same distribution.
    fixed = posterior.predictive(new, temperature, samples=4096)
    torch.testing.assert_close(fixed, draws.mean(dim=0), rtol=0, atol=6e-3)


def test_predictive_is_a_distribution_and_certainty_its_exponential_entropy():
    posterior = KroneckerPosterior.fit(*last_layer(200, 16, 12).given)
    probs = posterior.predictive(shifted(posterior.weight, 12))
    torch.testing.assert_close(probs.sum(dim=1), torch.ones(12).double())
    assert float(probs.min()) >= 0
    weights = posterior.certainty(shifted(posterior.weight, 12))
    torch.testing.assert_close(weights, torch.exp((probs * probs.log()).nansum(dim=1)))
    assert float(weights.min()) >= 1 / 12 - 1e-9
    assert float(weights.max()) <= 1


def test_certainty_of_the_extremes():
    probs = torch.tensor([[1.0, 0, 0, 0], [0.25, 0.25, 0.25, 0.25], [0.5, 0.5, 0, 0]])
    torch.testing.assert_close(certainty_weights(probs), torch.tensor([1.0, 0.25, 0.5]))


def test_a_very_strong_prior_gives_the_point_estimate():
    layer = last_layer(100, 8, 5)
    posterior = KroneckerPosterior.fit(*layer.given, 1e12)
    torch.testing.assert_close(
        posterior.predictive(layer.features, temperature=0.7),
        (layer.logits / 0.7).softmax(dim=1),
        rtol=0,
        atol=1e-5,
    )
    _, information = posterior.moments(layer.features)
    assert float(information.max()) < 1e-6


def spread_problem(
    classes: int, seed: int, batch: int = 16
) -> tuple[KroneckerPosterior, torch.Tensor]:
    """Weights all the way between 1/K and 1, as on a shifted domain."""
    layer = last_layer(1500, 64, classes, seed=seed, dtype=torch.float32)
    posterior = KroneckerPosterior.fit(*layer.given, 20.0)
    return posterior, shifted(layer.features, batch, seed=seed)


def test_1024_fixed_draws_are_close_to_200000_random_ones():
    errors = []
    for seed in range(3):
        posterior, new = spread_problem(31, seed, batch=32)
        exact = certainty_weights(many_random(posterior, new, 200_000))
        assert float(exact.min()) < 0.3
        assert float(exact.max()) > 0.8
        errors.append(float((posterior.certainty(new, samples=1024) - exact).abs().mean()))
    print(f"mean error of 1,024 fixed draws: {sum(errors) / len(errors):.1e}")
    assert sum(errors) / len(errors) < 5e-3


@pytest.mark.parametrize("classes", [31, 65])
def test_128_fixed_draws_err_less_than_random_ones(classes):
    fixed = []
    random = []
    for seed in range(6):
        posterior, new = spread_problem(classes, seed)
        exact = certainty_weights(posterior.predictive(new, samples=16384).double())
        fixed.append(float((posterior.certainty(new) - exact).abs().mean()))
        for trial in range(6):
            guess = posterior.certainty(new, generator=seeded(100 * seed + trial))
            random.append(float((guess - exact).abs().mean()))
    ratio = (sum(fixed) / len(fixed)) / (sum(random) / len(random))
    print(f"error of 128 fixed draws over that of 128 random ones, K {classes}: {ratio:.2f}")
    assert ratio < 0.7


def test_fixed_draws_have_the_moments_of_a_normal():
    for samples, dimensions in ((128, 31), (128, 64), (1024, 65)):
        draws = sobol_normal(samples, dimensions)
        assert float(draws.mean(dim=0).abs().max()) < 1e-12
        torch.testing.assert_close(
            draws.T @ draws / samples, torch.eye(dimensions).double(), rtol=0, atol=1e-10
        )
    few = sobol_normal(128, 345)
    torch.testing.assert_close(
        (few @ few.T)[:64, :64], 345 * torch.eye(64).double(), rtol=0, atol=1e-9
    )
    for samples in (1, 2, 7):
        draws = sobol_normal(samples, 5)
        assert draws.shape == (samples, 5)
        assert bool(draws.isfinite().all())
    values = sobol_normal(4096, 8)
    tail = float((values > 1.6449).double().mean())
    assert tail == pytest.approx(0.05, abs=2e-3)


def agreement(layer: LastLayer, prior: float | str, noise: float) -> float:
    posterior = KroneckerPosterior.fit(*layer.given, prior)
    new = shifted(layer.features, 400, noise)
    same = posterior.predictive(new, samples=512).argmax(dim=1) == posterior.logits(new).argmax(
        dim=1
    )
    return float(same.double().mean())


@pytest.mark.parametrize(
    ("classes", "prior", "floor"),
    [(12, "evidence", 0.97), (31, "evidence", 0.95), (65, 20.0, 0.95)],
)
def test_predictive_keeps_the_decision_of_the_point_estimate(classes, prior, floor):
    """The paper's claim: the posterior says how sure, not what. True up to ties that the noise decides."""
    layer = last_layer(1500, 64, classes, dtype=torch.float32)
    near = agreement(layer, prior, 0.0)
    far = agreement(layer, prior, 0.5)
    print(f"arg max kept, K {classes}, prior {prior}: {near:.4f} in domain, {far:.4f} shifted")
    assert near >= floor
    assert far >= floor


@pytest.mark.parametrize("given", [False, True])
def test_permuting_the_batch_permutes_the_result(given):
    posterior, new = spread_problem(31, seed=2)
    order = torch.randperm(len(new), generator=seeded(0))
    first = posterior.certainty(new, generator=seeded(3) if given else None)
    second = posterior.certainty(new[order], generator=seeded(3) if given else None)
    torch.testing.assert_close(second, first[order], rtol=1e-5, atol=1e-6)
    one_by_one = torch.cat([posterior.certainty(row[None]) for row in new])
    torch.testing.assert_close(one_by_one, posterior.certainty(new), rtol=1e-5, atol=1e-6)


def test_a_batch_larger_than_a_chunk_changes_nothing(monkeypatch):
    posterior, new = spread_problem(31, seed=2)
    whole = posterior.moments(new)
    monkeypatch.setitem(CHUNK_ELEMENTS, "cpu", 3 * 128 * 31)
    for part, expected in zip(posterior.moments(new), whole, strict=True):
        torch.testing.assert_close(part, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(posterior.predictive(new), whole[0], rtol=1e-5, atol=1e-6)


def test_fixed_draws_repeat_and_generators_repeat_by_seed():
    posterior, new = spread_problem(12, seed=0)
    again, _ = spread_problem(12, seed=0)
    assert torch.equal(posterior.certainty(new), posterior.certainty(new))
    assert torch.equal(posterior.certainty(new), again.certainty(new))
    torch.manual_seed(123)
    assert torch.equal(posterior.certainty(new), again.certainty(new))
    first = posterior.certainty(new, generator=seeded(1))
    assert torch.equal(first, again.certainty(new, generator=seeded(1)))
    assert not torch.equal(first, posterior.certainty(new, generator=seeded(2)))


def test_no_gradient_and_no_trace_of_inference_mode():
    """Weights are constants of the loss, whether the posterior was first used in inference mode or not."""
    layer = last_layer(50, 6, 4, dtype=torch.float32)
    with torch.inference_mode():
        posterior = KroneckerPosterior.fit(*layer.given)
        posterior.certainty(layer.features)
    new = layer.features.clone().requires_grad_()
    assert not posterior.certainty(new).requires_grad
    assert not posterior.logit_variance(new).requires_grad
    posterior.logits(new).sum().backward()
    assert new.grad is not None


def test_temperature_sharpens():
    posterior, new = spread_problem(12, seed=1)
    cold = posterior.certainty(new, temperature=0.2)
    warm = posterior.certainty(new, temperature=2.0)
    assert bool((cold > warm).all())
