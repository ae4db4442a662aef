"""Good manners: a public call leaves the caller's process as it was, and gives the same bits whatever its settings."""

from __future__ import annotations

import contextlib
import inspect
import logging
import random
import warnings
from types import SimpleNamespace

import matplotlib
import numpy as np
import pytest
import torch
from torch import nn

import usfan
import usfan.shield
from small_runs import class_folder
from tiny_models import tiny_model
from usfan.store.model import MixtureModel, SourceModel

QUICK = {"epochs": 2, "batch_size": 8, "progress": False, "device": "cpu"}
LABELS = [k % 3 for k in range(24)]


@pytest.fixture(scope="module")
def pixels():
    generator = torch.Generator().manual_seed(3)
    shades = torch.tensor(LABELS)[:, None, None] * 60
    return (torch.randint(0, 80, (24, 28, 28), generator=generator) + shades).byte()


@pytest.fixture(scope="module")
def photos(pixels, tmp_path_factory):
    from PIL import Image

    root = tmp_path_factory.mktemp("photos")
    for number, (image, label) in enumerate(zip(pixels, LABELS, strict=True)):
        folder = root / ("a", "b|c", "<d>")[label]
        folder.mkdir(exist_ok=True)
        Image.fromarray(image.numpy()).save(folder / f"{number}.png")
    return root


@pytest.fixture(scope="module")
def sites(tmp_path_factory):
    """Two domains."""
    root = tmp_path_factory.mktemp("sites")
    for number, name in enumerate(("one", "two")):
        class_folder(root / name, images=3, domain=number)
    return root


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_model().save(tmp_path_factory.mktemp("models") / "source")


@pytest.fixture(scope="module")
def target(folder, photos):
    return usfan.adapt(folder, photos, "u-sfan", **QUICK)


class Network(nn.Module):
    """A user's classifier."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(784, 8), nn.Dropout(0.5), nn.ReLU())
        self.fc = nn.Linear(8, 3)

    def forward(self, images):
        return self.fc(self.body(images))


GREY = usfan.InputSpec(channels=1, size=28, resize=28, mean=(0.5,), std=(0.5,), augment="none")


@pytest.fixture(scope="module")
def network():
    torch.manual_seed(0)
    return Network()


CALLS = {
    "ImageData": lambda w: usfan.ImageData(w.pixels, LABELS),
    "train_source": lambda w: usfan.train_source(
        usfan.ImageData(w.pixels, LABELS), backbone="digits-cnn", **QUICK
    ),
    "attach_posterior": lambda w: usfan.attach_posterior(
        w.network,
        usfan.ImageData(w.pixels, LABELS),
        "fc",
        spec=GREY,
        uncertainty="ensemble",
        progress=False,
        device="cpu",
    ),
    "adapt": lambda w: usfan.adapt(w.folder, usfan.ImageData(w.pixels), "shot", **QUICK),
    "evaluate": lambda w: usfan.evaluate(w.target, w.photos, progress=False, device="cpu"),
    "check": lambda w: usfan.check(w.target, w.photos, progress=False, device="cpu"),
    "export": lambda w: usfan.export(w.target, w.place / "model.onnx"),
    "report_runs": lambda w: usfan.report_runs([w.folder], w.place / "runs.html"),
    "questions": lambda w: usfan.questions(w.target),
    "changed_images": lambda w: usfan.changed_images(w.target),
    "SourceModel.load": lambda w: usfan.SourceModel.load(w.folder),
    "SourceModel.save": lambda w: w.target.save(w.place / "copy"),
    "SourceModel.predict": lambda w: w.target.predict(w.pixels),
    "SourceModel.predict_batches": lambda w: list(w.target.predict_batches(w.pixels, 5)),
    "SourceModel.report": lambda w: w.target.report(w.place / "model.html"),
    "run_study": lambda w: usfan.run_study(
        w.sites,
        methods=["source-only", "u-sfan"],
        seeds=[0],
        out=w.place / "study",
        device="cpu",
        backbone="digits-cnn",
        pretrained="none",
        source_epochs=1,
        epochs=1,
        batch_size=8,
    ),
    "information_maximization": lambda w: usfan.information_maximization(torch.ones(4, 3)),
    "KroneckerPosterior.fit": lambda w: usfan.KroneckerPosterior.fit(
        torch.eye(9, 4), torch.eye(9, 3), torch.ones(3, 4)
    ),
    "KroneckerPosterior.predictive": lambda w: w.target.posterior.predictive(
        torch.ones(2, w.target.posterior.weight.shape[1])
    ),
    "MixtureModel.of": lambda w: usfan.MixtureModel.of([w.target, w.target], [0.5, 0.5]),
    "ImageData.fingerprint": lambda w: usfan.ImageData(w.photos).fingerprint(),
    "figures.reliability": lambda w: usfan.figures.reliability(w.target, w.photos),
    "figures.entropy_densities": lambda w: usfan.figures.entropy_densities(w.target),
    "figures.feature_map": lambda w: usfan.figures.feature_map(w.target),
    "figures.images_of": lambda w: usfan.figures.images_of(w.target, w.photos),
    "figures.changed_predictions": lambda w: usfan.figures.changed_predictions(
        w.target, w.photos
    ),
    "SourceModel.with_uncertainty": lambda w: w.target.with_uncertainty("mc-dropout", 0.5),
}


@pytest.fixture
def world(pixels, photos, folder, target, network, sites, tmp_path):
    return SimpleNamespace(
        pixels=pixels,
        photos=photos,
        folder=folder,
        target=target,
        network=network,
        sites=sites,
        place=tmp_path,
    )


def tensors_of(value):
    """Every tensor in what a call returned, by its place."""
    if isinstance(value, torch.Tensor):
        return {"": value}
    if isinstance(value, SourceModel):
        found = dict(value.classifier.state_dict())
        parts = {
            "posterior": value.posterior.tensors(),
            "passes": getattr(value, "passes", None),
        }
        for name, part in parts.items():
            found |= {f"{name}.{key}": tensor for key, tensor in tensors_of(part).items()}
        return found
    if isinstance(value, (list, tuple)):
        value = dict(enumerate(value))
    if not isinstance(value, dict):
        value = getattr(value, "__dict__", {})
    found = {}
    for name, part in value.items():
        if isinstance(part, (torch.Tensor, list, tuple, dict)) or hasattr(part, "logits"):
            found |= {f"{name}.{key}": tensor for key, tensor in tensors_of(part).items()}
    return found


def state(*networks):
    """What a caller may rely on."""
    return {
        "dtype": torch.get_default_dtype(),
        "device": torch.get_default_device(),
        "threads": torch.get_num_threads(),
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "torch random": torch.get_rng_state().tolist(),
        "random": random.getstate(),
        "numpy random": str(np.random.get_state()),  # noqa: NPY002
        "warnings": list(warnings.filters),
        "loggers": {
            name: logging.getLogger(name).level
            for name in (None, "torch.onnx", "torch", "usfan", "matplotlib", "PIL", "timm")
        },
        "disabled": logging.root.manager.disable,
        "handlers": list(logging.root.handlers),
        "backend": matplotlib.rcParams._get("backend"),
        "precision": torch.backends.cuda.matmul.fp32_precision,
        "modes": [[layer.training for layer in one.modules()] for one in networks],
        "gradients": [[p.requires_grad for p in one.parameters()] for one in networks],
    }


@pytest.mark.parametrize("name", CALLS)
def test_a_call_leaves_the_process_as_it_was(name, world):
    warnings.simplefilter("default", BytesWarning)
    logging.getLogger("torch.onnx").setLevel(logging.INFO)
    world.target.classifier.train()
    torch.set_num_threads(3)
    random.seed(5)
    np.random.seed(6)  # noqa: NPY002
    try:
        before = state(world.target.classifier, world.network)
        CALLS[name](world)
        after = state(world.target.classifier, world.network)
    finally:
        torch.set_num_threads(1)
        world.target.classifier.eval()
    assert after == before


@contextlib.contextmanager
def default_dtype(dtype):
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextlib.contextmanager
def default_device(device):
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)


ODD = {
    "float64": lambda: default_dtype(torch.float64),
    "bfloat16": lambda: default_dtype(torch.bfloat16),
    "no gradients": torch.no_grad,
    "inference": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "meta": lambda: default_device("meta"),
}


@pytest.fixture(scope="module")
def plain():
    """What each call gives in a process with the usual settings."""
    return {}


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize(
    "name",
    [
        "ImageData",
        "train_source",
        "attach_posterior",
        "adapt",
        "evaluate",
        "SourceModel.predict_batches",
    ],
)
def test_the_same_bits_inside_odd_settings(name, odd, world, plain):
    if name not in plain:
        plain[name] = CALLS[name](world)
    with ODD[odd]():
        value = CALLS[name](world)
    expected = tensors_of(plain[name])
    if name == "evaluate":
        assert value == plain[name]
        return
    result = tensors_of(value)
    assert expected
    assert result.keys() == expected.keys()
    for key, tensor in expected.items():
        assert torch.equal(result[key], tensor), key
        assert not result[key].is_inference()


def test_two_calls_at_once_restore_the_state_of_the_first(world):
    """The one that ends first does not take the settings away from the other."""
    from threading import Barrier, Thread

    seen = []
    meet = Barrier(2)

    def short():
        with usfan.shield.shield():
            meet.wait()

    def long():
        with usfan.shield.shield():
            meet.wait()
            other.join()
            seen.append(torch.get_default_dtype())

    other = Thread(target=short)
    with default_dtype(torch.float64):
        threads = [other, Thread(target=long)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert seen == [torch.float32]
        assert torch.get_default_dtype() == torch.float64


def test_an_error_restores_the_state(world):
    before = state(world.target.classifier, world.network)
    with pytest.raises(usfan.UsfanError):
        usfan.adapt(world.folder, world.photos, "no-such-method", progress=False)
    assert state(world.target.classifier, world.network) == before


def test_every_public_call_is_shielded():
    """A new public function is called above, but for the one that is there to change the process. One that computes on
    more than tensors is shielded."""
    functions = {name for name in usfan.__all__ if inspect.isfunction(getattr(usfan, name))}
    functions.remove("keep_freed_memory")
    drawn = {
        f"figures.{name}"
        for name, function in inspect.getmembers(usfan.figures, inspect.isfunction)
        if "target" in inspect.signature(function).parameters
    }
    assert functions | drawn <= CALLS.keys()
    for name in functions - {"information_maximization"}:
        assert hasattr(getattr(usfan, name), "__wrapped__"), name
    assert MixtureModel.with_uncertainty.__wrapped__
