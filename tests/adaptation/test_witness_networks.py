"""Vision models of transformers and timm as witnesses, by their folders: what they see is what the library computes."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import timm
import torch
import yaml
from PIL import Image
from safetensors.torch import save_file

import usfan
from small_runs import adapt_tiny, class_folder, train_tiny
from tiny_models import tiny_model
from usfan.adaptation.witness import choose_witness
from usfan.engine.passes import engine_store
from usfan.engine.runtime import start_runtime
from usfan.errors import ConfigError

transformers = pytest.importorskip("transformers")

SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
SMALL |= {"intermediate_size": 16, "image_size": 28, "patch_size": 7}
TEXT = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 50}
STAGES = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic"}


def network(kind: str):
    """A small network with random weights."""
    torch.manual_seed(0)
    vit = transformers.ViTConfig(**SMALL, num_labels=120)
    networks = {
        "CLIP": lambda: transformers.CLIPModel(
            transformers.CLIPConfig(text_config=TEXT, vision_config=SMALL, projection_dim=8)
        ),
        "CLIP vision": lambda: transformers.CLIPVisionModel(
            transformers.CLIPVisionConfig(**SMALL)
        ),
        "DINO": lambda: transformers.ViTModel(vit, add_pooling_layer=False),
        "DINOv2": lambda: transformers.Dinov2Model(transformers.Dinov2Config(**SMALL)),
        "ViT": lambda: transformers.ViTModel(vit),
        "ViT classifier": lambda: transformers.ViTForImageClassification(vit),
        "ResNet": lambda: transformers.ResNetModel(transformers.ResNetConfig(**STAGES)),
    }
    return networks[kind]().eval()


KINDS = ("CLIP", "CLIP vision", "DINO", "DINOv2", "ViT", "ViT classifier", "ResNet")


def processor():
    return transformers.ViTImageProcessorPil(
        size={"height": 28, "width": 28}, image_mean=[0.4, 0.5, 0.6], image_std=[0.2] * 3
    )


def expected_features(kind: str, module, pictures) -> torch.Tensor:
    pixels = processor()(pictures, return_tensors="pt")["pixel_values"]
    vision = module.vision_model if kind == "CLIP" else module
    vision = module.vit if kind == "ViT classifier" else vision
    with torch.no_grad():
        output = vision(pixel_values=pixels)
    if kind in ("DINO", "ViT classifier"):
        return output.last_hidden_state[:, 0]
    return output.pooler_output.flatten(1)


@pytest.fixture(scope="module")
def pictures():
    rng = np.random.default_rng(0)
    return [
        Image.fromarray(rng.integers(0, 256, (28, 28, 3), dtype=np.uint8)) for _ in range(5)
    ]


def saved(kind: str, folder):
    module = network(kind)
    module.save_pretrained(folder)
    processor().save_pretrained(folder)
    return module


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_of_transformers_is_a_witness(kind, tmp_path, pictures):
    folder = tmp_path / "network"
    expected = expected_features(kind, saved(kind, folder), pictures)
    witness = choose_witness(str(folder), tiny_model(), "")
    assert witness.name == "network"
    assert witness.spec.mean == (0.4, 0.5, 0.6)
    runtime = start_runtime(None)
    store = engine_store(usfan.ImageData(pictures), witness.spec, runtime)
    features = witness.features(store, runtime)
    torch.testing.assert_close(features, expected, atol=1e-5, rtol=1e-4)
    with_classes = kind == "ViT classifier"
    assert (witness.classifier is not None) == with_classes
    assert witness.testimony(store, runtime).shape == (5, 16 + 120 * with_classes)


def test_adapt_with_the_folder_of_a_witness(tmp_path):
    """A source model without a witness of its own takes the one that is named, and the run says which."""
    data = class_folder(tmp_path / "studio", images=4)
    source = train_tiny(data, tmp_path / "source")
    saved("DINOv2", tmp_path / "dino")
    config = tmp_path / "settings.yaml"
    config.write_text(yaml.safe_dump({"witness": str(tmp_path / "dino")}))
    run = adapt_tiny(source, data, tmp_path / "run", "--config", config, "--guard", "off")
    model = usfan.SourceModel.load(run)
    assert model.method == "u-sfan++"
    assert json.loads((run / "witness.json").read_text()) == model.summary["witness"]
    assert model.summary["witness"]["name"] == "dino"


def test_a_private_run_does_not_say_where_its_witness_lies(tmp_path):
    data = class_folder(tmp_path / "studio", images=4)
    source = train_tiny(data, tmp_path / "source")
    saved("DINOv2", tmp_path / "secret-witness")
    place = ("--witness", tmp_path / "secret-witness")
    run = adapt_tiny(source, data, tmp_path / "run", *place, "--private")
    files = [file for file in run.rglob("*") if file.is_file()]
    assert [file.name for file in files if b"secret-witness" in file.read_bytes()] == []
    metrics = json.loads((run / "metrics.json").read_text())
    assert json.loads((run / "witness.json").read_text()) == metrics["witness"]


def test_a_folder_of_timm_is_a_witness(tmp_path):
    torch.manual_seed(0)
    module = timm.create_model("test_resnet", num_classes=120)
    save_file(module.state_dict(), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"architecture": "test_resnet"}))
    witness = choose_witness(str(tmp_path), tiny_model(), "")
    images = torch.rand(2, *witness.spec.shape)
    with torch.no_grad():
        expected = module.eval().forward_head(module.forward_features(images), pre_logits=True)
        torch.testing.assert_close(witness.module.eval()(images), expected)
    assert len(witness.classifier.bias) == 120


def test_folders_that_are_no_witness(tmp_path, refused):
    def reason(folder) -> str:
        with pytest.raises(ConfigError) as raised:
            choose_witness(str(folder), tiny_model(), "")
        return str(raised.value)

    empty = tmp_path / "empty"
    empty.mkdir()
    assert "no folder of a transformers or timm model" in reason(empty)
    bare = tmp_path / "bare"
    network("ViT").save_pretrained(bare)
    assert "save the image processor there too" in reason(bare)
    text = tmp_path / "text"
    transformers.BertModel(transformers.BertConfig(**TEXT)).save_pretrained(text)
    processor().save_pretrained(text)
    assert "does not take images of 3×28×28" in reason(text)
    half = tmp_path / "half"
    saved("ViT", half)
    config = json.loads((half / "config.json").read_text())
    (half / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 2}))
    assert "missing tensor" in reason(half)
    pickled = tmp_path / "pickled"
    state = saved("ViT", pickled).state_dict()
    (pickled / "model.safetensors").unlink()
    torch.save(state, pickled / "pytorch_model.bin")
    assert "no model.safetensors; usfan reads no other weights" in reason(pickled)


def test_code_that_a_config_names_is_not_run(tmp_path):
    folder = tmp_path / "network"
    saved("CLIP", folder)
    shutil.copytree(folder, tmp_path / "plain")
    (folder / "evil.py").write_text("raise SystemExit")
    file = folder / "config.json"
    config = json.loads(file.read_text())
    code = {"auto_map": {"AutoConfig": "evil.C", "AutoModel": "evil.C"}}
    code |= {"attn_implementation": "somebody/kernel", "quantization_config": {"x": 1}}
    file.write_text(
        json.dumps({**config, **code, "vision_config": config["vision_config"] | code})
    )
    file = folder / "preprocessor_config.json"
    file.write_text(
        json.dumps(
            json.loads(file.read_text()) | {"auto_map": {"AutoImageProcessor": "evil.C"}}
        )
    )
    expected = choose_witness(str(tmp_path / "plain"), tiny_model(), "").hash
    assert choose_witness(str(folder), tiny_model(), "").hash == expected
