"""UPA, CoWA, SHOT++ and TENT: hand-computed values, loops over samples, derivatives, and any order of the batch."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from running_terms import (
    Network,
    a_batch,
    in_threads,
    pictures,
    random_target,
    running,
)
from torch import Tensor

from oracles import field as oracle
from oracles.losses import entropy
from usfan.adaptation.terms import upa
from usfan.adaptation.terms.cowa import WeightedMixup, jmds
from usfan.adaptation.terms.entropy import Entropy
from usfan.adaptation.terms.mixmatch import MixMatch, sharpen, sure
from usfan.adaptation.terms.mixup import mix
from usfan.adaptation.terms.rotation import Rotation, quarter_turns
from usfan.adaptation.terms.selection import best_of_each_class
from usfan.adaptation.terms.term import Term
from usfan.adaptation.terms.upa import CleanLabels, vote_share
from usfan.engine.loop import Batch
from usfan.engine.runtime import Runtime
from usfan.errors import ConfigError
from usfan.maths.neighbours import nearest_neighbours
from usfan.maths.outputs import Outputs

TERMS: dict[str, Term] = {
    "upa": CleanLabels(),
    "cowa": WeightedMixup(),
    "mixmatch": MixMatch(),
    "rotation": Rotation(),
    "tent": Entropy(),
}
SAMPLES = torch.tensor([3, 17, 8, 30, 21, 5])


def step(target: Outputs, samples: Tensor = SAMPLES, *, features: bool = False) -> Batch:
    """A batch of pictures, or of cached features."""
    network = Network(target.features.shape[1], target.logits.shape[1])
    images = pictures(len(target))[samples]
    return a_batch(samples, images.flatten(1) if features else images, network)


@pytest.mark.parametrize("name", TERMS)
def test_derivative(name):
    """In the pixels and, through the network, in its weights; what the term itself says is fixed stays fixed."""
    target = random_target()
    term = running(TERMS[name], target)
    plain = step(target)

    def loss(images: Tensor, *weights: Tensor) -> Tensor:
        network = Network(target.features.shape[1], target.logits.shape[1])
        network.parameters = weights
        features, logits = network(images)
        if name == "rotation":  # the upright picture's features carry no gradient
            features = plain.features.detach()
        batch = Batch(plain.samples, images, features, logits, plain.done, network)
        if name == "mixmatch":  # nor do guessed labels
            batch.logits = plain.logits.detach()
        return term(batch)

    images = plain.images.clone().requires_grad_()
    assert torch.autograd.gradcheck(loss, (images, *plain.forward.parameters))
    assert float(loss(images, *plain.forward.parameters).detach()) == pytest.approx(
        float(term(plain).detach())
    )


@pytest.mark.parametrize("name", TERMS)
def test_the_order_of_the_batch_does_not_matter(name):
    target = random_target()
    term = running(TERMS[name], target)
    order = torch.tensor([4, 2, 0, 5, 1, 3])
    torch.testing.assert_close(term(step(target, SAMPLES[order])), term(step(target)))


@pytest.mark.parametrize("name", [name for name in TERMS if name != "rotation"])
def test_cached_features_are_as_good_as_pixels(name):
    """Nothing but rotation and UPA's second view asks what the network takes."""
    target = random_target()
    term = running(CleanLabels(contrast_weight=0.0) if name == "upa" else TERMS[name], target)
    assert not term.needs_pixels
    torch.testing.assert_close(term(step(target, features=True)), term(step(target)))


@pytest.mark.parametrize("name", TERMS)
@pytest.mark.parametrize("cut", [3, 1, 6])
def test_processes_take_one_step(name, cut):
    """Two processes with parts of a batch, one of them perhaps with none: same loss, same sum of gradients."""
    target = random_target()
    order = torch.randperm(40)[:6]

    def work(runtime: Runtime) -> tuple[Tensor, Tensor]:
        term = running(TERMS[name], target, runtime=runtime)
        batch_values = order if runtime.world == 1 else (order[:cut], order[cut:])[runtime.rank]
        batch = step(target, batch_values)
        loss = term(batch)
        grads = torch.autograd.grad(loss, batch.forward.parameters, allow_unused=True)
        return loss.detach(), torch.cat([g.flatten() for g in grads if g is not None])

    (loss, gradient) = work(Runtime(torch.device("cpu")))
    parts = in_threads(2, work)
    assert all(torch.allclose(part[0], loss) for part in parts)
    torch.testing.assert_close(parts[0][1] + parts[1][1], gradient)


# Selection


@pytest.mark.parametrize("share", [0.0, 0.35, 0.6, 1.0])
def test_best_of_each_class(share):
    # class 4 is empty
    scores = torch.rand(50)
    labels = torch.randint(5, (50,)).clamp_max(3)
    result = best_of_each_class(scores, labels, 5, share)
    assert result.tolist() == oracle.best_of_each_class(scores.tolist(), labels.tolist(), share)
    order = torch.randperm(50)
    assert torch.equal(
        best_of_each_class(scores[order], labels[order], 5, share), result[order]
    )


def test_a_share_that_comes_out_whole_is_whole():
    assert (
        int(best_of_each_class(torch.rand(5), torch.zeros(5, dtype=torch.long), 1, 0.6).sum())
        == 3
    )


# UPA


@pytest.mark.parametrize("votes", [1, 2, 3])
def test_votes_are_those_of_loops(votes):
    target = random_target(60)
    labels = target.probs.argmax(dim=1)
    near, similarity = nearest_neighbours(target.features, 4)
    result = vote_share(labels, near, similarity, 4, votes)
    expected = oracle.vote_share(
        target.features.tolist(), labels.tolist(), 4, votes, upa.VOTE_TEMPERATURE
    )
    assert result.tolist() == pytest.approx(expected, abs=1e-5)
    assert not torch.equal(result, vote_share(labels, near, similarity, 4, votes + 1))


def test_upa_votes_by_hand():
    """Two samples of class 0 close together, one of class 1 among them: both others vote against it."""
    near = torch.tensor([[1, 2], [0, 2], [0, 1]])
    alike = torch.ones(3, 2)
    assert vote_share(torch.tensor([0, 0, 1]), near, alike, 2, 1).tolist() == [0.5, 0.5, 0.0]
    assert vote_share(torch.tensor([0, 0, 1]), near, alike, 2, 2).tolist() == [1.0, 1.0, 0.0]


# CoWA


def test_jmds_in_any_order():
    target = random_target(40, classes=3, width=4)
    labels, scores = jmds(target.features, target.probs, torch.ones(40))
    order = torch.randperm(40)
    again = jmds(target.features[order], target.probs[order], torch.ones(40))
    assert torch.equal(again[0], labels[order])
    torch.testing.assert_close(again[1], scores[order])


def test_samples_judged_unknown_have_no_part_in_jmds():
    target = random_target(40, classes=3, width=4)
    known = (torch.rand(40) > 0.3).double()
    moved = dataclasses.replace(target, features=target.features + 9 * (1 - known)[:, None])
    labels, _ = jmds(target.features, target.probs, known)
    others, _ = jmds(moved.features, target.probs, known)
    assert torch.equal(labels[known > 0], others[known > 0])
    term = running(WeightedMixup(), target)
    term.guidance.known.copy_(known)
    term.refresh(target)
    assert (term.scores[known == 0] == 0).all()


def test_jmds_of_a_class_without_samples():
    target = random_target(40, classes=3, width=4)
    probs = torch.cat([target.probs[:, :2], torch.zeros(40, 1)], dim=1).double()
    labels, scores = jmds(target.features, probs, torch.ones(40))
    assert set(labels.tolist()) <= {0, 1}
    assert torch.isfinite(scores).all()


def test_draws_of_mixup():
    """By seed and epoch alone, from Beta(α, α)."""
    target = random_target(2000)
    one, again, other = (
        running(WeightedMixup(mixup_alpha=0.2), target, seed=seed) for seed in (0, 0, 1)
    )
    assert torch.equal(one.shares, again.shares)
    assert torch.equal(one.keys, again.keys)
    assert not torch.equal(one.shares, other.shares)
    first = one.shares.clone()
    one.begin_epoch(1)
    assert not torch.equal(one.shares, first)
    assert float(first.mean()) == pytest.approx(0.5, abs=0.05)
    assert float(first.var()) == pytest.approx(1 / 4 / (2 * 0.2 + 1), abs=0.02)
    assert sorted(one.keys.tolist()) == list(range(2000))


def test_mix_by_hand():
    one = torch.tensor([[1.0, 3.0], [1.0, 3.0]])
    other = torch.tensor([[5.0, 7.0], [5.0, 7.0]])
    assert mix(one, other, torch.tensor([1.0, 0.25])).tolist() == [[1.0, 3.0], [4.0, 6.0]]


# SHOT++


def test_turned_by_hand():
    image = torch.tensor([[[1.0, 2.0], [3.0, 4.0]]])
    result = quarter_turns(image.expand(4, 1, 2, 2), torch.tensor([0, 1, 2, 3]))[:, 0].tolist()
    assert result == [[[1, 2], [3, 4]], [[2, 4], [1, 3]], [[4, 3], [2, 1]], [[3, 1], [4, 2]]]


def test_the_rotation_head_is_trained_saved_and_restored():
    target = random_target()
    one = running(Rotation(), target)
    other = running(Rotation(), target, seed=1)
    assert not torch.equal(one.weight, other.weight)
    grads = torch.autograd.grad(one(step(target)), one.parameters())
    assert all(float(g.abs().max()) > 0 for g in grads)
    other.restore(one.tensors())
    assert torch.equal(one.weight, other.weight)
    assert other.weight.requires_grad
    assert one.needs_pixels


def test_the_samples_that_count_as_labelled():
    """As many of each class as lie under the mean entropy overall, the lowest first."""
    target = random_target(60)
    labels = target.probs.argmax(dim=1)
    entropies = [entropy(p) for p in target.probs.tolist()]
    share = sum(h < sum(entropies) / 60 for h in entropies) / 60
    expected = oracle.best_of_each_class([-h for h in entropies], labels.tolist(), share)
    assert sure(target.probs, labels).tolist() == expected
    assert (running(MixMatch(), target).labelled > 0).tolist() == expected


def test_mixmatch_splits_once_also_if_it_is_resumed():
    first = random_target()
    second = random_target(seed=1)
    term = running(MixMatch(), first)
    labelled = term.labelled.clone()
    targets = term.targets.clone()
    resumed = MixMatch().started(term.context)
    resumed.restore(term.tensors())
    for one in (term, resumed):
        one.refresh(second)
        assert torch.equal(one.labelled, labelled)
        assert torch.equal(one.targets, targets)


def test_sharpen_by_hand():
    torch.testing.assert_close(
        sharpen(torch.tensor([[0.8, 0.2]]), 0.5), torch.tensor([[0.64, 0.04]]) / 0.68
    )


# TENT


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: CleanLabels(voters=0), "voters must be at least 1"),
        (lambda: CleanLabels(clean_share=1.5), "clean_share must lie between"),
        (lambda: WeightedMixup(mixup_alpha=0), "mixup_alpha must be at least 0.001"),
        (lambda: MixMatch(sharpening=0.0), "sharpening must be at least"),
        (lambda: MixMatch(consistency_weight=-1), "consistency_weight must be at least 0"),
        (lambda: Rotation(rotation_weight=-1), "rotation_weight must be at least 0"),
    ],
)
def test_settings_that_make_no_sense_are_refused(make, message):
    with pytest.raises(ConfigError, match=message):
        make()
