"""Poisoned targets: does the guard keep a model that is worse than its source, and does the verdict call it better?

    python -m studies.poisoned CACHE docs/results/poisoned.json [--families lines office31 digits] [--tasks 4]

`studies.families.domains` fills CACHE. 30 % of the images of each target are moved by projected gradient steps against
the source model, d ← clip(d + α sign ∇ℓ(x + d), −ε, ε): ℓ is the cross-entropy of the model's own prediction (`away`),
or minus that of the next class (`next`). x holds features, and ε is 0.2 standard deviations of each; for digits it
holds pixels, and ε is 0.2 of their range. The witness describes the same images: its features move by as much. Labels
only score. Rows that the file has are not computed again.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
from pathlib import Path
from typing import TypedDict

import torch
from studies.families.runs import commit
from studies.families.task import Task, cpu, load_task, only, read_domain, ready, witness_head
from torch import Tensor
from torch.nn.functional import cross_entropy

from usfan.adaptation.methods import METHODS
from usfan.adaptation.witness import testimony
from usfan.data.views import test_view
from usfan.store.model import SourceModel
from usfan.workflow import adapt_model

ATTACKS = ("away", "next")
RUNS = ("shot", "u-sfan++")
SHARE = 0.3
EPSILON = 0.2
STEPS = 10
STEP = EPSILON / 4
SEED = 2019


class Row(TypedDict):
    """A run. Accuracies in % on the poisoned target: of the source model, the last iterate and the model that is kept;
    and on the same images without poison, of the source model and the one that is kept."""

    family: str
    task: str
    seed: int
    method: str
    attack: str
    images: int
    before: float
    after: float
    kept: float
    clean_before: float
    clean_kept: float
    is_adapted: bool
    verdict: str
    commit: str


def logits_of(source: SourceModel, rows: Tensor) -> Tensor:
    """Of features, or of images as floating numbers from 0 to 255."""
    if rows.ndim == 4:
        rows = source.classifier.backbone(test_view(rows, source.spec))
    logits: Tensor = source.classifier.head(source.classifier.bottleneck(rows))
    return logits


def attacked(source: SourceModel, rows: Tensor, unit: Tensor, attack: str) -> Tensor:
    """The rows after the steps; ε is in `unit`, one per feature or one for all pixels."""
    source.classifier.eval()
    start = rows.float()
    with torch.no_grad():
        labels = logits_of(source, start).argmax(dim=1)
    if attack == "next":
        labels = (labels + 1) % len(source.classes)
    direction = -1 if attack == "next" else 1
    generator = torch.Generator().manual_seed(SEED)
    change = EPSILON * (2 * torch.rand(start.shape, generator=generator) - 1)
    for _ in range(STEPS):
        change.requires_grad_()
        loss = direction * cross_entropy(logits_of(source, start + unit * change), labels)
        (gradient,) = torch.autograd.grad(loss, change)
        change = (change.detach() + STEP * gradient.sign()).clamp(-EPSILON, EPSILON)
    moved = start + unit * change
    if rows.dtype == torch.uint8:
        moved = moved.round().clamp(0, 255)
    return moved.to(rows.dtype)


def poisoned(task: Task, attack: str, cache: Path) -> Task:
    """The task with its target, and the witness's description of it, moved."""
    values = task.target.values
    unit = torch.tensor(255.0) if values.ndim == 4 else values.std(dim=0)
    generator = torch.Generator().manual_seed(SEED)
    chosen = torch.randperm(len(values), generator=generator)[: round(SHARE * len(values))]
    moved = values.clone()
    moved[chosen] = attacked(task.source, values[chosen], unit, attack)
    witness = task.witness
    if witness is not None:
        domain, _ = only(read_domain(cache, task.family, task.target_domain), task.classes)
        assert domain.whole is not None
        witness = testimony(domain.whole + (moved - values), witness_head())
    target = dataclasses.replace(task.target, values=moved, key=None)
    return dataclasses.replace(task, target=target, witness=witness)


def accuracy(predictions: Tensor, labels: Tensor) -> float:
    return round(100 * float((predictions.cpu() == labels).double().mean()), 2)


@torch.no_grad()
def clean_accuracy(model: SourceModel, task: Task) -> float:
    model.classifier.eval()
    predictions = logits_of(model, task.target.values.float()).argmax(dim=1)
    return accuracy(predictions, task.labels)


def run(clean_task: Task, task: Task, method: str, attack: str) -> Row:
    """Adapt to a poisoned target, with the guard."""
    clean_before = clean_accuracy(task.source, clean_task)
    model = adapt_model(
        task.source,
        dataclasses.replace(task.target, labels=None),
        method,
        runtime=cpu(),
        witness=task.witness if METHODS[method].needs_witness else None,
        guard=True,
        setting="closed",
        seed=SEED,
        **task.settings,
    )
    assert model.passes is not None
    path = model.passes.path
    return {
        "family": task.family,
        "task": task.name,
        "seed": SEED,
        "method": method,
        "attack": attack,
        "images": len(task.labels),
        "before": accuracy(path[0].long(), task.labels),
        "after": accuracy(path[-1].long(), task.labels),
        "kept": accuracy(model.passes.after.logits.argmax(dim=1), task.labels),
        "clean_before": clean_before,
        "clean_kept": clean_accuracy(model, clean_task),
        "is_adapted": bool(model.history["kept_epoch"]),
        "verdict": model.history["verdict"]["value"],
        "commit": commit(),
    }


def read_rows(file: Path) -> list[Row]:
    if not file.exists():
        return []
    rows: list[Row] = json.loads(file.read_text(encoding="utf-8"))["rows"]
    return rows


def write_rows(file: Path, rows: list[Row]) -> None:
    lines = ",\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    file.write_text(f'{{"rows": [\n{lines}\n]}}\n', encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(prog="studies.poisoned", description=__doc__)
    parser.add_argument("cache", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--families", nargs="+", default=["lines", "office31", "digits"])
    parser.add_argument("--tasks", type=int, default=4, help="the first so many of a family")
    options = parser.parse_args()
    rows = read_rows(options.out)
    done = {(row["family"], row["task"], row["method"], row["attack"]) for row in rows}
    for family in options.families:
        for source, target in ready(options.cache, family)[: options.tasks]:
            clean_task = load_task(options.cache, family, source, target, SEED)
            for attack, method in itertools.product(ATTACKS, RUNS):
                key = (family, clean_task.name, method, attack)
                if key in done or (family == "digits" and METHODS[method].needs_witness):
                    continue
                task = poisoned(clean_task, attack, options.cache)
                rows.append(run(clean_task, task, method, attack))
                write_rows(options.out, rows)
                print(rows[-1], flush=True)


if __name__ == "__main__":
    main()
