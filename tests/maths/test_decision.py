"""Deciding between two models, and measuring accuracy, with labels in random order: validity by replays."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from usfan.maths.decision import (
    CHANGED_FIRST,
    ERROR,
    NO_ANSWER,
    SKIPPED,
    answered_prefix,
    comparison_order,
    comparison_questions,
    decide,
    log_wealth,
    mean_bounds,
)
from usfan.maths.measurement import measured_accuracy, wilson


def zero() -> torch.Tensor:
    return torch.zeros(1, dtype=torch.float64)


def test_the_wealth_is_that_of_krichevsky_and_trofimov() -> None:
    outcomes = torch.tensor([1.0, 1, -1, 1, 0, 1, 1, -1, 1], dtype=torch.float64)
    both = [log_wealth(sign * outcomes, zero(), 10**9)[0, -1].exp() for sign in (1, -1)]
    wins, losses = 6, 2
    exact = math.lgamma(wins + 0.5) + math.lgamma(losses + 0.5) - math.lgamma(wins + losses + 1)
    exact += (wins + losses) * math.log(2) - math.log(math.pi)
    assert float(sum(both)) / 2 == pytest.approx(math.exp(exact), rel=1e-5)


@pytest.mark.parametrize("kinds", [(3, 3, 1), (2, 4, 0), (1, 2, 4)])
def test_the_wealth_is_a_supermartingale_over_every_order(kinds: tuple[int, int, int]) -> None:
    """All orders of a small population, whose mean is 0 or less: the mean wealth never exceeds 1, and it ever reaches
    20 in one order of twenty at most."""
    wins, losses, ties = kinds
    values = [1.0] * wins + [-1.0] * losses + [0.0] * ties
    orders = torch.tensor(sorted(set(itertools.permutations(values))), dtype=torch.float64)
    wealth = torch.stack([log_wealth(order, zero(), len(values))[0] for order in orders]).exp()
    assert bool((wealth.mean(dim=0) <= 1 + 1e-9).all())
    for limit in (2, 5, 20):
        assert float((wealth >= limit).any(dim=1).double().mean()) <= 1 / limit


def test_the_interval_closes_on_the_truth() -> None:
    values = torch.tensor([1.0] * 30 + [-1.0] * 10 + [0.0] * 20, dtype=torch.float64)
    values = values[comparison_order(60, 3)]
    assert mean_bounds(values[:0], 60) == (-1, 1)
    widths = []
    for count in (5, 20, 40, 60):
        low, high = mean_bounds(values[:count], 60)
        assert low <= 1 / 3 <= high
        widths.append(high - low)
    assert widths == sorted(widths, reverse=True)
    assert widths[-1] < 0.011


def test_decisions() -> None:
    right = torch.ones(9, dtype=torch.bool)
    better = decide(right, ~right, changed=100, images=500)
    assert (better.value, better.more) == ("better", 0)
    assert better.difference.value == pytest.approx(0.2)
    assert 0 <= better.difference.low <= better.difference.high <= 0.2
    assert decide(~right, right, changed=100, images=500).value == "worse"
    assert decide(right[:3], ~right[:3], changed=100, images=500).value == "not yet"
    assert decide(right[:0], right[:0], changed=3, images=500).value == "no difference"
    begin = decide(right[:0], right[:0], changed=100, images=500)
    assert begin.more == 12
    assert decide(right[:4], ~right[:4], changed=100, images=500).more < 9


def test_wrong_decisions_are_rare_whenever_one_stops() -> None:
    """1,000 orders of a population without a difference, looked at after every answer."""
    values = torch.tensor([1.0] * 40 + [-1.0] * 40 + [0.0] * 20, dtype=torch.float64)
    wrong = 0
    for seed in range(1000):
        order = values[comparison_order(100, seed)][:60]
        both = [log_wealth(sign * order, zero(), 100) for sign in (1, -1)]
        wrong += float(torch.cat(both).max()) >= math.log(2 / ERROR)
    assert 0 < wrong <= 50


def test_a_clear_difference_takes_a_dozen_answers() -> None:
    values = torch.tensor([1.0] * 80 + [-1.0] * 5 + [0.0] * 15, dtype=torch.float64)
    answers = []
    for seed in range(200):
        order = values[comparison_order(100, seed)]
        enough = log_wealth(order, zero(), 100)[0] >= math.log(2 / ERROR)
        answers.append(int(enough.double().argmax()))
    assert sorted(answers)[100] <= 14


def test_questions_follow_the_order_and_prefixes_stop_at_the_first_gap() -> None:
    order = comparison_order(200, 1)
    changed = torch.arange(200) % 2 == 0
    answers = torch.full((200,), NO_ANSWER)
    rows = comparison_questions(order, changed, answers, 40)
    assert changed[rows[:CHANGED_FIRST]].all()
    assert int((~changed[rows]).sum()) == (40 - CHANGED_FIRST) // 2
    assert (
        rows[changed[rows]].tolist()
        == order[changed[order]][: int(changed[rows].sum())].tolist()
    )
    one_by_one = []
    for _ in range(40):
        (row,) = comparison_questions(order, changed, answers, 1).tolist()
        answers[row] = 0
        one_by_one.append(row)
    assert one_by_one == rows.tolist()
    assert answered_prefix(order, changed, answers).tolist() == rows[changed[rows]].tolist()
    answers[rows[2]] = NO_ANSWER
    assert answered_prefix(order, changed, answers).tolist() == rows[:2].tolist()
    answers[rows[2]] = SKIPPED
    assert rows[2] not in answered_prefix(order, changed, answers)
    assert len(answered_prefix(order, changed, answers)) == int(changed[rows].sum()) - 1


def test_once_decided_questions_follow_the_shares() -> None:
    changed = torch.arange(100) < 20
    rows = comparison_questions(
        comparison_order(100, 0), changed, torch.full((100,), NO_ANSWER), 50, decided=True
    )
    assert int(changed[rows].sum()) == 10
    everything = comparison_questions(
        comparison_order(100, 0), changed, torch.full((100,), NO_ANSWER), 500
    )
    assert sorted(everything.tolist()) == list(range(100))


def test_wilson() -> None:
    interval = wilson(8, 10)
    assert (interval.low, interval.high) == pytest.approx((0.4902, 0.9433), abs=1e-4)
    assert wilson(8, 10, 10).low == wilson(8, 10, 10).high == 0.8
    assert wilson(8, 10, 20).low > interval.low
    assert wilson(0, 0) == wilson(0, 0, 5)


@pytest.mark.parametrize("labels", [(16, 8), (30, 30)])
def test_the_accuracy_interval_holds_the_truth(labels: tuple[int, int]) -> None:
    """2,000 draws: 60 of 120 changed images are right, 270 of 300 others."""
    changed = torch.arange(120) < 60
    others = torch.arange(300) < 270
    truth = 330 / 420
    held = 0
    for seed in range(2000):
        strata = []
        for right, count in zip((changed, others), labels, strict=True):
            strata.append((len(right), right[comparison_order(len(right), seed)[:count]]))
        interval = measured_accuracy(strata)
        held += interval.low <= truth <= interval.high
    assert held / 2000 >= 0.93


def test_a_stratum_without_a_label_is_unknown() -> None:
    """Whatever its images are, the interval holds the truth as often as that of the others does."""
    for right in (0, 300):
        covered = 0
        for seed in range(500):
            changed = torch.arange(120) < 100
            sample = changed[comparison_order(120, seed)[:24]]
            interval = measured_accuracy([(120, sample), (300, torch.zeros(0))])
            covered += interval.low - 1e-9 <= (100 + right) / 420 <= interval.high + 1e-9
        assert covered / 500 >= 0.93
    nothing = measured_accuracy([(120, torch.zeros(0)), (300, torch.zeros(0))])
    assert (nothing.low, nothing.value, nothing.high) == pytest.approx((0, 0.5, 1))
