"""The mixture of several sources, against sums that are written out in float64."""

from __future__ import annotations

import pytest
import torch

from oracles.heads import own_entropy
from usfan.maths.outputs import Outputs
from usfan.maths.source_mixture import evidence_shares, mixed, reordered

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


def test_against_sums_one_by_one():
    shares = [0.5, 0.2, 0.3]
    result = mixed(OUTPUTS, torch.tensor(shares, dtype=torch.float64))
    for n in range(N):
        probs = sum(shares[s] * OUTPUTS[s].probs[n] for s in range(S))
        predictive = sum(shares[s] * OUTPUTS[s].posterior_probs[n] for s in range(S))
        torch.testing.assert_close(result.probs[n], probs)
        torch.testing.assert_close(result.logits[n].softmax(dim=0), probs)
        torch.testing.assert_close(result.posterior_probs[n], predictive)
        within = sum(
            shares[s]
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
    shares = torch.tensor([0.5, 0.2, 0.3], dtype=torch.float64)
    one = mixed(OUTPUTS, shares)
    two = mixed(OUTPUTS[::-1], shares.flip(0))
    torch.testing.assert_close(one.probs, two.probs)
    torch.testing.assert_close(one.mutual_information, two.mutual_information)


def test_equal_sources_are_one_source():
    shares = torch.tensor([0.5, 0.5], dtype=torch.float64)
    result = mixed([OUTPUTS[0], OUTPUTS[0]], shares)
    torch.testing.assert_close(result.probs, OUTPUTS[0].probs)
    torch.testing.assert_close(result.mutual_information, OUTPUTS[0].mutual_information)


def test_a_probability_of_zero_is_no_infinity():
    probs = torch.tensor([[1.0, 0.0]])
    sure = Outputs(torch.zeros(1, 2), probs.log().clamp_min(-1e4), probs, probs, torch.zeros(1))
    result = mixed([sure, sure], torch.tensor([0.5, 0.5]))
    assert bool(torch.isfinite(result.logits).all())
    assert float(result.mutual_information) == 0


def test_reordered():
    result = reordered(OUTPUTS[0], torch.tensor([2, 0, 3, 1]))
    torch.testing.assert_close(result.probs[:, 1], OUTPUTS[0].probs[:, 0])
    torch.testing.assert_close(result.posterior_probs[:, 3], OUTPUTS[0].posterior_probs[:, 1])
    assert result.features is OUTPUTS[0].features


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


def predicting(labels: torch.Tensor, features: torch.Tensor) -> Outputs:
    probs = torch.nn.functional.one_hot(labels, K).float()
    return Outputs(features, probs, probs, probs, torch.zeros(len(labels)))


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
    result = evidence_shares([predicting(good, features), predicting(bad, features)])
    assert result.tolist() == pytest.approx([value / sum(odds) for value in odds], rel=1e-3)
    assert float(result[0]) > 0.85
    right = predicting(labels, features)
    assert evidence_shares([right, right]).tolist() == [0.5, 0.5]
    single = right.rows(torch.tensor([0]))
    assert evidence_shares([single, single]).tolist() == [0.5, 0.5]
