"""The table of methods. A method is data: the terms of its loss, its sample weights, its stage settings.

To add one, add a row, and a module in `terms/` if it brings a new term:

    usfan.METHODS.add(usfan.Method("mine", "a sentence about it", terms=(Mine(my_weight=0.2),)))

The fields of a row's parts are the method's settings: `usfan adapt … --set my_weight=0.5`, `adapt(…, my_weight=0.5)`.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from usfan.adaptation.certainty import Certainty
from usfan.adaptation.guidance import Split
from usfan.adaptation.run_facts import RunFacts
from usfan.adaptation.terms.aad import AttractDisperse
from usfan.adaptation.terms.cowa import WeightedMixup
from usfan.adaptation.terms.entropy import Entropy
from usfan.adaptation.terms.information import InformationMaximization
from usfan.adaptation.terms.lsc import LocalStructure
from usfan.adaptation.terms.mixmatch import MixMatch
from usfan.adaptation.terms.nrc import Reciprocity
from usfan.adaptation.terms.pseudo_labels import PseudoLabels
from usfan.adaptation.terms.rotation import Rotation
from usfan.adaptation.terms.separation import Separation
from usfan.adaptation.terms.term import Term
from usfan.adaptation.terms.upa import CleanLabels
from usfan.adaptation.terms.witness import WitnessAttraction, WitnessLabels
from usfan.config import convert, unknown_setting
from usfan.errors import ConfigError
from usfan.field_docs import field_docs

Setting = bool | int | float | str | None
Part = TypeVar("Part", bound=Certainty | Split | Term)


@dataclass(frozen=True)
class NextStage:
    """A further stage of a method, which begins with the network of the stage before it."""

    terms: tuple[Term, ...]
    stage: Mapping[str, Setting] = field(default_factory=dict)
    """Fields of `engine.stage.Stage` that differ from the first stage's: epochs, lr, …"""
    length: float = 1.0
    """Epochs relative to those of the first stage, unless `stage` has a number."""


@dataclass(frozen=True)
class Method:
    """A method as data: the loop reads it."""

    name: str
    summary: str
    terms: tuple[Term, ...] = ()
    """The loss is their sum. Without any, the source model is returned as it is (or settled)."""
    certainty: Certainty = field(default_factory=Certainty)
    split: Split = field(default_factory=Split)
    stage: Mapping[str, Setting] = field(default_factory=dict)
    """Fields of `AdaptConfig` that this method sets by default: epochs, tune, …"""
    then: tuple[NextStage, ...] = ()
    """Further stages, one after another."""
    settles: bool = False
    """Whether BatchNorm takes the target's statistics before training."""
    online: bool = False
    """Whether the predictions of the run are those of the training pass: each batch as it comes."""
    published: str = ""
    """Averages of the authors, Office-31 / Office-Home / VisDA-C."""
    differs: str = ""
    """Differences of the authors' program."""

    @property
    def adapts(self) -> bool:
        return bool(self.terms) or self.settles

    @property
    def stages(self) -> tuple[NextStage, ...]:
        return (NextStage(self.terms), *self.then)

    @property
    def all_terms(self) -> tuple[Term, ...]:
        """Terms of all stages."""
        return tuple(term for stage in self.stages for term in stage.terms)

    @property
    def needs_witness(self) -> bool:
        return any(term.needs_witness for term in self.all_terms)

    @property
    def parts(self) -> tuple[Certainty | Split | Term, ...]:
        return (self.certainty, self.split, *self.all_terms)

    def settings(self) -> dict[str, Setting]:
        """The method's settings and their values."""
        values = {}
        for part in self.parts:
            for item in dataclasses.fields(part):
                values[item.name] = getattr(part, item.name)
        return values

    def setting_docs(self) -> dict[str, str]:
        docs: dict[str, str] = {}
        for part in self.parts:
            kind: type = type(part)
            docs |= field_docs(kind)
        return docs

    def with_settings(self, values: Mapping[str, Setting]) -> Method:
        """The same method with other values for some of its settings. A setting of several terms is one setting."""
        known = self.settings()
        for name in values:
            if name not in known:
                names = ", ".join(known) or "none"
                raise unknown_setting(name, known, f"the settings of {self.name} are {names}")
        return dataclasses.replace(
            self.with_terms(lambda term: changed(term, values)),
            certainty=changed(self.certainty, values),
            split=changed(self.split, values),
        )

    def decide(self, facts: RunFacts) -> Method:
        """The same method with every open setting decided from the facts."""
        method = self.with_terms(lambda term: term.decide(facts))
        return dataclasses.replace(method, certainty=self.certainty.decide(facts))

    def with_terms(self, change: Callable[[Term], Term]) -> Method:
        """The same method with every term changed."""
        first, *then = (
            dataclasses.replace(stage, terms=tuple(map(change, stage.terms)))
            for stage in self.stages
        )
        return dataclasses.replace(self, terms=first.terms, then=tuple(then))


def changed(part: Part, values: Mapping[str, Setting]) -> Part:
    """The part with those values that are fields of it."""
    items = [item for item in dataclasses.fields(part) if item.name in values]
    new_values = {item.name: convert(item, values[item.name]) for item in items}
    return dataclasses.replace(part, **new_values) if new_values else part


class Methods(dict[str, Method]):
    """Methods by name."""

    def add(self, method: Method) -> Method:
        """Add a row; a name can be taken once."""
        if method.name in self:
            raise ConfigError(f"there is a method {method.name!r} already")
        self[method.name] = method
        return method


POSTERIOR = Certainty(weights="posterior", balance=None, anneal=False)
"""Certainty of the posterior predictive, balanced over the predicted classes."""
BY_POSTERIOR = Split(split="posterior-entropy", decision="max-softmax")

DIVERSE = InformationMaximization(gamma=1.0, objective_scale=1.0)
"""L_div alone."""
TENT: dict[str, Setting] = {
    "epochs": 1,
    "tune": "affine",
    "lr": 2.5e-4,
    "backbone_lr_scale": 1.0,
    "weight_decay": 0.0,
}
"""SGD, momentum 0.9, lr 2.5e-4 for batches of 64, no weight decay: so TENT is run on ImageNet-C with a ResNet-50 by
mr-eggplant/EATA (main.py) and mariodoebler/test-time-adaptation (cfgs/imagenet_c/tent.yaml). The authors' example, on
CIFAR-10-C with batches of 200, takes Adam and 1e-3 (DequanWang/tent, cfgs/tent.yaml)."""

ROWS = (
    Method(
        "source-only",
        "the source model, not adapted",
        stage={"epochs": 0},
    ),
    Method(
        "shot-im",
        "information maximisation, all samples equal",
        (InformationMaximization(),),
        published="87.3/70.5/80.4",
    ),
    Method(
        "shot-im-entropy",
        "shot-im, weighted by the certainty of the point estimate",
        (InformationMaximization(),),
        certainty=Certainty(weights="point"),
    ),
    Method(
        "shot",
        "shot-im and nearest-centroid pseudo-labels",
        (InformationMaximization(), PseudoLabels()),
        published="88.6/71.8/82.9",
    ),
    Method(
        "u-sfan",
        "shot-im, weighted by the certainty of the posterior predictive",
        (InformationMaximization(diversity_memory=None), Separation()),
        certainty=dataclasses.replace(POSTERIOR, anneal=None),
        split=BY_POSTERIOR,
        published="88.6/71.8/81.2",
    ),
    Method(
        "u-sfan+",
        "weights as u-sfan's, and nearest-centroid pseudo-labels",
        (
            InformationMaximization(diversity_memory=None),
            PseudoLabels(pseudo_label_warmup=None),
            Separation(),
        ),
        certainty=POSTERIOR,
        split=BY_POSTERIOR,
        published="88.8/71.9/82.7",
    ),
    Method(
        "u-sfan++",
        "labels from a pretrained witness's clusters, named by the source posterior",
        (WitnessLabels(), WitnessAttraction(), InformationMaximization(), Separation(1.0)),
        split=Split(split="posterior-entropy", decision="posterior-entropy"),
    ),
    Method(
        "lsc",
        "predictions agree with the nearest neighbours (local structure clustering of G-SFDA); diversity",
        (LocalStructure(), DIVERSE),
        stage={"epochs": 32},
        published="–/71.3/85.4",
        differs="trains the head too; fills the bank once",
    ),
    Method(
        "nrc",
        "predictions agree with neighbours, above all reciprocal ones, and their neighbours; diversity",
        (Reciprocity(), DIVERSE),
        published="89.4/–/–",
        differs="trains the head too; fills the bank once; best epoch by target labels",
    ),
    Method(
        "aad",
        "predictions agree with the nearest neighbours and differ from the rest of the batch",
        (AttractDisperse(),),
        published="89.6/72.7/88.0",
        differs="trains the head too; fills the bank once; lr does not decay",
    ),
    Method(
        "upa",
        "shot with the pseudo-labels that neighbours confirm, and a contrastive term",
        (InformationMaximization(), CleanLabels()),
        published="89.9/73.0/88.7",
        differs="draws clean samples for themselves; blur and hue in the strong view; lr warms up",
    ),
    # Epochs, mixup's α 0.2, JMDS and lr 1e-2 with batches of 64 as in run_oh.sh of Jhyun17/CoWA-JMDS.
    Method(
        "cowa",
        "cross-entropy on mixup, weighted by the joint confidence of data and model (JMDS)",
        (WeightedMixup(),),
        stage={"epochs": 30},
        published="90.3/72.5/86.9",
        differs="lr does not decay; the head moves at a tenth of it",
    ),
    Method(
        "shot++",
        "shot and rotation prediction, then MixMatch from the samples of lowest entropy",
        (InformationMaximization(), PseudoLabels(), Rotation()),
        then=(NextStage((MixMatch(),), length=50 / 15),),
        published="–/73.0/–",
        differs="a new head in the second stage, batches of 36 labelled and 36 others; rotation head first",
    ),
    Method(
        "tent",
        "entropy, on the scales and shifts of BatchNorm only, in one pass",
        (Entropy(),),
        stage=TENT,
        differs="predicts while it learns: that is tent-online",
    ),
    Method(
        "tent-online",
        "tent as its authors run it: each batch is predicted as it comes, by its own BatchNorm statistics",
        (Entropy(),),
        stage={**TENT, "augment": "none"},
        online=True,
        differs="resets nothing between streams; the saved model has the statistics of the whole stream",
    ),
    Method(
        "bn-adapt",
        "the source model with the target's BatchNorm statistics; nothing is trained, one epoch",
        stage={"tune": "norm", "epochs": 1},
        settles=True,
        differs="predicts each batch by its own statistics: that is bn-adapt-online",
    ),
    Method(
        "bn-adapt-online",
        "the source model, each batch predicted by its own BatchNorm statistics; nothing is trained",
        stage={"tune": "norm", "epochs": 1, "augment": "none"},
        settles=True,
        online=True,
        differs="the saved model has the statistics of the whole stream",
    ),
)

METHODS = Methods({row.name: row for row in ROWS})


def find_method(name: str) -> Method:
    if name not in METHODS:
        near = difflib.get_close_matches(name, METHODS, n=2, cutoff=0.5)
        hint = f"did you mean {' or '.join(near)}? The methods are" if near else "choose from"
        raise ConfigError(f"unknown method {name!r}: {hint} {', '.join(METHODS)}")
    return METHODS[name]
