"""The ONNX graph against torch and against `predict`."""

from __future__ import annotations

import dataclasses
import json
import platform
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import usfan
from tiny_models import tiny_model
from usfan.errors import UsfanError
from usfan.store.model import AdaptedModel

onnxruntime = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")


@pytest.fixture(scope="module")
def pixels() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (40, 28, 28), dtype=np.uint8)


@pytest.fixture(scope="module")
def model(pixels):
    data = usfan.ImageData(pixels, labels=[0, 1, 2, 3] * 10)
    return usfan.train_source(
        data, backbone="digits-cnn", epochs=1, batch_size=8, bottleneck=16
    )


@pytest.fixture(scope="module")
def graph(model, tmp_path_factory):
    """The exported file."""
    from usfan.store.onnx import export_onnx

    path = tmp_path_factory.mktemp("onnx") / "model.onnx"
    assert export_onnx(model, path) < 1e-3
    assert [p.name for p in path.parent.iterdir()] == [
        "model.onnx"
    ]  # one file, nothing beside it
    return path


@pytest.fixture(scope="module")
def session(graph):
    return onnxruntime.InferenceSession(str(graph), providers=["CPUExecutionProvider"])


@pytest.mark.parametrize("count", [1, 2, 7, 40])
def test_onnxruntime_agrees_at_any_batch_size(model, session, pixels, count):
    grey = pixels[:count, ..., None]
    names = [output.name for output in session.get_outputs()]
    found = dict(zip(names, session.run(None, {"images": grey}), strict=True))
    prediction = model.predict(grey)
    np.testing.assert_allclose(found["probs"], prediction.probs, rtol=0, atol=1e-4)
    np.testing.assert_allclose(found["certainty"], prediction.weight, rtol=0, atol=1e-4)
    assert found["label"].tolist() == prediction.label.tolist()
    assert found["certainty"].shape == (count,)


def test_the_file_says_nothing_of_the_exporters_machine(graph):
    content = graph.read_bytes()
    installation = Path(usfan.__file__).resolve().parent
    packages = Path(torch.__file__).resolve().parent.parent
    for place in (installation, packages, graph.parent, Path.home(), Path.cwd()):
        assert str(place).encode() not in content
    assert b".py" not in content
    assert platform.node().encode() not in content or len(platform.node()) < 4


def test_without_a_bias_and_other_settings(tmp_path):
    from usfan.store.onnx import export_onnx

    model = tiny_model("lenet", head_bias=False)
    model.spec = dataclasses.replace(model.spec, resampling="bicubic-crop")
    model.temperature = 1.0
    model.samples = 33
    path = tmp_path / "new" / "model.onnx"
    export_onnx(model, path)
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    photographs = noise(5, 1)[..., :1]
    certainty = session.run(["certainty"], {"images": photographs})[0]
    np.testing.assert_allclose(certainty, model.predict(photographs).weight, rtol=0, atol=1e-3)


ALONE = """
import json, sys
import numpy as np, onnxruntime
session = onnxruntime.InferenceSession(sys.argv[1], providers=["CPUExecutionProvider"])
meta = session.get_modelmeta().custom_metadata_map
names = json.loads(meta["classes"])
channels = int(json.loads(meta["input"])["layout"].split(",")[0][-1])
pixels = np.random.default_rng(3).integers(0, 256, (2, 37, 61, channels), dtype=np.uint8)
found = {o.name: v for o, v in zip(session.get_outputs(), session.run(None, {"images": pixels}))}
told = {"meta": meta, "names": [names[k] for k in found["label"]], **{k: v.tolist() for k, v in found.items()}}
print(json.dumps({**told, "loaded": sorted({"usfan", "torch"} & set(sys.modules))}))
"""


def noise(count: int, seed: int) -> np.ndarray:
    """Of different contrast, so that a network without training tells the images apart."""
    pixels = np.random.default_rng(seed).integers(0, 256, (count, 37, 61, 3), dtype=np.uint8)
    return pixels // np.arange(1, count + 1, dtype=np.uint8)[:, None, None, None]


def unsure(model, seed: int = 0) -> AdaptedModel:
    """The same as an adapted model that calls about half of all noise unknown."""
    from usfan.maths.unknown import UnknownRule

    (_, outputs), *_ = model.predict_batches(usfan.ImageData(noise(40, seed)))
    rule = UnknownRule("mutual-information", float(outputs.mutual_information.median()))
    parts = (model.classifier, model.posterior, model.classes, model.spec, model.architecture)
    return AdaptedModel(*parts, unknown_rule=rule)


@pytest.mark.parametrize("backbone", ["dtn", "lenet"])
def test_photographs_of_any_size_without_this_package(backbone, tmp_path):
    """Colour and grey networks; all that `predict` does is in the graph, and the file says what it takes."""
    from usfan.store.onnx import export_onnx

    model = unsure(tiny_model(backbone))
    path = tmp_path / "model.onnx"
    assert export_onnx(model, path) < 1e-3
    ran = subprocess.run(
        [sys.executable, "-c", ALONE, str(path)], capture_output=True, text=True, check=True
    )
    found = json.loads(ran.stdout)
    assert found["loaded"] == []
    meta = found["meta"]
    assert json.loads(meta["classes"]) == ["a", "b|c", "<d>"]
    channels = model.spec.channels
    assert json.loads(meta["input"])["layout"].startswith(f"N×H×W×{channels}")
    assert json.loads(meta["input"])["mean"] == list(model.spec.mean)
    assert set(json.loads(meta["outputs"])) == {
        "label",
        "probs",
        "posterior_probs",
        "certainty",
        "unknown",
    }
    assert meta["usfan_version"] == usfan.__version__
    assert len(meta["model_sha256"]) == 64
    pixels = np.random.default_rng(3).integers(0, 256, (2, 37, 61, channels), dtype=np.uint8)
    expected = model.predict(pixels)
    assert found["names"] == expected.names
    np.testing.assert_allclose(found["probs"], expected.probs, rtol=0, atol=1e-3)
    np.testing.assert_allclose(found["certainty"], expected.weight, rtol=0, atol=1e-3)
    assert len(found["posterior_probs"][0]) == 3
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    images = noise(30, 5)[..., :channels]
    flags = session.run(["unknown"], {"images": images})[0]
    assert flags.any()
    assert not flags.all()
    assert (
        flags == model.predict(images).unknown.numpy()
    ).mean() >= 0.95  # rounding may decide one of 30


def test_a_graph_that_disagrees_is_not_written(tmp_path, monkeypatch):
    from usfan.store import onnx

    model = tiny_model("lenet")
    monkeypatch.setattr(
        onnx, "resized_to", lambda pixels, size, _: pixels[..., : size[0], : size[1]] * 0.5
    )
    with pytest.raises(RuntimeError, match="onnxruntime and predict differ by"):
        onnx.export_onnx(model, tmp_path / "model.onnx")
    assert not list(tmp_path.iterdir())


def test_the_hash_is_of_the_weights_and_the_names():
    from usfan.store.onnx import model_hash

    model = tiny_model("lenet")
    first = model_hash(model)
    assert model_hash(tiny_model("lenet")) == first
    model.classes = ("a", "b", "c")
    assert model_hash(model) != first
    assert model_hash(tiny_model("lenet", seed=1)) != first


@pytest.mark.parametrize("resampling", ["bilinear", "bicubic", "bilinear-crop", "bicubic-crop"])
@pytest.mark.parametrize("size", [(300, 400), (57, 33), (64, 64), (1, 500), (500, 1)])
def test_resizing_is_pillows(size, resampling):
    from PIL import Image

    from usfan.data.decoding.decode import squared
    from usfan.data.views import InputSpec, centre
    from usfan.store.onnx import resized

    pixels = np.random.default_rng(0).integers(0, 256, (*size, 3), dtype=np.uint8)
    planes = torch.from_numpy(pixels).permute(2, 0, 1)[None].float()
    expected = np.asarray(squared(Image.fromarray(pixels), 64, resampling), dtype=int)
    result = centre(resized(planes, InputSpec(size=64, resize=64, resampling=resampling)), 64)
    result = result[0].permute(1, 2, 0).numpy().astype(int)
    assert np.abs(result - expected).max() <= 1
    assert (result != expected).mean() < 0.01


def test_a_package_that_is_not_installed(model, tmp_path, monkeypatch):
    from usfan.store.onnx import export_onnx

    monkeypatch.setitem(__import__("sys").modules, "onnxruntime", None)
    with pytest.raises(UsfanError, match=r"export needs onnxruntime: install usfan\[onnx\]"):
        export_onnx(model, tmp_path / "model.onnx")
    assert not list(tmp_path.iterdir())
