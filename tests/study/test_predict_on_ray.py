"""`predict` on a local Ray: the table of one process, also if a worker is killed in the middle."""

import functools
import os
import signal
import time
from importlib.util import find_spec
from pathlib import Path

import pytest
from PIL import Image

from lookalikes import picture
from small_runs import TINY, usfan
from tiny_models import tiny_model

if not find_spec("ray") or not find_spec("pyarrow"):
    pytest.skip("Ray Data is not installed", allow_module_level=True)
from usfan.cli.edges import load_model
from usfan.config import RuntimeConfig
from usfan.data.sources import open_inputs
from usfan.errors import DataError
from usfan.metrics.predictions import write_predictions
from usfan.study.cluster import connected
from usfan.study.predict_on_ray import OBJECT_STORE, ray_records

IMAGES = 300


@pytest.fixture(scope="module")
def ray():
    with connected("local", OBJECT_STORE) as started:
        yield started


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "model"
    tiny_model("lenet").save(folder)
    return folder


@pytest.fixture(scope="module")
def photos(tmp_path_factory) -> Path:
    """Five batches; three files cannot be read."""
    root = tmp_path_factory.mktemp("photos")
    for number in range(IMAGES):
        path = root / f"{number:03}.png"
        Image.fromarray(picture(number % 3, 0, number)).save(path)
    for number in (0, 100, IMAGES - 1):
        (root / f"{number:03}.png").write_bytes(b"no picture")
    return root


@pytest.fixture(scope="module")
def table(model, photos, tmp_path_factory) -> str:
    """Without Ray."""
    out = tmp_path_factory.mktemp("table") / "table.csv"
    assert usfan("predict", model, photos, "--out", out, *TINY) == 0
    return out.read_text()


def copies_of_the_model() -> list[int]:
    """Processes of our own Ray that hold the model: Ray gives them the name of their class."""
    result = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            title = (folder / "cmdline").read_bytes()
            raylet = (folder / "stat").read_text().rsplit(")", 1)[1].split()[1]
            driver = Path("/proc", raylet, "stat").read_text().rsplit(")", 1)[1].split()[1]
        except (OSError, IndexError):
            continue
        if b"MapWorker" in title and int(driver) == os.getpid():
            result.append(int(folder.name))
    return result


def test_the_table_is_that_of_one_process(ray, model, photos, table, tmp_path, capsys):
    out = tmp_path / "table.csv"
    assert usfan("predict", model, photos, "--out", out, "--ray", "local", *TINY) == 0
    assert out.read_text() == table
    assert "skipped 3 unreadable files of 300 images" in capsys.readouterr().err


def test_a_worker_is_killed_and_nothing_is_lost(ray, model, photos, table, tmp_path):
    killed = []

    def kill(count: int) -> None:
        if not killed:
            end = time.monotonic() + 60
            while not (workers := copies_of_the_model()):
                assert time.monotonic() < end, "no worker holds the model"
                time.sleep(0.01)
            killed.append(workers[0])
            os.kill(workers[0], signal.SIGKILL)

    load = functools.partial(load_model, str(model), None, "auto")
    computing = RuntimeConfig(device="cpu")
    out = tmp_path / "table.csv"
    write_predictions(
        out,
        load(),
        open_inputs([str(photos)]),
        progress=kill,
        records_of=functools.partial(ray_records, "local", computing, load),
    )
    assert killed
    assert out.read_text() == table


def test_images_that_nobody_can_read_are_an_error(ray, model, tmp_path):
    (tmp_path / "one.png").write_bytes(b"no picture")
    broken = open_inputs([str(tmp_path / "one.png")])
    load = functools.partial(load_model, str(model), None, "auto")
    computing = RuntimeConfig(device="cpu")
    with pytest.raises(DataError, match="none of the 1 images"):
        list(ray_records("local", computing, load, load(), broken))


def test_standard_input_and_standard_output_are_refused(model, photos, tmp_path, capsys):
    assert usfan("predict", model, photos, "--json", "--ray", "local") == 2
    assert usfan("predict", model, "-", "--out", tmp_path / "t.csv", "--ray", "local") == 2
    assert capsys.readouterr().err.count("--ray needs --out") == 2
