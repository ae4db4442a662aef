"""What leaves the source side: weights and factors, and with --private nothing else, in any file of the run folder."""

import json

import pytest
import torch
import yaml

from small_runs import TINY, adapt_tiny, class_folder, train_tiny, usfan
from tiny_models import tiny_model
from usfan.store.model import SourceModel
from usfan.uncertainty.kronecker import KroneckerPosterior

MODEL = {"config.json", "model.safetensors", "posterior.safetensors"}
PRIVATE = MODEL | {".lock", "config.yaml", "log.jsonl", "metrics.json"}
TELLING = (
    "secret-place",
    "validation_accuracy",
    "log_evidence",
    "best_epoch",
    "seconds",
    '"seed"',
    "seed: 0",
)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return class_folder(tmp_path_factory.mktemp("secret-place"), images=8)


def contents(folder):
    return {p.name: p.read_bytes() for p in folder.iterdir() if p.is_file()}


def posterior(source, data, out, *more):
    assert usfan("posterior", source, data, "--out", out, *TINY, *more) == 0
    return out


def test_different_data_with_the_same_factors_leave_the_same_folder(tmp_path):
    """Features Z and −Z have the same second moments; the folder cannot tell which of the two was seen."""
    model = tiny_model(head_bias=False)
    weight, _ = model.classifier.head_tensors()
    seen = torch.randint(-9, 9, (40, 8), generator=torch.Generator().manual_seed(0)).float()
    folders = []
    for name, features in (("seen", seen), ("mirrored", -seen.flip(0))):
        model.posterior = KroneckerPosterior.fit(features, torch.zeros(40, 3), weight)
        folders.append(contents(model.save(tmp_path / name, private=True)))
    assert folders[0] == folders[1]
    model.posterior = KroneckerPosterior.fit(2 * seen, torch.zeros(40, 3), weight)
    assert (
        contents(model.save(tmp_path / "other", private=True)) != folders[0]
    )  # other factors do show


def test_a_private_training_leaves_nothing_else(data, tmp_path):
    run = train_tiny(data, tmp_path / "run", "--private")
    files = contents(run)
    assert (
        set(files) == PRIVATE
    )  # no curves: the names of TensorBoard's files hold that of the machine
    for telling in TELLING:
        assert not [name for name, value in files.items() if telling.encode() in value], telling
    assert set(json.loads(files["metrics.json"])) == {"classes", "images", "skipped"}
    settings = yaml.safe_load(files["config.yaml"])
    assert settings.pop("command") == "train"
    assert set(settings.values()) == {"(withheld)"}
    open_run = train_tiny(data, tmp_path / "open")
    assert (open_run / "model.safetensors").read_bytes() == files["model.safetensors"]
    assert (
        "secret-place" in (open_run / "config.yaml").read_text()
    )  # what there was to withhold
    assert "validation_accuracy" in (open_run / "metrics.json").read_text()


def test_a_private_posterior_leaves_nothing_else(data, tmp_path):
    source = train_tiny(data, tmp_path / "source")
    run = posterior(source, data, tmp_path / "run", "--private")
    files = contents(run)
    assert set(files) == PRIVATE
    for telling in TELLING:
        assert not [name for name, value in files.items() if telling.encode() in value], telling
    assert (
        "log_evidence"
        in (posterior(source, data, tmp_path / "open") / "metrics.json").read_text()
    )
    assert SourceModel.load(run).posterior.count == 24


def test_a_private_run_can_be_called_again(data, tmp_path, capsys):
    run = train_tiny(data, tmp_path / "run", "--private")
    before = contents(run)
    train_tiny(data, run, "--private", "--resume")
    assert "finished already" in " ".join(capsys.readouterr().err.split())
    assert contents(run) == before


def test_a_private_adaptation_names_no_file(data, tmp_path):
    source = train_tiny(data, tmp_path / "source")
    run = adapt_tiny(source, data, tmp_path / "run", "--private")
    for name, value in contents(run).items():
        assert b"secret-place" not in value, name
    assert usfan("report", run) == 0  # without thumbnails: there are no paths to take them from
    page = (run / "report.html").read_text()
    assert "secret-place" not in page
    assert "galleries are left out" in page
