"""Selective prediction: abstain on the least certain share of a table of predictions."""

from __future__ import annotations

import csv
from pathlib import Path


def abstain(table: Path, coverage: float) -> None:
    """Empty the label of the rows with the lowest weight, so that a share `coverage` keeps its label; adds `abstained`."""
    with open(table, newline="", encoding="utf-8") as file:
        weights = [float(row["weight"]) for row in csv.DictReader(file)]
    order = sorted(range(len(weights)), key=lambda i: (weights[i], i))
    left_out = set(order[: len(weights) - round(coverage * len(weights))])
    after = table.with_name(table.name + ".selected")
    with open(table, newline="", encoding="utf-8") as old, open(after, "w", newline="", encoding="utf-8") as new:
        rows, writer = csv.reader(old), csv.writer(new)
        writer.writerow([*next(rows), "abstained"])
        for i, row in enumerate(rows):
            out = i in left_out
            writer.writerow([row[0], "" if out else row[1], *row[2:], int(out)])
    after.replace(table)
