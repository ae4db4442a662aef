"""Settings as dataclasses. Each field has its own docstring; it is also the help of its flag on the command line."""

from __future__ import annotations

import dataclasses
import difflib
import reprlib
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, TypeVar

from usfan.config_checks import (
    MOST_RATE,
    TEMPERATURES,
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
SPLITS = ("entropy", "posterior-entropy", "mutual-information", "max-softmax", "energy")
"""The scores of `usfan.scoring.unknown`, which are not imported here."""
LABEL_SOURCES = ("centroid", "posterior-centroid", "gaussian", "propagation")  # adaptation/guidance.py
VIEWS = ("crop-flip", "resized-crop-flip", "resized-crop", "shift-turn", "none")
"""The views in training of `usfan.data.views.InputSpec`."""


@dataclass(frozen=True)
class RuntimeConfig:
    """Where and how to compute."""

    device: str = "auto"
    """auto, cpu or cuda."""
    precision: str = "auto"
    """auto (bf16 on a GPU, 32 on a CPU), 32 or bf16."""
    compile: str = "auto"
    """How a GPU takes its steps: off (one by one), graph (captured as CUDA graphs), on (compiled, then captured; takes
    a minute or more at first), or auto (graph, or on for long runs)."""
    devices: int = 1
    """How many processes on each node, one per GPU (or CPU process)."""
    nodes: int = 1
    """How many nodes."""
    workers: int | None = None
    """Processes that decode images; chosen by the machine when not given."""
    cache: str | None = None
    """Folder where decoded images are kept between runs; none are kept when not given."""
    decode: str = "cpu"
    """cpu, or gpu: JPEG files are decoded by the GPU, faster and to slightly other pixels (train, adapt, posterior)."""

    def __post_init__(self) -> None:
        one_of("device", self.device, ("auto", "cpu", "cuda"))
        one_of("precision", self.precision, ("auto", "32", "bf16"))
        one_of("compile", self.compile, ("auto", "graph", "on", "off"))
        one_of("decode", self.decode, ("cpu", "gpu"))
        at_least("devices", self.devices, 1)
        at_least("nodes", self.nodes, 1)


@dataclass(frozen=True)
class OptimiserConfig:
    """SHOT's optimiser: SGD with Nesterov momentum, lr · (1 + 10 p)^(−0.75)."""

    batch_size: int = 64
    """Samples in a step, over all processes."""
    lr: float = 1e-2
    """Learning rate of the new layers at the first step."""
    backbone_lr_scale: float | None = None
    """Learning rate of the backbone relative to lr; 0.1, or 1 for the small networks."""
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
    """auto (weights of usfan[offline] where they fit, else none), none, offline, timm (download), or a weights file."""
    epochs: int = 50
    """Passes over the training part."""
    seed: int = 0
    """Seeds the split, the initial weights, the order and the views."""
    label_smoothing: float = 0.1
    """α of Eq. 1."""
    validation_share: float = 0.1
    """Share of the data held out to choose the best epoch; 0 keeps the last."""
    bottleneck: int = 256
    """Width of the layer between backbone and head; 0 for none."""
    dropout: float | None = None
    """Dropout after the bottleneck; 0, or 0.5 for the digit networks."""
    head_bias: bool = True
    """Whether the last layer has a bias."""
    head_norm: bool = True
    """Whether the last layer is weight-normalised."""
    augment: str | None = None
    """Views in training: crop-flip, resized-crop-flip, resized-crop, shift-turn or none; by default the backbone's."""
    prior: float | str = "evidence"
    """Prior precision of the posterior: a positive number, evidence, or weight-decay (× N)."""
    damping: str = "exact"
    """exact, or factored as in the published program."""
    preset: str = "default"
    """default, or paper: the prior precision 5e-4."""

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least("epochs", self.epochs, 1)
        between("label_smoothing", self.label_smoothing, 0, 1)
        between("validation_share", self.validation_share, 0, 0.9)
        at_least("bottleneck", self.bottleneck, 0)
        check_prior(self.prior)
        check_seed(self.seed)
        one_of("damping", self.damping, ("exact", "factored"))
        one_of("preset", self.preset, ("default", "paper"))
        if self.augment is not None:
            one_of("augment", self.augment, VIEWS)


@dataclass(frozen=True)
class AdaptConfig(OptimiserConfig):
    """Stage 2: the feature extractor moves, the head stays."""

    method: str = "u-sfan"
    """source-only, shot-im, shot-im-entropy, shot, u-sfan or u-sfan+."""
    epochs: int = 15
    """Passes over the target."""
    seed: int = 0
    """Seeds the order and the views."""
    gamma: float = 0.5
    """Share of the diversity term: (1 − γ) L_ent + γ L_div."""
    objective_scale: float = 2.0
    """Factor on the whole of that; 2 makes SHOT-IM the recipe's own at γ = ½, the paper has 1."""
    pseudo_label_weight: float | None = None
    """β, weight of the pseudo-label loss; 0.3, or 0.1 for the small networks."""
    pseudo_label_warmup: int | None = None
    """Epochs at first without the pseudo-label loss; 0, but 1 for U-SFAN+, closed set, small networks, 4 epochs up."""
    temperature: float = 0.4
    """τ of the certainty weights."""
    samples: int = 128
    """M, draws from the posterior."""
    prior: float | str | None = None
    """Prior precision for the weights; the one stored with the source model when not given."""
    damping: str | None = None
    """exact or factored; as stored with the source model when not given."""
    refresh: str = "epoch"
    """When weights are made: epoch (test views, BatchNorm in test mode) or step (Algorithm 1, the batch as it is)."""
    normalise_weights: bool = True
    """Divide the weights by their mean, so that weighting does not weaken the entropy term as a whole."""
    weight_power: float = 1.0
    """Exponent on the weights before they are divided by their mean: above 1 sharper, 0 none."""
    anneal: bool | None = None
    """Let that fall from twice to nearly 0 over the run; on for U-SFAN, closed set, large networks, 4 epochs up."""
    certainty: str = "total"
    """What the posterior's weights look at: total (entropy of the predictive) or epistemic (its mutual information)."""
    neighbours: int = 0
    """Neighbours in the target whose prediction an uncertain sample is pulled to; 0 for none."""
    neighbour_weight: float = 1.0
    """Weight of that pull."""
    pseudo_label_source: str = "centroid"
    """Where pseudo-labels come from: centroid (recipe), posterior-centroid, gaussian, or propagation (neighbours)."""
    weigh_entropy: bool = True
    """Weigh the entropy term by certainty (Eq. 7)."""
    weigh_pseudo_labels: bool = False
    """Weigh the pseudo-label loss by certainty too."""
    balance: bool | None = None
    """Divide the weights by their mean within each predicted class; the method's own when not given."""
    diversity_memory: float | None = None
    """Share of the mean prediction in L_div that is the whole target's, at the last refresh, instead of the batch's;
    the method's own when not given, and 0 where a batch holds four samples per class or more."""
    weigh_diversity: bool = False
    """Weigh the mean prediction in L_div by certainty too."""
    augment: str | None = None
    """View while adapting: crop-flip, resized-crop-flip, resized-crop, shift-turn or none; by default the source's."""
    batch_norm: str = "train"
    """BatchNorm while adapting: train (statistics of the batch) or frozen (the source's)."""
    open_set: bool = False
    """The target may hold classes that the model does not know."""
    partial_set: bool = False
    """The target may lack classes that the model knows: no diversity term, and no centroid for rare ones."""
    split: str | None = None
    """Score that tells known from unknown: entropy (recipe), posterior-entropy, mutual-information, max-softmax or
    energy; the method's own when not given."""
    separation: float | None = None
    """Open set: weight of raising the entropy of samples judged unknown, L_div over the known ones, the first split by
    the target's BatchNorm statistics; 0: as the recipe; not given: the method's own for small networks, else 0."""
    guard: bool = True
    """Keep the iterate that the label-free validator prefers, the source model among them; off: the last iterate."""
    preset: str = "default"
    """default (ours, by measurement), or paper (its literal settings)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least("epochs", self.epochs, 0)
        between("gamma", self.gamma, 0, 1)
        check_seed(self.seed)
        at_least("samples", self.samples, 1)
        at_least("objective_scale", self.objective_scale, 0)
        for name in ("pseudo_label_warmup", "pseudo_label_weight", "separation"):
            if getattr(self, name) is not None:
                at_least(name, getattr(self, name), 0)
        if not self.temperature > 0:
            raise ConfigError(f"temperature must be positive; got {self.temperature}")
        between("temperature", self.temperature, *TEMPERATURES)
        if self.prior is not None:
            check_prior(self.prior)
        one_of("refresh", self.refresh, ("epoch", "step"))
        one_of("certainty", self.certainty, ("total", "epistemic"))
        one_of("pseudo_label_source", self.pseudo_label_source, LABEL_SOURCES)
        at_least("neighbours", self.neighbours, 0)
        at_least("neighbour_weight", self.neighbour_weight, 0)
        at_least("weight_power", self.weight_power, 0)
        if self.diversity_memory is not None:
            between("diversity_memory", self.diversity_memory, 0, 0.999)
        if self.augment is not None:
            one_of("augment", self.augment, VIEWS)
        one_of("batch_norm", self.batch_norm, ("train", "frozen"))
        one_of("preset", self.preset, ("default", "paper"))
        if self.damping is not None:
            one_of("damping", self.damping, ("exact", "factored"))
        if self.split is not None:
            one_of("split", self.split, SPLITS)
        if self.balance and not self.normalise_weights:
            raise ConfigError("balance divides weights by their mean, normalise-weights off forbids it: choose one")
        if self.refresh == "step" and (self.balance or self.anneal or self.certainty != "total"):
            raise ConfigError("balance, anneal and certainty epistemic need weights per epoch: take away refresh step")
        if self.open_set and self.partial_set:
            raise ConfigError("open-set and partial-set exclude each other: choose one")


PRESETS: dict[tuple[type, str], dict[str, Any]] = {
    (TrainConfig, "paper"): {"prior": 5e-4},
    (AdaptConfig, "paper"): {
        "prior": 5e-4,
        "refresh": "step",
        "normalise_weights": False,
        "balance": False,
        "anneal": False,
        "diversity_memory": 0.0,
        "pseudo_label_warmup": 0,
        "objective_scale": 1.0,
        "guard": False,
        "split": "entropy",
        "separation": 0.0,
    },
}


def make_config(kind: type[T], given: dict[str, Any]) -> T:
    """A config from what a user gave: the preset's settings first, the user's own on top."""
    known = {f.name: f for f in dataclasses.fields(kind)}  # type: ignore[arg-type]
    for name in given:
        if name not in known:
            raise unknown_setting(name, known, f"the settings are {', '.join(known)}")
    preset = PRESETS.get((kind, str(given.get("preset", "default"))), {})
    values = {**given, **{name: value for name, value in preset.items() if given.get(name) is None}}
    return kind(**{name: convert(known[name], value) for name, value in values.items()})


def unknown_setting(name: str, known: Collection[str], otherwise: str) -> ConfigError:
    if name in known:  # of another command
        return ConfigError(f"this command has no setting {name!r}: {otherwise}")
    near = difflib.get_close_matches(name[:80], sorted(known), n=3)
    return ConfigError(
        f"unknown setting {shown(name, 80)!r}: " + (f"did you mean {', '.join(near)}?" if near else otherwise)
    )


def convert(item: dataclasses.Field, value: Any) -> Any:
    """Check a value (from YAML, a flag, or Python) against the field's type, and convert where that loses nothing."""
    kind = str(item.type)
    if value is None and "None" in kind:
        return None
    if kind.startswith("bool"):
        if isinstance(value, bool):
            return value
        raise ConfigError(f"{item.name} must be true or false; got {reprlib.repr(value)[:80]}")
    if "str" in kind and "float" not in kind:
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
