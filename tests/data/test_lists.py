"""List files: SHOT's format, names from folders, and paths that may not leave a root."""

import os
import string
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from usfan.data.lists import parse
from usfan.data.sources import ImageData
from usfan.errors import DataError


def write(folder: Path, *lines: str, name: str = "list.txt") -> Path:
    (folder / name).write_text("\n".join(lines) + "\n")
    return folder / name


def shot_lines(root: Path, base: Path) -> list[str]:
    names = sorted(os.listdir(root), key=str.casefold)
    files = [
        (file, i)
        for i, name in enumerate(names)
        for file in sorted((root / name).rglob("*.jpg"))
    ]
    return [f"{os.path.relpath(file, base)} {i}" for file, i in files]


def assert_same(a: ImageData, b: ImageData) -> None:
    assert a.classes == b.classes
    assert torch.equal(a.labels, b.labels)
    assert a.paths == b.paths
    assert a.fingerprint() == b.fingerprint()
    assert all(
        torch.equal(a.load(i), b.load(i)) for i in range(0, len(a), max(1, len(a) // 20))
    )


def test_a_list_and_its_folder_are_the_same_data(class_folder, tmp_path):
    file = write(tmp_path, *shot_lines(class_folder, tmp_path))
    folder = ImageData(class_folder)
    assert_same(ImageData(file, classes=folder.classes), folder)
    absolute = [f"{tmp_path}/{line}" for line in shot_lines(class_folder, tmp_path)]
    assert_same(ImageData(write(tmp_path, *absolute), classes=folder.classes), folder)


@pytest.mark.shared_data
def test_a_list_of_office31_is_the_folder(tmp_path, shared_data):
    root = shared_data / "office31" / "webcam"
    file = write(tmp_path, *[f"{root.parent}/{line}" for line in shot_lines(root, root.parent)])
    data = ImageData(file, classes=ImageData(root).classes)
    assert_same(data, ImageData(root))
    assert len(data) == 795
    assert len(data.classes) == 31


def test_numbers_keep_their_place(class_folder, tmp_path):
    file = write(tmp_path, "photos/cat/0.jpg 5", "photos/apple/1.jpg 2", "photos/cat/1.jpg 5")
    data = ImageData(file)
    assert data.labels.tolist() == [5, 2, 5]
    assert data.classes == tuple("012345")
    named = ImageData(file, classes=list("abcdef"))
    assert named.classes == tuple("abcdef")
    with pytest.raises(DataError, match=r"1 class \(5\) .*the model knows 0 to 4"):
        ImageData(file, classes=list("abcde"))


def test_numbers_go_by_position(class_folder, tmp_path):
    data_list = write(tmp_path, "photos/cat/0.jpg 3", "photos/Bike/1.jpg 1")
    data = ImageData(data_list)
    for classes in (["x", "y", "z", "w"], ["x", "Bike", "z", "cat"], list("0123")):
        assert data.match_classes(classes).labels.tolist() == [3, 1]
    with pytest.raises(DataError, match="cat is number 0 of the model; write class names"):
        data.match_classes(["cat", "Bike", "z", "w"])
    assert ImageData(data_list, classes=np.array(list("abcd"))).classes == tuple("abcd")
    with pytest.raises(DataError, match="no name"):
        ImageData(data_list, classes=[])
    assert data.match_classes(["x", "y"], open_set=True).labels.tolist() == [2, 1]
    with pytest.raises(DataError, match=r"1 class \(3\) .*the model knows 0 to 1"):
        data.match_classes(["x", "y"])


def test_names_spaces_and_odd_lines(class_folder, tmp_path):
    spaced = class_folder / "cat" / "my best photo.jpg"
    (class_folder / "cat" / "0.jpg").rename(spaced)
    lines = [
        "photos/cat/my best photo.jpg   cat",
        "",
        "  photos/Bike/0.jpg\tBike  ",
        "photos/apple/0.jpg apple\r",
    ]
    data = ImageData(write(tmp_path, *lines))
    assert data.paths[0] == str(spaced)
    assert data.classes == ("apple", "Bike", "cat")
    assert data.labels.tolist() == [2, 1, 0]
    bare = ImageData(write(tmp_path, "photos/cat/my best photo.jpg", "photos/Bike/0.jpg"))
    assert bare.labels is None
    assert bare.paths[0] == str(spaced)
    mixed = ImageData(write(tmp_path, "photos/Bike/0.jpg 7", "photos/apple/0.jpg A"))
    assert mixed.classes == ("7", "A")
    barcode = "4006381333931"
    codes = ImageData(write(tmp_path, f"photos/Bike/0.jpg {barcode}"))
    assert codes.classes == (barcode,)
    (tmp_path / "bom.txt").write_bytes(b"\xef\xbb\xbfphotos/Bike/0.jpg 0\r\n")
    assert ImageData(tmp_path / "bom.txt").labels.tolist() == [0]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["photos/cat/0.jpg 0", "photos/cat/9.jpg 1"], r"line 2: no such file: .*9\.jpg"),
        (["photos/a.jpg 0", "photos/b.jpg 1"], r"line 1: .*\(2 of 2 files are missing\)"),
        (
            ["photos/cat/0.jpg 0", "photos/cat/1.jpg -1"],
            "labels from -1 to 0: expected numbers from 0",
        ),
        (
            ["photos/cat/0.jpg 0", "photos/cat/1.jpg 999999999999"],
            "labels from 0 to 999999999999: expected numbers from 0",
        ),
        (
            ["photos/cat/0.jpg 0", "photos/cat/1.jpg"],
            "line 2: no label, but others have one",
        ),
        (
            ["photos/cat/0.jpg", "photos/cat/1.jpg 0"],
            "line 1: no label, but others have one",
        ),
        (["photos/cat/0.jpg\0 0"], "line 1: no such file"),
        ([""], "is empty"),
    ],
)
def test_bad_lists(class_folder, tmp_path, lines, message):
    with pytest.raises(DataError, match=message) as caught:
        ImageData(write(tmp_path, *lines))
    assert "\n" not in str(caught.value)


def test_a_binary_file_is_no_list(tmp_path):
    (tmp_path / "model.bin").write_bytes(bytes(range(256)))
    with pytest.raises(DataError, match="not a text file"):
        ImageData(tmp_path / "model.bin")


def test_no_path_leaves_the_root(class_folder, tmp_path):
    secret = tmp_path / "secret.jpg"
    secret.write_bytes((class_folder / "cat" / "0.jpg").read_bytes())
    (class_folder / "cat" / "link.jpg").symlink_to(secret)
    inside = write(tmp_path, "cat/0.jpg 0", "cat/../cat/1.jpg 0")
    assert len(ImageData(inside, root=class_folder)) == 2
    for path in (
        "../secret.jpg",
        "cat/../../secret.jpg",
        str(secret),
        "cat/link.jpg",
        "/etc/passwd",
    ):
        with pytest.raises(DataError, match=r"line 2: .* leaves the root"):
            ImageData(write(tmp_path, "cat/0.jpg 0", f"{path} 0"), root=class_folder)
    beside = tmp_path / "photos-private"  # a name that starts like the root's
    beside.mkdir()
    with pytest.raises(DataError, match="leaves the root"):
        ImageData(write(tmp_path, "../photos-private/x.jpg 0"), root=class_folder)
    assert len(ImageData(write(tmp_path, "secret.jpg 0"))) == 1  # without a root, anything goes


words = st.text(string.ascii_letters + string.digits + "_-.()é漢", min_size=1, max_size=8)
names = st.lists(words, min_size=1, max_size=3).map(" ".join).map(lambda text: text + ".jpg")
paths = st.lists(words, max_size=2).flatmap(
    lambda above: names.map(lambda name: "/".join([*above, name]))
)


@given(
    st.lists(
        st.tuples(paths, st.integers(0, 9) | st.sampled_from(["mug", "Paper_clip"])),
        min_size=1,
        max_size=8,
    )
)
def test_what_is_written_is_parsed(entries):
    text = "".join(f"{path} {label}\n" for path, label in entries)
    assert [(entry.path, entry.label) for entry in parse(text)] == [
        (path, str(label)) for path, label in entries
    ]
    bare = "\n\n".join(path for path, _ in entries)
    assert [(entry.path, entry.label) for entry in parse(bare)] == [
        (path, None) for path, _ in entries
    ]
    assert [entry.place for entry in parse(bare)] == [
        f"list, line {line}: " for line in range(1, 2 * len(entries), 2)
    ]


@given(st.text(max_size=80))
def test_any_text_is_parsed(text):
    for entry in parse(text):
        assert entry.path == entry.path.strip(" \t\r") != ""
        assert entry.label is None or (entry.label and not set(" \t\n/") & set(entry.label))


@given(st.binary(max_size=120))
def test_any_file_is_a_data_set_or_a_clear_error(tmp_path_factory, content):
    file = tmp_path_factory.getbasetemp() / "any.txt"
    file.write_bytes(content)
    with pytest.raises(DataError) as caught:
        ImageData(file, root=file.parent / "root")
    assert str(caught.value).isprintable()
