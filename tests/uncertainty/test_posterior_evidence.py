"""The prior precision: the evidence against dense log-determinants, its maximum against a scan, and the other names."""

from __future__ import annotations

import math

import pytest
import torch

from oracles import dense
from oracles.last_layer import last_layer
from usfan.errors import UsfanError
from usfan.uncertainty.kronecker import KroneckerPosterior

LAYER = last_layer(80, 5, 4)


def dense_evidence(delta: float) -> float:
    a, b = dense.factors(LAYER.features, LAYER.logits)
    return dense.log_evidence(
        torch.kron(b, a), dense.parameters(LAYER.weight, LAYER.bias), delta
    )


@pytest.mark.parametrize("prior", [5e-4, 0.3, 20.0, 1e4])
def test_log_evidence_is_the_dense_one(prior):
    posterior = KroneckerPosterior.fit(*LAYER.given, prior)
    assert posterior.prior_precision == prior
    assert posterior.log_evidence == pytest.approx(dense_evidence(prior), rel=1e-9)


def test_labels_add_the_log_likelihood():
    plain = KroneckerPosterior.fit(*LAYER.given, 2.0)
    labelled = KroneckerPosterior.fit(*LAYER.given, 2.0, labels=LAYER.labels)
    likelihood = sum(
        float(f.log_softmax(0)[y]) for f, y in zip(LAYER.logits, LAYER.labels, strict=True)
    )
    assert labelled.log_likelihood == pytest.approx(likelihood, rel=1e-12)
    assert labelled.log_evidence == pytest.approx(plain.log_evidence + likelihood, rel=1e-12)


@pytest.mark.parametrize("confidence", [0.1, 0.5, 1.5])
def test_the_fixed_point_is_where_a_dense_scan_peaks(confidence):
    layer = last_layer(80, 5, 4, confidence=confidence)
    posterior = KroneckerPosterior.fit(*layer.given)
    a, b = dense.factors(layer.features, layer.logits)
    theta = dense.parameters(layer.weight, layer.bias)
    data = torch.kron(b, a)
    step = 1.002
    scan = [posterior.prior_precision * step**i for i in range(-200, 201)]
    wide = [10.0**e for e in range(-8, 9)]
    values = [dense.log_evidence(data, theta, delta) for delta in scan]
    best = scan[max(range(len(scan)), key=values.__getitem__)]
    assert posterior.prior_precision == pytest.approx(best, rel=1.01 * (step - 1))
    assert posterior.log_evidence >= max(
        dense.log_evidence(data, theta, delta) for delta in wide
    )


def test_the_fixed_point_is_mackays():
    posterior = KroneckerPosterior.fit(*LAYER.given)
    square_norm = float(dense.parameters(LAYER.weight, LAYER.bias).square().sum())
    assert posterior.prior == "evidence"
    assert 0 < posterior.effective_parameters < LAYER.weight.numel() + len(LAYER.bias)
    assert posterior.prior_precision == pytest.approx(
        posterior.effective_parameters / square_norm, rel=1e-9
    )


def test_weight_decay_is_times_the_number_of_samples():
    posterior = KroneckerPosterior.fit(*LAYER.given, "weight-decay", weight_decay=1e-3)
    assert posterior.prior_precision == pytest.approx(80 * 1e-3)
    assert posterior.prior == "weight-decay"


def test_weight_decay_of_the_mean_loss_is_the_precision():
    form = {"weight_decay": 1e-3, "curvature": "mean"}
    posterior = KroneckerPosterior.fit(*LAYER.given, "weight-decay", **form)
    assert posterior.prior_precision == pytest.approx(1e-3)
    with pytest.raises(UsfanError, match="has no evidence"):
        posterior.with_prior("evidence")


def test_another_prior_needs_no_data():
    posterior = KroneckerPosterior.fit(*LAYER.given, 3.0)
    for prior, kwargs in (
        (7.0, {}),
        ("evidence", {}),
        ("weight-decay", {"weight_decay": 0.01}),
    ):
        again = KroneckerPosterior.fit(*LAYER.given, prior, damping="factored", **kwargs)
        moved = posterior.with_prior(prior, damping="factored", **kwargs)
        assert moved.prior_precision == pytest.approx(again.prior_precision, rel=1e-12)
        assert (moved.prior, moved.damping) == (again.prior, again.damping)
        torch.testing.assert_close(
            moved.certainty(LAYER.features), again.certainty(LAYER.features)
        )


def test_float32_evidence_is_close_to_float64():
    narrow = last_layer(80, 5, 4, dtype=torch.float32)
    wide = KroneckerPosterior.fit(*LAYER.given)
    other = KroneckerPosterior.fit(*narrow.given)
    assert other.prior_precision == pytest.approx(wide.prior_precision, rel=1e-4)
    assert other.log_evidence == pytest.approx(wide.log_evidence, rel=1e-4)


def test_a_saturated_classifier_has_a_finite_prior():
    """One-hot probabilities carry no curvature: the evidence then asks for the weakest prior there is."""
    posterior = KroneckerPosterior.fit(
        LAYER.features, 1e4 * LAYER.logits, 1e4 * LAYER.weight, 1e4 * LAYER.bias
    )
    assert 0 < posterior.prior_precision < 1
    assert math.isfinite(posterior.log_evidence)
