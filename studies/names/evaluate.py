"""Rows of the study: every task, with and without labels.

    python -m studies.names.evaluate WORK OUT.json --family lines office31 [--jobs 16] [--budgets 0 1 2 5 10]

Without labels: accuracy of responsibilities (landed mixture, every start, the chosen one, averaged over namings), mean
log-probability of the truth, and for each cluster its doubt by posterior, point estimate and none, and whether its name
is wrong (another class has most of its images). With labels, random and asked: accuracy on the other images.

Budgets are multiples of K; those that take more than half of the images are left out.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from pathlib import Path
from typing import Any

import torch
from sklearn.cluster import KMeans
from studies.names.names import (
    WITNESSES,
    WRONG_ANSWER,
    PinnedLabels,
    balance,
    fit_label_head,
    fit_named,
    name_clusters,
    naming_marginals,
    naming_scores,
    pooled_labels,
    questions,
    votes,
)
from studies.names.tasks import SEEDS, Task, domain_file, load, pairs, task_file
from torch import Tensor
from torch.nn.functional import normalize, one_hot

from usfan.maths.cluster_mixture import fit_mixture
from usfan.maths.neighbours import nearest_neighbours

NEIGHBOURS = 10
KMEANS_STARTS = 5


def accuracy(table: Tensor, labels: Tensor, rows: Tensor | None = None) -> float:
    right = (table.argmax(1) == labels).double()
    return round(100 * float(right.mean() if rows is None else right[rows].mean()), 2)


def log_truth(table: Tensor, labels: Tensor) -> float:
    """Mean log-probability of the true class, at least 1e-4."""
    own = table.double()[torch.arange(len(labels)), labels].clamp_min(1e-4)
    return round(float(own.log().mean()), 4)


class Bench:
    """One task: its tensors in float64, neighbours, k-means."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.labels = task.labels
        self.points = task.points.double()
        self.witness = task.witness.double()
        self.log_names = task.probs.double().clamp_min(1e-6).log()
        self.near = nearest_neighbours(normalize(task.witness, dim=1), NEIGHBOURS)[0]
        classes = task.probs.shape[1]
        groups = KMeans(classes, n_init=KMEANS_STARTS, random_state=0).fit_predict(
            self.points.numpy()
        )
        self.kmeans = one_hot(torch.from_numpy(groups).long(), classes).double()

    def name(self, pinned: PinnedLabels) -> Any:
        return name_clusters(
            self.points, self.witness, self.near, self.log_names, pinned, self.kmeans
        )

    def without_labels(self) -> dict[str, Any]:
        task = self.task
        begun = time.process_time()
        landed = fit_mixture(task.points, self.log_names.float()).responsibilities
        landed_seconds = time.process_time() - begun
        begun = time.process_time()
        naming = self.name(PinnedLabels.none())
        seconds = time.process_time() - begun
        soft = naming.soft_labels(PinnedLabels.none())
        r = naming.fit.responsibilities
        row: dict[str, Any] = {
            "budget": 0,
            "start": naming.fit.start,
            "source": accuracy(task.probs, self.labels),
            "landed": accuracy(landed, self.labels),
            "chosen": accuracy(r, self.labels),
            "averaged": accuracy(soft, self.labels),
            "log_landed": log_truth(landed, self.labels),
            "log_chosen": log_truth(r, self.labels),
            "log_averaged": log_truth(soft, self.labels),
            "in_doubt": round(naming.share_in_doubt, 4),
            "seconds": round(seconds, 2),
            "landed_seconds": round(landed_seconds, 2),
        }
        for fit in naming.fits:
            row[f"start_{fit.start}"] = accuracy(fit.responsibilities, self.labels)
            row[f"energy_{fit.start}"] = round(fit.free_energy, 4)
        row["clusters"] = self.doubts(r)
        return row

    def doubts(self, r: Tensor) -> dict[str, list[float]]:
        """For each cluster: doubt of its name by three sources, and whether the name is wrong."""
        classes = r.shape[1]
        truth = one_hot(self.labels, classes).double()
        majority = (r.T @ truth).argmax(1)
        none = PinnedLabels.none()
        table = {}
        for name, probs in (("posterior", self.task.probs), ("point", self.task.point)):
            scores = naming_scores(r, probs.double(), none, WITNESSES, WRONG_ANSWER)
            table[name] = 1 - naming_marginals(scores).diagonal()
        draws = self.task.draws.double().softmax(2)
        logs = torch.stack([votes(r, draws[:, m]).log() for m in range(draws.shape[1])])
        mean = votes(r, self.task.probs.double()).log()
        shrunk = 2 * WITNESSES * (mean + 0.5 * (logs - logs.mean(0)))
        table["draws"] = 1 - naming_marginals(shrunk).diagonal(dim1=1, dim2=2).mean(0)
        table["none"] = 1 - (r * r.max(1, keepdim=True).values).sum(0) / r.sum(0).clamp_min(
            1e-9
        )
        table["wrong"] = (majority != torch.arange(classes)).double()
        table["share"] = r.mean(0)
        return {name: [round(v, 4) for v in values.tolist()] for name, values in table.items()}

    def with_labels(self, rows: Tensor) -> tuple[dict[str, Any], Tensor]:
        """Accuracies on the images without a label, and the soft labels that the next questions need."""
        labels = self.labels
        pinned = PinnedLabels(rows, labels[rows])
        rest = torch.ones(len(labels), dtype=torch.bool)
        rest[rows] = False
        rest = rest.nonzero().flatten()
        blank = torch.zeros_like(self.log_names)
        alone = fit_label_head(blank, self.witness, pinned)
        plain = fit_label_head(self.log_names, self.witness, pinned)
        probe = plain.log_names(self.log_names, self.witness).clamp_min(-14)
        source = self.log_names.exp()
        em = fit_named(self.points, self.log_names, source, pinned)
        probe_em = fit_named(self.points, probe, probe.exp(), pinned)
        begun = time.process_time()
        naming = self.name(pinned)
        soft = naming.soft_labels(pinned)
        mixed, weights = pooled_labels(
            self.points, self.witness, self.near, self.log_names, pinned, self.kmeans, naming
        )
        tables = {
            "source": source,
            "balanced": balance(self.log_names),
            "lr": alone.log_names(blank, self.witness),
            "prior": probe,
            "em": em.responsibilities,
            "prior_em": probe_em.responsibilities,
            "head": naming.log_names,
            "chosen": naming.fit.responsibilities,
            "averaged": soft,
            "pooled": mixed,
        }
        row: dict[str, Any] = {
            name: accuracy(table, labels, rest) for name, table in tables.items()
        }
        row["log_pooled"] = log_truth(mixed[rest], labels[rest])
        row["log_chosen"] = log_truth(naming.fit.responsibilities[rest], labels[rest])
        row["start"] = naming.fit.start
        row["in_doubt"] = round(naming.share_in_doubt, 4)
        row["weights"] = [round(w, 3) for w in weights.tolist()]
        row["seconds"] = round(time.process_time() - begun, 2)
        return row, mixed


def one_task(job: tuple[str, str, str, str, int, list[int]]) -> list[dict[str, Any]]:
    torch.set_num_threads(1)
    work, family, source, target, seed, budgets = job
    task = load(Path(work), family, source, target, seed)
    bench = Bench(task)
    classes = task.probs.shape[1]
    key = {"family": family, "task": task.name, "seed": seed, "images": len(task.labels)}
    rows = [key | bench.without_labels()]
    order = torch.randperm(len(task.labels), generator=torch.Generator().manual_seed(seed))
    naming = bench.name(PinnedLabels.none())
    soft = naming.soft_labels(PinnedLabels.none())
    asked = torch.zeros(0, dtype=torch.long)
    for budget in budgets:
        count = budget * classes
        if budget == 0 or count > len(task.labels) // 2:
            continue
        figures, _ = bench.with_labels(order[:count])
        rows.append(key | {"budget": budget, "labels": "random"} | figures)
        asked = torch.cat([asked, questions(bench.points, soft, asked, count - len(asked))])
        figures, soft = bench.with_labels(asked)
        rows.append(key | {"budget": budget, "labels": "asked"} | figures)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--family", nargs="+", required=True)
    parser.add_argument("--budgets", nargs="+", type=int, default=[0, 1, 2, 5, 10])
    parser.add_argument("--seeds", nargs="+", type=int, default=list(SEEDS))
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    jobs = []
    for family in options.family:
        for seed in options.seeds:
            for source, target in pairs(family):
                stored = task_file(options.work, family, source, target, seed)
                shared = domain_file(options.work, family, source, target)
                if stored.exists() and shared.exists():
                    jobs.append(
                        (str(options.work), family, source, target, seed, options.budgets)
                    )
    rows: list[dict[str, Any]] = []
    jobs.sort(key=lambda job: -task_file(options.work, *job[1:5]).stat().st_size)
    with multiprocessing.get_context("spawn").Pool(options.jobs) as pool:
        for part in pool.imap_unordered(one_task, jobs):
            rows += part
            print(part[0]["family"], part[0]["task"], part[0]["seed"], flush=True)
            lines = ",\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
            options.out.write_text(f"[\n{lines}\n]\n")


if __name__ == "__main__":
    main()
