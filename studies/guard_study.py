"""The guard on the runs of `studies.corpus`: what it keeps, against the guard of version 0.1, always adapting, never
adapting, and the truth.

    python -m studies.guard_study PART OUT.json --corpus FOLDER … --work WORK --digits DIGITS.npz

PART is choose or judge. Each FOLDER was written by `studies.corpus` or `studies.corpus_toy`. WORK holds features of the
targets in EfficientNet-Lite2, the judge of runs that used EfficientNet-Lite0 (f-DOMAIN-SHIFT-lite2.npy, as the corpus
leaves them). Networks from scratch are judged by the images themselves, the toy by its points. The looks and the
decision are those of `usfan.adaptation.guard` itself. Labels only score it.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from studies import old_guard
from studies.corpus import digits
from torch import Tensor

from usfan.adaptation.guard import (
    Guard,
    GuardDecision,
    choose_epoch,
    guard_rows,
)
from usfan.adaptation.witness import thumbnails
from usfan.config import RuntimeConfig
from usfan.data.store import Store
from usfan.engine.runtime import start_runtime
from usfan.maths.outputs import Outputs
from usfan.study.toy_points import make_points


class Judges:
    """The features that the guard sees, by source and target."""

    def __init__(self, work: Path, file: Path) -> None:
        self.work = work
        self.file = file
        self.runtime = start_runtime(RuntimeConfig(device="cpu"))

    @functools.lru_cache(maxsize=64)  # noqa: B019
    def features(self, source: str, target: str) -> Tensor:
        """N' × F of the images that are looked at."""
        name, *rest = target.split("/")
        if name == "toy":
            _, _, targets = make_points(int(source.split("/")[-1]))
            points = targets[rest[0]]
            points = points - points.mean(dim=0)
            return (points / points.std())[guard_rows(len(points))]
        if source.startswith("scratch"):
            images, labels = digits(self.file)[name]
            images = torch.from_numpy(
                images[labels < int(rest[1])] if rest[1] != "None" else images
            )[:, None]
            return thumbnails(
                Store(images, torch.arange(len(images))), guard_rows(len(images)), self.runtime
            )
        *domain, shift, classes = target.split("/")
        place = "-".join(domain)
        table = torch.from_numpy(np.load(self.work / f"f-{place}-{shift}-lite2.npy"))
        if classes != "None":
            table = table[
                torch.from_numpy(np.load(self.work / f"labels-{place}.npy")) < int(classes)
            ]
        return table[guard_rows(len(table))]


def kept_by_the_guard(
    before: Outputs,
    path: Tensor,
    draws: Tensor,
    seen: Tensor,
    finite: dict[int, bool],
    last: int | None = None,
) -> tuple[GuardDecision, dict[str, Any]]:
    """The decision of the guard from the source model's outputs, E × N predictions, and for the images it looks at N' ×
    M labels of drawn heads and the judge's N' × F features; and the accuracy that it estimates for epoch `last`.
    `finite`: epochs to look at (by default the last one), and whether their loss was finite."""
    guard = Guard(enabled=True)
    classes = before.probs.shape[1]
    guard.open(before, path[0], draws, seen, classes)
    guard.consider(0, before, path[0], {})
    for epoch, guard.loss_finite in sorted((finite or {len(path) - 1: True}).items()):
        now = torch.nn.functional.one_hot(path[epoch], classes).float()
        guard.consider(epoch, Outputs(now, now, now, now, now[:, 0]), path[epoch], {})
    last = len(path) - 1 if last is None else last
    before_after = (100 * share for share in guard.score_of(last).accuracy)
    return choose_epoch(guard.history), dict(
        zip(("before", "after"), before_after, strict=True)
    )


def judged(row: dict[str, Any], arrays: Any, judges: Judges) -> dict[str, Any]:
    """What both guards do with a run."""
    key = f"{row['source']}|{row['target']}"
    stored = lambda name: torch.from_numpy(arrays[name])  # noqa: E731
    probs = stored(f"{key}|probs").float()
    path = stored(f"{row['run']}|path").long()
    figures = stored(f"{row['run']}|validators")
    near = stored(f"{key}|near-source").long()
    posterior = stored(f"{key}|posterior").float()
    setting = row.get("setting", "closed")
    run = old_guard.Run(path, figures[:, 0], figures[:, 1], probs, posterior, near, setting)
    old = old_guard.kept_epoch(run)
    draws = stored(f"{key}|draws").long()[guard_rows(len(path[0]))]
    outputs = Outputs(probs, probs, probs, posterior, probs[:, 0])
    last, _ = old_guard.ended(run)  # both guards call the same thing a collapse
    finite = {
        epoch: bool(torch.isfinite(figures[epoch, 0]))
        for epoch in {last, min(last + 1, len(path) - 1)} - {0}
    }
    seen = judges.features(row["source"], row["target"])
    kept, estimate = kept_by_the_guard(outputs, path, draws, seen, finite, last)
    labels = arrays.get(
        f"{row['target']}|labels", arrays.get(f"{row['target']}|{row['source']}|labels")
    )
    right = [100 * float(np.mean(predicted == labels)) for predicted in path.numpy()]
    return {
        **row,
        "kept": kept.kept,
        "with_guard": right[kept.epoch],
        "with_old_guard": right[old],
        "judged": right[last],
        "estimate": estimate,
    }


def is_bad(row: dict[str, Any]) -> bool:
    """Ten times the learning rate, or the literal settings."""
    return bool(row.get("lr") or row.get("preset"))


def outcome(rows: list[dict[str, Any]], kept: list[float]) -> dict[str, Any]:
    """What keeping these models costs."""
    best = [max(r["before"], r["after"]) for r in rows]
    return {
        "loss": statistics.fmean(b - k for b, k in zip(best, kept, strict=True)),
        "below_by_3": sum(k < r["before"] - 3 for k, r in zip(kept, rows, strict=True)),
        "worst": min(k - r["before"] for k, r in zip(kept, rows, strict=True)),
        "thrown_away_5": sum(r["after"] - k > 5 for k, r in zip(kept, rows, strict=True)),
        "most_thrown_away": max(r["after"] - k for k, r in zip(kept, rows, strict=True)),
    }


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    always, never = (
        outcome(rows, [r[when] for r in rows])["loss"] for when in ("after", "before")
    )
    return {
        "runs": len(rows),
        **outcome(rows, [r["with_guard"] for r in rows]),
        "loss_always_adapting": always,
        "loss_never_adapting": never,
        "kept": {
            name: sum(r["kept"] == name for r in rows)
            for name in ("adapted", "source", "undecided")
        },
        "old": outcome(rows, [r["with_old_guard"] for r in rows]),
    }


def accuracy_error(rows: list[dict[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for when in ("before", "after"):
        for name, chosen in (
            ("good", [r for r in rows if not is_bad(r)]),
            ("bad", [r for r in rows if is_bad(r)]),
        ):
            if chosen:
                true = [r["before"] if when == "before" else r["judged"] for r in chosen]
                guesses = [r["estimate"][when] for r in chosen]
                errors = [abs(g - t) for g, t in zip(guesses, true, strict=True)]
                result[f"{when}_{name}"] = {
                    "runs": len(chosen),
                    "mean_absolute_error": statistics.fmean(errors),
                }
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=("choose", "judge"))
    parser.add_argument("out", type=Path)
    parser.add_argument("--corpus", type=Path, nargs="+", required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--digits", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    judges = Judges(options.work, options.digits)
    for folder in options.corpus:
        arrays = dict(np.load(folder / f"{options.part}.npz"))
        for line in (folder / f"{options.part}.jsonl").read_text().splitlines():
            row = json.loads(line)
            if not (
                row["source"].startswith("scratch") and row["tune"] != "all"
            ):  # rungs of the ladder
                rows.append(judged(row, arrays, judges))
    kinds = defaultdict(list)
    for row in rows:
        kinds[row["kind"]].append(row)
    result = {
        "part": options.part,
        "all": summary(rows),
        "estimated_accuracy": accuracy_error(rows),
    }
    result["kinds"] = {kind: summary(group) for kind, group in sorted(kinds.items())}
    names = (
        "kind",
        "source",
        "target",
        "method",
        "lr",
        "preset",
        "tune",
        "setting",
        "before",
        "after",
        "kept",
    )
    more = ("with_guard", "with_old_guard", "judged", "estimate")
    result["rows"] = [
        {n: tidy(r[n]) for n in (*names, *more) if r.get(n) is not None} for r in rows
    ]
    options.out.write_text(one_row_per_line(result))
    for kind, group in {"all": result["all"], **result["kinds"]}.items():
        print(kind, json.dumps(tidy(group)))
    print(json.dumps(tidy(result["estimated_accuracy"]), indent=1))


def one_row_per_line(result: dict[str, Any]) -> str:
    rows = ",\n".join(json.dumps(row) for row in result["rows"])
    return json.dumps({**result, "rows": ["ROWS"]}, indent=1).replace('"ROWS"', rows) + "\n"


def tidy(value: Any) -> Any:
    """Numbers to two places."""
    if isinstance(value, dict):
        return {k: tidy(v) for k, v in value.items() if k != "counts"}
    return round(value, 2) if isinstance(value, float) else value


if __name__ == "__main__":
    main()
