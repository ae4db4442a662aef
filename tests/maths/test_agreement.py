"""Agreement of neighbours corrected for chance, against loops and by hand."""

import pytest
import torch

from usfan.maths.agreement import Comparison, bootstrap_counts, kappa, sample_rows


def naive_kappa(predicted, neighbours, classes):
    agree = [
        sum(predicted[j] == predicted[i] for j in near) / len(near)
        for i, near in enumerate(neighbours.tolist())
    ]
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
    """κ with counts is κ of the resampled images: a pair counts as often as both of its images are drawn."""
    generator = torch.Generator().manual_seed(1)
    predicted = torch.randint(3, (12,), generator=generator)
    neighbours = torch.randint(12, (12, 4), generator=generator)
    counts = bootstrap_counts(12, resamples=3)
    assert bool((counts.sum(dim=1) == 12).all())
    result = kappa(predicted, neighbours, 3, counts)
    for row, value in zip(counts, result, strict=True):
        drawn = torch.repeat_interleave(torch.arange(12), row.long()).tolist()
        pairs = [
            (i, j) for i in drawn for near in neighbours[i].tolist() for j in drawn if j == near
        ]
        agree = sum(int(predicted[i] == predicted[j]) for i, j in pairs) / len(pairs)
        chance = torch.bincount(predicted[drawn], minlength=3).double().div(12).square().sum()
        assert float(value) == pytest.approx(float((agree - chance) / (1 - chance)))


def test_two_models_of_the_same_accuracy_seldom_seem_to_differ():
    """The lower end of a 90 % interval is above 0 in one of twenty pairs of models, not in one of five."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(10).repeat_interleave(40)
    centres = torch.randn(10, 16, generator=generator)
    wins = 0
    for _ in range(100):
        points = 3 * centres[labels] + torch.randn(400, 16, generator=generator)
        near = (
            torch.cdist(points, points)
            .fill_diagonal_(torch.inf)
            .topk(20, largest=False)
            .indices
        )
        one, two = (
            torch.where(
                torch.rand(400, generator=generator) < 0.7,
                labels,
                torch.randint(10, (400,), generator=generator),
            )
            for _ in range(2)
        )
        compare = Comparison(one, near, 10, torch.nn.functional.one_hot(labels, 10))
        wins += compare.gain(two, torch.zeros(400, dtype=torch.bool)).low > 0
    assert wins <= 11  # 100 pairs at 5 %: more than 11 happen in one of 200 such tests


def compared(before, after, neighbours, classes, doubted, fits=None):
    """Evidence for `after`, and its gain over `before`; without fits, every class fits every image alike."""
    fits = torch.full((len(before), classes), 1 / classes) if fits is None else fits
    compare = Comparison(before, neighbours, classes, fits)
    return compare.evidence(after, doubted), compare.gain(after, doubted)


def test_doubt_never_speaks_for_a_model():
    """Also if neighbours agree less often than by chance."""
    predicted = torch.tensor([0, 1] * 4)
    neighbours = torch.tensor([[(i + 1) % 8, (i + 3) % 8] for i in range(8)])
    result, gain = compared(
        predicted, predicted, neighbours, 2, torch.ones(8, dtype=torch.bool)
    )
    assert result.structure < 0
    assert gain.value < 0
    assert gain.low < 0


def test_a_difference_comes_with_its_interval():
    blocks = torch.arange(4).repeat_interleave(25)
    neighbours = torch.stack([25 * block + torch.arange(5) for block in blocks])
    noise = torch.randint(4, (100,), generator=torch.Generator().manual_seed(0))
    none_doubted = torch.zeros(100, dtype=torch.bool)
    result, gain = compared(noise, blocks, neighbours, 4, none_doubted)
    assert result.structure == pytest.approx(float(kappa(blocks, neighbours, 4)))
    assert 0.25 < gain.low <= gain.value <= 0.55
    _, none = compared(blocks, blocks, neighbours, 4, none_doubted)
    assert (none.low, none.value, none.high) == (0, 0, 0)
    _, half = compared(blocks, blocks, neighbours, 4, ~none_doubted)
    assert (half.low, half.value, half.high) == pytest.approx((-0.25, -0.25, -0.25))


def test_evidence_equals_loops_over_the_resampled_images():
    generator = torch.Generator().manual_seed(2)
    before, after = torch.randint(3, (2, 20), generator=generator)
    neighbours = torch.randint(20, (20, 4), generator=generator)
    fits = torch.rand(20, 3, generator=generator).softmax(1)
    doubted = torch.rand(20, generator=generator) < 0.3
    result, gain = compared(before, after, neighbours, 3, doubted, fits)

    def e(predicted, doubt, structure, images):
        fit = sum(float(fits[i, predicted[i]]) for i in images) / len(images)
        u = sum(bool(doubt[i]) for i in images) / len(images)
        return (structure - abs(structure) * u / 2 + fit) / 2

    whole = naive_kappa(after.tolist(), neighbours, 3)
    assert result.value == pytest.approx(e(after, doubted, whole, range(20)))
    first = e(before, torch.zeros(20), naive_kappa(before.tolist(), neighbours, 3), range(20))
    assert gain.value == pytest.approx(result.value - first)
    draws = Comparison(before, neighbours, 3, fits).draws(after, doubted)
    for row, value in zip(bootstrap_counts(20)[:5], draws[:5], strict=True):
        images = torch.repeat_interleave(torch.arange(20), row.long()).tolist()
        structure = float(kappa(after, neighbours, 3, row[None]))
        assert float(value) == pytest.approx(e(after, doubted, structure, images))


def test_a_sample_is_random_and_the_same_each_time():
    """Of a list in which every other image is of class 1, an evenly spaced half would be of one class."""
    assert sample_rows(5, 10).tolist() == [0, 1, 2, 3, 4]
    rows = sample_rows(2_000, 1_000)
    assert rows.tolist() == sorted(set(rows.tolist()))
    assert 0.45 < float((rows % 2).double().mean()) < 0.55
    assert torch.equal(rows, sample_rows(2_000, 1_000))
    assert not torch.equal(rows, sample_rows(2_000, 1_000, seed=1))
