"""The guard on the toy: validators of the source model and of adapted models, flipped ones among them.

    python studies/guard_toy.py [--seeds 20] [--out FILE.json]

Each method runs at the usual learning rate and at ten times that. A run is looked at every 50 steps, as `adapt` looks
at each epoch. Labels serve for the accuracy alone.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from usfan.reproduce.toy import model as toy
from usfan.reproduce.toy.adapt import VARIANTS, StackedPosterior, adapt_stack
from usfan.reproduce.toy.experiment import train_sources
from usfan.reproduce.toy.model import SHIFTS, StackedMLP, make_domains
from usfan.scoring.neighbours import nearest_neighbours
from usfan.scoring.validators import validate

LOOKS = 10
SAVED = (
    "accuracy",
    "information_maximization",
    "soft_neighbourhood_density",
    "source_neighbours",
    "drift",
    "certain_drift",
    "doubtful_drift",
)
METHODS = ("shot-im", "shot-im-entropy", "shot", "u-sfan", "u-sfan+", "u-sfan (evidence)", "u-sfan (paper)")


def path_of(
    source: StackedMLP, posterior: StackedPosterior, points: torch.Tensor, labels: torch.Tensor, name: str, rate: float
) -> list[dict[str, list[float]]]:
    """Per seed: accuracy and validators after 0, 50, … steps."""
    before_features, before_logits = source.outputs(points)
    before = before_logits.softmax(dim=1)
    before_posterior = posterior.predictive(before_features)
    neighbours = [nearest_neighbours(z.T, 5)[0] for z in before_features]
    paths: list[dict[str, list[float]]] = [{} for _ in range(len(points))]

    def look(step: int, network: StackedMLP) -> None:
        if step % (toy.TARGET_STEPS // LOOKS):
            return
        features, logits = network.outputs(points)
        probs, certain = logits.softmax(dim=1), posterior.predictive(features)
        for s, path in enumerate(paths):
            figures = validate(
                probs[s].T,
                features[s].T,
                source_probs=before[s].T,
                source_posterior_probs=before_posterior[s].T,
                source_neighbours=neighbours[s],
                posterior_probs=certain[s].T,
            )
            figures["accuracy"] = 100 * float((logits[s].argmax(dim=0) == labels[s]).double().mean())
            for key in SAVED:
                path.setdefault(key, []).append(round(figures[key], 3))

    look(0, source)
    adapt_stack(source, posterior, points, VARIANTS[name], learning_rate=rate, look=look)
    return paths


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=20, help="how many")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    seeds = tuple(range(options.first, options.first + options.seeds))
    domains = make_domains(seeds)
    source = train_sources(seeds, toy.SOURCE_STEPS, lambda steps: None)
    rows: list[dict[str, Any]] = []
    for name in METHODS:
        posterior = StackedPosterior.fit(source, domains.source, VARIANTS[name].prior, VARIANTS[name].samples)
        for shift in SHIFTS:
            for factor in (1, 10) if name in ("shot-im", "u-sfan") else (1,):
                rate = factor * toy.LEARNING_RATE
                paths = path_of(source, posterior, domains.targets[shift], domains.labels, name, rate)
                what = {"data": "toy", "task": shift, "method": name, "setting": "lr x10" if factor > 1 else "default"}
                rows += [{**what, "seed": s, "path": path} for s, path in zip(seeds, paths, strict=True)]
                last = [path["accuracy"][-1] for path in paths]
                print(name, shift, factor, f"{sum(last) / len(last):.1f}", flush=True)
    if options.out:
        head = '{"command": "python studies/guard_toy.py", "rows": [\n'
        options.out.write_text(head + ",\n".join(json.dumps(r, ensure_ascii=False) for r in rows) + "\n]}\n")


if __name__ == "__main__":
    main()
