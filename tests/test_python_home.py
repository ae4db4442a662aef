"""Python as a first-class home: paths wherever models or data are, short reprs, run folders, reports, figures."""

from __future__ import annotations

import csv
import json
import shutil

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from PIL import Image
from torch import nn

import usfan
from tiny_models import tiny_model
from usfan.config import RuntimeConfig
from usfan.data.cache import open_store
from usfan.engine.runtime import Runtime, start_runtime
from usfan.errors import ArtifactError, ConfigError, DataError
from usfan.metrics.changes import describe_changes

NAMES = ["a", "b|c", "<d>"]
QUICK = {"epochs": 2, "batch_size": 8, "guard": False, "progress": False}


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    root = tmp_path_factory.mktemp("photos")
    rng = np.random.default_rng(0)
    for k, name in enumerate(NAMES):
        (root / name).mkdir()
        for i in range(10):
            pixels = rng.integers(0, 80 + 80 * k, (30, 30), dtype=np.uint8)
            Image.fromarray(pixels).save(root / name / f"{i}.png")
    return root


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_model("digits-cnn").save(tmp_path_factory.mktemp("runs") / "source")


@pytest.fixture(scope="module")
def target(folder, photos):
    return usfan.adapt(folder, photos, lr=0.1, **QUICK)


def test_paths_wherever_models_or_data_are(folder, photos, target):
    assert len(target.passes.after) == 30
    figures = usfan.evaluate(str(folder), str(photos), device="cpu", progress=False)
    assert figures == usfan.evaluate(
        usfan.SourceModel.load(folder), usfan.ImageData(photos), progress=False
    )
    assert (
        usfan.evaluate(target, photos, runtime={"device": "cpu", "workers": 0}, progress=False)[
            "count"
        ]
        == 30
    )


@pytest.mark.parametrize(
    ("call", "error", "said"),
    [
        (lambda f, p: usfan.adapt("runs/nowhere/x", p), ArtifactError, "no such model folder"),
        (
            lambda f, p: usfan.adapt(nn.Linear(3, 3), p),
            ConfigError,
            r"not a Linear; usfan.attach_posterior",
        ),
        (
            lambda f, p: usfan.adapt(3, p),
            ConfigError,
            "expected a model or the folder of one, not a int",
        ),
        (
            lambda f, p: usfan.adapt(f, p, runtime=3),
            ConfigError,
            "runtime must be a dict such as",
        ),
        (
            lambda f, p: usfan.adapt(f, p, runtime={"devise": "cpu"}),
            ConfigError,
            "did you mean device",
        ),
        (
            lambda f, p: usfan.adapt(f, p, device="tpu"),
            ConfigError,
            "device must be one of auto, cpu, cuda",
        ),
        (
            lambda f, p: usfan.adapt(f, p, run=7),
            ConfigError,
            "run must be the path of a folder; got a int",
        ),
        (
            lambda f, p: usfan.adapt(f, p, progress="x"),
            ConfigError,
            "progress must be True, False or a function",
        ),
        (
            lambda f, p: usfan.adapt(f, p / "nowhere"),
            DataError,
            "no such folder, image or list file",
        ),
    ],
)
def test_misuse_is_one_clear_line(folder, photos, call, error, said):
    with pytest.raises(error, match=said):
        call(folder, photos)


def test_a_runtime_as_a_caller_gives_it():
    for given in (
        None,
        {},
        {"device": "cpu"},
        RuntimeConfig(device="cpu"),
        start_runtime(device="cpu"),
    ):
        assert isinstance(start_runtime(given), Runtime)
    assert start_runtime({"workers": 3}, torch.device("cpu")).workers == 3
    with pytest.raises(ConfigError, match="exclude each other"):
        start_runtime(start_runtime(device="cpu"), "cuda")


def test_a_mistyped_folder_is_not_looked_up_on_the_hub(tmp_path, monkeypatch):
    import huggingface_hub

    def asked(*_, **__):
        raise OSError("no network")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", asked)
    tiny_model().save(tmp_path / "runs" / "amazon")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        ArtifactError, match=r"^runs/amazn: no such model folder; did you mean runs/amazon\?"
    ) as raised:
        usfan.SourceModel.load("runs/amazn")
    assert "not looked up on the Hugging Face Hub" in str(raised.value)
    with pytest.raises(
        ArtifactError,
        match=r"somebody/model: no such model folder here, and the Hugging Face Hub .*no net",
    ):
        usfan.SourceModel.load("somebody/model")
    with pytest.raises(ArtifactError, match=r"did you mean .*runs/amazon\?"):
        usfan.SourceModel.load(str(tmp_path / "runs" / "amazn"))


def test_short_reprs(target):
    source = tiny_model()
    assert repr(source) == (
        "SourceModel(network digits-cnn; classes 3: a, b|c, <d>; input 1×28×28; posterior of 60 images, "
        f"prior precision {source.posterior.prior_precision:.3g})"
    )
    assert repr(target).startswith("AdaptedModel(method u-sfan; verdict ")
    assert len(repr(target)) < 300
    assert "&lt;d&gt;" in target._repr_html_()
    assert "<d>" not in target._repr_html_()
    assert repr(target.passes) == "Passes(30 images before and after)"
    prediction = target.predict(np.zeros((5, 28, 28), np.uint8))
    assert repr(prediction).startswith("Prediction(5 images: 5 ")
    assert "more</p>" not in prediction._repr_html_()
    many = target.predict(np.zeros((25, 28, 28), np.uint8))
    assert many._repr_html_().endswith("<p>and 5 more</p>")
    page = usfan.questions(target, 3)._repr_html_()
    assert page.count("<tr>") == 4
    assert "<d>" not in page


def test_a_run_folder_by_its_name(folder, photos, tmp_path):
    run = tmp_path / "run"
    target = usfan.adapt(folder, photos, run=str(run), **QUICK)
    for name in (
        "config.yaml",
        "metrics.json",
        "log.jsonl",
        "samples.safetensors",
        "model.safetensors",
    ):
        assert (run / name).is_file(), name
    metrics = json.loads((run / "metrics.json").read_text())
    assert "accuracy" in metrics["after"]
    with open(run / "changes.csv", newline="") as file:
        assert len(list(csv.DictReader(file))) == metrics["changed"]
    again = usfan.adapt(
        folder, photos, run=run, resume=True, **QUICK
    )  # it is finished: the model is read
    assert torch.equal(again.predict(photos).probs, target.predict(photos).probs)
    with pytest.raises(ConfigError, match="already holds a run"):
        usfan.adapt(folder, photos, run=run, **QUICK)
    trained = usfan.train_source(
        photos,
        run=tmp_path / "source",
        backbone="digits-cnn",
        bottleneck=8,
        epochs=1,
        batch_size=8,
        progress=False,
    )
    assert usfan.SourceModel.load(tmp_path / "source").classes == trained.classes
    trained.report(tmp_path / "source.html", photos)
    assert "accuracy" in (tmp_path / "source.html").read_text()
    assert usfan.report_runs([run]) == run / "report.html"
    assert usfan.report_runs([run], tmp_path / "page.html").read_text().startswith("<!")


def test_export(folder, tmp_path):
    pytest.importorskip("onnxruntime")
    assert usfan.export(folder, tmp_path / "model.onnx") < 1e-3
    assert (tmp_path / "model.onnx").is_file()


def test_a_study(photos, tmp_path):
    root = tmp_path / "domains"
    for name in ("one", "two"):
        shutil.copytree(photos, root / name)
    out = usfan.run_study(
        root,
        methods=["source-only", "shot-im"],
        seeds=[0],
        pairs=["one-two"],
        out=tmp_path / "study",
        device="cpu",
        backbone="digits-cnn",
        epochs=1,
        batch_size=8,
    )
    assert "shot-im" in (out / "table.md").read_text()


def test_a_run_folder_needs_images(folder, photos, tmp_path):
    source = usfan.SourceModel.load(folder)
    store = open_store(usfan.ImageData(photos), size=source.spec.resize, channels=1)
    with pytest.raises(ConfigError, match="a run folder needs the images themselves"):
        usfan.adapt(folder, store, run=tmp_path / "run", method="u-sfan", **QUICK)
    assert not (tmp_path / "run").exists()


def test_a_report_of_what_adapt_returned(target, photos, tmp_path):
    page = target.report(tmp_path / "page.html").read_text()
    for part in (
        "Entropy before adaptation",
        "Features after adaptation",
        "Most certain",
        "<img",
        "Whole loss",
    ):
        assert part in page, part
    assert "Reliability" not in page  # no labels
    assert "is missing" not in page
    labelled = target.report(tmp_path / "labelled.html", photos).read_text()
    assert "Reliability after adaptation" in labelled
    with pytest.raises(
        DataError, match=r"holds no images to report on: give some, report\(FILE, data=…\)"
    ):
        tiny_model().report(tmp_path / "x.html")
    with pytest.raises(ConfigError, match="is a folder"):
        target.report(tmp_path)


def test_figures(target, photos, folder, tmp_path):
    figures = usfan.figures
    for make in (
        figures.reliability,
        figures.entropy_densities,
        figures.feature_map,
        figures.changed_predictions,
    ):
        figure = make(target, photos)
        assert isinstance(figure, Figure)
        assert figure._repr_png_().startswith(b"\x89PNG")
        figure.savefig(tmp_path / "figure.png")
    legends = [
        text.get_text()
        for axes in figures.reliability(target, photos).axes
        for text in axes.get_legend().texts
    ]
    assert all("ECE" in text for text in legends)
    assert len(legends) == 4
    with pytest.raises(DataError, match="needs labels"):
        figures.reliability(target)
    usfan.adapt(folder, photos, run=tmp_path / "run", **QUICK)
    assert len(figures.entropy_densities(tmp_path / "run").axes) == 2
    with pytest.raises(DataError, match=r"usfan\.adapt returned"):
        figures.feature_map(tiny_model())


def test_what_changed(target, photos):
    changed = usfan.changed_images(target)
    before, after = (p.logits.argmax(1) for p in (target.passes.before, target.passes.after))
    assert len(changed) == int((before != after).sum()) > 0
    first = changed[0]
    position = target.passes.images.paths.index(first["path"])
    assert (first["before"], first["after"]) == (
        NAMES[before[position]],
        NAMES[after[position]],
    )
    assert [r["certainty_after"] for r in changed] == sorted(
        (r["certainty_after"] for r in changed), reverse=True
    )
    assert describe_changes(target).startswith(f"{len(changed)} of 30 predictions changed")
    asked = usfan.questions(target)
    names = [question for question in asked if question.kind == "name"]
    judged = {question.image for question in asked if question.kind == "judge"}
    assert len(names) == 3  # one per class
    assert all(sorted(question.candidates) == sorted(NAMES) for question in asked)
    assert judged <= set(target.passes.images.paths)
    assert len(usfan.questions(target, 5)) == 5
    with pytest.raises(DataError, match="does not hold what it saw"):
        usfan.changed_images(tiny_model())
