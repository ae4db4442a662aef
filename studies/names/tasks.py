"""Tasks of the study, as `studies.names.prepare` stores them.

Shapes: N target images, K classes, M draws, H features of the head, W of the witness, D dimensions of the mixture.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor

SEEDS = (2019, 2020, 2021)
OFFICE = ("amazon", "dslr", "webcam")
PACS = ("photo", "cartoon", "art_painting")
LINES = (
    ("cartoon-lines", "photo"),
    ("cartoon-lines", "art_painting"),
    ("photo", "cartoon-lines"),
    ("photo", "art_painting-lines"),
    ("photo-lines", "photo"),
    ("photo-lines", "art_painting"),
)
SHIFTS = ("blur", "dark", "lines", "inverted", "posterised")
EMOJI = """noto-twemoji twemoji-noto noto-openmoji openmoji-noto openmoji-twemoji noto-line openmoji-line noto-flat
flat-noto twemoji-gradient gradient-openmoji noto-contrast contrast-line flat-contrast"""
DIMENSIONS = 64
"""Of the mixture, as in `usfan.adaptation.terms.witness`."""


@dataclass(frozen=True, eq=False)
class Task:
    family: str
    source: str
    target: str
    seed: int
    labels: Tensor
    """N: they score, and answer questions."""
    probs: Tensor
    """N × K: the posterior predictive at temperature 1."""
    point: Tensor
    """N × K: the point estimate."""
    draws: Tensor
    """N × M × K logits under heads drawn from the posterior."""
    features: Tensor | None
    """N × H features of the head."""
    posterior: dict[str, Tensor]
    """Tensors of the head's posterior."""
    witness: Tensor
    """N × W principal components of the witness's testimony."""

    @property
    def points(self) -> Tensor:
        """N × D: what the mixture sees."""
        return self.witness[:, :DIMENSIONS]

    @property
    def name(self) -> str:
        return f"{self.source}→{self.target}"


def pairs(family: str) -> tuple[tuple[str, str], ...]:
    """Source and target domains of a family."""
    if family == "office31":
        return tuple(itertools.permutations(OFFICE, 2))
    if family == "lines":
        return LINES
    if family in ("pacs", "pacs40"):
        return tuple(itertools.permutations(PACS, 2))
    if family == "leaf":
        return (("lab", "field"),)
    if family == "emoji":
        return tuple((task.split("-")[0], task.split("-")[1]) for task in EMOJI.split())
    if family == "shifts":
        tasks = itertools.product(itertools.permutations(OFFICE, 2), SHIFTS)
        return tuple((source, f"{target}-{shift}") for (source, target), shift in tasks)
    if family == "digits":
        return (("mnist", "uci"), ("uci", "mnist"), ("mnist", "usps"), ("usps", "mnist"))
    raise ValueError(f"no family {family!r}")


def task_file(work: Path, family: str, source: str, target: str, seed: int) -> Path:
    return work / family / f"{source}-{target}-{seed}.safetensors"


def domain_file(work: Path, family: str, source: str, target: str) -> Path:
    """What does not depend on the source model; classes of emoji depend on the source domain."""
    name = f"{source}-{target}" if family == "emoji" else target
    return work / family / f"{name}.safetensors"


def load(work: Path, family: str, source: str, target: str, seed: int) -> Task:
    stored = load_file(task_file(work, family, source, target, seed))
    domain = load_file(domain_file(work, family, source, target))
    posterior = {k.removeprefix("posterior."): v for k, v in stored.items() if "." in k}
    features = stored["features"].float() if "features" in stored else None
    probs = stored["probs"].float()
    point = stored["point"].float()
    return Task(
        family,
        source,
        target,
        seed,
        domain["labels"],
        probs / probs.sum(1, keepdim=True),
        point / point.sum(1, keepdim=True),
        stored["draws"].float(),
        features,
        posterior,
        domain["witness"].float(),
    )


def tasks(work: Path, family: str, seeds: tuple[int, ...] = SEEDS) -> Iterator[Task]:
    for seed in seeds:
        for source, target in pairs(family):
            if task_file(work, family, source, target, seed).exists():
                yield load(work, family, source, target, seed)
