"""Runs of a task, one row each, and the table of the rows."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
import statistics
import subprocess
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from studies.families.task import Task, cpu, load_task
from torch import Tensor

from usfan.adaptation.methods import METHODS
from usfan.maths.calibration import calibration_metrics
from usfan.maths.questions import name_questions
from usfan.store.model import AdaptedModel
from usfan.workflow import adapt_model

Row = dict[str, Any]
UNLABELLED = -1
NOISE = 0.1
"""Share of the labels that are replaced."""
ROUNDS = (1, 2, 5, 10)
"""Labels per class after which the program asks again, up to the number that a run is allowed."""


@dataclass(frozen=True)
class LabelBudget:
    """Labels of target images: `none`, `random:2xK` (two per class, drawn at random), `noisy:2xK` (the same images, one
    label of ten replaced by a random class) or `asked:2xK` (of the images that the program asks for)."""

    kind: str
    per_class: int = 0

    @classmethod
    def parse(cls, text: str) -> LabelBudget:
        if text == "none":
            return cls("none")
        kind, _, count = text.partition(":")
        if kind not in ("random", "noisy", "asked") or not count.endswith("xK"):
            raise ValueError(f"{text!r}: expected none, random:, noisy: or asked:COUNTxK")
        return cls(kind, int(count.removesuffix("xK")))

    def __str__(self) -> str:
        return self.kind if self.kind == "none" else f"{self.kind}:{self.per_class}xK"

    def before(self) -> LabelBudget:
        """The budget of the round before."""
        smaller = [count for count in ROUNDS if count < self.per_class]
        return LabelBudget(self.kind, smaller[-1]) if smaller else LabelBudget("none")


class Runs:
    """The runs of one task; a run with asked labels builds on the runs with fewer."""

    def __init__(self, task: Task, settings: dict[str, Any], keep: Path | None = None) -> None:
        self.task = task
        self.keep = keep
        self.settings = {
            "guard": False,
            "setting": "closed",
            "seed": task.seed,
            **task.settings,
            **settings,
        }
        self.models: dict[tuple[str, LabelBudget], tuple[AdaptedModel, Tensor, float]] = {}

    def row(self, method: str, budget: LabelBudget) -> Row:
        """Accuracies in % on the images that have no label: before, of the last iterate, of the model that is kept."""
        model, table, seconds = self.run(method, budget)
        assert model.passes is not None
        judged = table == UNLABELLED
        path = model.passes.path
        row = {
            "family": self.task.family,
            "task": self.task.name,
            "seed": self.task.seed,
            "method": method,
            "labels": str(budget),
            "settings": self.settings,
            "commit": commit(),
            "images": len(table),
            "classes": len(self.task.classes),
            "labelled": int((~judged).sum()),
            "before": self.accuracy(path[0], judged),
            "accuracy": self.accuracy(path[-1], judged),
            "seconds": round(seconds, 2),
        }
        records = model.history["records"]
        row["doubt"] = model.history["doubt"]
        row["ece"] = ece_of(model, self.task.labels)
        row["figures"] = {
            "before": records[0]["validators"],
            "after": records[-1]["validators"],
        }
        row["estimate"] = model.history["estimated_accuracy"]
        row["verdict"] = model.history["verdict"]["value"]
        guard = model.history.get("guard") or {}
        if self.settings["guard"] and guard:
            kept = model.passes.after.logits.argmax(dim=1)
            row["kept"] = guard.get("kept")
            row["kept_accuracy"] = self.accuracy(kept, judged)
        if self.keep is not None:
            self.keep.mkdir(parents=True, exist_ok=True)
            name = hashlib.sha256(json.dumps(key_of(row)).encode()).hexdigest()[:16]
            row["outputs"] = name
            outputs = {**outputs_of(model, table), "truth": self.task.labels.to(torch.int16)}
            save_file(outputs, self.keep / f"{name}.safetensors")
        return row

    def accuracy(self, predictions: Tensor, judged: Tensor) -> float:
        right = predictions.cpu().long() == self.task.labels
        return round(100 * float(right[judged].double().mean()), 2)

    def run(self, method: str, budget: LabelBudget) -> tuple[AdaptedModel, Tensor, float]:
        """The adapted model, its table of labels (N, −1 for none) and the seconds of this run alone."""
        key = (method, budget)
        if key not in self.models:
            table = self.labels(method, budget)
            given = None if budget.kind == "none" else table
            started = time.perf_counter()
            model = adapt_model(
                self.task.source,
                dataclasses.replace(self.task.target, labels=None),
                method,
                runtime=cpu(),
                labels=given,
                witness=self.task.witness if METHODS[method].needs_witness else None,
                **self.settings,
            )
            self.models[key] = (model, table, time.perf_counter() - started)
        return self.models[key]

    def labels(self, method: str, budget: LabelBudget) -> Tensor:
        """N classes, −1 for none."""
        labels = self.task.labels
        table = torch.full_like(labels, UNLABELLED)
        count = min(budget.per_class * len(self.task.classes), len(labels) - 1)
        if budget.kind in ("random", "noisy"):
            generator = torch.Generator().manual_seed(1000 + self.task.seed)
            chosen = torch.randperm(len(labels), generator=generator)[:count]
            table[chosen] = labels[chosen]
            if budget.kind == "noisy":
                wrong = chosen[:: round(1 / NOISE)]
                classes = len(self.task.classes)
                table[wrong] = torch.randint(classes, wrong.shape, generator=generator)
        elif budget.kind == "asked":
            model, table, _ = self.run(method, budget.before())
            table = table.clone()
            labelled = (table != UNLABELLED).nonzero().flatten()
            chosen = questions(model, count - len(labelled), labelled)
            table[chosen] = labels[chosen]
        return table


def questions(model: AdaptedModel, count: int, labelled: Tensor) -> Tensor:
    """Positions of the images that the program asks for."""
    assert model.passes is not None
    naming = model.passes.naming
    assert naming is not None
    return name_questions(naming.view.points, naming.labels_now, labelled, count)


def outputs_of(model: AdaptedModel, table: Tensor) -> dict[str, Tensor]:
    """What an estimate without labels may look at, and the labels given."""
    passes = model.passes
    assert passes is not None
    tensors = {
        "before": passes.before.probs.half(),
        "before_posterior": model.uncertainty.predictive(passes.before.features, 1.0).half(),
        "draws": model.posterior.draws(passes.before.features, 8).argmax(2).to(torch.int16),
        "features": passes.before.features.half(),
        "after": passes.after.probs.half(),
        "after_posterior": passes.after.posterior_probs.half(),
        "last": passes.path[-1],
        "given": table.to(torch.int16),
    }
    if passes.naming is not None:
        naming = passes.naming.clusters
        tensors["soft_labels"] = naming.known_labels.half()
        tensors["marginals"] = naming.marginals
    return {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}


def ece_of(model: AdaptedModel, labels: Tensor) -> dict[str, float]:
    """Calibration error of the source model, and of the model that is kept before and after its rescaling."""
    passes = model.passes
    assert passes is not None
    tables = {
        "source": passes.before.probs,
        "plain": passes.after.logits.softmax(dim=1),
        "rescaled": passes.after.probs,
    }
    errors = {}
    for name, probs in tables.items():
        errors[name] = round(calibration_metrics(probs, labels)["ece"], 2)
    return errors


def can_run(family: str, method: str, budget: LabelBudget) -> bool:
    """Networks from scratch have no witness; a method that trains nothing takes no labels."""
    chosen = METHODS[method]
    if family in ("digits", "inverted") and chosen.needs_witness:
        return False
    return budget.kind == "none" or bool(chosen.terms)


@functools.cache
def commit() -> str:
    """The commit of the code; a plus sign if the package was changed since."""
    folder = Path(__file__).parent

    def git(*command: str) -> str:
        return subprocess.run(
            ["git", "-C", str(folder), *command], capture_output=True, text=True, check=False
        ).stdout.strip()

    changed = git("status", "--porcelain", "--", str(folder.parent.parent / "src"))
    return git("rev-parse", "--short", "HEAD") + ("+" if changed else "")


def key_of(row: Row) -> tuple[object, ...]:
    """What tells two rows apart. The commit does not: rows of other code belong in another file."""
    settings = json.dumps(row["settings"], sort_keys=True)
    return (row["family"], row["task"], row["seed"], row["method"], row["labels"], settings)


def read_rows(file: Path) -> list[Row]:
    if not file.exists():
        return []
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


@dataclass(frozen=True)
class Job:
    """All runs of a task that are wanted, and the rows that are there already."""

    cache: Path
    family: str
    source: str
    target: str
    seed: int
    methods: Sequence[str]
    budgets: Sequence[LabelBudget]
    settings: dict[str, Any]
    done: frozenset[tuple[object, ...]]
    keep: Path | None = None


def run_job(job: Job) -> list[Row]:
    """The missing rows of a task."""
    torch.set_num_threads(1)
    task = load_task(job.cache, job.family, job.source, job.target, job.seed)
    runs = Runs(task, job.settings, job.keep)
    rows = []
    for method in job.methods:
        for budget in job.budgets:
            if not can_run(job.family, method, budget):
                continue
            name = {
                "family": job.family,
                "task": task.name,
                "seed": job.seed,
                "method": method,
                "labels": str(budget),
                "settings": runs.settings,
            }
            if key_of(name) not in job.done:
                rows.append(runs.row(method, budget))
    return rows


def column_of(row: Row) -> str:
    return row["method"] if row["labels"] == "none" else f"{row['method']} {row['labels']}"


def table(rows: Iterable[Row], figure: str = "accuracy", against: str | None = None) -> str:
    """Families by methods: the mean over tasks ± its standard error, each task being the mean of its seeds. With
    `against`, differences to that column, paired by task."""
    cells: dict[tuple[str, str], dict[str, list[float]]] = defaultdict(
        lambda: defaultdict(list)
    )
    commits = set()
    for row in rows:
        if figure in row:
            cells[row["family"], column_of(row)][row["task"]].append(row[figure])
            commits.add(row["commit"])
    families = list(dict.fromkeys(family for family, _ in cells))
    columns = list(dict.fromkeys(column for _, column in cells))
    lines = [
        f"| family | tasks | {' | '.join(columns)} |",
        f"|---|---:|{'---:|' * len(columns)}",
    ]
    for family in families:
        texts = []
        sizes = {len(cells[family, column]) for column in columns if (family, column) in cells}
        for column in columns:
            means = task_means(cells.get((family, column), {}))
            if against is not None and column != against:
                base = task_means(cells.get((family, against), {}))
                means = {task: means[task] - base[task] for task in means if task in base}
            signed = against is not None and column != against
            texts.append(mean_text(list(means.values()), signed=signed))
        lines.append(f"| {family} | {max(sizes)} | {' | '.join(texts)} |")
    return "\n".join(lines) + f"\n\n{figure}; commit {', '.join(sorted(commits))}\n"


def task_means(by_task: dict[str, list[float]]) -> dict[str, float]:
    return {task: statistics.fmean(values) for task, values in by_task.items()}


def mean_text(values: list[float], *, signed: bool = False) -> str:
    if not values:
        return "–"
    mean = statistics.fmean(values)
    text = f"{mean:+.1f}" if signed else f"{mean:.1f}"
    if len(values) < 2:
        return text
    error = statistics.stdev(values) / math.sqrt(len(values))
    return f"{text} ± {error:.1f}"
