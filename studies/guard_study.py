"""The guard on the runs of `studies.corpus`: what it keeps, against always adapting, never adapting, and the truth.

    python -m studies.guard_study CORPUS FEATURES OUT.json [--part choose|judge]

CORPUS is a folder written by `studies.corpus`. FEATURES holds EfficientNet-Lite2 features of the targets, because Lite2
judges the runs that used EfficientNet-Lite0: lite2-DATASET-DOMAIN[-SHIFT].npy. Networks trained from scratch are judged
by the source model's features; the corpus keeps five neighbours of these, so wide neighbourhoods are not used there.
The decision is made by `usfan.adaptation.guard.choose_epoch` itself. Labels are used only to score it.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from usfan.adaptation.guard import MOST, NEAR, WIDE_SHARE, Look, choose_epoch, estimated_accuracy
from usfan.scoring.neighbours import nearest_neighbours
from usfan.scoring.structure import Comparison, Interval, evenly_spaced


def tables(target: str, features: Path, cache: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Rows that are looked at, and their neighbours in the judge's features."""
    if target not in cache:
        *domain, shift, classes = target.split("/")
        name = "-".join(["lite2", *domain, *([] if shift == "None" else [shift])])
        path = features / f"{name}.npy"
        if not path.is_file():
            return None
        table = torch.from_numpy(np.load(path))
        if classes != "None":
            table = table[torch.from_numpy(np.load(features / f"labels-{'-'.join(domain)}.npy")) < int(classes)]
        rows = evenly_spaced(len(table), MOST)
        cache[target] = rows, nearest_neighbours(table[rows], max(NEAR, len(rows) // WIDE_SHARE))[0]
    return cache[target]


def look_at(row: dict[str, Any], arrays: Any, features: Path, cache: dict[str, Any]) -> Look | None:
    key = f"{row['source']}|{row['target']}"
    probs = torch.from_numpy(arrays[f"{key}|probs"]).float()
    before, after = probs.argmax(1), torch.from_numpy(arrays[f"{row['run']}|after"]).long()
    draws = torch.from_numpy(arrays[f"{key}|draws"]).long()
    found = tables(row["target"], features, cache)
    if found is None and not row["source"].startswith("scratch"):
        return None
    if found is None:
        rows, near = torch.arange(len(after)), torch.from_numpy(arrays[f"{key}|near-source"].astype(np.int64))
        wide = near
    else:
        rows, wide = found
        near = wide[:, :NEAR]
    own, first = after[rows], before[rows]
    moved = own != first
    names = float((draws[rows] == own[:, None]).any(1)[moved].double().mean()) if bool(moved.any()) else 1.0
    seen = Comparison(first, near, probs.shape[1])
    after_value, gain = seen.gain(own)
    wide_gain = gain if found is None else Comparison(first, wide, probs.shape[1]).gain(own)[1]
    return Look(1, float(moved.double().mean()), gain, wide_gain, names, (seen.value, after_value))


def is_bad(row: dict[str, Any]) -> bool:
    """Whether the run has ten times the learning rate, or the paper's literal settings."""
    return bool(row.get("lr") or row.get("preset"))


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    best = [max(r["before"], r["after"]) for r in rows]
    kept = [r["after"] if r["kept"] == "adapted" else r["before"] for r in rows]
    return {
        "runs": len(rows),
        "loss": statistics.fmean(b - k for b, k in zip(best, kept, strict=True)),
        "loss_always_adapting": statistics.fmean(b - r["after"] for b, r in zip(best, rows, strict=True)),
        "loss_never_adapting": statistics.fmean(b - r["before"] for b, r in zip(best, rows, strict=True)),
        "below_by_3": sum(k < r["before"] - 3 for k, r in zip(kept, rows, strict=True)),
        "worst": min(k - r["before"] for k, r in zip(kept, rows, strict=True)),
        "thrown_away_5": sum(r["after"] - k > 5 for k, r in zip(kept, rows, strict=True)),
        "most_thrown_away": max(r["after"] - k for k, r in zip(kept, rows, strict=True)),
        "kept": {name: sum(r["kept"] == name for r in rows) for name in ("adapted", "source", "undecided")},
    }


def accuracy_error(rows: list[dict[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for when in ("before", "after"):
        for name, chosen in (("good", [r for r in rows if not is_bad(r)]), ("bad", [r for r in rows if is_bad(r)])):
            if chosen:
                inside = [r["estimate"][when]["low"] <= r[when] <= r["estimate"][when]["high"] for r in chosen]
                errors = [abs(r["estimate"][when]["value"] - r[when]) for r in chosen]
                found[f"{when}_{name}"] = {
                    "runs": len(chosen),
                    "mean_absolute_error": statistics.fmean(errors),
                    "covered": statistics.fmean(inside),
                }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("corpus", type=Path)
    parser.add_argument("features", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--part", default="choose", choices=("choose", "judge"))
    given = parser.parse_args()
    arrays, cache = dict(np.load(given.corpus / f"{given.part}.npz")), {}
    rows = []
    start = Look(0, 0.0, Interval(0, 0, 0), Interval(0, 0, 0), 1.0, (0.0, 0.0))
    for line in (given.corpus / f"{given.part}.jsonl").read_text().splitlines():
        row = json.loads(line)
        if row.get("shares"):  # a variant of the method's own study
            continue
        look = look_at(row, arrays, given.features, cache)
        if look is not None:
            decision = choose_epoch([start, look])
            rows.append({**row, "kept": decision.kept, "estimate": estimated_accuracy([start, look], kept=1)})
    kinds = defaultdict(list)
    for row in rows:
        kinds[row["kind"]].append(row)
    found = {"part": given.part, "all": summary(rows), "estimated_accuracy": accuracy_error(rows)}
    found["kinds"] = {kind: summary(own) for kind, own in sorted(kinds.items())}
    names = ("kind", "source", "target", "method", "lr", "preset", "tune", "before", "after", "kept")
    found["rows"] = [{n: r[n] for n in names if r.get(n) is not None} for r in rows]
    given.out.write_text(json.dumps(found, indent=1) + "\n")
    for kind, own in {"all": found["all"], **found["kinds"]}.items():
        print(kind, {k: round(v, 2) if isinstance(v, float) else v for k, v in own.items()})
    print(json.dumps(found["estimated_accuracy"], indent=1))


if __name__ == "__main__":
    main()
