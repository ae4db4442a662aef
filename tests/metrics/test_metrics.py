"""Closed-set and open-set figures against scikit-learn and plain loops; empty classes, K = 2, one group only."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import (
    accuracy_score,
    balanced_accuracy_score,
    confusion_matrix,
)

from oracles import scores as by_hand
from usfan.maths.measurement import wilson
from usfan.metrics.metrics import (
    classification_metrics,
    confusion,
    detection,
    open_set_metrics,
)

cases = st.tuples(st.integers(1, 80), st.integers(2, 6), st.integers(0, 10_000))


def names(K: int) -> list[str]:
    return [f"class {k}" for k in range(K)]


@pytest.mark.filterwarnings("ignore:A single label was found:UserWarning")
@pytest.mark.filterwarnings("ignore:y_pred contains classes:UserWarning")
@settings(max_examples=60, deadline=None)
@given(cases)
def test_closed_set_agrees_with_scikit_learn(case):
    N, K, seed = case
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, K, (N,), generator=generator)
    probs = (2 * torch.randn(N, K, generator=generator) + 2 * torch.eye(K)[labels]).softmax(
        dim=1
    )
    predicted = probs.argmax(dim=1)
    figures = classification_metrics(probs, labels, names(K))
    assert figures["accuracy"] == pytest.approx(100 * accuracy_score(labels, predicted))
    assert figures["mean_class_accuracy"] == pytest.approx(
        100 * balanced_accuracy_score(labels, predicted)
    )
    expected = confusion_matrix(labels, predicted, labels=range(K))
    assert confusion(labels, predicted, K).tolist() == expected.tolist()
    assert figures["entropy"] == pytest.approx(
        float(-(probs * probs.log()).sum(1).mean()), abs=1e-5
    )
    json.dumps(figures, allow_nan=False)


def test_closed_set_by_hand_with_an_empty_class():
    probs = torch.tensor([[0.7, 0.2, 0.1], [0.2, 0.7, 0.1], [0.6, 0.3, 0.1], [0.1, 0.8, 0.1]])
    figures = classification_metrics(probs, torch.tensor([0, 0, 0, 1]), ["a", "b", "c"])
    assert figures["accuracy"] == 75
    assert figures["per_class_accuracy"] == {"a": pytest.approx(200 / 3), "b": 100, "c": None}
    assert figures["mean_class_accuracy"] == pytest.approx((200 / 3 + 100) / 2)


def test_open_set_by_hand():
    #                 a: right, flagged, wrong | b: right | unknown: flagged, missed | class c has no sample
    labels = torch.tensor([0, 0, 0, 1, 3, 3])
    predicted = torch.tensor([0, 0, 1, 1, 0, 2])
    unknown = torch.tensor([False, True, False, False, True, False])
    figures = open_set_metrics(predicted, unknown, unknown.float(), labels, ["a", "b", "c"])
    assert figures["per_class_accuracy"] == {
        "a": pytest.approx(100 / 3),
        "b": 100,
        "c": None,
        "unknown": 50,
    }
    assert figures["os"] == pytest.approx((100 / 3 + 100 + 50) / 3)
    assert figures["os_star"] == pytest.approx(200 / 3)
    assert figures["unknown_accuracy"] == 50
    assert figures["hos"] == pytest.approx(2 * 50 * (200 / 3) / (50 + 200 / 3))


@settings(max_examples=60, deadline=None)
@given(cases)
def test_open_set_agrees_with_loops(case):
    N, K, seed = case
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, K + 1, (N,), generator=generator)
    predicted = torch.randint(0, K, (N,), generator=generator)
    predicted = torch.where(
        (torch.rand(N, generator=generator) < 0.5) & (labels < K), labels, predicted
    )
    score = (
        (torch.randn(N, generator=generator) + (labels == K)).mul(4).round()
    )  # with ties, and outside [0, 1]
    unknown = score > 1
    figures = open_set_metrics(predicted, unknown, score, labels, names(K))
    each = by_hand.open_set_by_hand(predicted.tolist(), unknown.tolist(), labels.tolist(), K)
    assert list(figures["per_class_accuracy"].values()) == pytest.approx(each)
    assert figures["os"] == pytest.approx(np.mean([a for a in each if a is not None]))
    is_unknown = (labels == K).tolist()
    if any(is_unknown) and not all(is_unknown):
        values = (score.tolist(), is_unknown)
        assert figures["auroc_unknown"] == pytest.approx(by_hand.auroc(*values), abs=1e-9)
        assert figures["aupr_unknown"] == pytest.approx(
            by_hand.average_precision(*values), abs=1e-9
        )
    else:
        assert figures["auroc_unknown"] is None
        assert figures["hos"] is None
    json.dumps(figures, allow_nan=False)


def test_hos_is_zero_when_nothing_is_flagged():
    labels = torch.tensor([0, 1, 2])
    figures = open_set_metrics(
        labels.clamp_max(1),
        torch.zeros(3, dtype=torch.bool),
        torch.zeros(3),
        labels,
        ["a", "b"],
    )
    assert figures["hos"] == 0
    assert figures["os"] == pytest.approx(200 / 3)
    assert figures["auroc_unknown"] == 50
    all_wrong = open_set_metrics(
        torch.tensor([1, 0, 0]), labels < 0, torch.zeros(3), labels, ["a", "b"]
    )
    assert (all_wrong["os_star"], all_wrong["unknown_accuracy"], all_wrong["hos"]) == (0, 0, 0)


def test_large_scores_do_not_tie():
    """Energies far outside [0, 1] keep their order: a sigmoid would make all of these equal."""
    score = torch.tensor([100.0, 101.0, 102.0, 103.0])
    is_unknown = torch.tensor([False, False, True, True])
    assert detection(score, is_unknown) == {"auroc": 100, "aupr": 100}
    assert detection(-score, is_unknown)["auroc"] == 0


def test_a_known_class_may_be_called_unknown():
    labels = torch.tensor([0, 1])
    figures = open_set_metrics(
        torch.tensor([0, 0]), labels == 1, labels.float(), labels, ["unknown"]
    )
    assert figures["per_class_accuracy"] == {"unknown": 100, "(unknown)": 100}


@pytest.mark.parametrize(
    ("right", "count", "low", "high"),
    [(81, 263, 25.53, 36.62), (15, 148, 6.24, 16.05), (0, 20, 0, 16.11), (1, 29, 0.61, 17.18)],
)
def test_the_interval_of_an_accuracy(right, count, low, high):
    """The examples of Newcombe, Statistics in Medicine 17 (1998), table I, method 3."""
    interval = wilson(right, count)
    assert (interval.low, interval.high) == pytest.approx((low / 100, high / 100), abs=6e-5)
    mirrored = wilson(count - right, count)
    assert (mirrored.low, mirrored.high) == pytest.approx(
        (1 - high / 100, 1 - low / 100), abs=6e-5
    )
    assert wilson(count, count).high == pytest.approx(1)
    assert wilson(0, count).low == pytest.approx(0, abs=1e-12)
