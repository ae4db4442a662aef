"""Stage 1: the same seed gives the same bits, and what cannot be trained on is refused."""

import tempfile

import numpy as np
import pytest
import torch

import usfan
from lookalikes import picture
from usfan.config import TrainConfig, make_config
from usfan.data.store import Store
from usfan.engine.loop import Loop
from usfan.errors import ConfigError, DataError
from usfan.store.run_folder import RunFolder

TINY = {"backbone": "digits-cnn", "epochs": 2, "batch_size": 8, "bottleneck": 16}


def squares(classes: int = 3, images: int = 8, domain: int = 0) -> usfan.ImageData:
    labels = np.tile(np.arange(classes), images)
    pixels = np.stack(
        [picture(int(label), domain, i, 28, grey=True) for i, label in enumerate(labels)]
    )
    return usfan.ImageData(
        pixels, labels=labels, classes=[f"class-{i}" for i in range(classes)], name="squares"
    )


def test_same_seed_same_bits_and_another_seed_others():
    models = [usfan.train_source(squares(), seed=seed, **TINY) for seed in (3, 3, 4)]
    first, same, other = (
        {k: v.clone() for k, v in m.classifier.state_dict().items()} for m in models
    )
    assert all(torch.equal(first[k], same[k]) for k in first)
    assert not all(torch.equal(first[k], other[k]) for k in first)
    for name, tensor in models[0].posterior.tensors().items():
        assert torch.equal(tensor, models[1].posterior.tensors()[name]), name


def test_it_learns_and_knows_its_classes():
    model = usfan.train_source(squares(images=40), **{**TINY, "epochs": 12})
    assert model.classes == ("class-0", "class-1", "class-2")
    figures = usfan.evaluate(model, squares(images=10))
    assert figures["accuracy"] > 90
    assert model.summary["prior_precision"] == model.posterior.prior_precision > 0


def test_training_stops_if_validation_does_not_improve(capsys):
    """Squares are learned at once: nothing is won by going on. The best epoch is kept, the latest of equals."""
    calls = []
    settings = {
        **TINY,
        "epochs": 30,
        "validation_share": 0.2,
        "progress": lambda *call: calls.append(call[2]),
    }
    stopped = usfan.train_source(squares(images=8), patience=4, **settings)
    told = [
        figures["validation_accuracy"] for figures in calls if "validation_accuracy" in figures
    ]
    assert stopped.summary["epochs"] < 30
    assert stopped.summary["validation_accuracy"] == max(told)
    rose = 3 * (told.index(max(told)) + 1)  # pixels are scored every third epoch of 30
    assert stopped.summary["epochs"] == rose + 6
    assert "no better on the held-out images" in capsys.readouterr().err
    whole = usfan.train_source(squares(images=8), patience=0, **settings)
    assert whole.summary["epochs"] == 30
    assert "stopped" not in capsys.readouterr().err
    for preset in ("paper", "shot"):
        assert make_config(TrainConfig, {"preset": preset}).patience == 0


def test_a_run_that_stops_early_stops_at_the_same_epoch_when_resumed(tmp_path, monkeypatch):
    """On features of a frozen backbone, which are scored every epoch."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(40) % 2
    features = torch.randn(40, 576, generator=generator) + labels[:, None]
    store = Store(features, torch.arange(40), labels, ("a", "b"))
    settings = {
        **TINY,
        "tune": "new",
        "epochs": 20,
        "patience": 3,
        "validation_share": 0.25,
        "progress": False,
    }
    whole = usfan.train_source(store, run=tmp_path / "whole", **settings)
    assert 3 < whole.summary["epochs"] < 20
    plain = RunFolder.save_checkpoint
    for last in (2, whole.summary["epochs"]):  # in the middle, and after the last epoch

        def save_and_stop(self, epoch, *rest, last=last):
            plain(self, epoch, *rest)
            if epoch == last:
                raise KeyboardInterrupt

        run = tmp_path / f"stopped-{last}"
        monkeypatch.setattr(RunFolder, "save_checkpoint", save_and_stop)
        with pytest.raises(KeyboardInterrupt):
            usfan.train_source(store, run=run, **settings)
        monkeypatch.setattr(RunFolder, "save_checkpoint", plain)
        again = usfan.train_source(store, run=run, resume=True, **settings)
        assert {**again.summary, "seconds": 0} == {**whole.summary, "seconds": 0}
        assert (run / "model.safetensors").read_bytes() == (
            tmp_path / "whole" / "model.safetensors"
        ).read_bytes()


def test_the_prior_of_the_posterior():
    assert usfan.train_source(
        squares(), **TINY, prior=3.5
    ).posterior.prior_precision == pytest.approx(3.5)
    assert usfan.train_source(
        squares(), **TINY, preset="paper"
    ).posterior.prior_precision == pytest.approx(5e-4)
    decay = usfan.train_source(squares(), **TINY, prior="weight-decay", weight_decay=0.01)
    assert decay.posterior.prior_precision == pytest.approx(24 * 0.01)


def empty_class() -> usfan.ImageData:
    data = squares()
    return data.subset(data.labels != 1)


def one_class() -> usfan.ImageData:
    return squares(classes=1)


def no_labels() -> usfan.ImageData:
    return squares().without_labels()


@pytest.mark.parametrize(
    ("make", "words"),
    [(empty_class, "class-1"), (one_class, "one class"), (no_labels, "labels")],
)
def test_data_that_is_refused(make, words):
    with pytest.raises(DataError, match=words):
        usfan.train_source(make(), **TINY)


def test_no_images_at_all():
    with pytest.raises(DataError):
        usfan.train_source(np.zeros((0, 28, 28), dtype=np.uint8), **TINY)


@pytest.mark.parametrize("settings", [{"prior": -1.0}, {"backbone": "resnet5"}, {"epoch": 3}])
def test_settings_that_are_refused(settings):
    with pytest.raises(ConfigError):
        usfan.train_source(squares(), **{**TINY, **settings})


def test_two_images_are_enough_and_a_last_batch_of_one_is_left_out():
    data = squares(classes=2, images=9)
    usfan.train_source(data.subset([0, 1]), **TINY, validation_share=0)
    usfan.train_source(data.subset(range(17)), **TINY, validation_share=0)


def test_a_network_with_depthwise_convolutions_comes_back_with_the_same_bits(
    tmp_path, monkeypatch
):
    """It is trained with the channels last, and laid out as it will be loaded when that is over."""
    settings = {
        "backbone": "mobilenetv3_small_050",
        "pretrained": "none",
        "epochs": 1,
        "batch_size": 4,
    }
    layouts = []
    plain = Loop.step

    def step(self, *batch):
        layouts.append(
            self.classifier.backbone.conv_stem.weight.is_contiguous(
                memory_format=torch.channels_last
            )
        )
        return plain(self, *batch)

    monkeypatch.setattr(Loop, "step", step)
    model = usfan.train_source(squares(classes=2, images=4), **settings)
    assert layouts
    assert all(layouts)
    layouts.clear()
    adapted = usfan.adapt(
        model, squares(classes=2, images=4), epochs=1, batch_size=4, guard=False
    )
    assert layouts
    assert all(layouts)
    for made, kind in ((model, usfan.SourceModel), (adapted, usfan.AdaptedModel)):
        assert made.classifier.backbone.conv_stem.weight.is_contiguous()
        again = kind.load(made.save(tmp_path / kind.__name__))
        assert torch.equal(
            made.predict(squares(images=2)).probs, again.predict(squares(images=2)).probs
        )


@pytest.mark.parametrize("tune", ["new", "norm", "all"])
def test_what_is_frozen_really_is(tune):
    """From the weights of another run. A frozen backbone keeps its bits, the statistics of its BatchNorms included."""
    first = usfan.train_source(squares(), **TINY)
    start = {
        f"backbone.{k}": v.clone() for k, v in first.classifier.backbone.state_dict().items()
    }
    with tempfile.TemporaryDirectory() as folder:
        torch.save(first.classifier.backbone.state_dict(), f"{folder}/start.pth")
        model = usfan.train_source(
            squares(), pretrained=f"{folder}/start.pth", tune=tune, validation_share=0, **TINY
        )
    moved = {
        k for k, v in start.items() if not torch.equal(v, model.classifier.state_dict()[k])
    }
    norms = {k for k in start if k.rpartition(".")[0] + ".running_mean" in start}
    assert norms
    assert moved == {"new": set(), "norm": norms, "all": set(start)}[tune]
    assert model.pretrained
    assert not first.pretrained


def test_a_backbone_with_pretrained_weights_moves_slower(tmp_path):
    """The weights decide the default, not the network's name: digits-cnn moves slower with weights too."""
    first = usfan.train_source(squares(), **TINY)
    torch.save(first.classifier.backbone.state_dict(), tmp_path / "start.pth")
    settings = {"pretrained": str(tmp_path / "start.pth"), "tune": "all", **TINY}
    plain, slow, fast = (
        usfan.train_source(squares(), **settings, **given).classifier.state_dict()
        for given in ({}, {"backbone_lr_scale": 0.1}, {"backbone_lr_scale": 1.0})
    )
    assert all(torch.equal(plain[k], slow[k]) for k in plain)
    assert not all(torch.equal(plain[k], fast[k]) for k in plain)


def test_what_moves_is_decided_from_the_weights(tmp_path):
    """Of one network: from random weights all of it, from pretrained ones the layers after it."""
    first = usfan.train_source(squares(), **TINY)
    torch.save(first.classifier.backbone.state_dict(), tmp_path / "start.pth")
    again = usfan.train_source(squares(), pretrained=str(tmp_path / "start.pth"), **TINY)
    assert (first.summary["tune"], again.summary["tune"]) == ("all", "new")
