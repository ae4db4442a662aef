"""Which of two models is better, from labels of target images in random order, valid whenever one stops.

Only images whose prediction changed can tell: x_i = 1 if only the adapted model is right, −1 if only the source model
is, else 0. They are labelled in the order of one random permutation. A gambler bets against "the mean of x over the M
changed images is m". After t labels, the images that are left have the mean m_t under this hypothesis, and

    m_t = (M m − Σ_{i ≤ t} x_i) / (M − t)       W_n(λ) = Π_{t < n} (1 + λ (x_{t+1} − m_t)),   λ ≥ 0
    W_n = mean over λ of W_n(λ)                 λ = 2p − 1, p drawn by Jeffreys' prior: Krichevsky and Trofimov's bet

W_n is a nonnegative supermartingale if the mean is m or less (Ville: it ever reaches 1/α with probability α at most).
The means that neither this gambler nor his mirror image can reject, each at α = 2.5 %, are a 95 % confidence sequence.
Every decision is read off it, so that at most 5 % are wrong, however often one looks (Waudby-Smith and Ramdas, 2024,
Section 4: sampling without replacement).

Shapes: N images, n labels of changed images, G means, J stakes λ.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from usfan.maths.agreement import Interval

ERROR = 0.05
"""Largest probability of a wrong decision."""
STAKES = 16
MEANS = 401
"""J and G."""
WORTH_HAVING = 0.02
"""Smallest difference in accuracy, over all images, that is worth having."""
CHANGED_FIRST = 32
"""Judged images that are all changed ones, because these decide. From then on every second one is unchanged: both
kinds are needed to know the accuracy."""
NO_ANSWER = -1
SKIPPED = -2
"""Stand for the label of an image: not asked yet; and nobody can tell, so that the image does not count."""


@dataclass(frozen=True)
class Decision:
    """Verdict of the labels on adapted against source model."""

    value: str
    """better, worse, no difference, or not yet."""
    difference: Interval
    """Accuracy of the adapted model minus that of the source model, over all images; 95 %, at any time."""
    answers: int
    more: int
    """Answers that it may still take; 0 if decided."""


def comparison_order(count: int, seed: int) -> Tensor:
    """The permutation of N images, the same for every model that is judged on them."""
    generator = torch.Generator().manual_seed(1_000_003 * seed + count)
    return torch.randperm(count, generator=generator)


def answered_prefix(order: Tensor, members: Tensor, answers: Tensor) -> Tensor:
    """Rows of the members (N booleans) in order, up to the first without an answer."""
    rows = order[(members & (answers != SKIPPED))[order]]
    missing = (answers[rows] == NO_ANSWER).nonzero()
    return rows[: int(missing[0])] if len(missing) else rows


def comparison_questions(
    order: Tensor, changed: Tensor, answers: Tensor, count: int, *, decided: bool = False
) -> Tensor:
    """The next `count` rows to ask about, or as many as there are. `answers`: N, `SKIPPED` for images that were
    labelled to be learned from. Once it is decided which model is better, both kinds are asked by their shares."""
    is_open = (answers == NO_ANSWER)[order]
    changed_rows = order[is_open & changed[order]].tolist()
    other_rows = order[is_open & ~changed[order]].tolist()
    changed_count = int((changed & (answers > NO_ANSWER)).sum())
    other_count = int((~changed & (answers > NO_ANSWER)).sum())
    share = float(changed.double().mean())
    rows: list[int] = []
    while len(rows) < count and (changed_rows or other_rows):
        if decided:
            asks_changed = changed_count <= share * (changed_count + other_count)
        else:
            asks_changed = changed_count - other_count < CHANGED_FIRST
        if changed_rows and (asks_changed or not other_rows):
            rows.append(changed_rows.pop(0))
            changed_count += 1
        else:
            rows.append(other_rows.pop(0))
            other_count += 1
    return torch.tensor(rows, dtype=torch.long)


def decide(adapted_right: Tensor, source_right: Tensor, changed: int, images: int) -> Decision:
    """From n booleans each, of changed images in judging order; how many changed, of how many images."""
    outcomes = adapted_right.double() - source_right.double()
    share = changed / max(images, 1)
    low, high = mean_bounds(outcomes, changed)
    mean = float(outcomes.mean()) if len(outcomes) else 0.0
    value = "not yet"
    if share * max(high, -low) <= WORTH_HAVING:
        value = "no difference"
    elif low >= 0:
        value = "better"
    elif high <= 0:
        value = "worse"
    more = answers_left(outcomes, changed) if value == "not yet" else 0
    difference = Interval(share * mean, share * low, share * high)
    return Decision(value, difference, len(outcomes), more)


def mean_bounds(outcomes: Tensor, population: int) -> tuple[float, float]:
    """Ends of the confidence sequence of the mean of x, from n outcomes."""
    means = torch.linspace(-1, 1, MEANS, dtype=torch.float64)
    limit = math.log(2 / ERROR)
    too_low = means[log_wealth(outcomes, means, population)[:, -1] >= limit]
    too_high = means[log_wealth(-outcomes, -means, population)[:, -1] >= limit]
    low = float(too_low.max()) if len(too_low) else -1.0
    high = float(too_high.min()) if len(too_high) else 1.0
    return low, high


def log_wealth(outcomes: Tensor, means: Tensor, population: int) -> Tensor:
    """log W, G × (n + 1): after 0 to n outcomes, of the gambler who bets that the mean is larger than each of these."""
    count = len(outcomes)
    sums = torch.nn.functional.pad(outcomes.cumsum(0), (1, 0))
    remaining = population - torch.arange(count + 1, dtype=torch.float64)
    needed = population * means[:, None] - sums
    rest = needed[:, :count] / remaining[:count]
    angles = (torch.arange(STAKES, dtype=torch.float64) + 0.5) / STAKES * (math.pi / 2)
    stakes = angles.cos()[:, None, None] / (1 + rest.clamp_min(0))  # J × G × n
    factors = (1 + stakes * (outcomes - rest)).clamp_min(1e-12)
    logs = torch.nn.functional.pad(factors.log().cumsum(dim=2), (1, 0))
    wealth: Tensor = logs.logsumexp(0) - math.log(STAKES)
    impossible = (
        needed < -remaining - 1e-9
    )  # even if the source model is right about all of them
    return wealth.masked_fill(impossible, math.inf)


def answers_left(outcomes: Tensor, population: int) -> int:
    """Answers until the wealth suffices, if the future is like the past; without one, nine of ten changes are noticed
    in one direction."""
    wins = max(int((outcomes > 0).sum()), int((outcomes < 0).sum()))
    decisive = int((outcomes != 0).sum())
    share = (decisive + 1.8) / (len(outcomes) + 2)
    chance = (wins + 1.8) / (decisive + 2)
    growth = math.log(2) + chance * math.log(chance) + (1 - chance) * math.log(1 - chance)
    zero = torch.zeros(1, dtype=torch.float64)
    both = [float(log_wealth(sign * outcomes, zero, population)[0, -1]) for sign in (1, -1)]
    missing = math.log(2 / ERROR) - max(*both, 0.0)
    answers = math.ceil(missing / max(share * growth, 1e-3))
    return max(min(answers, population - len(outcomes)), 1)
