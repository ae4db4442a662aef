"""A new uncertainty is one module and one row: train, adapt, save, load and export take it without another change."""

from __future__ import annotations

import pytest
import torch
from scaled_point import ScaledPoint

import usfan
from small_runs import TINY, adapt_tiny, class_folder, train_tiny
from small_runs import usfan as command
from usfan.config import AdaptConfig, TrainConfig
from usfan.errors import ConfigError
from usfan.uncertainty.registry import UNCERTAINTIES, find_uncertainty, uncertainties_by_kind


@pytest.fixture(scope="module", autouse=True)
def row():
    """The row, and the choices of the configs, which read the table when they are imported."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(UNCERTAINTIES, "scaled", "scaled_point:ScaledPoint")
        for config in (TrainConfig, AdaptConfig):
            field = config.__dataclass_fields__["uncertainty"]
            choices = (*field.metadata["choices"], "scaled")
            patch.setattr(field, "metadata", {**field.metadata, "choices": choices})
        yield


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    root = tmp_path_factory.mktemp("scaled")
    return class_folder(root / "source"), class_folder(root / "target", domain=1)


@pytest.fixture(scope="module")
def model(data, tmp_path_factory):
    trained = usfan.train_source(
        data[0],
        backbone="digits-cnn",
        epochs=2,
        uncertainty="scaled",
        device="cpu",
        progress=False,
    )
    return trained.save(tmp_path_factory.mktemp("scaled") / "model")


def test_trained_saved_and_loaded(model, tmp_path):
    loaded = usfan.SourceModel.load(model)
    assert isinstance(loaded.uncertainty, ScaledPoint)
    assert loaded.uncertainty.scale != 1
    assert (model / "scaled-point.safetensors").is_file()
    images = torch.randint(256, (5, 1, 28, 28), dtype=torch.uint8)
    again = usfan.SourceModel.load(loaded.save(tmp_path / "again"))
    assert torch.equal(loaded.predict(images).weight, again.predict(images).weight)
    point = loaded.with_uncertainty("point").predict(images)
    assert not torch.allclose(loaded.predict(images).weight, point.weight)


def test_adapted(model, data, tmp_path):
    out = adapt_tiny(model, data[1], tmp_path / "run", "--method", "u-sfan")
    adapted = usfan.SourceModel.load(out)
    assert adapted.uncertainty.kind == "scaled-point"
    assert (
        adapted.uncertainty.settings() == usfan.SourceModel.load(model).uncertainty.settings()
    )


def test_draws_in_a_graph(model, tmp_path):
    from usfan.store.onnx import export_onnx

    loaded = usfan.SourceModel.load(model)
    assert export_onnx(loaded, tmp_path / "model.onnx") < 1e-3


def test_checked_before_it_is_read(model, data, tmp_path, capsys):
    plain = train_tiny(data[0], tmp_path / "plain")
    out = ("--out", tmp_path / "run", *TINY)
    capsys.readouterr()
    with pytest.raises(ConfigError, match="no scaled point estimate"):
        usfan.SourceModel.load(plain).with_uncertainty("scaled")
    assert (
        command("posterior", plain, data[0] / "class-0", "--uncertainty", "scaled", *out) == 2
    )
    assert "uncertainty scaled is trained on labels" in capsys.readouterr().err
    text = (model / "config.json").read_text()
    (model / "config.json").write_text(text.replace('"scale"', '"scales"'))
    with pytest.raises(
        usfan.ArtifactError, match=r"uncertainty.scale must be a number from 0.1"
    ):
        usfan.SourceModel.load(model)


def test_rows():
    kinds = {"kronecker", "point", "mc-dropout", "ensemble", "scaled-point"}
    assert uncertainties_by_kind().keys() == kinds
    with pytest.raises(ConfigError, match=r"did you mean ensemble\?"):
        find_uncertainty("ensembel")
