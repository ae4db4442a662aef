"""The paper's toy as runs of `studies.corpus`: mild and strong shift, five seeds, good settings and bad.

    python -m studies.corpus_toy OUT

Ten moments of each run stand for its epochs.
Writes OUT/choose.npz and .jsonl.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import torch
from studies.corpus import DRAWS, Kept

from usfan.posterior.kronecker import KroneckerPosterior
from usfan.reproduce.toy.adapt import VARIANTS, StackedPosterior, adapt_stack
from usfan.reproduce.toy.experiment import train_sources
from usfan.reproduce.toy.model import LEARNING_RATE, SHIFTS, SOURCE_STEPS, TARGET_STEPS, StackedMLP, make_domains
from usfan.scoring.neighbours import nearest_neighbours
from usfan.scoring.validators import validate

SEEDS = tuple(range(5))
MOMENTS = 10
BAD: list[dict[str, Any]] = [{"method": name, "lr": 10 * LEARNING_RATE} for name in ("shot-im", "u-sfan", "u-sfan+")]
SETTINGS: list[dict[str, Any]] = [
    *({"method": name} for name in VARIANTS if name not in ("source-only", "u-sfan (paper)")),
    {"method": "u-sfan (paper)", "preset": "paper"},
    *BAD,
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    domains, source = make_domains(SEEDS), train_sources(SEEDS, SOURCE_STEPS, lambda steps: None)
    kept = Kept(given.out)
    for settings in SETTINGS:
        variant = VARIANTS[settings["method"]]
        posterior = StackedPosterior.fit(source, domains.source, variant.prior, variant.samples)
        for shift in SHIFTS:
            points, moments = domains.targets[shift], [source.outputs(domains.targets[shift])]

            def look(step: int, network: StackedMLP, points: Any = points, moments: Any = moments) -> None:
                if step % (TARGET_STEPS // MOMENTS) == 0:
                    moments.append(network.outputs(points))

            rate = settings.get("lr", LEARNING_RATE)
            adapt_stack(source, posterior, points, variant, learning_rate=rate, look=look)
            predictive = posterior.predictive(moments[0][0])
            own = source.outputs(domains.source)
            for place, seed in enumerate(SEEDS):
                one = KroneckerPosterior.fit(
                    own[0][place].T, own[1][place].T, source.head[place].detach(), None, variant.prior
                )
                row, arrays = one_run(
                    [(features[place].T, logits[place].T) for features, logits in moments],
                    predictive[place].T,
                    one,
                    domains.labels[place],
                    f"toy/{variant.prior}/{seed}",
                    f"toy/{shift}",
                    settings,
                )
                kept.add(row, arrays)
    kept.write()
    print(len(kept.rows["choose"]), "runs")


def one_run(
    moments: list[tuple[torch.Tensor, torch.Tensor]],
    predictive: torch.Tensor,
    posterior: KroneckerPosterior,
    labels: torch.Tensor,
    source: str,
    target: str,
    settings: dict[str, Any],
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    (first, logits), after = moments[0], moments[-1][1]
    right = [100 * float((o.argmax(1) == labels).double().mean()) for o in (logits, after)]
    key, name = f"{source}|{target}", f"{source}|{target}|{settings['method']} {settings.get('lr', '')}"
    figures = [validate(o.softmax(1)) for _, o in moments]
    row = {"kind": "toy", "source": source, "target": target, "tune": "all", **settings, "run": name}
    row |= {"before": right[0], "after": right[1], "setting": "closed"}
    arrays = {
        f"{key}|probs": logits.softmax(1).half().numpy(),
        f"{key}|posterior": predictive.half().numpy(),
        f"{key}|draws": posterior.draws(first, DRAWS).argmax(2).to(torch.int8).numpy(),
        f"{key}|near-source": nearest_neighbours(first, 5)[0].to(torch.int16).numpy(),
        f"{target}|{source}|labels": labels.to(torch.int8).numpy(),
        f"{name}|path": torch.stack([o.argmax(1) for _, o in moments]).to(torch.int8).numpy(),
        f"{name}|validators": np.array(
            [[f["entropy"], f["information_maximization"], f["diversity"]] for f in figures]
        ),
    }
    return row, arrays


if __name__ == "__main__":
    main()
