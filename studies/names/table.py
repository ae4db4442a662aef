"""Tables of the rows of `studies.names.evaluate`.

    python -m studies.names.table ROWS.json …

± is the standard error over tasks and seeds.
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.metrics import roc_auc_score

FREE = (
    "source",
    "landed",
    "start_names",
    "start_smooth",
    "start_clusters",
    "chosen",
    "averaged",
)
LOGS = ("log_landed", "log_chosen", "log_averaged")
LABELLED = ("source", "lr", "prior", "em", "prior_em", "head", "chosen", "averaged", "pooled")
DOUBTS = ("posterior", "draws", "point", "none")


def mean_and_error(values: list[float], digits: int = 1) -> str:
    error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0
    return f"{statistics.fmean(values):.{digits}f} ± {error:.{digits}f}"


def table(head: list[str], body: list[list[str]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    lines += ["| " + " | ".join(row) + " |" for row in body]
    return "\n".join(lines)


def free_table(rows: list[dict[str, Any]], columns: tuple[str, ...], digits: int) -> str:
    body = []
    for family in dict.fromkeys(row["family"] for row in rows):
        own = [row for row in rows if row["family"] == family and row["budget"] == 0]
        cells = [mean_and_error([row[c] for row in own], digits) for c in columns]
        body.append([f"{family} ({len(own)})", *cells])
    return table(["family (runs)", *columns], body)


def labelled_table(rows: list[dict[str, Any]]) -> str:
    body = []
    for family in dict.fromkeys(row["family"] for row in rows):
        for kind in ("random", "asked"):
            for budget in (1, 2, 5, 10):
                own = [
                    row
                    for row in rows
                    if row["family"] == family
                    and row["budget"] == budget
                    and row.get("labels") == kind
                ]
                if own:
                    cells = [mean_and_error([row[c] for row in own]) for c in LABELLED]
                    body.append([f"{family} ({len(own)})", kind, f"{budget}K", *cells])
    return table(["family (runs)", "labels", "number", *LABELLED], body)


def doubt_table(rows: list[dict[str, Any]]) -> str:
    body = []
    for family in dict.fromkeys(row["family"] for row in rows):
        own = [
            row["clusters"] for row in rows if row["family"] == family and row["budget"] == 0
        ]
        wrong = np.concatenate([clusters["wrong"] for clusters in own])
        cells = []
        for name in DOUBTS:
            doubt = np.concatenate([clusters[name] for clusters in own])
            area = roc_auc_score(wrong, doubt) if 0 < wrong.sum() < len(wrong) else float("nan")
            cells.append(f"{area:.3f} / {np.square(doubt - wrong).mean():.3f}")
        body.append([family, f"{int(wrong.sum())} of {len(wrong)}", *cells])
    return table(["family", "wrong names", *DOUBTS], body)


def main() -> None:
    rows = []
    for name in sys.argv[1:]:
        rows += json.loads(Path(name).read_text())
    print("Accuracy without labels\n\n" + free_table(rows, FREE, 1))
    print("\nMean log-probability of the truth\n\n" + free_table(rows, LOGS, 2))
    print("\nAUROC / Brier of 'this name is wrong'\n\n" + doubt_table(rows))
    print("\nAccuracy on the other images, with labels\n\n" + labelled_table(rows))


if __name__ == "__main__":
    main()
