"""Every method on Office-31 with a frozen EfficientNet-Lite0: six tasks, three seeds, one process per source model.

    python -m studies.methods_table OUT --features LITE0.npz [--witness LITE2.npz] [--seeds 2019 2020 2021] [--jobs 16]

`studies.class_sets --features` writes the features. Accuracy is that of the model after the last epoch. All tasks have
the same settings, and labels are used only to score. Beside the methods of `usfan methods` it runs variants of
U-SFAN++: names by the point estimate, no labels, no attraction, a witness that sees crops or gives no class
probabilities, and another network as witness. OUT/rows.jsonl has one line per run, OUT/table.md the table. shot++ is
left out: its first stage rotates the images themselves; so are tent and bn-adapt, which move the backbone.

    python -m studies.methods_table OUT --packed FOLDER [--paper] [--seeds 2019] [--seconds 540] [--jobs 4]

runs every method with full tuning (the recipe's way, `--preset shot`: the whole network moves in both stages) on the
images that `studies.pack` packed, on one GPU; with --paper, the paper's methods by the presets. Source models are
those of `--preset shot`. Runs that OUT/rows.jsonl has are not run again.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from studies.class_sets import (
    BACKBONE,
    DOMAINS,
    TASKS,
    WEIGHTS,
    classes_of,
    load_features,
    store_of,
)
from studies.code import code_of
from studies.families.runs import commit, read_rows

from usfan.adaptation.methods import METHODS
from usfan.adaptation.witness import testimony
from usfan.config import RuntimeConfig
from usfan.engine.runtime import start_runtime
from usfan.metrics.evaluate import score_outputs
from usfan.store.model import SourceModel
from usfan.training.source import train_source
from usfan.workflow import adapt_model as adapt

EVERY = list(range(31))
OTHER = "tf_efficientnet_lite2"
VARIANTS: dict[str, dict[str, Any]] = {
    name: {"method": name}
    for name, method in METHODS.items()
    if not any(term.needs_pixels for term in method.all_terms)
    and method.stage.get("tune") not in ("affine", "norm")
} | {
    "u-sfan++ auto": {"method": "u-sfan++", "setting": "auto"},
    "u-sfan++ point": {"method": "u-sfan++", "uncertainty": "point"},
    "u-sfan++ no labels": {"method": "u-sfan++", "label_weight": 0.0},
    "u-sfan++ no attraction": {"method": "u-sfan++", "attraction": 0.0},
    "u-sfan++ no IM": {"method": "u-sfan++", "objective_scale": 0.0},
}


def one_source(job: tuple[Any, ...]) -> list[dict[str, Any]]:
    seed, source, features, other, epochs, methods = job
    torch.set_num_threads(1)
    runtime = start_runtime(RuntimeConfig(device="cpu"))
    trained = store_of(features[source], EVERY, EVERY, None)
    model = train_source(
        trained,
        backbone=BACKBONE,
        pretrained=WEIGHTS,
        seed=seed,
        epochs=epochs,
        runtime=runtime,
    )
    result = []
    for target in DOMAINS:
        if target == source:
            continue
        store = store_of(features[target], EVERY, EVERY, None)
        seen = testimony(features[target].whole, classes_of())
        runs = [(name, options, seen) for name, options in VARIANTS.items()]
        runs.append(("u-sfan++ crops, features only", {"method": "u-sfan++"}, store.values))
        runs.append(("u-sfan++ features only", {"method": "u-sfan++"}, features[target].whole))
        if other is not None:
            runs.append(
                (
                    "u-sfan++ Lite2",
                    {"method": "u-sfan++"},
                    testimony(other[target].whole, classes_of(OTHER)),
                )
            )
        for name, options, witness in runs:
            if methods and name not in methods:
                continue
            started = time.perf_counter()
            needed = {"witness": witness} if METHODS[options["method"]].needs_witness else {}
            settings = {
                "guard": False,
                "seed": seed,
                "tune": "new",
                "setting": "closed",
                **needed,
                **options,
            }
            adapted = adapt(model, store, runtime=runtime, **settings)
            assert adapted.passes is not None
            scores = score_outputs(adapted.passes.after, store.labels, adapted)  # type: ignore[arg-type]
            row = {"method": name, "task": f"{source}-{target}", "seed": seed}
            row |= {k: round(scores[k], 2) for k in ("accuracy", "ece", "posterior_ece")}
            row |= {"settings": options, "commit": commit()}
            row |= {"code": code_of(options["method"])}
            result.append({**row, "seconds": round(time.perf_counter() - started, 2)})
    return result


SLOW = ("lsc", "cowa", "shot++")  # last, in case the time does not suffice
FIELD = {
    name: {"method": name, "preset": "shot"}
    for name in (*(method for method in METHODS if method not in SLOW), *SLOW)
}
OURS = {"tune": "all", "guard": False, "setting": "closed"}
PAPER: dict[str, dict[str, Any]] = {
    "source-only": FIELD["source-only"],
    "shot-im": FIELD["shot-im"],
    "shot": FIELD["shot"],
    "u-sfan (authors)": {"method": "u-sfan", "preset": "authors"},
    "u-sfan (default)": {"method": "u-sfan", **OURS},
    "u-sfan+ (default)": {"method": "u-sfan+", **OURS},
    "u-sfan (paper)": {"method": "u-sfan", "preset": "paper"},
}
TUNED: dict[str, Any] = {}  # of one process: pixels by domain, the runtime


def begin_tuning(packed: str, out: Path) -> None:
    from studies.corpus import Data

    torch.set_num_threads(2)
    data = Data(Path(packed), out / "pixels", 1)
    TUNED.update(
        {domain: data.store(f"office31/{domain}") for domain in DOMAINS},
        runtime=start_runtime(None),
    )


def tune_source(job: tuple[Any, ...]) -> None:
    seed, source, folder, epochs = job
    settings = {"preset": "shot", "seed": seed, "runtime": TUNED["runtime"], "epochs": epochs}
    train_source(TUNED[source], backbone=BACKBONE, pretrained=WEIGHTS, **settings).save(folder)


def tune_target(job: tuple[Any, ...]) -> dict[str, Any] | None:
    seed, source, target, case, options, folder, ends = job
    if time.time() > ends:
        return None
    started = time.perf_counter()
    method = options["method"]
    witness = {"witness": f"{BACKBONE}:{WEIGHTS}"} if METHODS[method].needs_witness else {}
    settings = {**options, "seed": seed, "runtime": TUNED["runtime"], **witness}
    adapted = adapt(SourceModel.load(folder), TUNED[target], **settings)
    assert adapted.passes is not None
    scores = score_outputs(adapted.passes.after, TUNED[target].labels, adapted)  # type: ignore[arg-type]
    row = {"method": case, "task": f"{source}-{target}", "seed": seed}
    row |= {"accuracy": round(scores["accuracy"], 2), "settings": options}
    row |= {"commit": commit(), "code": code_of(method)}
    return {**row, "seconds": round(time.perf_counter() - started, 2)}


def full_tuning(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Every case from fine-tuned source models, the whole network moving. Runs that share the GPU take turns on it,
    so their seconds are upper bounds."""
    from studies.corpus import Data

    ends = time.time() + options.seconds
    saved = options.out / "rows.jsonl"
    rows = read_rows(saved)
    done = {(row["seed"], row["task"], row["method"]) for row in rows}
    data = Data(Path(options.packed), options.out / "pixels", options.jobs)
    for domain in DOMAINS:
        data.store(f"office31/{domain}")
    cases = PAPER if options.paper else FIELD
    jobs = [
        (seed, *task, case, cases[case], options.out / f"{seed}-{task[0]}", ends)
        for seed in options.seeds
        for case, task in itertools.product(cases, TASKS)
        if (seed, "-".join(task), case) not in done
    ]
    sources = dict.fromkeys(
        (seed, source, folder, options.epochs)
        for seed, source, _, _, _, folder, _ in jobs
        if not folder.is_dir()
    )
    start = multiprocessing.get_context("spawn").Pool
    with (
        start(options.jobs, begin_tuning, (options.packed, options.out)) as pool,
        saved.open("a") as f,
    ):
        pool.map(tune_source, sources, chunksize=1)
        print(f"source models after {options.seconds - ends + time.time():.0f} s", flush=True)
        for row in pool.imap_unordered(tune_target, jobs):
            if row is not None:
                rows.append(row)
                f.write(json.dumps(row) + "\n")
                f.flush()
                print(row, flush=True)
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    tasks = ["-".join(task) for task in TASKS]
    lines = [
        "| method | " + " | ".join(tasks) + " | mean | by seed | s |",
        "|---|" + "---:|" * (len(tasks) + 3),
    ]
    by: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        by[row["method"]].append(row)
    for method, group in by.items():
        each = [[r["accuracy"] for r in group if r["task"] == task] for task in tasks]
        if not all(each):
            continue
        means = [sum(v) / len(v) for v in each]
        seeds = [
            [r["accuracy"] for r in group if r["seed"] == s]
            for s in sorted({r["seed"] for r in group})
        ]
        shown = " ".join(f"{sum(v) / len(v):.1f}" for v in seeds)
        seconds = sum(r["seconds"] for r in group) / len(group)
        cells = " | ".join(f"{m:.1f}" for m in means)
        lines.append(
            f"| {method} | {cells} | {sum(means) / len(means):.2f} | {shown} | {seconds:.1f} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--features")
    parser.add_argument("--packed")
    parser.add_argument("--paper", action="store_true", help="the paper's methods")
    parser.add_argument("--seconds", type=float, default=540)
    parser.add_argument("--witness")
    parser.add_argument("--seeds", type=int, nargs="+", default=[2019, 2020, 2021])
    parser.add_argument("--epochs", type=int, default=100, help="of stage 1, at most")
    parser.add_argument("--methods", nargs="+", help="of the frozen table; all by default")
    parser.add_argument("--jobs", type=int, default=1)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.packed:
        print(table(full_tuning(options)))
        return
    features = load_features(None, options.features)
    other = load_features(None, options.witness, OTHER) if options.witness else None
    jobs = [
        (seed, source, features, other, options.epochs, options.methods)
        for seed in options.seeds
        for source in DOMAINS
    ]
    rows: list[dict[str, Any]] = []
    with (
        multiprocessing.get_context("fork").Pool(options.jobs) as pool,
        (options.out / "rows.jsonl").open("w") as file,
    ):
        for result in pool.imap_unordered(one_source, jobs):
            rows += result
            file.writelines(json.dumps(row) + "\n" for row in result)
            file.flush()
            (options.out / "table.md").write_text(table(rows))
    print(table(rows))


if __name__ == "__main__":
    main()
