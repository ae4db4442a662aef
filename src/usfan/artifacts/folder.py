"""The model folder: config.json, model.safetensors, posterior.safetensors. It is passed from one party to another.

Nothing in it is executed. Before a tensor is read, every name, shape and dtype in the two files' headers is compared
with what the config implies (the network is first built without memory, on torch's meta device); then values are
checked to be finite, and the posterior to be one.
"""

from __future__ import annotations

import difflib
import os
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from usfan.artifacts.card import mixture_card, model_card
from usfan.artifacts.cost import check_image_cost
from usfan.artifacts.schema import MixtureConfig, ModelConfig, check_config, parse_config
from usfan.data.views import InputSpec
from usfan.errors import ArtifactError, UsfanError, shown
from usfan.files import Folder, read_json_in, write_json, write_tensors, write_text
from usfan.models.backbones import create_backbone, timm_model, timm_spec
from usfan.models.classifier import Classifier, WrappedClassifier, copy_module, wrap_module
from usfan.models.hub import hub_or_cache
from usfan.posterior.ensemble import Ensemble
from usfan.posterior.heads import Heads, MCDropout, PointEstimate
from usfan.posterior.kronecker import KroneckerPosterior
from usfan.tensor_file import Expected, check_header, check_values, open_tensors_in

FILES = ("config.json", "model.safetensors", "posterior.safetensors")
ENSEMBLE = "ensemble.safetensors"
"""In the folder of a model whose uncertainty is an ensemble."""
MEMBER = "member-{}"
"""Folders of the models of a mixture."""
PATTERNS = (*FILES, ENSEMBLE, *(f"{MEMBER.format('*')}/{name}" for name in (*FILES, ENSEMBLE)))
MAX_CONFIG_BYTES = 16 << 20


def save_model(model: Any, folder: Path, *, private: bool = False) -> Path:
    """Tensors first, config last: a folder without config.json is not a model."""
    config = model_config(model, private=private)
    check_config(config, folder / "config.json")
    folder.mkdir(parents=True, exist_ok=True)
    if model.kind == "mixture":
        for number, member in enumerate(model.members, start=1):
            save_model(member, folder / MEMBER.format(number), private=private)
        write_json(folder / "config.json", config)
        write_text(folder / "README.md", mixture_card(config))
        return folder
    write_tensors(folder / "model.safetensors", model.classifier.state_dict())
    write_tensors(folder / "posterior.safetensors", model.posterior.tensors())
    if model.uncertainty.kind == "ensemble":
        write_tensors(folder / ENSEMBLE, model.uncertainty.tensors())
    write_json(folder / "config.json", config)
    write_text(folder / "README.md", model_card(config))
    return folder


def model_config(model: Any, *, private: bool = False) -> dict[str, Any]:
    """What config.json says of a model."""
    if model.kind == "mixture":
        return {
            "format": "usfan",
            "version": 1,
            "kind": model.kind,
            "classes": list(model.classes),
            "mixing": model.mixing,
            "shares": list(model.shares),
            "method": model.method,
            "unknown_rule": None if model.unknown_rule is None else model.unknown_rule.to_dict(),
            "summary": {} if private else model.summary,
        }
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
        "uncertainty": {"kind": "kronecker"} if model.rival is None else model.rival.settings(),
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
    with open_folder(folder, **download) as opened:
        return read_parts(opened, module)


def read_parts(opened: Folder, module: nn.Module | None, *, single: bool = False) -> tuple[str, dict[str, Any]]:
    """The same from an open folder. `single`: a member of a mixture, which cannot be a mixture itself."""
    path = opened.path
    config = parse_config(read_json_in(opened, "config.json", MAX_CONFIG_BYTES), path / "config.json")
    if isinstance(config, MixtureConfig):
        if single:
            raise ArtifactError(f"{path}/config.json: kind: a member of a mixture cannot be a mixture itself")
        return "mixture", read_mixture(config, opened, module)
    must_hold(opened, FILES)
    classifier = build_classifier(config, opened, module)
    posterior = read_posterior(config, opened, classifier)
    rival = read_rival(config, opened, posterior)
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
        "rival": rival,
    }
    if config.kind == "adapted":
        parts |= {"method": config.method, "unknown_rule": read_rule(config, path)}
    return config.kind, parts


def read_mixture(config: MixtureConfig, opened: Folder, module: nn.Module | None) -> dict[str, Any]:
    """The fields of a mixture; each member as (kind, fields)."""
    members = []
    for number in range(1, len(config.shares) + 1):
        name = MEMBER.format(number)
        if opened.kind(name) == "missing":
            raise ArtifactError(
                f"{opened.path}: no folder {name} in it; it is a mixture of {len(config.shares)} models"
            )
        with opened.inner(name) as inner:
            must_hold(inner, FILES)
            members.append(read_parts(inner, module, single=True))
    return {
        "members": members,
        "classes": config.classes,
        "mixing": config.mixing,
        "shares": config.shares,
        "method": config.method,
        "unknown_rule": read_rule(config, opened.path),
        "summary": config.summary,
    }


def load_config(folder: str | Path) -> ModelConfig:
    """The folder's description of its model. It is quick, because no network is built. A mixture, which has several
    networks, is refused."""
    with open_folder(folder) as opened:
        config = parse_config(read_json_in(opened, "config.json", MAX_CONFIG_BYTES), opened.path / "config.json")
        if isinstance(config, MixtureConfig):
            members = ", ".join(str(opened.path / MEMBER.format(n + 1)) for n in range(len(config.shares)))
            raise ArtifactError(
                f"{opened.path} is a mixture of {len(config.shares)} models, which are adapted one by one: {members}"
            )
        must_hold(opened, FILES)
        return config


def open_folder(folder: str | Path, **download: Any) -> Folder:
    """A model folder, or the local copy of one on the Hub, whose files are links into the Hub's cache."""
    path = Path(folder)
    opened = Folder(path, shared=hub_cache(path)) if path.is_dir() else fetch_folder(folder, **download)
    try:
        must_hold(opened, FILES[:1])
    except ArtifactError:
        opened.close()
        raise
    return opened


def must_hold(opened: Folder, names: tuple[str, ...]) -> None:
    for name in names:
        if not opened.holds(name):
            kind = opened.kind(name)
            why = "" if kind == "missing" else f" (what has this name is {kind})"
            raise ArtifactError(f"{opened.path}: no {name} in it{why}; a model folder holds {', '.join(FILES)}")


def hub_cache(path: Path) -> Path | None:
    """The repository's own part of the Hub's cache, if the folder is a snapshot in it."""
    real = Path(os.path.realpath(path))
    inside = len(real.parts) > 3 and real.parent.name == "snapshots" and real.parents[1].name.startswith("models--")
    return real.parents[1] / "blobs" if inside else None


def fetch_folder(folder: str | Path, **download: Any) -> Folder:
    path = Path(folder)
    if path.exists() or not re.fullmatch(r"[\w.-]+/[\w.-]+", str(folder)) or str(folder).startswith("."):
        raise ArtifactError(f"{shown(folder)}: no such model folder{near(path)}")
    if path.parent.is_dir():  # a path here, mistyped: nothing is asked of the network
        raise ArtifactError(
            f"{folder}: no such folder in {path.parent}{near(path)} "
            f"(it was not looked up on the Hugging Face Hub, because there is a folder {path.parent} here)"
        )
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        with hub_or_cache():
            path = Path(snapshot_download(str(folder), allow_patterns=[*PATTERNS], **download))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ArtifactError(
            f"{folder}: no such model folder here, and the Hugging Face Hub does not provide it: {reason}"
        ) from None
    return Folder(path, shared=hub_cache(path))


def near(path: Path) -> str:
    """A question with the folders beside it that are named alike."""
    try:
        beside = [item.name for item in path.parent.iterdir() if item.is_dir()]
    except OSError:
        return ""
    close = difflib.get_close_matches(path.name, beside, n=2)
    return f"; did you mean {' or '.join(shown(path.parent / name, 200) for name in close)}?" if close else ""


def build_classifier(config: ModelConfig, folder: Folder, module: nn.Module | None) -> Classifier:
    """First without memory, to know every name, shape and dtype; what an image costs is asked if the file is seen to
    hold just these, and only then is the network made."""
    path = folder.path
    file = path / "model.safetensors"
    if "module" in config.architecture and (module is not None or "timm" not in config.architecture):
        given: Classifier = wrap_given(config, path, module)
        with open_tensors_in(folder, file.name) as tensors:
            state = checked_state(file, tensors, given)
    else:
        if module is not None:
            name = config.architecture["backbone"]
            raise ArtifactError(f"{path}/config.json: architecture: this model is {name!r}; no module is needed")
        with open_tensors_in(folder, file.name) as tensors:
            width = stored_width(tensors, config)
            with torch.device("meta"):
                sketch, native = new_classifier(config, path, width)
            check_header(file, tensors, shapes_of(sketch))
            check_input(sketch, native, config, path)
            state = checked_state(file, tensors, sketch)
        given = new_classifier(config, path, width)[0]
    given.load_state_dict(state)
    return given


def shapes_of(classifier: Classifier) -> Expected:
    return {name: (tuple(value.shape), value.dtype) for name, value in classifier.state_dict().items()}


def checked_state(file: Path, tensors: Any, classifier: Classifier) -> dict[str, Tensor]:
    """The tensors of a file, if they are those of this classifier."""
    expected = shapes_of(classifier)
    check_header(file, tensors, expected)
    state = {name: tensors.get_tensor(name) for name in expected}
    check_values(file, state)
    return state


def stored_width(tensors: Any, config: ModelConfig) -> int:
    """How many features the backbone gives, as the file has it; the header and the sketch then show whether that is so.
    To ask the network itself takes seconds for some."""
    name = "bottleneck.0.weight"
    shape: list[int] = tensors.get_slice(name).get_shape() if name in tensors.keys() else []  # noqa: SIM118
    return int(shape[1] if len(shape) == 2 else config.posterior["features"])


def new_classifier(config: ModelConfig, path: Path, width: int) -> tuple[Classifier, InputSpec]:
    """The network, and the input that it is made for."""
    a, classes, channels = config.architecture, len(config.classes), config.spec.channels
    try:
        if "timm" in a:
            model = timm_model(a["timm"], num_classes=classes)
            return WrappedClassifier(model, a["head"]), timm_spec(model, channels)
        backbone = create_backbone(a["backbone"], "none", channels=channels, features=width)
        options = {k: a[k] for k in ("bottleneck", "dropout", "head_bias", "head_norm")}
        return Classifier(backbone.module, backbone.features, classes, **options), backbone.spec
    except UsfanError as error:
        raise ArtifactError(f"{path}/config.json: architecture: {error}") from None


def check_input(sketch: Classifier, native: InputSpec, config: ModelConfig, path: Path) -> None:
    """Whether the network takes images of the size that the config says, and what one costs; nothing is allocated."""
    spec = config.spec
    try:
        check_image_cost(sketch.eval(), spec, native, f"{path}/config.json")
    except ArtifactError:
        raise
    except Exception as error:  # the network's own
        reason = shown((str(error).strip().splitlines() or [type(error).__name__])[0], 300)
        shape = f"{spec.channels}×{spec.size}×{spec.size}"
        raise ArtifactError(f"{path}/config.json: input: {shape} images do not fit the network: {reason}") from None


def wrap_given(config: ModelConfig, path: Path, module: nn.Module | None) -> WrappedClassifier:
    """A copy of the user's module, which stays unchanged."""
    name, head, spec = config.architecture["module"], config.architecture["head"], config.spec
    if module is None:
        raise ArtifactError(
            f"{path}: holds the tensors of your own module {name!r}: give it again, load(folder, module=…), or "
            "on the command line --module MODULE:FUNCTION"
        )
    example = torch.zeros(2, spec.channels, spec.size, spec.size)
    try:
        wrapped = wrap_module(copy_module(module).to("cpu", torch.float32), head, example)
    except UsfanError as error:
        raise ArtifactError(f"{path}/config.json: architecture: {error}") from None
    expected, outputs = len(config.classes), wrapped.head.out_features
    if outputs != expected:
        raise ArtifactError(f"{path}/config.json: classes: the model has {expected}, the module given {outputs}")
    return wrapped


def read_posterior(config: ModelConfig, folder: Folder, classifier: Classifier) -> KroneckerPosterior:
    """Its shapes are those of the network's own head: nothing is read or computed before that is known."""
    file = folder.path / "posterior.safetensors"
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
    with open_tensors_in(folder, file.name) as tensors:
        found = [tensors.get_slice(name).get_dtype() for name in shapes if name in tensors.keys()]  # noqa: SIM118
        dtype = torch.float64 if 2 * found.count("F64") > len(found) else torch.float32  # of most: the odd one is named
        check_header(file, tensors, {name: (shape, dtype) for name, shape in shapes.items()})
        head = classifier.head
        for name, said, own in (("features", features, head.in_features), ("bias", bias, head.bias is not None)):
            if said != own:
                raise ArtifactError(f"{folder.path}/config.json: posterior.{name} is {said}, that of the network {own}")
        state = {name: tensors.get_tensor(name) for name in shapes}
    check_values(file, state)
    for name in ("feature", "class"):
        values, vectors = state[f"{name}_values"], state[f"{name}_vectors"]
        if bool((values < 0).any()) or bool((values.diff() < 0).any()):
            raise ArtifactError(
                f"{file}: '{name}_values' must be non-negative and ascending: eigenvalues of a symmetric matrix"
            )
        if not is_orthonormal(vectors):
            raise ArtifactError(f"{file}: '{name}_vectors' is not an orthonormal basis")
    return KroneckerPosterior(**{"bias": None, **state}, **settings)


def read_rival(config: ModelConfig, folder: Folder, posterior: KroneckerPosterior) -> Heads | None:
    """The uncertainty in use, if it is not the posterior; its head is that of the posterior."""
    kind = config.uncertainty["kind"]
    if kind == "point":
        return PointEstimate(posterior.weight, posterior.bias)
    if kind == "mc-dropout":
        return MCDropout(posterior.weight, posterior.bias, config.uncertainty["rate"])
    if kind != "ensemble":
        return None
    file, members = folder.path / ENSEMBLE, config.uncertainty["members"]
    if not folder.holds(ENSEMBLE):
        raise ArtifactError(f"{folder.path}: no {ENSEMBLE} in it, which config.json (uncertainty) says is there")
    shapes = {"member_weights": (members, *posterior.weight.shape)}
    if posterior.bias is not None:
        shapes["member_biases"] = (members, len(posterior.bias))
    with open_tensors_in(folder, ENSEMBLE) as tensors:
        check_header(file, tensors, {name: (shape, posterior.weight.dtype) for name, shape in shapes.items()})
        state = {name: tensors.get_tensor(name) for name in shapes}
    check_values(file, state)
    return Ensemble(posterior.weight, posterior.bias, **state)


def is_orthonormal(vectors: Tensor) -> bool:
    """Whether QᵀQ = I, seen on random vectors: one entry that is off by 1e-3 shows in nearly every one of them. The
    product itself would take seconds from a few thousand features on."""
    generator = torch.Generator().manual_seed(0)
    probes = torch.randn(len(vectors), 32, generator=generator, dtype=vectors.dtype)
    error = (vectors.T @ (vectors @ probes) - probes).abs().max()
    return bool(error <= 2e-4)  # huge values make it NaN


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


def read_rule(config: ModelConfig | MixtureConfig, path: Path) -> Any:
    if config.unknown_rule is None:
        return None
    from usfan.scoring.unknown import UnknownRule

    try:
        return UnknownRule.from_dict(config.unknown_rule)
    except (UsfanError, OverflowError, RecursionError) as error:
        raise ArtifactError(f"{path}/config.json: unknown_rule: {str(error)[:300]}") from None
