"""Images that a model learned from, because the user gave `adapt` their labels, told apart from images that test it.

samples.json of the run says which images these were, by their paths, and which classes an adaptation without the labels
predicts (`without`). The images themselves are not stored. So paths are compared, with all links resolved. Names alone
do not count: in many data sets, images of different domains have the same names.

Shapes: N images with predictions.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from usfan.artifacts.model import Passes, SourceModel
from usfan.errors import UsfanError
from usfan.files import Folder, read_json_in

FIGURES = ("count", "classes", "before", "without", "left_out", "folds")
"""What `adapt` says of the labels, see `usfan.adaptation.worth`."""


@dataclass(frozen=True)
class Learned:
    """The target of an adaptation that was given labels. All paths are real ones, without links."""

    paths: frozenset[str]
    """Paths of all its images."""
    given: frozenset[str]
    """Paths of the labelled images."""
    without: dict[str, int]
    """Path of each image, and the class that is predicted without the labels; empty if that was not tried."""


def record(passes: Passes) -> dict[str, Any]:
    """What samples.json says of given labels: rows of its paths, and classes by number."""
    if passes.given is None:
        return {}
    without = None if passes.without is None else passes.without.tolist()
    return {"given": passes.given.tolist(), "without": without}


def learned_by(model: SourceModel, folder: str | Path | None) -> Learned | None:
    """From the run itself, or from its folder; None if neither names the images."""
    passes: Passes | None = getattr(model, "passes", None)
    if passes is not None:
        places = None if passes.images is None else passes.images.paths
        paths = None if places is None else [places[i] for i in passes.kept.tolist()]
        return from_record({"paths": paths, **record(passes)}, len(model.classes))
    if folder is None:
        return None
    try:
        with Folder(folder) as opened:
            return from_record(read_json_in(opened, "samples.json"), len(model.classes))
    except (OSError, UsfanError):  # a model folder alone
        return None


def from_record(described: Any, classes: int) -> Learned | None:
    """A stranger may have written it: None if it does not fit together."""
    known: dict[str, Any] = described if isinstance(described, dict) else {}
    paths, given, without = known.get("paths", ()), known.get("given", ()), known.get("without", ())
    if not is_list(paths, str) or not is_list(given, int) or not all(0 <= row < len(paths) for row in given):
        return None
    paths = real(paths)
    fits = is_list(without, int) and len(without) == len(paths) and all(0 <= label < classes for label in without)
    before = dict(zip(paths, without, strict=True)) if fits else {}
    return Learned(frozenset(paths), frozenset(paths[row] for row in given), before)


def real(paths: list[str]) -> list[str]:
    return [os.path.realpath(path) for path in paths]


def is_list(value: Any, kind: type) -> bool:
    return isinstance(value, list) and all(isinstance(item, kind) for item in value)


def told_apart(
    model: SourceModel, folder: str | Path | None, paths: list[str] | None, predicted: Tensor, labels: Tensor
) -> tuple[Tensor, dict[str, Any]]:
    """The rows of N images that test the model, and what the labels that it learned from are worth on the others; all
    rows and nothing if it learned from none. If all are images that it learned from, all rows too.

    `among` is None if none of the paths is known: the images may be copies of those it learned from."""
    rows, own = torch.arange(len(labels)), model.summary.get("labels")
    if not isinstance(own, dict) or not all(isinstance(own.get(name), int) for name in ("count", "classes")):
        return rows, {}
    figures = {name: own[name] for name in FIGURES if isinstance(own.get(name), (int, float))}
    learned = None if paths is None else learned_by(model, folder)
    paths = None if paths is None else real(paths)
    if learned is None or paths is None or learned.paths.isdisjoint(paths):
        return rows, figures | {"among": None, "seen": len(rows)}
    given = torch.tensor([path in learned.given for path in paths])
    figures |= {"among": int(given.sum()), "seen": len(rows)}
    before = torch.tensor([learned.without.get(path, -1) for path in paths])
    both = ~given & (before >= 0) & (labels < len(model.classes))
    if bool(both.any()):
        said = {"without": before[both], "with": predicted[both]}
        figures["rest"] = {"images": int(both.sum()), **shares(said, labels[both])}
    return rows if bool(given.all()) else rows[~given], figures


def shares(said: dict[str, Tensor], truth: Tensor) -> dict[str, float]:
    """How many of N predictions are right, in percent."""
    return {name: round(100 * float((found == truth).double().mean()), 2) for name, found in said.items()}
