"""Open set on digits: MNIST 0–5 are known, the target is all of UCI, 6–9 are unknown. CPU, minutes.

    python studies/open_set_digits.py [--seeds 0 1 2] [--epochs 8] [--out FILE.json]

Every method with and without separation; HOS by each score, split by the same rule for all. Labels score only.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import usfan
from usfan.evaluation.evaluate import score_outputs
from usfan.reproduce.digits import load_mnist5k, load_uci


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    mnist, uci = load_mnist5k(), load_uci()
    known = mnist.subset((mnist.labels < 6).nonzero().flatten()).match_classes(tuple("012345"))
    rows = []
    for seed in options.seeds:
        source = usfan.train_source(known, backbone="digits-cnn", epochs=4, seed=seed)
        labels = uci.match_classes(source.classes, open_set=True).labels
        for method, separation in [("source-only", 0.0)] + [
            (m, s) for s in (0.0, 1.0) for m in ("shot-im", "u-sfan", "u-sfan+")
        ]:
            model = usfan.adapt(
                source, uci, method, open_set=True, epochs=options.epochs, seed=seed, separation=separation
            )
            found = score_outputs(model.passes.after, labels, model, open_set=True)
            row = {"method": method, "separation": separation, "seed": seed, "kept": model.history["kept_epoch"]}
            row |= {k: found[k] for k in ("hos", "os", "os_star", "unknown_accuracy", "auroc_unknown")}
            row["by_score"] = {k: v["hos"] for k, v in found["by_score"].items()}
            row["seconds"] = model.history["seconds"]
            rows.append(row)
            print(
                {k: round(v, 1) if isinstance(v, float) else v for k, v in row.items() if k != "by_score"},
                {k: round(v, 1) for k, v in row["by_score"].items()},
                flush=True,
            )
    if options.out:
        options.out.write_text(
            json.dumps({"command": "python studies/open_set_digits.py", "rows": rows}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
