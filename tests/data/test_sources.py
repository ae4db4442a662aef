"""`ImageData` takes what users have: folders, arrays, paths (datasets: see test_datasets)."""

import shutil

import numpy as np
import pytest
import torch
from PIL import Image

from usfan.data.sources import ImageData
from usfan.errors import DataError


def test_class_folder(class_folder):
    data = ImageData(class_folder)
    assert data.classes == ("apple", "Bike", "cat")  # whatever the case
    assert data.labels.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert data.labels.dtype == torch.long
    assert data.paths[3] == str(class_folder / "Bike" / "0.jpg")
    assert len(data) == 9
    assert data.name == "photos"
    expected = np.asarray(Image.open(data.paths[4])).transpose(2, 0, 1)
    assert (data.load(4).numpy() == expected).all()
    assert data.load(4, channels=1).shape == (1, 14, 20)


def test_nested_hidden_and_empty_folders(class_folder):
    (class_folder / "cat" / "more" / "deep").mkdir(parents=True)
    shutil.copy(
        class_folder / "cat" / "0.jpg", class_folder / "cat" / "more" / "deep" / "x.JPEG"
    )
    (class_folder / ".hidden").mkdir()
    shutil.copy(class_folder / "cat" / "0.jpg", class_folder / ".hidden" / "x.jpg")
    shutil.copy(class_folder / "cat" / "0.jpg", class_folder / "cat" / "._x.jpg")
    (class_folder / "empty").mkdir()
    (class_folder / "cat" / "notes.txt").write_text("x")
    data = ImageData(class_folder)
    assert data.classes == ("apple", "Bike", "cat")
    assert len(data) == 10
    assert data.labels[-4:].tolist() == [2, 2, 2, 2]


def test_linked_folders_are_followed_but_not_in_circles(class_folder, tmp_path):
    other = tmp_path / "elsewhere"
    shutil.move(class_folder / "cat", other)
    (class_folder / "cat").symlink_to(other)
    (other / "loop").symlink_to(class_folder)
    assert ImageData(class_folder).labels.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]


def test_flat_folder_has_no_labels(class_folder):
    data = ImageData(class_folder / "cat")
    assert data.labels is None
    assert data.classes is None
    assert len(data) == 3
    with pytest.raises(DataError, match="has no labels"):
        data.match_classes(["cat"])
    named = ImageData(class_folder / "cat", classes=["cat"])
    assert (named.labels, named.classes) == (None, ("cat",))


def test_classes_fix_the_order(class_folder):
    data = ImageData(class_folder, classes=["cat", "dog", "apple", "Bike"])
    assert data.classes == ("cat", "dog", "apple", "Bike")
    assert data.labels.tolist() == [2, 2, 2, 3, 3, 3, 0, 0, 0]
    with pytest.raises(DataError, match=r"1 class \(cat\) that the model does not know"):
        ImageData(class_folder, classes=["apple", "Bike"])
    with pytest.raises(DataError, match="more than once"):
        ImageData(class_folder, classes=["apple", "Bike", "cat", "cat"])


def test_bad_folders(tmp_path, class_folder):
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(DataError, match="holds no images"):
        ImageData(empty)
    (empty / "a.txt").write_text("x")
    (empty / "sub").mkdir()
    (empty / "sub" / "b.txt").write_text("x")
    with pytest.raises(DataError, match=r"holds no images, but 2 other files \(2 \.txt\)"):
        ImageData(empty)
    with pytest.raises(DataError, match="no such folder, image or list file"):
        ImageData(tmp_path / "nowhere")
    with pytest.raises(DataError, match="photos has its own"):
        ImageData(class_folder, labels=[1])
    assert ImageData(class_folder / "cat", labels=[1, 0, 1]).labels.tolist() == [1, 0, 1]
    shutil.copy(class_folder / "cat" / "0.jpg", class_folder / "stray.jpg")
    with pytest.raises(
        DataError, match=r"1 images \(such as stray.jpg\) beside 3 class folders"
    ):
        ImageData(class_folder)
    assert len(ImageData(class_folder, unlabelled=True)) == 10


@pytest.mark.parametrize("as_tensor", [False, True])
@pytest.mark.parametrize("layout", ["NHWC", "NCHW"])
@pytest.mark.parametrize("dtype", ["uint8", "float32", "float64"])
def test_arrays(make_picture, as_tensor, layout, dtype):
    images = np.stack([make_picture(i) for i in range(4)])
    given = images if dtype == "uint8" else (images / 255).astype(dtype)
    given = given if layout == "NHWC" else given.transpose(0, 3, 1, 2)
    data = ImageData(
        torch.from_numpy(given.copy()) if as_tensor else given, labels=[0, 2, 1, 2]
    )
    assert (data.load(2).numpy() == images[2].transpose(2, 0, 1)).all()
    assert data.classes == ("0", "1", "2")
    assert data.paths is None
    assert data.where(3) == "array[3]"


def test_grey_arrays(make_picture):
    images = np.stack([make_picture(i)[..., 0] for i in range(3)])
    for given in (images, images[..., None], images[:, None]):
        data = ImageData(given)
        assert (data.load(1, channels=1).numpy()[0] == images[1]).all()
        assert (data.load(1).numpy() == images[1]).all()
        assert data.load(1).shape == (3, 14, 20)


def test_an_array_and_its_labels_as_a_pair():
    images = np.zeros((4, 8, 8), np.uint8)
    labels = torch.tensor([0, 1, 1, 2])
    for data in (
        ImageData((images, labels)),
        ImageData((images, labels.tolist())),
        ImageData(images, labels),
    ):
        assert (len(data), data.labels.tolist()) == (4, [0, 1, 1, 2])
    assert len(ImageData((images[0], images[1]))) == 2  # two pictures
    with pytest.raises(DataError, match="4 images but 3 labels"):
        ImageData((images, labels[:3]))
    with pytest.raises(DataError, match="empty"):
        ImageData("")


def test_named_labels_of_arrays():
    images = np.zeros((4, 8, 8), np.uint8)
    data = ImageData(images, labels=["b", "A", "c", "A"])
    assert data.classes == ("A", "b", "c")
    assert data.labels.tolist() == [1, 0, 2, 0]
    assert ImageData(images, labels=torch.tensor([0, 1, 1, 0]), classes=["x", "y"]).classes == (
        "x",
        "y",
    )


@pytest.mark.parametrize(
    ("images", "labels", "message"),
    [
        (np.zeros((3, 8, 8), np.uint8), [0, 1], "3 images but 2 labels"),
        (np.zeros((3, 8, 8), np.uint8), [0, -1, 1], "labels from -1 to 1"),
        (np.zeros((3, 8, 8), np.uint8), [0, 0.5, 1], "expected whole numbers"),
        (np.zeros((3, 8, 8), np.uint8), [[0], [1], [1]], "expected one label per image"),
        (np.zeros((3, 8, 8), np.uint8), 3, "expected one label per image"),
        (np.zeros((3, 8, 8), np.uint8), [0, 1, 2**40], "expected numbers from 0"),
        (np.full((3, 8, 8), np.nan), None, "floats from nan"),
        (np.full((3, 8, 8), np.inf, np.float32), None, "floats from inf"),
        (np.full((3, 8, 8), 7.0), None, r"floats from 7 to 7: expected floats in \[0, 1\]"),
        (np.full((3, 8, 8), -0.5), None, r"floats from -0\.5"),
        (np.zeros((3, 8, 8), np.int64), None, "is int64: expected uint8"),
        (np.zeros((8, 8), np.uint8), None, "has shape 8×8"),
        (np.zeros((8, 8, 3), np.uint8), None, "looks like one image"),
        (np.zeros((5, 8, 8, 4), np.uint8), None, "1 or 3 channels"),
        (np.zeros((0, 8, 8), np.uint8), None, "holds no images"),
        (np.zeros((2, 0, 8), np.uint8), None, "no pixels"),
    ],
)
def test_bad_arrays(images, labels, message):
    with pytest.raises(DataError, match=message) as caught:
        ImageData(images, labels=labels)
    assert "\n" not in str(caught.value)


def test_sequence_of_paths(class_folder):
    paths = [class_folder / "cat" / "1.jpg", str(class_folder / "Bike" / "0.jpg")]
    data = ImageData(paths, labels=["cat", "Bike"])
    assert data.classes == ("Bike", "cat")
    assert data.labels.tolist() == [1, 0]
    assert data.paths == [str(path) for path in paths]
    relative = ImageData(["cat/1.jpg"], root=class_folder)
    assert relative.paths == [str(paths[0])]
    with pytest.raises(DataError, match=r"paths\[1\]: no such file: .*gone\.jpg \(1 of 2"):
        ImageData([paths[0], class_folder / "gone.jpg"])
    with pytest.raises(DataError, match="leaves the root"):
        ImageData(["../photos2/x.jpg"], root=class_folder)


def test_folder_links_cannot_leave_the_root(class_folder, tmp_path):
    shutil.copy(class_folder / "cat" / "0.jpg", tmp_path / "secret.jpg")
    ImageData(class_folder, root=class_folder)
    (class_folder / "cat" / "x.jpg").symlink_to(tmp_path / "secret.jpg")
    ImageData(class_folder)
    with pytest.raises(DataError, match=r"x\.jpg leaves the root"):
        ImageData(class_folder, root=class_folder)


def test_subset(class_folder):
    data = ImageData(class_folder, strict=True)
    part = data.subset([8, 0, 4])
    assert part.labels.tolist() == [2, 0, 1]
    assert part.paths == [data.paths[8], data.paths[0], data.paths[4]]
    assert part.classes == data.classes
    assert part.strict
    assert (part.load(0) == data.load(8)).all()
    assert data.subset(data.labels == 1).paths == data.paths[3:6]
    assert part.subset(torch.tensor([2])).paths == [data.paths[4]]
    assert len(data) == 9
    for bad in ([9], [-1], [], torch.ones(4, dtype=torch.bool)):
        with pytest.raises(DataError):
            data.subset(bad)
    array = (
        ImageData(np.arange(5, dtype=np.uint8)[:, None, None].repeat(2, 1).repeat(2, 2))
        .subset([3, 1])
        .subset([1])
    )
    assert array.load(0).unique().tolist() == [1]
    assert array.where(0) == "array[1]"


def test_without_labels(class_folder):
    data = ImageData(class_folder)
    bare = data.without_labels()
    assert bare.labels is None
    assert bare.classes is None
    assert data.labels is not None
    assert bare.paths == data.paths


def test_fingerprint_follows_the_content(class_folder, tmp_path, make_picture):
    import os

    data = ImageData(class_folder)
    first = data.fingerprint()
    assert data.fingerprint() == first
    copied = tmp_path / "copy"
    shutil.copytree(class_folder, copied)
    for file in class_folder.rglob("*.jpg"):  # the same files elsewhere, times and all
        status = file.stat()
        os.utime(
            copied / file.relative_to(class_folder), ns=(status.st_atime_ns, status.st_mtime_ns)
        )
    assert ImageData(copied).fingerprint() == first
    assert data.without_labels().fingerprint() == first
    assert data.subset(range(8)).fingerprint() != first
    changed = copied / "cat" / "1.jpg"
    status = changed.stat()
    content = bytearray(changed.read_bytes())
    content[-40] ^= 1  # the same name, size and time, another content
    changed.write_bytes(content)
    os.utime(changed, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert ImageData(copied).fingerprint() != first
    os.utime(class_folder / "cat" / "1.jpg", (1, 1))
    assert data.fingerprint() != first
    array = np.stack([make_picture(i) for i in range(3)])
    assert (
        ImageData(array).fingerprint()
        == ImageData(array.copy()).fingerprint()
        != ImageData(array[:2]).fingerprint()
    )
    items = [Image.fromarray(image) for image in array]
    assert (
        ImageData(items).fingerprint()
        == ImageData(list(items)).fingerprint()
        != ImageData(items[::-1]).fingerprint()
    )
