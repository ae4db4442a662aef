"""The field's methods one sample at a time: banks and neighbours, votes, the best of a class."""

from __future__ import annotations

import math
from collections.abc import Sequence

from oracles.centroids import Rows, dot, largest, unit


def nearest(row: Sequence[float], bank: Rows, k: int, own: int) -> list[int]:
    """The rows of the bank with the highest cosine, the sample's own left out."""
    others = [j for j in range(len(bank)) if j != own]
    return sorted(others, key=lambda j: -dot(unit(row), unit(bank[j])))[:k]


class Bank:
    """Rows that are written by hand."""

    def __init__(self, features: Rows, probs: Rows) -> None:
        self.features = [list(row) for row in features]
        self.probs = [list(row) for row in probs]

    def write(self, samples: Sequence[int], features: Rows, probs: Rows) -> None:
        for sample, row, p in zip(samples, features, probs, strict=True):
            self.features[sample] = list(row)
            self.probs[sample] = list(p)

    def near(self, sample: int, k: int) -> list[int]:
        return nearest(self.features[sample], self.features, k, sample)


def nrc(
    bank: Bank,
    samples: Sequence[int],
    k: int,
    further: int,
    weak: float,
    weights: Sequence[float],
) -> float:
    losses = []
    for i in samples:
        loss = 0.0
        for j in bank.near(i, k):
            beyond = bank.near(j, further)
            loss -= (
                (1.0 if i in beyond else weak) * weights[j] * dot(bank.probs[i], bank.probs[j])
            )
            loss -= weak * sum(dot(bank.probs[i], bank.probs[m]) for m in beyond)
        losses.append(loss)
    return sum(losses) / len(losses)


def aad(
    bank: Bank, samples: Sequence[int], k: int, alpha: float, weights: Sequence[float]
) -> float:
    losses = []
    for i in samples:
        pulled = sum(weights[j] * dot(bank.probs[i], bank.probs[j]) for j in bank.near(i, k))
        pushed = sum(dot(bank.probs[i], bank.probs[m]) for m in samples if m != i)
        losses.append(alpha * pushed - pulled)
    return sum(losses) / len(losses)


def vote_share(
    features: Rows, labels: Sequence[int], voters: int, votes: int, temperature: float
) -> list[float]:
    """The share of the last vote that each sample's first label gets. Features have a 1 appended, as SHOT's."""
    rows = [unit([*row, 1.0]) for row in features]
    current = list(labels)
    shares = [0.0] * len(rows)
    for _ in range(votes):
        after = list(current)
        for i, row in enumerate(rows):
            near = nearest(row, rows, voters, i)
            strength = {j: math.exp(dot(row, rows[j]) / temperature) for j in near}
            votes_for = [
                sum(s for j, s in strength.items() if current[j] == k)
                for k in range(max(labels) + 1)
            ]
            shares[i] = votes_for[labels[i]] / sum(votes_for)
            after[i] = largest(votes_for)
        current = after
    return shares


def best_of_each_class(
    scores: Sequence[float], labels: Sequence[int], share: float
) -> list[bool]:
    chosen = set()
    for k in set(labels):
        members = sorted(
            (i for i, label in enumerate(labels) if label == k), key=lambda i: -scores[i]
        )
        chosen |= set(members[: int(share * len(members) + 1e-6)])
    return [i in chosen for i in range(len(labels))]
