"""What a run stores about each target sample for the report: predictions before and after, certainty, map position."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from usfan.artifacts.model import AdaptedModel, Passes
from usfan.evaluation.evaluate import score_outputs
from usfan.evaluation.learned import record, shares
from usfan.files import Folder, write_json, write_tensors
from usfan.posterior.predictive import certainty_weights, entropy

HALF_FROM = 4_000_000
"""Tables of N·K values from here on are kept in half precision."""


def adaptation_metrics(model: AdaptedModel, data: Any, *, open_set: bool = False) -> dict[str, Any]:
    """metrics.json of `adapt`: what was kept and why; with labels, the figures before and after."""
    assert model.passes is not None
    metrics = {k: v for k, v in model.history.items() if k != "records"}
    metrics["images"] = len(model.passes.kept)
    metrics["skipped"] = len(model.passes.skipped)
    metrics["validators_by_epoch"] = [{"epoch": r["epoch"], **r["validators"]} for r in model.history["records"]]
    labels = target_labels(model, data, open_set=open_set)
    if labels is not None:
        passes = model.passes
        if passes.given is not None:
            metrics["labels"] = {**metrics["labels"], **worth_on_rest(model, labels)}
            passes, labels = rest_of(passes), labels[rest_rows(passes)]
        open_set = open_set and bool((labels >= len(model.classes)).any())
        metrics["before"] = score_outputs(passes.before, labels, model, open_set=open_set)
        metrics["after"] = score_outputs(passes.after, labels, model, open_set=open_set)
    return metrics


def rest_rows(passes: Passes) -> Tensor:
    """Images whose labels were given are no test of a model that learned from them: the rows of the others, or of all
    if there are no others."""
    rest = torch.ones(len(passes.kept), dtype=torch.bool)
    if passes.given is not None and len(passes.given) < len(rest):
        rest[passes.given] = False
    return rest.nonzero().flatten()


def rest_of(passes: Passes) -> Passes:
    rows = rest_rows(passes)
    return dataclasses.replace(passes, before=passes.before.rows(rows), after=passes.after.rows(rows))


def worth_on_rest(model: AdaptedModel, labels: Tensor) -> dict[str, Any]:
    """If the target is labelled: how many of the images whose label was not given are right, in percent, before, after
    adapting without the given labels, and with them."""
    assert model.passes is not None
    rows = rest_rows(model.passes)
    truth = labels[rows]
    known = truth < len(model.classes)
    said = {"before": model.passes.before.logits.argmax(dim=1), "without": model.passes.without}
    said["with"] = model.passes.after.logits.argmax(dim=1)
    found = {name: classes.cpu()[rows][known] for name, classes in said.items() if classes is not None}
    return {"rest": {"images": len(rows), **shares(found, truth[known])}}


def target_labels(model: AdaptedModel, data: Any, *, open_set: bool) -> Tensor | None:
    if data.labels is None:
        return None
    assert model.passes is not None
    if data.classes != tuple(model.classes):  # else they were matched before
        data = data.match_classes(model.classes, open_set=open_set)
    labels: Tensor = data.labels[model.passes.kept]
    return labels


def save_samples(folder: Path, model: AdaptedModel, data: Any, *, private: bool = False) -> None:
    """samples.safetensors and samples.json."""
    assert model.passes is not None
    tensors = sample_tensors(model, target_labels(model, data, open_set=True))
    write_tensors(folder / "samples.safetensors", tensors)
    described: dict[str, Any] = {"paths": None, "classes": list(model.classes), "temperature": model.temperature}
    if data.paths is not None and not private:
        paths = [data.paths[i] for i in model.passes.kept.tolist()]
        described |= {"paths": paths, "made": mark_of(folder), **record(model.passes)}
    write_json(folder / "samples.json", described)


def sample_tensors(model: AdaptedModel, labels: Tensor | None) -> dict[str, Tensor]:
    """The tensors of samples.safetensors: what is stored about each of the N readable images."""
    assert model.passes is not None
    before, after = model.passes.before, model.passes.after
    map_before, map_after = flat_map(before.features, after.features)
    small = before.probs.numel() < HALF_FROM
    tables = {
        "probs_before": before.probs,
        "probs_after": after.probs,
        "posterior_before": before.posterior_probs,
        "posterior_after": after.posterior_probs,
    }
    tensors = {name: t if small else t.half() for name, t in tables.items()}
    tensors |= {
        "weight": certainty_weights(after.posterior_probs),
        "entropy_before": entropy(before.posterior_probs),
        "entropy_after": entropy(after.posterior_probs),
        "features_before": map_before,
        "features_after": map_after,
    }
    if model.unknown_rule is not None:
        tensors["unknown"] = model.flag_unknown(after)
    if labels is not None:
        tensors["labels"] = labels
    return tensors


def mark_of(folder: Path) -> list[int] | None:
    """Tells a run folder from a copy of it: number and time of its lock, which no archive can bring along."""
    try:
        status = os.stat(folder / ".lock", follow_symlinks=False)
    except OSError:
        return None
    return [status.st_ino, status.st_ctime_ns]


def made_here(folder: Folder, mark: Any) -> bool:
    """Whether the run was made in this place, so that its paths are the user's own."""
    return isinstance(mark, list) and mark == mark_of(folder.place)


def flat_map(before: Tensor, after: Tensor) -> tuple[Tensor, Tensor]:
    """Both sets of features on the same two principal axes (of the adapted ones). N×2 each."""
    centre = after.double().mean(dim=0)
    centred = after.double() - centre
    _, vectors = torch.linalg.eigh(centred.T @ centred)
    axes = vectors[:, -2:].flip(1)
    sign = torch.where(axes.abs().amax(0) == axes.amax(0), 1.0, -1.0)  # an axis has no sign of its own: fix one
    axes = axes * sign
    return ((before.double() - centre) @ axes).float(), (centred @ axes).float()
