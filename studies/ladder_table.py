"""What each rung of the ladder reaches, from the runs of `studies.corpus`, and what `--tune auto` would choose.

    python -m studies.ladder_table OUT.json --corpus FOLDER …

U-SFAN++ (U-SFAN for networks from scratch), one row per source and target: the accuracy of the source model and of each
rung. No run is repeated: auto is the rule of `usfan.adaptation.tune`, applied to the structure that the source model
explains in the features of its own network (`near-source` in the corpus).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from studies.shifts import CHOOSE

from usfan.adaptation.tune import decide
from usfan.maths.agreement import kappa

RUNGS = ("new", "norm", "all")


def chosen(row: dict[str, Any], arrays: Any) -> str:
    """The rung of `--tune auto`."""
    key = f"{row['source']}|{row['target']}"
    if key.startswith("scratch"):
        return "all"
    probs = arrays[f"{key}|probs"]
    near = torch.from_numpy(arrays[f"{key}|near-source"]).long()
    predicted = torch.from_numpy(arrays[f"{row['run']}|path"])[0].long()
    classes = probs.shape[1]
    return decide(float(kappa(predicted, near, classes)), len(predicted) / classes).tune


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--corpus", type=Path, nargs="+", required=True)
    options = parser.parse_args()
    result: dict[Any, dict[str, Any]] = {}
    for folder in options.corpus:
        for part in ("choose", "judge"):
            arrays = np.load(folder / f"{part}.npz")
            for line in (folder / f"{part}.jsonl").read_text().splitlines():
                row = json.loads(line)
                plain = (
                    not row.get("lr")
                    and not row.get("preset")
                    and not row["source"].startswith("tuned")
                )
                method = "u-sfan" if row["source"].startswith("scratch") else "u-sfan++"
                if plain and row["method"] == method and row["target"].endswith("None"):
                    start, *names = row["source"].split("/")
                    task = f"{names[-2]}→{row['target'].split('/')[1 if start != 'scratch' else 0]}"
                    group = result.setdefault(
                        (folder, row["source"], row["target"]),
                        {"kind": row["kind"], "task": task},
                    )
                    group |= {
                        "source_only": round(row["before"], 2),
                        row["tune"]: round(row["after"], 2),
                    }
                    group |= {
                        "auto": chosen(row, arrays),
                        "set_aside": row["kind"] not in CHOOSE,
                    }
    rows = [row for row in result.values() if all(rung in row for rung in RUNGS)]
    rows.sort(key=lambda row: (row["set_aside"], row["kind"], row["task"]))
    below = [max(row[r] for r in RUNGS) - row[row["auto"]] for row in rows]
    options.out.write_text(json.dumps({"rows": rows}, indent=1, ensure_ascii=False) + "\n")
    print(
        f"{len(rows)} tasks, auto below the best rung: {np.mean(below):.2f} on average, {max(below):.1f} at most"
    )
    for row in rows:
        print(row)


if __name__ == "__main__":
    main()
