"""Evaluation and prediction in several processes: the figures and the table of one, each image counted once."""

import json
import os
from pathlib import Path

import pytest
import torch
from share_worker import main as worker

from small_runs import TINY, as_typed, class_folder, together, train_tiny, usfan
from usfan.artifacts.model import SourceModel
from usfan.compute.runtime import Runtime
from usfan.compute.share import own_share
from usfan.data.sources import ImageData
from usfan.evaluation.evaluate import evaluate


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """87 images, the first and the last of them broken."""
    root = class_folder(tmp_path_factory.mktemp("data") / "target", images=29, domain=3)
    (root / "class-0" / "000.png").write_bytes(b"")
    (root / "class-2" / "028.png").write_text("no picture")
    return root


@pytest.fixture(scope="module")
def model(data, tmp_path_factory) -> Path:
    return train_tiny(class_folder(data.parent / "source"), tmp_path_factory.mktemp("model") / "source")


@pytest.fixture(scope="module")
def pair(data, model, tmp_path_factory) -> tuple[Path, list[dict]]:
    out = tmp_path_factory.mktemp("pair")
    together(worker, [(rank, 2, out / "meet", model, data, out) for rank in range(2)])
    return out, [json.loads((out / f"{rank}.json").read_text()) for rank in range(2)]


def test_the_figures_of_one_process(pair, data, model):
    alone = evaluate(SourceModel.load(model), ImageData(data), batch_size=16, runtime=Runtime(torch.device("cpu")))
    for found in pair[1]:
        assert found["metrics"].keys() == alone.keys()
        for name, value in alone.items():  # sums of other lengths if this process has another number of threads
            close = pytest.approx(value, rel=1e-6) if isinstance(value, float) else value
            assert found["metrics"][name] == close, name
        assert found["metrics"]["count"] == 85
        assert found["positions"] == list(range(1, 86))
        assert [Path(path).name for path in found["skipped"]] == ["000.png", "028.png"]


def test_the_table_of_one_process(pair, data, model, tmp_path):
    assert usfan("predict", model, data, "--out", tmp_path / "table.csv", "--coverage", 0.5, *TINY) == 0
    assert (pair[0] / "table.csv").read_bytes() == (tmp_path / "table.csv").read_bytes()
    assert [found["rows"] for found in pair[1]] == [85, 85]
    assert sorted(path.name for path in pair[0].iterdir() if path.name != "meet") == ["0.json", "1.json", "table.csv"]


def test_what_one_process_meets_ends_them_all(pair):
    """A broken file in the share of either, under strict; nothing readable; nowhere to write."""
    for found in pair[1]:
        for line in (*found["strict"], found["strict table"]):
            assert line.startswith("cannot read ")
            assert "000.png: empty file" in line
        assert found["half"] == [2, 3]  # one process read nothing, and that is no error
        assert found["none"].startswith("none of the 2 images")
        assert found["none table"].startswith("none of the 2 images")
        assert found["unwritable"] != "no refusal"
        assert found["json"] == [{"rank": 0, "long": ""}, {"rank": 1, "long": "é\udc80" * 10}]
        assert found["gathered"] == [[1, 1]]
    assert not pair[0].joinpath("none.csv").exists()


@pytest.mark.parametrize(
    ("count", "batch", "world"), [(100, 16, 2), (100, 16, 7), (3, 64, 4), (64, 64, 2), (129, 64, 3)]
)
def test_shares_are_whole_batches_and_each_image_once(count, batch, world):
    shares = [own_share(count, batch, Runtime(torch.device("cpu"), rank=rank, world=world)) for rank in range(world)]
    assert [i for share in shares for i in share] == list(range(count))
    assert all(share.start % batch == 0 for share in shares if share)
    sizes = [-(-len(share) // batch) for share in shares]
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="one process per core")
@pytest.mark.parametrize("command", ["evaluate", "predict"])
def test_on_the_command_line(command, data, model, tmp_path, capfd):
    outs = (
        [tmp_path / "one.csv", tmp_path / "two.csv"] if command == "predict" else [tmp_path / "one", tmp_path / "two"]
    )
    assert usfan(command, model, data, "--out", outs[0], *TINY) == 0
    log = tmp_path / "log"
    assert as_typed(command, model, data, "--out", outs[1], *TINY, "--devices", 2, log=log) == 0, log.read_text()
    assert log.read_text().count("skipped 2 unreadable files of 87 images") == 1
    one, two = (out if command == "predict" else out / "metrics.json" for out in outs)
    assert one.read_bytes() == two.read_bytes()
    capfd.readouterr()
