"""Hugging Face datasets are known by their shape, so a stand-in of the same shape tests them without the package."""

import io

import numpy as np
import pytest
from PIL import Image

from usfan.data.decoding.decode import UnreadableImage
from usfan.data.sources import ImageData
from usfan.errors import DataError


class ClassLabel:
    def __init__(self, names):
        self.names = names


def feature(kind: str):
    return type(kind, (), {})()


class Table:
    """Columns, typed features, rows as dicts: what `datasets.Dataset` offers."""

    def __init__(self, features, **columns):
        self.features = features
        self.columns = columns
        self.column_names = list(columns)

    def __len__(self):
        return len(next(iter(self.columns.values())))

    def __getitem__(self, key):
        if isinstance(key, str):
            return self.columns[key]
        return {name: values[key] for name, values in self.columns.items()}


def file_bytes(image: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, "PNG")
    return buffer.getvalue()


def test_image_and_label_columns(make_picture):
    images = [make_picture(i) for i in range(3)]
    pictures = [Image.fromarray(image) for image in images]
    features = {
        "id": feature("Value"),
        "img": feature("Image"),
        "labels": ClassLabel(["mug", "pen"]),
    }
    data = ImageData(Table(features, id=[7, 8, 9], img=pictures, labels=[1, 0, 1]), name="hub")
    assert data.classes == ("mug", "pen")
    assert data.labels.tolist() == [1, 0, 1]
    assert (data.load(2).numpy() == images[2].transpose(2, 0, 1)).all()
    assert data.where(2) == "hub[2]"


def test_undecoded_images_and_unlabelled_splits(make_picture):
    images = [make_picture(i) for i in range(3)]
    raw = [{"bytes": file_bytes(image), "path": None} for image in images]
    raw[1]["bytes"] = raw[1]["bytes"][:60]
    data = ImageData(
        Table(
            {"image": feature("Image"), "label": ClassLabel(["a"])}, image=raw, label=[-1] * 3
        ),
        name="hub",
    )
    assert data.labels is None
    assert (data.load(0).numpy() == images[0].transpose(2, 0, 1)).all()
    with pytest.raises(UnreadableImage, match=r"hub\[1\]"):
        data.load(1)


class Column:
    """A column that newer versions give: no list, but a sequence."""

    def __init__(self, values):
        self.values = values

    def __len__(self):
        return len(self.values)

    def __getitem__(self, key):
        return self.values[key]


class NewTable(Table):
    def __getitem__(self, key):
        values = super().__getitem__(key)
        return Column(values) if isinstance(key, str) else values


def test_columns_of_other_names_go_by_their_features(make_picture):
    images = [make_picture(i) for i in range(3)]
    features = {
        "id": feature("Value"),
        "photograph": feature("Image"),
        "fine_label": ClassLabel(["mug", "pen"]),
    }
    pictures = [Image.fromarray(image) for image in images]
    data = ImageData(
        NewTable(features, id=[7, 8, 9], photograph=pictures, fine_label=[1, 0, 1])
    )
    assert data.classes == ("mug", "pen")
    assert data.labels.tolist() == [1, 0, 1]
    assert (data.load(1).numpy() == images[1].transpose(2, 0, 1)).all()
    two = features | {"coarse_label": ClassLabel(["a"])}
    table = Table(two, id=[0], photograph=pictures[:1], fine_label=[0], coarse_label=[0])
    assert ImageData(table).labels is None


def test_tables_without_a_clear_column():
    with pytest.raises(
        DataError, match="no image column: its columns are text; rename one to image"
    ):
        ImageData(Table({"text": feature("Value")}, text=["a"]))
