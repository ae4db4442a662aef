"""The terms against the authors' formulas (`oracles.authors`): values, gradients, banks and selection, to 1e-6."""

from __future__ import annotations

import pytest
import torch
from running_terms import Network, a_batch, pictures, random_target, running
from torch import Tensor

from oracles import authors
from usfan.adaptation.centroids import nearest_centroid
from usfan.adaptation.methods import METHODS
from usfan.adaptation.terms.cowa import WeightedMixup
from usfan.adaptation.terms.entropy import Entropy
from usfan.adaptation.terms.information import InformationMaximization
from usfan.adaptation.terms.mixmatch import MixMatch
from usfan.adaptation.terms.mixup import Mixup
from usfan.adaptation.terms.pseudo_labels import PseudoLabels
from usfan.adaptation.terms.rotation import Rotation
from usfan.adaptation.terms.upa import CleanLabels
from usfan.data.views import strong_view
from usfan.engine.loop import Batch
from usfan.maths.outputs import Outputs

STEPS = (torch.tensor([3, 17, 8, 30, 21, 5]), torch.tensor([8, 2, 39, 17, 0, 11]))


def batch_of(target: Outputs, samples: Tensor) -> Batch:
    network = Network(target.features.shape[1], target.logits.shape[1])
    return a_batch(samples, pictures(len(target))[samples], network)


def same(loss: Tensor, expected: Tensor, batch: Batch) -> None:
    """Value and gradient in the network's weights."""
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-8)
    weights = batch.forward.parameters
    options = {"allow_unused": True, "materialize_grads": True, "retain_graph": True}
    for one, other in zip(
        torch.autograd.grad(loss, weights, **options),
        torch.autograd.grad(expected, weights, **options),
        strict=True,
    ):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("weighted", [False, True])
def test_shot_im_and_usfan(weighted):
    target = random_target()
    term = running(InformationMaximization(), target)
    if weighted:
        term.guidance.weights = torch.rand(40, dtype=torch.float64)
    batch = batch_of(target, STEPS[0])
    weights = term.guidance.weights[STEPS[0]].double()
    same(term(batch), authors.information(batch.logits, weights), batch)


def test_the_toy_program_does_not_weight():
    """Its N × N products: the mean of the weights, times SHOT-IM's entropy. Ours weights each sample."""
    logits = torch.randn(6, 4, dtype=torch.float64)
    weights = torch.rand(6, dtype=torch.float64)
    equal = weights.mean().expand(6)
    toy = authors.toy_information(logits, weights)
    torch.testing.assert_close(toy, authors.information(logits, equal))
    assert abs(float(toy - authors.information(logits, weights))) > 1e-3


@pytest.mark.parametrize("threshold", [0, 8])
def test_shot_labels(threshold):
    target = random_target(60)
    expected = authors.centroid_labels(target.features, target.probs, threshold)
    found = nearest_centroid(target.features, target.probs, threshold=threshold)
    assert found.tolist() == expected
    term = running(PseudoLabels(pseudo_label_weight=0.3), target)
    batch = batch_of(target, STEPS[0])
    labels = authors.centroid_labels(target.features, target.probs)
    labels = [labels[i] for i in STEPS[0].tolist()]
    same(term(batch), 0.3 * authors.cross_entropy(batch.logits, labels, range(6)), batch)


@pytest.mark.parametrize("name", ["lsc", "nrc", "aad"])
def test_banks(name):
    """The whole loss of the row in two steps: the second sees what the first wrote."""
    target = random_target()
    term, *others = (running(part, target) for part in METHODS[name].terms)
    bank = authors.Bank(target.features, target.probs)
    for samples in STEPS:
        batch = batch_of(target, samples)
        step = (bank, samples.tolist(), batch.features, batch.logits)
        expected = {
            "lsc": lambda step=step: authors.lsc(*step, 2) + authors.diversity(step[3]),
            "nrc": lambda step=step: authors.nrc(*step, 2, 3, 0.1) + authors.diversity(step[3]),
            "aad": lambda step=step: authors.aad(*step, 3, 1 / 4),  # (1 + 10 · 0.3)^−1
        }
        loss = term(batch) + sum(other(batch) for other in others)
        same(loss, expected[name](), batch)
        torch.testing.assert_close(term.probs, bank.probs, rtol=1e-6, atol=1e-8)
        torch.testing.assert_close(term.features, bank.features, rtol=1e-6, atol=1e-8)


def test_upa():
    """Selection, cross-entropy with the clean labels, and the contrastive term on both views."""
    target = random_target(60)
    term = running(CleanLabels(), target)
    labels = authors.centroid_labels(target.features, target.probs)
    clean = authors.upa_clean(target.features, labels, 4, 4, 2, 0.6)
    assert term.labels.tolist() == labels
    assert (term.clean > 0).tolist() == clean
    ties = torch.tensor(labels) == int(torch.tensor(labels).mode().values)
    assert 0 < int(term.clean[ties].sum()) < int(ties.sum())
    for samples in STEPS:
        batch = batch_of(target, samples)
        own = [labels[i] for i in samples.tolist()]
        chosen = [clean[i] for i in samples.tolist()]
        rows = [i for i in range(6) if chosen[i]]
        expected = 0.3 * authors.cross_entropy(batch.logits, own, rows)
        _, second = batch.forward(strong_view(batch.images, samples, 0, term.epoch))
        contrast = authors.upa_contrast(batch.logits, second, own, chosen, 0.1)
        assert bool(contrast > 0)
        same(term(batch), expected + contrast, batch)
        features = Batch(
            samples, batch.features, batch.features, batch.logits, batch.done, batch.forward
        )
        contrast = authors.upa_contrast(batch.logits, batch.logits, own, chosen, 0.1)
        same(term(features), expected + contrast, batch)


def ring(term: Mixup, samples: Tensor) -> list[int]:
    """The partner of each sample of a batch: the next one in the order of the epoch."""
    order = sorted(range(len(samples)), key=lambda i: int(term.keys[samples[i]]))
    after = dict(zip(order, order[1:] + order[:1], strict=True))
    return [after[i] for i in range(len(samples))]


def test_cowa():
    """Labels and JMDS of all samples, then the loss of two batches."""
    target = random_target(40, classes=3, width=4)
    term = running(WeightedMixup(), target)
    labels, scores = authors.jmds(target.features, target.probs)
    assert labels != target.probs.argmax(dim=1).tolist()
    assert term.targets.argmax(dim=1).tolist() == labels
    torch.testing.assert_close(
        term.scores, torch.tensor(scores, dtype=torch.float64), rtol=1e-6, atol=1e-8
    )
    for samples in STEPS:
        batch = batch_of(target, samples)
        expected = authors.cowa(
            batch.forward,
            batch.images,
            [labels[i] for i in samples.tolist()],
            [scores[i] for i in samples.tolist()],
            ring(term, samples),
            term.shares[samples].tolist(),
            3,
        )
        same(term(batch), expected, batch)


def test_rotation():
    target = random_target()
    term = running(Rotation(), target)
    for samples in STEPS:
        batch = batch_of(target, samples)
        turns = term.turns[samples].tolist()
        expected = authors.rotation(batch.forward, batch.images, turns, *term.parameters())
        same(term(batch), 0.6 * expected, batch)


def test_mixmatch():
    """The split by entropy within each class, and the loss with two views of each image."""
    target = random_target()
    term = running(MixMatch(), target)
    labels, labelled = authors.labelled_share(target.probs)
    assert (term.labelled > 0).tolist() == labelled
    assert term.targets.argmax(dim=1).tolist() == labels
    for samples in STEPS:
        batch = batch_of(target, samples)
        second = pictures(len(target), seed=3)[samples]
        batch.second_view = lambda second=second: second
        rows = samples.tolist()
        expected = authors.mixmatch(
            batch.forward,
            (batch.images, second),
            [labels[i] for i in rows],
            [labelled[i] for i in rows],
            ring(term, samples),
            term.shares[samples].tolist(),
            100 * 0.3,
        )
        same(term(batch), expected, batch)


def test_tent():
    target = random_target()
    batch = batch_of(target, STEPS[0])
    same(running(Entropy(), target)(batch), authors.tent(batch.logits), batch)


def test_strong_views_follow_seed_epoch_and_sample():
    images = torch.rand(8, 3, 16, 16)
    samples = torch.arange(8)
    one = strong_view(images, samples, 0, 0)
    assert one.shape == images.shape
    assert torch.equal(one, strong_view(images, samples, 0, 0))
    torch.testing.assert_close(one[3:5], strong_view(images[3:5], samples[3:5], 0, 0))
    for seed, epoch in ((1, 0), (0, 1)):
        assert not torch.equal(one, strong_view(images, samples, seed, epoch))
    many = strong_view(images[:1].expand(400, -1, -1, -1), torch.arange(400), 0, 0)
    grey = (many - many.mean(dim=1, keepdim=True)).abs().amax(dim=(1, 2, 3)) < 1e-6
    assert 0.1 < float(grey.float().mean()) < 0.3
    assert strong_view(images[:0], samples[:0], 0, 0).shape == (0, 3, 16, 16)
