"""Images that all networks look at once as they are decoded: the same run as from images in memory."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
from PIL import Image

import usfan
from lookalikes import picture
from usfan.adaptation.check import check_model
from usfan.adaptation.witness import Witness
from usfan.data.images import FileImages
from usfan.engine import features as engine
from usfan.engine.passes import engine_store
from usfan.engine.runtime import start_runtime
from usfan.models.backbones import create_backbone, weights_hash

TINY = {"epochs": 2, "batch_size": 8, "progress": False}
CLASSES = ("a", "b", "c")
COUNT = 80
BROKEN = 17


def photographs(root: Path, domain: int) -> usfan.ImageData:
    paths = []
    for number in range(COUNT):
        paths.append(str(root / f"{number:03}.png"))
        Image.fromarray(picture(number % 3, domain, number, 64)).save(paths[-1])
    return usfan.ImageData(paths, labels=[number % 3 for number in range(COUNT)])


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> usfan.SourceModel:
    root = tmp_path_factory.mktemp("source")
    torch.manual_seed(0)
    torch.save(create_backbone("test_resnet", "none").module.state_dict(), root / "net.pth")
    network = {"backbone": "test_resnet", "pretrained": str(root / "net.pth"), "bottleneck": 16}
    return usfan.train_source(photographs(root, 0), **network, **TINY)


@pytest.fixture
def target(tmp_path) -> usfan.ImageData:
    data = photographs(tmp_path, 3).without_labels()
    Path(data.where(BROKEN)).write_bytes(b"no image")
    return data


@pytest.fixture
def decoded(monkeypatch) -> Counter:
    """How often each file is decoded, here instead of in processes."""
    counts: Counter = Counter()
    plain = FileImages.picture

    def counted(self, i, *arguments):
        counts[self.paths[i]] += 1
        return plain(self, i, *arguments)

    monkeypatch.setattr(FileImages, "picture", counted)
    return counts


@pytest.mark.parametrize("first", [20, COUNT])
def test_a_run_is_that_from_images_in_memory(source, target, decoded, first, monkeypatch):
    """The judge's first images are kept. If they leave it open, it looks at more, which are decoded again."""
    torch.manual_seed(1)
    backbone = create_backbone("test_resnet", "none")
    judge = Witness("another", backbone.module, backbone.spec, weights_hash(backbone.module))
    monkeypatch.setattr("usfan.adaptation.inputs.choose_judge", lambda *_: judge)
    monkeypatch.setattr("usfan.adaptation.guard.GUARD_FIRST_PER_CLASS", 1)
    monkeypatch.setattr("usfan.adaptation.guard.GUARD_FIRST_IMAGES", first)
    monkeypatch.setattr("usfan.adaptation.guard.GUARD_CLEAR", torch.inf)
    store = engine_store(target, source.spec, start_runtime({"workers": 0}))
    decoded.clear()
    streamed = usfan.adapt(source, target, runtime={"workers": 0}, **TINY)
    again = 0 if first == COUNT else COUNT - 1
    assert decoded.total() <= COUNT + again
    if first == COUNT:
        assert set(decoded.values()) == {1}
    stored = usfan.adapt(source, store, **TINY)
    for name, value in stored.classifier.state_dict().items():
        assert torch.equal(streamed.classifier.state_dict()[name], value), name
    assert torch.equal(streamed.passes.after.probs, stored.passes.after.probs)
    assert torch.equal(streamed.passes.positions, stored.passes.positions)
    assert streamed.passes.unreadable == stored.passes.unreadable
    assert set(streamed.passes.unreadable) == {target.where(BROKEN)}
    for name in ("guard", "witness", "tune", "estimated_accuracy", "verdict"):
        assert streamed.history[name] == stored.history[name], name


def test_a_check_is_that_of_images_in_memory(source, target, decoded):
    runtime = start_runtime({"workers": 0})
    stored = check_model(source, engine_store(target, source.spec, runtime), runtime, str)
    decoded.clear()
    streamed = usfan.check(source, target, runtime={"workers": 0})
    assert set(decoded.values()) == {1}
    ignored = {"doubtful"}
    for name in stored.to_dict().keys() - ignored:
        assert streamed.to_dict()[name] == stored.to_dict()[name], name
    assert streamed.doubtful == tuple(target.where(int(i)) for i in stored.doubtful)


def test_training_is_that_from_images_in_memory(source, tmp_path, decoded):
    data = photographs(tmp_path, 0)
    network = {"backbone": "test_resnet", "pretrained": "none", "bottleneck": 16}
    settings = {**network, "tune": "new", **TINY}
    stored = usfan.train_source(
        engine_store(data, source.spec, start_runtime({"workers": 0})), **settings
    )
    decoded.clear()
    streamed = usfan.train_source(data, runtime={"workers": 0}, **settings)
    assert set(decoded.values()) == {1}
    for name, value in stored.classifier.state_dict().items():
        assert torch.equal(streamed.classifier.state_dict()[name], value), name


def test_pixels_are_not_kept(source, target, monkeypatch):
    """A pass holds a batch, and the sample that it was asked for."""
    sizes = []
    plain = engine.resize
    monkeypatch.setattr(engine, "resize", lambda *a: sizes.append(len(a[0])) or plain(*a))
    sample = torch.tensor([3, BROKEN, 70])
    runtime = start_runtime({"workers": 0})
    (features,), kept = engine.streamed_features(
        [(source.classifier, source.spec)], target, source.spec, runtime, sample
    )
    assert max(sizes) <= engine.PASS_BATCH < COUNT
    store = engine_store(target, source.spec, runtime)
    expected = engine.features_of(source.classifier, store, source.spec, runtime)
    assert torch.equal(features.values, expected.values)
    assert kept.positions.tolist() == [3, 70]
    assert torch.equal(kept.values, store.values[[3, 69]])
