"""What stage 1 passes to stage 2: a classifier, its posterior, its classes and its input. It contains no data."""

from __future__ import annotations

import html
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from huggingface_hub import ModelHubMixin
from PIL import Image
from torch import Tensor, nn

from usfan.artifacts.folder import load_parts, save_model
from usfan.config import UNCERTAINTIES
from usfan.config_checks import one_of
from usfan.data.labels import some
from usfan.data.views import InputSpec, test_view
from usfan.errors import ArtifactError, ConfigError
from usfan.models.classifier import Classifier
from usfan.models.small_backbones import SMALL_BACKBONES
from usfan.posterior.heads import UNTRAINED_RATE, Heads, MCDropout, PointEstimate
from usfan.posterior.kronecker import KroneckerPosterior
from usfan.posterior.predictive import certainty_weights, entropy
from usfan.scoring.mixing import mixed, reordered, source_weights
from usfan.scoring.outputs import Outputs, Prediction, check_finite

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Passes:
    """The target as the source model and as the adapted model see it."""

    before: Outputs
    after: Outputs
    kept: Tensor
    """Positions in the data of the images that could be read, in the order of the outputs."""
    skipped: tuple[Any, ...] = ()
    path: tuple[Tensor, ...] = ()
    """The predicted class of each image after 0, 1, … epochs (of a resumed run, after those since)."""
    given: Tensor | None = None
    """Rows of the outputs whose labels the user gave to the adaptation."""
    without: Tensor | None = None
    """The classes that an adaptation without these labels predicts, if it was tried."""
    images: Any = field(default=None, repr=False)
    """The `ImageData` itself, without its labels, if `usfan.adapt` was given one: reports show its images."""

    def __repr__(self) -> str:
        return f"Passes({len(self.after)} images before and after)"


@dataclass(eq=False, repr=False)
class SourceModel(ModelHubMixin):
    """A trained classifier with the posterior of its last layer. The mixin adds `push_to_hub` and `save_pretrained`."""

    classifier: Classifier
    posterior: KroneckerPosterior
    classes: tuple[str, ...]
    spec: InputSpec
    architecture: dict[str, Any]
    """What rebuilds the network: {"backbone", "bottleneck", …}, or {"module": class name, "head": layer} for a foreign
    one, with "timm": name if timm makes it."""
    summary: dict[str, Any] = field(default_factory=dict)
    """Settings and scores of the training; no sample."""
    temperature: float = 0.4
    samples: int = 128
    rival: Heads | None = None
    """Source of certainty other than the posterior: the point estimate, MC dropout or an ensemble."""
    kind = "source"
    report: ClassVar[Callable[..., Path]]
    """`usfan.report_model` as a method. `usfan.api` adds it, because models do not import reports."""
    _hub_mixin_config: ClassVar[dict[str, Any]] = {}  # type: ignore[misc]  # set: the mixin collects no config of its own

    @property
    def uncertainty(self) -> KroneckerPosterior | Heads:
        """What the model's certainty comes from."""
        return self.posterior if self.rival is None else self.rival

    @property
    def pretrained(self) -> bool:
        """Whether the backbone started from pretrained weights."""
        return came_pretrained(self.architecture)

    def facts(self) -> dict[str, str]:
        """What a person asks of a model first."""
        network = self.architecture.get("backbone") or self.architecture.get("timm") or self.architecture.get("module")
        spec = self.spec
        return {
            "network": str(network),
            "classes": f"{len(self.classes)}: {some(self.classes, 4)}",
            "input": f"{spec.channels}×{spec.size}×{spec.size}",
            "posterior": f"of {self.posterior.count:,} images, prior precision {self.posterior.prior_precision:.3g}",
        } | ({} if self.rival is None else {"uncertainty": self.rival.kind})

    def __repr__(self) -> str:
        return f"{type(self).__name__}({'; '.join(f'{name} {fact}' for name, fact in self.facts().items())})"

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><th style='text-align:left'>{html.escape(name)}</th>"
            f"<td style='text-align:left'>{html.escape(fact)}</td></tr>"
            for name, fact in self.facts().items()
        )
        return f"<table><caption>{type(self).__name__}</caption>{rows}</table>"

    def outputs_of(self, features: Tensor, logits: Tensor) -> Outputs:
        """The uncertainty's view of features and logits that a pass gave."""
        posterior_probs, information = self.uncertainty.moments(features, self.temperature, self.samples)
        check_finite(logits, posterior_probs)
        return Outputs(features, logits, logits.softmax(dim=1), posterior_probs, information)

    def flag_unknown(self, outputs: Outputs) -> Tensor:
        return torch.zeros(len(outputs), dtype=torch.bool, device=outputs.logits.device)

    def to_prediction(self, outputs: Outputs) -> Prediction:
        p = outputs.posterior_probs
        label = outputs.logits.argmax(dim=1)
        return Prediction(
            outputs.probs, label, entropy(p), certainty_weights(p), self.flag_unknown(outputs), self.classes
        )

    def predict(self, images: Any, batch_size: int = 64) -> Prediction:
        """Images as a tensor or array (one or many), a Pillow image, paths, a folder, or whatever `ImageData` takes."""
        parts = [self.to_prediction(outputs) for _, outputs in self.predict_batches(images, batch_size)]
        names = ("probs", "label", "entropy", "weight", "unknown")
        return Prediction(**{n: torch.cat([getattr(p, n) for p in parts]) for n in names}, classes=self.classes)

    def predict_batches(self, images: Any, batch_size: int = 64, **options: Any) -> Iterator[tuple[Tensor, Outputs]]:
        """(positions, outputs) batch by batch; memory does not grow with the number of images."""
        from usfan.data.stream import stream

        device = self.uncertainty.weight.device
        self.classifier.eval()
        for index, pixels in stream(
            as_images(images, self.spec.channels),
            size=self.spec.resize,
            channels=self.spec.channels,
            batch_size=batch_size,
            **options,
        ):
            with torch.no_grad():
                outputs = self.outputs_of_pixels(pixels.to(device))
            yield index, outputs

    def outputs_of_pixels(self, pixels: Tensor) -> Outputs:
        """What the model says of decoded images B×C×R×R."""
        features, logits = self.classifier(test_view(pixels, self.spec))
        return self.outputs_of(features.float(), logits.float())

    def to(self, device: Any) -> SourceModel:
        """Move the network and the posterior, in place."""
        self.classifier.to(device)
        self.posterior = self.posterior.to(device)
        self.rival = None if self.rival is None else self.rival.to(device)
        return self

    def with_uncertainty(self, name: str, rate: float | None = None) -> Self:
        """The same network with its certainty from another source: posterior, point, mc-dropout or ensemble (`auto`: as
        it is). `rate` is that of MC dropout; by default the one that the head was trained with."""
        return self if name == "auto" else replace(self, rival=choose_rival(self, name, rate))

    def save(self, folder: str | Path, *, private: bool = False) -> Path:
        return save_model(self, Path(folder), private=private)

    @classmethod
    def load(cls, folder: str | Path, *, module: nn.Module | None = None) -> SourceModel:
        """From a folder, or a Hugging Face Hub id. A module that is not timm's is given again: tensors are stored."""
        return load_model(folder, module=module)

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: str | Path, *, module: nn.Module | None = None, **download: Any
    ) -> SourceModel:
        """`load` under the Hub's name. The mixin's own reads config.json before it is checked, so it is not used."""
        return load_model(pretrained_model_name_or_path, module=module, **download)

    def _save_pretrained(self, save_directory: Path) -> None:
        """Called by the mixin's `save_pretrained` and `push_to_hub`."""
        self.save(save_directory)


@dataclass(eq=False, repr=False)
class AdaptedModel(SourceModel):
    """A source model after stage 2: the extractor moved, the head and the posterior are the source's."""

    method: str = "u-sfan"
    unknown_rule: Any = None
    """`scoring.unknown.UnknownRule`, or None in closed set: how a single image is judged unknown."""
    history: dict[str, Any] = field(default_factory=dict)
    """History of the adaptation: what was kept and why, validators per epoch. Saved with the run's metrics only."""
    passes: Passes | None = None
    """The target before and after, fresh from `adapt`; not saved with the model."""
    alternative: AdaptedModel | None = None
    """If the guard cannot tell: the adapted model, beside the source model that stays in use."""
    kind = "adapted"

    def facts(self) -> dict[str, str]:
        guard = self.history.get("guard") or {}
        own = {"method": self.method} | ({"result": str(guard["reason"])} if guard.get("reason") else {})
        return own | super().facts()

    def flag_unknown(self, outputs: Outputs) -> Tensor:
        if self.unknown_rule is None:
            return super().flag_unknown(outputs)
        flags: Tensor = self.unknown_rule.flag(outputs)
        return flags


@dataclass(eq=False, repr=False)
class MixtureModel(AdaptedModel):
    """Models of several sources behind the interface of one (`scoring.mixing`). It has no network and no posterior of
    its own: `members` have. `of` makes one."""

    members: tuple[SourceModel, ...] = ()
    mixing: str = "evidence"
    shares: tuple[float, ...] = ()
    """α of every member, before its certainty comes in."""
    kind = "mixture"

    @classmethod
    def of(cls, members: Sequence[SourceModel], mixing: str, shares: Sequence[float], **more: Any) -> MixtureModel:
        """`more`: the other fields. Classes are those of the first member, matched by name."""
        check_members([(model.classes, model.spec) for model in members])
        first = members[0]
        parts = {
            "classifier": nn.ModuleList([model.classifier for model in members]),
            "posterior": None,
            "classes": first.classes,
            "spec": first.spec,
            "architecture": first.architecture,
            "method": getattr(first, "method", "source-only"),
        }
        return cls(**{**parts, **more}, members=tuple(members), mixing=mixing, shares=tuple(shares))

    @property
    def uncertainty(self) -> KroneckerPosterior | Heads:
        """That of the first member."""
        return self.members[0].uncertainty

    @property
    def by_certainty(self) -> bool:
        """Whether the certainty of each sample counts."""
        return self.mixing == "certainty"

    def facts(self) -> dict[str, str]:
        networks = dict.fromkeys(model.facts()["network"] for model in self.members)
        shares = ", ".join(f"{share:.2f}" for share in self.shares)
        return {
            "method": self.method,
            "members": f"{len(self.members)} of {', '.join(networks)}",
            "mixing": f"{self.mixing}, shares {shares}",
            "classes": f"{len(self.classes)}: {some(self.classes, 4)}",
        }

    def order(self, number: int) -> Tensor:
        """Where each of the mixture's classes stands in a member."""
        return class_order(self.classes, self.members[number].classes)

    def mix(self, outputs: Sequence[Outputs]) -> Outputs:
        """What the mixture says, from what each member does, in the member's own order of the classes."""
        own = [reordered(out, self.order(i).to(out.logits.device)) for i, out in enumerate(outputs)]
        return mixed(own, source_weights(own, torch.tensor(self.shares), by_certainty=self.by_certainty))

    def outputs_of_pixels(self, pixels: Tensor) -> Outputs:
        return self.mix([model.outputs_of_pixels(pixels) for model in self.members])

    def with_uncertainty(self, name: str, rate: float | None = None) -> MixtureModel:
        return replace(self, members=tuple(model.with_uncertainty(name, rate) for model in self.members))

    def to(self, device: Any) -> MixtureModel:
        for model in self.members:
            model.to(device)
        return self


def check_members(members: Sequence[tuple[tuple[str, ...], InputSpec]]) -> None:
    """Whether models (classes and input) can be mixed: the same class names in any order, images of the same size."""
    first, spec = members[0]
    for number, (classes, own) in enumerate(members[1:], start=2):
        if set(classes) != set(first):
            missing, extra = sorted(set(first) - set(classes)), sorted(set(classes) - set(first))
            told = [f"lacks {some(missing, 3)}"] if missing else []
            told += [f"has {some(extra, 3)}, which the first lacks"] if extra else []
            raise ConfigError(f"the sources must know the same classes: source {number} {', and '.join(told)}")
        sizes = [(s.channels, s.size, s.resize) for s in (spec, own)]
        if sizes[0] != sizes[1]:
            shown = " and ".join(f"{c}×{size}×{size} cut from {resize}" for c, size, resize in sizes)
            raise ConfigError(f"the sources must take images of the same size: sources 1 and {number} take {shown}")


def class_order(classes: Sequence[str], own: Sequence[str]) -> Tensor:
    """Where each of `classes` stands in `own`."""
    place = {name: number for number, name in enumerate(own)}
    return torch.tensor([place[name] for name in classes])


def came_pretrained(architecture: dict[str, Any]) -> bool:
    """A foreign module, or a folder of version 0.1, does not say: it counts as pretrained unless it is one of our small
    networks, for which there are no weights."""
    if "pretrained" in architecture:
        return architecture["pretrained"] is not None
    return architecture.get("backbone") not in SMALL_BACKBONES


def choose_rival(model: SourceModel, name: str, rate: float | None = None) -> Heads | None:
    """The uncertainty of this name for a model's head; None is the posterior."""
    one_of("uncertainty", name, UNCERTAINTIES)
    head = model.posterior.weight, model.posterior.bias
    if name == "point":
        return PointEstimate(*head)
    if name == "mc-dropout":
        return MCDropout(*head, trained_rate(model) if rate is None else rate)
    if name == "ensemble" and (model.rival is None or model.rival.kind != "ensemble"):
        raise ConfigError(
            "this model has no ensemble: it is trained with the source data, usfan train --uncertainty ensemble, or "
            "usfan posterior --uncertainty ensemble"
        )
    return model.rival if name == "ensemble" else None


def trained_rate(model: SourceModel) -> float:
    """The rate of dropout that the head was trained with; a model that had none gets a guess, and is told so."""
    own = float(model.architecture.get("dropout") or 0)
    if isinstance(model.rival, MCDropout):
        return model.rival.rate
    if own == 0:
        log.warning(
            "the model was trained without dropout before its last layer: MC dropout takes the rate %s, a guess; "
            "dropout_rate sets another",
            UNTRAINED_RATE,
        )
    return own or UNTRAINED_RATE


def load_model(folder: str | Path, *, module: nn.Module | None = None, **download: Any) -> SourceModel:
    """The model of a folder or a Hub id, of the kind that its config names."""
    kind, parts = load_parts(folder, module=module, **download)
    if kind != "mixture":
        return make_model(kind, parts)
    members = [make_model(*member) for member in parts.pop("members")]
    try:
        check_members([(parts["classes"], members[0].spec), *((model.classes, model.spec) for model in members)])
    except ConfigError as error:
        raise ArtifactError(f"{folder}: {error}") from None
    return MixtureModel.of(members, parts.pop("mixing"), parts.pop("shares"), **parts)


def make_model(kind: str, parts: dict[str, Any]) -> SourceModel:
    return AdaptedModel(**parts) if kind == "adapted" else SourceModel(**parts)


def as_model(model: Any, module: nn.Module | None = None) -> SourceModel:
    """A model that was given as such, as its folder, or as a Hub id."""
    if isinstance(model, SourceModel):
        return model
    if isinstance(model, (str, Path)):
        return load_model(model, module=module)
    if isinstance(model, nn.Module):
        raise ConfigError(
            f"a {type(model).__name__} has no posterior yet: make a model of it first, "
            "usfan.attach_posterior(module, data, classes=…)"
        )
    raise ConfigError(f"expected a model or the folder of one, not a {type(model).__name__}")


def as_images(images: Any, channels: int = 3) -> Any:
    """An `ImageData` of whatever was given; a single image counts as a batch of one.

    3×H×W is one image for a network that sees colour, three for one that sees grey.
    """
    from usfan.data.sources import ImageData

    if isinstance(images, ImageData):
        return images
    if isinstance(images, Image.Image):
        images = [images]
    if hasattr(images, "ndim") and (images.ndim == 2 or (images.ndim == 3 and is_one_image(images, channels))):
        images = images[None]
    return ImageData(images)


def is_one_image(array: Any, channels: int) -> bool:
    """Whether three axes are those of one image, C×H×W or H×W×3, and not N×H×W."""
    return bool(array.shape[0] == channels or (array.shape[-1] == 3 and array.shape[1] != 3))
