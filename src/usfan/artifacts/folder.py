"""The model folder: config.json, model.safetensors, posterior.safetensors. It crosses from one party to another.

Nothing in it is executed. Before a tensor is read, every name, shape and dtype in the two files' headers is compared
with what the config implies (the network is first built without memory, on torch's meta device); then values are
checked to be finite, and the posterior to be one.
"""

from __future__ import annotations

import difflib
import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from usfan.artifacts.card import model_card
from usfan.artifacts.schema import ModelConfig, parse_config
from usfan.artifacts.tensor_file import check_header, check_values, open_tensors
from usfan.errors import ArtifactError, UsfanError
from usfan.files import write_json, write_tensors, write_text
from usfan.models.backbones import create_backbone, timm_model
from usfan.models.classifier import Classifier, WrappedClassifier, copy_module, wrap_module
from usfan.models.hub import hub_or_cache
from usfan.posterior.kronecker import KroneckerPosterior

FILES = ("config.json", "model.safetensors", "posterior.safetensors")
MAX_CONFIG_BYTES = 16 << 20


def save_model(model: Any, folder: Path, *, private: bool = False) -> Path:
    """Tensors first, config last: a folder without config.json is not a model."""
    folder.mkdir(parents=True, exist_ok=True)
    config = model_config(model, private=private)
    write_tensors(folder / "model.safetensors", model.classifier.state_dict())
    write_tensors(folder / "posterior.safetensors", model.posterior.tensors())
    write_json(folder / "config.json", config)
    write_text(folder / "README.md", model_card(config))
    return folder


def model_config(model: Any, *, private: bool = False) -> dict[str, Any]:
    """What config.json says of a model."""
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
    if model.kind == "adapted":
        config["method"] = model.method
        config["unknown_rule"] = None if model.unknown_rule is None else model.unknown_rule.to_dict()
    config["summary"] = {} if private else model.summary
    return config


def load_parts(folder: str | Path, *, module: nn.Module | None = None, **download: Any) -> tuple[str, dict[str, Any]]:
    """The kind of model in a folder, and the fields that make it. `download` goes to
    `huggingface_hub.snapshot_download` if the folder is a Hub id: revision, token, …"""
    path = find_folder(folder, **download)
    config = load_config(path)
    classifier = build_classifier(config, path, module)
    posterior = read_posterior(config, path)
    check_head(classifier, posterior, path)
    parts: dict[str, Any] = {
        "classifier": classifier.eval(),
        "posterior": posterior,
        "classes": config.classes,
        "spec": config.spec,
        "architecture": config.architecture,
        "summary": config.summary,
        "temperature": config.temperature,
        "samples": config.samples,
    }
    if config.kind == "adapted":
        parts |= {"method": config.method, "unknown_rule": read_rule(config, path)}
    return config.kind, parts


def load_config(folder: str | Path) -> ModelConfig:
    """What the folder says of its model: quick, no network is built."""
    path = find_folder(folder) / "config.json"
    return parse_config(read_config(path), path)


def find_folder(folder: str | Path, **download: Any) -> Path:
    path = Path(folder)
    if path.is_dir():
        for name in FILES:
            if not (path / name).is_file():
                raise ArtifactError(f"{path}: no {name} in it; a model folder holds {', '.join(FILES)}")
        return path
    if path.exists() or not re.fullmatch(r"[\w.-]+/[\w.-]+", str(folder)) or str(folder).startswith("."):
        raise ArtifactError(f"{folder}: no such model folder{near(path)}")
    if path.parent.is_dir():  # a path here, mistyped: nothing is asked of the network
        raise ArtifactError(
            f"{folder}: no such folder in {path.parent}{near(path)} "
            f"(it was not looked up on the Hugging Face Hub, because there is a folder {path.parent} here)"
        )
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        with hub_or_cache():
            return Path(snapshot_download(str(folder), allow_patterns=list(FILES), **download))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ArtifactError(
            f"{folder}: no such model folder here, and the Hugging Face Hub does not give it: {reason}"
        ) from None


def near(path: Path) -> str:
    """A question with the folders beside it that are named alike."""
    try:
        beside = [item.name for item in path.parent.iterdir() if item.is_dir()]
    except OSError:
        return ""
    close = difflib.get_close_matches(path.name, beside, n=2)
    return f"; did you mean {' or '.join(str(path.parent / name) for name in close)}?" if close else ""


def read_config(path: Path) -> Any:
    if path.stat().st_size > MAX_CONFIG_BYTES:
        raise ArtifactError(f"{path}: larger than {MAX_CONFIG_BYTES >> 20} MiB")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError, OSError) as error:
        raise ArtifactError(f"{path}: not readable as JSON: {error}") from None


def build_classifier(config: ModelConfig, path: Path, module: nn.Module | None) -> Classifier:
    """First without memory, to know every name, shape and dtype; for real when the file is seen to hold just these."""
    file = path / "model.safetensors"
    if "module" in config.architecture and (module is not None or "timm" not in config.architecture):
        given = wrap_given(config, path, module)
        expected = given.state_dict()
    else:
        if module is not None:
            name = config.architecture["backbone"]
            raise ArtifactError(f"{path}/config.json: architecture: this model is {name!r}; no module is needed")
        given = None
        with torch.device("meta"):
            sketch = new_classifier(config, path)
        check_input(sketch, config, path)
        expected = sketch.state_dict()
    with open_tensors(file) as tensors:
        check_header(file, tensors, {k: (tuple(v.shape), v.dtype) for k, v in expected.items()})
        classifier = new_classifier(config, path) if given is None else given
        state = {name: tensors.get_tensor(name) for name in expected}
    check_values(file, state)
    classifier.load_state_dict(state)
    return classifier


def new_classifier(config: ModelConfig, path: Path) -> Classifier:
    a, classes, channels = config.architecture, len(config.classes), config.spec.channels
    try:
        if "timm" in a:
            return WrappedClassifier(timm_model(a["timm"], num_classes=classes), a["head"])
        backbone = create_backbone(a["backbone"], "none", channels=channels)
        options = {k: a[k] for k in ("bottleneck", "dropout", "head_bias", "head_norm")}
        return Classifier(backbone.module, backbone.features, classes, **options)
    except UsfanError as error:
        raise ArtifactError(f"{path}/config.json: architecture: {error}") from None


def check_input(sketch: Classifier, config: ModelConfig, path: Path) -> None:
    """Whether the network takes images of the size that the config says; on the meta device that costs nothing."""
    spec = config.spec
    try:
        sketch.eval()(torch.zeros(1, spec.channels, spec.size, spec.size, device="meta"))
    except Exception as error:  # the network's own
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        shape = f"{spec.channels}×{spec.size}×{spec.size}"
        raise ArtifactError(f"{path}/config.json: input: {shape} images do not fit the network: {reason}") from None


def wrap_given(config: ModelConfig, path: Path, module: nn.Module | None) -> WrappedClassifier:
    """The user's module, copied: it stays as it is, and can be given again."""
    name, head, spec = config.architecture["module"], config.architecture["head"], config.spec
    if module is None:
        raise ArtifactError(
            f"{path}: holds the tensors of your own module {name!r}: give it again, load(folder, module=…), or "
            "on the command line --module MODULE:FUNCTION"
        )
    example = torch.zeros(2, spec.channels, spec.size, spec.size)
    try:
        wrapped = wrap_module(copy_module(module).cpu(), head, example)
    except UsfanError as error:
        raise ArtifactError(f"{path}/config.json: architecture: {error}") from None
    expected, outputs = len(config.classes), wrapped.head.out_features
    if outputs != expected:
        raise ArtifactError(f"{path}/config.json: classes: the model has {expected}, the module given {outputs}")
    return wrapped


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
        found = [tensors.get_slice(name).get_dtype() for name in shapes if name in tensors.keys()]  # noqa: SIM118
        dtype = torch.float64 if 2 * found.count("F64") > len(found) else torch.float32  # of most: the odd one is named
        check_header(file, tensors, {name: (shape, dtype) for name, shape in shapes.items()})
        state = {name: tensors.get_tensor(name) for name in shapes}
    check_values(file, state)
    for name in ("feature", "class"):
        values, vectors = state[f"{name}_values"], state[f"{name}_vectors"]
        if bool((values < 0).any()) or bool((values.diff() < 0).any()):
            raise ArtifactError(
                f"{file}: '{name}_values' must be non-negative and ascending: eigenvalues of a symmetric matrix"
            )
        error = (vectors.T @ vectors - torch.eye(len(values), dtype=dtype)).abs().max()
        if not float(error) <= 1e-3:  # huge values make it NaN
            raise ArtifactError(f"{file}: '{name}_vectors' is not an orthonormal basis")
    return KroneckerPosterior(**{"bias": None, **state}, **settings)


def check_head(classifier: Classifier, posterior: KroneckerPosterior, path: Path) -> None:
    """The posterior must be that of this very head."""
    for name, own, its in zip(
        ("weight", "bias"), classifier.head_tensors(), (posterior.weight, posterior.bias), strict=True
    ):
        if own is None and its is None:
            continue
        there = own is not None and its is not None and own.shape == its.shape
        if not there or not torch.allclose(own, its.to(own), rtol=1e-3, atol=1e-4):  # type: ignore[union-attr,arg-type]
            raise ArtifactError(
                f"{path}/posterior.safetensors: {name!r} is not that of the model's last layer: "
                "the files do not belong together"
            )


def read_rule(config: ModelConfig, path: Path) -> Any:
    if config.unknown_rule is None:
        return None
    from usfan.scoring.unknown import UnknownRule

    try:
        return UnknownRule.from_dict(config.unknown_rule)
    except (UsfanError, OverflowError, RecursionError) as error:
        raise ArtifactError(f"{path}/config.json: unknown_rule: {str(error)[:300]}") from None
