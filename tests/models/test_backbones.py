"""Backbones by name, and where their weights come from."""

from __future__ import annotations

import time

import pytest
import timm
import torch
from safetensors.torch import save_file

from oracles.efficientnet_lite import features_and_logits, wave
from usfan.errors import ConfigError
from usfan.models import hub
from usfan.models.backbones import (
    create_backbone,
    default_backbone,
    load_weights,
    offline_weights,
    read_state,
    recognise_timm,
    timm_model,
)
from usfan.models.small_backbones import SMALL_BACKBONES


@pytest.mark.parametrize(
    ("name", "features", "channels", "size"),
    [
        ("lenet", 800, 1, 28),
        ("digits-cnn", 576, 1, 28),
        ("dtn", 4096, 3, 32),
        ("cnn13", 128, 3, 32),
        ("toy-mlp", 20, 2, 1),
    ],
)
def test_small_networks(name, features, channels, size):
    made = create_backbone(name)
    model = made.module
    width = made.features
    spec = made.spec
    assert (width, spec.channels, spec.size, spec.resize) == (features, channels, size, size)
    assert len(spec.mean) == len(spec.std) == channels
    assert model.eval()(torch.zeros(2, channels, size, size)).shape == (2, features)


def test_every_small_network_is_tested_above():
    own = {
        name
        for name, kind in SMALL_BACKBONES.items()
        if kind.__module__ == "usfan.models.small_backbones"
    }
    assert own == {
        "lenet",
        "digits-cnn",
        "dtn",
        "cnn13",
        "toy-mlp",
    }  # other tests may add networks of their own


@pytest.mark.parametrize("name", ["digits-cnn", "lenet", "resnet18"])
def test_other_channels(name):
    channels = 1 if name == "resnet18" else 3
    made = create_backbone(name, "none", channels=channels)
    model = made.module
    width = made.features
    spec = made.spec
    assert spec.channels == channels
    assert model.eval()(torch.zeros(1, channels, spec.size, spec.size)).shape == (1, width)


def test_random_weights_only_if_asked_for(caplog, no_network):
    with pytest.raises(ConfigError, match=r"no pretrained weights of 'resnet18' .*\"none\""):
        create_backbone("resnet18")
    backbone = create_backbone("resnet18", "none")
    spec = backbone.spec
    assert backbone.weights is None
    assert (backbone.features, *spec.shape, spec.resize) == (512, 3, 224, 224, 256)
    assert spec.mean == (0.485, 0.456, 0.406)
    assert spec.std == (0.229, 0.224, 0.225)
    assert backbone.module.training
    assert not caplog.records


def in_cache(folder, name):
    """timm's weights of a model, random ones, as a download leaves them in the Hub's cache."""
    config = timm.models.get_pretrained_cfg(name)
    repository = folder / f"models--{config.hf_hub_id.replace('/', '--')}"
    snapshot = repository / "snapshots" / "0"
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0")
    save_file(timm.create_model(name).state_dict(), snapshot / "model.safetensors")


def test_the_network_of_a_user_who_names_none(no_network, tmp_path, monkeypatch, capsys):
    """Weights in the Hub's cache, else those that are installed, else one line with two ways."""
    assert default_backbone("auto") == "tf_efficientnet_lite0"
    assert default_backbone("timm") == "resnet50"
    in_cache(tmp_path, "test_vit2")
    in_cache(tmp_path, "test_resnet")
    names = [f"{name}.r160_in1k" for name in ("test_vit2", "test_resnet")]
    assert default_backbone("auto") in names
    assert default_backbone("offline") == "tf_efficientnet_lite0"
    backbone = create_backbone("test_resnet")
    assert backbone.weights["from"] == "timm"
    said = "test_resnet starts from pretrained weights, those in the Hub's cache\n"
    assert capsys.readouterr().err == said
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "empty"))
    monkeypatch.setattr("usfan.models.backbones.offline_weights", lambda name: None)
    with pytest.raises(ConfigError, match=r"usfan\[offline\].*resnet50 with pretrained=\"timm"):
        default_backbone("auto")
    with pytest.raises(ConfigError, match='pretrained="none" needs the name of the network'):
        default_backbone("none")


@pytest.mark.parametrize("name", ["resnet81", "ressnet18", "digits_cnn"])
def test_an_unknown_name_suggests_near_ones(name):
    near = "digits-cnn" if name.startswith("digits") else "resnet"
    with pytest.raises(ConfigError, match=f"unknown backbone '{name}': did you mean .*{near}"):
        create_backbone(name)


@pytest.mark.parametrize(
    "name", ["qqqqqqqq", "", "hf_hub:timm/resnet18", "local-dir:/etc", "../x"]
)
def test_a_name_like_no_other(name):
    with pytest.raises(ConfigError, match="unknown backbone"):
        create_backbone(name)


@pytest.mark.parametrize("name", ["resnet18.nonsense", "resnet18.a://b", "resnet18.a/b"])
def test_a_known_name_with_something_unknown_behind(name):
    with pytest.raises(ConfigError, match=f"backbone '{name}': timm cannot make it"):
        create_backbone(name, "none")


def test_weights_that_would_have_to_be_downloaded(monkeypatch):
    monkeypatch.setattr("usfan.models.hub.reachable", lambda: True)
    monkeypatch.setattr(
        "timm.create_model", lambda *_, **__: (_ for _ in ()).throw(OSError("no such file"))
    )
    with pytest.raises(ConfigError, match="pretrained weights are unavailable: no such file"):
        create_backbone("resnet18", "timm")


@pytest.fixture
def no_network(monkeypatch, tmp_path):
    """A Hub that cannot be reached, and nothing of it on this machine."""
    for name in hub.PROXIES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "https://localhost:9")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)


def test_without_a_network_it_takes_a_moment_and_one_line(no_network, caplog):
    started = time.monotonic()
    with pytest.raises(
        ConfigError, match=r"the Hugging Face Hub cannot be reached .*pretrained=\"FILE"
    ) as raised:
        create_backbone("mobilenetv3_small_050", "timm")
    assert time.monotonic() - started < 20
    assert "\n" not in str(raised.value)
    assert "Retry" not in caplog.text
    from huggingface_hub import constants

    assert not constants.HF_HUB_OFFLINE


def test_the_hub_is_asked_behind_a_proxy(no_network, monkeypatch):
    assert not hub.reachable()
    monkeypatch.setenv("HTTPS_PROXY", "http://localhost:1")
    assert hub.reachable()


def test_auto_says_what_it_took(monkeypatch, tmp_path, capsys):
    weights = tmp_path / "some_package" / "models" / "weights.pth"
    weights.parent.mkdir(parents=True)
    weights.touch()
    monkeypatch.setattr("usfan.models.backbones.offline_weights", lambda name: weights)
    monkeypatch.setattr("usfan.models.backbones.load_weights", lambda model, file: [])
    create_backbone("tf_efficientnet_lite0")
    said = "starts from pretrained weights, those in the package some_package\n"
    assert capsys.readouterr().err == f"tf_efficientnet_lite0 {said}"


@pytest.mark.parametrize("name", ["resnet18", "digits-cnn"])
@pytest.mark.parametrize("pretrained", ["offline", "nowhere/weights.pth"])
def test_no_such_weights(name, pretrained):
    with pytest.raises(
        ConfigError, match=r"no offline weights|there are no weights|there is no file"
    ):
        create_backbone(name, pretrained)


@pytest.fixture(scope="module")
def published() -> dict[str, torch.Tensor]:
    path = offline_weights("tf_efficientnet_lite0")
    if path is None:
        pytest.skip("usfan[offline] is not installed")
    return read_state(path)


def test_offline_weights_agree_with_the_network_they_were_published_for(published):
    """`oracles.efficientnet_lite` reads the file by its own names; the figures below are what it gave when written."""
    made = create_backbone("tf_efficientnet_lite0", "offline")
    model = made.module
    width = made.features
    with torch.no_grad():
        features = model.eval()(wave())
    expected, logits = features_and_logits(published, wave())
    assert width == 1280
    torch.testing.assert_close(features.double(), expected, rtol=0, atol=1e-4)
    recorded = {71: 5.834730, 66: 4.386603, 600: 4.253310, 403: 4.250966, 226: 3.904521}
    assert {i: features[0, i].item() for i in recorded} == pytest.approx(recorded, abs=1e-4)
    assert features.sum().item() == pytest.approx(183.67086, abs=1e-2)
    head = features.double() @ published["_fc.weight"].double().T + published["_fc.bias"]
    torch.testing.assert_close(head, logits, rtol=0, atol=1e-4)
    recorded = {906: 6.524567, 911: 6.404092, 398: 5.280681, 772: 5.271359, 783: 4.342677}
    assert {i: head[0, i].item() for i in recorded} == pytest.approx(recorded, abs=1e-4)


@pytest.mark.parametrize(
    ("name", "size"), [("tf_efficientnet_lite1", 240), ("tf_efficientnet_lite2", 260)]
)
def test_larger_offline_weights_load(name, size):
    path = offline_weights(name)
    if path is None:
        pytest.skip("usfan[offline] is not installed")
    made = create_backbone(name)
    model = made.module
    width = made.features
    spec = made.spec
    assert (width, spec.size) == (1280, size)
    stem = read_state(path)["_conv_stem.weight"]
    assert torch.equal(model.state_dict()["conv_stem.weight"], stem)


@pytest.mark.parametrize("suffix", [".safetensors", ".pth"])
@pytest.mark.parametrize("kind", ["plain", "nested", "old"])
def test_weights_from_a_file(tmp_path, suffix, kind):
    """A classifier in the file is left out; "module." and a table around are seen through; old files lack a counter."""
    state = timm_model("resnet18", num_classes=7).state_dict()
    path = tmp_path / f"weights{suffix}"
    given = state
    if kind == "old":
        given = {k: v for k, v in state.items() if not k.endswith("num_batches_tracked")}
    if suffix == ".safetensors":
        save_file(given, path)
    elif kind == "nested":
        torch.save(
            {"epoch": 3, "state_dict": {f"module.{k}": v for k, v in given.items()}}, path
        )
    else:
        torch.save(given, path)
    model = create_backbone("resnet18", str(path)).module
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())


def test_weights_for_a_small_network(tmp_path):
    model = create_backbone("digits-cnn").module
    torch.save(model.state_dict(), tmp_path / "digits.pth")
    again = create_backbone("digits-cnn", str(tmp_path / "digits.pth")).module
    assert all(torch.equal(v, again.state_dict()[k]) for k, v in model.state_dict().items())


def test_a_file_that_does_not_fit(tmp_path):
    torch.save(create_backbone("lenet").module.state_dict(), tmp_path / "lenet.pth")
    with pytest.raises(
        ConfigError,
        match=r"does not fit this backbone: no tensor of the right shape for conv1\.weight",
    ):
        create_backbone("resnet18", str(tmp_path / "lenet.pth"))


class Harm:
    """Unpickled, it would make a file."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return (open, (self.path, "w"))


def test_a_pickle_with_code_is_refused(tmp_path):
    harm = tmp_path / "harm"
    torch.save({"weight": Harm(str(harm))}, tmp_path / "zip.pth")
    torch.save(
        {"weight": Harm(str(harm))}, tmp_path / "old.pth", _use_new_zipfile_serialization=False
    )
    for name in ("zip.pth", "old.pth"):
        with pytest.raises(ConfigError, match="that can be read safely") as caught:
            create_backbone("resnet18", str(tmp_path / name))
        assert "\n" not in str(caught.value)
    assert not harm.exists()


@pytest.mark.parametrize("content", [b"", b"not a file of weights", b"\xff" * 64])
@pytest.mark.parametrize("suffix", [".safetensors", ".pth"])
def test_a_damaged_file(tmp_path, suffix, content):
    path = tmp_path / f"weights{suffix}"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=path.name):
        read_state(path)


@pytest.mark.parametrize("content", [[1, 2], {"a": 1}, {3: torch.zeros(2)}])
def test_not_a_state_dict(tmp_path, content):
    torch.save(content, tmp_path / "x.pth")
    with pytest.raises(ConfigError, match="does not hold a state dict"):
        load_weights(torch.nn.Linear(2, 2), tmp_path / "x.pth")


def test_timm_networks_are_recognised_unless_changed():
    model = timm_model("resnet18", num_classes=3)
    assert recognise_timm(model) == "resnet18"
    model.maxpool = torch.nn.Identity()
    assert recognise_timm(model) is None
    assert recognise_timm(timm_model("resnet18", num_classes=3, in_chans=1)) is None
    assert recognise_timm(timm_model("resnet18", num_classes=0)) is None
    assert recognise_timm(torch.nn.Linear(2, 2)) is None
