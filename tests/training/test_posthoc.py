"""Bring your own model: a posterior for what is already trained, adaptation, and back from disk."""

from __future__ import annotations

import json

import numpy as np
import pytest
import timm
import torch
import torchvision
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

import usfan
from tiny_models import tiny_model
from usfan.engine.runtime import start_runtime
from usfan.errors import ArtifactError, ConfigError, DataError
from usfan.training.posthoc import from_state_dict, refit_posterior
from usfan.uncertainty.base import FitSettings

SPEC = usfan.InputSpec(3, 32, 36)
NAMES = ["cat", "dog", "elk"]


class Net(nn.Module):
    """Written by hand; its classifier is `top`."""

    def __init__(self, *, bias: bool = True, norm: str = "none", classes: int = 3) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 5, stride=4)
        self.bn = nn.BatchNorm2d(6)
        self.hidden = nn.Linear(6, 12)
        top = nn.Linear(12, classes, bias=bias)
        self.top = {"none": lambda m: m, "new": weight_norm, "old": nn.utils.weight_norm}[norm](
            top
        )

    def forward(self, images: Tensor) -> Tensor:
        return self.top(self.hidden(self.bn(self.conv(images)).relu().mean(dim=(2, 3))).relu())


class Viewer(nn.Module):
    """Depthwise, and it views its features as if the channels came first: it cannot be laid out otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 5, stride=4)
        self.deep = nn.Conv2d(6, 6, 3, groups=6)
        self.fc = nn.Linear(6 * 5 * 5, 3)

    def forward(self, images: Tensor) -> Tensor:
        found = self.deep(self.conv(images)).relu()
        return self.fc(found.view(found.shape[0], -1))


KINDS = {
    "views its features": (Viewer, None),
    "torchvision": (lambda: torchvision.models.resnet18(num_classes=3), None),
    "timm": (lambda: timm.create_model("resnet18", num_classes=3), None),
    "hand-written": (Net, "top"),
    "no bias": (lambda: Net(bias=False), "top"),
    "weight-normalised": (lambda: Net(norm="new"), "top"),
    "weight-normalised, the old way": (lambda: Net(norm="old"), "top"),
}


def pictures(count: int = 12) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (count, 36, 36, 3), dtype=np.uint8)


def labelled(count: int = 12) -> usfan.ImageData:
    return usfan.ImageData(pictures(count), labels=[i % 3 for i in range(count)], classes=NAMES)


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.parametrize("kind", KINDS)
def test_attach_predict_adapt_save_and_load(kind, tmp_path):
    make, head = KINDS[kind]
    module = make()
    source = usfan.attach_posterior(module, labelled(), head=head, spec=SPEC)
    assert isinstance(
        module.get_submodule(head or "fc"), nn.Linear
    )  # the module given stays as it was
    assert source.classes == tuple(NAMES)
    assert (source.posterior.bias is None) == (kind == "no bias")
    assert source.posterior.count == 12
    batch = pictures(5)
    before = source.predict(batch)
    with torch.no_grad():
        images = (
            torch.from_numpy(batch[:, 2:34, 2:34]).permute(0, 3, 1, 2).contiguous() / 255 - 0.45
        ) / 0.22
        assert module.eval()(images).shape == before.probs.shape

    adapted = usfan.adapt(
        source, pictures(), method="u-sfan+", epochs=1, batch_size=4, guard=False
    )
    assert not torch.equal(adapted.predict(batch).probs, before.probs)
    assert torch.equal(
        adapted.classifier.head_tensors()[0], source.classifier.head_tensors()[0]
    )
    assert torch.equal(source.predict(batch).probs, before.probs)

    for model in (source, adapted):
        folder = model.save(tmp_path / model.kind)
        fresh = make()
        again = usfan.SourceModel.load(folder, module=fresh)
        assert isinstance(fresh.get_submodule(head or "fc"), nn.Linear)
        assert type(again) is type(model)
        first = model.predict(batch)
        second = again.predict(batch)
        assert torch.equal(first.probs, second.probs)
        assert torch.equal(first.weight, second.weight)
        usfan.SourceModel.load(folder, module=fresh)  # the same module can be given again
        if kind == "timm":
            assert torch.equal(
                usfan.SourceModel.load(folder).predict(batch).weight, first.weight
            )
        else:
            with pytest.raises(
                ArtifactError,
                match=r"your own module '\w+': give it again, load\(folder, module=…\)",
            ):
                usfan.SourceModel.load(folder)


def test_the_point_estimate_is_the_modules_own(caplog):
    module = Net().eval()
    source = usfan.attach_posterior(
        module, pictures(), head="top", spec=usfan.InputSpec(3, 36, 36)
    )
    assert source.classes == (
        "class 0",
        "class 1",
        "class 2",
    )  # no labels, no names, and it is said
    assert "called class 0 to class 2 until classes= names them" in caplog.text
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in (source.spec.mean, source.spec.std))
    images = (torch.from_numpy(pictures()).permute(0, 3, 1, 2) / 255 - mean) / std
    with torch.no_grad():
        expected = module(images).softmax(dim=1)
    torch.testing.assert_close(source.predict(pictures()).probs, expected, rtol=0, atol=1e-5)


def grey_net() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 4, 5), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 24 * 24, 3))


@pytest.mark.parametrize(
    ("module", "shape", "expected"),
    [
        (
            nn.Sequential(nn.Flatten(), nn.Linear(784, 8), nn.ReLU(), nn.Linear(8, 3)),
            (12, 28, 28),
            (1, 28, 28),
        ),
        (nn.Sequential(nn.Flatten(), nn.Linear(3 * 16 * 16, 3)), (12, 16, 16, 3), (3, 16, 16)),
        (grey_net(), (12, 28, 28), (1, 28, 28)),
        (Net(), (12, 32, 32, 3), (3, 32, 32)),
        (Net(), (2, 200, 180, 3), (3, 224, 256)),
    ],
    ids=["grey Linear", "colour Linear", "grey", "small", "photographs"],
)
def test_what_a_module_takes_is_guessed_and_said(module, shape, expected, caplog):
    pixels = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    head = "top" if isinstance(module, Net) else str(len(module) - 1)
    source = usfan.attach_posterior(module, usfan.ImageData(pixels), head=head)
    assert (source.spec.channels, source.spec.size, source.spec.resize) == expected
    assert "does not say what images it takes" in caplog.text
    assert source.predict(pixels).probs.shape == (len(pixels), 3)


def test_images_that_a_module_does_not_take_are_an_error_that_says_what_to_give():
    pixels = np.zeros((4, 40, 40), np.uint8)
    with pytest.raises(
        ConfigError, match=r"does not take images of 3×224×224 \(.*spec=usfan\.InputSpec"
    ):
        usfan.attach_posterior(grey_net(), pixels, head="3")
    five = nn.Sequential(nn.Conv2d(5, 4, 5), nn.Flatten(), nn.Linear(4, 3))
    with pytest.raises(ConfigError, match=r"does not take images of 3×224×224"):
        usfan.attach_posterior(five, pixels, head="2")


class HeadFirst(nn.Module):
    """Its Linear is written down before its convolution, and takes a square number of features."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(64, 3)
        self.blocks = nn.PixelUnshuffle(4)
        self.conv = nn.Conv2d(48, 64, 3)

    def forward(self, images: Tensor) -> Tensor:
        return self.fc(self.conv(self.blocks(images)).relu().mean(dim=(2, 3)))


def test_what_cannot_be_guessed_from_the_layers_is_tried():
    assert usfan.attach_posterior(HeadFirst(), pictures(), head="fc").spec.channels == 3
    large = nn.Sequential(nn.Conv2d(3, 4, 5, stride=100), nn.Flatten(), nn.Linear(4 * 3 * 3, 3))
    assert usfan.attach_posterior(large, pictures(), head="2").spec.size == 224


class Picky(nn.Module):
    """Views its features while it trains; or, asked to, looks at how they lie."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.conv = nn.Conv2d(3, 6, 5)
        self.pool = nn.MaxPool2d(4)
        self.fc = nn.Linear(6 * 49, 3)

    def forward(self, images: Tensor) -> Tensor:
        found = self.pool(self.conv(images)).relu()
        if self.how == "asserts":
            assert found.is_contiguous()
        if self.how == "strides":
            return self.fc(found.as_strided((len(found), 6 * 49), (6 * 49, 1)))
        return self.fc(found.view(len(found), -1) if self.training else found.flatten(1))


@pytest.mark.parametrize("how", ["views", "asserts", "strides"])
def test_a_module_that_looks_at_its_layout_keeps_it(how):
    source = usfan.attach_posterior(Picky(how), pictures(), head="fc", spec=SPEC)
    adapted = usfan.adapt(source, pictures(), epochs=1, batch_size=4, guard=False)
    assert torch.allclose(
        adapted.predict(pictures()).probs, adapted.passes.after.probs, atol=1e-6
    )
    assert adapted.classifier.channels_last is False


class Flat(nn.Module):
    """Takes the layout of its input for granted."""

    def forward(self, images: Tensor) -> Tensor:
        assert images.is_contiguous()
        return images.view(len(images), -1)


def test_a_sequence_with_a_layer_that_looks_at_its_layout_keeps_it():
    module = nn.Sequential(nn.Conv2d(3, 6, 5), nn.MaxPool2d(4), Flat(), nn.Linear(6 * 49, 3))
    source = usfan.attach_posterior(module, pictures(), head="3", spec=SPEC)
    adapted = usfan.adapt(source, pictures(), epochs=1, batch_size=4, guard=False)
    assert torch.allclose(
        adapted.predict(pictures()).probs, adapted.passes.after.probs, atol=1e-6
    )


def test_a_picture_is_predicted_as_its_array():
    source = usfan.attach_posterior(Net(), pictures(), head="top", spec=SPEC)
    picture = Image.fromarray(pictures(1)[0])
    assert torch.equal(source.predict(picture).probs, source.predict(pictures(1)).probs)


def test_timm_brings_its_own_input():
    module = timm.create_model("tf_efficientnet_lite0", num_classes=3)
    source = usfan.attach_posterior(module, pictures(2))
    assert (source.spec.size, source.spec.resize, source.spec.mean) == (
        224,
        256,
        (0.5, 0.5, 0.5),
    )
    assert source.architecture == {
        "module": "EfficientNet",
        "head": "classifier",
        "timm": "tf_efficientnet_lite0",
    }


def test_a_changed_timm_module_is_given_again(tmp_path):
    module = timm.create_model("resnet18", num_classes=3)
    module.maxpool = nn.Identity()
    folder = usfan.attach_posterior(module, pictures(4), spec=SPEC).save(tmp_path)
    with pytest.raises(ArtifactError, match="give it again"):
        usfan.SourceModel.load(folder)
    usfan.SourceModel.load(folder, module=module)


def test_modules_that_do_not_fit_the_folder(tmp_path):
    folder = usfan.attach_posterior(Net(), pictures(), head="top", spec=SPEC).save(tmp_path)
    for module, said in (
        (
            Net(classes=4),
            r"model\.safetensors: 'head.weight' has shape \(3, 12\), expected \(4, 12\)",
        ),
        (Net(bias=False), r"model\.safetensors: unexpected tensor 'head\.bias'"),
        (
            Net(norm="new"),
            r"model\.safetensors: tensor 'head\.parametrizations\.weight\.original0' is missing",
        ),
        (
            torchvision.models.resnet18(num_classes=3),
            r"config\.json: architecture: head 'top' is not in the module",
        ),
        (nn.Sequential(Net(), nn.Softmax(dim=1)), "head 'top' is not in the module"),
    ):
        with pytest.raises(ArtifactError, match=said):
            usfan.SourceModel.load(folder, module=module)


def test_a_module_for_a_model_that_needs_none(tmp_path):
    folder = tiny_model().save(tmp_path)
    with pytest.raises(ArtifactError, match="this model is 'digits-cnn'; no module is needed"):
        usfan.SourceModel.load(folder, module=Net())


@pytest.mark.parametrize(
    ("name", "value"),
    [("timm", "resnet81"), ("timm", "resnet34"), ("timm", 3), ("head", "layer1")],
)
def test_a_damaged_timm_folder(tmp_path, name, value):
    folder = usfan.attach_posterior(
        timm.create_model("resnet18", num_classes=3), pictures(4), spec=SPEC
    ).save(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config["architecture"][name] = value
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ArtifactError, match=r"config\.json: architecture|model\.safetensors: "):
        usfan.SourceModel.load(folder)


def test_wrong_input():
    with pytest.raises(DataError, match="has 3 classes, the module 4"):
        usfan.attach_posterior(Net(classes=4), labelled(), head="top", spec=SPEC)
    with pytest.raises(ConfigError, match="pass head=NAME"):
        usfan.attach_posterior(Net(), labelled(), spec=SPEC)
    with pytest.raises(ConfigError, match=r"does not end in '0\.top'"):
        usfan.attach_posterior(
            nn.Sequential(Net(), nn.Softmax(dim=1)), labelled(), head="0.top", spec=SPEC
        )


def test_a_posterior_refitted():
    model = tiny_model()
    pixels = np.random.default_rng(1).integers(0, 256, (30, 28, 28), dtype=np.uint8)
    data = usfan.ImageData(pixels, labels=[0, 1, 2] * 10, classes=["a", "b|c", "<d>"])
    again = refit_posterior(
        model, data, start_runtime(), FitSettings(prior=3.0, damping="factored")
    )
    assert again.posterior.count == 30
    assert (again.posterior.prior_precision, again.posterior.damping) == (3.0, "factored")
    assert again.summary["prior_precision"] == 3.0
    assert model.posterior.count == 60
    assert torch.equal(again.predict(pixels).probs, model.predict(pixels).probs)


def test_from_a_state_dict(tmp_path):
    """What `usfan posterior weights.pth DATA --backbone NAME` does; it loads without the module."""
    module = timm.create_model("mobilenetv3_small_050", num_classes=3)
    torch.save(module.state_dict(), tmp_path / "weights.pth")
    save_file(module.state_dict(), tmp_path / "weights.safetensors")
    for name in ("weights.pth", "weights.safetensors"):
        read = from_state_dict(str(tmp_path / name), "mobilenetv3_small_050")
        model = usfan.attach_posterior(read, labelled(4))
        again = usfan.SourceModel.load(model.save(tmp_path / name.replace(".", "-")))
        assert torch.equal(again.predict(pictures(2)).weight, model.predict(pictures(2)).weight)


def test_a_state_dict_that_does_not_fit(tmp_path):
    file = tmp_path / "weights.pth"
    torch.save(timm.create_model("resnet18", num_classes=4).state_dict(), file)
    for path, backbone, error, said in (
        (
            tmp_path / "nowhere.pth",
            "resnet18",
            ConfigError,
            "neither a model folder nor a weights file",
        ),
        (file, None, ConfigError, 'backbone="NAME"'),
        (file, "resnet81", ConfigError, "unknown backbone 'resnet81'"),
        (file, "vit_tiny_patch16_224", ConfigError, r"no head\.weight in it"),
        (file, "resnet34", ConfigError, "does not fit resnet34"),
        (file, "resnet18", DataError, "has 3 classes, the module 4"),
    ):
        with pytest.raises(error, match=said):
            usfan.attach_posterior(from_state_dict(str(path), backbone), labelled())
