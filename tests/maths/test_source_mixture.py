"""The mixture of several sources, against sums that are written out in float64 and a search over all weights."""

from __future__ import annotations

import math

import pytest
import torch

from oracles.heads import own_entropy
from usfan.errors import DataError
from usfan.maths.outputs import Outputs
from usfan.maths.source_mixture import (
    choose_shares,
    evidence_shares,
    information_loss,
    learned_shares,
    mixed,
    reordered,
    source_weights,
)

N = 12
K = 4
S = 3


def some_outputs(seed: int, sharp: float = 1.0, count: int = N) -> Outputs:
    generator = torch.Generator().manual_seed(seed)
    logits = sharp * torch.randn(count, K, generator=generator, dtype=torch.float64)
    predictive = (0.7 * logits).softmax(dim=1)
    information = 0.1 * torch.rand(count, generator=generator, dtype=torch.float64)
    features = torch.randn(count, 2 + seed, generator=generator, dtype=torch.float64)
    return Outputs(features, logits, logits.softmax(dim=1), predictive, information)


OUTPUTS = [some_outputs(seed, sharp) for seed, sharp in ((0, 1.0), (1, 3.0), (2, 0.3))]


@pytest.mark.parametrize("by_certainty", [True, False])
def test_against_sums_one_by_one(by_certainty):
    shares = torch.tensor([0.5, 0.2, 0.3], dtype=torch.float64)
    weights = source_weights(OUTPUTS, shares, by_certainty=by_certainty)
    result = mixed(OUTPUTS, weights)
    for n in range(N):
        raw = [
            float(shares[s])
            * (math.exp(-own_entropy(OUTPUTS[s].posterior_probs[n])) if by_certainty else 1.0)
            for s in range(S)
        ]
        source_shares = [value / sum(raw) for value in raw]
        assert weights[n].tolist() == pytest.approx(source_shares)
        probs = sum(source_shares[s] * OUTPUTS[s].probs[n] for s in range(S))
        predictive = sum(source_shares[s] * OUTPUTS[s].posterior_probs[n] for s in range(S))
        torch.testing.assert_close(result.probs[n], probs)
        torch.testing.assert_close(result.logits[n].softmax(dim=0), probs)
        torch.testing.assert_close(result.posterior_probs[n], predictive)
        within = sum(
            source_shares[s]
            * (
                own_entropy(OUTPUTS[s].posterior_probs[n])
                - float(OUTPUTS[s].mutual_information[n])
            )
            for s in range(S)
        )
        assert float(result.mutual_information[n]) == pytest.approx(
            own_entropy(predictive) - within
        )
    assert result.features.shape == (N, 2 + 3 + 4)


def test_the_sources_can_be_permuted():
    shares = torch.full((S,), 1 / S, dtype=torch.float64)
    one = mixed(OUTPUTS, source_weights(OUTPUTS, shares, by_certainty=True))
    turned = OUTPUTS[::-1]
    two = mixed(turned, source_weights(turned, shares, by_certainty=True))
    torch.testing.assert_close(one.probs, two.probs)
    torch.testing.assert_close(one.mutual_information, two.mutual_information)


def test_equal_sources_are_one_source():
    shares = torch.tensor([0.5, 0.5], dtype=torch.float64)
    same = [OUTPUTS[0], OUTPUTS[0]]
    result = mixed(same, source_weights(same, shares, by_certainty=True))
    torch.testing.assert_close(result.probs, OUTPUTS[0].probs)
    torch.testing.assert_close(result.mutual_information, OUTPUTS[0].mutual_information)


def test_a_probability_of_zero_is_no_infinity():
    probs = torch.tensor([[1.0, 0.0]])
    sure = Outputs(torch.zeros(1, 2), probs.log().clamp_min(-1e4), probs, probs, torch.zeros(1))
    result = mixed([sure, sure], torch.tensor([[0.5, 0.5]]))
    assert bool(torch.isfinite(result.logits).all())
    assert float(result.mutual_information) == 0


def test_reordered():
    result = reordered(OUTPUTS[0], torch.tensor([2, 0, 3, 1]))
    torch.testing.assert_close(result.probs[:, 1], OUTPUTS[0].probs[:, 0])
    torch.testing.assert_close(result.posterior_probs[:, 3], OUTPUTS[0].posterior_probs[:, 1])
    assert result.features is OUTPUTS[0].features


def test_learned_shares_against_a_search():
    """Every weight of two sources on a fine grid; and three sources, of which one says nothing."""
    two = [some_outputs(0, 4.0, 200).probs, some_outputs(5, 2.0, 200).probs]
    table = torch.stack(two)
    grid = torch.linspace(0, 1, 401, dtype=torch.float64)
    losses = torch.stack([information_loss(table, torch.stack([a, 1 - a])) for a in grid])
    result = learned_shares(two)
    assert float(information_loss(table, result)) <= float(losses.min()) + 1e-3
    assert float(result[0]) == pytest.approx(float(grid[losses.argmin()]), abs=0.02)
    nothing = torch.full((200, K), 1 / K, dtype=torch.float64)
    shares = learned_shares([two[0], nothing, nothing])
    assert float(shares[0]) > 0.97
    assert float(shares.sum()) == pytest.approx(1)


def test_the_loss_is_that_of_information_maximisation():
    table = torch.stack([out.probs for out in OUTPUTS])
    shares = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)
    mixture = sum(shares[s] * table[s] for s in range(S))
    each = sum(own_entropy(row) for row in mixture) / N
    assert float(information_loss(table, shares)) == pytest.approx(
        each - own_entropy(mixture.mean(dim=0))
    )


def test_other_images_are_refused():
    with pytest.raises(DataError, match="the same images and classes"):
        learned_shares([OUTPUTS[0].probs, OUTPUTS[1].probs[:5]])


def clustered(noise: float, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Features of four clusters, their labels, and predictions of which a share `noise` is wrong."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(200) % K
    features = 5 * torch.eye(K)[labels] + 0.3 * torch.randn(200, K, generator=generator)
    wrong = torch.rand(200, generator=generator) < noise
    return (
        features,
        labels,
        torch.where(wrong, torch.randint(K, (200,), generator=generator), labels),
    )


def test_evidence_shares_are_the_odds_of_the_structure():
    features, labels, good = clustered(0.05, 0)
    bad = clustered(0.5, 1)[2]
    unit = torch.cat([features, torch.ones(200, 1)], dim=1).double()
    unit = unit / unit.norm(dim=1, keepdim=True)
    near = torch.stack([(unit - row).norm(dim=1).argsort()[1:6] for row in unit])
    odds = []
    for predicted in (good, bad):
        agree = (predicted[near] == predicted[:, None]).double().mean()
        chance = sum(float((predicted == k).double().mean()) ** 2 for k in range(K))
        kappa = (float(agree) - chance) / (1 - chance)
        odds.append(kappa / (1 - kappa))
    result = evidence_shares([good, bad], [features, features])
    assert result.tolist() == pytest.approx([value / sum(odds) for value in odds], rel=1e-3)
    assert float(result[0]) > 0.85
    assert evidence_shares([labels, labels], [features, features]).tolist() == [0.5, 0.5]
    assert evidence_shares([labels[:1], labels[:1]], [features[:1], features[:1]]).tolist() == [
        0.5,
        0.5,
    ]


def test_shares_of_each_kind():
    before = OUTPUTS[:2]
    after = OUTPUTS[1:]
    assert choose_shares("mean", before, after).tolist() == [0.5, 0.5]
    torch.testing.assert_close(
        choose_shares("learned", before, after), learned_shares([o.probs for o in after])
    )
    means = [
        sum(math.exp(-own_entropy(row)) for row in out.posterior_probs) / N for out in after
    ]
    raw = [1 / value for value in means]
    assert choose_shares("certainty", before, after).tolist() == pytest.approx(
        [v / sum(raw) for v in raw]
    )
    expected = evidence_shares(
        [o.probs.argmax(dim=1) for o in before], [o.features for o in before]
    )
    assert torch.equal(choose_shares("evidence", before, after), expected)
