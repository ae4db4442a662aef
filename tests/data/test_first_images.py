"""Data as a new user has it: camera folders, tables, loaders, generators, single photographs."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader, IterableDataset, SubsetRandomSampler, TensorDataset

import usfan
from tiny_models import tiny_model
from usfan.data import datasets
from usfan.data.lists import read_classes
from usfan.errors import ConfigError, DataError


@pytest.fixture
def camera(tmp_path, make_picture):
    """DCIM/100CANON and 101CANON, and a photograph beside them."""
    root = tmp_path / "DCIM"
    for i, folder in enumerate(("100CANON", "101CANON", "")):
        (root / folder).mkdir(parents=True, exist_ok=True)
        Image.fromarray(make_picture(i)).save(root / folder / f"IMG_{i}.JPG", format="JPEG")
    return root


def test_a_camera_folder_is_unlabelled_by_choice(camera):
    with pytest.raises(DataError, match=r"beside 2 class folders.*unlabelled"):
        usfan.ImageData(camera)
    data = usfan.ImageData(camera, unlabelled=True)
    assert (len(data), data.labels, data.classes) == (3, None, None)
    assert repr(data) == "ImageData('DCIM': 3 images, no labels)"


def test_a_camera_folder_is_unlabelled_by_itself_if_no_name_is_a_class(camera, caplog):
    (camera / "IMG_2.JPG").unlink()
    data = usfan.ImageData(camera)
    assert data.classes == ("100CANON", "101CANON")
    for open_set in (False, True):
        caplog.clear()
        found = data.for_model(["mug", "pen"], open_set=open_set)
        assert found.labels is None
        assert len(found) == 2
        assert [r.getMessage() for r in caplog.records] == [
            "DCIM: none of its folders or labels (100CANON, 101CANON) is named as a class of the model (mug, pen): "
            "taken as unlabelled"
        ]
    assert data.for_model(["101CANON", "100canon"], open_set=True).labels.tolist() == [
        2,
        0,
    ]  # one name is a class
    with pytest.raises(DataError, match="upper and lower case differ"):
        data.for_model(["101canon", "100canon"])
    numbers = usfan.ImageData(np.zeros((2, 8, 8), np.uint8), labels=[0, 1])
    assert numbers.for_model(["mug", "pen"]).labels.tolist() == [0, 1]  # numbers go by position


def test_names_for_images_without_labels(camera):
    data = usfan.ImageData(camera, unlabelled=True, classes=["pen", "mug"])
    assert (data.labels, data.classes) == (None, ("pen", "mug"))
    with pytest.raises(DataError, match="choose one"):
        usfan.ImageData(np.zeros((2, 8, 8), np.uint8), labels=[0, 1], unlabelled=True)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("list.csv", "path,label\n{0},mug\n{1},pen\n"),
        ("list.csv", "{0},mug\n{1},pen\n"),
        ("list.csv", "{0} mug\n{1} pen\n"),
        ("list.csv", '"path","label"\n"{0}","mug"\n"{1}","pen"\n'),
        ("list.csv", '\ufefflabel;size;filename\r\nmug;3;{0}\r\npen;4;"{1}"\r\n'),
        ("list.tsv", "image\tclass\n{0}\tmug\n{1}\tpen\n"),
        ("list.txt", "Path,Label\n{0},mug\n{1},pen\n"),
        ("list.txt", "{0} mug\n{1} pen\n"),
    ],
)
def test_a_table_with_a_header(camera, name, text):
    paths = ["100CANON/IMG_0.JPG", "101CANON/IMG_1.JPG"]
    (camera / name).write_text(text.format(*paths), encoding="utf-8")
    data = usfan.ImageData(camera / name)
    assert [os.path.relpath(p, camera) for p in data.paths] == paths
    assert (data.classes, data.labels.tolist()) == (("mug", "pen"), [0, 1])
    (camera / name).write_text("path\n" + "\n".join(paths))
    assert usfan.ImageData(camera / name).labels is None


def test_a_table_without_a_path_in_a_line(camera):
    (camera / "list.csv").write_text("path,label\n100CANON/IMG_0.JPG,mug\n,pen\n")
    with pytest.raises(DataError, match=r"list\.csv, line 3: no path in it"):
        usfan.ImageData(camera / "list.csv")
    (camera / "list.csv").write_text("path,label\n100CANON/IMG_9.JPG,mug\n")
    with pytest.raises(DataError, match=r"line 2: no such file"):
        usfan.ImageData(camera / "list.csv")


PIXELS = (
    torch.arange(7 * 3 * 28 * 28, dtype=torch.int64)
    .remainder(251)
    .to(torch.uint8)
    .view(7, 3, 28, 28)
)
LABELS = torch.tensor([0, 1, 2, 0, 1, 2, 0])


class Streamed(IterableDataset):
    def __iter__(self):
        yield from zip(PIXELS, LABELS, strict=True)


@pytest.mark.parametrize(
    "make",
    [
        lambda: DataLoader(TensorDataset(PIXELS, LABELS), batch_size=3),
        lambda: DataLoader(TensorDataset(PIXELS, LABELS), batch_size=3, shuffle=True),
        lambda: DataLoader(Streamed(), batch_size=2),
        lambda: Streamed(),
        lambda: zip(PIXELS, LABELS, strict=True),
        lambda: ((PIXELS[i : i + 3], LABELS[i : i + 3]) for i in range(0, 7, 3)),
        lambda: (
            (p.permute(1, 2, 0).numpy(), int(k)) for p, k in zip(PIXELS, LABELS, strict=True)
        ),
        lambda: ({"image": p / 255, "label": k} for p, k in zip(PIXELS, LABELS, strict=True)),
        lambda: (
            (Image.fromarray(p.permute(1, 2, 0).numpy()), k)
            for p, k in zip(PIXELS, LABELS, strict=True)
        ),
    ],
    ids=[
        "loader",
        "shuffled",
        "iterable",
        "stream",
        "zip",
        "batches",
        "arrays",
        "dicts",
        "pictures",
    ],
)
def test_loaders_and_generators_with_labels(make):
    data = usfan.ImageData(make())
    assert data.labels.tolist() == LABELS.tolist()
    assert all(torch.equal(data.load(i), PIXELS[i]) for i in range(7))


def test_loaders_and_generators_without_labels():
    model = tiny_model("lenet")
    grey = PIXELS[:, 0]
    expected = model.predict(grey).probs
    some = DataLoader(
        TensorDataset(grey[:, None]), batch_size=2, sampler=SubsetRandomSampler([4])
    )
    torch.testing.assert_close(model.predict(some).probs, expected[4:5])
    for source in (
        DataLoader(TensorDataset(grey[:, None]), batch_size=2),
        (p for p in grey),
        iter(grey[:, None]),
    ):
        assert torch.equal(model.predict(source).probs, expected)


def test_iterables_that_are_no_data(monkeypatch):
    with pytest.raises(DataError, match="holds no images"):
        usfan.ImageData(iter([]))
    with pytest.raises(DataError, match="1 of its 2 images have a label"):
        usfan.ImageData(iter([(PIXELS[0], 1), PIXELS[1]]))
    with pytest.raises(DataError, match="cannot take images from a int"):
        usfan.ImageData(7)
    monkeypatch.setattr(datasets, "MOST_BYTES", 10_000)
    with pytest.raises(DataError, match="and no end: write them to a folder"):
        usfan.ImageData(PIXELS[0] for _ in iter(int, 1))


def test_one_photograph(camera):
    path = camera / "IMG_2.JPG"
    picture = Image.open(path).convert("RGB")
    model = tiny_model("cnn13")
    expected = model.predict(picture).probs
    array = np.array(picture)
    assert array.shape[2] == 3
    for one in (
        array,
        array / 255,
        torch.from_numpy(array).permute(2, 0, 1),
        path,
        str(path),
        [str(path)],
        array[None],
    ):
        assert torch.equal(model.predict(one).probs, expected)
    assert len(usfan.ImageData(path)) == 1


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"size": -3}, "size must be a whole number from 1 on; got -3"),
        ({"size": 224.5}, "size must be a whole number"),
        ({"size": 300}, "resize must be at least the size; got 256"),
        ({"channels": 1}, "mean must hold 1 numbers, one per channel"),
        ({"std": (1, 0, 1)}, "std must hold 3 positive numbers"),
        ({"augment": "crop"}, "augment must be one of crop-flip"),
    ],
)
def test_an_input_that_cannot_be(given, said):
    with pytest.raises(ConfigError, match=said):
        usfan.InputSpec(**given)
    assert usfan.InputSpec(mean=[0.5, 0.5, 0.5]).mean == (0.5, 0.5, 0.5)


@pytest.mark.parametrize("text", ["Mug\nZebra\n\napple\n", '["Mug", "Zebra", "apple"]'])
def test_a_file_of_class_names(tmp_path, text):
    (tmp_path / "names").write_text(text)
    assert read_classes(tmp_path / "names") == ("Mug", "Zebra", "apple")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"a\nb\na\n", "a more than once"),
        (b"\xff\xfe", "not a text file"),
        (b"[1, 2]", "must hold class names"),
        (b'{"a": 0, "b": 1}', "a JSON list of them"),
        (b"[oh", "must hold class names"),
    ],
)
def test_a_file_of_no_class_names(tmp_path, content, said):
    (tmp_path / "names").write_bytes(content)
    with pytest.raises(DataError, match=said):
        read_classes(tmp_path / "names")
    with pytest.raises(DataError, match="no such file"):
        read_classes(tmp_path / "nowhere")


def test_a_class_folder_whose_name_is_not_utf8(tmp_path, make_picture):
    for name in (b"caf\xe9", b"tea"):
        folder = os.path.join(os.fsencode(tmp_path), name)
        os.mkdir(folder)
        Image.fromarray(make_picture(0)).save(os.path.join(os.fsdecode(folder), "a.png"))
    with pytest.raises(
        DataError, match=r"a class whose name is not UTF-8 \('caf\\xe9'\): rename its folder"
    ):
        usfan.ImageData(tmp_path)
    assert len(usfan.ImageData(tmp_path, unlabelled=True)) == 2
