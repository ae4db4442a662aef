"""Classes are matched by name, never by position."""

import unicodedata

import numpy as np
import pytest

from usfan.data.labels import some
from usfan.data.sources import ImageData
from usfan.errors import DataError

IMAGES = np.zeros((4, 4, 4), np.uint8)


def labelled(labels, classes=None) -> ImageData:
    return ImageData(IMAGES, labels=labels, classes=classes, name="DATA")


def test_by_name():
    data = labelled(["pen", "mug", "pen", "cap"]).match_classes(["pen", "mug", "ruler", "cap"])
    assert data.labels.tolist() == [0, 1, 0, 3]
    assert data.classes == ("pen", "mug", "ruler", "cap")
    again = data.match_classes(["cap", "pen", "mug"])
    assert again.labels.tolist() == [1, 2, 1, 0]


def test_unknown_classes():
    data = labelled(["pen", "mug", "stapler", "cap"])
    with pytest.raises(DataError) as caught:
        data.match_classes(["mug"])
    expected = "DATA has 3 classes (cap, pen, stapler) that the model does not know: pass open_set=True"
    assert str(caught.value).startswith(expected)
    with pytest.raises(DataError, match=r"DATA has 1 class \(stapler\) that"):
        data.match_classes(["mug", "pen", "cap"])
    opened = data.match_classes(["mug", "pen"], open_set=True)
    assert opened.labels.tolist() == [1, 0, 2, 2]
    assert opened.classes == ("mug", "pen")
    assert (
        labelled([0, 1, 1, 0], ["pen", "mug"])
        .match_classes(["x"], open_set=True)
        .labels.tolist()
        == [1] * 4
    )


def test_only_classes_with_images_count():
    data = labelled([0, 1, 1, 0], ["pen", "mug", "never-seen"])
    assert data.match_classes(["mug", "pen"]).labels.tolist() == [1, 0, 0, 1]
    assert labelled(["a", "b", "c", "c"]).subset([0, 1]).match_classes(
        ["b", "a"]
    ).labels.tolist() == [1, 0]


def test_mere_numbers_go_by_position():
    data = labelled([0, 2, 1, 2])
    assert data.match_classes(["x", "y", "z"]).labels.tolist() == [0, 2, 1, 2]
    with pytest.raises(
        DataError,
        match=r"1 class \(2\) .* does not know: pass open_set=True, or check the labels .*0 to 1",
    ):
        data.match_classes(["x", "y"])
    assert data.match_classes(["x", "y"], open_set=True).labels.tolist() == [0, 2, 1, 2]
    assert data.match_classes(["x"], open_set=True).labels.tolist() == [0, 1, 1, 1]


def test_numbers_that_are_names_go_by_name():
    data = labelled(["10", "9", "2", "10"])
    assert data.match_classes([str(i) for i in range(11)]).labels.tolist() == [10, 9, 2, 10]


def test_accents_match_however_they_are_spelled():
    decomposed = unicodedata.normalize("NFD", "café")
    data = labelled([decomposed, "b", "b", "b"])
    assert data.match_classes(["b", unicodedata.normalize("NFC", "café")]).labels.tolist() == [
        1,
        0,
        0,
        0,
    ]


def test_class_lists_are_checked():
    for classes in ("mug", ["a", "a"], [], [""]):
        with pytest.raises(DataError, match="class"):
            labelled([0, 1, 1, 0]).match_classes(classes)


def test_many_names_are_cut():
    assert some(["a", "b", "c", "d"]) == "a, b, c, …"
    assert some(["a\n"]) == "'a\\n'"


def test_matched_labels_stay_as_they_are():
    """`usfan adapt` matches the target's labels before the run, and its figures ask for the same again."""
    data = ImageData(np.zeros((4, 8, 8), dtype=np.uint8), labels=["pen", "mug", "lamp", "mug"])
    once = data.match_classes(["mug", "pen"], open_set=True)
    assert once.labels.tolist() == [1, 0, 2, 0]
    assert once.match_classes(["mug", "pen"], open_set=True).labels.tolist() == [1, 0, 2, 0]
    with pytest.raises(DataError, match=r"1 class .* the model does not know"):
        once.match_classes(["mug", "pen"])
