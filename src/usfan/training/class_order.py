"""Whether the outputs of a trained network are in the order of the class names given.

A network knows its classes by number only. If the names come in another order than in its training (torchvision's
`ImageFolder` puts capitals before small letters, this package does not), every name is wrong and nothing fails. With
labelled images the mistake shows: the network's predictions then fit a permutation of the names far better.

C[k, j] counts the images of class k whose predicted output is j (K×K). The best permutation π maximises Σ_k C[k, π(k)]
(linear assignment). Each cycle of π is judged alone: two names that are swapped among many are found, too.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from usfan.data.labels import some
from usfan.errors import DataError

log = logging.getLogger(__name__)
FITS = 0.6
"""Share of the images of a cycle that must fit the other order…"""
FAR = 2.0
"""…and how many times more than fit the order given."""
EVIDENCE = math.log(1e4)
"""How much likelier than a network that guesses the other order must be (log), beyond the number of orders tried."""
MOST = 50
"""Percent of its own images that a trained model gets right."""
NAMED = 12
"""So many names of an order are shown."""


class ClassOrderError(DataError):
    """The class names are in another order than the network's outputs; `classes` is the order that fits."""

    def __init__(self, message: str, classes: tuple[str, ...]) -> None:
        super().__init__(message)
        self.classes = classes


def better_order(predicted: Tensor, labels: Tensor, K: int) -> list[int] | None:
    """For each output, its class if that is clearly not the class with the same number; else None."""
    from scipy.optimize import linear_sum_assignment
    from scipy.sparse.csgraph import connected_components

    counts = torch.bincount(labels.long() * K + predicted, minlength=K * K).view(K, K).numpy()
    # Of two orders that fit alike, the user's is taken.
    _, outputs = linear_sum_assignment(counts * (K + 1) + np.eye(K), maximize=True)
    number, cycle_of = connected_components(np.eye(K)[outputs])
    order = np.arange(K)
    for cycle in range(number):
        k = (cycle_of == cycle).nonzero()[0]
        other = int(counts[k, outputs[k]].sum())
        if fits_far_better(counts[k, k].sum(), other, counts[k].sum(), K, len(k)):
            order[outputs[k]] = k
    return None if (order == np.arange(K)).all() else order.tolist()


def fits_far_better(same: int, other: int, total: int, K: int, length: int) -> bool:
    """Whether the images fit the other order well, the user's order badly, and chance does not explain it."""
    if total == 0 or other < FITS * total or other < FAR * same:
        return False
    right = min(other / total, 0.95)
    evidence = other * math.log(right * K) + (total - other) * math.log(
        (1 - right) * K / (K - 1)
    )
    return evidence > EVIDENCE + min(math.lgamma(K + 1), 2 * length * math.log(K))


def check_order(logits: Tensor, labels: Tensor | None, classes: Sequence[str]) -> None:
    """Raise `ClassOrderError` if the labels say that the names belong to other outputs, and warn of a model that gets
    most of its own images wrong. N×K logits, N labels."""
    if labels is None:
        return
    known = labels.cpu() < len(classes)
    predicted = logits.argmax(dim=1).cpu()[known]
    labels = labels.cpu()[known]
    order = better_order(predicted, labels, len(classes))
    same = 100 * float((predicted == labels).double().mean())
    if order is None:
        if same < MOST:
            log.warning(
                "only %.0f %% of the labelled images are right: does the input (size, mean and std) fit the model's "
                "training, and the class names its outputs?",
                same,
            )
        return
    other = 100 * float((torch.tensor(order)[predicted] == labels).double().mean())
    names = tuple(classes[k] for k in order)
    raise ClassOrderError(
        f"the class names are in another order than the model's outputs: {same:.0f} % of its predictions fit the "
        f"labels, and {other:.0f} % do if {describe_order(names, classes)}",
        names,
    )


def describe_order(names: tuple[str, ...], user_names: Sequence[str]) -> str:
    """Which order fits, and how to give it."""
    if list(names) == sorted(user_names):
        which = "capitals come first, as in torchvision's ImageFolder"
        return f"{which} ({some(names, NAMED)}): pass classes=sorted(names), or a file with the names in this order"
    if len(names) <= NAMED:
        return f"the order is {', '.join(names)}: pass classes= in this order"
    moved = [f"{j} is {name}" for j, name in enumerate(names) if name != user_names[j]]
    return f"output {some(moved, NAMED)}: pass classes= in the order of the model's outputs"
