"""Decoding in order, in parallel, past broken files."""

import os
import resource
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from lookalikes import to_square
from usfan.data.decoding import pool as decoder_pool
from usfan.data.decoding.decode import UnreadableImage, decode_file
from usfan.data.sources import ImageData
from usfan.data.stream import report_skipped, stream, worker_count
from usfan.errors import DataError


@pytest.fixture
def photos(tmp_path, make_picture) -> Path:
    """100 photographs, four of them broken."""
    folder = tmp_path / "photos"
    folder.mkdir()
    for i in range(100):
        Image.fromarray(make_picture(i, 20 + i % 7, 30)).save(folder / f"{i:03}.jpg")
    (folder / "005.jpg").write_bytes((folder / "005.jpg").read_bytes()[:300])
    (folder / "017.jpg").write_text("hello")
    (folder / "018.jpg").write_bytes(b"")
    (folder / "099.jpg").write_bytes(b"\xff\xd8")
    return folder


def gather(*args, **options):
    batches = list(stream(*args, **options))
    return (
        torch.cat([index for index, _ in batches]),
        torch.cat([pixels for _, pixels in batches]),
        batches,
    )


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_order_and_content(photos, workers):
    data = ImageData(photos)
    seen: list[int] = []
    options = {
        "size": 24,
        "batch_size": 10,
        "workers": workers,
        "progress": seen.append,
    }
    index, pixels, batches = gather(data, **options)
    assert index.tolist() == [i for i in range(100) if i not in (5, 17, 18, 99)]
    assert [len(batch) for batch, _ in batches] == [10] * 9 + [6]
    expected = torch.stack([to_square(Image.open(data.paths[i]), 24) for i in index.tolist()])
    assert torch.equal(pixels, expected)
    assert pixels.dtype == torch.uint8
    assert [os.path.basename(path) for path in data.unreadable] == [
        "005.jpg",
        "017.jpg",
        "018.jpg",
        "099.jpg",
    ]
    assert list(data.unreadable.values())[:3] == [
        "truncated",
        "not an image of a known format",
        "empty file",
    ]
    assert sum(seen) == 100


@pytest.mark.parametrize("workers", [0, 2])
def test_a_subset_in_grey(photos, workers):
    data = ImageData(photos).subset([40, 3, 5, 40])
    index, pixels, _ = gather(data, size=8, channels=1, workers=workers)
    assert index.tolist() == [0, 1, 3]
    assert pixels.shape == (3, 1, 8, 8)
    assert torch.equal(pixels[0], pixels[2])


@pytest.mark.parametrize("workers", [0, 2])
def test_strict_names_the_file(photos, workers):
    data = ImageData(photos, strict=True)
    with pytest.raises(UnreadableImage, match=r"005\.jpg: truncated"):
        gather(data, size=8, workers=workers)


@pytest.mark.parametrize("workers", [0, 2])
def test_nothing_readable(photos, workers):
    data = ImageData(photos).subset([5, 17])
    with pytest.raises(
        DataError, match=r"none of the 2 images of photos can be read: .*005\.jpg \(truncated\)"
    ):
        gather(data, size=8, workers=workers)


def test_a_vanished_file_is_skipped(photos):
    data = ImageData(photos).subset(range(50, 60))
    (photos / "050.jpg").unlink()
    gather(data, size=8, workers=2)
    assert data.unreadable == {str(photos / "050.jpg"): "file is missing"}


def test_arrays_and_datasets(make_picture):
    images = np.stack([make_picture(i, 16, 16) for i in range(40)])
    for data in (ImageData(images), ImageData(list(images))):
        for size, channels in ((16, 3), (16, 1), (9, 3)):
            turned = data.subset(range(39, -1, -1))
            index, pixels, _ = gather(turned, size=size, channels=channels, batch_size=16)
            assert index.tolist() == list(range(40))
            assert torch.equal(
                pixels[5], to_square(Image.fromarray(images[34]), size, channels)
            )
    grey = ImageData(images[..., 0])
    assert torch.equal(
        gather(grey, size=16, channels=1)[1][:, 0], torch.from_numpy(images[..., 0].copy())
    )
    assert torch.equal(gather(grey, size=16)[1][7], grey.load(7))


def test_how_many_workers(photos, monkeypatch):
    few = ImageData(photos)
    files = few.subset([0] * 256)
    array = ImageData(np.zeros((500, 4, 4), np.uint8))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(64))
    assert (
        worker_count(files.subset(range(255)), None) == 1
    )  # with its limits on time and memory
    assert worker_count(files, None) == 8
    assert worker_count(few, 3) == 3
    assert worker_count(array, None) == 0
    assert worker_count(array, 4) == 0
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(2))
    assert worker_count(files, None) == 2


@pytest.mark.parametrize(
    "options",
    [
        {"size": 0},
        {"size": 8, "batch_size": 0},
        {"size": 8, "channels": 4},
        {"size": 8, "workers": -1},
    ],
)
def test_bad_settings(photos, options):
    with pytest.raises(DataError):
        gather(ImageData(photos), **options)


def test_report():
    assert report_skipped({}, 9) == []
    one = {"/a/mug/x.jpg": "truncated"}
    assert report_skipped(one, 9) == [
        "cannot read /a/mug/x.jpg: truncated",
        "skipped 1 unreadable file of 9 images",
    ]
    three = {f"/a/{n}\n.jpg": "empty file" for n in "xyz"}
    assert len(report_skipped(three, 9)) == 4
    cut = report_skipped(three, 9, most=2)
    assert cut[0] == "cannot read '/a/x\\n.jpg': empty file"  # one line, whatever the name
    assert cut[2:] == ["… and 1 more", "skipped 3 unreadable files of 9 images"]


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture
def started(monkeypatch) -> list[subprocess.Popen]:
    """The processes that a test starts."""
    found: list[subprocess.Popen] = []
    popen = subprocess.Popen
    monkeypatch.setattr(
        subprocess, "Popen", lambda *a, **k: found.append(popen(*a, **k)) or found[-1]
    )
    return found


def test_stopping_early_leaves_nothing_behind(photos, started):
    data = ImageData(photos, strict=True)
    before = open_files()
    batches = stream(data.subset(range(20, 90)), size=16, workers=2, batch_size=4)
    next(batches)
    batches.close()
    with pytest.raises(UnreadableImage) as held:  # the traceback keeps the frames alive
        gather(data, size=16, workers=2, batch_size=4)
    assert held.value.reason == "truncated"
    assert len(started) == 4
    assert all(process.returncode is not None for process in started)
    del held  # and with them the shared memory
    assert open_files() == before


def kill_on(name: str, action: str) -> str:
    """Code for a decoding process that does something drastic when it meets one file."""
    return textwrap.dedent(f"""
        import os, time, usfan.data.decoding.process as process
        decode = process.decode_file
        def deadly(path, channels, side):
            if path.endswith({name!r}):
                {action}
            return decode(path, channels, side)
        process.decode_file = deadly
        process.main()
    """)


@pytest.mark.parametrize(
    ("action", "reason"),
    [
        ("os.kill(os.getpid(), 11)", "the decoder crashed (signal 11)"),
        ("os._exit(3)", "the decoder crashed (exit code 3)"),
        ("time.sleep(60)", "decoding took over 1 s"),
    ],
)
def test_a_file_that_kills_its_decoder_is_skipped_by_name(photos, monkeypatch, action, reason):
    monkeypatch.setattr(decoder_pool, "_CODE", kill_on("042.jpg", action))
    monkeypatch.setattr(decoder_pool, "PATIENCE", 1.0 if "sleep" in action else 20.0)
    data = ImageData(photos)
    index, pixels, _ = gather(data, size=12, workers=2)
    assert data.unreadable[str(photos / "042.jpg")] == reason
    assert len(data.unreadable) == 5
    assert len(index) == 95
    assert torch.equal(pixels[-1], to_square(Image.open(photos / "098.jpg"), 12))


def test_a_decoder_killed_from_outside_costs_no_image(photos, started):
    data = ImageData(photos)
    batches = stream(data, size=12, workers=2, batch_size=8)
    found = [next(batches)[0]]
    started[0].send_signal(signal.SIGKILL)
    found += [index for index, _ in batches]
    assert len(torch.cat(found)) == 96
    assert len(data.unreadable) == 4


def test_a_decoder_that_cannot_start_is_a_clear_fault(photos, monkeypatch):
    monkeypatch.setattr(decoder_pool, "_CODE", "raise ImportError('no codec here')")
    with pytest.raises(OSError, match="could not start: ImportError: no codec here"):
        gather(ImageData(photos), size=8, workers=2)


def test_a_script_without_a_main_guard_works(photos, tmp_path):
    script = tmp_path / "plain.py"
    script.write_text(
        "from usfan.data.sources import ImageData\nfrom usfan.data.stream import stream\n"
        f"print(sum(len(i) for i, _ in stream(ImageData({str(photos)!r}), size=8, workers=2)))\n"
    )
    (tmp_path / "json.py").write_text(
        "raise SystemExit('a module of the working folder was taken')"
    )
    result = subprocess.run(
        [sys.executable, "-P", "-W", "error", str(script)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (result.returncode, result.stdout.strip(), result.stderr) == (0, "96", "")


def test_memory_does_not_grow_with_the_number_of_images(photos):
    """The pixels of all images are 340 MiB. At most 30 MiB are on their way, and an allocator may keep some more."""
    data = ImageData(photos).subset([i for i in range(96) if i not in (5, 17, 18)] * 8)
    used = []
    for _ in stream(data, size=400, workers=2, batch_size=16):
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        used.append(pages * resource.getpagesize() / 2**20)
    assert len(used) == 47
    assert max(used[10:]) - used[5] < 120


@pytest.mark.shared_data
def test_office31(shared_data):
    data = ImageData(shared_data / "office31" / "dslr")
    index, pixels, _ = gather(data, size=64, workers=2)
    assert index.tolist() == list(range(498))
    expected = [
        np.asarray(decode_file(data.paths[i]).resize((64, 64), Image.Resampling.BILINEAR))
        for i in (0, 250, 497)
    ]
    assert (pixels[[0, 250, 497]].permute(0, 2, 3, 1).numpy() == np.stack(expected)).all()
