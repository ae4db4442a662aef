"""Pseudo-labels and neighbours against loops; weights of the entropy term."""

from __future__ import annotations

import pytest
import torch
from sklearn.covariance import ledoit_wolf

from oracles import centroids as oracle
from oracles.last_layer import last_layer, shifted
from usfan.adaptation import neighbours
from usfan.scoring.neighbours import nearest_neighbours, neighbour_targets, propagate
from usfan.adaptation.centroids import GAUSSIAN_ROUNDS, nearest_centroid, nearest_gaussian, unit_features
from usfan.adaptation.weights import divide_by_mean, raw_weights, weights_of
from usfan.config import AdaptConfig
from usfan.posterior.kronecker import KroneckerPosterior
from usfan.scoring.outputs import Outputs


def target(samples: int = 60, classes: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    """Features and blurred predictions of classes of unequal size, so that both rounds change labels."""
    centres = 2 * torch.randn(classes, 5)
    labels = torch.randint(classes, (samples,)).clamp_max(torch.randint(1, classes, (samples,)))
    features = centres[labels] + torch.randn(samples, 5)
    return features, (torch.nn.functional.one_hot(labels, classes) + 1.2 * torch.randn(samples, classes)).softmax(dim=1)


@pytest.mark.parametrize("rounds", [1, 2])
@pytest.mark.parametrize("threshold", [0, 10, 14])
@pytest.mark.parametrize("masked", [True, False])
def test_nearest_centroid(rounds, threshold, masked):
    features, probs = target()
    mask = (torch.rand(60) > 0.3).float() if masked else None
    found = nearest_centroid(features, probs, threshold=threshold, mask=mask, rounds=rounds).tolist()
    given = None if mask is None else mask.tolist()
    args = (features.tolist(), probs.tolist())
    assert found == oracle.nearest_centroid(*args, threshold=threshold, mask=given, rounds=rounds)
    assert found != probs.argmax(dim=1).tolist()


def test_the_second_round_matters_and_small_classes_get_no_label():
    features, probs = target()
    one, two = (nearest_centroid(features, probs, rounds=rounds) for rounds in (1, 2))
    assert not torch.equal(one, two)
    counts = torch.bincount(probs.argmax(dim=1), minlength=4)
    threshold = int(counts.sort().values[1])
    labels = nearest_centroid(features, probs, threshold=threshold)
    assert set(labels.tolist()) <= {k for k in range(4) if counts[k] > threshold}


def test_no_class_left_keeps_the_point_estimate():
    features, probs = target()
    assert torch.equal(nearest_centroid(features, probs, threshold=60), probs.argmax(dim=1))
    assert torch.equal(nearest_centroid(features, probs, mask=torch.zeros(60)), probs.argmax(dim=1))


def test_permuted_samples_and_split_sums():
    features, probs = target()
    whole = nearest_centroid(features, probs)
    order = torch.randperm(60)
    assert torch.equal(nearest_centroid(features[order], probs[order]), whole[order])
    doubled = nearest_centroid(features, probs, total=lambda sums: 2 * sums)  # as if another process had the same
    assert torch.equal(doubled, whole)


@pytest.mark.parametrize("masked", [True, False])
def test_nearest_gaussian(masked):
    """Against EM with loops, residuals repeated by their share, and scikit-learn's Ledoit and Wolf."""
    features, probs = target(90)
    labels = probs.argmax(dim=1).clamp_max(2)  # class 3 has no sample
    mask = (torch.rand(90) > 0.3).double() if masked else torch.ones(90, dtype=torch.float64)
    phi = unit_features(features).double()
    share = torch.nn.functional.one_hot(labels, 4).double()
    for _ in range(GAUSSIAN_ROUNDS):
        means = [(share[:, k] * mask) @ phi / (share[:, k] @ mask) for k in range(3)]
        covariance = oracle.shrunk_covariance([(phi - m, share[:, k] * mask) for k, m in enumerate(means)])
        scores = [-0.5 * torch.einsum("nd,de,ne->n", phi - m, covariance.inverse(), phi - m) for m in means]
        share = torch.stack([*scores, torch.full((90,), -torch.inf, dtype=torch.float64)], dim=1).softmax(dim=1)
    found = nearest_gaussian(features, labels, 4, mask=mask.float() if masked else None)
    assert torch.equal(found, share.argmax(dim=1))
    assert not torch.equal(found, labels)


def test_the_oracle_shrinks_as_scikit_learn():
    x = torch.randn(40, 6, dtype=torch.float64) * torch.arange(1, 7)
    expected, _ = ledoit_wolf(x.numpy(), assume_centered=True)
    found = oracle.shrunk_covariance([(x, torch.ones(40, dtype=torch.float64))])
    torch.testing.assert_close(found, torch.from_numpy(expected))


def test_gaussians_know_wide_directions_and_odd_targets():
    """Two long, thin classes side by side: the nearest centroid cuts them across, a Gaussian does not."""
    truth = torch.arange(2).repeat_interleave(200)
    features = torch.stack([3 * torch.randn(400), truth + 0.05 * torch.randn(400)], dim=1)
    start = torch.where(torch.rand(400) < 0.3, 1 - truth, truth)
    assert (nearest_gaussian(features, start, 2) == truth).double().mean() > 0.95
    nobody = nearest_gaussian(features, start, 2, mask=torch.zeros(400))
    assert torch.equal(nobody, start)
    same = nearest_gaussian(torch.ones(5, 3), torch.zeros(5, dtype=torch.long), 2)
    assert torch.equal(same, torch.zeros(5, dtype=torch.long))


def test_unit_features():
    torch.testing.assert_close(
        unit_features(torch.tensor([[3.0, 0.0], [0.0, 0.0]])),
        torch.tensor([[3.0, 0.0, 1.0], [0.0, 0.0, 10**0.5]]) / 10**0.5,
    )


@pytest.mark.parametrize("chunk", [4096, 7])
def test_neighbours_and_propagation(monkeypatch, chunk):
    monkeypatch.setattr(neighbours, "CHUNK", {"cpu": chunk})
    features, probs = target(40)
    certainty = torch.rand(40) * (torch.rand(40) > 0.2)
    places, similarities = nearest_neighbours(features, 5)
    links = oracle.neighbours(features.tolist(), 5)
    assert places.tolist() == [[j for j, _ in near] for near in links]
    torch.testing.assert_close(similarities, torch.tensor([[s for _, s in near] for near in links]), atol=1e-6, rtol=0)
    arguments = (links, probs.tolist(), certainty.tolist())
    found = neighbour_targets(places, similarities, probs, certainty)
    torch.testing.assert_close(found, torch.tensor(oracle.mixed(*arguments)), atol=1e-5, rtol=0)
    spread = propagate(places, similarities, probs, certainty, alpha=0.8, steps=6)
    torch.testing.assert_close(spread, torch.tensor(oracle.propagated(*arguments, 0.8, 6)), atol=1e-5, rtol=0)


def test_neighbours_of_few_samples():
    places, similarities = nearest_neighbours(torch.randn(3, 5), 10)
    assert places.shape == similarities.shape == (3, 2)
    assert nearest_neighbours(torch.randn(1, 5), 10)[0].shape == (1, 0)


def test_nobody_certain_nearby_says_nothing():
    features, probs = target(40)
    places, similarities = nearest_neighbours(features, 5)
    assert torch.equal(neighbour_targets(places, similarities, probs, torch.zeros(40)), torch.zeros(40, 4))


def test_weights():
    """Each kind is exp(−H) of its own prediction, without gradient."""
    layer = last_layer(200, 6, 3, dtype=torch.float32)
    posterior = KroneckerPosterior.fit(*layer.given)
    features = shifted(layer.features, 20).requires_grad_()
    logits = posterior.logits(features)
    options = {"temperature": 0.4, "samples": 64}
    found = {kind: raw_weights(kind, features, logits, posterior, **options) for kind in ("none", "point", "posterior")}
    assert torch.equal(found["none"], torch.ones(20))
    p = (logits.detach() / 0.4).softmax(dim=1)
    torch.testing.assert_close(found["point"], torch.exp((p * p.log()).sum(dim=1)))
    assert torch.equal(found["posterior"], posterior.certainty(features.detach(), 0.4, 64))
    assert not any(w.requires_grad for w in found.values())
    assert all(bool(((w >= 1 / 3 - 1e-5) & (w <= 1 + 1e-5)).all()) for w in found.values())
    probs, information = posterior.moments(features.detach(), 0.4, 64)
    outputs = Outputs(features.detach(), logits.detach(), p, probs, information)
    for kind in ("point", "posterior"):
        torch.testing.assert_close(weights_of(kind, outputs, AdaptConfig(samples=64)), found[kind])
    squared = weights_of("posterior", outputs, AdaptConfig(weight_power=2.0))
    torch.testing.assert_close(squared, found["posterior"] ** 2)
    for done, power in ((0.0, 2.0), (0.5, 1.0), (0.75, 0.5)):
        annealed = weights_of("posterior", outputs, AdaptConfig(anneal=True), done)
        torch.testing.assert_close(annealed, found["posterior"] ** power)
        torch.testing.assert_close(weights_of("posterior", outputs, AdaptConfig(), done), found["posterior"])
    epistemic = weights_of("posterior", outputs, AdaptConfig(certainty="epistemic"))
    torch.testing.assert_close(epistemic, torch.exp(-information))


def test_divided_by_their_mean():
    weights, mask = torch.tensor([0.5, 1.0, 0.3, 0.2]), torch.tensor([1.0, 1.0, 0.0, 0.0])
    assert divide_by_mean(weights).mean().item() == pytest.approx(1)
    torch.testing.assert_close(divide_by_mean(weights, mask), weights / 0.75)
    assert torch.isfinite(divide_by_mean(weights, torch.zeros(4))).all()
    assert torch.isfinite(divide_by_mean(torch.zeros(4))).all()
