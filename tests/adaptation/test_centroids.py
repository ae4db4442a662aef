"""Nearest-centroid pseudo-labels against loops."""

from __future__ import annotations

import pytest
import torch

from oracles import centroids as oracle
from usfan.adaptation.centroids import nearest_centroid


def target(samples: int = 60, classes: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    """Features and blurred predictions of classes of unequal size, so that both rounds change labels."""
    centres = 2 * torch.randn(classes, 5)
    labels = torch.randint(classes, (samples,)).clamp_max(torch.randint(1, classes, (samples,)))
    features = centres[labels] + torch.randn(samples, 5)
    return features, (
        torch.nn.functional.one_hot(labels, classes) + 1.2 * torch.randn(samples, classes)
    ).softmax(dim=1)


@pytest.mark.parametrize("rounds", [1, 2])
@pytest.mark.parametrize("threshold", [0, 10, 14])
@pytest.mark.parametrize("masked", [True, False])
def test_nearest_centroid(rounds, threshold, masked):
    features, probs = target()
    mask = (torch.rand(60) > 0.3).float() if masked else None
    result = nearest_centroid(
        features, probs, threshold=threshold, mask=mask, rounds=rounds
    ).tolist()
    mask_list = None if mask is None else mask.tolist()
    args = (features.tolist(), probs.tolist())
    assert result == oracle.nearest_centroid(
        *args, threshold=threshold, mask=mask_list, rounds=rounds
    )
    assert result != probs.argmax(dim=1).tolist()


def test_the_second_round_matters_and_small_classes_get_no_label():
    features, probs = target()
    one, two = (nearest_centroid(features, probs, rounds=rounds) for rounds in (1, 2))
    assert not torch.equal(one, two)
    counts = torch.bincount(probs.argmax(dim=1), minlength=4)
    threshold = int(counts.sort().values[1])
    labels = nearest_centroid(features, probs, threshold=threshold)
    assert set(labels.tolist()) <= {k for k in range(4) if counts[k] > threshold}


def test_the_second_round_counts_again():
    """Class 1 has three predictions; two of them lie with class 0, so one is left after the first round."""
    features = torch.tensor([[1.0, 0.0]] * 6 + [[0.0, 1.0]])
    probs = torch.tensor([[0.9, 0.1]] * 4 + [[0.4, 0.6]] * 2 + [[0.1, 0.9]])
    assert nearest_centroid(features, probs, threshold=1, rounds=1).tolist() == [0] * 6 + [1]
    assert nearest_centroid(features, probs, threshold=1).tolist() == [0] * 7


def test_no_class_left_keeps_the_point_estimate():
    features, probs = target()
    assert torch.equal(nearest_centroid(features, probs, threshold=60), probs.argmax(dim=1))
    assert torch.equal(
        nearest_centroid(features, probs, mask=torch.zeros(60)), probs.argmax(dim=1)
    )


def test_permuted_samples():
    features, probs = target()
    whole = nearest_centroid(features, probs)
    order = torch.randperm(60)
    assert torch.equal(nearest_centroid(features[order], probs[order]), whole[order])
