"""Agreement of neighbours corrected for chance, against loops and by hand."""

import pytest
import torch

from usfan.scoring.structure import Comparison, bootstrap_counts, evenly_spaced, kappa


def naive_kappa(predicted, neighbours, classes):
    agree = [sum(predicted[j] == predicted[i] for j in near) / len(near) for i, near in enumerate(neighbours.tolist())]
    shares = [sum(p == k for p in predicted) / len(predicted) for k in range(classes)]
    chance = sum(s * s for s in shares)
    return (sum(agree) / len(agree) - chance) / (1 - chance)


def test_kappa_equals_the_naive_loops():
    generator = torch.Generator().manual_seed(0)
    predicted = torch.randint(4, (30,), generator=generator)
    neighbours = torch.randint(30, (30, 5), generator=generator)
    expected = naive_kappa(predicted.tolist(), neighbours, 4)
    assert float(kappa(predicted, neighbours, 4)) == pytest.approx(expected, rel=1e-12)


def test_a_model_that_calls_everything_one_class_explains_nothing():
    neighbours = torch.randint(20, (20, 5), generator=torch.Generator().manual_seed(0))
    assert float(kappa(torch.zeros(20, dtype=torch.long), neighbours, 3)) == 0


def test_weights_are_counts_of_images():
    """κ with counts is κ of the resampled images, each with its own agreement."""
    generator = torch.Generator().manual_seed(1)
    predicted = torch.randint(3, (12,), generator=generator)
    neighbours = torch.randint(12, (12, 4), generator=generator)
    counts = bootstrap_counts(12, resamples=3)
    assert bool((counts.sum(dim=1) == 12).all())
    found = kappa(predicted, neighbours, 3, counts)
    for row, value in zip(counts, found, strict=True):
        drawn = torch.repeat_interleave(torch.arange(12), row.long())
        agree = (predicted[neighbours] == predicted[:, None]).double().mean(1)[drawn].mean()
        chance = torch.bincount(predicted[drawn], minlength=3).double().div(12).square().sum()
        assert float(value) == pytest.approx(float((agree - chance) / (1 - chance)))


def test_a_difference_comes_with_its_interval():
    blocks = torch.arange(4).repeat_interleave(25)
    neighbours = torch.stack([25 * block + torch.arange(5) for block in blocks])
    noise = torch.randint(4, (100,), generator=torch.Generator().manual_seed(0))
    none_doubted = torch.zeros(100, dtype=torch.bool)
    value, gain = Comparison(noise, neighbours, 4).gain(blocks, none_doubted)
    assert value == pytest.approx(float(kappa(blocks, neighbours, 4)))
    assert gain.low > 0.5 > 0 < gain.value <= 1.1
    _, none = Comparison(blocks, neighbours, 4).gain(blocks, none_doubted)
    assert (none.low, none.value, none.high) == (0, 0, 0)
    _, half = Comparison(blocks, neighbours, 4).gain(blocks, ~none_doubted)
    assert (half.low, half.value, half.high) == pytest.approx((-0.5, -0.5, -0.5))


def test_evenly_spaced():
    assert evenly_spaced(5, 10).tolist() == [0, 1, 2, 3, 4]
    assert evenly_spaced(100, 4).tolist() == [0, 25, 50, 75]
