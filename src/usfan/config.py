"""Settings as dataclasses. The docstring of a field is also the help of its flag on the command line."""

from __future__ import annotations

import dataclasses
import difflib
import math
import reprlib
from collections.abc import Collection, Mapping
from dataclasses import Field, dataclass, field
from typing import Any, TypeVar

from usfan.config_checks import (
    CURVATURE,
    DAMPING,
    DROPOUT_RATES,
    MOST_MEMBERS,
    MOST_RATE,
    MOST_SEED,
    PRIORS,
    between,
    is_number,
    one_of,
)
from usfan.errors import ConfigError, printable
from usfan.field_docs import field_docs as field_docs
from usfan.uncertainty.registry import UNCERTAINTIES

T = TypeVar("T")
WITHHELD = "(withheld)"
"""Stands in config.yaml of a private run in place of a value."""
SETTINGS = ("auto", "closed", "partial", "open", "universal")
TUNE = ("affine", "new", "norm", "all")
RESAMPLING = tuple(
    f"{kernel}{end}"
    for end in ("", "-crop")
    for kernel in ("bilinear", "bicubic", "lanczos", "nearest")
)
"""How pictures are brought to size; -crop keeps their proportions and cuts out the middle."""
VIEWS = ("crop-flip", "resized-crop-flip", "resized-crop", "shift-turn", "none")
"""The views in training of `usfan.data.views.InputSpec`."""
PRESETS = ("default", "paper", "authors", "shot")
"""Files in `usfan/presets`."""
PRIOR = {"choices": ("evidence", "weight-decay"), "bounds": PRIORS}


def choice(default: T, *others: T) -> T:
    """A field that has one of these values."""
    choices = tuple(filter(None, (default, *others)))
    return field(default=default, metadata={"choices": choices})


def number(default: T, low: float = 0, high: float = math.inf) -> T:
    """A field that has a number between these bounds."""
    return field(default=default, metadata={"bounds": (low, high)})


@dataclass(frozen=True)
class Config:
    """Converts and checks every field when it is created."""

    def __post_init__(self) -> None:
        for item in dataclasses.fields(self):
            object.__setattr__(self, item.name, convert(item, getattr(self, item.name)))


@dataclass(frozen=True)
class RuntimeConfig(Config):
    """Where and how to compute."""

    device: str = choice("auto", "cpu", "cuda")
    """Where to compute; auto: on a GPU if torch finds one."""
    precision: str = choice("auto", "32", "bf16")
    """auto (bf16 on a GPU and in OpenVINO, else 32), 32 or bf16."""
    engine: str = choice("auto", "torch", "openvino")
    """What computes passes that train nothing: torch, openvino (of usfan[fast], on a CPU), or auto (openvino for long
    passes, if it is installed and agrees with torch)."""
    compile: str = choice("auto", "graph", "on", "off")
    """How training steps run on a GPU: off (eagerly), graph (captured as CUDA graphs), on (compiled, then captured;
    compiling takes a minute or more), or auto (graph; on for long runs)."""
    workers: int | None = None
    """Processes that decode images; by default chosen for the machine."""
    cache: str | None = None
    """Folder that keeps decoded images between runs; by default none are kept."""


@dataclass(frozen=True)
class OptimiserConfig(Config):
    """SHOT's optimiser: SGD with Nesterov momentum, lr · (1 + 10 p)^(−0.75)."""

    batch_size: int = number(64, 2)
    """Images in one step, over all processes."""
    lr: float = number(1e-2, 0, MOST_RATE)
    """Learning rate of the new layers at the first step."""
    backbone_lr_scale: float | None = None
    """Learning rate of the backbone relative to lr; by default 0.1, or 1 for a backbone without pretrained weights."""
    momentum: float = number(0.9, 0, MOST_RATE)
    """Momentum (Nesterov)."""
    weight_decay: float = number(1e-3, 0, MOST_RATE)
    """Weight decay."""


@dataclass(frozen=True)
class TrainConfig(OptimiserConfig):
    """Stage 1: the source classifier and its posterior."""

    backbone: str | None = None
    """Any timm model, or digits-cnn, lenet, dtn, cnn13, toy-mlp; by default the pretrained network on this machine:
    timm's in the Hub's cache (resnet50 first), else one of usfan[offline]."""
    pretrained: str = "auto"
    """auto (the weights on this machine: usfan[offline], or the Hub's cache), timm (download), offline, a weights file,
    or none (random weights)."""
    epochs: int = number(50, 1)
    """Largest number of passes over the training images (see patience)."""
    tune: str = choice("auto", *TUNE)
    """Which parameters are trained: affine (scales and shifts of BatchNorm, and the head), new (the layers after the
    backbone), norm (these and BatchNorm), all, or auto: new if the backbone has pretrained weights, else all."""
    seed: int = number(0, 0, MOST_SEED)
    """Seed of the split, the initial weights, the order of the images and their augmentation."""
    label_smoothing: float = number(0.1, 0, 1)
    """Label smoothing: α of Eq. 1."""
    validation_share: float = number(0.1, 0, 0.9)
    """Share of the images held out to stop early and to choose the best epoch; 0 keeps the last of all epochs."""
    patience: int = number(10)
    """Stop if the accuracy on the held-out images has not risen for this many epochs, and keep the best epoch (the
    latest of equally good ones). 0 trains all epochs."""
    bottleneck: int = number(256)
    """Width of the layer between backbone and head; 0 for none."""
    dropout: float | None = number(None, 0, DROPOUT_RATES[1])
    """Dropout after the bottleneck; by default the network's own."""
    head_bias: bool = True
    """Whether the last layer has a bias."""
    head_norm: bool = True
    """Whether the last layer is weight-normalised."""
    augment: str | None = choice(None, *VIEWS)
    """Augmentation in training: crop-flip, resized-crop-flip, resized-crop, shift-turn or none; by default the
    backbone's."""
    prior: float | str = field(default="evidence", metadata=PRIOR)
    """Prior precision of the posterior: a positive number, evidence, or weight-decay (× N)."""
    damping: str = choice(*DAMPING)
    """How the prior enters the Kronecker factors: exact, or factored as in the published code."""
    curvature: str = choice(*CURVATURE)
    """Curvature of the loss summed over the images, or of its mean as in the published code."""
    uncertainty: str = choice(*UNCERTAINTIES)
    """Where the model's certainty comes from: posterior, point (the point estimate), mc-dropout (trains with dropout,
    by default at rate 0.5) or ensemble (heads on bootstraps, trained after the network). The posterior is always fitted
    and stored."""
    members: int = number(8, 2, MOST_MEMBERS)
    """Number of heads in the ensemble."""
    preset: str = choice(*PRESETS)
    """default, paper (all layers, prior precision 5e-4), authors (as their program has it) or shot (SHOT's recipe)."""


@dataclass(frozen=True)
class AdaptConfig(OptimiserConfig):
    """Stage 2: the feature extractor moves, the head stays. A method has settings of its own beside these."""

    method: str = "auto"
    """The method; `usfan methods` lists them. auto: u-sfan++ if a pretrained network can be the witness, else
    u-sfan."""
    setting: str = choice(*SETTINGS)
    """Which classes the target has: closed (those of the source), partial (some are missing, or their shares differ),
    open (new ones too), universal (missing and new ones), or auto: estimated from the images."""
    tune: str = choice("auto", *TUNE)
    """Which parameters are trained: affine (scales and shifts of BatchNorm only), new (the layers after the backbone),
    norm (these and BatchNorm), all, or auto: new, unless the source model fits the target badly and there are enough
    images to train all."""
    witness: str = "auto"
    """Frozen pretrained network that says which images look alike: auto (the one that the source model started from),
    none, NAME or NAME:WEIGHTS (a timm model; offline, timm or a file), or the folder or Hub id of a vision model of
    transformers or timm."""
    uncertainty: str = choice("auto", *UNCERTAINTIES)
    """Where the certainty of an image comes from: posterior, point (the point estimate), mc-dropout, ensemble, or auto
    (as stored with the source model)."""
    epochs: int = number(15)
    """Passes over the target."""
    seed: int = number(0, 0, MOST_SEED)
    """Seed of the order of the images and their augmentation."""
    guard: bool = True
    """Keep the adapted model only if the images show a gain; off keeps the model after the last epoch."""
    preset: str = choice(*PRESETS)
    """default, paper (the paper's literal settings), authors (those of the method's published program) or shot (SHOT's
    recipe). A preset brings its method, unless --method names another."""
    augment: str | None = choice(None, *VIEWS)
    """Augmentation while adapting: crop-flip, resized-crop-flip, resized-crop, shift-turn or none; by default the
    source's."""
    samples: int = number(128, 1)
    """M, the number of draws from the posterior."""
    given_label_weight: float | None = number(None)
    """Weight of the cross-entropy with the labels of --labels; by default 1 if the backbone stays frozen, else 0.15
    (on digits 1 did harm)."""
    prior: float | str | None = field(default=None, metadata=PRIOR)
    """Prior precision of the posterior; by default the one stored with the source model."""
    damping: str | None = choice(None, *DAMPING)
    """exact or factored; by default as stored with the source model."""
    curvature: str | None = choice(None, *CURVATURE)
    """sum or mean; by default as stored with the source model."""
    dropout_rate: float | None = number(None, *DROPOUT_RATES)
    """Rate of MC dropout; by default the one that the source model was trained with, or 0.1."""

    @property
    def may_be_new(self) -> bool:
        """Whether the target may show classes that the model does not know."""
        return self.setting not in ("closed", "partial")


def read_preset(name: str, command: str) -> dict[str, Any]:
    """The settings of a preset (a file in `usfan/presets`) for `train` or `adapt`, or its further ones for a method."""
    from importlib import resources

    from usfan.files import parse_yaml

    one_of("preset", name, PRESETS)
    if name == "default":
        return {}
    file = resources.files("usfan.presets").joinpath(f"{name}.yaml")
    return parse_yaml(file.read_bytes()).get(command) or {}


def make_config(kind: type[T], values: Mapping[str, Any]) -> T:
    """A config of the user's values, on top of those of the preset. None stands for the default."""
    fields = [item.name for item in dataclasses.fields(kind)]  # type: ignore[arg-type]
    settings = {}
    if kind is TrainConfig:
        settings = read_preset(values.get("preset") or "default", "train")
    for name, value in values.items():
        if name not in fields:
            raise unknown_setting(name, fields, f"the settings are {', '.join(fields)}")
        if value is not None:
            settings[name] = value
    return kind(**settings)


def unknown_setting(name: str, known: Collection[str], otherwise: str) -> ConfigError:
    """The error for a name that no setting has. It may be a stranger's text: it is escaped, and cut."""
    near = difflib.get_close_matches(name[:80], sorted(known), n=3)
    hint = f"did you mean {', '.join(near)}?" if near else otherwise
    return ConfigError(f"unknown setting '{printable(name, 80)}': {hint}")


KINDS = {
    "bool": "true or false (on or off)",
    "int": "a whole number",
    "float": "a number",
    "str": "a text",
}
"""Types of settings, in the order in which a type is recognised, and their names for users."""
YAML_WORDS = {True: "on", False: "off", 32: "32"}
"""Choices that YAML does not read as texts."""


def convert(item: Field[Any], value: Any) -> Any:
    """A value (from YAML, a flag, or Python) as the type of the field, if that loses nothing, and if the field may have
    it; else ConfigError."""
    types = str(item.type)
    if value is None and "None" in types:
        return None
    kind = next(kind for kind in KINDS if kind in types)
    if "str" in types and isinstance(value, str) and not is_number(value):
        kind = "str"
    choices = item.metadata.get("choices", ())
    try:
        result = convert_to(kind, value, choices)
    except (LookupError, TypeError, ValueError, OverflowError):
        text = reprlib.repr(value)[:80]
        raise ConfigError(f"{item.name} must be {KINDS[kind]}; got {text}") from None
    if choices and kind == "str":
        one_of(item.name, result, choices)
    elif "bounds" in item.metadata:
        between(item.name, result, *item.metadata["bounds"])
    return result


def convert_to(kind: str, value: Any, choices: Collection[str]) -> Any:
    """Raises if the value is none of this kind."""
    if kind == "bool":
        return {"on": True, "off": False, True: True, False: False}[value]
    if kind == "str":
        text = value if isinstance(value, str) else YAML_WORDS[value]
        if not text or "\0" in text or (text is not value and text not in choices):
            raise ValueError
        return text
    if isinstance(value, bool) or (kind == "int" and int(value) != float(value)):
        raise ValueError
    return int(value) if kind == "int" else float(value)
