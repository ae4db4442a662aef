"""How good is a model on these images? Nothing is trained: one pass of the model, one of the witness.

Accuracy is estimated as before an adaptation (`guard`, `estimate`), or measured if there are labels. How far the images
lie from those that the model was trained on needs no source image, because the posterior holds the second moment of
their features (`KroneckerPosterior.distances`).

Shapes: N images, K classes, F witness features.
"""

from __future__ import annotations

import html
import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from usfan.adaptation.estimate import (
    WITH_UNKNOWN,
    AccuracyEstimate,
    ends,
    ends_text,
    estimate_accuracy,
    of_adapted,
)
from usfan.adaptation.guard import Guard, guard_rows
from usfan.adaptation.guidance import REJECTING
from usfan.adaptation.naming import name_target
from usfan.adaptation.target_classes import estimate_target_classes
from usfan.adaptation.verdict import ASSUMPTION, USUAL_ANSWERS, range_text
from usfan.adaptation.witness import Witness, choose_witness, look_once, thumbnails
from usfan.data.few_labels import FewLabels
from usfan.data.sources import ImageData
from usfan.data.store import Store
from usfan.engine.features import features_of, is_streamed, on_features
from usfan.engine.passes import engine_store, forward_store
from usfan.engine.passes import prepare as prepare_network
from usfan.engine.runtime import Runtime
from usfan.errors import ConfigError, option
from usfan.maths.agreement import Interval
from usfan.maths.measurement import measured_accuracy
from usfan.maths.names import View
from usfan.maths.objectives import entropy
from usfan.maths.outputs import Outputs
from usfan.models.backbones import weights_hash
from usfan.progress import network_name
from usfan.store.model import MixtureModel, SourceModel

IMAGES = "images"
LABELS = "labels"
MOST_DOUBTFUL = 20
"""Images that are named because they fit least."""
CERTAINTY = {IMAGES: 90, LABELS: 95}
"""Of the interval, in percent."""


@dataclass(frozen=True, repr=False)
class Check:
    """How good a model is on some images."""

    accuracy: Interval | None
    """Share that is right, with its interval; None if it cannot be told."""
    basis: str
    """images: estimated from them (the interval holds in 90 of 100 cases); labels: measured (95 of 100)."""
    reason: str
    """Why accuracy cannot be told; else what it assumes."""
    shift: float
    """Distance of the images from the training images, relative to the spread of these: 1 means no shift."""
    classes: dict[str, object]
    """Setting, reason, and the share of the images in each class; `new` is the share of new classes."""
    doubtful: tuple[str, ...]
    """The images that fit the model least: far from its training images, and uncertain. The worst first."""
    images: int
    unreadable: int = 0
    labels: int = 0
    """Labels that measured."""
    figures: dict[str, float | None] = field(default_factory=dict)
    """Evidence of the estimate."""
    possible: Interval | None = None
    """Interval of an accuracy that cannot be told; None if nothing is known of it."""

    def below(self, percent: float) -> bool | None:
        """Whether accuracy is below so many percent, with the certainty of the interval; None if that cannot be
        told."""
        accuracy = self.accuracy or self.possible
        if accuracy is None:
            return None
        if 100 * accuracy.high < percent:
            return True
        return False if 100 * accuracy.low >= percent else None

    def to_dict(self) -> dict[str, object]:
        """For JSON, in percent."""
        accuracy = None
        if self.accuracy is not None:
            accuracy = {
                name: round(100 * getattr(self.accuracy, name), 1)
                for name in ("value", "low", "high")
            }
            accuracy |= {"from": self.basis, "certainty": CERTAINTY[self.basis]}
        return {
            "accuracy": accuracy,
            "possible": self.possible and ends(self.possible),
            "reason": self.reason,
            "shift": round(self.shift, 3),
            "classes": self.classes,
            "doubtful": list(self.doubtful),
            "images": self.images,
            "unreadable": self.unreadable,
            "labels": self.labels,
            "figures": self.figures,
        }

    def lines(self) -> dict[str, str]:
        """The summary, a line for each name."""
        count = f"{self.images:,}"
        if self.unreadable:
            count += f" ({self.unreadable:,} more cannot be read)"
        if self.accuracy is None:
            accuracy = f"cannot be told without labels: {self.reason}"
            if self.possible is not None:
                accuracy += f"; {ends_text(self.possible)} are right"
        elif self.basis == LABELS:
            accuracy = f"{range_text(self.accuracy)}, measured on {self.labels:,} labels"
        else:
            accuracy = f"about {range_text(self.accuracy)}, {self.reason}"
        lines = {
            "images": count,
            "accuracy": accuracy,
            "shift": f"{self.shift:.1f} (up to 1: no farther away than the training images are from each other)",
            "classes": str(self.classes["reason"]),
            "fit least": ", ".join(self.doubtful[:3]),
        }
        if self.basis == IMAGES:
            count = f"{USUAL_ANSWERS} or more images drawn at random"
            lines["next"] = f"to measure, label {count}: {option('labels', 'FILE')}"
        return lines

    def prometheus(self, model: str, data: str) -> str:
        """For Prometheus: a text file. What cannot be told is NaN."""
        unknown = Interval(math.nan, math.nan, math.nan)
        accuracy = self.accuracy or replace(self.possible or unknown, value=math.nan)
        labels = ",".join(
            f"{name}={json.dumps(text, ensure_ascii=False)}"
            for name, text in (("model", model), ("data", data), ("from", self.basis))
        )
        figures = {
            "accuracy_ratio": accuracy.value,
            "accuracy_low_ratio": accuracy.low,
            "accuracy_high_ratio": accuracy.high,
            "shift_ratio": self.shift,
            "images": self.images,
            "unreadable_images": self.unreadable,
            "check_timestamp_seconds": round(time.time()),
        }
        lines = []
        for name, figure in figures.items():
            value = "NaN" if math.isnan(figure) else f"{figure:.10g}"
            lines += [f"# TYPE usfan_{name} gauge", f"usfan_{name}{{{labels}}} {value}"]
        return "\n".join(lines) + "\n"

    def __repr__(self) -> str:
        accuracy = "cannot be told" if self.accuracy is None else range_text(self.accuracy)
        return f"Check({self.images:,} images; accuracy {accuracy}; shift {self.shift:.1f})"

    def _repr_html_(self) -> str:
        """The summary as a table, in a notebook."""
        rows = "".join(
            f"<tr><th>{name}</th><td>{html.escape(text)}</td></tr>"
            for name, text in self.lines().items()
        )
        return f"<table>{rows}</table>"


@torch.no_grad()
def check_model(
    model: SourceModel,
    store: Store,
    runtime: Runtime,
    name_of: Callable[[int], str],
    labels: FewLabels | None = None,
    witness: Tensor | None = None,
) -> Check:
    """From decoded images, or their features. `name_of` names the image at a position of the data; `witness`, N × F, is
    a description of the images that the caller brings."""
    if not len(store):
        raise ConfigError("there is no image to check the model on")
    outputs, distances = look(model, store, runtime)
    predictions = model.decide(outputs)
    first = model.members[0] if isinstance(model, MixtureModel) else model
    if witness is None and not store.is_features:
        witness = witness_view(first, store, runtime)
    shift = float(distances.mean())
    names = names_of(model, outputs)
    evidence = Evidence(first, store, runtime, outputs, names, shift, witness)
    classes = evidence.classes()
    estimate, figures = evidence.accuracy(predictions, str(classes["setting"]), model.classes)
    accuracy = estimate.before
    possible = estimate.possible and estimate.possible[0]
    joint = ", " if estimate.counts == WITH_UNKNOWN else " and "
    reason = estimate.reason or f"{ASSUMPTION}{joint}{estimate.counts}"
    confidence = float(outputs.probs.amax(dim=1).mean())
    earlier = model.summary.get("estimated_accuracy")
    if isinstance(earlier, dict):
        possible = None
        if accuracy is not None:
            accuracy = of_adapted(accuracy, earlier.get("after"), confidence)
            reason = str(earlier.get("reason")) if accuracy is None else reason
    basis = IMAGES
    count = 0
    if labels is not None:
        table = labels.all[store.positions.cpu()]
        rows = (table >= 0).nonzero().flatten()
        count = len(rows)
        right = predictions.cpu()[rows] == table[rows]
        accuracy = measured_accuracy([(len(store), right)])
        possible = None
        basis = LABELS
        reason = "if the labelled images were drawn at random"
    strangeness = rank(distances) + rank(entropy(outputs.posterior_probs))
    worst = strangeness.argsort(descending=True, stable=True)[:MOST_DOUBTFUL]
    return Check(
        accuracy,
        basis,
        reason,
        shift,
        classes,
        tuple(name_of(position) for position in store.positions.cpu()[worst.cpu()].tolist()),
        len(store),
        len(store.unreadable),
        count,
        figures | {"confidence": confidence},
        possible,
    )


def look_at(
    model: SourceModel, data: ImageData, runtime: Runtime
) -> tuple[Store, Tensor | None]:
    """For `check_model`: the features of the images in a pretrained network and as its witness describes them, each
    decoded once; else the images."""
    if isinstance(model, MixtureModel) or not (model.pretrained and is_streamed(data, runtime)):
        return engine_store(data, model.spec, runtime), None
    model.to(runtime.device)
    network = prepare_network(model.classifier, model.spec, runtime).eval()
    witness = find_witness(model)
    none = torch.arange(0)
    return look_once(network, model.spec, witness, data, runtime, none)[:2]


def rank(values: Tensor) -> Tensor:
    """N: 0 for the least. Distance finds images of something else, entropy those that the model gets wrong."""
    return values.argsort().argsort()


def look(model: SourceModel, store: Store, runtime: Runtime) -> tuple[Outputs, Tensor]:
    """The outputs of a model, or a mixture, and N distances from the training images."""
    if isinstance(model, MixtureModel):
        parts = [look(member, store, runtime) for member in model.members]
        shares = torch.tensor(model.shares).to(parts[0][1])
        distances = torch.stack([part[1] for part in parts], dim=1) @ shares
        return model.mix([outputs for outputs, _ in parts]), distances
    model.to(runtime.device)
    network = prepare_network(model.classifier, model.spec, runtime)
    network.eval()
    if not store.is_features:
        with network_name("model"):
            store = features_of(network, store, model.spec, runtime)
    features, logits = forward_store(on_features(network), store, model.spec, runtime)
    return model.outputs_of(features, logits), model.posterior.distances(features)


def names_of(model: SourceModel, outputs: Outputs) -> Tensor:
    """N × K: the probabilities that name clusters."""
    if isinstance(model, MixtureModel):
        return outputs.posterior_probs
    return model.uncertainty.predictive(outputs.features, 1.0)


def witness_view(model: SourceModel, store: Store, runtime: Runtime) -> Tensor | None:
    """N × F: the images as the witness describes them; None if the model has none."""
    witness = find_witness(model)
    return None if witness is None else witness.testimony(store, runtime)


def find_witness(model: SourceModel) -> Witness | None:
    return choose_witness("auto", model, weights_hash(model.classifier.backbone))


@dataclass(frozen=True, eq=False)
class Evidence:
    """Outputs of the model and of the witness for the images."""

    model: SourceModel
    store: Store
    runtime: Runtime
    outputs: Outputs
    names: Tensor
    shift: float
    witness: Tensor | None

    def second_view(self, rows: Tensor) -> Tensor:
        """Features of the images at some positions that differ from those of the first view."""
        if self.witness is not None:
            return self.outputs.features[rows]
        return thumbnails(self.store, rows.cpu(), self.runtime, most=16)

    @property
    def features(self) -> Tensor:
        if self.witness is not None:
            return self.witness.to(self.names.device)
        return self.outputs.features

    @property
    def from_pixels(self) -> bool:
        """Whether the images themselves are the only other view."""
        known = self.witness is not None or self.model.pretrained
        return not known and not self.store.is_features

    def classes(self) -> dict[str, object]:
        """Setting, reason and shares."""
        count, classes = self.names.shape
        if count <= classes:
            reason = f"{count} images are too few to tell which of {classes} classes occur"
            return {"setting": "closed", "reason": reason}
        estimate = estimate_target_classes(
            self.features,
            self.names.clamp_min(1e-12).log(),
            self.second_view if self.witness is not None or self.from_pixels else None,
            witnessed=self.witness is not None,
        )
        named = zip(self.model.classes, estimate.shares.tolist(), strict=True)
        return {
            "setting": estimate.setting,
            "reason": estimate.reason,
            "new": round(1 - estimate.known, 4) if estimate.has_new else 0.0,
            "shares": {name: round(share * estimate.known, 4) for name, share in named},
        }

    def accuracy(
        self, predictions: Tensor, setting: str, class_names: tuple[str, ...]
    ) -> tuple[AccuracyEstimate, dict[str, float | None]]:
        """Estimated accuracy, and figures."""
        count, classes = self.names.shape
        doubt = None
        if count >= 2:
            naming = name_target(View.of(self.features), self.names, setting)
            doubt = naming.clusters.share_in_doubt
        rejects = setting in REJECTING or bool((predictions == classes).any())
        rows = guard_rows(count).to(predictions.device)
        judge = self.features[rows]
        if self.from_pixels:
            judge = thumbnails(self.store, rows.cpu(), self.runtime)
        guard = Guard(enabled=False)
        outputs = replace(self.outputs, posterior_probs=self.names)
        draws = predictions[rows][:, None]
        guard.open(outputs, predictions, draws, judge, classes + rejects, class_names)
        score = guard.consider(0, outputs, predictions, {})
        estimate = estimate_accuracy(
            score,
            count=len(rows),
            doubt=doubt,
            pretrained=self.model.pretrained,
            shift=self.shift,
            rejects=rejects,
        )
        figures = {"evidence": score.accuracy[0], "structure": score.structure[0]}
        return estimate, {**figures, "doubt": doubt}
