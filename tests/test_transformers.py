"""Models of transformers: in with their head, classes and input, out as a folder that `pipeline` runs unchanged."""

import json
import os

import numpy as np
import pytest
import torch
from PIL import Image

import usfan
from small_runs import TINY, class_folder
from small_runs import usfan as command
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
        return transformers.DeiTImageProcessorPil(
            size={"height": 32, "width": 32}, crop_size=size
        )
    return transformers.ViTImageProcessorPil(size=size)


@pytest.fixture(scope="module")
def photographs():
    """Smooth pictures that are not square."""
    rng = np.random.default_rng(0)
    small = rng.integers(0, 256, (6, 5, 4, 3), dtype=np.uint8)
    return [
        Image.fromarray(image).resize((60, 47), Image.Resampling.BICUBIC) for image in small
    ]


def pipeline_probs(folder, pictures):
    """N × K in the order of NAMES, as the user of a pipeline gets them."""
    pipe = transformers.pipeline(
        "image-classification",
        model=str(folder),
        image_processor=transformers.AutoImageProcessor.from_pretrained(folder, backend="pil"),
        device="cpu",
    )
    rows = [
        {row["label"]: row["score"] for row in pipe(picture, top_k=3)} for picture in pictures
    ]
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


def train(module, prepare, folder):
    """A few steps in plain transformers code."""
    paths = sorted(folder.rglob("*.png"))
    pixels = prepare([Image.open(path) for path in paths], return_tensors="pt")["pixel_values"]
    labels = torch.tensor([NAMES.index(path.parent.name) for path in paths])
    optimiser = torch.optim.Adam(module.parameters(), 1e-2)
    for _ in range(20):
        optimiser.zero_grad()
        module.train()(pixel_values=pixels, labels=labels).loss.backward()
        optimiser.step()
    return module.eval()


@pytest.mark.parametrize("kind", ["ResNet", "ViT"])
def test_a_folder_of_transformers_to_an_adapted_model_that_pipeline_runs(kind, tmp_path):
    data = class_folder(tmp_path / "studio", images=6)
    street = class_folder(tmp_path / "street", images=6, domain=1)
    start = tmp_path / "start"
    train(network(kind), processor(kind), data).save_pretrained(start)
    processor(kind).save_pretrained(start)
    assert command("posterior", start, data, "--out", tmp_path / "source", *TINY) == 0
    options = ("--method", "u-sfan", "--epochs", 2, "--guard", "off", "--lr", 0.1)
    run = tmp_path / "run"
    assert command("adapt", tmp_path / "source", street, "--out", run, *options, *TINY) == 0
    assert command("predict", run, street, "--out", tmp_path / "table.csv", *TINY) == 0
    paths = sorted(street.rglob("*.png"))
    probs = pipeline_probs(run, [Image.open(path) for path in paths])
    model = usfan.SourceModel.load(run)
    torch.testing.assert_close(model.predict(paths).probs, probs, atol=1e-5, rtol=0)
    before = usfan.SourceModel.load(tmp_path / "source").predict(paths).probs
    assert (before - probs).abs().max() > 1e-3  # it was adapted
    assert command("report", run) == 0
    assert f"{kind}ForImageClassification" in (run / "report.html").read_text()


def test_the_labels_of_the_model_or_else_of_the_data_are_its_classes(tmp_path, photographs):
    data = class_folder(tmp_path / "data", images=2)
    module = network("ViT")
    spec = processor("ViT")
    module.config.id2label = {0: "LABEL_0", 1: "LABEL_1", 2: "LABEL_2"}
    model = usfan.attach_posterior(module, data, spec=spec, progress=False)
    assert model.classes == NAMES
    module.config.id2label = {0: "crane", 1: "crane", 2: "ox"}
    model = usfan.attach_posterior(module, photographs, spec=spec, progress=False)
    assert model.classes == ("crane", "crane (1)", "ox")
    assert module.classifier.out_features == 3  # the caller's module is as it was


def test_two_heads_are_refused_with_the_reason(photographs):
    config = transformers.DeiTConfig(**SMALL, **LABELS)
    module = transformers.DeiTForImageClassificationWithTeacher(config)
    with pytest.raises(ConfigError, match=r"averages 2 heads \(cls_classifier, distill"):
        usfan.attach_posterior(module, photographs)
    with pytest.raises(ConfigError, match="load it with AutoModelForImageClassification"):
        usfan.attach_posterior(
            transformers.ViTModel(transformers.ViTConfig(**SMALL)), photographs
        )


def test_a_model_without_a_posterior_or_without_weights_of_its_head_is_refused(
    tmp_path, refused, photographs
):
    network("ViT").save_pretrained(tmp_path / "plain")
    data = class_folder(tmp_path / "data", images=2)
    line = refused("predict", tmp_path / "plain", data, "--out", tmp_path / "t.csv")
    assert "without a posterior: usfan posterior fits one" in line
    network("ViT").vit.save_pretrained(tmp_path / "body")
    line = refused("posterior", tmp_path / "body", data, "--out", tmp_path / "x", *TINY)
    assert (
        "missing tensor classifier.bias: this is no trained ViTForImageClassification" in line
    )


def test_a_folder_is_checked_before_its_network_is_made(tmp_path, photographs):
    model = usfan.attach_posterior(
        network("ViT"), photographs, spec=processor("ViT"), progress=False
    )
    model.save(tmp_path)
    file = tmp_path / "config.json"
    stored = json.loads(file.read_text())
    for field, value, reason in (
        ("num_hidden_layers", 10**9, "more layers than the file has tensors"),
        ("hidden_size", 2**15, "values, and the network has"),
        ("model_type", "nothing", "transformers cannot make this network"),
        ("usfan", [], "must be a table"),
    ):
        file.write_text(json.dumps({**stored, field: value}))
        with pytest.raises(ArtifactError, match=reason):
            usfan.SourceModel.load(tmp_path)
    file.write_text(json.dumps({**stored, "auto_map": {"AutoConfig": "code--evil.C"}}))
    (tmp_path / "evil.py").write_text("raise SystemExit")
    assert usfan.SourceModel.load(tmp_path).classes == NAMES


@pytest.fixture
def stranger(tmp_path):
    """A folder of `save_pretrained` that somebody may change."""
    folder = tmp_path / "stranger"
    network("ViT").save_pretrained(folder)
    processor("ViT").save_pretrained(folder)
    return folder


@pytest.fixture
def fit(tmp_path):
    data = class_folder(tmp_path / "data", images=2)
    return lambda folder: ("posterior", folder, data, "--out", tmp_path / "out", *TINY)


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("config.json", "hidden_size", 2**15),
        ("config.json", "num_hidden_layers", 10**9),
        ("config.json", "patch_size", 0),
        ("config.json", "num_attention_heads", None),
        ("config.json", "id2label", {"²": "class-0"}),
        ("preprocessor_config.json", "size", None),
        ("preprocessor_config.json", "size", {"height": [28], "width": [28]}),
        ("preprocessor_config.json", "resample", 99),
        ("preprocessor_config.json", "image_mean", ["a"]),
        ("preprocessor_config.json", "image_std", [0, 0, 0]),
        ("preprocessor_config.json", "rescale_factor", "x"),
    ],
)
def test_a_strangers_settings_are_refused_in_one_line(
    name, field, value, stranger, fit, refused
):
    file = stranger / name
    file.write_text(json.dumps(json.loads(file.read_text()) | {field: value}))
    assert refused(*fit(stranger))


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_strangers_pipes_are_not_waited_for(name, stranger, fit, refused):
    (stranger / name).unlink()
    os.mkfifo(stranger / name)
    assert "pipe" in refused(*fit(stranger))


def test_a_strangers_code_and_places_do_not_count(stranger, fit, monkeypatch):
    """Nothing asks on the terminal whether to trust the code, nothing beside the weights is read."""
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked"))
    (stranger / "evil.py").write_text("raise SystemExit")
    for name in ("config.json", "preprocessor_config.json"):
        file = stranger / name
        names = ("AutoConfig", "AutoImageProcessor", "AutoModelForImageClassification")
        code = {"auto_map": dict.fromkeys(names, "evil.C"), "_name_or_path": "/"}
        file.write_text(json.dumps(json.loads(file.read_text()) | code))
    for name in ("processor_config.json", "adapter_config.json", "generation_config.json"):
        os.mkfifo(stranger / name)
    assert command(*fit(stranger)) == 0


def test_weights_in_several_files(tmp_path, fit):
    module = network("ViT")
    module.save_pretrained(tmp_path / "parts", max_shard_size="6KB")
    processor("ViT").save_pretrained(tmp_path / "parts")
    assert len(list((tmp_path / "parts").glob("model-*.safetensors"))) > 1
    assert command(*fit(tmp_path / "parts")) == 0
    model = usfan.SourceModel.load(tmp_path / "out")
    pixels = torch.rand(2, 3, 28, 28)
    with torch.no_grad():
        expected = module(pixel_values=pixels).logits
        torch.testing.assert_close(model.classifier(pixels)[1], expected)
