"""Judging two models by answers about random images."""

from __future__ import annotations

import pytest
import torch

from usfan.maths.decision import NO_ANSWER, SKIPPED, comparison_order
from usfan.maths.model_comparison import (
    EXCHANGE_ANSWERS,
    compare_models,
    exchanged_names,
    next_compared,
)


def models(seed: int, count: int = 400):
    """Truth, source (55 %) and adapted predictions (80 %) of 5 classes."""
    generator = torch.Generator().manual_seed(seed)
    truth = torch.randint(5, (count,), generator=generator)
    wrong = (truth + torch.randint(1, 5, (count,), generator=generator)) % 5
    source = torch.where(torch.rand(count, generator=generator) < 0.55, truth, wrong)
    adapted = torch.where(torch.rand(count, generator=generator) < 0.8, truth, wrong)
    return truth, source, adapted


def answered(truth, before, after, count):
    """`count` answers, one at a time, to what is asked."""
    answers = torch.full_like(truth, NO_ANSWER)
    for _ in range(count):
        (row,) = next_compared(before, after, answers, 1).tolist()
        answers[row] = truth[row]
    return answers


def test_answers_decide_and_measure():
    truth, before, after = models(0)
    empty = compare_models(before, after, torch.full_like(truth, NO_ANSWER))
    assert empty.decision.value == "not yet"
    assert (empty.adapted.low, empty.adapted.high) == pytest.approx((0, 1))
    comparison = compare_models(before, after, answered(truth, before, after, 60))
    assert comparison.decision.value == "better"
    assert comparison.answers == 60
    for interval, predictions in ((comparison.source, before), (comparison.adapted, after)):
        share = float((predictions == truth).double().mean())
        assert interval.low - 0.02 <= share <= interval.high + 0.02
        assert interval.high - interval.low < 0.35


def test_all_answers_are_the_truth():
    truth, before, after = models(1, 60)
    comparison = compare_models(before, after, truth)
    assert comparison.source.value == pytest.approx(float((before == truth).double().mean()))
    assert comparison.adapted.low == pytest.approx(comparison.adapted.high)


def test_the_other_way_round_is_worse_and_the_same_model_no_different():
    truth, before, after = models(2)
    answers = answered(truth, before, after, 60)
    assert compare_models(after, before, answers).decision.value == "worse"
    assert compare_models(before, before, answers).decision.value == "no difference"


def test_answers_keep_their_worth_for_the_next_model():
    """The order of the images does not depend on the model, so most answers count again."""
    truth, before, after = models(3)
    answers = answered(truth, before, after, 60)
    third = models(4)[2]
    third = torch.where(torch.rand(400) < 0.8, after, third)
    again = compare_models(before, third, answers)
    assert 0 < again.answers <= 60


def test_images_that_have_their_answer_are_not_asked_for_again():
    """One early image lacks its answer: that one is missing, and not as many as if the later ones had none."""
    truth, before, after = models(7)
    order = comparison_order(len(truth), 0)
    rows = order[(before != after)[order]]
    answers = torch.full_like(truth, NO_ANSWER)
    answers[rows[:40]] = truth[rows[:40]]
    answers[rows[2]] = NO_ANSWER
    comparison = compare_models(before, after, answers)
    assert (comparison.answers, comparison.decision.value) == (2, "not yet")
    assert comparison.decision.more == 1
    answers[rows[2]] = truth[rows[2]]
    assert compare_models(before, after, answers).decision.value == "better"


def test_skipped_images_and_images_of_no_class():
    truth, before, after = models(5)
    answers = torch.full_like(truth, NO_ANSWER)
    first = next_compared(before, after, answers, 1)
    answers[first] = SKIPPED
    assert next_compared(before, after, answers, 1) != first
    truth = torch.where(torch.arange(400) % 4 == 0, 5, truth)  # no class of the model
    answers = truth.clone()
    comparison = compare_models(before, after, answers)
    assert comparison.adapted.value == pytest.approx(float((after == truth).double().mean()))


def test_exchanged_names_are_still_named_if_a_few_images_are_what_was_predicted():
    predictions = torch.tensor([0] * 40 + [1] * 40)
    truth = torch.tensor(
        [1] * 30 + [0] * 10 + [0] * 30 + [1] * 10
    )  # 3 in 4 are of the other class
    order = torch.randperm(80, generator=torch.Generator().manual_seed(0))
    answers = torch.full((80,), NO_ANSWER)
    named = []
    for row in order:
        answers[row] = truth[row]
        named.append(exchanged_names(predictions, answers, 2) == [(0, 1)])
    assert all(named[30:])
    assert exchanged_names(predictions, torch.where(truth == 0, 1, 0), 2) == []  # 1 in 4


def test_exchanged_names_need_answers_in_both_directions_and_most_of_them():
    predictions = torch.tensor([0, 0, 1, 2, 3, 4, 0])
    answers = torch.full((7,), NO_ANSWER)
    answers[:3] = torch.tensor([1, 1, 0])
    answers[3] = 2
    assert EXCHANGE_ANSWERS == 3
    assert exchanged_names(predictions, answers, 5) == [(0, 1)]
    one_way = answers.clone()
    one_way[2] = SKIPPED
    assert exchanged_names(predictions, one_way, 5) == []
    right = answers.clone()
    right[6] = 0  # an image that is what it was predicted as
    assert exchanged_names(predictions, right, 5) == []
    unknown = answers.clone()
    unknown[4:6] = 5  # of no class of the model
    assert exchanged_names(predictions, unknown, 5) == [(0, 1)]
