"""The guard on Office-31 under bad settings: what each run would end in, and what the guard would keep.

    python studies/guard_office31.py --data ROOT --models FOLDER/models --out FILE.json [--seeds 2019 2020 2021]

FOLDER is that of `usfan reproduce office31`, whose source models are used again (A_2019, …). Bad settings: ten times
the learning rate; the paper's literal ones; a target with the first ten classes only. The guard is off, so that runs go
to their end: what it keeps is computed from the paths.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]
DOMAINS = {"A": "amazon", "D": "dslr", "W": "webcam"}
SETTINGS: dict[str, dict] = {"lr x10": {"lr": 0.1}, "literal": {"preset": "paper"}, "classes missing": {}}
MISSING_FROM = 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--models", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[2019, 2020, 2021])
    parser.add_argument("--tasks", nargs="+", default=["AD", "AW", "DA", "DW", "WA", "WD"])
    parser.add_argument("--methods", nargs="+", default=["shot-im", "u-sfan"])
    parser.add_argument("--settings", nargs="+", choices=tuple(SETTINGS), default=tuple(SETTINGS))
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=1e9, help="no new run after so many")
    options = parser.parse_args()

    from studies.paths import path_of, write_rows

    from usfan.adaptation.adapt import adapt
    from usfan.artifacts.model import SourceModel
    from usfan.compute.runtime import start_runtime
    from usfan.config import RuntimeConfig
    from usfan.data.cache import PixelStore, open_store
    from usfan.data.sources import ImageData
    from usfan.data.views import InputSpec

    started, rows, stores = time.time(), [], {}
    runtime = start_runtime(RuntimeConfig(compile="graph"))

    def load(letter: str, spec: InputSpec) -> dict[str, PixelStore]:
        if letter not in stores:
            data = ImageData(options.data / DOMAINS[letter])
            some = data.subset((data.labels < MISSING_FROM).nonzero().flatten())
            parts = {"all": data, "some": some}
            given = {"size": spec.resize, "channels": spec.channels, "device": runtime.device}
            stores[letter] = {name: open_store(part, **given) for name, part in parts.items()}
        return stores[letter]

    for seed in options.seeds:
        for task in options.tasks:
            source = SourceModel.load(options.models / f"{task[0]}_{seed}").to(runtime.device)
            for setting in options.settings:
                settings = SETTINGS[setting]
                store = load(task[1], source.spec)["some" if setting == "classes missing" else "all"]
                for method in options.methods:
                    if time.time() - started > options.seconds:
                        return
                    given = {"epochs": options.epochs, "seed": seed, "guard": False, **settings}
                    path = path_of(adapt(source, store, method, runtime=runtime, **given), store.labels)
                    what = {"data": "office31", "task": task, "method": method, "setting": setting, "seed": seed}
                    what["count"] = len(store)
                    rows.append({**what, "path": path})
                    print(what, path["accuracy"][0], path["accuracy"][-1], path["doubtful_drift"][-1], flush=True)
                    write_rows(options.out, "python studies/guard_office31.py", rows)


if __name__ == "__main__":
    main()
