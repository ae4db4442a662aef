"""Predictions as a CSV table; with a coverage, the least certain share of them abstains."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

from usfan.run import whole_file

COLUMNS = ("path", "label", "confidence", "entropy", "weight", "unknown")


def write_predictions(out: Path, model: Any, data: Any, coverage: float | None = None, **options: Any) -> list[Any]:
    """One row per readable image, written batch by batch; gives the images that were skipped."""
    skipped: list[Any] = []
    with whole_file(out) as part:
        with open(part, "w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(COLUMNS)
            for index, outputs in model.predict_batches(data, skipped=skipped, **options):
                writer.writerows(prediction_rows(data, index, model.to_prediction(outputs)))
        if coverage is not None:
            abstain(part, coverage)
    return skipped


def prediction_rows(data: Any, index: Any, prediction: Any) -> list[list[Any]]:
    confidence = prediction.probs.max(dim=1).values.tolist()
    figures = zip(confidence, prediction.entropy.tolist(), prediction.weight.tolist(), strict=True)
    rows = zip(index.tolist(), prediction.names, figures, prediction.unknown.tolist(), strict=True)
    return [[data.where(i), name, *(f"{x:.6f}" for x in numbers), int(unknown)] for i, name, numbers, unknown in rows]


def abstain(table: Path, coverage: float) -> None:
    """Empty the label of the rows of least weight, so that a share `coverage` keeps its label; adds `abstained`."""
    with open(table, newline="", encoding="utf-8") as file:
        weights = [float(row["weight"]) for row in csv.DictReader(file)]
    order = sorted(range(len(weights)), key=lambda i: (weights[i], i))
    left_out = set(order[: len(weights) - round(coverage * len(weights))])
    with (
        whole_file(table) as after,
        open(table, newline="", encoding="utf-8") as old,
        open(after, "w", newline="", encoding="utf-8") as new,
    ):
        rows, writer = csv.reader(old), csv.writer(new)
        writer.writerow([*next(rows), "abstained"])
        for i, row in enumerate(rows):
            out = i in left_out
            writer.writerow([row[0], "" if out else row[1], *row[2:], int(out)])
