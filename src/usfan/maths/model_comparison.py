"""Two models compared by answers about random images: which is better, and how good each is.

Everything follows one random permutation of the N images, which is the same for all models of a target: answers stay of
use if the target is adapted to again. Answers count up to the first image in this order that has none
(`maths.decision`), so it does not matter in which order the user answers.

Shapes: N images; predictions and answers are classes, K for an image of no class of the model.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace

from torch import Tensor

from usfan.maths.agreement import Interval
from usfan.maths.decision import (
    NO_ANSWER,
    SKIPPED,
    Decision,
    answered_prefix,
    comparison_order,
    comparison_questions,
    decide,
)
from usfan.maths.measurement import measured_accuracy

SEED = 0
EXCHANGE_ANSWERS = 3
"""Answers that suffice if none speaks against them; more if some do. With 2, every third run of the families has such
a pair among 100 answers by chance; with 3, about 1 in 20."""


@dataclass(frozen=True)
class ModelComparison:
    """The decision, and the accuracy of both models (95 %)."""

    decision: Decision
    source: Interval
    adapted: Interval
    answers: int
    """Images that count."""
    held_out: bool = False
    """Whether the adapted model learned from these images, each held out in turn."""


def compare_models(before: Tensor, after: Tensor, answers: Tensor) -> ModelComparison:
    """From N predictions of the source model and of the adapted one, and N answers (`NO_ANSWER` for none, `SKIPPED` for
    images that do not count)."""
    order = comparison_order(len(before), SEED)
    counts = answers != SKIPPED
    changed = before != after
    strata = []
    for members in (changed & counts, ~changed & counts):
        strata.append((int(members.sum()), answered_prefix(order, members, answers)))
    (changed_count, changed_rows), _ = strata
    decision = decide(
        after[changed_rows] == answers[changed_rows],
        before[changed_rows] == answers[changed_rows],
        changed_count,
        int(counts.sum()),
    )
    following = order[(changed & counts)[order]][len(changed_rows) :][: decision.more]
    missing = int((answers[following] == NO_ANSWER).sum())  # later ones may have their answer
    decision = replace(decision, more=min(decision.more, max(missing, 1)))
    source, adapted = (
        measured_accuracy([(size, labels[rows] == answers[rows]) for size, rows in strata])
        for labels in (before, after)
    )
    answered = sum(len(rows) for _, rows in strata)
    return ModelComparison(decision, source, adapted, answered)


def exchanged_names(
    predictions: Tensor, answers: Tensor, classes: int
) -> list[tuple[int, int]]:
    """Pairs of classes that a model seems to take for each other, from N predictions and N answers: images predicted as
    one are of the other, in both directions, and clearly more of them than are what was predicted."""
    rows = (answers >= 0) & (answers < classes) & (predictions < classes)
    counts = Counter(zip(predictions[rows].tolist(), answers[rows].tolist(), strict=True))
    pairs = []
    for (a, b), number in counts.items():
        both = number + counts[b, a]
        right = counts[a, a] + counts[b, b]
        is_clear = chance_of(both, both + right) <= 0.5**EXCHANGE_ANSWERS
        if a < b and counts[b, a] and is_clear:
            pairs.append((a, b))
    return sorted(pairs)


def chance_of(heads: int, tosses: int) -> float:
    """Probability that a fair coin shows at least so many heads."""
    ways = sum(math.comb(tosses, number) for number in range(heads, tosses + 1))
    return float(ways / 2**tosses)


def next_compared(before: Tensor, after: Tensor, answers: Tensor, count: int) -> Tensor:
    """Rows of the next `count` images to ask about."""
    decision = compare_models(before, after, answers).decision
    return comparison_questions(
        comparison_order(len(before), SEED),
        before != after,
        answers,
        count,
        decided=decision.value != "not yet",
    )
