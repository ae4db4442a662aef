"""What a step takes of a CPU's memory is said before the first one, and a batch that may not fit is warned about."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import usfan
from usfan.data.views import InputSpec
from usfan.engine import step_memory
from usfan.engine.runtime import Runtime
from usfan.engine.step_memory import check_step_memory, kept_per_image
from usfan.models.classifier import Classifier

CPU = Runtime(torch.device("cpu"))
SPEC = InputSpec(3, 64, 64, (0.5,) * 3, (0.5,) * 3)


def network() -> Classifier:
    layers: list[nn.Module] = []
    for before, after in ((3, 16), (16, 16), (16, 32)):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU6()]
    return Classifier(
        nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten()), 32, 5, bottleneck=16
    ).train()


def peak() -> int:
    """Bytes; the highest since `clear_refs` was written."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) * 1024


def test_what_is_kept_of_an_image_is_what_a_process_takes():
    estimate = step_memory.ABOVE * kept_per_image(network(), SPEC)
    model = network()
    images = torch.randn(128, 3, 64, 64)
    model(images[:2])[1].sum().backward()
    ctypes.CDLL(None).malloc_trim(0)  # memory that earlier tests left would be taken first
    Path("/proc/self/clear_refs").write_text("5")
    before = peak()
    model(images)[1].sum().backward()
    assert 0.6 < estimate / ((peak() - before) / 128) < 1.7


def test_the_network_and_the_random_numbers_stay_as_they_are():
    model = network()
    model.backbone[0].weight.requires_grad_(False)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    state = torch.get_rng_state()
    frozen = kept_per_image(model, SPEC)
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert torch.equal(state, torch.get_rng_state())
    assert not model.backbone[0].weight.requires_grad
    assert (
        frozen == kept_per_image(network(), SPEC) > 4 * 64 * 64 * 64
    )  # three layers of activations and more


@pytest.mark.parametrize(
    ("free", "said"), [(1e12, "a step of 4096 images takes about"), (1e9, ""), (1e6, "")]
)
def test_much_is_said_and_too_much_is_warned_about(monkeypatch, capsys, caplog, free, said):
    monkeypatch.setattr(step_memory, "free_host_memory", lambda: int(free))
    check_step_memory(network(), SPEC, 4096, CPU)
    assert said in capsys.readouterr().err
    warned = [record.getMessage() for record in caplog.records]
    if said:
        assert warned == []
        return
    (line,) = warned
    fits = int(line.split("--batch-size ")[1].split(",")[0])
    each = step_memory.ABOVE * kept_per_image(network(), SPEC)
    assert line.endswith("or --tune new")
    assert fits == 2 or fits * each <= 0.8 * free < 2 * fits * each


def test_only_a_backbone_that_moves_is_measured(monkeypatch):
    asked = []
    for place in ("usfan.training.source", "usfan.adaptation.inputs"):
        monkeypatch.setattr(f"{place}.check_step_memory", lambda *given: asked.append(given[2]))
    pixels = np.random.default_rng(0).integers(0, 256, (24, 28, 28), dtype=np.uint8)
    data = usfan.ImageData(pixels, labels=[0, 1] * 12)
    settings = {"batch_size": 8, "epochs": 1, "progress": False}
    source = usfan.train_source(data, backbone="digits-cnn", bottleneck=8, **settings)
    assert asked == [8]
    usfan.adapt(source, data, "shot-im", tune="all", **settings)
    assert asked == [8, 8]
    usfan.adapt(source, data, "shot-im", tune="new", **settings)
    assert asked == [8, 8]


def test_small_pictures_are_not_measured(monkeypatch):
    monkeypatch.setattr(step_memory, "kept_per_image", lambda *_: pytest.fail("measured"))
    check_step_memory(network(), InputSpec(1, 28, 28, (0.5,), (0.5,)), 64, CPU)
