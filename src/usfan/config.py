"""Settings as dataclasses. Each field has its own docstring; it is also the help of its flag on the command line."""

from __future__ import annotations

import dataclasses
import difflib
import reprlib
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from usfan.config_checks import (
    DROPOUT_RATES,
    MOST_MEMBERS,
    MOST_RATE,
    at_least,
    between,
    check_prior,
    check_seed,
    is_number,
    one_of,
)
from usfan.errors import ConfigError, shown
from usfan.field_docs import field_docs as field_docs

T = TypeVar("T")
WITHHELD = "(withheld)"
"""What stands in config.yaml of a private run in place of a value."""
SETTINGS = ("auto", "closed", "partial", "open", "universal")
TUNE = ("affine", "new", "norm", "all")
UNCERTAINTIES = ("posterior", "point", "mc-dropout", "ensemble")
"""What certainty can come from."""
MIXINGS = ("evidence", "certainty", "mean", "learned")
"""How the models of several sources are weighed (`scoring.mixing`)."""
VIEWS = ("crop-flip", "resized-crop-flip", "resized-crop", "shift-turn", "none")
"""The views in training of `usfan.data.views.InputSpec`."""
CHOICES = {
    "setting": SETTINGS,
    "tune": (*TUNE, "auto"),
    "augment": VIEWS,
    "TrainConfig.uncertainty": UNCERTAINTIES,
    "mixing": MIXINGS,
    "AdaptConfig.uncertainty": ("auto", *UNCERTAINTIES),
    "damping": ("exact", "factored"),
    "device": ("auto", "cpu", "cuda"),
    "precision": ("auto", "32", "bf16"),
    "compile": ("auto", "graph", "on", "off"),
}
"""What fields of few values may hold."""
ADVANCED = frozenset(
    {"momentum", "weight_decay", "backbone_lr_scale", "augment", "prior", "damping", "samples", "dropout_rate"}
    | {"given_label_weight", "label_folds", "mixing"}
    | {"precision", "compile", "devices", "nodes", "cache"}
)
"""Less common fields: no flags of `adapt` and `reproduce`, which take them by `--set NAME=VALUE` and from YAML."""


def choices_of(kind: type, name: str) -> tuple[str, ...]:
    """What a field may hold; nothing if it takes any value of its type."""
    return CHOICES.get(f"{kind.__name__}.{name}", CHOICES.get(name, ()))


@dataclass(frozen=True)
class RuntimeConfig:
    """Where and how to compute."""

    device: str = "auto"
    """auto, cpu or cuda."""
    precision: str = "auto"
    """auto (bf16 on a GPU, 32 on a CPU), 32 or bf16."""
    compile: str = "auto"
    """How training steps run on a GPU: off (eagerly), graph (captured as CUDA graphs), on (compiled, then captured;
    compiling takes a minute or more), or auto (graph; on for long runs)."""
    devices: int = 1
    """Number of processes on each node: one per GPU, or this many on a CPU."""
    nodes: int = 1
    """Number of nodes."""
    workers: int | None = None
    """Processes that decode images; by default chosen for the machine."""
    cache: str | None = None
    """Folder that keeps decoded images between runs; by default none are kept."""

    def __post_init__(self) -> None:
        for name in ("device", "precision", "compile"):
            one_of(name, getattr(self, name), CHOICES[name])
        at_least("devices", self.devices, 1)
        at_least("nodes", self.nodes, 1)


@dataclass(frozen=True)
class OptimiserConfig:
    """SHOT's optimiser: SGD with Nesterov momentum, lr · (1 + 10 p)^(−0.75)."""

    batch_size: int = 64
    """Images in one step, over all processes."""
    lr: float = 1e-2
    """Learning rate of the new layers at the first step."""
    backbone_lr_scale: float | None = None
    """Learning rate of the backbone relative to lr; by default 0.1, or 1 for a backbone without pretrained weights."""
    momentum: float = 0.9
    """Momentum (Nesterov)."""
    weight_decay: float = 1e-3
    """Weight decay."""

    def __post_init__(self) -> None:
        at_least("batch_size", self.batch_size, 2)
        for name in ("lr", "momentum", "weight_decay"):
            between(name, getattr(self, name), 0, MOST_RATE)


@dataclass(frozen=True)
class TrainConfig(OptimiserConfig):
    """Stage 1: the source classifier and its posterior."""

    backbone: str = "resnet50"
    """digits-cnn, lenet, dtn, cnn13, toy-mlp, or any timm model."""
    pretrained: str = "auto"
    """auto (weights of usfan[offline] if they fit, else none), none, offline, timm (download), or a weights file."""
    epochs: int = 50
    """Largest number of passes over the training images (see patience)."""
    tune: str = "auto"
    """Which parameters are trained: affine (scales and shifts of BatchNorm, and the head), new (the layers after the
    backbone), norm (these and BatchNorm), all, or auto: new if the backbone has pretrained weights, else all."""
    seed: int = 0
    """Seed of the split, the initial weights, the order of the images and their augmentation."""
    label_smoothing: float = 0.1
    """α of Eq. 1."""
    validation_share: float = 0.1
    """Share of the images held out to stop early and to choose the best epoch; 0 trains all epochs, keeps the last."""
    patience: int = 10
    """Stop if the accuracy on the held-out images has not risen for this many epochs, and keep the best epoch (the
    latest of equally good ones). 0 trains all epochs."""
    bottleneck: int = 256
    """Width of the layer between backbone and head; 0 for none."""
    dropout: float | None = None
    """Dropout after the bottleneck; by default the network's own."""
    head_bias: bool = True
    """Whether the last layer has a bias."""
    head_norm: bool = True
    """Whether the last layer is weight-normalised."""
    augment: str | None = None
    """Augmentation in training: crop-flip, resized-crop-flip, resized-crop, shift-turn or none; by default the
    backbone's."""
    prior: float | str = "evidence"
    """Prior precision of the posterior: a positive number, evidence, or weight-decay (× N)."""
    damping: str = "exact"
    """How the prior enters the Kronecker factors: exact, or factored as in the published code."""
    uncertainty: str = "posterior"
    """Where the model's certainty comes from: posterior, point (the point estimate), mc-dropout (trains with dropout,
    by default at rate 0.5) or ensemble (heads on bootstraps, trained after the network). The posterior is always fitted
    and stored."""
    members: int = 8
    """Number of heads in the ensemble."""
    preset: str = "default"
    """default, paper (all layers, prior precision 5e-4) or shot (SHOT's recipe)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least("epochs", self.epochs, 1)
        between("label_smoothing", self.label_smoothing, 0, 1)
        between("validation_share", self.validation_share, 0, 0.9)
        at_least("bottleneck", self.bottleneck, 0)
        at_least("patience", self.patience, 0)
        check_prior(self.prior)
        check_seed(self.seed)
        one_of("damping", self.damping, CHOICES["damping"])
        one_of("uncertainty", self.uncertainty, UNCERTAINTIES)
        between("members", self.members, 2, MOST_MEMBERS)
        if self.dropout is not None:
            between("dropout", self.dropout, 0, DROPOUT_RATES[1])
        if self.uncertainty == "mc-dropout" and self.dropout == 0:
            raise ConfigError("uncertainty mc-dropout needs dropout in training: leave --dropout 0 out, or give a rate")
        one_of("tune", self.tune, choices_of(TrainConfig, "tune"))
        if self.augment is not None:
            one_of("augment", self.augment, VIEWS)


@dataclass(frozen=True)
class AdaptConfig(OptimiserConfig):
    """Stage 2: the feature extractor moves, the head stays. A method has settings of its own beside these."""

    method: str = "auto"
    """The method; `usfan methods` lists them. auto: u-sfan++ if a pretrained network can be the witness, else
    u-sfan."""
    setting: str = "auto"
    """Which classes the target has: closed (those of the source), partial (some are missing, or their shares differ),
    open (new ones too), universal (missing and new ones), or auto: estimated from the images."""
    tune: str = "auto"
    """Which parameters are trained: affine (scales and shifts of BatchNorm only), new (the layers after the backbone),
    norm (these and BatchNorm), all, or auto: new, unless the source model fits the target badly and there are enough
    images to train all."""
    witness: str = "auto"
    """Frozen pretrained network for the method and the guard: auto (the network that the source model started from),
    none, NAME, or NAME:WEIGHTS with offline, timm or a file."""
    uncertainty: str = "auto"
    """Where the certainty of an image comes from: posterior, point (the point estimate), mc-dropout, ensemble, or auto
    (as stored with the source model)."""
    epochs: int = 15
    """Passes over the target."""
    seed: int = 0
    """Seed of the order of the images and their augmentation."""
    guard: bool = True
    """Keep the source model if adaptation seems to have done harm; off keeps the model after the last epoch."""
    preset: str = "default"
    """default, paper (u-sfan with the paper's literal settings) or shot (SHOT's recipe). --method chooses another
    method."""
    augment: str | None = None
    """Augmentation while adapting: crop-flip, resized-crop-flip, resized-crop, shift-turn or none; by default the
    source's."""
    samples: int = 128
    """M, the number of draws from the posterior."""
    given_label_weight: float | None = None
    """Weight of the cross-entropy with the labels of --labels; by default 1 if the backbone stays frozen, else 0.15
    (on digits 1 did harm)."""
    label_folds: int | None = None
    """To say what the labels of --labels are worth, they are split into this many parts, and each part is left out in
    turn, in one more adaptation. By default 5 if the backbone stays frozen, else 0 (off)."""
    prior: float | str | None = None
    """Prior precision of the posterior; by default the one stored with the source model."""
    damping: str | None = None
    """exact or factored; by default as stored with the source model."""
    dropout_rate: float | None = None
    """Rate of MC dropout; by default the one that the source model was trained with, or 0.1."""
    mixing: str = "evidence"
    """With several sources, how their models are weighted: evidence, certainty, mean or learned."""

    @property
    def may_be_new(self) -> bool:
        """Whether the target may show classes that the model does not know."""
        return self.setting not in ("closed", "partial")

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("setting", self.setting, SETTINGS)
        one_of("tune", self.tune, (*TUNE, "auto"))
        at_least("epochs", self.epochs, 0)
        check_seed(self.seed)
        at_least("samples", self.samples, 1)
        one_of("uncertainty", self.uncertainty, choices_of(AdaptConfig, "uncertainty"))
        one_of("mixing", self.mixing, MIXINGS)
        if self.dropout_rate is not None:
            between("dropout_rate", self.dropout_rate, *DROPOUT_RATES)
        at_least("given_label_weight", self.given_label_weight or 0.0, 0)
        at_least("label_folds", self.label_folds or 0, 0)
        if self.prior is not None:
            check_prior(self.prior)
        if self.augment is not None:
            one_of("augment", self.augment, VIEWS)
        if self.damping is not None:
            one_of("damping", self.damping, CHOICES["damping"])


def read_preset(name: str, command: str) -> dict[str, Any]:
    """The settings of a preset for `train` or `adapt`: a file in `usfan/presets`."""
    from importlib import resources

    from usfan.files import parse_yaml

    presets = resources.files("usfan.presets")
    names = ["default", *sorted(item.name.removesuffix(".yaml") for item in presets.iterdir() if ".yaml" in item.name)]
    one_of("preset", name, tuple(names))
    if name == "default":
        return {}
    return parse_yaml(presets.joinpath(f"{name}.yaml").read_bytes()).get(command) or {}


def make_config(kind: type[T], given: dict[str, Any]) -> T:
    """A config from what a user gave: the preset's settings first, the user's own on top."""
    known = {f.name: f for f in dataclasses.fields(kind)}  # type: ignore[arg-type]
    for name in given:
        if name not in known:
            raise unknown_setting(name, known, f"the settings are {', '.join(known)}")
    preset = read_preset(str(given.get("preset", "default")), "train") if kind is TrainConfig else {}
    values = {**given, **{name: value for name, value in preset.items() if given.get(name) is None}}
    return kind(**{name: convert(known[name], value) for name, value in values.items()})


def unknown_setting(name: str, known: Collection[str], otherwise: str) -> ConfigError:
    """The name may be a stranger's: it is shown escaped, and cut."""
    near = difflib.get_close_matches(name[:80], sorted(known), n=3)
    hint = f"did you mean {', '.join(near)}?" if near else otherwise
    return ConfigError(f"unknown setting '{shown(name, 80)}': {hint}")


class Typed(Protocol):
    """A field of a dataclass, or a flag of the command line."""

    @property
    def name(self) -> str: ...
    @property
    def type(self) -> Any: ...


def convert(item: Typed, value: Any) -> Any:
    """Check a value (from YAML, a flag, or Python) against the type, and convert it if that loses nothing."""
    kind = item.type if isinstance(item.type, str) else getattr(item.type, "__name__", str(item.type))
    if value is None and "None" in kind:
        return None
    if kind.startswith("bool"):
        value = {"on": True, "off": False}.get(value, value) if isinstance(value, str) else value
        if isinstance(value, bool):
            return value
        raise ConfigError(f"{item.name} must be true or false (on or off); got {reprlib.repr(value)[:80]}")
    if "str" in kind and "float" not in kind:
        if isinstance(value, bool):  # YAML reads on and off so
            return "on" if value else "off"
        if not isinstance(value, (str, int, float)):
            raise ConfigError(f"{item.name} must be a text; got {reprlib.repr(value)[:80]}")
        return str(value)
    try:
        if "str" in kind:
            return value if isinstance(value, str) and not is_number(value) else float(value)
        if kind.startswith("int"):
            if isinstance(value, bool) or int(value) != float(value):
                raise ValueError
            return int(value)
        if isinstance(value, bool):
            raise ValueError
        return float(value)
    except (TypeError, ValueError, OverflowError):
        raise ConfigError(
            f"{item.name} must be {'a whole number' if 'int' in kind else 'a number'}; got {reprlib.repr(value)[:80]}"
        ) from None
