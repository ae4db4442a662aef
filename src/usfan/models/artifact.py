"""The model folder: config.json, model.safetensors, posterior.safetensors. It crosses from one party to another.

Nothing in it is executed. Before a tensor is read, every name, shape and dtype in the two files' headers is compared with
what the config implies (the network is first built without memory, on torch's meta device); then values are checked to be
finite, and the posterior to be one.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from usfan.errors import ArtifactError, UsfanError
from usfan.models.backbones import create_backbone
from usfan.models.card import model_card
from usfan.models.classifier import Classifier, WrappedClassifier, find_linear, replace_module
from usfan.models.model import AdaptedModel, SourceModel
from usfan.models.schema import ModelConfig, parse_config
from usfan.posterior.kronecker import KroneckerPosterior
from usfan.run import write_json, write_tensors, write_text

FILES = ("config.json", "model.safetensors", "posterior.safetensors")
MAX_CONFIG_BYTES = 16 << 20


def save_model(model: SourceModel, folder: Path, *, private: bool = False) -> Path:
    """Tensors first, config last: a folder without config.json is not a model."""
    folder.mkdir(parents=True, exist_ok=True)
    config: dict[str, Any] = {
        "format": "usfan",
        "version": 1,
        "kind": model.kind,
        "architecture": model.architecture,
        "classes": list(model.classes),
        "input": asdict(model.spec),
        "posterior": {
            **model.posterior.settings(),
            "features": model.posterior.weight.shape[1],
            "bias": model.posterior.bias is not None,
        },
        "temperature": model.temperature,
        "samples": model.samples,
    }
    if private:
        config["posterior"]["log_likelihood"] = None
    if isinstance(model, AdaptedModel):
        config["method"] = model.method
        config["unknown_rule"] = None if model.unknown_rule is None else model.unknown_rule.to_dict()
    config["summary"] = {} if private else model.summary
    write_tensors(folder / "model.safetensors", model.classifier.state_dict())
    write_tensors(folder / "posterior.safetensors", model.posterior.tensors())
    write_json(folder / "config.json", config)
    write_text(folder / "README.md", model_card(config))
    return folder


def load_model(folder: str | Path, *, module: nn.Module | None = None) -> SourceModel:
    path = find_folder(folder)
    config = parse_config(read_config(path / "config.json"), path / "config.json")
    classifier = build_classifier(config, path, module)
    posterior = read_posterior(config, path)
    check_head(classifier, posterior, path)
    shared = {
        "classifier": classifier.eval(),
        "posterior": posterior,
        "classes": config.classes,
        "spec": config.spec,
        "architecture": config.architecture,
        "summary": config.summary,
        "temperature": config.temperature,
        "samples": config.samples,
    }
    if config.kind == "source":
        return SourceModel(**shared)
    return AdaptedModel(**shared, method=config.method, unknown_rule=read_rule(config, path))


def find_folder(folder: str | Path) -> Path:
    path = Path(folder)
    if path.is_dir():
        for name in FILES:
            if not (path / name).is_file():
                raise ArtifactError(f"{path}: no {name} in it; a model folder holds {', '.join(FILES)}")
        return path
    if path.exists() or not re.fullmatch(r"[\w.-]+/[\w.-]+", str(folder)) or str(folder).startswith("."):
        raise ArtifactError(f"{folder}: no such model folder")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(str(folder), allow_patterns=list(FILES)))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ArtifactError(f"{folder}: no such model folder, and not to be had from the Hub: {reason}") from None


def read_config(path: Path) -> Any:
    if path.stat().st_size > MAX_CONFIG_BYTES:
        raise ArtifactError(f"{path}: larger than {MAX_CONFIG_BYTES >> 20} MiB")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ArtifactError(f"{path}: not readable as JSON: {error}") from None


def build_classifier(config: ModelConfig, path: Path, module: nn.Module | None) -> Classifier:
    file = path / "model.safetensors"
    if "module" in config.architecture:
        classifier: Classifier = wrap_given(config, path, module)
        expected = classifier.state_dict()
    else:
        if module is not None:
            raise ArtifactError(
                f"{path}/config.json: architecture: this model is {config.architecture['backbone']!r}; no module is needed"
            )
        with torch.device("meta"):
            expected = new_classifier(config, path).state_dict()
        classifier = None  # type: ignore[assignment]
    with open_tensors(file) as tensors:
        check_header(file, tensors, {k: (tuple(v.shape), v.dtype) for k, v in expected.items()})
        if classifier is None:
            classifier = new_classifier(config, path)
        state = {name: tensors.get_tensor(name) for name in expected}
    check_finite(file, state)
    classifier.load_state_dict(state)
    return classifier


def new_classifier(config: ModelConfig, path: Path) -> Classifier:
    a = config.architecture
    try:
        backbone, features, _ = create_backbone(a["backbone"], "none", channels=config.spec.channels)
    except UsfanError as error:
        raise ArtifactError(f"{path}/config.json: architecture: {error}") from None
    options = {k: a[k] for k in ("bottleneck", "dropout", "head_bias", "head_norm")}
    return Classifier(backbone, features, len(config.classes), **options)


def wrap_given(config: ModelConfig, path: Path, module: nn.Module | None) -> WrappedClassifier:
    name, head = config.architecture["module"], config.architecture["head"]
    if module is None:
        raise ArtifactError(
            f"{path}: holds the tensors of your own module {name!r}: give it again, load(folder, module=…)"
        )
    if isinstance(module, WrappedClassifier):
        return module
    try:
        linear = find_linear(module, head)
    except UsfanError as error:
        raise ArtifactError(f"{path}/config.json: architecture: {error}") from None
    if linear.out_features != len(config.classes):
        linear_new = nn.Linear(linear.in_features, len(config.classes), bias=linear.bias is not None)
        replace_module(module, head, linear_new)
    return WrappedClassifier(module, head)


@contextlib.contextmanager
def open_tensors(file: Path) -> Iterator[Any]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, "pt") as tensors:
            yield tensors
    except (SafetensorError, OSError) as error:
        raise ArtifactError(f"{file}: not readable as safetensors: {error}") from None


DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64}
DTYPES |= {"I32": torch.int32, "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16}


def check_header(file: Path, tensors: Any, expected: dict[str, tuple[tuple[int, ...], torch.dtype]]) -> None:
    """Names, shapes and dtypes, from the header alone."""
    there = set(tensors.keys())
    for name, (shape, dtype) in expected.items():
        if name not in there:
            raise ArtifactError(f"{file}: tensor {name!r} is missing")
        part = tensors.get_slice(name)
        if tuple(part.get_shape()) != shape:
            raise ArtifactError(f"{file}: {name!r} has shape {tuple(part.get_shape())}, expected {shape}")
        if DTYPES.get(part.get_dtype()) != dtype:
            raise ArtifactError(f"{file}: {name!r} has type {part.get_dtype()}, expected {dtype}")
    extra = sorted(there - set(expected))
    if extra:
        raise ArtifactError(f"{file}: unexpected tensor {extra[0]!r}")


def check_finite(file: Path, state: dict[str, Tensor]) -> None:
    for name, tensor in state.items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise ArtifactError(f"{file}: {name!r} holds NaN or infinity")


def read_posterior(config: ModelConfig, path: Path) -> KroneckerPosterior:
    file = path / "posterior.safetensors"
    settings = dict(config.posterior)
    classes, features, bias = len(config.classes), settings.pop("features"), settings.pop("bias")
    size = features + bias
    shapes = {
        "weight": (classes, features),
        "feature_values": (size,),
        "feature_vectors": (size, size),
        "class_values": (classes,),
        "class_vectors": (classes, classes),
    } | ({"bias": (classes,)} if bias else {})
    with open_tensors(file) as tensors:
        there = tensors.keys()
        double = "weight" in there and tensors.get_slice("weight").get_dtype() == "F64"
        dtype = torch.float64 if double else torch.float32
        check_header(file, tensors, {name: (shape, dtype) for name, shape in shapes.items()})
        state = {name: tensors.get_tensor(name) for name in shapes}
    check_finite(file, state)
    for name in ("feature", "class"):
        values, vectors = state[f"{name}_values"], state[f"{name}_vectors"]
        if bool((values < 0).any()) or bool((values.diff() < 0).any()):
            raise ArtifactError(
                f"{file}: '{name}_values' must be non-negative and ascending: eigenvalues of a symmetric matrix"
            )
        error = (vectors.T @ vectors - torch.eye(len(values), dtype=dtype)).abs().max()
        if float(error) > 1e-3:
            raise ArtifactError(f"{file}: '{name}_vectors' is not an orthonormal basis")
    return KroneckerPosterior(**{"bias": None, **state}, **settings)


def check_head(classifier: Classifier, posterior: KroneckerPosterior, path: Path) -> None:
    """The posterior must be that of this very head."""
    weight, bias = classifier.head_tensors()
    same = weight.shape == posterior.weight.shape and torch.allclose(
        weight, posterior.weight.to(weight), rtol=1e-3, atol=1e-4
    )
    if not same or (bias is None) != (posterior.bias is None):
        raise ArtifactError(
            f"{path}/posterior.safetensors: 'weight' is not that of the model's last layer: the files do not belong together"
        )


def read_rule(config: ModelConfig, path: Path) -> Any:
    if config.unknown_rule is None:
        return None
    from usfan.adaptation.open_set import UnknownRule

    try:
        return UnknownRule.from_dict(config.unknown_rule)
    except (UsfanError, TypeError, KeyError, ValueError) as error:
        raise ArtifactError(f"{path}/config.json: unknown_rule: {error}") from None
