"""Decode once: where the pixels go, what is kept on the disk, and what becomes of a kept file that is damaged."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from usfan.data import cache, memory, row_cache
from usfan.data.cache import open_store
from usfan.data.decoding.decode import UnreadableImage
from usfan.data.sources import ImageData


def test_in_memory(two_classes, tmp_path, monkeypatch, assert_holds):
    monkeypatch.setenv("USFAN_CACHE", str(tmp_path / "unused"))
    data = ImageData(two_classes)
    store = open_store(data, size=16)
    assert_holds(store, data)
    assert store.device.type == "cpu"
    assert not (tmp_path / "unused").exists()
    index = torch.tensor([5, 5, 140])
    assert torch.equal(store.batch(index), store.values[index])
    assert torch.equal(store.batch(index, "cpu"), store.values[index])


def test_kept_file_is_used_again(two_classes, tmp_path, decoded, assert_holds):
    data = ImageData(two_classes)
    seen: list[int] = []
    for _ in range(3):
        store = open_store(data, size=16, cache_dir=tmp_path / "cache", progress=seen.append)
        assert_holds(store, data)
    assert len(decoded) == 1
    assert sum(seen) == 3 * 150
    copied = ImageData(two_classes).without_labels()  # labels are no part of the key
    assert open_store(copied, size=16, cache_dir=tmp_path / "cache").labels is None
    assert len(decoded) == 1
    assert len(list((tmp_path / "cache").glob("*.rows"))) == 1
    assert not list((tmp_path / "cache").glob("*.part"))


def test_other_settings_and_other_images_are_other_files(two_classes, tmp_path, decoded):
    folder = tmp_path / "cache"
    data = ImageData(two_classes)
    open_store(data, size=16, cache_dir=folder)
    assert open_store(data, size=8, cache_dir=folder).values.shape[2] == 8
    assert open_store(data, size=16, channels=1, cache_dir=folder).values.shape[1] == 1
    open_store(data.subset(range(100)), size=16, cache_dir=folder)
    Image.fromarray(np.full((10, 12, 3), 7, np.uint8)).save(two_classes / "mug" / "003.png")
    store = open_store(data, size=16, cache_dir=folder)
    assert len(decoded) == 5
    assert store.values[0].unique().tolist() == [7]


def test_strict_holds_for_kept_files_too(two_classes, tmp_path):
    folder = tmp_path / "cache"
    with pytest.raises(UnreadableImage, match="001"):
        open_store(ImageData(two_classes, strict=True), size=16, cache_dir=folder)
    assert not list(folder.glob("*.rows"))
    assert not list(folder.glob(".*"))
    open_store(ImageData(two_classes), size=16, cache_dir=folder)
    with pytest.raises(UnreadableImage, match="001"):
        open_store(ImageData(two_classes, strict=True), size=16, cache_dir=folder)


def test_mapped_from_the_disk(two_classes, tmp_path, monkeypatch, decoded, assert_holds):
    monkeypatch.setenv("USFAN_CACHE", str(tmp_path / "big"))
    monkeypatch.setattr(memory, "free_host_memory", lambda: 1000)
    data = ImageData(two_classes)
    store = open_store(data, size=16)
    assert_holds(store, data)
    index = torch.tensor([3, 147, 3])
    assert torch.equal(
        store.batch(index), torch.stack([store.values[i] for i in index.tolist()])
    )
    (file,) = (tmp_path / "big").glob("*.rows")
    assert str(file) in Path("/proc/self/maps").read_text()
    assert_holds(open_store(data, size=16), data)
    assert len(decoded) == 1
    file.unlink()  # who has it mapped keeps it
    assert_holds(store, data)


def test_where_pixels_go(monkeypatch):
    gpu = torch.device("cuda", 0)
    cpu = torch.device("cpu")
    monkeypatch.setattr(memory, "free_host_memory", lambda: 2000)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (1000, 9999))
    places = [memory.choose_place(size, gpu) for size in (500, 501, 1000, 1001)]
    assert places == [gpu, cpu, cpu, None]
    assert [memory.choose_place(size, cpu) for size in (500, 1000, 1001)] == [cpu, cpu, None]


def test_free_memory_heeds_the_container(tmp_path):
    assert memory.free_host_memory() > 2**20
    assert memory._container_memory(tmp_path) is None
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("300\n")
    (tmp_path / "memory.stat").write_text("anon 200\nfile 100\n")
    assert memory._container_memory(tmp_path) is None
    (tmp_path / "memory.max").write_text("1000\n")
    assert memory._container_memory(tmp_path) == 800


def test_arrays_are_stored_too(tmp_path, decoded):
    images = np.random.default_rng(0).integers(0, 256, (100, 8, 8), dtype=np.uint8)
    data = ImageData(images, labels=np.arange(100) % 3)
    for options in ({}, {"cache_dir": tmp_path}, {"cache_dir": tmp_path}):
        store = open_store(data, size=8, channels=1, **options)
        assert (store.values[:, 0].numpy() == images).all()
        assert store.paths is None
    assert len(decoded) == 2


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu(two_classes, tmp_path, monkeypatch):
    data = ImageData(two_classes)
    index = torch.tensor([3, 147, 3])
    expected = open_store(data, size=16).batch(index)
    for place in (torch.device("cuda"), torch.device("cpu"), None):
        for module in (cache, row_cache):
            monkeypatch.setattr(module, "choose_place", lambda *_, place=place: place)
        for cache_dir in (tmp_path / "cache", tmp_path / "cache", None):
            store = open_store(data, size=16, device="cuda", cache_dir=cache_dir)
            assert store.device.type == ("cpu" if place is None else place.type)
            assert torch.equal(store.batch(index, "cuda").cpu(), expected)
            assert torch.equal(store.batch(index.cuda(), "cuda").cpu(), expected)
            assert store.batch(index, "cuda").device.type == "cuda"
