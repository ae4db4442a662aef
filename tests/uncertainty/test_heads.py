"""Point estimate, MC dropout and ensemble, each against heads that are written out one by one in float64."""

from __future__ import annotations

import pytest
import torch

from oracles import heads as oracle
from oracles.last_layer import last_layer, shifted
from usfan.errors import UsfanError
from usfan.uncertainty.base import FitSettings, Uncertainty
from usfan.uncertainty.ensemble import Ensemble, bootstrap_counts, train_head
from usfan.uncertainty.kronecker import KroneckerPosterior
from usfan.uncertainty.mc_dropout import MCDropout
from usfan.uncertainty.point import PointEstimate

K = 3
D = 6
N = 60
LAYER = last_layer(N, D, K)
FEATURES = shifted(LAYER.features, 7)


def trained_ensemble(bias: torch.Tensor | None = LAYER.bias, **settings: int) -> Ensemble:
    """Trained on the layer's own features, under the prior precision 0.8."""
    posterior = KroneckerPosterior.fit(LAYER.features, LAYER.logits, LAYER.weight, bias, 0.8)
    fit = FitSettings(**settings)
    return Ensemble.from_posterior(posterior, fit, LAYER.features, LAYER.labels)


ENSEMBLE = trained_ensemble(members=3, seed=4)
KINDS = {
    "point": PointEstimate(LAYER.weight, LAYER.bias),
    "mc-dropout": MCDropout(LAYER.weight, LAYER.bias, 0.3),
    "ensemble": ENSEMBLE,
}


def heads_of(kind: str, samples: int) -> list:
    """The heads (W, b) that a kind stands for."""
    own = KINDS[kind]
    if isinstance(own, Ensemble):
        return list(zip(own.member_weights, own.member_biases, strict=True))
    if isinstance(own, MCDropout):
        return [(LAYER.weight * mask, LAYER.bias) for mask in own.masks(samples)]
    return [(LAYER.weight, LAYER.bias)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tau", [0.4, 1.0])
def test_against_heads_one_by_one(kind, tau):
    own: Uncertainty = KINDS[kind]
    assert own.kind == kind
    heads = heads_of(kind, 16)
    probs, information = own.moments(FEATURES, tau, 16)
    for row, z in enumerate(FEATURES):
        mean, mutual = oracle.mean_prediction(z, heads, [1 / len(heads)] * len(heads), tau)
        torch.testing.assert_close(probs[row], mean, rtol=1e-10, atol=1e-12)
        assert float(information[row]) == pytest.approx(mutual, abs=1e-10)
        assert float(own.certainty(FEATURES, tau, 16)[row]) == pytest.approx(
            torch.exp(torch.tensor(-oracle.own_entropy(mean))).item(), rel=1e-6
        )
        logits = torch.stack([weight @ z + bias for weight, bias in heads])
        torch.testing.assert_close(
            tau * own.part_draws(FEATURES, tau, 16)(slice(None))[row], logits
        )
    torch.testing.assert_close(own.logits(FEATURES), FEATURES @ LAYER.weight.T + LAYER.bias)
    torch.testing.assert_close(
        own.predictive(FEATURES[2:4], tau, 16), probs[2:4]
    )  # an image alone is as in a batch


@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_dropout_against_every_mask(rate):
    """The expectation over all 2^D masks, which the fixed draws approach as 1/√M."""
    own = MCDropout(LAYER.weight, LAYER.bias, rate)
    heads, shares = oracle.all_dropped(LAYER.weight, LAYER.bias, rate)
    assert sum(shares) == pytest.approx(1)
    probs, information = own.moments(FEATURES, 0.4, 20_000)
    for row, z in enumerate(FEATURES):
        mean, mutual = oracle.mean_prediction(z, heads, shares, 0.4)
        torch.testing.assert_close(probs[row], mean, rtol=0, atol=0.015)
        assert float(information[row]) == pytest.approx(mutual, abs=0.015)
    mean = own.part_draws(FEATURES, 1.0, 20_000)(slice(None)).mean(dim=1)
    torch.testing.assert_close(mean, own.logits(FEATURES), rtol=0, atol=0.1)


def test_masks_are_the_same_every_time_and_of_the_rate():
    one, two = (
        MCDropout(LAYER.weight.float(), LAYER.bias.float(), 0.3).masks(4_000) for _ in range(2)
    )
    assert torch.equal(one, two)
    assert float((one == 0).double().mean()) == pytest.approx(0.3, abs=0.02)
    assert one.unique().tolist() == [0.0, pytest.approx(1 / 0.7)]


@pytest.mark.parametrize(("precision", "smoothing"), [(0.8, 0.1), (5.0, 0.0)])
def test_a_member_is_the_optimum_of_its_objective(precision, smoothing):
    counts = bootstrap_counts(N, torch.Generator().manual_seed(3))
    weight, bias = train_head(
        LAYER.features, LAYER.labels, LAYER.weight, LAYER.bias, counts, precision, smoothing
    )
    expected = oracle.best_head(LAYER.features, LAYER.labels, counts, K, precision, smoothing)
    torch.testing.assert_close(
        torch.cat([weight, bias[:, None]], dim=1), expected, rtol=1e-4, atol=1e-4
    )


def test_members_are_trained_on_bootstraps_of_one_seed():
    generator = torch.Generator().manual_seed(4)
    for weight, bias in zip(ENSEMBLE.member_weights, ENSEMBLE.member_biases, strict=True):
        counts = bootstrap_counts(N, generator)
        assert float(counts.sum()) == N
        expected = oracle.best_head(LAYER.features, LAYER.labels, counts, K, 0.8, 0.1)
        torch.testing.assert_close(
            torch.cat([weight, bias[:, None]], dim=1), expected, rtol=1e-4, atol=1e-4
        )
    again = trained_ensemble(members=3, seed=5)
    assert not torch.equal(again.member_weights, ENSEMBLE.member_weights)


def test_without_a_bias():
    own = trained_ensemble(None, members=2)
    assert own.member_biases is None
    assert set(own.tensors()) == {"member_weights"}
    assert own.part_draws(FEATURES, 1.0, 128)(slice(None)).shape == (7, 2, K)
    assert MCDropout(LAYER.weight, None, 0.5).predictive(FEATURES).shape == (7, K)


@pytest.mark.parametrize("kind", KINDS)
def test_a_large_batch_is_done_in_parts(kind, monkeypatch):
    own = KINDS[kind]
    whole = own.moments(LAYER.features, 0.4, 8)
    monkeypatch.setattr("usfan.uncertainty.base.CHUNK_ELEMENTS", {"cpu": 200})
    for one, two in zip(own.moments(LAYER.features, 0.4, 8), whole, strict=True):
        torch.testing.assert_close(one, two)


def test_what_does_not_fit_is_refused():
    with pytest.raises(UsfanError, match=r"features must be B×6; got \(7, 5\)"):
        KINDS["point"].predictive(FEATURES[:, :5])
    with pytest.raises(UsfanError, match="temperature must be positive"):
        KINDS["mc-dropout"].predictive(FEATURES, 0.0)
    for rate in (0.0, 1.0, -0.1, float("nan")):
        with pytest.raises(UsfanError, match="rate must lie between"):
            MCDropout(LAYER.weight, LAYER.bias, rate)
    with pytest.raises(UsfanError, match="members must lie between 2 and 64; got 1"):
        trained_ensemble(members=1)


@pytest.mark.parametrize("kind", KINDS)
def test_another_type_gives_the_same(kind):
    narrow = KINDS[kind].to("cpu", torch.float32)
    assert narrow.weight.dtype == torch.float32
    torch.testing.assert_close(
        narrow.predictive(FEATURES, 0.4, 16).double(),
        KINDS[kind].predictive(FEATURES, 0.4, 16),
        rtol=0,
        atol=1e-5,
    )
