"""The ONNX graph against torch and against `predict`."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import usfan
from tiny_models import tiny_model
from usfan.data.views import test_view
from usfan.errors import UsfanError

onnxruntime = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")


@pytest.fixture(scope="module")
def pixels() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (40, 28, 28), dtype=np.uint8)


@pytest.fixture(scope="module")
def model(pixels):
    data = usfan.ImageData(pixels, labels=[0, 1, 2, 3] * 10)
    return usfan.train_source(data, backbone="digits-cnn", epochs=1, batch_size=8, bottleneck=16)


@pytest.fixture(scope="module")
def session(model, tmp_path_factory):
    from usfan.artifacts.onnx import export_onnx

    path = tmp_path_factory.mktemp("onnx") / "model.onnx"
    assert export_onnx(model, path) < 1e-4
    assert [p.name for p in path.parent.iterdir()] == ["model.onnx"]  # one file, nothing beside it
    return onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])


@pytest.mark.parametrize("count", [1, 2, 7, 40])
def test_onnxruntime_agrees_at_any_batch_size(model, session, pixels, count):
    images = test_view(torch.from_numpy(pixels[:count])[:, None], model.spec)
    found = dict(zip(("features", "logits", "certainty"), session.run(None, {"images": images.numpy()}), strict=True))
    assert [o.name for o in session.get_outputs()] == list(found)
    with torch.no_grad():
        features, logits = model.classifier.eval()(images)
    np.testing.assert_allclose(found["features"], features, rtol=0, atol=1e-4)
    np.testing.assert_allclose(found["logits"], logits, rtol=0, atol=1e-4)
    prediction = model.predict(pixels[:count])
    np.testing.assert_allclose(found["certainty"], prediction.weight, rtol=0, atol=1e-4)
    assert found["logits"].argmax(axis=1).tolist() == prediction.label.tolist()
    assert found["certainty"].shape == (count,)


def test_without_a_bias_and_other_settings(tmp_path):
    from usfan.artifacts.onnx import export_onnx

    model = tiny_model("lenet", head_bias=False)
    model.temperature, model.samples = 1.0, 33
    path = tmp_path / "new" / "model.onnx"
    export_onnx(model, path)
    pixels = torch.randint(256, (5, 1, 28, 28), dtype=torch.uint8)
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    certainty = session.run(["certainty"], {"images": test_view(pixels, model.spec).numpy()})[0]
    np.testing.assert_allclose(certainty, model.predict(pixels).weight, rtol=0, atol=1e-4)


def test_a_package_that_is_not_installed(model, tmp_path, monkeypatch):
    from usfan.artifacts.onnx import export_onnx

    monkeypatch.setitem(__import__("sys").modules, "onnxruntime", None)
    with pytest.raises(UsfanError, match=r"export needs onnxruntime: install usfan\[onnx\]"):
        export_onnx(model, tmp_path / "model.onnx")
    assert not list(tmp_path.iterdir())
