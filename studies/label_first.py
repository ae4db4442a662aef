"""Is a label worth more on an image that `label_first` chose than on one drawn at random?

    python studies/label_first.py office31 DATA --work DIR --out docs/results/label-first-office31.json
    python studies/label_first.py digits --out docs/results/label-first-digits.json

For each task and seed: a source model is trained and adapted without labels by the default method, as `usfan train` and
`usfan adapt --guard off` do. From the adapted model's predictions, never from labels, each rule then chooses as many
images as there are classes, and the source model is adapted again with the labels of these images (`--labels`).
Accuracy is measured on the images that no rule chose, so that all rules are compared on the same images.

Rules: random and label_first; with `--rules`, doubt (the largest entropy of the posterior predictive) and clusters
(k-means, no weights) too.

office31: EfficientNet-Lite0 with a frozen backbone; DATA holds amazon, dslr and webcam. Features are kept in --work.
digits: MNIST (5,000 images) and the UCI digits (1,797), both ways, the demo's network and epochs; everything moves.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import usfan
from usfan.config import RuntimeConfig
from usfan.data.store import Store
from usfan.engine.features import BackboneAlone, features_of
from usfan.engine.passes import engine_store
from usfan.engine.runtime import Runtime, start_runtime
from usfan.maths.label_first import label_first
from usfan.maths.objectives import entropy
from usfan.maths.outputs import Outputs
from usfan.models.backbones import create_backbone
from usfan.study.digits import TARGET_EPOCHS, load_mnist5k, load_uci, train_digits

RULES = ("random", "doubt", "clusters", "label_first")
BACKBONE = "tf_efficientnet_lite0"
Task = tuple[str, int, Any, Store, dict[str, Any]]
"""Name, seed, source model, target with labels, settings of `adapt`."""


def office31(options: argparse.Namespace, runtime: Runtime) -> Iterator[Task]:
    domains = {name: features(options, name, runtime) for name in ("amazon", "dslr", "webcam")}
    for source, seed in itertools.product(domains, range(options.seeds)):
        settings = {"backbone": BACKBONE, "pretrained": "offline", "tune": "new", "seed": seed}
        model = usfan.train_source(domains[source], runtime=runtime, progress=False, **settings)
        for target in domains:
            if target != source:
                yield f"{source}→{target}", seed, model, domains[target], {}


def features(options: argparse.Namespace, domain: str, runtime: Runtime) -> Store:
    """Features of the frozen backbone, from the file of an earlier run or computed now."""
    data = usfan.ImageData(options.data / domain)
    file = options.work / f"{domain}.safetensors"
    if not file.is_file():
        backbone = create_backbone(BACKBONE, "offline")
        store = engine_store(data, backbone.spec, runtime)
        result = features_of(BackboneAlone(backbone.module), store, backbone.spec, runtime)
        assert result.labels is not None
        save_file({"features": result.values.contiguous(), "labels": result.labels}, file)
    kept = load_file(file)
    return Store(
        kept["features"], torch.arange(len(kept["labels"])), kept["labels"], data.classes
    )


def digits(options: argparse.Namespace, runtime: Runtime) -> Iterator[Task]:
    sets = {"mnist": load_mnist5k(), "uci": load_uci()}
    for (source, target), seed in itertools.product(
        itertools.permutations(sets), range(options.seeds)
    ):
        model = train_digits(sets[source], source, runtime, seed=seed)
        store = engine_store(sets[target], model.spec, runtime)
        yield f"{source}→{target}", seed, model, store, {"epochs": TARGET_EPOCHS[target]}


def choices(outputs: Outputs, count: int, seed: int) -> dict[str, Tensor]:
    even = torch.full_like(outputs.posterior_probs, 1 / outputs.posterior_probs.shape[1])
    plain = Outputs(
        outputs.features, outputs.logits, outputs.probs, even, outputs.mutual_information
    )
    generator = torch.Generator().manual_seed(1000 + seed)
    return {
        "random": torch.randperm(len(outputs), generator=generator)[:count],
        "doubt": entropy(outputs.posterior_probs).topk(count).indices,
        "clusters": label_first(plain, count, seed=seed),
        "label_first": label_first(outputs, count, seed=seed),
    }


def run(task: Task, rules: tuple[str, ...], runtime: Runtime) -> dict[str, Any]:
    name, seed, source, store, settings = task
    labels = store.labels
    assert labels is not None
    settings = {
        **settings,
        "seed": seed,
        "guard": False,
        "runtime": runtime,
        "progress": False,
    }
    plain = usfan.adapt(source, store, **settings)
    result = choices(plain.passes.after, len(source.classes), seed)
    chosen = {rule: result[rule] for rule in rules}
    judged = torch.ones(len(store), dtype=torch.bool)
    judged[torch.cat(list(chosen.values()))] = False

    def accuracy(outputs: Outputs) -> float:
        return round(
            100 * float((outputs.logits.argmax(dim=1).cpu() == labels)[judged].double().mean()),
            3,
        )

    row = {
        "task": name,
        "seed": seed,
        "method": plain.method,
        "images": len(store),
        "judged": int(judged.sum()),
    }
    row |= {"source": accuracy(plain.passes.before), "adapted": accuracy(plain.passes.after)}
    for rule, picked in chosen.items():
        table = torch.full((len(store),), -1)
        table[picked] = labels[picked]
        row[rule] = accuracy(usfan.adapt(source, store, labels=table, **settings).passes.after)
        row[f"{rule}_classes"] = len(labels[picked].unique())
    return row


def summary(rows: list[dict[str, Any]], names: tuple[str, ...]) -> dict[str, Any]:
    gains = [r["label_first"] - r["random"] for r in rows]
    by_seed = [statistics.fmean(g for r, g in zip(rows, gains, strict=True) if r["seed"] == seed) for seed in
               sorted({r["seed"] for r in rows})]  # fmt: skip
    return {
        "mean": {name: round(statistics.fmean(r[name] for r in rows), 2) for name in names},
        "label_first_over_random": {
            "mean": round(statistics.fmean(gains), 2),
            "by_seed": [round(gain, 2) for gain in by_seed],
            "better": sum(g > 0 for g in gains),
            "worse": sum(g < 0 for g in gains),
            "of": len(gains),
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("benchmark", choices=("office31", "digits"))
    parser.add_argument("data", type=Path, nargs="?")
    parser.add_argument("--work", type=Path, default=Path())
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rules", nargs="+", choices=RULES, default=("random", "label_first"))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    runtime = start_runtime(RuntimeConfig(device="cpu"))
    rows = []
    names = ("source", "adapted", *options.rules)
    for task in {"office31": office31, "digits": digits}[options.benchmark](options, runtime):
        started = time.perf_counter()
        rows.append(run(task, tuple(options.rules), runtime))
        print(json.dumps(rows[-1]), f"{time.perf_counter() - started:.0f} s", flush=True)
    command = f"python studies/label_first.py {options.benchmark}{' DATA --work DIR' if options.data else ''}"
    figures = {
        "what": "accuracy in % on the images that no rule chose, after adapting with one label per class",
        "command": command,
        **summary(rows, names),
        "rows": rows,
    }
    print(json.dumps({k: v for k, v in figures.items() if k != "rows"}, indent=2))
    if options.out is not None:
        options.out.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
