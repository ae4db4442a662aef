"""The weights of the entropy term, and what they are divided by."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from oracles.last_layer import last_layer, shifted
from usfan.adaptation.certainty import Certainty, divide_by_class_mean, divide_by_mean
from usfan.maths.outputs import Outputs
from usfan.uncertainty.kronecker import KroneckerPosterior

KINDS = ("point", "posterior")


def test_weights():
    """Each kind is exp(−H) of its own prediction, of a pass and of a batch, without gradient."""
    layer = last_layer(200, 6, 3, dtype=torch.float32)
    posterior = KroneckerPosterior.fit(*layer.given)
    features = shifted(layer.features, 20).requires_grad_()
    logits = posterior.logits(features)
    certainties = {
        kind: Certainty(kind, "step", False).of_batch(features, logits, posterior, 64)
        for kind in KINDS
    }
    p = (logits.detach() / 0.4).softmax(dim=1)
    torch.testing.assert_close(certainties["point"], torch.exp((p * p.log()).sum(dim=1)))
    assert torch.equal(
        certainties["posterior"], posterior.certainty(features.detach(), 0.4, 64)
    )
    assert not any(w.requires_grad for w in certainties.values())
    assert all(
        bool(((w >= 1 / 3 - 1e-5) & (w <= 1 + 1e-5)).all()) for w in certainties.values()
    )
    probs, information = posterior.moments(features.detach(), 0.4, 64)
    outputs = Outputs(features.detach(), logits.detach(), p, probs, information)
    ones = torch.ones(20)
    for kind in KINDS:
        raw = Certainty(kind, normalise_weights=False)
        torch.testing.assert_close(raw.of_pass(outputs, ones, 0.0), certainties[kind])
        torch.testing.assert_close(
            Certainty(kind).of_pass(outputs, ones, 0.0),
            certainties[kind] / certainties[kind].mean(),
        )
        annealed = dataclasses.replace(raw, anneal=True)
        for done, power in ((0.0, 2.0), (0.5, 1.0), (0.75, 0.5)):
            torch.testing.assert_close(
                annealed.of_pass(outputs, ones, done), certainties[kind] ** power
            )
            torch.testing.assert_close(raw.of_pass(outputs, ones, done), certainties[kind])
    assert torch.equal(Certainty("none").of_pass(outputs, ones, 0.0), ones)
    balanced = Certainty("posterior", balance=True).of_pass(outputs, ones, 0.0)
    predicted = logits.argmax(dim=1)
    for label in predicted.unique():
        members = certainties["posterior"][predicted == label]
        torch.testing.assert_close(balanced[predicted == label], members / members.mean())


def test_divided_by_their_mean():
    weights = torch.tensor([0.5, 1.0, 0.3, 0.2])
    mask = torch.tensor([1.0, 1.0, 0.0, 0.0])
    assert divide_by_mean(weights, torch.ones(4)).mean().item() == pytest.approx(1)
    torch.testing.assert_close(divide_by_mean(weights, mask), weights / 0.75)
    assert torch.isfinite(divide_by_mean(weights, torch.zeros(4))).all()
    assert torch.isfinite(divide_by_mean(torch.zeros(4), torch.ones(4))).all()


def test_divided_by_the_mean_of_their_class():
    """Over the samples in the mask; a class with none of them has no weight."""
    weights = torch.tensor([0.5, 1.0, 0.3, 0.2, 0.7])
    predicted = torch.tensor([0, 0, 2, 2, 1])
    mask = torch.tensor([1.0, 1.0, 1.0, 0.0, 0.0])
    certainties = divide_by_class_mean(weights, predicted, 4, mask)
    torch.testing.assert_close(
        certainties, torch.tensor([0.5 / 0.75, 1 / 0.75, 1.0, 0.2 / 0.3, 0.0])
    )
    torch.testing.assert_close(
        divide_by_class_mean(weights, predicted, 4, torch.ones(5))[3:],
        torch.tensor([0.2 / 0.25, 1.0]),
    )
    assert torch.isfinite(divide_by_class_mean(torch.zeros(5), predicted, 4, mask)).all()
