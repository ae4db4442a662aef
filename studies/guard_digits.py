"""The guard on digits: good settings and bad ones, the path of every run. CPU, about ten minutes per direction.

    python studies/guard_digits.py {mnist-uci,uci-mnist} [--seeds 0 1 2] [--out FILE.json]

Bad settings: ten times the learning rate; the paper's literal prior, weights every step and not divided by their mean;
a target with classes 0 to 3 only. Labels serve for the accuracy alone; the guard itself is off, so that runs go to
their end: what it would have kept is computed from the paths (docs/make_tables.py).
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from studies.paths import path_of, write_rows

import usfan
from usfan.reproduce.digits import load_mnist5k, load_uci

SETTINGS: dict[str, dict] = {
    "default": {},
    "lr x10": {"lr": 0.1},
    "literal": {"preset": "paper"},
    "classes missing": {},
    "memory": {"diversity_memory": 0.9},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("task", choices=["mnist-uci", "uci-mnist"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS)[:4])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    source_data, target = load_mnist5k(), load_uci()
    if options.task == "uci-mnist":
        source_data, target = target, source_data
    rows = []
    for seed in options.seeds:
        source = usfan.train_source(source_data, backbone="digits-cnn", epochs=8, seed=seed)
        for name in options.settings:
            settings = SETTINGS[name]
            data = target.subset((target.labels < 4).nonzero().flatten()) if name == "classes missing" else target
            for method in ("shot-im", "u-sfan", "u-sfan+"):
                given = {"epochs": options.epochs, "seed": seed, "guard": False, **settings}
                model = usfan.adapt(source, data, method, **given)
                path = path_of(model, data.labels)
                row = {"data": "digits", "task": options.task, "method": method, "setting": name, "seed": seed}
                rows.append({**row, "path": path})
                last = {k: v[-1] for k, v in path.items() if k in ("drift", "doubtful_drift")}
                print(row, path["accuracy"][0], path["accuracy"][-1], last, flush=True)
                if options.out:
                    write_rows(options.out, f"python studies/guard_digits.py {options.task}", rows)


if __name__ == "__main__":
    main()
