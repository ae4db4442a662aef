"""Answers that compared the source model with a first adaptation: how many count for the second one, and how many more
does it take?

    python -m studies.second_comparison FIRST.safetensors SECOND.safetensors [--replays 200]

The files are what `studies.families --keep FOLDER` keeps of a run without labels and of one with `asked:1xK`. Each
replay draws a judging order, answers until the first comparison is decided, and goes on with the second. Three ways:

    scratch     no earlier answer counts
    prefix      the product's: those up to the first changed image (of the second run) without an answer
    strata      all of them: changed images of the second run that had changed in the first, and those that had not, are
                two strata, each with its own wealth; the product of both is taken at the worst pair of stratum means
                whose mixture is 0 (a product of supermartingales for the true pair, so the minimum is valid)

Prints medians, and the share of wrong decisions.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file
from studies.replays import first_decision, is_wrong, stored_population
from torch import Tensor

from usfan.maths.decision import (
    ERROR,
    NO_ANSWER,
    SKIPPED,
    answered_prefix,
    comparison_order,
    log_wealth,
)

MOST_ANSWERS = 200
MEANS = 201


def decided_by_prefix(
    order: Tensor, changed: Tensor, outcomes: Tensor, answers: Tensor
) -> tuple[str, int]:
    """The decision, and how many answers count."""
    members = answers != SKIPPED
    rows = answered_prefix(order, changed, answers)
    population = int((changed & members).sum())
    value, _ = first_decision(outcomes[rows], population, int(members.sum()))
    return value, len(rows)


def decided_by_strata(
    order: Tensor, parts: tuple[Tensor, Tensor], outcomes: Tensor, answers: Tensor
) -> tuple[str, int]:
    """The same, with every answer in either part of the changed images."""
    members = answers != SKIPPED
    rows = [answered_prefix(order, part, answers) for part in parts]
    sizes = [int((part & members).sum()) for part in parts]
    count = sum(map(len, rows))
    means = torch.linspace(-1, 1, MEANS, dtype=torch.float64)
    if not all(sizes):
        means = torch.zeros(1, dtype=torch.float64)
    others = -means * sizes[0] / max(sizes[1], 1)
    possible = others.abs() <= 1
    for value, sign in (("better", 1), ("worse", -1)):
        total = torch.zeros(int(possible.sum()), dtype=torch.float64)
        for part, size, part_means in zip(rows, sizes, (means, others), strict=True):
            if size:
                bet = log_wealth(sign * outcomes[part], sign * part_means[possible], size)
                total += bet[:, -1]
        if float(total.min()) >= math.log(2 / ERROR):
            return value, count
    return "not yet", count


def ask_until(
    decide: Callable[[Tensor], tuple[str, int]],
    order: Tensor,
    changed: Tensor,
    answers: Tensor,
) -> tuple[str, int, int]:
    """Decision, answers that counted at first, and answers that were asked for: changed images in order."""
    answers = answers.clone()
    value, count = decide(answers)
    asked = 0
    for row in order[changed[order]].tolist():
        if value != "not yet" or asked == MOST_ANSWERS:
            break
        if answers[row] == NO_ANSWER:
            answers[row] = 0
            asked += 1
            value, _ = decide(answers)
    return value, count, asked


def replay(first: Path, second: Path, seed: int) -> dict[str, float]:
    one = stored_population(first)
    two = stored_population(second)
    nothing = torch.full((len(one["source"]),), NO_ANSWER)
    nothing[load_file(second)["given"] >= 0] = SKIPPED
    order = comparison_order(len(nothing), seed)
    outcomes = [p["adapted"].double() - p["source"].double() for p in (one, two)]
    answers = nothing.clone()
    asked = 0
    for row in order[(one["changed"] & (nothing != SKIPPED))[order]].tolist():
        value, _ = decided_by_prefix(order, one["changed"], outcomes[0], answers)
        if value != "not yet" or asked == MOST_ANSWERS:
            break
        answers[row] = 0
        asked += 1
    changed = two["changed"]
    parts = (changed & one["changed"], changed & ~one["changed"])
    difference = float(outcomes[1][nothing != SKIPPED].mean())
    figures: dict[str, float] = {"first": asked}

    def by_prefix(table: Tensor) -> tuple[str, int]:
        return decided_by_prefix(order, changed, outcomes[1], table)

    def by_strata(table: Tensor) -> tuple[str, int]:
        return decided_by_strata(order, parts, outcomes[1], table)

    ways = {
        "scratch": (by_prefix, nothing),
        "prefix": (by_prefix, answers),
        "strata": (by_strata, answers),
    }
    for name, (decide, table) in ways.items():
        value, count, more = ask_until(decide, order, changed, table)
        figures |= {
            f"{name} counts": count,
            f"{name} more": more,
            f"{name} wrong": is_wrong(value, difference),
        }
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("first", type=Path)
    parser.add_argument("second", type=Path)
    parser.add_argument("--replays", type=int, default=200)
    options = parser.parse_args()
    rows = [replay(options.first, options.second, seed) for seed in range(options.replays)]
    figures = {}
    for name in rows[0]:
        middle = statistics.fmean if name.endswith("wrong") else statistics.median
        figures[name] = middle(row[name] for row in rows)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
