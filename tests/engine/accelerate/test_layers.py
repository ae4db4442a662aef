"""Rewritten layers go in and out through one door, and all of them come out again."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from usfan.engine.accelerate import layers
from usfan.engine.accelerate.fused_norm import FusedNorm, fused_kind
from usfan.engine.accelerate.stem import block_stems
from usfan.engine.runtime import Runtime
from usfan.models.classifier import Classifier

CPU = Runtime(torch.device("cpu"))


def small_classifier() -> Classifier:
    backbone = nn.Sequential(
        nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    )
    return Classifier(backbone, 8, 3, bottleneck=4)


@pytest.mark.parametrize(
    ("captured", "compiled", "given"),
    [(True, False, ["norms"]), (True, True, ["stems"]), (False, False, [])],
)
def test_layers_by_what_so_many_steps_pay_for(
    monkeypatch, captured: bool, compiled: bool, given: list[str]
) -> None:
    calls: list[str] = []
    monkeypatch.setattr(layers, "worth_capturing", lambda *_: captured)
    monkeypatch.setattr(layers, "worth_compiling", lambda *_: compiled)
    monkeypatch.setattr(layers, "fuse_norms", lambda *_: calls.append("norms"))
    monkeypatch.setattr(layers, "block_stems", lambda *_: calls.append("stems"))
    classifier = small_classifier()
    with layers.accelerated(classifier, CPU, 100):
        assert calls == given
    classifier.channels_last = False
    with layers.accelerated(classifier, CPU, 100):
        assert calls == given


@pytest.mark.parametrize("fails", [False, True])
def test_layers_are_a_network_s_own_after_the_steps(fails: bool) -> None:
    """Whatever went in, and even if the steps fail: the same classes, torch's own layout, test mode."""
    classifier = small_classifier().eval()
    images = torch.randn(4, 3, 16, 16)
    kinds = [type(layer) for layer in classifier.modules()]
    names = list(classifier.state_dict())
    expected = classifier(images)[1]
    classifier.to(memory_format=torch.channels_last)

    def train() -> None:
        with layers.accelerated(classifier, CPU, 100):
            classifier.backbone[1].__class__ = fused_kind(nn.BatchNorm2d)
            assert isinstance(classifier.backbone[1], FusedNorm)
            classifier.train()
            if fails:
                raise RuntimeError("out of memory")

    if fails:
        with pytest.raises(RuntimeError, match="out of memory"):
            train()
    else:
        train()
    assert [type(layer) for layer in classifier.modules()] == kinds
    assert list(classifier.state_dict()) == names
    assert not classifier.training
    assert all(p.is_contiguous() for p in classifier.parameters())
    assert torch.equal(classifier(images)[1], expected)


def test_stems_come_out_too() -> None:
    backbone = nn.Sequential(
        nn.Conv2d(3, 8, 7, stride=2, padding=3, bias=False),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
    )
    classifier = Classifier(backbone, 8, 3, bottleneck=4)
    before = {k: v.clone() for k, v in classifier.state_dict().items()}
    with layers.accelerated(classifier, CPU, 100):
        block_stems(classifier)
        assert type(classifier.backbone[0]) is not nn.Conv2d
    assert type(classifier.backbone[0]) is nn.Conv2d
    assert all(torch.equal(before[k], v) for k, v in classifier.state_dict().items())
