"""What is saved comes back bit for bit, and depends on the weights and the factors alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import usfan
from tiny_models import tiny_model
from usfan.errors import ArtifactError
from usfan.maths.unknown import UnknownRule
from usfan.store.model import AdaptedModel, SourceModel

FILES = {"config.json", "model.safetensors", "posterior.safetensors"}


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def images(count: int = 7) -> torch.Tensor:
    return torch.randint(256, (count, 1, 28, 28), dtype=torch.uint8)


def assert_same(a: SourceModel, b: SourceModel) -> None:
    for part in (
        "classes",
        "spec",
        "architecture",
        "summary",
        "temperature",
        "samples",
        "kind",
    ):
        assert getattr(a, part) == getattr(b, part)
    assert a.posterior.settings() == b.posterior.settings()
    for ours, theirs in (
        (a.classifier.state_dict(), b.classifier.state_dict()),
        (a.posterior.tensors(), b.posterior.tensors()),
    ):
        assert list(ours) == list(theirs)
        assert all(
            torch.equal(ours[k], theirs[k]) and ours[k].dtype == theirs[k].dtype for k in ours
        )


@pytest.mark.parametrize("bottleneck", [8, 0])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("norm", [True, False])
def test_round_trip(tmp_path, bottleneck, bias, norm):
    model = tiny_model("lenet", bottleneck=bottleneck, head_bias=bias, head_norm=norm)
    again = usfan.SourceModel.load(model.save(tmp_path))
    assert_same(model, again)
    assert not again.classifier.training
    batch = images()
    first = model.predict(batch)
    second = again.predict(batch)
    for part in ("probs", "label", "entropy", "weight", "unknown"):
        assert torch.equal(getattr(first, part), getattr(second, part))
    assert contents(again.save(tmp_path / "again")) == contents(tmp_path)


def test_a_timm_backbone(tmp_path):
    model = tiny_model("mobilenetv3_small_050")
    assert_same(model, SourceModel.load(str(model.save(tmp_path))))


def test_an_adapted_model(model, tmp_path):
    rule = UnknownRule("entropy", 0.7)
    shared = {
        name: getattr(model, name)
        for name in ("classifier", "posterior", "classes", "spec", "architecture")
    }
    adapted = AdaptedModel(
        **shared, method="shot-im", unknown_rule=rule, temperature=0.7, samples=32
    )
    again = SourceModel.load(adapted.save(tmp_path))
    assert isinstance(again, AdaptedModel)
    assert_same(adapted, again)
    assert again.method == "shot-im"
    assert again.unknown_rule == rule


def test_saving_twice_gives_the_same_bytes(model, folder, tmp_path):
    assert set(contents(folder)) == FILES
    assert contents(model.save(tmp_path / "other")) == contents(folder)
    assert contents(model.save(folder)) == contents(folder)


def test_the_folder_is_a_function_of_weights_and_factors(tmp_path):
    """The same training on data of another name and place leaves the same tensors; nothing else of it is there."""
    pixels = images(24).numpy()
    labels = [0, 1] * 12
    settings = {"backbone": "digits-cnn", "epochs": 1, "batch_size": 8, "bottleneck": 8}
    folders = []
    for name in ("secret-place", "elsewhere"):
        data = usfan.ImageData(pixels, labels=labels, classes=["cat", "dog"], name=name)
        folders.append(usfan.train_source(data, **settings).save(tmp_path / name, private=True))
    first, second = map(contents, folders)
    assert first == second
    assert not any(b"secret-place" in value for value in first.values())


def test_private_leaves_out_the_summary_and_the_likelihood(model, folder, tmp_path):
    assert model.posterior.log_likelihood is not None
    private = model.save(tmp_path / "private", private=True)
    open_config, config = (
        json.loads((f / "config.json").read_text()) for f in (folder, private)
    )
    assert open_config["summary"] == model.summary
    assert open_config["posterior"]["log_likelihood"] == model.posterior.log_likelihood
    assert config["summary"] == {}
    assert config["posterior"]["log_likelihood"] is None
    batch = images(2)
    assert torch.equal(
        SourceModel.load(private).predict(batch).weight, model.predict(batch).weight
    )


def test_one_image_or_many(model):
    grey = images(3)
    many = model.predict(grey)
    assert len(many.label) == 3
    assert (
        len(model.predict(grey[:, 0]).label) == 3
    )  # N×H×W: three grey images, not one in colour
    torch.testing.assert_close(model.predict(grey[1]).probs, many.probs[1:2])
    torch.testing.assert_close(model.predict(grey[1, 0].numpy()).probs, many.probs[1:2])
    colour = tiny_model("cnn13")
    assert len(colour.predict(torch.randint(256, (3, 32, 32), dtype=torch.uint8)).label) == 1
    assert many.names == [model.classes[i] for i in many.label.tolist()]


def test_gradients_stay_on_while_predicting(model):
    for _, outputs in model.predict_batches(images(5), batch_size=2):
        assert torch.is_grad_enabled()
        assert not outputs.logits.requires_grad


def test_a_hub_id_without_a_network(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(
        ArtifactError,
        match="nobody/nothing: no such model folder here, and the Hugging Face Hub",
    ):
        SourceModel.load("nobody/nothing")


@pytest.mark.parametrize(
    "name", ["nowhere", "a/b/c", "./nowhere", "../x/y", "a b/c", "", "x\0y"]
)
def test_no_such_folder(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ArtifactError, match=r"no such model folder|no config\.json"):
        SourceModel.load(name)


def test_a_model_on_the_hub(model, folder, monkeypatch):
    asked = {}
    monkeypatch.setattr(
        "huggingface_hub.snapshot_download",
        lambda repo, **options: asked.update(options, repo=repo) or str(folder),
    )
    assert_same(SourceModel.load("me/mine"), model)
    assert asked["repo"] == "me/mine"
    patterns = {"*config.json", "*.safetensors", "*.safetensors.index.json"}
    assert set(asked["allow_patterns"]) == patterns
