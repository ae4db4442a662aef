"""A target that lacks classes: the guard sees it before the first step, and says what to do."""

import numpy as np
import pytest

import usfan
from lookalikes import picture
from usfan.adaptation.guard import PER_CLASS, UNSEEN, WITNESS_OF_ABSENCE, Guard

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


def test_a_target_without_half_of_the_classes_is_refused_before_the_first_step(source) -> None:
    model = usfan.adapt(source, squares(range(2)), **TINY)
    guard = model.history["guard"]
    assert guard["kept_epoch"] == 0
    assert "2 of 4 classes" in guard["reason"]
    assert "--partial-set" in guard["reason"]
    assert len(model.history["records"]) == 1
    before, after = source.classifier.state_dict(), model.classifier.state_dict()
    assert all(before[k].equal(after[k]) for k in before)


@pytest.mark.parametrize("settings", [{"partial_set": True}, {"guard": False}], ids=str)
def test_it_is_adapted_to_where_the_user_says_so(source, settings) -> None:
    model = usfan.adapt(source, squares(range(2)), **TINY, **settings)
    assert len(model.history["records"]) == 3
    assert "classes for not one image" not in model.history["guard"]["reason"]


def test_a_target_with_all_classes_is_adapted_to(source) -> None:
    assert len(usfan.adapt(source, squares(range(4), domain=1), **TINY).history["records"]) == 3


def test_one_of_three_classes_unseen_is_not_enough() -> None:
    assert Guard.missing_classes({"coverage": 2 / 3}, 1.0, 1000, 3) is None


@pytest.mark.parametrize(
    ("coverage", "knowledge", "count", "refused"),
    [
        (1 - UNSEEN, WITNESS_OF_ABSENCE, PER_CLASS * 20, True),
        (1 - UNSEEN + 1 / 20, 1.0, 1000, False),
        (0.5, WITNESS_OF_ABSENCE - 0.01, 1000, False),
        (0.5, 1.0, PER_CLASS * 20 - 1, False),
    ],
)
def test_what_counts_as_missing(coverage: float, knowledge: float, count: int, refused: bool) -> None:
    found = Guard.missing_classes({"coverage": coverage}, knowledge, count, 20)
    assert (found is not None) == refused
