"""The paper's toy as runs of `studies.corpus`: mild and strong shift, five seeds, good settings and bad.

    python -m studies.corpus_toy OUT

Writes OUT/choose.npz and .jsonl.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import torch
from studies.corpus import DRAWS, Kept

from usfan.config import AdaptConfig, RuntimeConfig
from usfan.engine.runtime import start_runtime
from usfan.maths.neighbours import nearest_neighbours
from usfan.store.model import AdaptedModel
from usfan.study.choices import PAPER
from usfan.study.toy import SOURCE_EPOCHS, SOURCE_SETTINGS, table_lines
from usfan.study.toy_points import make_points, point_store
from usfan.training.source import train_source
from usfan.workflow import adapt_model

SEEDS = tuple(range(5))
VALIDATORS = ("entropy", "information_maximization", "diversity")


def all_settings() -> dict[str, dict[str, Any]]:
    """Name of a run → its method and settings: the lines of the toy's table, and three with ten times the rate."""
    lines = table_lines(PAPER[1:])
    for method in ("shot-im", "u-sfan", "u-sfan+"):
        lines[f"{method}, fast"] = {**lines[method], "lr": 10 * AdaptConfig.lr}
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    runtime = start_runtime(RuntimeConfig(device="cpu"))
    corpus = Kept(options.out)
    for seed in SEEDS:
        points, labels, targets = make_points(seed)
        training = {**SOURCE_SETTINGS, "epochs": SOURCE_EPOCHS, "seed": seed}
        source = train_source(point_store(points, labels), runtime=runtime, **training)
        for name, settings in all_settings().items():
            for shift, target in targets.items():
                store = point_store(target)
                model = adapt_model(source, store, runtime=runtime, seed=seed, **settings)
                key = f"toy/{settings['prior']}/{seed}"
                corpus.add(*one_run(model, labels, key, f"toy/{shift}", name, settings))
    corpus.write()
    print(len(corpus.rows["choose"]), "runs")


def one_run(
    model: AdaptedModel,
    labels: torch.Tensor,
    source: str,
    target: str,
    name: str,
    settings: dict[str, Any],
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The row of a run, and its arrays by name."""
    assert model.passes is not None
    before = model.passes.before
    path = torch.stack(model.passes.path)
    right = 100 * (path == labels).double().mean(dim=1)
    key = f"{source}|{target}"
    row = {
        "kind": "toy",
        "source": source,
        "target": target,
        **settings,
        "method": model.method,
        "run": f"{key}|{name}",
        "before": float(right[0]),
        "after": float(right[-1]),
    }
    records = [record["validators"] for record in model.history["records"]]
    draws = model.posterior.draws(before.features, DRAWS).argmax(2)
    arrays = {
        f"{key}|probs": before.probs.half().numpy(),
        f"{key}|posterior": before.posterior_probs.half().numpy(),
        f"{key}|draws": draws.to(torch.int8).numpy(),
        f"{key}|near-source": nearest_neighbours(before.features, 5)[0].to(torch.int16).numpy(),
        f"{target}|{source}|labels": labels.to(torch.int8).numpy(),
        f"{key}|{name}|path": path.to(torch.int8).numpy(),
        f"{key}|{name}|validators": np.array([[r[n] for n in VALIDATORS] for r in records]),
    }
    return row, arrays


if __name__ == "__main__":
    main()
