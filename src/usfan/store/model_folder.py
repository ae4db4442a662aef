"""The model folder: config.json, model.safetensors, posterior.safetensors. It is passed from one party to another.

Nothing in it is executed. Before a tensor is read, every name, shape and dtype in the headers of its files is compared
with those that the config implies (the network is first built without memory, on torch's meta device); then values are
checked to be finite, and the posterior to be one.
"""

from __future__ import annotations

import contextlib
import difflib
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from usfan.data.views import InputSpec
from usfan.errors import ArtifactError, UsfanError, first_line, printable
from usfan.files import Folder, read_json_in, write_json, write_tensors, write_text
from usfan.maths.unknown import UnknownRule
from usfan.models.backbones import create_backbone, timm_model, timm_spec
from usfan.models.classifier import Classifier, WrappedClassifier, copy_module, wrap_module
from usfan.models.hub import hub_or_cache
from usfan.store.card import model_card
from usfan.store.cost import check_image_cost
from usfan.store.schema import (
    JsonTable,
    MixtureConfig,
    ModelConfig,
    check_config,
    parse_config,
)
from usfan.tensor_file import Expected, check_header, check_values, open_tensors_in
from usfan.uncertainty.base import Uncertainty
from usfan.uncertainty.kronecker import KroneckerPosterior
from usfan.uncertainty.registry import uncertainties_by_kind

CONFIG = "config.json"
MODEL = "model.safetensors"
POSTERIOR = "posterior.safetensors"
FILES = (CONFIG, MODEL, POSTERIOR)
MEMBER = "member-{}"
"""Folders of the models of a mixture."""
SHARED = ("classes", "spec", "architecture", "summary", "temperature", "samples")
"""Fields of a model that are fields of its config."""
LAYERS = ("bottleneck", "dropout", "head_bias", "head_norm")
"""Settings of the layers after the backbone."""
MAX_CONFIG_BYTES = 16 << 20


def save_model(model: Any, folder: Path, *, private: bool = False) -> Path:
    """Write a model: tensors first, config last, because a folder without config.json is not a model."""
    config = model_config(model, private=private)
    check_config(config, folder / CONFIG)
    folder.mkdir(parents=True, exist_ok=True)
    if model.kind == "mixture":
        for number, member in enumerate(model.members, start=1):
            save_model(member, folder / MEMBER.format(number), private=private)
    else:
        write_tensors(folder / MODEL, model.classifier.state_dict())
        write_tensors(folder / POSTERIOR, model.posterior.tensors())
        uncertainty = model.uncertainty
        if uncertainty is not model.posterior and uncertainty.tensors():
            write_tensors(folder / f"{uncertainty.kind}.safetensors", uncertainty.tensors())
    write_json(folder / CONFIG, config)
    write_text(folder / "README.md", model_card(config))
    return folder


def model_config(model: Any, *, private: bool = False) -> JsonTable:
    """The content of config.json."""
    config: JsonTable = {"format": "usfan", "version": 1, "kind": model.kind}
    if model.kind == "mixture":
        config["shares"] = list(model.shares)
    else:
        posterior = model.posterior
        config["architecture"] = model.architecture
        config["input"] = asdict(model.spec)
        config["posterior"] = posterior.settings()
        config["posterior"]["features"] = posterior.weight.shape[1]
        config["posterior"]["bias"] = posterior.bias is not None
        if private:
            config["posterior"]["log_likelihood"] = None
        config["uncertainty"] = uncertainty_table(model)
        config["temperature"] = model.temperature
        config["samples"] = model.samples
    if model.kind != "source":
        rule = model.unknown_rule
        config["method"] = model.method
        config["unknown_rule"] = None if rule is None else rule.to_dict()
    config["classes"] = list(model.classes)
    config["summary"] = {} if private else model.summary
    return config


def uncertainty_table(model: Any) -> JsonTable:
    """The kind of uncertainty in use and its settings; those of the posterior stand in a table of their own."""
    if model.uncertainty is model.posterior:
        return {"kind": model.posterior.kind}
    return {"kind": model.uncertainty.kind, **model.uncertainty.settings()}


def load_parts(
    folder: str | Path, *, module: nn.Module | None = None, **download: object
) -> tuple[str, JsonTable]:
    """The kind of model in a folder, and the fields that make it. `download` goes to
    `huggingface_hub.snapshot_download` if the folder is a Hub id: revision, token, …"""
    with open_folder(folder, **download) as opened:
        config = read_config(opened)
        if isinstance(config, MixtureConfig):
            return "mixture", read_mixture(config, opened, module)
        return config.kind, read_parts(config, opened, module)


def read_config(opened: Folder) -> ModelConfig | MixtureConfig:
    must_hold(opened, FILES[:1])
    return parse_config(read_json_in(opened, CONFIG, MAX_CONFIG_BYTES), opened.path / CONFIG)


def read_parts(config: ModelConfig, opened: Folder, module: nn.Module | None) -> JsonTable:
    """The fields of a source model or an adapted model."""
    must_hold(opened, FILES)
    classifier = build_classifier(config, opened, module)
    posterior = read_posterior(config, opened, classifier)
    parts: JsonTable = {name: getattr(config, name) for name in SHARED}
    parts["classifier"] = classifier.eval()
    parts["posterior"] = posterior
    parts["uncertainty"] = read_uncertainty(config, opened, posterior)
    if config.kind == "adapted":
        parts["method"] = config.method
        parts["unknown_rule"] = read_rule(config, opened.path)
    return parts


def read_mixture(config: MixtureConfig, opened: Folder, module: nn.Module | None) -> JsonTable:
    """The fields of a mixture; each member as (kind, fields)."""
    members = []
    for number in range(1, len(config.shares) + 1):
        name = MEMBER.format(number)
        if opened.kind(name) == "missing":
            raise ArtifactError(
                f"{opened.path}: no folder {name} in it; it is a mixture of {len(config.shares)} models"
            )
        with opened.inner(name) as inner:
            member = read_config(inner)
            if isinstance(member, MixtureConfig):
                raise ArtifactError(
                    f"{inner.path}/config.json: kind: a member of a mixture cannot be a mixture itself"
                )
            members.append((member.kind, read_parts(member, inner, module)))
    return {
        "members": members,
        "classes": config.classes,
        "shares": config.shares,
        "method": config.method,
        "unknown_rule": read_rule(config, opened.path),
        "summary": config.summary,
    }


def load_config(folder: str | Path) -> ModelConfig:
    """The folder's description of its model. It is quick, because no network is built. A mixture, which has several
    networks, is refused."""
    with open_folder(folder) as opened:
        config = read_config(opened)
        if isinstance(config, MixtureConfig):
            numbers = range(1, len(config.shares) + 1)
            members = ", ".join(str(opened.path / MEMBER.format(n)) for n in numbers)
            raise ArtifactError(
                f"{opened.path} is a mixture of {len(numbers)} models, which are adapted one by one: {members}"
            )
        must_hold(opened, FILES)
        return config


def open_folder(folder: str | Path, **download: object) -> Folder:
    """A model folder, or the local copy of one on the Hub, whose files are links into the Hub's cache."""
    path = Path(folder)
    if not path.is_dir():
        path = fetch_folder(folder, **download)
    return Folder(path, shared=hub_cache(path))


def must_hold(opened: Folder, names: Sequence[str]) -> None:
    for name in names:
        if not opened.holds(name):
            kind = opened.kind(name)
            why = "" if kind == "missing" else f" (what has this name is {kind})"
            raise ArtifactError(
                f"{opened.path}: no {name} in it{why}; a model folder holds {', '.join(FILES)}"
            )


def hub_cache(path: Path) -> Path | None:
    """The repository's part of the Hub's cache, if the folder is a snapshot in it."""
    real = Path(os.path.realpath(path))
    if len(real.parts) <= 3 or real.parent.name != "snapshots":
        return None
    repository = real.parents[1]
    return repository / "blobs" if repository.name.startswith("models--") else None


def fetch_folder(folder: str | Path, **download: Any) -> Path:
    """Download a model folder from the Hub. A path that is mistyped is not looked up there."""
    path = Path(folder)
    if (
        path.exists()
        or not re.fullmatch(r"[\w.-]+/[\w.-]+", str(folder))
        or str(folder).startswith(".")
    ):
        raise ArtifactError(f"{printable(folder)}: no such model folder{near(path)}")
    if path.parent.is_dir():
        raise ArtifactError(
            f"{folder}: no such folder in {path.parent}{near(path)} "
            f"(it was not looked up on the Hugging Face Hub, because there is a folder {path.parent} here)"
        )
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
    )

    try:
        with hub_or_cache():
            return Path(snapshot_download(str(folder), allow_patterns=file_names(), **download))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = first_line(error)
        raise ArtifactError(
            f"{folder}: no such model folder here, and the Hugging Face Hub does not provide it: {reason}"
        ) from None


def file_names() -> list[str]:
    """All files that a model folder, or a member of a mixture, can have."""
    names = [*FILES, *(f"{kind}.safetensors" for kind in uncertainties_by_kind())]
    return names + [f"{MEMBER.format('*')}/{name}" for name in names]


def near(path: Path) -> str:
    """A question with the folders beside it that are named alike."""
    try:
        beside = [item.name for item in path.parent.iterdir() if item.is_dir()]
    except OSError:
        return ""
    close = difflib.get_close_matches(path.name, beside, n=2)
    names = " or ".join(printable(path.parent / name, 200) for name in close)
    return f"; did you mean {names}?" if close else ""


def build_classifier(
    config: ModelConfig, folder: Folder, module: nn.Module | None
) -> Classifier:
    """The network. A sketch without memory gives every name, shape and dtype; if the file holds just these, the cost
    of an image is checked, and only then is the network made."""
    file = folder.path / MODEL
    architecture = config.architecture
    if "module" in architecture and (module is not None or "timm" not in architecture):
        classifier: Classifier = wrap_again(config, folder.path, module)
    else:
        if module is not None:
            raise ArtifactError(
                f"{folder.path}/config.json: architecture: this model is {architecture['backbone']!r}; "
                "no module is needed"
            )
        with open_tensors_in(folder, MODEL) as tensors:
            width = stored_width(tensors, config)
            with torch.device("meta"):
                sketch, native = new_classifier(config, folder.path, width)
            check_header(file, tensors, shapes_of(sketch))
        check_input(sketch, native, config, folder.path)
        classifier, _ = new_classifier(config, folder.path, width)
    classifier.load_state_dict(read_checked(folder, MODEL, shapes_of(classifier)))
    return classifier


@contextlib.contextmanager
def blaming(place: str) -> Iterator[None]:
    """Errors inside are those of a file, or of a field in it."""
    try:
        yield
    except (UsfanError, OverflowError, RecursionError) as error:
        raise ArtifactError(f"{place}: {printable(error, 600)}") from None


def shapes_of(classifier: Classifier) -> Expected:
    state = classifier.state_dict()
    return {name: (tuple(value.shape), value.dtype) for name, value in state.items()}


def read_checked(folder: Folder, name: str, expected: Expected) -> dict[str, Tensor]:
    """The tensors of a file, after a check of its header."""
    file = folder.path / name
    with open_tensors_in(folder, name) as tensors:
        check_header(file, tensors, expected)
        state = {name: tensors.get_tensor(name) for name in expected}
    check_values(file, state)
    return state


def stored_width(tensors: Any, config: ModelConfig) -> int:
    """The number of features of the backbone, from the file. The check of the header shows whether it is right; to
    compute it takes seconds for some networks."""
    name = "bottleneck.0.weight"
    if name in tensors.keys():  # noqa: SIM118
        shape = tensors.get_slice(name).get_shape()
        if len(shape) == 2:
            return int(shape[1])
    return int(config.posterior["features"])


def new_classifier(config: ModelConfig, path: Path, width: int) -> tuple[Classifier, InputSpec]:
    """The network, and the input that it is made for."""
    architecture = config.architecture
    classes = len(config.classes)
    channels = config.spec.channels
    with blaming(f"{path}/config.json: architecture"):
        if "timm" in architecture:
            model = timm_model(architecture["timm"], num_classes=classes)
            return WrappedClassifier(model, architecture["head"]), timm_spec(model, channels)
        backbone = create_backbone(
            architecture["backbone"], "none", channels=channels, features=width
        )
        options = {name: architecture[name] for name in LAYERS}
        return Classifier(backbone.module, backbone.features, classes, **options), backbone.spec


def check_input(sketch: Classifier, native: InputSpec, config: ModelConfig, path: Path) -> None:
    """Check that the network takes images of the size in the config, and the cost of one; nothing is allocated."""
    spec = config.spec
    try:
        check_image_cost(sketch.eval(), spec, native, f"{path}/config.json")
    except ArtifactError:
        raise
    except Exception as error:  # of the network
        reason = printable(first_line(error), 300)
        raise ArtifactError(
            f"{path}/config.json: input: {spec.shape_text} images do not fit the network: {reason}"
        ) from None


def wrap_again(config: ModelConfig, path: Path, module: nn.Module | None) -> WrappedClassifier:
    """A copy of the user's module, which stays unchanged."""
    architecture = config.architecture
    if module is None:
        raise ArtifactError(
            f"{path}: holds the tensors of your own module {architecture['module']!r}: give it again, "
            "load(folder, module=…), or on the command line --module MODULE:FUNCTION"
        )
    example = torch.zeros(2, *config.spec.shape)
    with blaming(f"{path}/config.json: architecture"):
        copied = copy_module(module).to("cpu", torch.float32)
        wrapped = wrap_module(copied, architecture["head"], example)
    outputs = wrapped.head.out_features
    if outputs != len(config.classes):
        raise ArtifactError(
            f"{path}/config.json: classes: the model has {len(config.classes)}, the module given {outputs}"
        )
    return wrapped


def read_posterior(
    config: ModelConfig, folder: Folder, classifier: Classifier
) -> KroneckerPosterior:
    """The posterior. Its shapes are compared with the head of the network before a tensor is read."""
    settings = dict(config.posterior)
    features = settings.pop("features")
    bias = settings.pop("bias")
    head = classifier.head
    for name, stored, actual in (
        ("features", features, head.in_features),
        ("bias", bias, head.bias is not None),
    ):
        if stored != actual:
            raise ArtifactError(
                f"{folder.path}/config.json: posterior.{name} is {stored}, that of the network {actual}"
            )
    shapes = KroneckerPosterior.posterior_shapes(len(config.classes), features, bias)
    dtype = stored_dtype(folder)
    expected = {name: (shape, dtype) for name, shape in shapes.items()}
    state: dict[str, Any] = read_checked(folder, POSTERIOR, expected)
    posterior = KroneckerPosterior(**{"bias": None, **state}, **settings)
    with blaming(f"{folder.path / POSTERIOR}"):
        posterior.check()
    check_head(classifier, posterior, folder.path)
    return posterior


def stored_dtype(folder: Folder) -> torch.dtype:
    """The dtype of the posterior: that of its weight. The check of the header names a tensor that differs."""
    with open_tensors_in(folder, POSTERIOR) as tensors:
        if "weight" in tensors.keys() and tensors.get_slice("weight").get_dtype() == "F64":  # noqa: SIM118
            return torch.float64
    return torch.float32


def read_uncertainty(
    config: ModelConfig, folder: Folder, posterior: KroneckerPosterior
) -> Uncertainty:
    """The uncertainty in use, for the layer of the posterior."""
    settings = dict(config.uncertainty)
    kind = uncertainties_by_kind()[settings.pop("kind")]
    shapes = kind.tensor_shapes(settings, posterior.weight, posterior.bias)
    if not shapes:
        return kind.from_stored(posterior, settings, {})
    file = f"{kind.kind}.safetensors"
    if not folder.holds(file):
        raise ArtifactError(
            f"{folder.path}: no {file} in it, which config.json (uncertainty) says is there"
        )
    expected = {name: (shape, posterior.weight.dtype) for name, shape in shapes.items()}
    return kind.from_stored(posterior, settings, read_checked(folder, file, expected))


def check_head(classifier: Classifier, posterior: KroneckerPosterior, path: Path) -> None:
    """Check that the posterior is that of this very head; their shapes are the same."""
    weight, bias = classifier.head_tensors()
    for name, tensor, stored in (
        ("weight", weight, posterior.weight),
        ("bias", bias, posterior.bias),
    ):
        if tensor is None or stored is None:
            continue
        if not torch.allclose(tensor, stored.to(tensor), rtol=1e-3, atol=1e-4):
            raise ArtifactError(
                f"{path}/posterior.safetensors: {name!r} is not that of the model's last layer: "
                "the files do not belong together"
            )


def read_rule(config: ModelConfig | MixtureConfig, path: Path) -> UnknownRule | None:
    if config.unknown_rule is None:
        return None
    with blaming(f"{path}/config.json: unknown_rule"):
        return UnknownRule.from_dict(config.unknown_rule)
