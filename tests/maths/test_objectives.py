"""Every loss against its value by hand, its gradient against finite differences."""

from __future__ import annotations

import math

import pytest
import torch

import usfan
from oracles import losses
from usfan.errors import UsfanError
from usfan.maths.objectives import (
    alone,
    certainty_weights,
    diversity,
    entropy,
    global_mean,
    global_sum,
    recipe_entropy,
    smoothed_cross_entropy,
    soft_cross_entropy,
)


def batch(
    samples: int = 6, classes: int = 4
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    logits = 2 * torch.randn(samples, classes, dtype=torch.float64)
    return logits, torch.rand(samples, dtype=torch.float64), torch.randint(classes, (samples,))


def test_two_samples_by_hand():
    """p = (¾, ¼) and (¼, ¾): the mean is uniform, both entropies are the same."""
    logits = torch.tensor([[math.log(3), 0.0], [0.0, math.log(3)]], dtype=torch.float64)
    one = -(0.75 * math.log(0.75 + 1e-5) + 0.25 * math.log(0.25 + 1e-5))
    even = math.log(0.5 + 1e-5)
    assert usfan.information_maximization(logits, gamma=0.0).item() == pytest.approx(
        one, rel=1e-14
    )
    assert usfan.information_maximization(logits, gamma=1.0).item() == pytest.approx(
        even, rel=1e-14
    )
    weights = torch.tensor([1.0, 0.5], dtype=torch.float64)
    value = usfan.information_maximization(logits, weights, gamma=0.25)
    assert value.item() == pytest.approx(0.75 * 0.75 * one + 0.25 * even, rel=1e-14)


@pytest.mark.parametrize("gamma", [0.0, 0.3, 0.5, 1.0])
@pytest.mark.parametrize("weighted", [True, False])
def test_information_maximization(gamma, weighted):
    logits, weights, _ = batch()
    used_weights = weights if weighted else None
    expected = losses.information_maximization(
        logits.tolist(), weights.tolist() if weighted else [1.0] * 6, gamma
    )
    assert usfan.information_maximization(logits, used_weights, gamma).item() == pytest.approx(
        expected, rel=1e-12
    )
    logits.requires_grad_()
    assert torch.autograd.gradcheck(
        lambda z: usfan.information_maximization(z, used_weights, gamma), (logits,)
    )


def test_parts():
    logits, _, labels = batch()
    probs = logits.softmax(dim=1)
    rows = logits.tolist()
    torch.testing.assert_close(
        recipe_entropy(probs).tolist(), [losses.entropy(losses.softmax(r)) for r in rows]
    )
    assert diversity(probs.mean(dim=0)).item() == pytest.approx(
        losses.diversity(losses.mean_probs(rows)), rel=1e-12
    )
    for smoothing in (0.0, 0.1, 1.0):
        result = smoothed_cross_entropy(logits, labels, smoothing)
        targets = [losses.smoothed_targets(k, 4, smoothing) for k in labels.tolist()]
        expected = [losses.cross_entropy(r, q) for r, q in zip(rows, targets, strict=True)]
        torch.testing.assert_close(result.tolist(), expected)
        torch.testing.assert_close(
            soft_cross_entropy(logits, torch.tensor(targets).double()), result
        )


def test_entropy_and_certainty_of_certain_and_uniform_rows():
    probs = torch.tensor([[1.0, 0.0, 0.0], [1 / 3, 1 / 3, 1 / 3]], dtype=torch.float64)
    assert entropy(probs).tolist() == pytest.approx([0, math.log(3)])
    assert certainty_weights(probs).tolist() == pytest.approx([1, 1 / 3])


def test_gradients_of_the_parts():
    logits, _, labels = batch()
    targets = torch.rand(6, 4, dtype=torch.float64)
    logits.requires_grad_()
    for part in (
        lambda z: recipe_entropy(z.softmax(dim=1)),
        lambda z: diversity(z.softmax(dim=1).mean(dim=0)),
        lambda z: smoothed_cross_entropy(z, labels, 0.1),
        lambda z: soft_cross_entropy(z, targets),
    ):
        assert torch.autograd.gradcheck(part, (logits,))


def test_weights_carry_no_gradient():
    logits, weights, _ = batch()
    logits.requires_grad_()
    weights.requires_grad_()
    usfan.information_maximization(logits, weights).backward()
    assert weights.grad is None
    assert logits.grad.abs().sum() > 0


def test_the_order_of_the_batch_does_not_matter():
    logits, weights, labels = batch(32)
    order = torch.randperm(32)
    before, after = (
        usfan.information_maximization(logits[o], weights[o]) for o in (torch.arange(32), order)
    )
    torch.testing.assert_close(before, after)
    each = smoothed_cross_entropy(logits, labels)
    assert torch.equal(smoothed_cross_entropy(logits[order], labels[order]), each[order])


def test_large_logits_are_finite():
    logits = torch.tensor([[1e4, 0.0, -1e4], [0.0, 1e4, 0.0]], requires_grad=True)
    loss = usfan.information_maximization(logits)
    loss.backward()
    assert torch.isfinite(loss)
    assert torch.isfinite(logits.grad).all()


@pytest.mark.parametrize(
    ("logits", "weights", "gamma", "said"),
    [
        (torch.zeros(3), None, 0.5, "must be B×K"),
        (torch.zeros(3, 1), None, 0.5, "two classes"),
        (torch.zeros(0, 3), None, 0.5, "at least one sample"),
        (torch.zeros(3, 3), torch.ones(2), 0.5, r"one number per sample \(3\)"),
        (torch.zeros(3, 3), torch.ones(3, 3), 0.5, "one number per sample"),
        (torch.zeros(3, 3), None, 1.5, "between 0 and 1"),
        (torch.zeros(3, 3), None, float("nan"), "between 0 and 1"),
    ],
)
def test_wrong_input(logits, weights, gamma, said):
    with pytest.raises(UsfanError, match=said):
        usfan.information_maximization(logits, weights, gamma)


def test_mean_under_a_mask():
    values = torch.tensor([1.0, 2.0, 4.0, 8.0])
    table = torch.stack([values, -values], dim=1)
    assert global_mean(values, alone).item() == 3.75
    assert global_mean(values, alone, torch.tensor([1.0, 0.0, 0.0, 1.0])).item() == 4.5
    assert global_mean(table, alone, torch.tensor([1.0, 0.0, 0.0, 1.0])).tolist() == [4.5, -4.5]
    assert global_mean(values, alone, torch.zeros(4)).item() == 0.0


def test_two_processes_take_the_step_of_one():
    """Each differentiates its own part; the values are those of the whole batch, the gradients sum to its gradient."""
    logits, _, _ = batch(8)
    first = logits[:3].clone().requires_grad_()
    rest = logits[3:].softmax(dim=1)
    whole = logits.clone().requires_grad_()
    value = diversity(global_mean(whole.softmax(dim=1), alone))
    value.backward()
    sums = {(4,): rest.sum(dim=0), (): torch.tensor(5.0, dtype=torch.float64)}
    part = diversity(global_mean(first.softmax(dim=1), lambda v: v + sums[tuple(v.shape)]))
    part.backward()
    torch.testing.assert_close(part, value)
    torch.testing.assert_close(first.grad, whole.grad[:3])
    torch.testing.assert_close(global_sum(logits, alone), logits.sum(dim=0))
