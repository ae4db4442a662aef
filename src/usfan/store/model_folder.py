"""The model folder: config.json, model.safetensors, posterior.safetensors. It is passed from one party to another.

Nothing in it is executed. Before a tensor is read, every name, shape and dtype in the headers of its files is compared
with those that the config implies (the network is first built without memory, on torch's meta device); then values are
checked to be finite, and the posterior to be one.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from usfan.data.views import InputSpec
from usfan.errors import ArtifactError, first_line, option, printable
from usfan.files import (
    Folder,
    read_in,
    write_json,
    write_tensors,
    written_together,
)
from usfan.models import hugging_face
from usfan.models.backbones import create_backbone, timm_model, timm_spec
from usfan.models.classifier import (
    LAYER_SETTINGS,
    Classifier,
    WrappedClassifier,
    copy_module,
    wrap_module,
)
from usfan.models.hub import hub_or_cache
from usfan.store.cost import check_image_cost
from usfan.store.schema import (
    JsonTable,
    MixtureConfig,
    ModelConfig,
    blaming,
    check_config,
    parse_config,
)
from usfan.tensor_file import check_header, check_values, open_tensors_in
from usfan.uncertainty.base import Uncertainty
from usfan.uncertainty.kronecker import KroneckerPosterior
from usfan.uncertainty.registry import uncertainties_by_kind

CONFIG = "config.json"
MODEL = "model.safetensors"
POSTERIOR = "posterior.safetensors"
FILES = (CONFIG, MODEL, POSTERIOR)
HUB_FILES = ["*config.json", "*.safetensors", "*.safetensors.index.json"]
"""Files of a model and of the members of a mixture that are downloaded."""
MEMBER = "member-{}"
"""Folders of the models of a mixture."""
MAX_CONFIG_BYTES = 16 << 20


def save_model(model: Any, folder: Path, *, private: bool = False) -> Path:
    """Write a model: all of its files replace those of another one together, or none does."""
    check_model(model, folder)
    with written_together(folder) as part:
        write_model(model, part, private=private)
    return folder


def check_model(model: Any, folder: Path) -> None:
    """Raise if the model could not be loaded again: an odd field, or a number that is not finite."""
    config = model_config(model)
    if "transformers" in model.architecture:
        config = with_network(config, model)
    check_config(config, folder / CONFIG)
    if model.kind == "mixture":
        for number, member in enumerate(model.members, start=1):
            check_model(member, folder / MEMBER.format(number))
        return
    for name, tensors in model_tensors(model).items():
        check_values(folder / name, tensors)


def write_model(model: Any, folder: Path, *, private: bool) -> None:
    if model.kind == "mixture":
        for number, member in enumerate(model.members, start=1):
            write_model(member, folder / MEMBER.format(number), private=private)
    else:
        for name, tensors in model_tensors(model).items():
            write_tensors(folder / name, tensors, {"format": "pt"})
    config = model_config(model, private=private)
    if "transformers" in model.architecture:
        config = with_network(config, model)
        write_json(folder / hugging_face.PROCESSOR, hugging_face.processor_of(model.spec))
    write_json(folder / CONFIG, config)


def with_network(config: JsonTable, model: Any) -> JsonTable:
    """config.json of a folder that transformers loads too: its own settings, and ours under `usfan`."""
    names = [str(name) for name in model.classes]
    return {
        **model.architecture["transformers"],
        "id2label": {str(number): name for number, name in enumerate(names)},
        "label2id": {name: number for number, name in enumerate(names)},
        "usfan": config,
    }


def model_tensors(model: Any) -> dict[str, dict[str, Tensor]]:
    """The tensors of a model that is no mixture, by file."""
    classifier = model.classifier
    files = {MODEL: classifier.state_dict(), POSTERIOR: model.posterior.tensors()}
    if "transformers" in model.architecture:
        files[MODEL] = hugging_face.stored_tensors(
            classifier.backbone, classifier.head_name, classifier.head
        )
    if model.uncertainty is not model.posterior:
        files[f"{model.uncertainty.kind}.safetensors"] = model.uncertainty.tensors()
    return {name: tensors for name, tensors in files.items() if tensors}


def model_config(model: Any, *, private: bool = False) -> JsonTable:
    """The content of config.json."""
    config: JsonTable = {"format": "usfan", "version": 1, "kind": model.kind}
    if model.kind == "mixture":
        config["shares"] = list(model.shares)
    else:
        posterior = model.posterior
        architecture = dict(model.architecture)
        architecture.pop("transformers", None)
        config["architecture"] = architecture
        config["input"] = asdict(model.spec)
        config["posterior"] = posterior.settings()
        config["posterior"]["features"] = posterior.weight.shape[1]
        config["posterior"]["bias"] = posterior.bias is not None
        if private:
            config["posterior"]["log_likelihood"] = None
        config["uncertainty"] = {"kind": model.uncertainty.kind}
        if model.uncertainty is not posterior:
            config["uncertainty"] |= model.uncertainty.settings()
        config["temperature"] = model.temperature
        config["samples"] = model.samples
    if model.kind != "source":
        rule = model.unknown_rule
        config["method"] = model.method
        config["unknown_rule"] = None if rule is None else rule.to_dict()
    config["confidence_temperature"] = model.confidence_temperature
    config["classes"] = list(model.classes)
    config["summary"] = {} if private else model.summary
    return config


def load_parts(folder: str | Path, module: nn.Module | None = None) -> JsonTable:
    """The kind of model in a folder or behind a Hub id, and the fields that make it."""
    with open_folder(folder) as opened:
        config = read_config(opened)
        if isinstance(config, MixtureConfig):
            return read_mixture(config, opened, module)
        return read_parts(config, opened, module)


def read_config(opened: Folder) -> ModelConfig | MixtureConfig:
    must_hold(opened, FILES[:1])
    return parse_config(read_in(opened, CONFIG, MAX_CONFIG_BYTES), opened.path / CONFIG)


def read_parts(config: ModelConfig, opened: Folder, module: nn.Module | None) -> JsonTable:
    """The kind and the fields of a source model or an adapted model."""
    must_hold(opened, FILES)
    classifier = build_classifier(config, opened, module)
    posterior = read_posterior(config, opened, classifier)
    parts = {**vars(config), "classifier": classifier.eval(), "posterior": posterior}
    parts["uncertainty"] = read_uncertainty(config, opened, posterior)
    if config.kind == "source":
        del parts["method"], parts["unknown_rule"]
    return parts


def read_mixture(config: MixtureConfig, opened: Folder, module: nn.Module | None) -> JsonTable:
    """The kind and the fields of a mixture; each member as its kind and fields."""
    members = []
    for number in range(1, len(config.shares) + 1):
        name = MEMBER.format(number)
        must_hold(opened, [name])
        with opened.inner(name) as inner:
            member = read_config(inner)
            if isinstance(member, MixtureConfig):
                raise ArtifactError(
                    f"{inner.path}/config.json: kind: a member of a mixture cannot be a mixture itself"
                )
            members.append(read_parts(member, inner, module))
    return {**vars(config), "members": members}


def load_config(folder: str | Path) -> ModelConfig:
    """The folder's description of its model. It is quick, because no network is built. A mixture, which has several
    networks, is refused."""
    with open_folder(folder) as opened:
        config = read_config(opened)
        if isinstance(config, MixtureConfig):
            raise ArtifactError(
                f"{opened.path} is a mixture of {len(config.shares)} models, which are adapted one by one: "
                f"{opened.path}/member-1, …"
            )
        must_hold(opened, FILES)
        return config


def open_folder(folder: str | Path) -> Folder:
    """A model folder, or the local copy of one on the Hub, whose files are links into the Hub's cache."""
    path = Path(folder)
    if not path.is_dir():
        path = fetch_folder(folder)
    return Folder(path, shared=hub_cache(path)).see_newer()


def must_hold(opened: Folder, names: Sequence[str]) -> None:
    for name in names:
        if opened.kind(name) == "missing":
            raise ArtifactError(
                f"{opened.path}: no {name} in it; a model folder holds {', '.join(FILES)}"
            )


def hub_cache(path: Path) -> Path | None:
    """The repository's part of the Hub's cache, if the folder is a snapshot in it."""
    real = Path(os.path.realpath(path))
    if len(real.parts) <= 3 or real.parent.name != "snapshots":
        return None
    repository = real.parents[1]
    return repository / "blobs" if repository.name.startswith("models--") else None


def may_be_hub_id(name: str | Path) -> bool:
    path = Path(name)
    is_id = re.fullmatch(r"\w[\w.-]*/[\w.-]+", str(name)) is not None
    return is_id and not path.exists() and not path.parent.is_dir()


def fetch_folder(folder: str | Path) -> Path:
    """Download a model folder from the Hub. A path that is mistyped is not looked up there."""
    path = Path(folder)
    place = f"{printable(folder)}: no such model folder"
    if path.exists() or not re.fullmatch(r"\w[\w.-]*/[\w.-]+", str(folder)):
        raise ArtifactError(f"{place}{near(path)}")
    if path.parent.is_dir():
        raise ArtifactError(
            f"{place}{near(path)} "
            f"(it was not looked up on the Hugging Face Hub, because there is a folder {path.parent} here)"
        )
    from huggingface_hub import snapshot_download

    try:
        with hub_or_cache():
            return Path(snapshot_download(str(folder), allow_patterns=HUB_FILES))
    except (OSError, ValueError) as error:  # of the Hub: its errors are of these kinds
        raise ArtifactError(
            f"{place} here, and the Hugging Face Hub does not provide it: {first_line(error)}"
        ) from None


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
    if "transformers" in architecture and module is None:
        return read_network(config, folder)
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
            check_header(file, tensors, sketch.state_dict())
        check_input(sketch, native, config, folder.path)
        classifier, _ = new_classifier(config, folder.path, width)
    classifier.load_state_dict(read_checked(folder, MODEL, classifier.state_dict()))
    return classifier


def read_network(config: ModelConfig, folder: Folder) -> Classifier:
    """A network of transformers, which names tensors as it likes: their number of values must be that of a sketch."""
    file = folder.path / MODEL
    head = config.architecture["head"]
    with open_tensors_in(folder, MODEL) as tensors, blaming(str(file)):
        shapes = {name: tensors.get_slice(name).get_shape() for name in tensors.keys()}  # noqa: SIM118
        sketch = hugging_face.checked_sketch(config.architecture["transformers"], shapes)
        state = {name: tensors.get_tensor(name) for name in shapes}
        check_values(file, state)
        network = hugging_face.fill_network(sketch, state)
        side = getattr(network.network.config, "image_size", None)
        side = side if isinstance(side, int) else InputSpec().size
        native = replace(config.spec, size=side, resize=side)
        check_input(WrappedClassifier(sketch, head), native, config, folder.path)
        return WrappedClassifier(network, head)


def read_checked(
    folder: Folder, name: str, expected: Mapping[str, Tensor]
) -> dict[str, Tensor]:
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
        options = {name: architecture[name] for name in LAYER_SETTINGS}
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
            f"{option('module', 'MODULE:FUNCTION')}"
        )
    example = torch.zeros(2, *config.spec.shape)
    with blaming(f"{path}/config.json: architecture"):
        copied = copy_module(module).to("cpu", torch.float32)
        return wrap_module(copied, architecture["head"], example)


def read_posterior(
    config: ModelConfig, folder: Folder, classifier: Classifier
) -> KroneckerPosterior:
    """The posterior. Its shapes are compared with the head of the network before a tensor is read."""
    settings = dict(config.posterior)
    features = settings.pop("features")
    bias = settings.pop("bias")
    head = classifier.head
    stored = (len(config.classes), features, bias)
    actual = (head.out_features, head.in_features, head.bias is not None)
    if stored != actual:
        raise ArtifactError(
            f"{folder.path}/config.json: classes, posterior.features and posterior.bias are {stored}, "
            f"those of the network {actual}"
        )
    shapes = KroneckerPosterior.posterior_shapes(*stored)
    expected = sketches(shapes, stored_dtype(folder))
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
    must_hold(folder, [file])
    expected = sketches(shapes, posterior.weight.dtype)
    return kind.from_stored(posterior, settings, read_checked(folder, file, expected))


def sketches(shapes: Mapping[str, Sequence[int]], dtype: torch.dtype) -> dict[str, Tensor]:
    """Tensors of these shapes without memory."""
    return {
        name: torch.empty(*shape, dtype=dtype, device="meta") for name, shape in shapes.items()
    }


def check_head(classifier: Classifier, posterior: KroneckerPosterior, path: Path) -> None:
    """Check that the posterior is that of this very head; their shapes are the same."""
    for name, tensor in zip(("weight", "bias"), classifier.head_tensors(), strict=True):
        if tensor is None:
            continue
        stored = getattr(posterior, name)
        if not torch.allclose(tensor, stored.to(tensor), rtol=1e-3, atol=1e-4):
            raise ArtifactError(
                f"{path}/posterior.safetensors: {name!r} is not that of the model's last layer: "
                "the files do not belong together"
            )
