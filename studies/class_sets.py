"""Which classes does the target show? `--setting auto` against every flag, in five true situations.

    python -m studies.class_sets OUT --data OFFICE31 [--features FILE.npz] [--seeds 2019 2020 2021] [--jobs 16]

Office-31, EfficientNet-Lite0 frozen, U-SFAN++, last iterate. Situations: all 31 classes; 10 of 31 (partial); 10 known
and 11 new (open); 10 shared, 10 only in the source, 11 new (universal); a long tail of 50:1. Splits are those of the
literature; `--split N` takes a random one instead, for choosing rules. OUT/rows.jsonl has one line per run,
OUT/table.md the table. Features are computed once, and kept in FILE.npz if it is given. Labels are used only to score
the runs.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import multiprocessing
import os
import time
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

import usfan
from usfan.adaptation.target_classes import occurring
from usfan.adaptation.thresholds import RARE_CLASS, RARE_CLASS_BESIDE_NEW
from usfan.adaptation.witness import testimony, whole
from usfan.config import RuntimeConfig
from usfan.data.benchmarks.catalogue import BENCHMARKS
from usfan.data.store import Store
from usfan.engine.features import BackboneAlone, features_of
from usfan.engine.passes import engine_store
from usfan.engine.runtime import start_runtime
from usfan.metrics.evaluate import score_outputs
from usfan.models.backbones import PretrainedHead, create_backbone
from usfan.store.model import AdaptedModel
from usfan.training.source import train_source
from usfan.workflow import adapt_model as adapt

BACKBONE = "tf_efficientnet_lite0"
DOMAINS = ("amazon", "dslr", "webcam")
TASKS = tuple(itertools.permutations(DOMAINS, 2))
SITUATIONS = ("all", "partial", "open", "universal", "tail")
FLAGS = ("auto", "closed", "partial", "open", "universal")
TAIL = 50
WEIGHTS = os.environ.get("WEIGHTS", "offline")
"""Of the backbone, which does not move: offline, timm or a file."""


class Features(NamedTuple):
    """Of the N images of a domain."""

    x: Tensor
    """N × F: of crops, what the model sees."""
    y: Tensor
    """N labels."""
    whole: Tensor
    """N × F: of whole images, what the witness sees."""


def load_features(
    data: str | None, file: str | None, network: str = BACKBONE
) -> dict[str, Features]:
    """Of each domain."""
    if file is None or not Path(file).exists():
        runtime = start_runtime(None)
        result = {}
        backbone = create_backbone(network, WEIGHTS)
        for domain in DOMAINS:
            store = engine_store(
                usfan.ImageData(Path(data or ".") / domain), backbone.spec, runtime
            )
            for name, spec in (
                ("x", backbone.spec),
                ("w", whole(backbone.spec, backbone.module)),
            ):
                features = features_of(
                    BackboneAlone(backbone.module), store, spec, runtime
                ).values
                result[f"{domain}.{name}"] = features.half().cpu().numpy()
            result[f"{domain}.y"] = np.asarray(store.labels)
        file = file or f"office31-{network}.npz"
        np.savez(file, **result)
    stored = np.load(file)
    table = {name: torch.from_numpy(stored[name]) for name in stored.files}
    return {
        d: Features(table[f"{d}.x"].float(), table[f"{d}.y"].long(), table[f"{d}.w"].float())
        for d in DOMAINS
    }


@functools.cache
def classes_of(network: str = BACKBONE) -> PretrainedHead | None:
    """The witness's own classifier."""
    return create_backbone(network, WEIGHTS).classifier


def split_of(situation: str, number: int) -> tuple[list[int], list[int]]:
    """Classes of source and target."""
    every = BENCHMARKS["office31"].classes
    if situation in ("all", "tail"):
        return list(range(31)), list(range(31))
    if number:
        order = torch.randperm(
            31, generator=torch.Generator().manual_seed(1000 + number)
        ).tolist()
        shared = order[:10]
        private = order[10:20]
        new = order[20:]
        source = {"partial": list(range(31)), "open": shared, "universal": shared + private}[
            situation
        ]
        return source, shared if situation == "partial" else shared + new
    split = BENCHMARKS["office31"].class_split(situation)
    return [every.index(c) for c in split.source], [every.index(c) for c in split.target]


def long_tail(labels: Tensor, seed: int) -> Tensor:
    """Positions of images whose classes fall off from 1 to 1/50, in random order."""
    generator = torch.Generator().manual_seed(seed)
    kept = []
    for rank, label in enumerate(torch.randperm(31, generator=generator).tolist()):
        group = (labels == label).nonzero().flatten()
        count = max(1, round(len(group) * TAIL ** (-rank / 30)))
        kept.append(group[torch.randperm(len(group), generator=generator)[:count]])
    return torch.cat(kept).sort().values


def store_of(
    features: Features, classes: list[int], known: list[int], rows: Tensor | None
) -> Store:
    """The images of these classes, labelled by their place in `known`; others come after the last. `kept`: their
    positions in the domain."""
    x, y, _ = features
    table = torch.full((31,), len(known))
    table[known] = torch.arange(len(known))
    rows = torch.isin(y, torch.tensor(classes)).nonzero().flatten() if rows is None else rows
    names = tuple(BENCHMARKS["office31"].classes[c] for c in known)
    return Store(x[rows].clone(), rows, table[y[rows]], names)


def one_case(job: tuple[Any, ...]) -> list[dict[str, Any]]:
    situation, seed, source, target, split, features, flags, epochs = job
    torch.set_num_threads(1)
    runtime = start_runtime(RuntimeConfig(device="cpu"))
    known, shown = split_of(situation, split)
    trained = store_of(features[source], known, known, None)
    model = train_source(
        trained,
        backbone=BACKBONE,
        pretrained=WEIGHTS,
        seed=seed,
        epochs=epochs,
        runtime=runtime,
    )
    rows = long_tail(features[target][1], seed) if situation == "tail" else None
    store = store_of(features[target], shown, known, rows)
    true = torch.bincount(store.labels, minlength=len(known) + 1)[: len(known)]
    result = []
    for flag in ("source-only", *flags):
        started = time.perf_counter()
        settings: dict[str, Any] = {
            "guard": False,
            "seed": seed,
            "tune": "new",
            "setting": "closed",
        }
        if flag != "source-only":
            seen = testimony(features[target].whole[store.positions], classes_of())
            settings |= {"method": "u-sfan++", "witness": seen, "setting": flag}
        else:
            settings["method"] = "source-only"
        adapted = adapt(model, store, runtime=runtime, **settings)
        row = {
            "situation": situation,
            "task": f"{source}-{target}",
            "seed": seed,
            "flag": flag,
            "split": split,
        }
        row |= figures(adapted, store, true)
        result.append({**row, "seconds": round(time.perf_counter() - started, 2)})
    return result


def figures(model: AdaptedModel, store: Store, true: Tensor) -> dict[str, Any]:
    assert model.passes is not None
    assert store.labels is not None
    new = bool((store.labels >= len(model.classes)).any())
    scores = score_outputs(model.passes.after, store.labels, model, open_set=new)
    row = {
        name: scores[name]
        for name in ("accuracy", "hos", "os", "os_star", "unknown_accuracy", "auroc_unknown")
        if name in scores
    }
    row["score"] = row["hos"] if new else row["accuracy"]
    shares = true.double() / true.sum()
    predicted = model.passes.after.logits.argmax(dim=1)
    if model.unknown_rule is not None:
        predicted = predicted[~model.unknown_rule.flag(model.passes.after)]
    after = torch.bincount(predicted, minlength=len(true)).double()
    row["tv_after"] = round(
        0.5 * float((after / after.sum().clamp_min(1) - shares).abs().sum()), 4
    )
    row |= {f"{k}_after": v for k, v in occurrence(occurring(after), true > 0).items()}
    situation = model.history.get("classes")
    if situation:
        before = torch.tensor(situation["shares"]).double()
        row |= {
            k: situation[k] for k in ("setting", "explained", "followed", "effective_classes")
        }
        row["tv_before"] = round(0.5 * float((before - shares).abs().sum()), 4)
        least = RARE_CLASS
        if situation["setting"] in ("open", "universal"):
            least = RARE_CLASS_BESIDE_NEW
        result = occurring(before * situation.get("known", 1.0) * len(store), least)
        row |= {f"{k}_before": v for k, v in occurrence(result, true > 0).items()}
    return row


def occurrence(result: Tensor, true: Tensor) -> dict[str, float]:
    right = float((result & true).sum())
    return {
        "precision": round(right / max(1, int(result.sum())), 3),
        "recall": round(right / int(true.sum()), 3),
    }


def table(rows: list[dict[str, Any]]) -> str:
    """Situation by flag: accuracy, or H-score if there are new classes."""
    cells: dict[tuple[str, str], list[float]] = defaultdict(list)
    for row in rows:
        cells[row["situation"], row["flag"]].append(row["score"])
    flags = ["source-only", *FLAGS]
    lines = [
        "| classes of the target | " + " | ".join(flags) + " |",
        "|---|" + "---:|" * len(flags),
    ]
    for situation in SITUATIONS:
        values = [cells.get((situation, flag)) for flag in flags]
        shown = [f"{sum(v) / len(v):.1f}" if v else "–" for v in values]
        lines.append(f"| {situation} | " + " | ".join(shown) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--data")
    parser.add_argument("--features")
    parser.add_argument("--seeds", type=int, nargs="+", default=[2019, 2020, 2021])
    parser.add_argument("--situations", nargs="+", default=list(SITUATIONS))
    parser.add_argument("--flags", nargs="+", default=list(FLAGS))
    parser.add_argument("--tasks", nargs="+", default=["-".join(t) for t in TASKS])
    parser.add_argument("--split", type=int, default=0)
    parser.add_argument("--epochs", type=int, default=40, help="of stage 1")
    parser.add_argument("--jobs", type=int, default=1)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    features = load_features(options.data, options.features)
    jobs = [
        (
            situation,
            seed,
            *task.split("-"),
            options.split,
            features,
            options.flags,
            options.epochs,
        )
        for seed in options.seeds
        for situation in options.situations
        for task in options.tasks
    ]
    rows: list[dict[str, Any]] = []
    with (
        multiprocessing.get_context("fork").Pool(options.jobs) as pool,
        (options.out / "rows.jsonl").open("a") as file,
    ):
        for result in pool.imap_unordered(one_case, jobs):
            rows += result
            file.writelines(json.dumps(row) + "\n" for row in result)
            file.flush()
            print(
                result[0]["situation"],
                result[0]["task"],
                result[0]["seed"],
                {r["flag"]: r["score"] for r in result},
                result[1].get("setting"),
                flush=True,
            )
            (options.out / "table.md").write_text(table(rows))
    print(table(rows))


if __name__ == "__main__":
    main()
