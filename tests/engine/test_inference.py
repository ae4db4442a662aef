"""The engine that computes features: torch, or OpenVINO if it is installed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from usfan.data.store import Store
from usfan.data.views import InputSpec
from usfan.engine.features import features_of
from usfan.engine.inference import BOUNDS, BackboneAlone, difference, engines
from usfan.engine.openvino_pass import conversion_key, is_installed
from usfan.engine.runtime import Runtime, start_runtime
from usfan.errors import ConfigError
from usfan.models.classifier import Classifier

SPEC = InputSpec(3, 72, 80)
CPU = Runtime(torch.device("cpu"), engine="auto")


def network() -> nn.Sequential:
    torch.manual_seed(0)
    pool = nn.AdaptiveAvgPool2d(1)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, 2), nn.BatchNorm2d(8), nn.ReLU(), pool, nn.Flatten()
    )


def store(count: int) -> Store:
    generator = torch.Generator().manual_seed(1)
    pictures = torch.randint(256, (count, 3, 80, 80), dtype=torch.uint8, generator=generator)
    return Store(pictures, torch.arange(count), key="pictures")


def test_short_passes_and_small_pictures_stay_with_torch() -> None:
    assert engines(SPEC, CPU, 20) == ("torch",)
    assert engines(InputSpec(3, 32, 32), CPU, 10_000) == ("torch",)
    assert engines(SPEC, replace(CPU, engine="torch"), 10_000) == ("torch",)


def test_features_that_differ_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    features = torch.eye(2) * torch.tensor([1.0, 2.0])
    classifier = Classifier(nn.Identity(), 2, 2, bottleneck=0, head_norm=False)
    with torch.no_grad():
        classifier.head.weight.copy_(torch.eye(2))
    other = features.flip(0)
    assert difference(classifier, features, features, "32") == ""
    assert "features" in difference(
        BackboneAlone(nn.Identity()), features, features * 1.01, "32"
    )
    assert "features" in difference(classifier, features, features * torch.nan, "32")
    monkeypatch.setitem(BOUNDS, "32", (2.0, 1e-3))
    assert "probabilities" in difference(classifier, features, other, "32")
    monkeypatch.setitem(BOUNDS, "32", (2.0, 1.0))
    assert "labels of 2" in difference(classifier, features, other, "32")


@pytest.mark.skipif(is_installed(), reason="OpenVINO is installed")
def test_openvino_that_is_not_installed() -> None:
    with pytest.raises(ConfigError, match=r"usfan\[fast\]"):
        features_of(BackboneAlone(network()), store(20), SPEC, replace(CPU, engine="openvino"))


@pytest.mark.skipif(not is_installed(), reason="needs usfan[fast]")
def test_openvino_gives_the_features_of_torch(tmp_path) -> None:
    runtime = start_runtime({"device": "cpu", "engine": "openvino", "precision": "32"})
    runtime = replace(runtime, cache=str(tmp_path))
    module = network()
    expected = features_of(
        BackboneAlone(module), store(40), SPEC, replace(runtime, engine="torch")
    )
    values = features_of(BackboneAlone(module), store(40), SPEC, runtime).values
    torch.testing.assert_close(values, expected.values, rtol=1e-4, atol=1e-4)
    assert not torch.equal(values, expected.values)
    assert len(list(tmp_path.glob("*.rows"))) == 2
    assert "openvino_telemetry" not in sys.modules
    again = features_of(BackboneAlone(module), store(40), SPEC, runtime).values
    assert torch.equal(values, again)


class Activated(nn.Module):
    """Its layers do not tell which function follows them."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layers = network()
        self.function = function

    def forward(self, images: Tensor) -> Tensor:
        return self.function(self.layers(images))


def test_networks_that_differ_in_forward_alone_share_no_conversion() -> None:
    one = Activated(torch.relu).eval()
    other = Activated(torch.sin).eval()
    assert str(one) == str(other)
    key = conversion_key(one, SPEC)
    assert key == conversion_key(Activated(torch.relu).eval(), SPEC)
    assert key != conversion_key(other, SPEC)
    assert key != conversion_key(one, replace(SPEC, size=64))
    one.forward = other.forward
    assert key != conversion_key(one, SPEC)


class Strange(nn.Module):
    """Depends on the values of its input: a trace of it is wrong."""

    def forward(self, images: Tensor) -> Tensor:
        scale = float(images.mean()) + 2
        return images.mean(dim=(2, 3)) * scale


@pytest.mark.skipif(not is_installed(), reason="needs usfan[fast]")
def test_a_network_that_openvino_computes_wrongly_stays_with_torch(capsys) -> None:
    values = []
    for engine in ("torch", "openvino"):
        runtime = replace(CPU, engine=engine)
        images = replace(store(20), key=None)
        values.append(features_of(BackboneAlone(Strange()), images, SPEC, runtime).values)
    assert torch.equal(*values)
    assert "is not used" in capsys.readouterr().err
