"""Would prediction-powered inference make the interval of the accuracy narrower, and does it still hold the truth?

    python -m studies.prediction_powered RUN.safetensors … [--replays 300]

RUN files are what `studies.families --keep FOLDER` keeps. In each stratum h of `maths.measurement` the adapted model's
confidence f predicts y, whether it is right. With the regression slope β and the correlation r of the labelled images,

    p_h = mean y + β (mean of f over the stratum − mean of f over the labelled)

has the variance of (1 − r²) times that of mean y, so Wilson's interval is taken as of n_h/(1 − r² + 1/n_h) labels. With
less than 8 labels, or r² ≤ 2/n_h, the stratum goes without. Questions are asked as in `studies.replays`.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

import torch
from safetensors.torch import load_file
from studies.replays import CHECKPOINTS, asked_rows, stored_population
from torch import Tensor

from usfan.maths.agreement import Interval
from usfan.maths.decision import comparison_order
from usfan.maths.measurement import NORMAL_95, measured_accuracy

LEAST = 8


def wilson_ends(share: float, labels: float) -> tuple[float, float]:
    square = NORMAL_95**2 / labels
    centre = (share + square / 2) / (1 + square)
    half = math.sqrt(square * share * (1 - share) + square**2 / 4) / (1 + square)
    return max(min(centre - half, share), 0.0), min(max(centre + half, share), 1.0)


def stratum_interval(right: Tensor, labelled: Tensor, every: Tensor) -> Interval:
    """From n booleans, the confidences of these images, and those of the whole stratum."""
    count = len(right)
    if count == 0:
        return Interval(0.5, 0.0, 1.0)
    values = right.double()
    share = float(values.mean())
    if count == len(every):
        return Interval(share, share, share)
    explained = 0.0
    if count >= LEAST and 0 < share < 1:
        table = torch.cov(torch.stack([values, labelled]))
        square = float(table[0, 1] ** 2 / (table[0, 0] * table[1, 1]).clamp_min(1e-12))
        if table[0, 1] > 0 and square > 2 / count:
            explained = square - 1 / count
            slope = float(table[0, 1] / table[1, 1])
            share += slope * float(every.mean() - labelled.mean())
            share = min(max(share, 0.0), 1.0)
    labels = count * (len(every) - 1) / (len(every) - count) / (1 - explained)
    return Interval(share, *wilson_ends(share, labels))


def predicted_accuracy(strata: list[tuple[Tensor, Tensor, Tensor]]) -> Interval:
    """As `measured_accuracy`, from the arguments of `stratum_interval`."""
    total = sum(len(every) for _, _, every in strata)
    value = below = above = unknown = 0.0
    for right, labelled, every in strata:
        part = stratum_interval(right, labelled, every)
        weight = len(every) / total
        value += weight * part.value
        if not len(right):
            unknown += weight / 2
            continue
        below += (weight * (part.value - part.low)) ** 2
        above += (weight * (part.high - part.value)) ** 2
    return Interval(
        value, value - unknown - math.sqrt(below), value + unknown + math.sqrt(above)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--replays", type=int, default=300)
    options = parser.parse_args()
    for path in options.runs:
        population = stored_population(path)
        confidence = load_file(path)["after"].double().amax(dim=1)
        right = population["adapted"]
        changed = population["changed"]
        truth = float(right.double().mean())
        sums: dict[str, float] = {}
        for seed in range(1, options.replays + 1):
            _, _, rows = asked_rows(population, comparison_order(len(right), seed))
            for count in CHECKPOINTS:
                parts = []
                for member in (changed, ~changed):
                    part = rows[:count][member[rows[:count]]]
                    parts.append((right[part], confidence[part], confidence[member]))
                stratified = measured_accuracy([(len(every), y) for y, _, every in parts])
                for name, interval in (
                    ("stratified", stratified),
                    ("predicted", predicted_accuracy(parts)),
                ):
                    covers = interval.low - 1e-9 <= truth <= interval.high + 1e-9
                    width = 100 * (interval.high - interval.low)
                    for figure, number in (("covers", covers), ("width", width)):
                        key = f"{name} {figure} {count}"
                        sums[key] = sums.get(key, 0.0) + number / options.replays
        row = {key: round(number, 3) for key, number in sums.items()}
        print(json.dumps({"run": path.stem} | row), flush=True)


if __name__ == "__main__":
    main()
