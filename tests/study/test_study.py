"""`usfan study` end to end on small domain folders: tables, LaTeX, report, resuming, class sets, clear refusals."""

import json
import shutil
import sys
import types
from pathlib import Path

import pytest
import torch
import yaml

from small_runs import TINY, class_folder, usfan
from usfan.adaptation.methods import METHODS
from usfan.data.benchmarks.user_domains import own_domains
from usfan.data.row_cache import RowCache
from usfan.store.model import SourceModel
from usfan.study.choices import PAPER, user_methods
from usfan.tensor_file import read_tensors

QUICK = (
    "--backbone",
    "digits-cnn",
    "--source-epochs",
    1,
    "--epochs",
    1,
    "--batch-size",
    8,
    *TINY,
)


def domains(root: Path, *names: str, classes: int = 3, images: int = 4) -> Path:
    for number, name in enumerate(names):
        class_folder(root / name, classes=classes, images=images, domain=number)
    return root


def study(root, out, *more) -> int:
    return usfan("study", root, "--out", out, *QUICK, *more)


@pytest.fixture(scope="module")
def sites(tmp_path_factory):
    root = domains(
        tmp_path_factory.mktemp("data") / "sites", "front door", "garden_2", "50% night"
    )
    (root / "notes").mkdir()  # no images: no domain
    (root / "notes" / "read-me.txt").write_text("taken in spring")
    return root


def test_all_pairs_methods_and_seeds_end_in_tables_and_a_report(sites, tmp_path, capsys):
    out = tmp_path / "study"
    options = ("--methods", "source-only", "u-sfan", "--seeds", 0, 1)
    assert study(sites, out, *options) == 0
    printed = capsys.readouterr()
    results = json.loads((out / "results.json").read_text())
    tasks = {
        f"{a}→{b}"
        for a in own_domains(sites).places
        for b in own_domains(sites).places
        if a != b
    }
    assert len(tasks) == 6
    cells = {(row["task"], row["method"], row["seed"]) for row in results["rows"]}
    assert cells == {
        (task, method, seed)
        for task in tasks
        for method in ("source-only", "u-sfan")
        for seed in (0, 1)
    }
    table = (out / "table.md").read_text()
    rows = [line.split(" | ")[0] for line in table.splitlines() if line.startswith("| ")]
    assert rows == ["| method", "| ---", "| source-only", "| u-sfan"]
    assert table in printed.out
    assert (out / "agreement.md").read_text() in printed.out
    lines = [line for line in printed.err.splitlines() if line.startswith("[")]
    assert len(lines) == len(cells)
    assert lines[0].startswith("[1/24] ")
    page = (out / "report.html").read_text()
    assert "50% night→garden_<wbr>2" in page
    assert "u-sfan" in page
    settings = yaml.safe_load((out / "config.yaml").read_text())
    assert (settings["command"], settings["data"]) == ("study", str(sites))
    contents = {file: file.read_bytes() for file in (out / "cells").iterdir()}
    assert (
        usfan("study", "--config", out / "config.yaml", "--out", out, *TINY) == 0
    )  # nothing is left to do
    assert not [line for line in capsys.readouterr().err.splitlines() if line.startswith("[")]
    assert {file: file.read_bytes() for file in (out / "cells").iterdir()} == contents


def test_chosen_pairs_and_a_new_domain_go_on_in_the_same_folder(sites, tmp_path, refused):
    root = tmp_path / "sites"
    out = tmp_path / "study"
    shutil.copytree(sites, root)
    options = ("--methods", "source-only", "--seeds", 0)
    assert study(root, out, *options, "--pairs", "garden_2-front door") == 0
    assert json.loads((out / "study.json").read_text())["pairs"] == ["garden_2→front door"]
    class_folder(root / "roof", images=4, domain=3)
    assert study(root, out, *options, "--pairs", "garden_2-front door", "garden_2-roof") == 0
    assert len(list((out / "cells").glob("*.json"))) == 2
    picture = next((root / "roof").rglob("*.png"))
    shutil.copy(picture, picture.with_name("another.png"))
    line = refused("study", root, "--out", out, *QUICK, *options)
    assert "other settings (images or classes of roof)" in line


def test_own_domains_have_the_defaults_of_the_other_commands(sites, tmp_path):
    out = tmp_path / "study"
    own = ("--backbone", "digits-cnn", "--source-epochs", 1, *TINY)
    more = ("--methods", "shot", "tent", "--seeds", 0, "--pairs", "garden_2-front door")
    more = (*more, "--set", "momentum=0.8", "source_bottleneck=7")
    assert usfan("study", sites, "--out", out, *own, *more) == 0
    rows = {
        row["method"]: row["settings"]
        for row in json.loads((out / "results.json").read_text())["rows"]
    }
    assert (rows["shot"]["epochs"], rows["shot"]["lr"], rows["shot"]["guard"]) == (
        15,
        0.01,
        False,
    )
    assert SourceModel.load(out / "models" / "garden_2_0").classifier.head.in_features == 7
    stage = METHODS["tent"].stage
    assert {name: rows["tent"][name] for name in stage} == dict(stage)
    assert rows["tent"]["momentum"] == rows["shot"]["momentum"] == 0.8
    assert user_methods({"backbone": "tf_efficientnet_lite0"}) == (*PAPER, "u-sfan++")
    assert user_methods({"backbone": "tf_efficientnet_lite0", "pretrained": "none"}) == PAPER
    assert user_methods({"backbone": "digits-cnn"}) == PAPER


def test_domains_of_different_classes(tmp_path, refused):
    root = domains(tmp_path / "sites", "a", "b", classes=4)
    shutil.rmtree(root / "b" / "class-3")
    more = ("--methods", "source-only", "--seeds", 0)
    line = refused("study", root, "--out", tmp_path / "no", *QUICK, *more)
    assert "b lacks 1 of the classes of the other domains (class-3)" in line
    assert "--allow-classes to run on the 3" in line
    for number, (flags, classes) in enumerate(
        [
            (("--allow-classes",), 3),
            (("--partial-set", "--pairs", "a-b"), 4),
            (("--open-set", "--pairs", "b-a"), 3),
        ]
    ):
        out = tmp_path / f"study-{number}"
        assert study(root, out, *more, *flags) == 0
        results = json.loads((out / "results.json").read_text())
        assert ("hos" in results["rows"][0]) == ("--open-set" in flags)
        (model,) = {
            len(json.loads(f.read_text())["classes"])
            for f in (out / "models").glob("*/config.json")
        }
        assert model == classes
    line = refused("study", root, "--out", tmp_path / "no", *QUICK, *more, "--open-set")
    assert "a-b: the target has no class that the source lacks" in line
    line = refused("study", root, "--out", tmp_path / "no", *QUICK, *more, "--partial-set")
    assert "b-a: the target has class-3 that the source lacks" in line
    assert not (tmp_path / "no").exists()


def test_what_is_no_folder_of_domains(tmp_path, refused):
    def line(root: Path, *more) -> str:
        said = refused("study", root, "--out", tmp_path / "no", *QUICK, *more)
        assert not (tmp_path / "no").exists()
        return said

    assert "no such folder" in line(tmp_path / "missing")
    one = domains(tmp_path / "one", "only")
    assert "holds images in only; expected ROOT/domain/class/*.jpg" in line(one)
    assert "only/class-0 holds images, but no class folders" in line(one / "only")
    assert "holds images itself" in line(one / "only" / "class-0")
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "holds images in no folder" in line(empty)
    assert "a-b-a can mean 2 pairs" in line(
        domains(tmp_path / "double", "a", "a-b", "b-a", images=1)
    )
    assert "rename it" in line(domains(tmp_path / "arrow", "a→b", "c", images=1))
    two = domains(tmp_path / "two", "a", "b", images=1)
    assert "no task 'a-c'; the tasks are a-b, b-a" in line(two, "--pairs", "a-c")
    assert "did you mean u-sfan" in line(two, "--methods", "usfan")
    assert "momentun" in line(two, "--set", "momentun=1")
    assert "source_bottelneck" in line(two, "--set", "source_bottelneck=1")
    assert "bottleneck must be a whole number" in line(two, "--set", "source_bottleneck=wide")


def test_ray_is_optional_and_named_if_it_is_missing(sites, tmp_path, refused, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    line = refused("study", sites, "--out", tmp_path / "study", *QUICK, "--ray", "local")
    assert "pip install 'usfan[cluster]'" in line


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("127.0.0.1:1", "127.0.0.1:1: nothing answers there"),
        ("ray://127.0.0.1:1", "nothing answers there"),
        ("cluster", "write HOST:PORT, ray://HOST:PORT, auto or local"),
        ("cluster:99999", "write HOST:PORT"),
    ],
)
def test_a_wrong_address_is_said_at_once(sites, tmp_path, refused, monkeypatch, address, said):
    monkeypatch.setitem(sys.modules, "ray", types.SimpleNamespace(is_initialized=lambda: False))
    assert said in refused(
        "study", sites, "--out", tmp_path / "study", *QUICK, "--ray", address
    )


def test_threads_of_a_cell(sites, tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    options = ("--methods", "source-only", "--seeds", 0, "--pairs", "garden_2-front door")
    assert study(sites, tmp_path / "study", *options, "--threads", 3) == 0
    assert asked == [3, torch.get_num_threads()]
    assert yaml.safe_load((tmp_path / "study" / "config.yaml").read_text())["threads"] == 3


def test_cells_share_the_features_of_a_backbone_that_does_not_move(
    sites, tmp_path, monkeypatch
):
    """One pass of the frozen network over each domain's images, whatever the number of methods; then the files go."""
    passes = []
    build = RowCache._build

    def counted(cache, *arguments):
        if cache.dtype == torch.float32:
            passes.append(cache.count)
        build(cache, *arguments)

    monkeypatch.setattr(RowCache, "_build", counted)
    options = (
        "--backbone",
        "tf_efficientnet_lite0",
        "--source-epochs",
        1,
        "--epochs",
        1,
        *TINY,
    )
    more = ("--methods", "shot-im", "shot", "--seeds", 0, "--pairs", "garden_2-front door")
    assert usfan("study", sites, "--out", tmp_path / "study", *options, *more) == 0
    assert passes == [12, 12]
    assert not (tmp_path / "study" / "features").exists()


OWN_METHOD = """
import usfan

METHOD = usfan.Method("mine", "predictions are kept", stage={"epochs": 0})
WRONG = 3
"""


@pytest.fixture
def own_method(tmp_path, monkeypatch):
    (tmp_path / "a_study_module.py").write_text(OWN_METHOD)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield "a_study_module:METHOD"
    METHODS.pop("mine", None)
    sys.modules.pop("a_study_module", None)


def test_a_method_of_the_user_and_what_its_cells_hold(sites, own_method, tmp_path, refused):
    out = tmp_path / "study"
    options = ("--methods", "source-only", "--seeds", 0, "--pairs", "front door-garden_2")
    assert study(sites, out, *options, "--method", own_method) == 0
    rows = json.loads((out / "results.json").read_text())["rows"]
    assert [row["method"] for row in rows] == ["source-only", "mine"]
    tensors = read_tensors(out / "cells" / "mine_front door-garden_2_0.safetensors")
    images = json.loads((out / "images" / "front door-garden_2.json").read_text())
    model = SourceModel.load(out / "models" / "front door_0")
    assert images["classes"] == list(model.classes)
    prediction = model.predict(images["paths"])
    torch.testing.assert_close(tensors["probs"].float(), prediction.probs, atol=1e-3, rtol=0)
    assert tensors["predicted"].tolist() == prediction.label.tolist()
    names = [images["classes"][label] for label in images["labels"]]
    assert names == [Path(path).parent.name for path in images["paths"]]
    assert study(sites, out, *options, "--method", own_method) == 0  # it continues
    config = tmp_path / "study.yaml"
    config.write_text(yaml.safe_dump({"method": own_method}))
    line = refused("study", sites, "--out", out, *QUICK, *options, "--config", config)
    assert f"method {own_method} is code: give it on the command line" in line
    for name, reason in (("a_study_module:WRONG", "got a int"), ("METHOD", "MODULE:NAME")):
        assert reason in refused("study", sites, "--out", out, *QUICK, "--method", name)


def test_a_changed_setting_is_named(sites, tmp_path, refused):
    out = tmp_path / "study"
    options = ("--methods", "u-sfan", "--seeds", 0, "--pairs", "front door-garden_2")
    assert study(sites, out, *options) == 0
    line = refused("study", sites, "--out", out, *QUICK, *options, "--lr", 0.5)
    assert "(adapt: lr none, not 0.5)" in line
    line = refused("study", sites, "--out", out, *QUICK, *options, "--source-epochs", 2)
    assert "(source: epochs 1, not 2)" in line
