"""Whether the outputs of a trained network are in the order of the class names given.

A network knows its classes by number only. If the names come in another order than in its training (torchvision's
`ImageFolder` puts capitals before small letters, this package does not), every name is wrong and nothing fails. With
labelled images the mistake shows: the network's predictions then fit a permutation of the names far better.

C[k, j] counts the images of class k whose predicted output is j (K×K). The best permutation π maximises Σ_k C[k, π(k)]
(linear assignment). Each cycle of π is judged alone: two names that are swapped among many are found, too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from usfan.data.labels import some
from usfan.errors import DataError

FITS = 0.6
"""Share of the images of a cycle that must fit the other order…"""
FAR = 2.0
"""…and how many times more than fit the order given."""
EVIDENCE = math.log(1e4)
"""How much likelier than a network that guesses the other order must be (log), beyond the number of orders tried."""
NAMED = 12
"""Up to this many names, the whole order is shown."""


class ClassOrderError(DataError):
    """The class names are in another order than the network's outputs; `classes` is the order that fits."""

    def __init__(self, message: str, classes: tuple[str, ...]) -> None:
        super().__init__(message)
        self.classes = classes


def better_order(predicted: Tensor, labels: Tensor, K: int) -> list[int] | None:
    """For each output, its class if that is clearly not the class with the same number; else None."""
    from scipy.optimize import linear_sum_assignment

    labels = labels.long().cpu()
    predicted = predicted.long().cpu()
    counts = torch.bincount(labels * K + predicted, minlength=K * K).view(K, K)
    # Of two orders that fit alike, the user's is taken.
    preference = counts * (K + 1) + torch.eye(K, dtype=counts.dtype)
    _, columns = linear_sum_assignment(preference.numpy(), maximize=True)
    order = list(range(K))
    for cycle in cycles(columns.tolist()):
        outputs = columns[cycle].tolist()
        total = int(counts[cycle].sum())
        same = int(counts[cycle, cycle].sum())
        other = int(counts[cycle, outputs].sum())
        if fits_far_better(same, other, total, K, len(cycle)):
            for k, output in zip(cycle, outputs, strict=True):
                order[output] = k
    return order if order != list(range(K)) else None


def cycles(permutation: list[int]) -> list[list[int]]:
    """The cycles of two or more."""
    visited: set[int] = set()
    long_cycles = []
    for first in range(len(permutation)):
        cycle = []
        k = first
        while k not in visited:
            visited.add(k)
            cycle.append(k)
            k = permutation[k]
        if len(cycle) > 1:
            long_cycles.append(cycle)
    return long_cycles


def fits_far_better(same: int, other: int, total: int, K: int, length: int) -> bool:
    """Whether the images fit the other order well, the user's order badly, and chance does not explain it."""
    if total == 0 or other < FITS * total or other < FAR * same:
        return False
    right = min(other / total, 0.95)
    evidence = other * math.log(right * K) + (total - other) * math.log(
        (1 - right) * K / (K - 1)
    )
    return evidence > EVIDENCE + min(math.lgamma(K + 1), 2 * length * math.log(K))


def check_order(
    logits: Tensor, labels: Tensor | None, classes: Sequence[str], what: str
) -> None:
    """Raise `ClassOrderError` if the labels say that the names belong to other outputs. N×K logits, N labels."""
    if labels is None:
        return
    predicted = logits.argmax(dim=1).cpu()
    labels = labels.cpu()
    K = len(classes)
    known = labels < K
    order = better_order(predicted[known], labels[known], K)
    if order is None:
        return
    output_of = torch.tensor(order).argsort()
    reordered = output_of[labels.clamp(max=K - 1)]
    same = 100 * float((predicted == labels).double().mean())
    other = 100 * float((predicted == reordered).double().mean())
    names = tuple(classes[k] for k in order)
    raise ClassOrderError(
        f"the class names are in another order than the model's outputs: {same:.0f} % of its predictions fit the "
        f"labels of {what}, and {other:.0f} % do if {describe_order(names, classes)}",
        names,
    )


def describe_order(names: tuple[str, ...], user_names: Sequence[str]) -> str:
    """Which order fits, and how to give it."""
    if list(names) == sorted(user_names):
        which = "capitals come first, as in torchvision's ImageFolder"
        return f"{which} ({some(names, NAMED)}): pass classes=sorted(names), or a file with the names in this order"
    if len(names) <= NAMED:
        return (
            f"the order is {', '.join(names)}: pass classes=, or --classes FILE, in this order"
        )
    moved = [f"{j} is {name}" for j, name in enumerate(names) if name != user_names[j]]
    return f"output {some(moved, 4)}: pass classes= in the order of the model's outputs"
