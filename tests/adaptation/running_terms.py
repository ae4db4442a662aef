"""Terms of stage 2 outside a run, in float64: a target of random outputs, batches of it, and processes as threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from usfan.adaptation.certainty import Certainty
from usfan.adaptation.guidance import Guidance, Split
from usfan.adaptation.terms.term import Context, Term
from usfan.engine.loop import Batch
from usfan.engine.runtime import Runtime
from usfan.maths.outputs import Outputs

ALONE = Runtime(torch.device("cpu"))


def outputs(
    logits: Tensor, features: Tensor | None = None, posterior_logits: Tensor | None = None
) -> Outputs:
    """A pass over a target; without features the logits are taken for them."""
    posterior = (
        (logits if posterior_logits is None else posterior_logits).double().softmax(dim=1)
    )
    features = (logits if features is None else features).double()
    return Outputs(
        features,
        logits.double(),
        logits.double().softmax(dim=1),
        posterior,
        torch.zeros(len(logits)),
    )


def random_target(
    samples: int = 40, classes: int = 4, width: int = 5, seed: int = 0
) -> Outputs:
    """Classes that overlap, and predictions that follow them in part."""
    draw = torch.Generator().manual_seed(seed)
    labels = torch.randint(classes, (samples,), generator=draw)
    centres = 1.5 * torch.randn(classes, width, generator=draw)
    features = centres[labels] + torch.randn(samples, width, generator=draw)
    logits = 1.5 * torch.nn.functional.one_hot(labels, classes) + torch.randn(
        samples, classes, generator=draw
    )
    return outputs(logits, features, logits + torch.randn(samples, classes, generator=draw))


def running(term: Term, target: Outputs, *, runtime: Runtime = ALONE, seed: int = 0) -> Any:
    """The term after the first look at the target, at the start of its first epoch."""
    count, classes = target.logits.shape
    guidance = Guidance(count, Certainty(), Split(), "closed", runtime, None, 8)  # type: ignore[arg-type]
    guidance.known = guidance.known.double()
    started = term.started(Context(count, classes, runtime, 3, seed, guidance, target))
    started.refresh(target)
    started.begin_epoch(0)
    return started


@dataclass
class Network:
    """Linear layers in the place of a network: pictures 2×2 of one channel, or rows, to features and logits."""

    width: int
    classes: int
    parameters: tuple[Tensor, Tensor] = field(init=False)

    def __post_init__(self) -> None:
        draw = torch.Generator().manual_seed(1)
        shapes = ((4, self.width), (self.width, self.classes))
        self.parameters = tuple(  # type: ignore[assignment]
            torch.randn(shape, generator=draw, dtype=torch.float64).requires_grad_()
            for shape in shapes
        )

    def __call__(self, images: Tensor) -> tuple[Tensor, Tensor]:
        first, second = self.parameters
        features = images.flatten(1) @ first
        return features, features @ second


def pictures(count: int, seed: int = 2) -> Tensor:
    return torch.randn(
        count, 1, 2, 2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )


def a_batch(
    samples: Tensor,
    images: Tensor,
    forward: Callable[[Tensor], tuple[Tensor, Tensor]],
    done: float = 0.3,
) -> Batch:
    """The views `images` of `samples`, as a step sees them."""
    features, logits = forward(images)
    return Batch(
        samples, images, features, logits, torch.tensor(done, dtype=torch.float64), forward
    )


@dataclass(frozen=True)
class Together(Runtime):
    """One of several processes, which are threads here: they wait for each other where a sum is taken."""

    barrier: Any = None
    shared: Any = None

    def total(self, values: Tensor) -> Tensor:
        self.shared[self.rank] = values.detach().clone()
        self.barrier.wait(timeout=10)
        whole = sum(self.shared)
        self.barrier.wait(timeout=10)
        return whole  # type: ignore[return-value]


def in_threads(world: int, work: Callable[[Runtime], Any]) -> list[Any]:
    """What `work` gives in each of so many processes."""
    barrier = threading.Barrier(world)
    shared = [None] * world
    results = [None] * world
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            runtime = Together(
                torch.device("cpu"), rank=rank, world=world, barrier=barrier, shared=shared
            )
            results[rank] = work(runtime)
        except BaseException as error:
            errors.append(error)
            barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results
