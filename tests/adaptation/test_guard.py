"""A target that may lack classes: the guard warns before the first step, and leaves the choice to the user."""

import logging

import numpy as np
import pytest

import usfan
from lookalikes import picture
from usfan.adaptation.adapt import warn_once
from usfan.adaptation.guard import PER_CLASS, UNSEEN, Guard

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
