"""What moves: frozen backbones, cached features, the ladder, and the witness."""

import dataclasses

import numpy as np
import pytest
import torch

import usfan
from lookalikes import picture
from usfan.adaptation.tune import decide
from usfan.adaptation.witness import (
    Witness,
    choose_judge,
    choose_witness,
    has_witness,
    thumbnails,
)
from usfan.config import RuntimeConfig
from usfan.data.store import Store
from usfan.engine.features import features_of
from usfan.engine.passes import engine_store
from usfan.engine.runtime import Runtime, start_runtime
from usfan.errors import ConfigError
from usfan.models.backbones import create_backbone, weights_hash

CLASSES = ("a", "b", "c")
TINY = {"epochs": 2, "batch_size": 8, "progress": False}


def backbone_hash(model: usfan.SourceModel) -> str:
    return weights_hash(model.classifier.backbone)


@pytest.mark.parametrize(
    ("explained", "per_class", "tune"),
    [(0.6, 500, "new"), (0.5, 10, "new"), (0.3, 99, "new"), (0.3, 100, "all")],
)
def test_the_rule(explained, per_class, tune):
    rung = decide(explained, per_class)
    assert rung.tune == tune
    assert rung.backbone_lr_scale == (0.01 if tune == "all" else None)


def squares(images: int = 12, domain: int = 3) -> usfan.ImageData:
    labels = np.tile(np.arange(3), images)
    pixels = np.stack([picture(int(label), domain, i, 64) for i, label in enumerate(labels)])
    return usfan.ImageData(pixels, labels=labels, classes=CLASSES, name="squares")


def images_of(model: usfan.SourceModel) -> Store:
    return engine_store(squares(), model.spec, start_runtime(RuntimeConfig(device="cpu")))


@pytest.fixture(scope="module")
def weights(tmp_path_factory) -> str:
    """Weights of a small timm network, as a user's file."""
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("weights") / "net.pth"
    torch.save(create_backbone("test_resnet", "none").module.state_dict(), path)
    return str(path)


@pytest.fixture(scope="module")
def source(weights) -> usfan.SourceModel:
    settings = {
        "backbone": "test_resnet",
        "pretrained": weights,
        "bottleneck": 16,
        **TINY,
        "epochs": 4,
    }
    return usfan.train_source(squares(domain=0), **settings)


def test_pretrained_backbones_stay_as_they_are(source, weights):
    assert source.summary["tune"] == "new"
    assert source.architecture["pretrained"]["from"] == "file"
    fresh = create_backbone("test_resnet", weights).module
    assert (
        weights_hash(source.classifier.backbone)
        == weights_hash(fresh)
        == source.architecture["pretrained"]["hash"]
    )


def test_a_frozen_run_moves_the_bottleneck_only(source):
    model = usfan.adapt(source, squares(), "shot", tune="new", guard=False, **TINY)
    moved = {
        k
        for k, v in model.classifier.state_dict().items()
        if not torch.equal(v, source.classifier.state_dict()[k])
    }
    assert moved
    assert all(name.startswith("bottleneck.") for name in moved)


def test_cached_features_are_those_of_the_backbone(source):
    runtime = start_runtime(None)
    store = engine_store(squares(), source.spec, runtime)
    features = features_of(source.classifier, store, source.spec, runtime)
    from usfan.data.views import test_view

    with torch.no_grad():
        expected = source.classifier.backbone.eval()(test_view(store.values, source.spec))
    torch.testing.assert_close(features.values, expected, rtol=1e-4, atol=1e-5)
    assert features.labels is store.labels


def test_features_may_be_given_and_give_the_same_run(source):
    runtime = start_runtime(None)
    store = features_of(
        source.classifier, engine_store(squares(), source.spec, runtime), source.spec, runtime
    )
    one = usfan.adapt(source, store, "shot", guard=False, **TINY)
    other = usfan.adapt(source, squares(), "shot", tune="new", guard=False, **TINY)
    assert torch.equal(one.passes.after.probs, other.passes.after.probs)


def test_the_pass_that_chooses_the_layers_is_the_first_of_the_run(source):
    auto, chosen = (
        usfan.adapt(source, squares(), "shot", tune=tune, guard=False, **TINY)
        for tune in ("auto", "new")
    )
    assert auto.history["tune"]["tune"] == "new"
    for name in ("before", "after"):
        assert torch.equal(getattr(auto.passes, name).probs, getattr(chosen.passes, name).probs)


def test_features_of_other_weights_are_never_used(source, tmp_path):
    folder = tmp_path / "images"
    from small_runs import class_folder

    class_folder(folder)
    runtime = start_runtime(RuntimeConfig(cache=str(tmp_path / "cache"), workers=0))
    store = engine_store(usfan.ImageData(folder), source.spec, runtime)
    assert store.key is not None
    images = set((tmp_path / "cache").glob("*.rows"))
    first = features_of(source.classifier, store, source.spec, runtime)
    (table,) = set((tmp_path / "cache").glob("*.rows")) - images
    again = features_of(source.classifier, store, source.spec, runtime)
    assert torch.equal(first.values, again.values)
    torch.manual_seed(1)
    other = dataclasses.replace(source, classifier=source.classifier)
    network = create_backbone("test_resnet", "none").module
    from usfan.engine.features import BackboneAlone

    third = features_of(BackboneAlone(network, channels_last=False), store, other.spec, runtime)
    assert not torch.allclose(first.values, third.values)
    assert len(list((tmp_path / "cache").glob("*.rows"))) == 3
    table.write_bytes(table.read_bytes()[:-10])  # damaged: built anew
    assert torch.equal(
        features_of(source.classifier, store, source.spec, runtime).values, first.values
    )
    table.rename(tmp_path / "outside")
    table.symlink_to(tmp_path / "outside")  # a link is not followed
    assert torch.equal(
        features_of(source.classifier, store, source.spec, runtime).values, first.values
    )
    assert not table.is_symlink()


def test_the_models_own_backbone_is_the_witness(source):
    witness = choose_witness("auto", source, backbone_hash(source))
    assert witness is not None
    assert witness.is_source_backbone
    assert has_witness(source.architecture, source.summary)
    model = usfan.adapt(source, squares(), **TINY)
    assert model.method == "u-sfan++"
    assert model.history["tune"]["tune"] == "new"


def test_model_and_witness_share_a_pass_if_they_see_the_same(source, monkeypatch):
    """The middle of an image is the whole image if nothing is cropped away."""
    spec = dataclasses.replace(source.spec, resize=source.spec.size)
    uncropped = dataclasses.replace(source, spec=spec)
    runtime = start_runtime(RuntimeConfig(device="cpu"))
    images = images_of(uncropped)
    witness = choose_witness("auto", uncropped, backbone_hash(uncropped))
    expected = witness.testimony(images, runtime)
    apart = usfan.adapt(uncropped, images, guard=False, witness=expected, **TINY)
    monkeypatch.setattr(Witness, "testimony", lambda *_: pytest.fail("a second pass"))
    shared = usfan.adapt(uncropped, images, guard=False, **TINY)
    torch.testing.assert_close(shared.passes.after.probs, apart.passes.after.probs)
    with pytest.raises(pytest.fail.Exception, match="a second pass"):
        usfan.adapt(source, images_of(source), guard=False, **TINY)


def test_on_a_cpu_the_backbone_stays_frozen_and_the_reason_says_what_training_it_costs(
    source, monkeypatch
):
    monkeypatch.setattr("usfan.adaptation.tune.FITTING_BACKBONE", 1.1)
    monkeypatch.setattr("usfan.adaptation.tune.MOVING_BACKBONE_IMAGES", 1)
    model = usfan.adapt(source, squares(), device="cpu", **TINY)
    tune = model.history["tune"]
    assert tune["tune"] == "new"
    assert "would take about" in tune["reason"]
    assert 'tune="all"' in tune["reason"]


def test_the_judge_is_not_the_network_that_was_trained_on(source):
    used = {source.architecture["pretrained"]["hash"]}
    judge = choose_judge(source, used, backbone_hash(source))
    assert judge is None or judge.hash not in used


def test_the_judges_features_are_cached_too(source, tmp_path, monkeypatch):
    torch.manual_seed(1)
    backbone = create_backbone("test_resnet", "none")
    judge = Witness("another", backbone.module, backbone.spec, weights_hash(backbone.module))
    monkeypatch.setattr("usfan.adaptation.inputs.choose_judge", lambda *_: judge)
    runtime = RuntimeConfig(device="cpu", cache=str(tmp_path))
    first = usfan.adapt(source, squares(), runtime=runtime, **TINY)
    assert first.history["guard"]["judge"] == "another"
    written = {file: file.stat().st_mtime_ns for file in tmp_path.glob("*.rows")}
    # the images, the model's own features, the witness's of whole images, and the judge's
    assert len(written) == 4
    again = usfan.adapt(source, squares(), runtime=runtime, **TINY)
    assert {file: file.stat().st_mtime_ns for file in tmp_path.glob("*.rows")} == written
    assert again.history["guard"] == first.history["guard"]


def test_a_witness_that_cannot_be_had_is_one_clear_line(source, tmp_path):
    with pytest.raises(ConfigError, match="no pretrained weights for 'resnet18'"):
        usfan.adapt(source, squares(), "u-sfan++", witness="resnet18", **TINY)
    with pytest.raises(ConfigError, match="needs a witness"):
        usfan.adapt(source, squares(), "u-sfan++", witness="none", **TINY)
    wrong = tmp_path / "wrong.pth"
    torch.save({"weight": torch.zeros(3)}, wrong)
    with pytest.raises(ConfigError, match="does not fit"):
        usfan.adapt(source, squares(), "u-sfan++", witness=f"test_resnet:{wrong}", **TINY)


def test_networks_from_scratch_have_no_witness_and_move_as_a_whole():
    grey = np.stack([picture(i % 3, 0, i, 28, grey=True) for i in range(24)])
    data = usfan.ImageData(grey, labels=np.arange(24) % 3, classes=CLASSES)
    model = usfan.train_source(data, backbone="digits-cnn", bottleneck=8, **TINY)
    assert model.summary["tune"] == "all"
    assert choose_witness("auto", model, backbone_hash(model)) is None
    adapted = usfan.adapt(model, data, **TINY)
    assert adapted.method == "u-sfan"
    assert adapted.history["settings"]["tune"] == "all"


def test_several_processes_compute_their_own_features(source):
    """Each process passes over its own batches; the sum is the whole table."""
    runtime = start_runtime(None)
    store = engine_store(squares(), source.spec, runtime)
    whole = features_of(source.classifier, store, source.spec, runtime).values
    from usfan.engine.features import BackboneAlone, fill
    from usfan.engine.inference import torch_pass

    alone = BackboneAlone(source.classifier.backbone, channels_last=False).eval()

    class Pair(Runtime):
        def total(self, values):
            return values

    with torch_pass(alone, source.spec, runtime) as through:
        parts = [
            fill(through, store, Pair(runtime.device, rank=rank, world=2), whole.shape[1])
            for rank in (0, 1)
        ]
    torch.testing.assert_close(parts[0] + parts[1], whole)


def test_thumbnails_are_made_of_a_few_images_at_a_time():
    class Counting(Store):
        def batch(self, index, device=None):
            sizes.append(len(index))
            return super().batch(index, device)

    sizes: list[int] = []
    pixels = torch.randint(256, (150, 3, 40, 40), dtype=torch.uint8)
    runtime = start_runtime(RuntimeConfig(device="cpu"))
    images = thumbnails(Counting(pixels, torch.arange(150)), torch.arange(150), runtime)
    assert (images.shape, max(sizes)) == ((150, 3 * 32 * 32), 64)
    whole = torch.nn.functional.adaptive_avg_pool2d(pixels.float(), 32).flatten(1)
    torch.testing.assert_close(
        images, (whole - whole.mean(dim=0)) / (whole - whole.mean(dim=0)).std()
    )
    single = Store(torch.full((1, 1, 1, 1), 7, dtype=torch.uint8), torch.arange(1))
    assert thumbnails(single, torch.arange(1), runtime).tolist() == [[0.0]]
