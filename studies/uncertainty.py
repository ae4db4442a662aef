"""Is the Laplace posterior worth it? U-SFAN with its certainty from the posterior, the point estimate, MC dropout and
an ensemble: Office-31, frozen EfficientNet-Lite0, closed and open set. About a quarter of an hour of one CPU core.

    python studies/uncertainty.py ROOT --cache DIR --out docs/results/uncertainty.json

ROOT holds Office-31. All rows of a seed and source start from the same network, except `mc-dropout trained`, whose
network was trained with dropout 0.5 before the last layer; `mc-dropout` uses rate 0.1 on the network trained without
dropout. Figures are those of the model after the last epoch, with the method's own settings. A row has the figures of
the source model (`before_…`) and of the adapted one. Seconds are processor time. Labels are used only for the figures.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

from studies.frozen import CLOSED, OFFICE, office31, only  # noqa: E402
from studies.paths import write_rows  # noqa: E402

import usfan  # noqa: E402
from usfan.config import RuntimeConfig  # noqa: E402
from usfan.data.benchmarks.catalogue import benchmark  # noqa: E402
from usfan.data.store import Store  # noqa: E402
from usfan.engine.runtime import start_runtime  # noqa: E402
from usfan.maths.outputs import Outputs  # noqa: E402
from usfan.metrics.evaluate import score_outputs  # noqa: E402
from usfan.metrics.metrics import calibration_metrics  # noqa: E402
from usfan.store.model import AdaptedModel, SourceModel  # noqa: E402

SEEDS = (2019, 2020, 2021)
CASES: dict[str, dict[str, Any]] = {
    "none (shot-im)": {"method": "shot-im", "uncertainty": "posterior"},
    "point": {"uncertainty": "point"},
    "posterior": {"uncertainty": "posterior"},
    "mc-dropout": {"uncertainty": "mc-dropout", "dropout_rate": 0.1},
    "mc-dropout trained": {"uncertainty": "mc-dropout"},
    "ensemble": {"uncertainty": "ensemble"},
    "point, τ = 1": {"uncertainty": "point", "temperature": 1.0},
    "posterior, τ = 1": {"uncertainty": "posterior", "temperature": 1.0},
    "mc-dropout trained, τ = 1": {"uncertainty": "mc-dropout", "temperature": 1.0},
    "ensemble, τ = 1": {"uncertainty": "ensemble", "temperature": 1.0},
}


def sources(store: Store, seed: int) -> tuple[dict[str, SourceModel], dict[str, float]]:
    """The network, and the one trained with dropout; seconds that each uncertainty costs beyond the network."""
    arguments = {**CLOSED, "seed": seed, "device": "cpu"}
    trained = "mc-dropout trained"
    began = time.process_time()
    usfan.train_source(store, **arguments)
    alone = time.process_time() - began
    began = time.process_time()
    both = usfan.train_source(store, **arguments, uncertainty="ensemble")
    ensemble = time.process_time() - began - alone
    dropout = usfan.train_source(store, **arguments, uncertainty="mc-dropout")
    models = {"": both, trained: dropout, f"{trained}, τ = 1": dropout}
    return models, dict.fromkeys(("ensemble", "ensemble, τ = 1"), round(max(0.0, ensemble), 2))


def figures(
    model: AdaptedModel, outputs: Outputs, store: Store, *, open_set: bool
) -> dict[str, float]:
    """Accuracy of the point estimate; calibration of the predictive as it is used (τ = 0.4) and at τ = 1."""
    assert store.labels is not None
    result = score_outputs(outputs, store.labels, model, open_set=open_set)
    known = store.labels < len(model.classes)
    plain = model.uncertainty.predictive(outputs.features[known], 1.0, model.samples)
    row = {"accuracy": result["accuracy"], "ece": result["posterior_ece"]}
    row |= {
        "ece_plain": calibration_metrics(plain, store.labels[known])["ece"],
        "point_ece": result["ece"],
    }
    if open_set:
        row |= {name: result[name] for name in ("hos", "os_star", "unknown_accuracy")}
        row |= {f"auroc_{name}": area["auroc"] for name, area in result["detection"].items()}
    return {name: round(value, 3) for name, value in row.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("root", type=Path)
    parser.add_argument("--cache")
    parser.add_argument(
        "--settings", nargs="+", choices=("closed", "open"), default=("closed", "open")
    )
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    runtime = start_runtime(RuntimeConfig(device="cpu", cache=options.cache))
    domains = office31(options.root, runtime)
    rows = []
    for setting in options.settings:
        split = benchmark("office31").class_split(setting)
        for seed in options.seeds:
            for source in OFFICE:
                models, extra = sources(only(domains[source], split.source), seed)
                for target in OFFICE.replace(source, ""):
                    store = only(domains[target], split.target, split.source)
                    for case, settings in ((name, CASES[name]) for name in options.cases):
                        arguments = {
                            "method": "u-sfan",
                            **settings,
                            "setting": setting,
                            "seed": seed,
                            "guard": False,
                        }
                        began = time.process_time()
                        model = usfan.adapt(
                            models.get(case, models[""]),
                            store,
                            **arguments,
                            tune="new",
                            progress=False,
                            device="cpu",
                        )
                        seconds = time.process_time() - began
                        assert model.passes is not None
                        row = {
                            "setting": setting,
                            "task": f"{source}→{target}",
                            "seed": seed,
                            "case": case,
                        }
                        after = figures(
                            model, model.passes.after, store, open_set=setting == "open"
                        )
                        before = figures(
                            model, model.passes.before, store, open_set=setting == "open"
                        )
                        row |= after | {f"before_{k}": v for k, v in before.items()}
                        row |= {
                            "seconds": round(seconds, 2),
                            "source_seconds": extra.get(case, 0.0),
                        }
                        rows.append(row)
                        print(
                            {k: v for k, v in row.items() if not k.startswith("before")},
                            flush=True,
                        )
                write_rows(options.out, "python studies/uncertainty.py ROOT --cache DIR", rows)


if __name__ == "__main__":
    main()
