"""Open set on digits: MNIST 0–5 are known, the target is all of UCI, 6–9 are unknown. CPU, minutes.

    python studies/open_set_digits.py [--seeds 0 1 2] [--epochs 8] [--out FILE.json]

Every method runs with and without separation. HOS is computed for each score, with the same threshold rule for all.
Labels are used only to score.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

from studies.cells import adapt_variant  # noqa: E402
from studies.variants import Variant  # noqa: E402

import usfan  # noqa: E402
from usfan.adaptation.methods import METHODS  # noqa: E402
from usfan.adaptation.terms.separation import Separation  # noqa: E402
from usfan.metrics.evaluate import score_outputs  # noqa: E402
from usfan.study.digits import load_mnist5k, load_uci  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    mnist = load_mnist5k()
    uci = load_uci()
    known = mnist.subset((mnist.labels < 6).nonzero().flatten()).match_classes(tuple("012345"))
    rows = []
    for seed in options.seeds:
        source = usfan.train_source(known, backbone="digits-cnn", epochs=4, seed=seed)
        labels = uci.match_classes(source.classes, open_set=True).labels
        for method, separation in [("source-only", 0.0)] + [
            (m, s) for s in (0.0, 1.0) for m in ("shot-im", "u-sfan", "u-sfan+")
        ]:
            more = () if METHODS[method].has(Separation) or not separation else (Separation,)
            variant = Variant(
                f"{method} {separation}", method, "", {"separation": separation}, more=more
            )
            arguments = {"setting": "open", "epochs": options.epochs, "seed": seed}
            model = adapt_variant(variant, source, uci, **arguments)
            result = score_outputs(model.passes.after, labels, model, open_set=True)
            row = {
                "method": method,
                "separation": separation,
                "seed": seed,
                "kept": model.history["kept_epoch"],
            }
            row |= {
                k: result[k]
                for k in ("hos", "os", "os_star", "unknown_accuracy", "auroc_unknown")
            }
            row["by_score"] = {k: v["hos"] for k, v in result["by_score"].items()}
            row["seconds"] = model.history["seconds"]
            rows.append(row)
            print(
                {
                    k: round(v, 1) if isinstance(v, float) else v
                    for k, v in row.items()
                    if k != "by_score"
                },
                {k: round(v, 1) for k, v in row["by_score"].items()},
                flush=True,
            )
    if options.out:
        options.out.write_text(
            json.dumps({"command": "python studies/open_set_digits.py", "rows": rows}, indent=1)
            + "\n"
        )


if __name__ == "__main__":
    main()
