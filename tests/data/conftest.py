"""Small photographs on disk, for the tests of reading data."""

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from lookalikes import to_square
from usfan.data import cache
from usfan.data.sources import ImageData
from usfan.data.store import Store


def picture(seed: int, width: int = 20, height: int = 14) -> np.ndarray:
    """A smooth colour picture, H×W×3 uint8: JPEG keeps it nearly as it is."""
    rng = np.random.default_rng(seed)
    corners = rng.integers(0, 256, (2, 2, 3), dtype=np.uint8)
    return np.asarray(
        Image.fromarray(corners).resize((width, height), Image.Resampling.BICUBIC)
    )


@pytest.fixture
def make_picture():
    return picture


@pytest.fixture
def class_folder(tmp_path: Path) -> Path:
    """Three classes whose order depends on the case rule: apple, Bike, cat; 9 images."""
    root = tmp_path / "photos"
    for c, name in enumerate(["Bike", "apple", "cat"]):
        for i in range(3):
            file = root / name / f"{i}.jpg"
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(picture(10 * c + i)).save(file, quality=95)
    return root


@pytest.fixture
def two_classes(tmp_path, make_picture) -> Path:
    """150 photographs in two classes, two of them broken."""
    for i in range(150):
        file = tmp_path / "photos" / ("mug" if i % 2 else "pen") / f"{i:03}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(make_picture(i, 12, 10)).save(file)
    (tmp_path / "photos" / "mug" / "001.png").write_text("broken")
    (tmp_path / "photos" / "pen" / "148.png").write_bytes(b"")
    return tmp_path / "photos"


@pytest.fixture
def decoded(monkeypatch) -> list[ImageData]:
    """One entry per time that images are decoded."""
    calls: list[ImageData] = []
    real = cache.stream
    monkeypatch.setattr(
        cache, "stream", lambda data, **options: calls.append(data) or real(data, **options)
    )
    return calls


@pytest.fixture
def assert_holds() -> Callable[[Store, ImageData], None]:
    """Checks a store of `two_classes`."""

    def check(store: Store, data: ImageData, size: int = 16) -> None:
        assert len(store) == len(store.positions) == 148
        assert store.values.shape == (148, 3, size, size)
        assert store.values.dtype == torch.uint8
        assert store.positions.tolist() == [i for i in range(150) if i not in (0, 149)]
        assert store.labels.tolist() == data.labels[store.positions].tolist()
        assert store.classes == ("mug", "pen")
        assert store.paths == [data.paths[i] for i in store.positions.tolist()]
        assert [
            (os.path.basename(path), reason) for path, reason in store.unreadable.items()
        ] == [
            ("001.png", "not an image of a known format"),
            ("148.png", "empty file"),
        ]
        for row in (0, 64, 147):
            assert torch.equal(store.values[row], to_square(Image.open(store.paths[row]), size))

    return check
