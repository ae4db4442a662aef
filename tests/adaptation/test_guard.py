"""A target that may lack classes: the guard warns at the start, and does not keep what tears neighbours apart."""

import dataclasses
import logging

import numpy as np
import pytest
import torch

import usfan
from lookalikes import picture
from usfan.adaptation.adapt import Adaptation, warn_once
from usfan.adaptation.guard import (
    ENOUGH,
    INFORMED,
    MOVES,
    PER_CLASS,
    PER_PREDICTED,
    SCATTERED,
    TOGETHER,
    TORN,
    UNSEEN,
    Guard,
)
from usfan.posterior.predictive import certainty_weights
from usfan.scoring.outputs import Outputs

CLASSES = ("a", "b", "c", "d")
TINY = {"epochs": 2, "batch_size": 8}


def squares(present: range, images: int = 12, domain: int = 0) -> usfan.ImageData:
    labels = np.tile(np.array(present), images)
    pixels = np.stack([picture(int(label), domain, i, 28, grey=True) for i, label in enumerate(labels)])
    return usfan.ImageData(pixels, labels=labels, classes=CLASSES, name="squares")


@pytest.fixture(scope="module")
def source() -> usfan.SourceModel:
    settings = {"backbone": "digits-cnn", "epochs": 20, "batch_size": 8, "bottleneck": 16, "label_smoothing": 0.0}
    return usfan.train_source(squares(range(4)), **settings)


def test_a_target_without_half_of_the_classes_brings_a_warning(source, caplog) -> None:
    warn_once.cache_clear()
    with caplog.at_level(logging.WARNING):
        model = usfan.adapt(source, squares(range(2)), **TINY)
        usfan.adapt(source, squares(range(2)), **TINY)
    assert "2 of 4 classes for not one of 24 images" in model.history["warning"]
    assert "--partial-set" in model.history["warning"]
    assert caplog.text.count(model.history["warning"]) == 1
    assert len(model.history["records"]) == 3


@pytest.mark.parametrize(
    "settings", [{"partial_set": True}, {"open_set": True}, {"method": "source-only"}, {"epochs": 0}], ids=str
)
def test_not_where_it_is_of_no_use(source, settings) -> None:
    assert usfan.adapt(source, squares(range(2)), **{**TINY, **settings}).history["warning"] is None


def test_a_target_with_all_classes_brings_none(source) -> None:
    assert usfan.adapt(source, squares(range(4)), **TINY).history["warning"] is None


@pytest.mark.parametrize(
    ("coverage", "count", "classes", "warned"),
    [
        (1 - UNSEEN, PER_CLASS * 20, 20, True),
        (1 - UNSEEN + 1 / 20, 1000, 20, False),
        (0.5, PER_CLASS * 20 - 1, 20, False),
        (2 / 3, 1000, 3, False),
        (1 / 3, 1000, 3, True),
    ],
)
def test_what_counts_as_missing(coverage: float, count: int, classes: int, warned: bool) -> None:
    assert (Guard.missing_classes(coverage, count, classes) is not None) == warned


def followed(agreement: list[float], information: list[float], **options: bool) -> Guard:
    """A guard that saw these figures, epoch by epoch."""
    guard = Guard(enabled=True, **options)
    for epoch, (near, score) in enumerate(zip(agreement, information, strict=True)):
        guard.validators[epoch] = {"source_neighbours": near, "information_maximization": score, "entropy": -score}
        guard.best, guard.latest = epoch if guard.prefers(epoch) else guard.best, epoch
    return guard


def test_the_highest_information_while_neighbours_agree() -> None:
    assert followed([0.5, 0.6, 0.7], [1, 2, 3]).best == 2
    assert followed([0.5, 0.6, 0.9], [1, 3, 2]).best == 1  # classes that merge agree more, and say less
    assert followed([0.69, 0.7, 0.7], [1, 3, 2]).best == 1
    assert followed([0.5, 0.7, 0.7 - 2 * SCATTERED], [1, 2, 3]).best == 1
    assert followed([0.5, 0.7, 0.7 - 0.5 * SCATTERED], [1, 2, 3]).best == 2
    assert followed([0.7, 0.6, 0.5], [1, 2, 3]).best == 0
    assert followed([0.7, 0.6, 0.5], [1, 2, 3], neighbourly=False).best == 2


def test_a_run_that_ends_under_the_source_model_is_not_trusted() -> None:
    assert followed([0.7, 0.75, 0.7 - 0.9 * TORN], [1, 2, 3]).torn() is None
    reason = followed([0.7, 0.75, 0.6], [1, 2, 3]).torn()
    assert reason is not None
    assert "(60%, it was 70%)" in reason
    assert "--partial-set" in reason
    assert followed([0.7, 0.75, 0.6], [1, 2, 3], neighbourly=False).torn() is None


def test_under_partial_set_the_advice_is_not_given_again() -> None:
    reason = followed([0.7, 0.75, 0.6], [1, 2, 3], partial=True).torn()
    assert reason is not None
    assert "--partial-set" not in reason


@pytest.mark.parametrize(
    ("agreement", "drift", "diversity", "classes", "options", "trusted"),
    [
        ([0.6, 0.75], 0.3, 0.9, 31, {}, True),
        ([0.6, 0.6 + 0.3 * (TOGETHER - 0.01)], 0.3, 0.9, 31, {}, False),
        ([0.6, 0.6 + 0.3 * (TOGETHER + 0.01)], 0.3, 0.9, 31, {}, True),
        ([0.98, 0.97], 0.03, 0.9, 31, {}, False),
        ([0.98, 0.97], 0.9 * MOVES[0], 0.9, 31, {}, True),  # too few moved to tell
        ([0.6, 0.6], 1.1 * MOVES[1], 0.9, 31, {}, True),  # the source model is wrong of most
        ([0.97, 0.96], 0.3, 1.0, 3, {}, True),  # few classes
        ([0.97, 0.96], 0.3, 0.3, 31, {}, True),  # or few that it predicts
        ([0.6, 0.6], 0.3, 0.9, 31, {"partial": True}, True),
        ([0.6, 0.6], 0.3, 0.9, 31, {"neighbourly": False}, True),
    ],
)
def test_what_moves_must_come_to_its_neighbours(agreement, drift, diversity, classes, options, trusted) -> None:
    guard = followed(agreement, [1, 2], **options)
    guard.classes = classes
    guard.validators[0] |= {"diversity": diversity, "drift": 0.0}
    guard.validators[1]["drift"] = drift
    kept = guard.finish()
    assert kept.epoch == (1 if trusted else 0)
    assert trusted == ("--partial-set" not in kept.reason)


def test_what_is_kept_after_a_collapse_is_judged_too() -> None:
    guard = followed([0.6, 0.6, 0.1], [1, 2, 0])
    guard.classes, guard.collapsed, guard.best_state = 31, "classes vanished", {"weight": torch.zeros(1)}
    for epoch, moved in enumerate([0.0, 0.2, 0.4]):
        guard.validators[epoch] |= {"diversity": 0.9, "drift": moved}
    assert guard.best == 1
    assert guard.finish().epoch == 0
    guard.validators[1]["source_neighbours"] = 0.7
    assert guard.finish().epoch == 1


def test_a_late_end_is_judged_too() -> None:
    """The kept epoch brought images together, the last one did not: the run as a whole is not trusted."""
    guard = followed([0.6, 0.7, 0.65], [1, 2, 3])
    guard.classes = 31
    for epoch, moved in enumerate([0.0, 0.2, 0.4]):
        guard.validators[epoch] |= {"diversity": 0.9, "drift": moved}
    assert guard.best == 1
    assert guard.gain_per_move(1) == pytest.approx(0.5)
    assert guard.gain_per_move(2) == pytest.approx(0.125)
    assert guard.finish().epoch == 0


def test_a_collapse_is_not_taken_for_torn_neighbours() -> None:
    guard = followed([0.7, 0.8, 0.1], [1, 2, 0])
    guard.collapsed, guard.best_state = "classes vanished", {"weight": torch.zeros(1)}
    kept = guard.finish()
    assert kept.epoch == 1
    assert "classes vanished" in kept.reason


def test_reasons() -> None:
    assert followed([0.7, 0.71, 0.72], [3, 2, 1]).finish().reason.endswith("because no iterate scored higher")
    apart = followed([0.7, 0.675], [1, 2]).finish()
    assert apart.epoch == 0
    assert apart.reason.endswith("because images that lie together were predicted apart")
    assert followed([0.6, 0.7, 0.65], [1, 2, 3]).finish().reason.startswith("kept epoch 1 of 2: after it")
    assert followed([0.6, 0.7, 0.7], [1, 2, 3]).finish().reason == "kept epoch 2 of 2"


@pytest.mark.parametrize(
    ("count", "predicted", "knowledge", "asked"),
    [
        (ENOUGH, 2, INFORMED, True),
        (ENOUGH - 1, 2, 1.0, False),
        (PER_PREDICTED * 50, 50, 1.0, True),
        (PER_PREDICTED * 50 - 1, 50, 1.0, False),
        (1000, 10, 0.9 * INFORMED, False),
    ],
)
def test_when_neighbours_are_asked(count: int, predicted: int, knowledge: float, asked: bool) -> None:
    assert Guard.worth_asking(count, predicted, knowledge) == asked


@pytest.mark.parametrize("images", [2, 4])
def test_a_few_images_per_class_are_adapted_to(source, images: int) -> None:
    """Their nearest neighbours are of other classes, however right the predictions."""
    model = usfan.adapt(source, squares(range(4), images, domain=1), **TINY)
    assert "lie together" not in model.history["guard"]["reason"]


@pytest.mark.parametrize("open_set", [False, True])
def test_neighbours_torn_apart_are_not_kept(source, monkeypatch, open_set) -> None:
    """Every other image of those that the source model doubts gets another class: more information, fewer neighbours
    alike, and the doubted ones moved, as they should."""
    plain = Adaptation.outputs

    def torn(self):
        found = plain(self)
        if self.guard.source is None:
            return found
        certain = certainty_weights(found.posterior_probs)
        moved = (certain < certain.median()) & (torch.arange(len(certain)) // 4 % 2 == 0)
        logits = torch.where(moved[:, None], found.logits.roll(1, dims=1), found.logits)
        return dataclasses.replace(found, logits=9 * logits, probs=(9 * logits).softmax(1))

    monkeypatch.setattr(Adaptation, "outputs", torn)
    monkeypatch.setattr(Adaptation, "train_epoch", lambda self, *given: None)
    model = usfan.adapt(source, squares(range(4), 30, domain=1), open_set=open_set, separation=0.0, **TINY)
    before, *_, last = (record["validators"] for record in model.history["records"])
    assert last["information_maximization"] > before["information_maximization"]
    assert last["source_neighbours"] < before["source_neighbours"] - TORN
    assert model.history["kept_epoch"] == (2 if open_set else 0)
    assert ("lie together" in model.history["guard"]["reason"]) != open_set


def test_a_class_that_swallowed_the_target_is_named():
    source = torch.eye(3).repeat(10, 1)
    swallowed = torch.tensor([[0.1, 0.8, 0.1]]).repeat(30, 1)
    guard = Guard(enabled=True, names=("mug", "pen", "lamp"))
    guard.see_source(Outputs(source, source, source, source, torch.zeros(30)))
    guard.consider(1, {}, swallowed, torch.nn.Linear(1, 1))
    assert guard.collapsed.startswith("class pen swallowed the target")
