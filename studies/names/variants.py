"""Variants of U-SFAN++ that were tried and dropped, trained on the tasks of `studies.families`.

    python -m studies.names.variants CACHE OUT.jsonl --families lines office31 --variants landed anew [--seeds 2019]
    python -m studies.names.variants table OUT.jsonl

`landed` is the method as it is. The others change one thing:

    anew            after each epoch EM also begins with the network's names and with smoothed ones; the fit of clearly
                    least free energy is taken (`maths.names.choose`)
    anew-smooth     the same with smoothed names alone, 12 rounds
    anew-aad        anew; and attraction to the neighbours in the model's own features, as AaD has it
    anew-scaled     the same with dispersion scaled by 2K/B
    anew-no-im      anew; no information maximisation
    no-labels, double, growing, late, doubt     another weight of the labels: 0, 2, epoch/15, 0 for five epochs, and
                    1 − share in doubt for eight

Rows: family, task, seed, variant, accuracy of the last iterate. The table has differences to `landed`, ± the standard
error over tasks.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import torch
from studies.families.domains import FAMILIES
from studies.families.task import cpu, tasks
from torch import Tensor

from usfan.adaptation.methods import METHODS, Method
from usfan.adaptation.terms.aad import AttractDisperse, decay, dispersion
from usfan.adaptation.terms.bank import agreement
from usfan.adaptation.terms.information import InformationMaximization
from usfan.adaptation.terms.separation import Separation
from usfan.adaptation.terms.term import Batch, Outputs, Term
from usfan.adaptation.terms.witness import WitnessAttraction, WitnessLabels
from usfan.maths.cluster_mixture import Fit, fit_mixture
from usfan.maths.names import FLOOR, choose, smoothed
from usfan.workflow import adapt_model

EPOCHS = 15


@dataclass
class BeginAnew(WitnessLabels):
    """Labels of a mixture that may begin anew after each epoch."""

    smooth_only: bool = False

    def continued(self, probs: Tensor) -> Fit:
        fits = [super().continued(probs)]
        naming = self.context.naming
        assert naming is not None
        names = probs.double().clamp_min(1e-12).log()
        begins = [smoothed(probs.clamp_min(FLOOR).log(), naming.view.near)]
        rounds = 12
        if not self.smooth_only:
            begins.insert(0, probs)
            rounds = 20
        for begin in begins:
            fits.append(fit_mixture(self.points, names, begin=begin.float(), rounds=rounds))
        return fits[choose(fits)]


@dataclass
class WeightedLabels(WitnessLabels):
    """Labels whose weight depends on the epoch."""

    schedule: str = "double"
    epoch: int = -1

    def refresh(self, outputs: Outputs) -> None:
        super().refresh(outputs)
        self.epoch += 1

    def __call__(self, batch: Batch) -> Tensor:
        naming = self.context.naming
        assert naming is not None
        doubt = naming.clusters.share_in_doubt if self.epoch < 8 else 0.0
        weight = {
            "no-labels": 0.0,
            "double": 2.0,
            "growing": self.epoch / EPOCHS,
            "late": float(self.epoch >= 5),
            "doubt": 1 - doubt,
        }
        return weight[self.schedule] * super().__call__(batch)


@dataclass
class ScaledDispersion(AttractDisperse):
    """AaD with dispersion scaled by 2K/B."""

    def __call__(self, batch: Batch) -> Tensor:
        near = self.look(batch)
        attraction = self.mean(-agreement(batch.probs, self.probs[near]).sum(dim=1), batch)
        known = self.context.known(batch)
        scale = 2 * self.context.classes / self.context.sum(known).clamp_min(1)
        weight = decay(batch, self.dispersion_decay) * scale
        return attraction + weight * dispersion(self.context, batch.probs, known)


def variants() -> dict[str, tuple[Term, ...]]:
    """The terms of each variant."""
    information = InformationMaximization()
    attraction = WitnessAttraction()
    table: dict[str, tuple[Term, ...]] = {
        "landed": (WitnessLabels(), attraction, information),
        "anew": (BeginAnew(), attraction, information),
        "anew-smooth": (BeginAnew(smooth_only=True), attraction, information),
        "anew-aad": (BeginAnew(), AttractDisperse(), information),
        "anew-scaled": (BeginAnew(), ScaledDispersion(), information),
        "anew-no-im": (BeginAnew(), attraction),
    }
    for schedule in ("no-labels", "double", "growing", "late", "doubt"):
        table[schedule] = (WeightedLabels(schedule=schedule), attraction, information)
    return table


def run(options: argparse.Namespace) -> None:
    split = METHODS["u-sfan++"].split
    table = variants()
    for name in options.variants:
        METHODS[name] = Method(name, name, (*table[name], Separation(1.0)), split=split)
    with options.out.open("a", encoding="utf-8") as file:
        for family in options.families:
            for task in tasks(options.cache, family, options.seeds):
                for name in options.variants:
                    model = adapt_model(
                        task.source,
                        dataclasses.replace(task.target, labels=None),
                        name,
                        runtime=cpu(),
                        witness=task.witness,
                        guard=False,
                        setting="closed",
                        seed=task.seed,
                        **task.settings,
                    )
                    assert model.passes is not None
                    right = model.passes.path[-1].cpu().long() == task.labels
                    row = {
                        "family": family,
                        "task": task.name,
                        "seed": task.seed,
                        "variant": name,
                        "accuracy": round(100 * float(right.double().mean()), 2),
                    }
                    file.write(json.dumps(row, ensure_ascii=False) + "\n")
                    print(*row.values(), flush=True)


def print_table(file: Path) -> None:
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    landed = {
        (r["family"], r["task"], r["seed"]): r["accuracy"]
        for r in rows
        if r["variant"] == "landed"
    }
    groups: dict[tuple[str, str], dict[str, list[float]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for row in rows:
        key = (row["family"], row["task"], row["seed"])
        if key in landed:
            difference = row["accuracy"] - landed[key]
            groups[row["family"], row["variant"]][row["task"]].append(difference)
    for (family, variant), by_task in groups.items():
        means = [statistics.fmean(values) for values in by_task.values()]
        error = statistics.stdev(means) / len(means) ** 0.5 if len(means) > 1 else 0.0
        cells = sum(map(len, by_task.values()))
        print(
            f"{family} {variant}: {statistics.fmean(means):+.1f} ± {error:.1f} ({cells} runs)"
        )


def main() -> None:
    if sys.argv[1:2] == ["table"]:
        print_table(Path(sys.argv[2]))
        return
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cache", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--families", nargs="+", choices=FAMILIES, required=True)
    parser.add_argument("--variants", nargs="+", choices=list(variants()), required=True)
    parser.add_argument("--seeds", nargs="+", type=int, default=[2019])
    torch.set_num_threads(1)
    run(parser.parse_args())


if __name__ == "__main__":
    main()
