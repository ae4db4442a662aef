"""Replays of deciding and measuring with labels: how often is the decision wrong, how many labels does it take, how
often does the interval hold the truth?

    python -m studies.replays [RUN.safetensors …] [--replays 1000] [--noise 0.1] [--out rows.json]

A RUN file is what `studies.families --keep FOLDER` keeps of one run. Without files, made populations are used:
all combinations of size, changed share and difference, 0 included. Each replay draws a new judging order, asks as
`comparison_questions` does, decides as soon as it can (looking after every answer), and goes on to 200 answers.
With --noise, this share of the answers about runs is of a random class; only decisions are measured then.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from usfan.maths.decision import (
    ERROR,
    WORTH_HAVING,
    comparison_order,
    comparison_questions,
    log_wealth,
)
from usfan.maths.measurement import measured_accuracy, wilson

MOST_ANSWERS = 200
CHECKPOINTS = (24, 48, 96)
"""Numbers of answers after which the interval of the accuracy is checked."""


def made_population(size: int, share: float, difference: float, seed: int) -> dict[str, Tensor]:
    """Right answers of source and adapted model, and which images changed. `difference` in points of all images."""
    generator = torch.Generator().manual_seed(seed)
    count = round(share * size)
    both_wrong = round(0.15 * count)
    gain = round(difference * size)
    wins = (count - both_wrong + gain) // 2
    losses = count - both_wrong - wins
    kinds = torch.tensor([1] * wins + [2] * losses + [0] * both_wrong)
    same_right = torch.rand(size - count, generator=generator) < 0.9
    source = torch.cat([kinds == 2, same_right])
    adapted = torch.cat([kinds == 1, same_right])
    changed = torch.arange(size) < count
    return {"source": source, "adapted": adapted, "changed": changed}


def stored_population(path: Path) -> dict[str, Tensor]:
    tables = load_file(path)
    truth = tables["truth"]
    source = tables["before"].argmax(dim=1)
    adapted = tables["last"]
    return {
        "source": source == truth,
        "adapted": adapted == truth,
        "changed": source != adapted,
        "predictions": torch.stack([source, adapted.long()]),
        "truth": truth.long(),
    }


def with_wrong_answers(
    population: dict[str, Tensor], noise: float, seed: int
) -> dict[str, Tensor]:
    """The population as a user sees it who gives this share of the images a random class."""
    generator = torch.Generator().manual_seed(seed)
    truth = population["truth"]
    wrong = torch.rand(len(truth), generator=generator) < noise
    classes = int(truth.max()) + 1
    random = torch.randint(classes, truth.shape, generator=generator)
    source, adapted = population["predictions"] == torch.where(wrong, random, truth)
    return population | {"source": source, "adapted": adapted}


def asked_rows(population: dict[str, Tensor], order: Tensor) -> tuple[str, int, Tensor]:
    """The decision, the answers that it took, and the rows that are asked about until there are 200 answers."""
    changed = population["changed"]
    size = len(changed)
    total = int(changed.sum())
    rows = comparison_questions(order, changed, torch.full((size,), -1), MOST_ANSWERS)
    is_changed = changed[rows]
    outcomes = population["adapted"][rows].double() - population["source"][rows].double()
    value, changed_answers = first_decision(outcomes[is_changed], total, size)
    if value == "not yet":
        return value, len(rows), rows
    at = is_changed.nonzero().flatten()
    stop = int(at[changed_answers - 1]) + 1 if changed_answers else 0
    answers = torch.full((size,), -1).index_fill(0, rows[:stop], 0)
    more = comparison_questions(order, changed, answers, len(rows) - stop, decided=True)
    return value, stop, torch.cat([rows[:stop], more])


def replay(population: dict[str, Tensor], seed: int) -> dict[str, object]:
    """One random order: the decision, when it fell, and the intervals at the checkpoints and at the decision."""
    adapted = population["adapted"]
    changed = population["changed"]
    size = len(adapted)
    total = int(changed.sum())
    order = comparison_order(size, seed)
    value, stop, rows = asked_rows(population, order)
    truth = float(adapted.double().mean())
    checks = {}
    for name, number in (*((str(n), n) for n in CHECKPOINTS), ("stop", stop)):
        if not 0 < number <= len(rows):
            continue
        asked = rows[:number]
        strata = [
            (total, adapted[asked[changed[asked]]]),
            (size - total, adapted[asked[~changed[asked]]]),
        ]
        interval = measured_accuracy(strata)
        plain = wilson(int(adapted[order[:number]].sum()), number, size)
        covers = interval.low - 1e-9 <= truth <= interval.high + 1e-9
        checks[name] = (covers, interval.high - interval.low, plain.high - plain.low)
    return {"value": value, "answers": stop, "checks": checks}


def first_decision(outcomes: Tensor, changed: int, size: int) -> tuple[str, int]:
    """`decide` after every answer, until it decides: the same wealth, at the means that matter."""
    margin = WORTH_HAVING * size / max(changed, 1)
    means = torch.tensor([0.0, -margin], dtype=torch.float64)
    limit = math.log(2 / ERROR)
    better, above = log_wealth(outcomes, means, changed) >= limit
    worse, below = log_wealth(-outcomes, means, changed) >= limit
    same = above & below if margin < 1 else torch.ones_like(better)
    stops = (better | worse | same).nonzero().flatten()
    if not len(stops):
        return "not yet", len(outcomes)
    first = int(stops[0])
    if same[first]:
        return "no difference", first
    return ("better" if better[first] else "worse"), first


def is_wrong(value: str, difference: float) -> bool:
    if value == "better":
        return difference <= 0
    if value == "worse":
        return difference >= 0
    return value == "no difference" and abs(difference) > WORTH_HAVING + 1e-9


def summary(
    name: str, population: dict[str, Tensor], replays: int, first: int, noise: float = 0.0
) -> dict[str, object]:
    difference = float(
        population["adapted"].double().mean() - population["source"].double().mean()
    )
    results = []
    for seed in range(first, first + replays):
        answered = with_wrong_answers(population, noise, seed) if noise else population
        results.append(replay(answered, seed))
    decided = [result for result in results if result["value"] != "not yet"]
    row: dict[str, object] = {
        "population": name,
        "images": len(population["source"]),
        "changed": round(float(population["changed"].double().mean()), 3),
        "difference": round(100 * difference, 1),
        "decided": round(len(decided) / replays, 3),
        "wrong": round(sum(is_wrong(r["value"], difference) for r in results) / replays, 4),
        "answers": statistics.median(r["answers"] for r in results),
    }
    for check in () if noise else (*map(str, CHECKPOINTS), "stop"):
        values = [r["checks"][check] for r in results if check in r["checks"]]
        if values:
            covered, width, plain = np.array(values, dtype=float).mean(axis=0)
            row[f"coverage {check}"] = round(float(covered), 3)
            row[f"width {check}"] = round(100 * float(width), 1)
            row[f"Wilson {check}"] = round(100 * float(plain), 1)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="*", type=Path)
    parser.add_argument("--replays", type=int, default=1000)
    parser.add_argument("--noise", type=float, default=0.0)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    populations = {path.stem: stored_population(path) for path in arguments.runs}
    if not populations:
        for size, share, difference in itertools.product(
            (300, 2000), (0.1, 0.4), (0.0, 0.03, 0.1, 0.2, -0.05)
        ):
            if abs(difference) < 0.85 * share:
                name = f"made {size} {share} {difference}"
                populations[name] = made_population(size, share, difference, seed=1)
    rows = []
    for name, population in populations.items():
        noise = arguments.noise if "truth" in population else 0.0
        rows.append(summary(name, population, arguments.replays, 1, noise))
        print(json.dumps(rows[-1]), flush=True)
    if arguments.out:
        arguments.out.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
