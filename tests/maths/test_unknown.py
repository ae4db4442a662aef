"""The split into known and unknown: exact 2-means, no majority thrown away, one image alone, the stored rule."""

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.cluster import KMeans
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression

from oracles import scores as by_hand
from usfan.errors import ArtifactError, DataError
from usfan.maths.outputs import Outputs
from usfan.maths.unknown import (
    SCORES,
    UnknownRule,
    split_unknown,
    two_means_threshold,
    unknown_threshold,
)

values_lists = st.lists(
    st.one_of(st.floats(0, 1), st.sampled_from([0.0, 0.25, 0.5, 1.0])), min_size=1, max_size=40
)


def outputs_of(N: int, K: int, seed: int = 0, scale: float = 3.0) -> Outputs:
    generator = torch.Generator().manual_seed(seed)
    logits = scale * torch.randn(N, K, generator=generator)
    draws = (logits[:, None] + torch.randn(N, 16, K, generator=generator)).softmax(dim=2)
    mean = draws.mean(dim=1)
    information = torch.special.entr(mean).sum(1) - torch.special.entr(draws).sum(2).mean(1)
    return Outputs(logits, logits, logits.softmax(dim=1), mean, information)


def rows(outputs: Outputs, index: slice) -> Outputs:
    return Outputs(*(getattr(outputs, name)[index] for name in Outputs.__dataclass_fields__))


def flagged_share(scores: torch.Tensor, *, recipe: bool = False) -> float:
    """Share of the scores above the threshold."""
    return float((scores > unknown_threshold(scores, recipe=recipe)).double().mean())


@settings(max_examples=150, deadline=None)
@given(values_lists)
def test_two_means_is_the_best_of_all_cuts(values):
    threshold = two_means_threshold(torch.tensor(values, dtype=torch.float64))
    if len(set(values)) == 1:
        assert threshold == math.inf
        return
    low = [v for v in values if v <= threshold]
    upper = [v for v in values if v > threshold]
    assert low
    assert upper
    assert by_hand.two_means_sse(low, upper) == pytest.approx(
        by_hand.best_two_means_sse(values), rel=1e-9, abs=1e-12
    )


@settings(max_examples=50, deadline=None)
@given(values_lists, st.randoms(use_true_random=False))
def test_the_split_does_not_depend_on_the_order(values, random):
    shuffled = values.copy()
    random.shuffle(shuffled)
    for split in (
        two_means_threshold,
        unknown_threshold,
        lambda v: unknown_threshold(v, recipe=True),
    ):
        one = split(torch.tensor(values, dtype=torch.float64))
        other = split(torch.tensor(shuffled, dtype=torch.float64))
        assert other == pytest.approx(one, rel=1e-12)


@pytest.mark.parametrize("seed", range(5))
def test_two_means_is_at_least_as_good_as_k_means(seed):
    rng = np.random.default_rng(seed)
    values = np.concatenate([rng.beta(1, 5, 150), rng.beta(4, 2, 50 + 30 * seed)])
    threshold = two_means_threshold(torch.from_numpy(values))
    theirs = KMeans(2, n_init=10, random_state=0).fit(values[:, None])
    ours = by_hand.two_means_sse(
        values[values <= threshold].tolist(), values[values > threshold].tolist()
    )
    assert ours <= theirs.inertia_ * (1 + 1e-9)
    assert threshold == pytest.approx(theirs.cluster_centers_.mean(), abs=0.02)
    assert unknown_threshold(torch.from_numpy(values), recipe=True) == threshold


@pytest.mark.parametrize(
    "values", [[], [0.3], [0.3, 0.3, 0.3], [0.3 + 1e-12, 0.3, 0.3], [0.0, 0.0]]
)
@pytest.mark.parametrize("recipe", [False, True])
def test_with_nothing_to_tell_apart_nothing_is_unknown(values, recipe):
    scores = torch.tensor(values, dtype=torch.float64)
    assert unknown_threshold(scores, recipe=recipe) == math.inf


UNIMODAL = {
    "normal": lambda rng, n: rng.normal(0.6, 0.1, n),
    "bump": lambda rng, n: rng.beta(4, 4, n),
    "mostly high": lambda rng, n: rng.beta(5, 1.5, n),
    "rising": lambda rng, n: rng.beta(3, 1, n),
    "long lower tail": lambda rng, n: 1 - np.minimum(rng.exponential(0.1, n), 1),
    "outliers below": lambda rng, n: -rng.lognormal(0, 1, n),
    "spike at zero": lambda rng, n: rng.beta(0.2, 2, n),
}


@pytest.mark.parametrize("shape", UNIMODAL)
@pytest.mark.parametrize("N", [60, 500, 3000])
def test_without_unknowns_no_majority_is_thrown_away(shape, N):
    for seed in range(15):
        scores = torch.from_numpy(UNIMODAL[shape](np.random.default_rng(seed), N))
        assert flagged_share(scores) <= 0.5


def test_plain_two_means_would_throw_a_majority_away():
    scores = torch.from_numpy(UNIMODAL["rising"](np.random.default_rng(0), 500))
    assert flagged_share(scores, recipe=True) > 0.6


@pytest.mark.parametrize("N", [50, 1000])
def test_a_uniform_spread_rarely_gives_a_majority_and_never_a_large_one(N):
    flagged = [
        flagged_share(torch.from_numpy(np.random.default_rng(seed).random(N)))
        for seed in range(200)
    ]
    assert np.mean(np.array(flagged) > 0.5) <= 0.03
    assert max(flagged) < 0.65


@pytest.mark.parametrize("share", [0.1, 0.4, 0.65])
@pytest.mark.parametrize("recipe", [False, True])
def test_two_groups_are_told_apart_even_when_most_are_unknown(share, recipe):
    rng = np.random.default_rng(0)
    truth = np.arange(1000) < 1000 * share
    scores = torch.from_numpy(
        np.where(truth, rng.normal(0.8, 0.06, 1000), rng.normal(0.15, 0.06, 1000))
    )
    unknown = scores > unknown_threshold(scores, recipe=recipe)
    assert float((unknown.numpy() == truth).mean()) > 0.99


def test_a_majority_is_believed_when_the_groups_overlap_a_little():
    rng = np.random.default_rng(0)
    scores = torch.from_numpy(
        np.concatenate([rng.normal(0.3, 0.12, 350), rng.normal(0.8, 0.12, 650)])
    )
    assert flagged_share(scores) == pytest.approx(0.65, abs=0.03)


def test_nearly_everything_unknown_is_not_believed():
    scores = torch.cat([torch.linspace(0.1, 0.2, 20), torch.linspace(0.8, 0.9, 980)])
    assert flagged_share(scores) == 0.5
    assert flagged_share(scores, recipe=True) == 0.98
    one_low = torch.tensor([0.0] + [1.0] * 99)
    assert flagged_share(one_low) == 0


@pytest.mark.parametrize("score", ["max-softmax", "entropy", "energy"])
def test_real_digits_without_unknowns_keep_their_majority(score):
    """A classifier of clean digits meets noisy, moved ones: much is uncertain, nothing is unknown."""
    images, labels = load_digits(return_X_y=True)
    moved = np.roll(images.reshape(-1, 8, 8), 1, axis=2).reshape(
        -1, 64
    ) + np.random.default_rng(0).normal(0, 3, (1797, 64))
    model = LogisticRegression(max_iter=300, C=0.01).fit(images[:900] / 16, labels[:900])
    logits = torch.from_numpy(model.decision_function(moved[900:] / 16))
    probs = logits.softmax(dim=1)
    outputs = Outputs(logits, logits, probs, probs, torch.zeros(len(probs)))
    assert float(split_unknown(outputs, score).flag(outputs).double().mean()) <= 0.5
    assert float(split_unknown(outputs, score, recipe=True).flag(outputs).double().mean()) > 0.6


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("K", [2, 7])
def test_one_image_alone_gets_the_flag_of_the_batch(score, K):
    outputs = outputs_of(120, K)
    rule = split_unknown(outputs, score, recipe=True)
    together = rule.flag(outputs)
    assert 0 < int(together.sum()) < 120
    assert [
        bool(rule.flag(rows(outputs, slice(i, i + 1)))) for i in range(120)
    ] == together.tolist()


def test_scores_by_hand():
    logits = torch.tensor([[2.0, 0.0], [0.0, 0.0]], dtype=torch.float64)
    probs = logits.softmax(dim=1)
    posterior = torch.tensor([[0.5, 0.5], [1.0, 0.0]])
    outputs = Outputs(logits, logits, probs, posterior, torch.tensor([0.1, 0.2]))
    p = float(probs[0, 0])
    entropy = -(p * math.log(p) + (1 - p) * math.log(1 - p)) / math.log(2)
    got = {name: UnknownRule(name, 0.0).score_of(outputs).tolist() for name in SCORES}
    assert got["max-softmax"] == pytest.approx([1 - p, 0.5])
    assert got["entropy"] == pytest.approx([entropy, 1])
    assert got["posterior-entropy"] == pytest.approx([1, 0])
    assert got["mutual-information"] == pytest.approx([0.1, 0.2])
    assert got["energy"] == pytest.approx([-math.log(math.exp(2) + 1), -math.log(2)])


@pytest.mark.parametrize("threshold", [0.1 + 0.2, -3.5, math.inf])
def test_the_rule_survives_json(threshold):
    rule = UnknownRule("energy", threshold)
    assert (
        UnknownRule.from_dict(json.loads(json.dumps(rule.to_dict(), allow_nan=False))) == rule
    )


@pytest.mark.parametrize(
    ("stored", "field"),
    [
        ({"score": "magic", "threshold": 0.5}, "score"),
        ({"score": ["entropy"], "threshold": 0.5}, "score"),
        ({"score": "entropy", "threshold": "0.5"}, "threshold"),
        ({"score": "entropy", "threshold": True}, "threshold"),
        ({"score": "entropy", "threshold": float("nan")}, "threshold"),
        ({"score": "entropy"}, "threshold"),
        ([], "threshold"),
    ],
)
def test_a_broken_rule_is_refused_by_name(stored, field):
    with pytest.raises(ArtifactError, match=field):
        UnknownRule.from_dict(stored)


def test_diverged_scores_are_refused():
    with pytest.raises(DataError, match="1 that are not finite"):
        unknown_threshold(torch.tensor([0.1, math.nan]))
