"""A few labels of the user's own: by path or position, in a table, a list or a mapping; clear errors for the rest."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image

import usfan
from usfan.data.few_labels import few_labels as read_labels
from usfan.errors import DataError

CLASSES = ("apple", "mug", "zebra")


def few_labels(labels, data, classes):
    """The labels to learn from."""
    return read_labels(labels, data, classes).learn


@pytest.fixture
def photos(tmp_path, make_picture):
    """photos/100CANON/0.png … and 101CANON/0.png …, six in all."""
    for folder in ("100CANON", "101CANON"):
        (tmp_path / "photos" / folder).mkdir(parents=True)
        for number in range(3):
            Image.fromarray(make_picture(number)).save(
                tmp_path / "photos" / folder / f"{number}.png"
            )
    return usfan.ImageData(tmp_path / "photos", unlabelled=True)


def test_a_table_that_is_filled_in_half_way(photos, tmp_path, monkeypatch):
    """Absolute paths, paths from the table, the data and the working folder; other columns are passed over."""
    monkeypatch.chdir(tmp_path / "photos" / "101CANON")
    rows = ["path,label,predicted", f"{photos.paths[0]},mug,zebra", f"{photos.paths[1]},,zebra"]
    rows += ["photos/100CANON/2.png,apple,apple", "101CANON/0.png,zebra,mug", "1.png,mug,mug"]
    (tmp_path / "few.csv").write_text("\n".join(rows) + "\n")
    assert few_labels(tmp_path / "few.csv", photos, CLASSES).tolist() == [1, -1, 0, 2, 1, -1]
    (tmp_path / "few.txt").write_text("photos/100CANON/2.png apple\n")
    assert few_labels(str(tmp_path / "few.txt"), photos, CLASSES).tolist() == [
        -1,
        -1,
        0,
        -1,
        -1,
        -1,
    ]


def test_mappings_pairs_and_positions(photos):
    assert few_labels({photos.paths[3]: "mug"}, photos, CLASSES).tolist() == [
        -1,
        -1,
        -1,
        1,
        -1,
        -1,
    ]
    assert few_labels([(0, "zebra"), (5, "mug")], photos, CLASSES).tolist() == [
        2,
        -1,
        -1,
        -1,
        -1,
        1,
    ]
    pixels = usfan.ImageData(np.zeros((4, 8, 8), np.uint8))
    assert few_labels({2: "mug", np.int64(0): "apple"}, pixels, CLASSES).tolist() == [
        0,
        -1,
        1,
        -1,
    ]
    table = torch.tensor([-1, 2, -1, -1])
    assert torch.equal(few_labels(table, pixels, CLASSES), table)
    numbers = usfan.ImageData(np.zeros((4, 8, 8), np.uint8))
    assert few_labels({1: 7}, numbers, [str(i) for i in range(10)]).tolist() == [-1, 7, -1, -1]


def test_a_table_of_an_array_names_positions(tmp_path):
    (tmp_path / "few.csv").write_text("image,label\n2,mug\n")
    pixels = usfan.ImageData(np.zeros((4, 8, 8), np.uint8), name="scans")
    assert few_labels(tmp_path / "few.csv", pixels, CLASSES).tolist() == [-1, -1, 1, -1]
    (tmp_path / "few.csv").write_text("image,label\nshed.png,mug\n")
    with pytest.raises(DataError, match=r"few\.csv, line 2: scans has images 0 to 3"):
        few_labels(tmp_path / "few.csv", pixels, CLASSES)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "path,label\nnowhere.png,mug\n",
            r"few\.csv, line 2: nowhere\.png is not an image of photos",
        ),
        (
            "path,label\nphotos/100CANON/0.png,mugg\n",
            r"line 2: the model has no class mugg: did you mean mug\?",
        ),
        (
            "path,label\nphotos/100CANON/0.png,MUG\n",
            r"line 2: the model has no class MUG: did you mean mug\?",
        ),
        (
            "path,label\nphotos/100CANON/0.png,42\n",
            r"no class 42: its classes are apple, mug, zebra",
        ),
        (
            "path,label\nphotos/100CANON/0.png,mug\n100CANON/0.png,apple\n",
            r"line 3: .*0\.png is apple here and mug before",
        ),
        ("path,label\nphotos/100CANON/0.png,\n", "no label is given: fill in the column"),
        ("", "no label is given"),
    ],
)
def test_what_is_refused(photos, tmp_path, text, said):
    (tmp_path / "few.csv").write_text(text)
    with pytest.raises(DataError, match=said):
        few_labels(tmp_path / "few.csv", photos, CLASSES)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("nowhere.csv", "no such file"),
        ({9: "mug"}, "photos has images 0 to 5, no 9"),
        ({-1: "mug"}, "no -1"),
        ([0, 1, 2], "labels, item 0: expected an image"),
        (5, "labels must be a file, or pairs"),
        (torch.tensor([0, 1]), "one entry per image, 6"),
        (
            torch.tensor([0, 1, 2, 4, 0, 0]),
            "labels must be from 0 to 2, 3 for none of the classes",
        ),
    ],
)
def test_labels_that_are_none(photos, given, said):
    with pytest.raises(DataError, match=said):
        few_labels(given, photos, CLASSES)


def test_questions_none_of_these_and_skipped_images(photos, tmp_path):
    """Labels that only compare models are kept apart; K stands for an image of no class of the model."""
    rows = ["path,label,question", "100CANON/0.png,mug,name", "100CANON/1.png,zebra,judge"]
    rows += ["100CANON/2.png,None of these,judge", "101CANON/0.png,none of these,"]
    rows += ["101CANON/1.png,skip,judge"]
    (tmp_path / "labels.csv").write_text("\n".join(rows) + "\n")
    labels = read_labels(tmp_path / "labels.csv", photos, CLASSES)
    assert labels.learn.tolist() == [1, -1, -1, 3, -1, -1]
    assert labels.judge.tolist() == [-1, 2, 3, -1, -2, -1]
    assert labels.all.tolist() == [1, 2, 3, 3, -2, -1]
    (tmp_path / "labels.csv").write_text("path,label,question\n100CANON/0.png,mug,maybe\n")
    with pytest.raises(DataError, match=r"line 2: question is name or judge, not maybe"):
        read_labels(tmp_path / "labels.csv", photos, CLASSES)


def test_no_path_leaves_the_root(photos, tmp_path):
    inner = usfan.ImageData(photos.paths[3:], root=tmp_path / "photos" / "101CANON")
    for path in (photos.paths[0], "../100CANON/0.png"):
        with pytest.raises(DataError, match="is not an image of paths"):
            few_labels({path: "mug"}, inner, CLASSES)
