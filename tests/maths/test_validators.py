"""Validators by hand on small cases, and the rule for collapse on targets that look like it but are not."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from usfan.maths.validators import DIRECTION, collapse, validate


def one_hot(predicted: torch.Tensor, K: int, confidence: float = 0.9) -> torch.Tensor:
    rest = (1 - confidence) / (K - 1)
    return torch.full((len(predicted), K), rest).scatter(1, predicted[:, None], confidence)


def test_figures_by_hand():
    probs = torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [1.0, 0.0, 0.0], [0.5, 0.3, 0.2]])
    source = torch.tensor([[1.0, 0.0, 0.0], [1.0, 0.0, 0.0], [1.0, 0.0, 0.0], [0.5, 0.3, 0.2]])
    figures = validate(probs, source, probs)
    mean = [2.5 / 4, 1.3 / 4, 0.2 / 4]
    mean_entropy = -sum(m * math.log(m) for m in mean)
    entropy = -sum(p * math.log(p) for p in (0.5, 0.3, 0.2)) / 4
    assert set(figures) == set(DIRECTION)
    assert figures["entropy"] == pytest.approx(entropy, abs=1e-6)
    assert figures["information_maximization"] == pytest.approx(
        mean_entropy - entropy, abs=1e-6
    )
    assert figures["diversity"] == pytest.approx(mean_entropy / math.log(3), abs=1e-6)
    assert figures["coverage"] == pytest.approx(2 / 3)
    assert figures["largest_class"] == 0.75
    assert figures["drift"] == 0.25
    assert figures["certain"] == 0.75


def test_one_sample_is_enough():
    probs = torch.tensor([[0.6, 0.4]])
    assert all(math.isfinite(value) for value in validate(probs, probs, probs).values())


def test_healthy_adaptation_is_no_collapse():
    """From 30 % right to all right, as from MNIST to the UCI digits."""
    generator = torch.Generator().manual_seed(0)
    truth = torch.arange(1000) % 10
    guess = torch.randint(
        0, 4, (1000,), generator=generator
    )  # the source model knows only four of the classes
    source = torch.where(torch.rand(1000, generator=generator) < 0.3, truth, guess)
    assert collapse(one_hot(truth, 10), one_hot(source, 10)) is None
    assert collapse(one_hot(source, 10), one_hot(source, 10)) is None


def test_missing_classes_of_a_partial_set_may_vanish():
    generator = torch.Generator().manual_seed(0)
    truth = torch.arange(1000) % 10  # 10 of 31 classes occur
    guess = torch.randint(
        10, 31, (1000,), generator=generator
    )  # 21 classes vanish, with 45 % of the predictions
    source = torch.where(torch.rand(1000, generator=generator) < 0.55, truth, guess)
    assert collapse(one_hot(truth, 31), one_hot(source, 31)) is None


def test_an_imbalanced_pair_of_classes_is_no_collapse():
    truth = (torch.arange(1000) >= 900).long()
    source = (torch.arange(1000) >= 750).long()
    assert collapse(one_hot(truth, 2), one_hot(source, 2)) is None


@pytest.mark.parametrize("K", [2, 3, 10, 31])
def test_a_class_that_takes_over_is_named(K):
    source = one_hot(torch.arange(620) % K, K)
    taken = torch.where(torch.arange(620) % 20 > 0, 1, torch.arange(620) % K)
    reason = collapse(one_hot(taken, K), source, [f"<{k}>" for k in range(K)])
    assert reason is not None
    assert "assigned to class <1>" in reason
    assert "to class number 1" in (collapse(one_hot(taken, K), source) or "")


def test_most_classes_vanishing_is_reported():
    source = torch.arange(1000) % 10
    reason = collapse(one_hot(source % 3, 10), one_hot(source, 10))
    assert reason is not None
    assert "7 of 10 classes vanished" in reason
    assert collapse(one_hot(source % 6, 10), one_hot(source, 10)) is None


def test_a_poor_source_model_may_be_left_behind():
    """It put nine tenths of the target into three classes; adaptation spreads it over the seven others."""
    index = torch.arange(1000)
    source = torch.where(index % 10 == 0, 3 + index % 7, index % 3)
    assert collapse(one_hot(3 + index % 7, 10), one_hot(source, 10)) is None


def test_a_target_of_one_class_is_no_collapse():
    source = torch.where(torch.arange(100) < 3, 1, 0)
    assert collapse(one_hot(torch.zeros(100).long(), 5), one_hot(source, 5)) is None


def test_non_finite_predictions_are_reported():
    probs = one_hot(torch.arange(6) % 3, 3)
    broken = probs.clone()
    broken[2, 1] = float("nan")
    assert "not finite" in (collapse(broken, probs) or "")


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 60), st.integers(2, 8), st.integers(0, 1000))
def test_the_source_model_itself_has_never_collapsed(N, K, seed):
    probs = torch.randn(N, K, generator=torch.Generator().manual_seed(seed)).softmax(dim=1)
    assert collapse(probs, probs) is None
