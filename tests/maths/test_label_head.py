"""The head of a few labels and the pool, against autograd and a general optimiser in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.optimize import minimize

from oracles.namings import block_log_determinant, head_log_posterior
from usfan.maths.label_head import (
    PRECISIONS,
    fit_label_head,
    half_log_determinant,
    pool,
    pool_weights,
)
from usfan.maths.user_labels import UserLabels

N, K, W, L = 60, 4, 5, 12


@pytest.fixture
def data():
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(N, W, generator=generator).double()
    log_names = torch.randn(N, K, generator=generator).double().log_softmax(1)
    labels = UserLabels(torch.arange(L) * 5, torch.arange(L) % K)
    return log_names, features, labels


def test_each_head_is_at_the_maximum_of_its_posterior(data):
    log_names, features, labels = data
    head = fit_label_head(log_names, features, labels)
    unit = float(features.square().sum(1).mean())
    offset, x = log_names[labels.rows], features[labels.rows]
    for relative, weight, scale in zip(PRECISIONS, head.weights, head.scales, strict=True):
        theta = torch.cat([weight.flatten(), scale[None]])

        def posterior(values, precision=relative * unit):
            return head_log_posterior(offset, x, labels.labels, precision, values)

        best = minimize(
            lambda values: -float(posterior(torch.from_numpy(values))),
            theta.numpy(),
            jac=lambda values: (
                -torch.autograd.functional.jacobian(posterior, torch.from_numpy(values)).numpy()
            ),
        )
        assert float(posterior(theta)) == pytest.approx(-best.fun, abs=0.02)


def test_the_evidence_is_laplaces_with_one_block_per_class(data):
    log_names, features, labels = data
    head = fit_label_head(log_names, features, labels)
    unit = float(features.square().sum(1).mean())
    offset, x = log_names[labels.rows], features[labels.rows]
    for relative, weight, scale, evidence in zip(
        PRECISIONS, head.weights, head.scales, head.log_evidence, strict=True
    ):
        precision = relative * unit
        theta = torch.cat([weight.flatten(), scale[None]])
        value = head_log_posterior(offset, x, labels.labels, precision, theta)
        volume = block_log_determinant(offset, x, labels.labels, precision, theta)
        assert float(evidence) == pytest.approx(float(value) - volume, abs=1e-3)


def test_the_evidence_of_many_labels_is_scaled_up_from_some(monkeypatch):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(400, W, generator=generator).double()
    logits = torch.randn(400, K, generator=generator).double()
    some = half_log_determinant(logits, x @ x.T, 1.0)
    monkeypatch.setattr("usfan.maths.label_head.EVIDENCE_LABELS", 400)
    assert some == pytest.approx(half_log_determinant(logits, x @ x.T, 1.0), rel=0.4)


def test_labels_that_agree_with_the_features_move_the_names():
    generator = torch.Generator().manual_seed(2)
    truth = torch.randint(K, (200,), generator=generator)
    features = 3 * torch.eye(K, W)[truth] + torch.randn(200, W, generator=generator)
    features = features.double()
    wrong = torch.randn(200, K, generator=generator).double().log_softmax(1)
    labels = UserLabels(torch.arange(20), truth[:20])
    moved = fit_label_head(wrong, features, labels).probs(wrong, features)
    assert (moved[20:].argmax(1) == truth[20:]).double().mean() > 0.8
    torch.testing.assert_close(moved.sum(1), torch.ones(200).double())


def test_labels_that_agree_with_the_names_keep_them():
    generator = torch.Generator().manual_seed(3)
    truth = torch.randint(K, (200,), generator=generator)
    names = (4 * torch.eye(K)[truth] + torch.randn(200, K, generator=generator)).double()
    features = torch.randn(200, W, generator=generator).double()
    labels = UserLabels(torch.arange(8), truth[:8])
    moved = fit_label_head(names.log_softmax(1), features, labels).probs(names, features)
    before = (names.argmax(1) == truth).double().mean()
    assert (moved.argmax(1) == truth).double().mean() > before - 0.05


@pytest.mark.parametrize("seed", range(5))
def test_pool_weights_are_the_constrained_maximum(seed):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(K, (20,), generator=generator)
    experts = torch.randn(3, 20, K, generator=generator).double()
    experts[1, torch.arange(20), labels] += 2
    held_out = experts.softmax(2)
    weights = pool_weights(held_out, labels, (1.0, 0.0, 0.0))
    centre = torch.tensor([1.0, 0, 0]).double()
    rows = torch.arange(20)

    def loss(values):
        w = torch.from_numpy(values)
        logs = torch.einsum("e,elk->lk", w, held_out.log()).log_softmax(1)
        return float(-logs[rows, labels].sum() + 0.5 * (w - centre).square().sum())

    best = minimize(
        loss, np.array([1.0, 0, 0]), bounds=[(0, None)] * 3, options={"ftol": 1e-14}
    )
    assert loss(weights.numpy()) == pytest.approx(best.fun, abs=1e-5)
    assert weights.min() >= 0
    torch.testing.assert_close(weights, torch.from_numpy(best.x), atol=5e-3, rtol=0)


def test_a_pool_of_one_expert_is_that_expert():
    probs = torch.rand(3, 7, K).double()
    probs = probs / probs.sum(2, keepdim=True)
    alone = pool(probs, torch.tensor([1.0, 0, 0]).double())
    torch.testing.assert_close(alone, probs[0], atol=1e-5, rtol=0)
