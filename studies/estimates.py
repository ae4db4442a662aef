"""Is accuracy that is estimated without labels to be trusted? On every family of tasks (`studies.families`).

    python -m studies.estimates rows CACHE CHECK.jsonl RUNS.jsonl [--families …] [--seeds 2019]
    python -m studies.estimates table CHECK.jsonl RUNS.jsonl

The form of the interval and its two constants are set on office31, pacs, lines, leaf, digits, inverted and same, seeds
2019 to 2021. Set aside to judge: shifts and emoji (their rows in docs/results had been looked at before, so they are no
blind test), and seeds from 2022 of every kind.

`rows` checks the source model on each target (`usfan check`), adapts it with the default method, and appends a row to
each file; rows that are there are skipped. `table` leaves out one kind of shift at a time, sets the width of the
interval on the others (split conformal on the error that doubt and the number of images do not explain, scaled by 1 − κ
of the source model; of each kind its quantile, of the kinds the largest), and counts how often the interval covers the
truth on the kind left out. Then it prints how well single numbers tell that accuracy fell by more than 5 points, and
the calibration error before and after the rescaling. Target labels only score.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from studies.families.domains import FAMILIES, load_domain
from studies.families.runs import Job, LabelBudget, key_of, read_rows, run_job
from studies.families.task import Task, cpu, load_task, only, ready, store_of, task_name

from usfan.adaptation.check import check_model, look
from usfan.adaptation.estimate import can_be_told, errors
from usfan.adaptation.thresholds import ACCURACY_ERROR, GUARD_IMAGES, TRAINING_IMAGES
from usfan.engine.passes import engine_store
from usfan.metrics.metrics import detection

Row = dict[str, Any]
FELL = 5.0
"""Points of accuracy whose loss a monitor should notice."""
LEVEL = 0.95
"""Quantile of the scaled errors of the other kinds; the interval promises 90 %, but kinds differ."""
FROM_SCRATCH = ("digits", "inverted")


def check_row(cache: Path, task: Task) -> Row:
    """What `check` says of a source model on its target, baselines, and the truth."""
    result = check_model(task.source, task.target, cpu(), str, witness=task.witness)
    outputs, _ = look(task.source, task.target, cpu())
    right = outputs.logits.argmax(dim=1).cpu() == task.labels
    confidence = outputs.probs.amax(dim=1)
    domain, labels = only(load_domain(cache, task.family, task.source_domain), task.classes)
    source_store = engine_store(store_of(domain, labels, task.classes), task.source.spec, cpu())
    source_outputs, _ = look(task.source, source_store, cpu())
    source_confidence = source_outputs.probs.amax(dim=1)
    held_out = float(task.source.summary["validation_accuracy"])
    threshold = source_confidence.quantile(1 - held_out / 100)
    return {
        "family": task.family,
        "task": task.name,
        "seed": task.seed,
        "images": len(task.labels),
        "truth": percent(right),
        "source": round(held_out, 2),
        "setting": result.classes["setting"],
        **{
            name: round(value, 4) for name, value in result.figures.items() if value is not None
        },
        "source_confidence": round(float(source_confidence.mean()), 4),
        "thresholded": percent(confidence >= threshold),
        "shift": round(result.shift, 4),
    }


def percent(values: torch.Tensor) -> float:
    return round(100 * float(values.double().mean()), 2)


def method_of(family: str) -> str:
    return "u-sfan" if family in FROM_SCRATCH else "u-sfan++"


def append(file: Path, rows: Iterable[Row]) -> None:
    with file.open("a", encoding="utf-8") as lines:
        for row in rows:
            lines.write(json.dumps(row, ensure_ascii=False) + "\n")


def write_rows(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    checked = {(row["family"], row["task"], row["seed"]) for row in read_rows(options.check)}
    done = frozenset(key_of(row) for row in read_rows(options.runs))
    for seed in options.seeds:
        for family in options.families:
            for source, target in ready(options.cache, family):
                name = task_name(source, target)
                if options.only and not any(text in name for text in options.only):
                    continue
                if (family, name, seed) not in checked:
                    task = load_task(options.cache, family, source, target, seed)
                    append(options.check, [check_row(options.cache, task)])
                settings = {"guard": True, "setting": "auto"}
                methods = [method_of(family)]
                budgets = [LabelBudget("none")]
                job = Job(
                    options.cache,
                    family,
                    source,
                    target,
                    seed,
                    methods,
                    budgets,
                    settings,
                    done,
                )
                append(options.runs, run_job(job))
                print(family, name, seed, flush=True)


@dataclass(frozen=True)
class Case:
    """An estimate and the truth, in percent."""

    kind: str
    moment: str
    """check, before or after."""
    task: str
    value: float
    truth: float
    structure: float
    """κ of the source model."""
    doubt: float | None
    shift: float
    images: int

    @property
    def by_pixels(self) -> bool:
        """Whether no pretrained network looked, and κ is too small for that."""
        return not can_be_told(self.structure, 0, pretrained=self.kind not in FROM_SCRATCH)

    @property
    def told(self) -> bool:
        width = sum(self.errors(100 * ACCURACY_ERROR)) / 100
        return not self.by_pixels and can_be_told(self.structure, width, pretrained=True)

    def errors(self, constant: float) -> tuple[float, float]:
        """How far the interval reaches below and above, in points."""
        count = min(self.images, GUARD_IMAGES)
        doubt = 1.0 if self.doubt is None else self.doubt
        below, above = errors(self.structure, doubt, count, constant / 100)
        return 100 * below, 100 * above

    @property
    def error(self) -> float:
        return abs(self.value - self.truth)

    @property
    def score(self) -> float:
        """The least constant whose interval covers the truth."""
        is_low = self.truth > self.value
        if self.shift < TRAINING_IMAGES and is_low:
            return 0.0
        excess = self.error**2 - self.errors(0.0)[is_low] ** 2
        return math.sqrt(max(excess, 0.0)) / max(1 - self.structure, 1e-9)

    def width(self, constant: float) -> float:
        below, above = self.errors(constant)
        return min(self.value + above, 100) - max(self.value - below, 0)


def cases_of(checks: Sequence[Row], runs: Sequence[Row]) -> list[Case]:
    cases = []
    shifts = {}
    for row in checks:
        shifts[row["family"], row["task"], row["seed"]] = row["shift"]
        figures = (100 * row["evidence"], row["truth"], row["structure"], row.get("doubt"))
        cases.append(
            Case(row["family"], "check", row["task"], *figures, row["shift"], row["images"])
        )
    for row in runs:
        shift = shifts.get((row["family"], row["task"], row["seed"]), math.inf)
        structure = row["figures"]["before"]["structure"]
        for moment, truth in (("before", row["before"]), ("after", row["accuracy"])):
            value = 100 * row["figures"][moment]["accuracy"]
            figures = (value, truth, structure, row["doubt"], shift, row["images"])
            cases.append(Case(row["family"], moment, row["task"], *figures))
    return cases


def quantile(values: Iterable[float]) -> float:
    """The conformal quantile at `LEVEL`."""
    ordered = sorted(values)
    return ordered[min(math.ceil((len(ordered) + 1) * LEVEL), len(ordered)) - 1]


def left_out(cases: Sequence[Case], kind: str) -> float:
    """The constant that the other kinds set."""
    scores: dict[str, list[float]] = defaultdict(list)
    for case in cases:
        if case.kind != kind and not case.by_pixels:
            scores[case.kind].append(case.score)
    return max(map(quantile, scores.values()))


def coverage_table(cases: Sequence[Case]) -> str:
    told = [case for case in cases if case.told]
    lines = [
        "| kind left out | cases | cannot be told | covered | width | covered by the stored width | error |"
        " covered, told or not |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    covered = 0
    anywhere: list[bool] = []
    widths = []
    for kind in dict.fromkeys(case.kind for case in cases):
        everything = [case for case in cases if case.kind == kind]
        group = [case for case in everything if case.told]
        constant = left_out(cases, kind)
        bounded = [case.score <= constant for case in everything]
        anywhere += bounded
        bounds = f"{statistics.fmean(bounded):.0%}"
        cells = [kind, str(len(everything)), f"{1 - len(group) / len(everything):.0%}"]
        if not group:
            lines.append(f"| {' | '.join([*cells, '–', '–', '–', '–', bounds])} |")
            continue
        inside = sum(case.score <= constant for case in group)
        covered += inside
        widths += [case.width(constant) for case in group]
        stored = statistics.fmean(case.score <= 100 * ACCURACY_ERROR for case in group)
        cells += [
            f"{inside / len(group):.0%}",
            f"{statistics.fmean(widths[-len(group) :]):.0f}",
            f"{stored:.0%}",
            f"{statistics.fmean(case.error for case in group):.1f}",
            bounds,
        ]
        lines.append(f"| {' | '.join(cells)} |")
    stored = statistics.fmean(case.score <= 100 * ACCURACY_ERROR for case in told)
    error = statistics.fmean(case.error for case in told)
    lines.append(
        f"| all | {len(cases)} | {1 - len(told) / len(cases):.0%} | {covered / len(told):.0%} "
        f"| {statistics.fmean(widths):.0f} | {stored:.0%} | {error:.1f} | {statistics.fmean(anywhere):.0%} |"
    )
    return "\n".join(lines)


def moments_table(cases: Sequence[Case]) -> str:
    lines = ["| estimate | cases told | covered by the stored width | error |"]
    lines.append("| --- | ---: | ---: | ---: |")
    for moment in ("check", "before", "after"):
        group = [case for case in cases if case.moment == moment and case.told]
        if not group:
            continue
        stored = statistics.fmean(case.score <= 100 * ACCURACY_ERROR for case in group)
        error = statistics.fmean(case.error for case in group)
        lines.append(f"| {moment} | {len(group)} | {stored:.0%} | {error:.1f} |")
    return "\n".join(lines)


MONITORS: dict[str, Callable[[Row], float]] = {
    "estimated accuracy": lambda row: -believed(row),
    "estimated fall": lambda row: row["source"] - believed(row),
    "mean confidence": lambda row: -row["confidence"],
    "difference of confidences": lambda row: row["source_confidence"] - row["confidence"],
    "ATC": lambda row: -row["thresholded"],
    "shift": lambda row: row["shift"],
}
"""Numbers that are the higher, the more accuracy should have fallen. The difference and ATC need source images."""


def believed(row: Row) -> float:
    """With half of the images whose cluster may have a wrong name taken off."""
    return 100 * float(row["evidence"]) * (1 - row.get("doubt", 1.0) / 2)


def monitor_table(checks: Sequence[Row]) -> str:
    fell = torch.tensor([row["source"] - row["truth"] > FELL for row in checks])
    truth = torch.tensor([row["truth"] for row in checks])
    lines = ["| number | AUROC | rank correlation with accuracy |", "| --- | ---: | ---: |"]
    for name, monitor in MONITORS.items():
        values = torch.tensor([monitor(row) for row in checks], dtype=torch.float64)
        area = detection(values, fell)["auroc"]
        lines.append(f"| {name} | {area:.1f} | {-rank_correlation(values, truth):.2f} |")
    return "\n".join(lines)


def rank_correlation(first: torch.Tensor, second: torch.Tensor) -> float:
    ranks = torch.stack([one.argsort().argsort().double() for one in (first, second)])
    return float(torch.corrcoef(ranks)[0, 1])


def confidence_table(runs: Sequence[Row]) -> str:
    lines = ["| family | runs | source | adapted | adapted, rescaled |"]
    lines.append("| --- | ---: | ---: | ---: | ---: |")
    groups: dict[str, list[Row]] = defaultdict(list)
    for row in runs:
        groups[row["family"]].append(row)
    for family, rows in groups.items():
        cells = [family, str(len(rows))]
        for name in ("source", "plain", "rescaled"):
            cells.append(f"{statistics.fmean(row['ece'][name] for row in rows):.1f}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def tables(check: Path, runs: Path) -> dict[str, str]:
    """The tables of docs/studies/estimates.md."""
    checks = read_rows(check)
    rows = read_rows(runs)
    cases = cases_of(checks, rows)
    return {
        "estimates-coverage": coverage_table(cases),
        "estimates-moments": moments_table(cases),
        "estimates-monitors": monitor_table(checks),
        "estimates-confidence": confidence_table(rows),
    }


def print_tables(options: argparse.Namespace) -> None:
    for name, table in tables(options.check, options.runs).items():
        print(f"{name}\n\n{table}\n")
    for row in read_rows(options.runs):
        print(row["family"], row["task"], row["verdict"])


def main() -> None:
    parser = argparse.ArgumentParser(prog="studies.estimates", description=__doc__)
    commands = parser.add_subparsers(required=True)
    rows = commands.add_parser("rows")
    rows.add_argument("cache", type=Path)
    rows.add_argument("check", type=Path)
    rows.add_argument("runs", type=Path)
    rows.add_argument("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    rows.add_argument("--seeds", nargs="+", type=int, default=[2019])
    rows.add_argument("--only", nargs="+")
    rows.set_defaults(run=write_rows)
    table = commands.add_parser("table")
    table.add_argument("check", type=Path)
    table.add_argument("runs", type=Path)
    table.set_defaults(run=print_tables)
    options = parser.parse_args()
    options.run(options)


if __name__ == "__main__":
    main()
