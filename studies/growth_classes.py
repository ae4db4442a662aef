"""How the posterior grows with the number of classes: seconds and memory, each case in a process of its own.

    python -m studies.growth_classes OUT.json [--classes 10 100 1000 10000] [--threads 2]

4,000 images with 256 features, as behind the default bottleneck. One line per number of classes K: seconds of the fit
(the prior by evidence), seconds of the predictive of 64 images with 128 draws, the tensors of the posterior in MiB, and
the peak memory of the process less what it takes before.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import resource
import time
from pathlib import Path

import torch

from usfan.uncertainty.kronecker import KroneckerPosterior

IMAGES = 4_000
WIDTH = 256
BATCH = 64


def peak() -> float:
    """MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


def measure(classes: int, threads: int) -> dict[str, float]:
    torch.set_num_threads(threads)
    generator = torch.Generator().manual_seed(0)
    means = torch.randn(classes, WIDTH, generator=generator) * 6 / WIDTH**0.5
    labels = torch.randint(classes, (IMAGES,), generator=generator)
    features = means[labels] + torch.randn(IMAGES, WIDTH, generator=generator)
    weight = 0.5 * means
    bias = -0.25 * means.square().sum(dim=1)
    logits = features @ weight.T + bias
    before = peak()
    started = time.perf_counter()
    posterior = KroneckerPosterior.fit(features, logits, weight, bias)
    fitted = time.perf_counter()
    fit_memory = peak() - before
    posterior.predictive(features[:BATCH], 1.0)  # sets up what all batches share
    first = time.perf_counter()
    posterior.predictive(features[:BATCH], 1.0)
    again = time.perf_counter()
    shapes = posterior.posterior_shapes(classes, WIDTH, bias=True)
    numbers = sum(math.prod(shape) for shape in shapes.values())
    return {
        "classes": classes,
        "threads": threads,
        "fit_s": round(fitted - started, 3),
        "set_up_s": round(first - fitted, 3),
        "predictive_s": round(again - first, 4),
        "stored_mib": round(numbers * 4 / 2**20, 1),
        "fit_mib": round(fit_memory),
        "peak_mib": round(peak() - before),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--classes", type=int, nargs="+", default=[10, 100, 1_000, 10_000])
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    rows = []
    for classes in options.classes:
        with context.Pool(1) as pool:
            rows.append(pool.apply(measure, (classes, options.threads)))
        print(rows[-1], flush=True)
        options.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
