"""Models: a classifier, its posterior, its classes and its input. Stage 1 passes one to stage 2. It holds no data."""

from __future__ import annotations

import contextlib
import html
import itertools
import pkgutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from PIL import Image
from torch import Tensor, nn

from usfan.data.labels import some
from usfan.data.views import InputSpec
from usfan.engine.inference import feature_pass, on_features
from usfan.engine.runtime import Runtime
from usfan.errors import ConfigError
from usfan.maths.names import TargetNaming
from usfan.maths.objectives import certainty_weights, entropy
from usfan.maths.outputs import Outputs, Prediction, check_finite
from usfan.maths.source_mixture import mixed, reordered
from usfan.maths.unknown import UnknownRule
from usfan.models.classifier import Classifier
from usfan.models.small_backbones import SMALL_BACKBONES
from usfan.progress import CountImages, image_progress
from usfan.shield import shielded, shielded_steps
from usfan.store.model_folder import load_parts, save_model
from usfan.store.schema import JsonTable, blaming
from usfan.uncertainty.base import FitSettings, Uncertainty
from usfan.uncertainty.kronecker import KroneckerPosterior
from usfan.uncertainty.registry import find_uncertainty

if TYPE_CHECKING:
    from usfan.data.sources import ImageData, ImageSource

    Images = ImageData | Image.Image | ImageSource
    """One image or many: as tensor, array, Pillow image, path or folder, or anything else that `ImageData` takes."""

Device = torch.device | str


@dataclass(frozen=True)
class Passes:
    """Outputs of the source model and of the adapted model for the target."""

    before: Outputs
    after: Outputs
    positions: Tensor
    """Positions in the data of the images that could be read, in the order of the outputs."""
    unreadable: Mapping[str, str] = field(default_factory=dict)
    """The images that could not be read, and why."""
    path: tuple[Tensor, ...] = ()
    """The predicted class of each image after 0, 1, … epochs; in a resumed run, of the epochs since then."""
    labelled: Tensor | None = None
    """Rows of the outputs whose labels the user gave to the adaptation."""
    naming: TargetNaming | None = None
    """Clusters of the target and their names before anything was trained."""
    decisions: tuple[Tensor, Tensor] | None = None
    """N predictions of the source model and of the adapted one, K for unknown. `after` is of the model that is kept, so
    it may be the source model's."""
    images: ImageData | None = field(default=None, repr=False)
    """The images, without their labels, if `usfan.adapt` received an `ImageData`. Reports show them."""

    def __repr__(self) -> str:
        return f"Passes({len(self.after)} images before and after)"


@dataclass(eq=False, repr=False)
class SourceModel:
    """A trained classifier with the posterior of its last layer."""

    classifier: Classifier
    posterior: KroneckerPosterior
    classes: tuple[str, ...]
    spec: InputSpec
    architecture: JsonTable
    """Description that rebuilds the network: {"backbone", "bottleneck", …}, or {"module": class name, "head": layer}
    for a foreign one, with "timm": name if timm makes it."""
    summary: JsonTable = field(default_factory=dict)
    """Settings and scores of the training; no sample."""
    temperature: float = 0.4
    samples: int = 128
    confidence_temperature: float = 1.0
    """T: `probs` is softmax(logits / T). Adaptation sets it such that mean confidence is the estimated accuracy."""
    uncertainty: Uncertainty = None  # type: ignore[assignment]  # __post_init__ fills it
    """Where certainty comes from: by default the posterior, which every model has."""
    kind = "source"

    def __post_init__(self) -> None:
        # A posterior in use is the model's posterior, also after `with_posterior`.
        if self.uncertainty is None or isinstance(self.uncertainty, KroneckerPosterior):
            self.uncertainty = self.posterior

    @property
    def pretrained(self) -> bool:
        """Whether the backbone started from pretrained weights."""
        return came_pretrained(self.architecture)

    @property
    def dropout_rate(self) -> float:
        """Rate of dropout before the last layer: of the MC dropout in use, or of the training; 0 for none."""
        rate = self.uncertainty.settings().get("rate") or self.architecture.get("dropout")
        return float(rate or 0)

    def facts(self) -> dict[str, str]:
        """The first things to know about a model."""
        names = [self.architecture.get(name) for name in ("backbone", "timm", "module")]
        posterior = self.posterior
        facts = {
            "network": str(next(filter(None, names), None)),
            "classes": describe_classes(self.classes),
            "input": self.spec.shape_text,
            "posterior": f"of {posterior.count:,} images, prior precision {posterior.prior_precision:.3g}",
        }
        if self.uncertainty is not posterior:
            facts["uncertainty"] = self.uncertainty.kind
        return facts

    def __repr__(self) -> str:
        facts = "; ".join(f"{name} {fact}" for name, fact in self.facts().items())
        return f"{type(self).__name__}({facts})"

    def _repr_html_(self) -> str:
        """The facts as a table, in a notebook."""
        rows = [
            f"<tr><th>{name}</th><td>{html.escape(fact)}</td></tr>"
            for name, fact in self.facts().items()
        ]
        return f"<table>{''.join(rows)}</table>"

    def outputs_of(self, features: Tensor, logits: Tensor) -> Outputs:
        """Complete the features and logits of a pass by the figures of the uncertainty."""
        posterior_probs, information = self.uncertainty.moments(
            features, self.temperature, self.samples
        )
        probs = self.rescale(logits)
        outputs = Outputs(features, logits, probs, posterior_probs, information)
        check_finite(outputs)
        return outputs

    def rescale(self, logits: Tensor) -> Tensor:
        """B × K probabilities of the point estimate."""
        return (logits / self.confidence_temperature).softmax(dim=1)

    def flag_unknown(self, outputs: Outputs) -> Tensor:
        """B booleans: judged to be of no known class."""
        return torch.zeros(len(outputs), dtype=torch.bool, device=outputs.logits.device)

    def decide(self, outputs: Outputs) -> Tensor:
        """B decisions: a class, or K for an image of no known class."""
        labels = outputs.logits.argmax(dim=1)
        return labels.masked_fill(self.flag_unknown(outputs), len(self.classes))

    def to_prediction(self, outputs: Outputs) -> Prediction:
        p = outputs.posterior_probs
        return Prediction(
            outputs.probs,
            self.decide(outputs),
            entropy(p),
            certainty_weights(p),
            self.flag_unknown(outputs),
            self.classes,
        )

    @shielded
    def predict(
        self, images: Images, batch_size: int = 64, *, progress: CountImages = False
    ) -> Prediction:
        """Predict the classes of images. `progress` is True, False, or a function that is called with the number of
        images just seen."""
        images = as_images(images, self.spec.channels)
        with image_progress(progress, "predicting", len(images)) as advance:
            batches = self.predict_batches(images, batch_size, progress=advance)
            parts = [self.to_prediction(outputs) for _, outputs in batches]
        names = ("probs", "label", "entropy", "weight", "unknown")
        columns = {name: torch.cat([getattr(part, name) for part in parts]) for name in names}
        return Prediction(**columns, classes=self.classes)

    @shielded_steps
    def predict_batches(
        self,
        images: Images,
        batch_size: int = 64,
        *,
        runtime: Runtime | None = None,
        total: int | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> Iterator[tuple[Tensor, Outputs]]:
        """(positions, outputs) batch by batch; memory does not grow with the number of images. `total` is the number of
        images if these are only some of them: it decides which engine computes. `progress` is that of
        `usfan.data.stream.stream`."""
        from usfan.data.stream import stream

        data = as_images(images, self.spec.channels)
        runtime = runtime or Runtime(self.uncertainty.weight.device, engine="auto")
        batches = stream(
            data,
            size=self.spec.resize,
            channels=self.spec.channels,
            resampling=self.spec.resampling,
            batch_size=batch_size,
            workers=runtime.workers,
            progress=progress,
        )
        first = next(batches, None)
        if first is None:
            return
        sample = first[1].to(runtime.device)
        with self.outputs_pass(runtime, sample, total or len(data)) as outputs_of:
            for index, pixels in itertools.chain([first], batches):
                self.classifier.eval()  # the caller may train it between two batches
                with torch.no_grad():
                    outputs = outputs_of(pixels.to(runtime.device))
                yield index, outputs

    @contextlib.contextmanager
    def outputs_pass(
        self, runtime: Runtime, sample: Tensor, count: int
    ) -> Iterator[Callable[[Tensor], Outputs]]:
        """Gives outputs for decoded images B×C×R×R, of which `sample` holds a few."""
        if runtime.device.type == "cuda":
            runtime = replace(runtime, precision="32")
        with feature_pass(self.classifier, self.spec, runtime, sample, count) as (through, _):
            after = on_features(self.classifier)

            def outputs(pixels: Tensor) -> Outputs:
                features, logits = after(through(pixels))
                return self.outputs_of(features.float(), logits.float())

            yield outputs

    def to(self, device: Device) -> Self:
        """Move the network and the posterior, in place."""
        self.classifier.to(device)
        self.posterior, self.uncertainty = self.uncertainties_on(device)
        return self

    def uncertainties_on(self, device: Device) -> tuple[KroneckerPosterior, Uncertainty]:
        """The posterior and the uncertainty in use on a device; they may be one object."""
        posterior = self.posterior.to(device)
        if self.uncertainty is self.posterior:
            return posterior, posterior
        return posterior, self.uncertainty.to(device)

    @shielded
    def with_uncertainty(self, name: str, rate: float | None = None) -> Self:
        """The same network with its certainty from another source, a name in `UNCERTAINTIES` (`auto`: as it is).
        `rate` is that of MC dropout; by default the one that the head was trained with."""
        if name == "auto":
            return self
        kind = find_uncertainty(name)
        if rate is None and type(self.uncertainty) is kind:
            return self
        settings = FitSettings(dropout_rate=rate, trained_rate=self.dropout_rate)
        return replace(self, uncertainty=kind.from_posterior(self.posterior, settings))

    def with_posterior(self, posterior: KroneckerPosterior) -> Self:
        """The same model with another posterior of the same layer."""
        return replace(self, posterior=posterior)

    @shielded
    def report(self, out: str | Path, data: Images | None = None) -> Path:
        """Write an HTML report to the file `out`.

        Args:
            out: The file to write.
            data: Images to report on, with labels if there are any. A model that just came from `adapt` needs none.
        """
        # Found by name: the report shows what models, metrics and methods give, so none of them imports it.
        write = pkgutil.resolve_name("usfan.report.of_model:write_model_report")
        path: Path = write(self, Path(out), None if data is None else as_images(data))
        return path

    @shielded
    def save(self, folder: str | Path, *, private: bool = False) -> Path:
        """Write the model folder. `private` leaves out the summary and the likelihood of the training labels."""
        return save_model(self, Path(folder), private=private)

    @classmethod
    @shielded
    def load(cls, folder: str | Path, *, module: nn.Module | None = None) -> SourceModel:
        """From a folder, or a Hugging Face Hub id. A module that is not timm's is given again: tensors are stored."""
        parts = load_parts(folder, module)
        if parts["kind"] != "mixture":
            return make_model(**parts)
        members = [make_model(**member) for member in parts.pop("members")]
        first = members[0]
        with blaming(str(folder)):
            check_members([(parts["classes"], first.spec), (first.classes, first.spec)])
            del parts["kind"]
            return MixtureModel.of(members, **parts)


@dataclass(eq=False, repr=False)
class AdaptedModel(SourceModel):
    """A source model after stage 2: the extractor moved, the head and the posterior are the source's."""

    method: str = "u-sfan"
    unknown_rule: UnknownRule | None = None
    """The rule by which an image is judged unknown; None in closed set."""
    history: JsonTable = field(default_factory=dict)
    """The decision of the guard with its reason, and validators per epoch. Saved with the run's metrics only."""
    passes: Passes | None = None
    """The target before and after, fresh from `adapt`; not saved with the model."""
    alternative: AdaptedModel | None = None
    """The adapted model, if the guard is undecided and the source model stays in use."""
    kind = "adapted"

    def facts(self) -> dict[str, str]:
        facts = {"method": self.method}
        verdict = self.history.get("verdict")
        if verdict:
            facts["verdict"] = str(verdict["value"])
        return facts | super().facts()

    def _repr_html_(self) -> str:
        verdict = self.history.get("verdict") or {"sentence": ""}
        return f"<p>{html.escape(str(verdict['sentence']))}</p>{super()._repr_html_()}"

    def flag_unknown(self, outputs: Outputs) -> Tensor:
        if self.unknown_rule is None:
            return super().flag_unknown(outputs)
        return self.unknown_rule.flag(outputs)


@dataclass(eq=False, repr=False)
class MixtureModel(AdaptedModel):
    """Models of several sources behind the interface of one (`maths.source_mixture`). `members` have the networks;
    the posterior and the uncertainty are those of the first. `of` makes one."""

    members: tuple[SourceModel, ...] = ()
    shares: tuple[float, ...] = ()
    """α of every member."""
    kind = "mixture"

    @classmethod
    def of(
        cls,
        members: Sequence[SourceModel],
        shares: Sequence[float],
        *,
        classes: tuple[str, ...] | None = None,
        method: str | None = None,
        unknown_rule: UnknownRule | None = None,
        summary: JsonTable | None = None,
        confidence_temperature: float = 1.0,
    ) -> MixtureModel:
        """Mix models. Classes are those of the first member unless others are given, matched by name."""
        first = members[0]
        check_members([(model.classes, model.spec) for model in members])
        networks: Any = nn.ModuleList([model.classifier for model in members])
        return cls(
            classifier=networks,
            posterior=first.posterior,
            uncertainty=first.uncertainty,
            classes=classes or first.classes,
            spec=first.spec,
            architecture=first.architecture,
            summary=summary or {},
            confidence_temperature=confidence_temperature,
            method=method or str(getattr(first, "method", "source-only")),
            unknown_rule=unknown_rule,
            members=tuple(members),
            shares=tuple(shares),
        )

    def facts(self) -> dict[str, str]:
        networks = dict.fromkeys(model.facts()["network"] for model in self.members)
        shares = ", ".join(f"{share:.2f}" for share in self.shares)
        return {
            "method": self.method,
            "members": f"{len(self.members)} of {', '.join(networks)}",
            "shares": shares,
            "classes": describe_classes(self.classes),
        }

    def order(self, number: int) -> Tensor:
        """Position of each of the mixture's classes in a member."""
        positions = {
            name: position for position, name in enumerate(self.members[number].classes)
        }
        return torch.tensor([positions[name] for name in self.classes])

    def mix(self, outputs: Sequence[Outputs]) -> Outputs:
        """The outputs of the mixture, from those of each member, whose classes are in the member's order."""
        same_order = []
        for number, member in enumerate(outputs):
            same_order.append(reordered(member, self.order(number).to(member.logits.device)))
        joint = mixed(same_order, torch.tensor(self.shares))
        return replace(joint, probs=self.rescale(joint.logits))

    @contextlib.contextmanager
    def outputs_pass(
        self, runtime: Runtime, sample: Tensor, count: int
    ) -> Iterator[Callable[[Tensor], Outputs]]:
        with contextlib.ExitStack() as stack:
            passes = []
            for model in self.members:
                through = model.outputs_pass(runtime, sample, count)
                passes.append(stack.enter_context(through))
            yield lambda pixels: self.mix([outputs(pixels) for outputs in passes])

    @shielded
    def with_uncertainty(self, name: str, rate: float | None = None) -> Self:
        members = tuple(model.with_uncertainty(name, rate) for model in self.members)
        return replace(self, members=members, uncertainty=members[0].uncertainty)

    def to(self, device: Device) -> Self:
        for model in self.members:
            model.to(device)
        self.posterior = self.members[0].posterior
        self.uncertainty = self.members[0].uncertainty
        return self


def describe_classes(classes: Sequence[str]) -> str:
    return f"{len(classes)}: {some(classes, 4)}"


def check_members(members: Sequence[tuple[tuple[str, ...], InputSpec]]) -> None:
    """Check that models (classes and input) can be mixed: the same class names in any order, images of one size."""
    first, first_spec = members[0]
    for number, (classes, spec) in enumerate(members[1:], start=2):
        names = sorted(set(first) ^ set(classes))
        if names:
            raise ConfigError(
                f"the sources must know the same classes: sources 1 and {number} differ in {some(names)}"
            )
        if (spec.shape, spec.resize, spec.resampling) != (
            first_spec.shape,
            first_spec.resize,
            first_spec.resampling,
        ):
            size, other = (f"{s.shape_text} cut from {s.resize}" for s in (first_spec, spec))
            raise ConfigError(
                f"the sources must take images of the same size: sources 1 and {number} take {size} and {other}"
            )


def came_pretrained(architecture: JsonTable) -> bool:
    """Whether the backbone started from pretrained weights. A foreign module, or a folder of version 0.1, does not
    say: it counts as pretrained unless it is one of our small networks, for which there are no weights."""
    if "pretrained" in architecture:
        return architecture["pretrained"] is not None
    return architecture.get("backbone") not in SMALL_BACKBONES


def make_model(kind: str, **parts: Any) -> SourceModel:
    return AdaptedModel(**parts) if kind == "adapted" else SourceModel(**parts)


def as_model(model: object, module: nn.Module | None = None) -> SourceModel:
    """A model, from itself, its folder, or a Hub id."""
    if isinstance(model, SourceModel):
        return model
    if isinstance(model, (str, Path)):
        return SourceModel.load(model, module=module)
    raise ConfigError(
        f"expected a model or the folder of one, not a {type(model).__name__}; "
        "usfan.attach_posterior(module, data, classes=…) makes a model of a torch module"
    )


def as_images(images: Images, channels: int = 3) -> ImageData:
    """An `ImageData` of anything that it takes; a single image counts as a batch of one.

    3×H×W is one image for a network that sees colour, three for one that sees grey.
    """
    from usfan.data.sources import ImageData

    if isinstance(images, ImageData):
        return images
    if isinstance(images, Image.Image):
        images = [images]
    if is_one_image(getattr(images, "shape", ()), channels):
        images = images[None]  # type: ignore[index,assignment]
    return ImageData(images)


def is_one_image(shape: Sequence[int], channels: int) -> bool:
    """Whether a shape is that of one image, H×W, C×H×W or H×W×3, and not N×H×W."""
    if len(shape) == 3:
        return shape[0] == channels or (shape[2] == 3 and shape[1] != 3)
    return len(shape) == 2
