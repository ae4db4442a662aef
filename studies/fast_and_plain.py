"""Is the fast path as accurate as the plain one? The same source models and seeds, bf16 and captured against float32,
eager, on a GPU.

    python studies/fast_and_plain.py --data ROOT --models FOLDER/models --seed 2021 --out FILE.json

FOLDER is the run folder of `usfan reproduce office31`; its source models of that seed are used. The adaptations have
seeds 1 to 3.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]
DOMAINS = {"A": "amazon", "D": "dslr", "W": "webcam"}
PATHS: dict[str, dict[str, Any]] = {
    "fast": {"compile": "graph", "precision": "bf16"},
    "plain": {"compile": "off", "precision": "32"},
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--models", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=2021, help="of the source models")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--tasks", nargs="+", default=["AD", "AW", "DW"])
    parser.add_argument("--method", default="u-sfan")
    parser.add_argument("--epochs", type=int, default=15)
    options = parser.parse_args()

    from studies.paths import path_of, write_rows

    from usfan.config import RuntimeConfig
    from usfan.data.cache import open_store
    from usfan.data.sources import ImageData
    from usfan.engine.runtime import start_runtime
    from usfan.store.model import SourceModel
    from usfan.workflow import adapt_model as adapt

    rows: list[dict[str, Any]] = []
    for task in options.tasks:
        for name, how in PATHS.items():
            runtime = start_runtime(RuntimeConfig(**how))
            source = SourceModel.load(options.models / f"{task[0]}_{options.seed}").to(
                runtime.device
            )
            spec = source.spec
            data = ImageData(options.data / DOMAINS[task[1]])
            store = open_store(
                data, size=spec.resize, channels=spec.channels, device=runtime.device
            )
            for seed in options.seeds:
                began = time.perf_counter()
                arguments = {"seed": seed, "guard": False, "epochs": options.epochs}
                model = adapt(source, store, options.method, runtime=runtime, **arguments)
                seconds = round(time.perf_counter() - began, 2)
                assert store.labels is not None
                accuracy = path_of(model, store.labels)["accuracy"][-1]
                rows.append(
                    {
                        "task": task,
                        "path": name,
                        "seed": seed,
                        "accuracy": accuracy,
                        "seconds": seconds,
                    }
                )
                print(rows[-1], flush=True)
                write_rows(options.out, "python studies/fast_and_plain.py", rows)
    for name in PATHS:
        print(name, statistics.fmean(r["accuracy"] for r in rows if r["path"] == name))


if __name__ == "__main__":
    main()
