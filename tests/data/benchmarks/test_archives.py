"""Benchmarks that are published as arrays: every format, and the alignment of CIFAR-10 and STL-10."""

import numpy as np
import pytest

import lookalikes
from usfan.data.benchmarks.catalogue import benchmark
from usfan.data.benchmarks.layouts import check, load_domain
from usfan.errors import DataError

NINE = ("airplane", "automobile", "bird", "cat", "deer", "dog", "horse", "ship", "truck")


def load(name, root, *domain):
    return load_domain(check(benchmark(name), root, allow_counts=True), *domain)


def channels_last(data, i):
    return data.load(i).permute(1, 2, 0).numpy()


def test_cifar_and_stl_share_nine_aligned_classes(tmp_path):
    lookalikes.make("cifar-stl", tmp_path, images=2)
    assert check(benchmark("cifar-stl"), tmp_path, allow_counts=True).counts == {
        "CIFAR9": 9 * 2 * 6,
        "STL9": 9 * 2 * 2,
    }
    cifar = load("cifar-stl", tmp_path, "cifar", "test")
    stl = load("cifar-stl", tmp_path, "STL9", "test")
    assert cifar.classes == stl.classes == NINE
    assert len(cifar) == len(stl) == 18
    # The look-alike paints class k of CIFAR-10 with picture k; frog is 6, so horse is picture 7.
    painted = dict(zip(NINE, [0, 1, 2, 3, 4, 5, 7, 8, 9], strict=True))
    numbers = [i for i in range(20) if i % 10 != 6]
    for i, number in enumerate(numbers):
        k = painted[NINE[cifar.labels[i]]]
        np.testing.assert_array_equal(
            channels_last(cifar, i), lookalikes.picture(k, 0, number, 32)
        )
    numbers = [i for i in range(20) if i % 10 != 7]
    for i, number in enumerate(numbers):
        k = painted[NINE[stl.labels[i]]]
        np.testing.assert_array_equal(
            channels_last(stl, i), lookalikes.picture(k, 1, number, 96)
        )


def test_stl_pictures_are_not_transposed(tmp_path):
    """A horizontal stripe stays horizontal."""
    lookalikes.make("cifar-stl", tmp_path, images=1)
    image = channels_last(load("cifar-stl", tmp_path, "STL9", "train"), 0).astype(int)
    across = image.mean(axis=(0, 2)).std()
    down = image.mean(axis=(1, 2)).std()
    assert down > 5 * across


def test_cifar_train_is_five_files_in_order(tmp_path):
    lookalikes.make("cifar-stl", tmp_path, images=1)
    folder = tmp_path / "cifar-10-batches-bin"
    for i in range(1, 6):
        raw = (
            np.frombuffer((folder / f"data_batch_{i}.bin").read_bytes(), np.uint8)
            .reshape(-1, 3073)
            .copy()
        )
        raw[:, 1:] = i
        (folder / f"data_batch_{i}.bin").write_bytes(raw.tobytes())
    data = load("cifar-stl", tmp_path, "CIFAR9", "train")
    assert [int(data.load(i)[0, 0, 0]) for i in range(0, 45, 9)] == [1, 2, 3, 4, 5]


def test_python_version_of_cifar_is_refused(tmp_path):
    lookalikes.make("cifar-stl", tmp_path, images=1)
    (tmp_path / "cifar-10-batches-bin").rename(tmp_path / "cifar-10-batches-py")
    with pytest.raises(
        DataError, match="cifar-10-batches-py holds pickles, which are never read"
    ):
        check(benchmark("cifar-stl"), tmp_path, allow_counts=True)


def test_missing_and_damaged_files_are_named(tmp_path):
    lookalikes.make("cifar-stl", tmp_path, images=1)
    file = tmp_path / "cifar-10-batches-bin" / "data_batch_3.bin"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(DataError, match=r"data_batch_3.bin is cut short: \d+ bytes"):
        check(benchmark("cifar-stl"), tmp_path, allow_counts=True)
    file.unlink()
    with pytest.raises(DataError, match=r"data_batch_3.bin is missing"):
        check(benchmark("cifar-stl"), tmp_path, allow_counts=True)
    labels = tmp_path / "stl10_binary" / "test_y.bin"
    labels.write_bytes(labels.read_bytes()[:-1])
    with pytest.raises(DataError, match="10 test images, but 9 labels"):
        load("cifar-stl", tmp_path, "STL9", "test")
    labels.write_bytes(bytes([11]) * 10)
    with pytest.raises(
        DataError, match=r"cannot read .*stl10_binary .*index 10 is out of bounds"
    ):
        load("cifar-stl", tmp_path, "STL9", "test")


@pytest.mark.parametrize("formats", ["npz", "published"])
def test_digits_in_either_format(tmp_path, formats):
    lookalikes.make("digits", tmp_path, images=2, formats=formats)
    found = check(benchmark("digits"), tmp_path, allow_counts=True)
    assert found.pairs == benchmark("digits").pairs
    assert found.counts == {"M": 40, "U": 40, "S": 40}
    for d, (name, side, grey) in enumerate(
        [("mnist", 28, True), ("usps", 16, True), ("svhn", 32, False)]
    ):
        for split in ("train", "test"):
            data = load("digits", tmp_path, name, split)
            assert data.labels.tolist() == list(range(10)) * 2
            assert data.classes == tuple("0123456789")
            for i in (0, 9, 10):
                expected = lookalikes.picture(i % 10, d, i, side, grey)
                found_pixels = (
                    data.load(i, channels=1 if grey else 3).permute(1, 2, 0).numpy().squeeze()
                )
                np.testing.assert_array_equal(found_pixels, expected)
        assert len(load("digits", tmp_path, name)) == 20


def test_digits_that_are_wrong(tmp_path):
    lookalikes.make("digits", tmp_path, images=1)
    np.savez(tmp_path / "mnist.npz", x_train=np.zeros((2, 28, 28), np.uint8), y_train=[3, 11])
    with pytest.raises(
        DataError,
        match=r"cannot read .*mnist.npz .*x_test is not a file in the archive",
    ):
        check(benchmark("digits"), tmp_path, allow_classes=True)
    shape = np.zeros((2, 28, 28), np.uint8)
    np.savez(
        tmp_path / "mnist.npz", x_train=shape, y_train=[3, 11], x_test=shape, y_test=[0, 1]
    )
    with pytest.raises(
        DataError, match=r"mnist \(train\) has 1 class \(11\) .*the model knows 0 to 9"
    ):
        check(benchmark("digits"), tmp_path, allow_classes=True)
    (tmp_path / "usps.npz").write_bytes(b"not an archive")
    with pytest.raises(DataError, match=r"cannot read .*usps.npz"):
        check(benchmark("digits"), tmp_path, allow_classes=True)


def test_digits_without_svhn(tmp_path):
    lookalikes.make("digits", tmp_path, images=1, formats="npz")
    (tmp_path / "svhn.npz").unlink()
    copy = check(benchmark("digits"), tmp_path, allow_counts=True)
    assert any(note.startswith("domain 'svhn' is missing") for note in copy.notes)
    assert copy.pairs == (("M", "U"), ("U", "M"))


def test_object_arrays_are_refused(tmp_path):
    """They could only be read by unpickling them."""
    lookalikes.make("digits", tmp_path, images=1)
    np.savez(
        tmp_path / "mnist.npz",
        y_train=np.array([{}], dtype=object),
        y_test=[0],
        x_train=[0],
        x_test=[0],
    )
    with pytest.raises(DataError, match=r"cannot read .*mnist.npz"):
        check(benchmark("digits"), tmp_path, allow_counts=True)
