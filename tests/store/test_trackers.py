"""Runs in experiment trackers: MLflow against a local file store, Weights & Biases against a stand-in of its client."""

from __future__ import annotations

import json
import math
import shutil
import sys
import types
from pathlib import Path

import numpy as np
import pandas
import pytest
import torch
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import usfan
from small_runs import TINY, adapt_tiny, class_folder, train_tiny
from small_runs import usfan as command
from usfan.errors import ConfigError
from usfan.store.run_folder import RunFolder
from usfan.store.trackers import TensorBoardCurves, flat_numbers


@pytest.fixture(scope="module")
def studio(tmp_path_factory):
    return class_folder(tmp_path_factory.mktemp("data") / "studio", images=6)


@pytest.fixture(scope="module")
def source(studio, tmp_path_factory):
    return train_tiny(studio, tmp_path_factory.mktemp("runs") / "source")


@pytest.fixture
def store(tmp_path, monkeypatch):
    """MLflow's client with a folder of files as its store."""
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    return mlflow.MlflowClient()


def runs_of(store, name: str = "usfan"):
    experiment = store.get_experiment_by_name(name)
    return store.search_runs([experiment.experiment_id])


def test_a_run_in_mlflow_and_its_model_as_a_pyfunc(store, source, studio, tmp_path):
    run = adapt_tiny(source, studio, tmp_path / "run", "--log", "mlflow", "--guard", "off")
    (record,) = runs_of(store)
    assert record.info.status == "FINISHED"
    assert record.info.run_name == "run"
    settings = yaml.safe_load((run / "config.yaml").read_text())
    assert record.data.params["epochs"] == "2"
    assert record.data.params.keys() == settings.keys()
    assert "log" not in settings
    losses = store.get_metric_history(record.info.run_id, "adapt/loss")
    assert [point.step for point in losses] == [1, 2]
    metrics = json.loads((run / "metrics.json").read_text())
    assert record.data.metrics["after/accuracy"] == metrics["after"]["accuracy"]
    artifacts = {item.path for item in store.list_artifacts(record.info.run_id)}
    assert artifacts == {"report.html", "metrics.json", "model"}
    assert list(run.glob("events.out.tfevents.*"))  # TensorBoard's curves are there too

    import mlflow

    model = mlflow.pyfunc.load_model(f"runs:/{record.info.run_id}/model")
    paths = [str(path) for path in sorted(studio.rglob("*.png"))]
    table = model.predict(pandas.DataFrame({"path": paths}))
    expected = usfan.SourceModel.load(run).predict(paths)
    assert table["path"].tolist() == paths
    assert table["label"].tolist() == expected.names
    torch.testing.assert_close(
        torch.tensor(table["weight"].tolist()), expected.weight, atol=1e-6, rtol=0
    )
    assert not list((tmp_path / "mlruns").rglob("*.pkl"))


def test_training_in_mlflow_and_a_run_that_fails(store, studio, tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "signs")
    train_tiny(studio, tmp_path / "good", "--log", "mlflow")
    options = {"backbone": "digits-cnn", "epochs": 2, "batch_size": 8, "log": "mlflow"}

    def interrupt(*figures: object) -> None:
        if "epoch" in figures[2]:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        usfan.train_source(studio, run=tmp_path / "bad", progress=interrupt, **options)
    names = {run.info.run_name: run for run in runs_of(store, "signs")}
    assert names["good"].info.status == "FINISHED"
    assert math.isfinite(names["good"].data.metrics["train/loss"])
    assert store.list_artifacts(names["good"].info.run_id, "model")
    assert "bad" not in names or names["bad"].info.status == "FAILED"


def test_a_resumed_run_continues_its_run_in_mlflow(store, studio, tmp_path, monkeypatch):
    options = {"backbone": "digits-cnn", "epochs": 3, "batch_size": 8, "log": "mlflow"}
    save = RunFolder.save_checkpoint

    def interrupt(self: RunFolder, *state: object) -> None:
        save(self, *state)
        raise KeyboardInterrupt

    folder = tmp_path / "run's folder"
    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "save_checkpoint", interrupt)
        with pytest.raises(KeyboardInterrupt):
            usfan.train_source(studio, run=folder, **options)
    (record,) = runs_of(store)
    assert record.info.status == "FAILED"
    usfan.train_source(studio, run=folder, resume=True, **options)
    (again,) = runs_of(store)
    assert (again.info.run_id, again.info.status) == (record.info.run_id, "FINISHED")
    steps = {point.step for point in store.get_metric_history(again.info.run_id, "train/loss")}
    assert steps == {1, 2, 3}
    shutil.rmtree(folder)  # a new run in the same place is another run
    usfan.train_source(studio, run=folder, **options)
    assert len(runs_of(store)) == 2


@pytest.mark.parametrize("address", ["file:///{}/mlruns", "sqlite:///{}/mlflow.db"])
def test_an_address_that_mlflow_refuses(address, studio, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", address.format(tmp_path))
    monkeypatch.delenv("MLFLOW_ALLOW_FILE_STORE", raising=False)
    train_tiny(studio, tmp_path / "run", "--log", "mlflow")
    said = capsys.readouterr().err
    assert "MLFLOW_TRACKING_URI must be the address of a server (http://…), or" in said
    assert "MLFLOW_ALLOW_FILE_STORE=true" in said
    assert "writes to no database" in said


class FakeRun:
    """What is called of a run of Weights & Biases."""

    def __init__(self) -> None:
        self.logged: list[tuple[dict, int]] = []
        self.summary: dict[str, float] = {}
        self.artifacts: list[FakeArtifact] = []
        self.codes: list[int] = []

    def log(self, values: dict, step: int) -> None:
        self.logged.append((values, step))

    def log_artifact(self, artifact: FakeArtifact) -> None:
        self.artifacts.append(artifact)

    def finish(self, exit_code: int) -> None:
        self.codes.append(exit_code)


class FakeArtifact:
    def __init__(self, name: str, type: str) -> None:
        self.name = name
        self.files: set[str] = set()

    def add_file(self, path: str) -> None:
        self.files.add(Path(path).name)

    def add_dir(self, path: str, name: str) -> None:
        self.files |= {f"{name}/{file.name}" for file in Path(path).iterdir()}


@pytest.fixture
def wandb(monkeypatch):
    """A stand-in of the package; its run, and what `init` was called with."""
    module = types.ModuleType("wandb")
    module.__spec__ = types.SimpleNamespace(name="wandb")
    module.run = FakeRun()
    module.Histogram = lambda values: ("histogram", len(values))
    module.Artifact = FakeArtifact

    def init(**settings: object) -> FakeRun:
        module.settings = settings
        return module.run

    module.init = init
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


def test_a_run_in_weights_and_biases(wandb, source, studio, tmp_path):
    run = adapt_tiny(source, studio, tmp_path / "run", "--log", "wandb", "--guard", "off")
    assert (wandb.settings["project"], wandb.settings["name"]) == ("usfan", "run")
    assert wandb.settings["config"]["epochs"] == 2
    steps = [step for values, step in wandb.run.logged if "adapt/loss" in values]
    assert steps == [1, 2]
    assert any("adapt/weights" in values for values, _ in wandb.run.logged)
    metrics = json.loads((run / "metrics.json").read_text())
    assert wandb.run.summary["after/accuracy"] == metrics["after"]["accuracy"]
    (artifact,) = wandb.run.artifacts
    assert {"report.html", "metrics.json", "model/config.json"} <= artifact.files
    assert "model/samples.safetensors" not in artifact.files
    assert wandb.run.codes == [0]


def test_an_evaluation_has_no_model(wandb, source, studio, tmp_path):
    out = tmp_path / "figures"
    assert command("evaluate", source, studio, "--out", out, "--log", "wandb", *TINY) == 0
    accuracy = json.loads((out / "metrics.json").read_text())["accuracy"]
    assert wandb.run.summary["accuracy"] == accuracy
    (artifact,) = wandb.run.artifacts
    assert artifact.files == {"report.html", "metrics.json"}


def test_a_tracker_that_fails_does_not_end_the_run(wandb, source, studio, tmp_path, capsys):
    def fail(*_: object, **__: object) -> None:
        raise ConnectionError("the server is gone\nand more")

    wandb.run.log = fail
    run = adapt_tiny(source, studio, tmp_path / "run", "--log", "wandb")
    assert (run / "metrics.json").is_file()
    said = f"wandb records no more of {run}: the server is gone\n"
    assert capsys.readouterr().err.count(said) == 1
    assert wandb.run.codes == [1]


def test_only_the_user_names_a_tracker(source, studio, tmp_path, refused, monkeypatch):
    config = tmp_path / "settings.yaml"
    config.write_text("log: mlflow\n")
    run = ("adapt", source, studio, "--out", tmp_path / "run", *TINY)
    assert "log sends figures to another program" in refused(*run, "--config", config)
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "--log wandb: pip install wandb" in refused(*run, "--log", "wandb")
    assert "--log mlflow: pip install 'usfan[mlflow]'" in refused(*run, "--log", "mlflow")
    assert "which a private run leaves out" in refused(*run, "--private", "--log", "mlflow")
    assert "log must be one of" in refused(*run, "--log", "neptune")
    assert not (tmp_path / "run").exists()
    with pytest.raises(ConfigError, match=r'log="wandb" records a run folder: give one, run='):
        usfan.adapt(source, studio, log="wandb")
    assert command("adapt", "--help") == 0


def test_curves_do_not_follow_a_link_that_is_laid_while_they_are_written(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("mine")
    run = tmp_path / "run"
    run.mkdir()
    curves = TensorBoardCurves(run, {})
    curves.scalars({"loss": 0.5}, 1)
    (events,) = run.iterdir()
    written = events.rename(tmp_path / "events.tfevents")
    events.symlink_to(victim)
    curves.scalars({"loss": 0.25}, 2)
    curves.histogram("weights", np.array([0.1, 0.9]), 2)
    curves.close(failed=False)
    assert victim.read_text() == "mine"
    accumulator = EventAccumulator(str(written))
    accumulator.Reload()
    assert [(point.step, point.value) for point in accumulator.Scalars("loss")] == [
        (1, 0.5),
        (2, 0.25),
    ]
    assert accumulator.Histograms("weights")[0].histogram_value.num == 2


def test_numbers_of_nested_metrics():
    table = {"a": 1, "b": {"c": 2.5, "d": True, "e": None, "per_class_accuracy": {"x/..": 1}}}
    assert flat_numbers(table) == {"a": 1.0, "b/c": 2.5}
