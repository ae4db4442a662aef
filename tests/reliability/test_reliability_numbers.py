"""Awkward numbers end to end: a finite result, or one clear error. Those of the posterior alone: tests/posterior."""

import numpy as np
import pytest
import torch
from PIL import Image

import usfan
from tiny_models import tiny_model, witness_for
from usfan.adaptation.methods import METHODS
from usfan.config import RuntimeConfig
from usfan.data.sources import ImageData
from usfan.errors import ArtifactError, DataError, UsfanError
from usfan.models.backbones import create_backbone
from usfan.models.classifier import Classifier
from usfan.store.model import SourceModel
from usfan.uncertainty.kronecker import KroneckerPosterior

DTYPES = [torch.float32, torch.bfloat16, torch.float64]
NAN = float("nan")


def pixels(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(
        256,
        (count, 1, 28, 28),
        dtype=torch.uint8,
        generator=torch.Generator().manual_seed(seed),
    )


def wide_model(classes: int, images: torch.Tensor) -> SourceModel:
    """As many classes as asked for; the posterior has seen only these few images."""
    torch.manual_seed(0)
    made = create_backbone("digits-cnn", "none")
    network = made.module
    features = made.features
    spec = made.spec
    settings = {"bottleneck": 16, "dropout": 0.0, "head_bias": True, "head_norm": True}
    classifier = Classifier(network, features, classes, **settings).eval()
    with torch.no_grad():
        posterior = KroneckerPosterior.fit(
            *classifier(images.float() / 255), *classifier.head_tensors()
        )
    return SourceModel(
        classifier,
        posterior,
        tuple(map(str, range(classes))),
        spec,
        {"backbone": "digits-cnn", **settings},
    )


TARGETS = {
    "all the same": lambda: torch.full((17, 1, 28, 28), 77, dtype=torch.uint8),
    "black": lambda: torch.zeros((17, 1, 28, 28), dtype=torch.uint8),
    "each one twelve times": lambda: pixels(2).repeat(12, 1, 1, 1),
    "one left for the last batch": lambda: pixels(17),
    "two": lambda: pixels(2),
}


@pytest.mark.parametrize(
    ("target", "precision"),
    [*((target, "32") for target in TARGETS), ("all the same", "bf16"), ("two", "bf16")],
)
def test_awkward_targets(target, precision):
    images = TARGETS[target]()
    source = tiny_model()
    for method in METHODS:
        runtime = RuntimeConfig(device="cpu", precision=precision)
        given = witness_for(method, images)
        adapted = usfan.adapt(
            source, images, method, epochs=2, batch_size=8, runtime=runtime, **given
        )
        prediction = adapted.predict(images)
        for name in ("probs", "entropy", "weight"):
            assert bool(getattr(prediction, name).isfinite().all()), (method, name)


def test_a_thousand_classes_and_ten_samples():
    images = pixels(10)
    source = wide_model(1000, images)
    for method, precision in (("shot", "32"), ("u-sfan+", "bf16")):
        runtime = RuntimeConfig(device="cpu", precision=precision)
        adapted = usfan.adapt(
            source, images, method, epochs=1, batch_size=4, samples=16, runtime=runtime
        )
        prediction = adapted.predict(images)
        assert prediction.probs.shape == (10, 1000)
        assert bool(prediction.probs.isfinite().all())
        assert bool(((prediction.weight >= 0.99e-3) & (prediction.weight <= 1.01)).all())


def test_one_image_is_too_few_to_adapt_to_and_two_are_harmless():
    source = tiny_model()
    with pytest.raises(usfan.UsfanError, match="one image is too few"):
        usfan.adapt(source, pixels(1), epochs=1, batch_size=4)
    adapted = usfan.adapt(source, pixels(2), epochs=1, batch_size=4)
    assert bool(adapted.predict(pixels(1)).probs.isfinite().all())


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_singular_factor(dtype):
    """Logits of 1e4 make every p one-hot: B is zero. Features that are all alike make A of rank one."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(4, 5, generator=generator, dtype=torch.float64)
    features = torch.ones(20, 5, dtype=torch.float64)
    logits = 1e4 * torch.eye(4, dtype=torch.float64)[torch.arange(20) % 4]
    for damping in ("exact", "factored"):
        posterior = KroneckerPosterior.fit(
            *(t.to(dtype) for t in (features, logits, weight)), prior=1e-3, damping=damping
        )
        assert float(posterior.class_values.max()) == 0
        assert int((posterior.feature_values > 1e-5).sum()) == 1
        probs, information = posterior.moments(features.to(dtype))
        assert bool(probs.isfinite().all())
        assert bool(information.isfinite().all())
        torch.testing.assert_close(
            probs.sum(dim=1), torch.ones(20, dtype=probs.dtype), rtol=0, atol=1e-4
        )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [0.0, 1.0, 1e4])
@pytest.mark.parametrize("count", [1, 2, 9])
def test_the_objective_and_its_gradient(dtype, scale, count):
    generator = torch.Generator().manual_seed(0)
    logits = (scale * torch.randn(count, 6, generator=generator)).to(dtype).requires_grad_()
    for weights in (
        None,
        torch.rand(count, generator=generator).to(dtype),
        torch.zeros(count, dtype=dtype),
    ):
        loss = usfan.information_maximization(logits, weights)
        (gradient,) = torch.autograd.grad(loss, logits)
        assert bool(loss.isfinite())
        assert bool(gradient.isfinite().all())


@pytest.mark.parametrize("value", [NAN, float("inf"), -float("inf")])
def test_images_with_nan(value, tmp_path):
    images = np.random.default_rng(0).random((12, 28, 28), dtype=np.float32)
    images[3, 4, 5] = value
    with pytest.raises(DataError, match=r"NaN|finite|\[0, 1\]"):
        usfan.adapt(tiny_model(), images, epochs=1)
    for number, image in enumerate(images):
        Image.fromarray(image).save(tmp_path / f"{number:02}.tiff")
    adapted = usfan.adapt(tiny_model(), ImageData(tmp_path), epochs=1, batch_size=4)
    assert list(adapted.passes.unreadable.values()) == ["NaN or infinite pixels"]
    assert len(adapted.passes.positions) == 11


@pytest.mark.parametrize("place", ["backbone.0.weight", "bottleneck.1.weight"])
def test_weights_that_are_finite_but_huge(place, tmp_path):
    """They pass the check of the file; what they predict does not."""
    model = tiny_model()
    images = pixels(12)
    with torch.no_grad():
        model.classifier.state_dict()[place].fill_(3e38)
    model = SourceModel.load(model.save(tmp_path))
    labelled = ImageData(images[:, 0].numpy(), labels=[0, 1, 2] * 4, classes=model.classes)
    for call in (
        lambda: model.predict(images),
        lambda: usfan.evaluate(model, labelled),
        lambda: usfan.adapt(model, images, epochs=1, batch_size=4),
    ):
        with pytest.raises(ArtifactError, match="predictions are not finite numbers"):
            call()


def test_a_training_that_diverges_ends_in_one_clear_error():
    data = ImageData(pixels(24)[:, 0].numpy(), labels=[0, 1] * 12, classes=["a", "b"])
    with pytest.raises(UsfanError, match="finite"):
        usfan.train_source(
            data, backbone="digits-cnn", epochs=2, batch_size=8, lr=1e30, validation_share=0
        )


def test_an_adaptation_that_diverges_keeps_the_source():
    source = tiny_model()
    adapted = usfan.adapt(source, pixels(24), epochs=2, batch_size=8, lr=1e30)
    assert adapted.history["kept_epoch"] == 0
    assert torch.equal(adapted.predict(pixels(4)).label, source.predict(pixels(4)).label)
    before = source.classifier.state_dict()
    for name, value in adapted.classifier.state_dict().items():
        assert torch.equal(value, before[name])
