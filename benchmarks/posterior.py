"""The posterior: fit against laplace-torch, certainty against draws of the weights, memory, and how all of it scales.

Promised: fit 15 times faster than laplace-torch at N 15,500, D 256, K 65; certainty at K 345, B 64, M 128 10 times
faster than draws of the weights, 20 times with factored damping; memory that grows with M·B·K, never with K·D·M.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator

import torch
from torch import Tensor

from measure import Row, best_time, one_time, peak_memory
from posterior_peers import BACKENDS, WeightDraws, laplace_fit
from usfan.uncertainty.kronecker import KroneckerPosterior

DIMENSIONS = 256
BATCH = 64
SAMPLES = 128


def problem(
    samples: int, classes: int, dimensions: int = DIMENSIONS
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gaussian classes and the classifier that fits them: features, logits, weight, bias, labels."""
    generator = torch.Generator().manual_seed(0)
    means = torch.randn(classes, dimensions, generator=generator) * 6 / dimensions**0.5
    labels = torch.randint(classes, (samples,), generator=generator)
    features = means[labels] + torch.randn(samples, dimensions, generator=generator)
    weight = 0.5 * means
    bias = -0.25 * means.square().sum(dim=1)
    return features, features @ weight.T + bias, weight, bias, labels


def fitted(
    classes: int, damping: str = "exact", dimensions: int = DIMENSIONS
) -> tuple[KroneckerPosterior, Tensor]:
    """A posterior, and a batch for it."""
    features, logits, weight, bias, _ = problem(4000, classes, dimensions)
    return KroneckerPosterior.fit(features, logits, weight, bias, damping=damping), features[
        :BATCH
    ]


def fit_rows() -> Iterator[Row]:
    group = f"fit, N 15,500, D {DIMENSIONS}, K 65"
    features, logits, weight, bias, labels = problem(15_500, 65)
    ours = best_time(lambda: KroneckerPosterior.fit(features, logits, weight, bias))
    posterior = KroneckerPosterior.fit(features, logits, weight, bias)
    yield Row(group, "usfan, with the prior by evidence", ours, ratio=1.0)
    times: dict[str, float] = {}
    for backend in BACKENDS:
        try:
            times[backend], agreement = laplace_row(
                backend, features, labels, weight, bias, posterior
            )
        except (NotImplementedError, RuntimeError, AttributeError, ImportError) as error:
            yield Row(
                group,
                f"laplace-torch {backend}",
                None,
                note=f"does not run: {str(error).splitlines()[0]}",
            )
            continue
        yield Row(
            group,
            f"laplace-torch {backend}",
            times[backend],
            ratio=times[backend] / ours,
            note=agreement,
        )
    for label, names in (
        ("fastest with the same matrix (GGN)", "GGN"),
        ("fastest of all, EF too", ""),
    ):
        best = min((name for name in times if name.endswith(names)), key=times.__getitem__)
        yield Row(group, f"{label}: {best}", times[best], ratio=times[best] / ours, wanted=15)


def laplace_row(
    backend: str,
    features: Tensor,
    labels: Tensor,
    weight: Tensor,
    bias: Tensor,
    posterior: KroneckerPosterior,
) -> tuple[float, str]:
    """The best time of a backend over two batch sizes, and how far the eigenvalues of its B are from ours."""
    classes, _ = laplace_fit(backend, features, labels, weight, bias, len(features))
    result = torch.linalg.eigvalsh(classes.double())
    off = float((result - posterior.class_values).norm() / posterior.class_values.norm())
    best = math.inf
    for batch in (len(features), 4096):
        run = functools.partial(laplace_fit, backend, features, labels, weight, bias, batch)
        once = one_time(run)
        best = min(best, once, best_time(run) if once < 1000 else once)
        if once > 3000:
            break
    return best, f"its B is off by {off:.0e}"


def certainty_rows() -> Iterator[Row]:
    for damping, classes in itertools.product(("exact", "factored"), (12, 65, 345)):
        posterior, batch = fitted(classes, damping)
        group = f"certainty, {damping}, K {classes}, B {BATCH}, M {SAMPLES}"
        wanted = {"exact": 10.0, "factored": 20.0}[damping] if classes == 345 else None
        ours = best_time(lambda p=posterior, b=batch: p.certainty(b))
        yield Row(group, f"usfan, fixed draws, rank {len(posterior.basis)}", ours, ratio=1.0)
        generator = torch.Generator().manual_seed(0)
        fresh = best_time(lambda p=posterior, b=batch, g=generator: p.certainty(b, generator=g))
        yield Row(group, "usfan, fresh draws", fresh, ratio=fresh / ours)
        first = best_time(
            lambda p=posterior, b=batch: p.with_prior(p.prior_precision).certainty(b)
        )
        yield Row(
            group,
            "usfan, first call",
            first,
            ratio=first / ours,
            note="makes the basis and the table of draws",
        )
        for rotated, name in (
            (True, "draws of the weights"),
            (False, "the same, left in the eigenbasis"),
        ):
            draws = WeightDraws(posterior, rotated=rotated)
            value = best_time(lambda d=draws, b=batch: d.certainty(b, samples=SAMPLES))
            yield Row(
                group, name, value, ratio=value / ours, wanted=wanted if rotated else None
            )


def memory_rows() -> Iterator[Row]:
    group = f"peak memory of certainty, B {BATCH}, exact"
    for classes, dimensions, samples in (
        (65, 256, 128),
        (345, 256, 128),
        (345, 1024, 128),
        (345, 256, 512),
    ):
        posterior, batch = fitted(classes, dimensions=dimensions)
        case = f"K {classes}, D {dimensions}, M {samples}"
        # A copy without tables: the first call makes them, and they count.
        ours = peak_memory(
            lambda p=posterior, b=batch, m=samples: p.with_prior(1.0).certainty(b, samples=m)
        )
        limit = 4 * samples * BATCH * classes / 2**20
        yield Row(
            group, f"usfan, {case}", ours, "MiB", 1.0, note=f"M·B·K numbers: {limit:.0f} MiB"
        )
        draws = WeightDraws(posterior)
        theirs = peak_memory(lambda d=draws, b=batch, m=samples: d.certainty(b, samples=m))
        yield Row(group, f"draws of the weights, {case}", theirs, "MiB", theirs / ours)


def scaling_rows() -> Iterator[Row]:
    for samples, classes in (
        (4_000, 65),
        (16_000, 65),
        (64_000, 65),
        (16_000, 12),
        (16_000, 345),
    ):
        options = problem(samples, classes)[:4]
        value = best_time(lambda g=options: KroneckerPosterior.fit(*g), seconds=0.5)
        yield Row(f"fit, D {DIMENSIONS}", f"N {samples:,}, K {classes}", value)
    for classes, samples in (
        (12, 128),
        (65, 128),
        (345, 128),
        (1000, 128),
        (345, 32),
        (345, 512),
    ):
        posterior, batch = fitted(classes)
        value = best_time(
            lambda p=posterior, b=batch, m=samples: p.certainty(b, samples=m), seconds=0.5
        )
        yield Row(f"certainty, exact, B {BATCH}", f"K {classes}, M {samples}", value)


def suite() -> Iterator[Row]:
    yield from fit_rows()
    yield from certainty_rows()
    yield from memory_rows()
    yield from scaling_rows()
