"""Kept files that are damaged, disks that are full, and two builders at once: no half-written cache is ever used."""

import json
import os
import shutil
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

from usfan.data import cache, row_cache
from usfan.data.cache import open_store
from usfan.data.sources import ImageData


def damaged(how: str, content: bytes, other: bytes) -> bytes:
    middle = len(content) // 2
    return {
        "empty": b"",
        "cut at the start": content[:20],
        "cut in the middle": content[:middle],
        "cut at the end": content[:-5],
        "longer": content + b"\0",
        "zeros at the start": bytes(64) + content[64:],
        "another first byte": bytes([content[0] ^ 1]) + content[1:],
        "bit flipped": content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :],
        "of other settings": other,
        "noise": os.urandom(len(content)),
    }[how]


WAYS = "empty|cut at the start|cut in the middle|cut at the end|longer|zeros at the start|another first byte"
WAYS += "|bit flipped|of other settings|noise"


@pytest.mark.parametrize("kind", ["rows", "json"])
@pytest.mark.parametrize("place", [torch.device("cpu"), None])
def test_a_damaged_file_is_built_anew(
    two_classes, tmp_path, decoded, monkeypatch, place, kind, caplog, assert_holds
):
    monkeypatch.setattr(row_cache, "choose_place", lambda *_: place)
    data = ImageData(two_classes)
    folder = tmp_path / "cache"
    open_store(data, size=8, cache_dir=tmp_path / "other")
    (other,) = (tmp_path / "other").glob(f"*.{kind}")
    open_store(data, size=16, cache_dir=folder)
    (file,) = folder.glob(f"*.{kind}")
    good = file.read_bytes()
    for how in WAYS.split("|"):
        before = len(decoded)
        caplog.clear()
        file.unlink()  # a mapped file is never written to in place
        file.write_bytes(damaged(how, good, other.read_bytes()))
        assert_holds(open_store(data, size=16, cache_dir=folder), data)
        assert len(decoded) == before + 1, how
        assert "again" in caplog.text, how
        assert file.read_bytes() == good, how


@pytest.mark.parametrize("field", ["skipped", "checksums"])
def test_a_header_that_someone_changed_is_not_believed(
    two_classes, tmp_path, decoded, field, assert_holds
):
    """One skipped image less would shift every label after it."""
    data = ImageData(two_classes)
    open_store(data, size=16, cache_dir=tmp_path)
    (file,) = tmp_path.glob("*.json")
    header = json.loads(file.read_text())
    header["content"][field][0] = [0, "broken"] if field == "skipped" else 0
    file.write_text(json.dumps(header))
    assert_holds(open_store(data, size=16, cache_dir=tmp_path), data)
    assert len(decoded) == 2


def test_a_killed_build_leaves_nothing_that_stays(two_classes, tmp_path, decoded, assert_holds):
    folder = tmp_path / "cache"
    data = ImageData(two_classes)
    open_store(data, size=16, cache_dir=folder)
    (file,) = folder.glob("*.rows")
    half = folder / f".{file.name}.abc.part"
    half.write_bytes(file.read_bytes()[:5000])
    file.unlink()
    assert_holds(open_store(data, size=16, cache_dir=folder), data)
    assert len(decoded) == 2
    assert not half.exists()


def test_a_link_is_not_followed_but_replaced(two_classes, tmp_path, decoded, assert_holds):
    """Not even to a whole file of the same images: in a folder that others write to, nobody says where it leads."""
    folder = tmp_path / "cache"
    data = ImageData(two_classes)
    open_store(data, size=16, cache_dir=folder)
    (file,) = folder.glob("*.rows")
    outside = file.rename(tmp_path / "outside")
    before = outside.read_bytes()
    file.symlink_to(outside)
    assert_holds(open_store(data, size=16, cache_dir=folder), data)
    assert len(decoded) == 2
    assert not file.is_symlink()
    assert outside.read_bytes() == before


def test_too_little_space_is_seen_before_the_work(two_classes, tmp_path, monkeypatch, decoded):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=10))
    with pytest.raises(
        OSError, match=r"cannot write the image cache: No space left .* choose another folder"
    ) as caught:
        open_store(ImageData(two_classes), size=16, cache_dir=tmp_path / "cache")
    assert caught.value.errno == 28
    assert decoded == []


def test_a_disk_that_fills_up_leaves_no_half_file(two_classes, tmp_path):
    """A limit on file sizes stands in for the full disk: the write fails in the middle."""
    code = f"""
        import resource
        from usfan.data.cache import open_store
        from usfan.data.sources import ImageData
        data = ImageData({str(two_classes)!r})
        resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000))
        try:
            open_store(data, size=16, cache_dir={str(tmp_path / "cache")!r})
        except OSError as error:
            print(error)
    """
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert "cannot write the image cache: File too large; free some space" in result.stdout
    assert not list((tmp_path / "cache").glob("*.rows"))
    assert not list((tmp_path / "cache").glob(".*"))


def test_a_folder_that_cannot_be_written(two_classes, tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(OSError, match="cannot write the image cache"):
        open_store(ImageData(two_classes), size=16, cache_dir=tmp_path / "file" / "cache")


@pytest.mark.parametrize("locks", [True, False])
def test_two_builders_at_once(two_classes, tmp_path, monkeypatch, locks):
    """Two threads stand in for two processes: the lock is one of open files, not of processes."""
    data = ImageData(two_classes)
    expected = open_store(data, size=16)
    building = []
    together = threading.Barrier(2)
    real = cache.stream

    def slow(*args, **options):
        building.append(threading.current_thread())
        if not locks:
            together.wait(60)  # both are at it
        for batch in real(*args, **options):
            time.sleep(0.1)
            yield batch

    def refuse(*_):
        raise OSError("no locks here")

    monkeypatch.setattr(cache, "stream", slow)
    if not locks:
        monkeypatch.setattr("fcntl.flock", refuse)
    with ThreadPoolExecutor(2) as pool:
        stores = list(
            pool.map(
                lambda _: open_store(data, size=16, cache_dir=tmp_path / "cache"), range(2)
            )
        )
    for store in stores:
        assert torch.equal(store.values, expected.values)
        assert torch.equal(store.positions, expected.positions)
    assert len(building) == (1 if locks else 2)
    assert len(list((tmp_path / "cache").glob("*.rows"))) == 1
    assert not list((tmp_path / "cache").glob(".*"))
