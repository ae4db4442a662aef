"""The search on Office-31 (docs/studies/certainty-weights.md, pseudo-labels.md): every variant of `variants.py` on some
tasks, in several processes.

    python studies/search.py --data ROOT --weights FILE --out DIR [--tasks DA WA AD AW] [--epochs 40] [--seed 2020]

Rows are appended to DIR/rows.jsonl. Labels are used only to score the model after the last epoch.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]
DOMAINS = {"A": "amazon", "D": "dslr", "W": "webcam"}


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", required=True)
    parser.add_argument("--weights", default="offline")
    parser.add_argument("--out", required=True)
    parser.add_argument("--tasks", nargs="+", default=["DA", "WA", "AD", "AW"])
    parser.add_argument("--variants", nargs="+")
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--target-epochs", type=int, default=15)
    parser.add_argument("--seed", type=int, default=2020)
    parser.add_argument("--jobs", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=1e9, help="no new cell after so many")
    parser.add_argument("--images", type=int, help="per class: a tiny run to try the script")
    parser.add_argument("--worker", type=int)
    return parser.parse_args()


def claim(path: Path) -> bool:
    """Whether this process is the first to claim the cell."""
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


class Worker:
    def __init__(self, args: argparse.Namespace, started: float) -> None:
        import torch

        from usfan.compute.runtime import start_runtime
        from usfan.config import RuntimeConfig
        from usfan.data.cache import open_store
        from usfan.data.sources import ImageData

        self.args, self.started, self.out = args, started, Path(args.out)
        self.runtime = start_runtime(RuntimeConfig(compile="graph"))
        self.stores = {}
        for letter in sorted({x for task in args.tasks for x in task}):
            data = ImageData(f"{args.data}/{DOMAINS[letter]}")
            if args.images:
                data = data.subset(
                    torch.cat([(data.labels == c).nonzero().flatten()[: args.images] for c in range(31)])
                )
            self.stores[letter] = open_store(data, size=256, device=self.runtime.device)
        self.emit(what="ready")

    def emit(self, **row: Any) -> None:
        row["t"] = round(time.time() - self.started, 1)
        with open(self.out / "rows.jsonl", "a") as file:
            file.write(json.dumps(row) + "\n")
        shown = {k: v for k, v in row.items() if k != "path"}
        print(self.args.worker, shown, flush=True)

    def run(self) -> None:
        from usfan.artifacts.model import SourceModel

        for letter in sorted({task[0] for task in self.args.tasks}):
            if claim(self.out / f"claim-source-{letter}"):
                self.train(letter)
        self.models: dict[str, SourceModel] = {}
        from studies.variants import VARIANTS

        named = {v.name: v for v in VARIANTS}
        chosen = [named[name] for name in self.args.variants] if self.args.variants else VARIANTS
        for variant in chosen:
            for task in self.args.tasks:
                if time.time() - self.started > self.args.seconds:
                    return
                name = variant.name.replace(" ", "_").replace("/", "_")
                if claim(self.out / f"claim-{name}-{task}"):
                    self.cell(variant, task)

    def train(self, letter: str) -> None:
        from usfan.training.source import train_source

        began = time.time()
        model = train_source(
            self.stores[letter],
            seed=self.args.seed,
            epochs=self.args.epochs,
            patience=0,
            runtime=self.runtime,
            backbone="tf_efficientnet_lite0",
            pretrained=self.args.weights,
        )
        model.save(self.out / f"source-{letter}")
        (self.out / f"ready-{letter}").touch()
        self.emit(what="source", source=letter, seconds=round(time.time() - began, 1))

    def source(self, letter: str) -> Any:
        from usfan.artifacts.model import SourceModel

        if letter not in self.models:
            while not (self.out / f"ready-{letter}").exists():
                time.sleep(0.1)
            self.models[letter] = SourceModel.load(self.out / f"source-{letter}").to(self.runtime.device)
        return self.models[letter]

    def cell(self, variant: Any, task: str) -> None:
        from studies.cells import run_variant

        model, seed = self.source(task[0]), self.args.seed
        stores = {"store": self.stores[task[1]], "source_store": self.stores[task[0]]}
        row = run_variant(variant, model, runtime=self.runtime, **stores, epochs=self.args.target_epochs, seed=seed)
        self.emit(what="cell", task=task, seed=seed, **row)


def main() -> None:
    started, args = time.time(), options()
    if args.worker is not None:
        Worker(args, float(os.environ["STUDY_STARTED"])).run()
        return
    Path(args.out).mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "STUDY_STARTED": str(started)}
    workers = [
        subprocess.Popen([sys.executable, *sys.argv, "--worker", str(i)], env=environment) for i in range(args.jobs)
    ]
    sys.exit(max(worker.wait() for worker in workers))


if __name__ == "__main__":
    main()
