"""The verdict: one word, one sentence with figures, and the next step."""

import dataclasses
import re

import pytest
import torch

from usfan.adaptation.estimate import estimate_accuracy
from usfan.adaptation.guard import EpochScore
from usfan.adaptation.verdict import ASSUMPTION, points, verdict_of
from usfan.maths.agreement import Interval
from usfan.maths.decision import NO_ANSWER, comparison_order
from usfan.maths.model_comparison import SEED, compare_models

GAIN = EpochScore(2, 0.3, Interval(0.2, 0.15, 0.25), 0.8, (0.6, 0.8), (0.6, 0.8), (0.6, 0.8))


def verdict(score=GAIN, doubt=0.02, comparison=None):
    estimate = estimate_accuracy(score, count=10**6, doubt=doubt, pretrained=True)
    return verdict_of(score, estimate, comparison, classes=7, in_use="adapted")


def judged(before_right: int, after_right: int, answers: int = 40):
    """Answers about so many of 40 changed images: so many of each model are right."""
    count = 40
    truth = torch.zeros(count, dtype=torch.long)
    wrong = torch.ones(count, dtype=torch.long)
    before = torch.where(torch.arange(count) < before_right, truth, wrong)
    after = torch.where(torch.arange(count) >= count - after_right, truth, wrong + 1)
    unanswered = comparison_order(count, SEED)[answers:]
    return compare_models(before, after, truth.index_fill(0, unanswered, NO_ANSWER))


def test_a_certain_gain_is_better_under_the_assumption_that_names_are_right():
    result = verdict()
    assert result.value == "better"
    assert re.search(
        r"60 % \(\d+ to \d+\) right before, 80 % \(\d+ to \d+\) after", result.sentence
    )
    assert "in use" not in result.sentence
    assert ASSUMPTION in result.sentence
    assert "usfan label RUN" in result.next


@pytest.mark.parametrize("doubt", [0.4, None])
def test_names_in_doubt_give_unknown_however_large_the_gain(doubt):
    result = verdict(doubt=doubt)
    assert result.value == "unknown"
    assert "Nobody can tell without labels" in result.sentence
    assert result.sentence.endswith(" The adapted model is in use.")
    assert result.next == "label 14 images: usfan label RUN"


def test_a_source_model_that_follows_no_structure_gives_unknown():
    score = dataclasses.replace(GAIN, structure=(0.05, 0.9))
    assert verdict(score).value == "unknown"


def test_a_certain_loss_and_a_collapse_are_worse():
    loss = dataclasses.replace(GAIN, gain=Interval(-0.2, -0.25, -0.15))
    assert verdict(loss).value == "worse"
    collapse = dataclasses.replace(GAIN, collapse="the loss is not finite")
    assert verdict(collapse, doubt=0.9).value == "worse"


def test_a_gain_that_may_be_chance_is_unknown():
    chance = dataclasses.replace(GAIN, gain=Interval(0.01, -0.02, 0.04))
    assert verdict(chance).value == "unknown"
    unchanged = dataclasses.replace(GAIN, changed=0.0)
    assert "No prediction changed" in verdict(unchanged).sentence


def test_labels_decide_against_what_the_images_say():
    assert verdict(comparison=judged(30, 2)).value == "worse"
    assert verdict(comparison=judged(2, 30), doubt=0.9).value == "better"
    few = verdict(comparison=judged(15, 20, answers=4))
    assert few.value == "unknown"
    assert "4 labels" in few.sentence


def test_labels_of_changed_images_tell_the_difference_and_no_accuracy():
    count = 400
    before = torch.zeros(count, dtype=torch.long)
    after = torch.where(torch.arange(count) < 40, 1, 0)
    answers = torch.where(torch.arange(count) < 40, 1, NO_ANSWER)
    sentence = verdict(comparison=compare_models(before, after, answers)).sentence
    assert sentence == "The adapted model is better, by 40 labels: +10 points (+10 to +10)."


def test_the_sentence_names_the_run_folder_where_it_is_known():
    assert verdict().in_folder("runs/a").endswith("label 14 images: usfan label runs/a")


@pytest.mark.parametrize("in_use", ["source", "adapted"])
def test_after_a_collapse_the_sentence_says_what_is_in_use(in_use):
    score = dataclasses.replace(GAIN, collapse="the loss is not finite")
    estimate = estimate_accuracy(score, count=100, doubt=0.0, pretrained=True)
    sentence = verdict_of(score, estimate, classes=7, in_use=in_use).sentence
    assert sentence == (
        f"The adapted model collapsed: the loss is not finite. The {in_use} model is in use."
    )


@pytest.mark.parametrize(
    ("share", "text"),
    [(0.1, "+10"), (0.0, "+0"), (-0.0002, "-0.1"), (-0.004, "-0.4"), (-0.02, "-2")],
)
def test_a_loss_is_never_written_as_zero(share, text):
    assert points(share) == text
