"""Calibration figures against plain loops and scikit-learn; ties, order, edges."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import log_loss

from oracles import scores as by_hand
from usfan.errors import DataError
from usfan.maths.calibration import calibration_metrics, reliability_bins

cases = st.tuples(
    st.integers(1, 60),
    st.integers(2, 6),
    st.integers(0, 10_000),
    st.sampled_from([0.3, 1.0, 4.0]),
)


def draw(case: tuple[int, int, int, float]) -> tuple[torch.Tensor, torch.Tensor]:
    N, K, seed, scale = case
    generator = torch.Generator().manual_seed(seed)
    logits = scale * torch.randn(N, K, generator=generator, dtype=torch.float64)
    return logits.softmax(dim=1), torch.randint(0, K, (N,), generator=generator)


@settings(max_examples=60, deadline=None)
@given(cases)
def test_agrees_with_plain_loops(case):
    probs, labels = draw(case)
    figures = calibration_metrics(probs, labels)
    confidence, predicted = probs.max(dim=1)
    correct = (predicted == labels).tolist()
    expected = {
        "nll": by_hand.nll(probs.tolist(), labels.tolist()),
        "brier": by_hand.brier(probs.tolist(), labels.tolist()),
        "ece": by_hand.ece(confidence.tolist(), correct),
    }
    assert figures == pytest.approx(expected, rel=1e-9, abs=1e-9)
    assert figures["nll"] == pytest.approx(
        log_loss(labels, probs.numpy(), labels=range(probs.shape[1])), rel=1e-9
    )


def test_full_confidence_belongs_to_the_last_bin():
    probs = torch.tensor([[1.0, 0.0], [0.95, 0.05]])
    bins = reliability_bins(probs, torch.tensor([1, 0]))
    assert bins.counts.tolist() == [0] * 14 + [2]
    assert float(bins.confidence[-1]) == pytest.approx(0.975)
    assert float(bins.accuracy[-1]) == pytest.approx(0.5)
    assert calibration_metrics(probs, torch.tensor([1, 0]))["ece"] == pytest.approx(47.5)


def test_a_confidence_on_an_edge_belongs_to_the_upper_bin():
    edge = 9 / 15
    probs = torch.tensor([[edge, 1 - edge]], dtype=torch.float64)
    bins = reliability_bins(probs, torch.tensor([0]))
    assert bins.counts.nonzero().tolist() == [[9]]


def test_bins_of_the_diagram_give_the_ece():
    probs, labels = draw((500, 4, 3, 2.0))
    bins = reliability_bins(probs, labels)
    ece = 100 * float(
        (bins.counts * (bins.accuracy - bins.confidence).abs()).sum() / bins.counts.sum()
    )
    assert len(bins.counts) == 15
    assert calibration_metrics(probs, labels)["ece"] == pytest.approx(ece)


@settings(max_examples=30, deadline=None)
@given(cases, st.integers(0, 1000))
def test_order_does_not_matter_even_with_ties(case, seed):
    probs, labels = draw(case)
    probs = (4 * probs).round() / 4 + 1e-3  # few levels, many ties
    shuffled = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    one = calibration_metrics(probs, labels)
    other = calibration_metrics(probs[shuffled], labels[shuffled])
    assert one == pytest.approx(other, abs=1e-9)


def test_prefix_and_an_underflowed_probability():
    figures = calibration_metrics(
        torch.tensor([[1.0, 0.0]]), torch.tensor([1]), prefix="posterior_"
    )
    assert set(figures) == {"posterior_nll", "posterior_brier", "posterior_ece"}
    assert all(math.isfinite(value) for value in figures.values())
    assert figures["posterior_nll"] > 80
    assert figures["posterior_brier"] == 2


@pytest.mark.parametrize(
    ("probs", "labels", "message"),
    [
        (torch.zeros(0, 3), torch.zeros(0), "no labelled sample"),
        (torch.full((2, 3), 1 / 3), torch.tensor([0, 3]), "0…2"),
        (torch.full((2, 3), 1 / 3), torch.tensor([0, -1]), "0…2"),
        (torch.full((2, 3), math.nan), torch.tensor([0, 1]), "not finite"),
        (torch.full((2, 3), 1 / 3), torch.tensor([0]), "N×K"),
    ],
)
def test_what_cannot_be_scored_is_refused(probs, labels, message):
    with pytest.raises(DataError, match=message):
        calibration_metrics(probs, labels)
