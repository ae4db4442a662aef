"""Models of transformers: in with their head, classes and input, out as a folder that `pipeline` runs unchanged."""

import json

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import usfan
from small_runs import TINY, class_folder, usfan as command
from usfan.errors import ArtifactError, ConfigError

transformers = pytest.importorskip("transformers")

SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
SMALL |= {"intermediate_size": 16, "image_size": 28, "patch_size": 7}
NAMES = ("class-0", "class-1", "class-2")
LABELS = {"id2label": dict(enumerate(NAMES)), "label2id": {n: i for i, n in enumerate(NAMES)}}


def network(kind: str):
    """A classifier of this architecture with random weights, small enough to be made at once."""
    torch.manual_seed(0)
    stages = {"hidden_sizes": [8, 16], "depths": [1, 1]}
    settings = {
        "ViT": SMALL,
        "DeiT": SMALL,
        "ResNet": {"embedding_size": 8, "layer_type": "basic", **stages},
        "ConvNext": {"num_stages": 2, **stages},
        "Swin": {"image_size": 28, "patch_size": 2, "embed_dim": 8, "depths": [1, 1]}
        | {"num_heads": [1, 2], "window_size": 7},
    }
    config = getattr(transformers, f"{kind}Config")(**settings[kind], **LABELS)
    return getattr(transformers, f"{kind}ForImageClassification")(config).eval()


def processor(kind: str):
    size = {"height": 28, "width": 28}
    if kind in ("ResNet", "ConvNext"):
        return transformers.ConvNextImageProcessorPil(size={"shortest_edge": 28})
    if kind == "DeiT":
        return transformers.DeiTImageProcessorPil(size={"height": 32, "width": 32}, crop_size=size)
    return transformers.ViTImageProcessorPil(size=size)


@pytest.fixture(scope="module")
def photographs():
    """Smooth pictures that are not square."""
    rng = np.random.default_rng(0)
    small = rng.integers(0, 256, (6, 5, 4, 3), dtype=np.uint8)
    return [Image.fromarray(image).resize((60, 47), Image.Resampling.BICUBIC) for image in small]


def pipeline_probs(folder, pictures, model=None):
    """N × K in the order of NAMES, as the user of a pipeline gets them."""
    pipe = transformers.pipeline(
        "image-classification",
        model=model or str(folder),
        image_processor=transformers.AutoImageProcessor.from_pretrained(folder, backend="pil"),
        device="cpu",
    )
    rows = [{row["label"]: row["score"] for row in pipe(picture, top_k=3)} for picture in pictures]
    return torch.tensor([[row[name] for name in NAMES] for row in rows])


@pytest.mark.parametrize("kind", ["ViT", "DeiT", "ResNet", "ConvNext", "Swin"])
def test_usfan_and_pipeline_agree_before_and_after_saving(kind, tmp_path, photographs):
    original = tmp_path / "original"
    module = network(kind)
    module.save_pretrained(original)
    processor(kind).save_pretrained(original)
    module = transformers.AutoModelForImageClassification.from_pretrained(original)
    expected = pipeline_probs(original, photographs)
    model = usfan.attach_posterior(module, photographs, device="cpu")
    assert model.classes == NAMES
    assert model.classifier.head.in_features == 16
    torch.testing.assert_close(model.predict(photographs).probs, expected, atol=1e-5, rtol=0)
    with torch.no_grad():
        model.classifier.head.bias += torch.tensor([0.5, 0.0, -0.5])
    model.posterior.bias.copy_(model.classifier.head.bias.detach())
    model.save(tmp_path / "saved")
    probs = model.predict(photographs).probs
    assert (probs - expected).abs().max() > 0.01
    torch.testing.assert_close(
        pipeline_probs(tmp_path / "saved", photographs), probs, atol=1e-5, rtol=0
    )
    again = transformers.AutoModelForImageClassification.from_pretrained(tmp_path / "saved")
    assert type(again) is type(module)
    loaded = usfan.SourceModel.load(tmp_path / "saved")
    torch.testing.assert_close(loaded.predict(photographs).probs, probs)
    assert loaded.spec == model.spec
