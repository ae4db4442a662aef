"""Does agreement between seeds tell better settings from worse ones? Digits, CPU, about a quarter of an hour.

    python studies/agreement_digits.py [--seeds 0 1 2 3 4] [--out FILE.json]
    python studies/agreement_digits.py --data FOLDER_OF_THE_NPZ_FILES --epochs 10 --cases u-sfan …

With --data it uses MNIST and USPS (equally many images of each) and SHOT's LeNet, instead of MNIST, UCI and the demo's
network.

Every case runs with every seed, each with its own source model. A row has the accuracy of the model after the last
epoch, and its agreement with the run of the next seed (the last seed with the first). A case is judged by the mean over
its seeds. Labels are used only to measure accuracy.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

from studies.cells import adapt_variant  # noqa: E402
from studies.paths import write_rows  # noqa: E402
from studies.terms import GaussianLabels, SquaredCertainty  # noqa: E402
from studies.variants import Variant  # noqa: E402

import usfan  # noqa: E402
from usfan.data.sources import ImageData  # noqa: E402
from usfan.study.agreement import agreement, predicted_classes  # noqa: E402
from usfan.study.digits import DIGITS, load_mnist5k, load_uci  # noqa: E402

LABELS_AT_ONCE = {"pseudo_label_warmup": 0}
LENET = {"backbone": "lenet", "dropout": 0.5, "backbone_lr_scale": 1.0}
PARTS = {"u-sfan power 2": (SquaredCertainty,), "u-sfan+ gaussian": (GaussianLabels,)}
"""Cases that are no settings of the library."""
CASES: dict[str, tuple[str, dict]] = {
    "shot-im": ("shot-im", {}),
    "shot-im-entropy": ("shot-im-entropy", {}),
    "shot": ("shot", {}),
    "u-sfan": ("u-sfan", {"anneal": False}),
    "u-sfan annealed": ("u-sfan", {"anneal": True}),
    "u-sfan mean 1": ("u-sfan", {"balance": False}),
    "u-sfan memory": ("u-sfan", {"diversity_memory": 0.9}),
    "u-sfan power 2": ("u-sfan", {}),
    "u-sfan literal": ("u-sfan", {"preset": "paper"}),
    "u-sfan+": ("u-sfan+", LABELS_AT_ONCE),
    "u-sfan+ annealed": ("u-sfan+", {"anneal": True, **LABELS_AT_ONCE}),
    "u-sfan+ gaussian": ("u-sfan+", LABELS_AT_ONCE),
    "u-sfan+ late labels": ("u-sfan+", {"pseudo_label_warmup": 2}),
    "u-sfan+ labels after 1": ("u-sfan+", {"pseudo_label_warmup": 1}),
    "u-sfan+ labels after 4": ("u-sfan+", {"pseudo_label_warmup": 4}),
    "shot late labels": ("shot", {"pseudo_label_warmup": 2}),
    "shot-im-entropy balanced": ("shot-im-entropy", {"balance": True}),
}


Task = tuple[str, ImageData, ImageData, dict]


def tasks_of(folder: Path | None) -> list[Task]:
    """Names, source, target, and the settings of stage 1, in both directions."""
    if folder is None:
        mnist = load_mnist5k()
        uci = load_uci()
        group = {"backbone": "digits-cnn"}
        return [("mnist-uci", mnist, uci, group), ("uci-mnist", uci, mnist, group)]
    arrays = {name: np.load(folder / f"{name}.npz") for name in ("mnist", "usps")}
    count = len(arrays["usps"]["x_train"])
    mnist, usps = (
        ImageData(
            a["x_train"][:count],
            labels=a["y_train"][:count].astype(np.int64),
            classes=DIGITS,
            name=name,
        )
        for name, a in arrays.items()
    )
    return [
        ("mnist-usps", mnist, usps, {**LENET, "augment": "none"}),
        ("usps-mnist", usps, mnist, {**LENET, "augment": "shift-turn"}),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--data", type=Path)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if len(options.seeds) < 2:
        parser.error("agreement needs two seeds or more")
    rows: list[dict] = []
    target_views = {"augment": "none"} if options.data else {}
    for task, data, target, settings_of_source in tasks_of(options.data):
        predicted: dict[str, list] = {case: [] for case in options.cases}
        for seed in options.seeds:
            source = usfan.train_source(
                data, epochs=options.epochs, seed=seed, **settings_of_source
            )
            for case in options.cases:
                method, settings = CASES[case]
                arguments = {
                    "epochs": options.epochs,
                    "seed": seed,
                    "guard": False,
                    **target_views,
                }
                variant = Variant(case, method, case, settings, PARTS.get(case, ()))
                model = adapt_variant(variant, source, target, **arguments)
                result = predicted_classes(model)
                predicted[case].append(result)
                right = 100 * float((result == target.labels).double().mean())
                rows.append(
                    {"task": task, "case": case, "seed": seed, "accuracy": round(right, 2)}
                )
                print(rows[-1], flush=True)
        for case, runs in predicted.items():
            group = [r for r in rows if (r["task"], r["case"]) == (task, case)]
            for row, one, two in zip(group, runs, [*runs[1:], runs[0]], strict=True):
                row["agreement"] = round(agreement(one, two), 2)
            figures = [
                statistics.fmean(r[name] for r in group) for name in ("agreement", "accuracy")
            ]
            print(
                f"{task} {case:24s} agreement {figures[0]:.2f}  accuracy {figures[1]:.2f}",
                flush=True,
            )
        if options.out:
            data_of = " --data ROOT" if options.data else ""
            write_rows(options.out, f"python studies/agreement_digits.py{data_of}", rows)


if __name__ == "__main__":
    main()
