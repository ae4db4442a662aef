"""Which classes a target shows: label shift against brute force, and the four settings on made data."""

from __future__ import annotations

import pytest
import torch

from usfan.adaptation import target_classes as st
from usfan.adaptation import thresholds
from usfan.maths.cluster_mixture import EVEN_PRIOR, fit_mixture


def named_target(present, known=8, new=0, per_class=60, seed=0, sharp=3.0, width=12):
    """Clusters in `width` dimensions; names of known classes are noisy, those of new classes lean to one."""
    g = torch.Generator().manual_seed(seed)
    centres = 3.0 * torch.randn(known + new, width, generator=g)
    labels = torch.tensor(
        [c for c in [*present, *range(known, known + new)] for _ in range(per_class)]
    )
    points = centres[labels] + torch.randn(len(labels), width, generator=g)
    logits = torch.randn(len(labels), known, generator=g)
    is_known = labels < known
    logits[is_known.nonzero().flatten(), labels[is_known]] += sharp
    logits[(~is_known).nonzero().flatten(), labels[~is_known] % known] += 0.75 * sharp
    order = torch.randperm(len(labels), generator=g)
    points = points - points.mean(dim=0)
    return points[order], logits[order].log_softmax(1), labels[order]


def look(points, names, second=None):
    """With a second view of the same kind, unless another is given."""
    other = points if second is None else second
    return st.estimate_target_classes(points, names, lambda rows: other[rows])


def test_label_shift_is_the_fixed_point_of_bayes_rule():
    _, names, _ = named_target(range(4), known=4)
    r = st.label_shift(names, rounds=5).double()
    shares = [0.25] * 4
    probs = names.double().exp() ** 3
    for _ in range(5):
        each = []
        for row in probs:
            joint = [float(p) * s for p, s in zip(row, shares, strict=True)]
            each.append([j / sum(joint) for j in joint])
        shares = [sum(row[k] for row in each) / len(each) for k in range(4)]
    torch.testing.assert_close(r, torch.tensor(each, dtype=torch.float64), rtol=1e-5, atol=1e-6)


def test_effective_share():
    assert st.effective_share(torch.full((5,), 0.2)) == pytest.approx(1)
    assert st.effective_share(torch.tensor([0.5, 0.5, 0, 0])) == pytest.approx(0.5)


def test_every_class_in_equal_shares_is_closed():
    points, names, _ = named_target(range(8))
    estimate = look(points, names)
    assert estimate.setting == "closed"
    assert bool(estimate.occurs.all())
    assert "8 of 8 known classes" in estimate.reason


def test_missing_classes_are_partial_and_named():
    points, names, _ = named_target(range(3))
    estimate = look(points, names)
    assert estimate.setting == "partial"
    assert estimate.occurs.tolist() == [True] * 3 + [False] * 5
    true = torch.tensor([1 / 3] * 3 + [0.0] * 5)
    assert 0.5 * float((estimate.shares - true).abs().sum()) < 0.05


def test_a_long_tail_is_not_flattened():
    points, names, labels = named_target(range(8))
    tail_rows = torch.cat(
        [(labels == k).nonzero().flatten()[: max(2, 60 >> k)] for k in range(8)]
    )
    estimate = look(points[tail_rows], names[tail_rows])
    assert estimate.setting == "partial"
    true = torch.bincount(labels[tail_rows], minlength=8) / len(tail_rows)
    even = 0.5 * float((1 / 8 - true).abs().sum())
    assert 0.5 * float((estimate.shares - true).abs().sum()) < even / 4


def test_new_classes_are_found():
    points, names, _ = named_target(range(8), new=6)
    estimate = look(points, names)
    assert estimate.setting in ("open", "universal")
    assert estimate.explained < 1 - thresholds.NEW_CLASS_UNEXPLAINED / 8


def test_new_classes_do_not_fill_missing_ones():
    points, names, labels = named_target(range(6), known=12, new=6, sharp=5.0)
    new = (labels >= 12).nonzero().flatten()
    logits = torch.randn(len(new), 12, generator=torch.Generator().manual_seed(4))
    logits[torch.arange(len(new)), 6 + labels[new] % 2] += (
        3  # new classes resemble two of the missing ones
    )
    names[new] = logits.log_softmax(1)
    estimate = look(points, names)
    assert estimate.setting == "universal"
    assert estimate.occurs.tolist() == [True] * 6 + [False] * 6
    assert estimate.known == pytest.approx(float((labels < 12).double().mean()), abs=0.1)
    assert float(estimate.counts.sum()) == pytest.approx(estimate.known * len(labels))
    assert f"{1 - estimate.known:.0%} of the images" in estimate.reason
    without = st.fit_mixture(
        points,
        names,
        begin=st.label_shift(names),
        prior=st.UNEVEN_PRIOR,
        rounds=thresholds.SEARCH_ROUNDS,
    )
    assert int(st.occurring(without.shares * len(points)).sum()) > 6


def test_new_classes_must_show_in_both_views():
    points, names, labels = named_target(range(8), new=6)
    alike = torch.where(
        labels < 8, labels, labels % 8
    )  # a view in which a new class lies where its name does
    hot = torch.nn.functional.one_hot(alike, 8).float()
    second = hot + 0.1 * torch.randn(hot.shape, generator=torch.Generator().manual_seed(3))
    estimate = look(points, names, second)
    assert estimate.setting == "closed"
    assert (
        estimate.explained
        >= 1 - thresholds.NEW_CLASS_UNEXPLAINED / 8
        > look(points, names).explained
    )


def test_a_second_view_that_shows_something_else_confirms_nothing():
    points, names, _ = named_target(range(8), new=6)
    g = torch.Generator().manual_seed(5)
    lighting = (
        3 * torch.randn(6, 12, generator=g)[torch.randint(6, (len(points),), generator=g)]
    )
    estimate = look(points, names, lighting + torch.randn(lighting.shape, generator=g))
    assert estimate.setting in ("closed", "partial")
    assert "no second view that shows the classes" in estimate.reason


def test_without_a_second_view_new_classes_are_not_looked_for():
    points, names, _ = named_target(range(8), new=6)
    estimate = st.estimate_target_classes(points, names)
    assert estimate.explained is None
    assert estimate.setting in ("closed", "partial")
    assert "no second view that shows the classes to look for new ones" in estimate.reason


def test_names_that_follow_little_are_no_evidence_for_new_classes():
    """Half of the structure suffices with eight classes; fewer must follow more of it."""
    points, names, _ = named_target(range(8), new=6, sharp=2.5)
    estimate = look(points, names)
    assert (
        thresholds.FOLLOWED_STRUCTURE
        <= estimate.followed
        < thresholds.FOLLOWED_STRUCTURE_STRICT
    )
    assert estimate.explained is not None
    alone = st.estimate_target_classes(
        points, names, lambda rows: points[rows], witnessed=False
    )  # as for a network from scratch
    assert alone.explained is None
    assert "follow too little of the structure" in alone.reason
    points, names, _ = named_target(range(7), known=7, new=6, sharp=2.3)
    estimate = look(points, names)
    assert (
        thresholds.FOLLOWED_STRUCTURE
        <= estimate.followed
        < thresholds.FOLLOWED_STRUCTURE_STRICT
    )
    assert estimate.explained is None
    assert "follow too little of the structure" in estimate.reason
    points, names, _ = named_target(range(8), new=6, sharp=1.5)
    estimate = look(points, names)
    assert estimate.followed < thresholds.FOLLOWED_STRUCTURE
    assert estimate.explained is None


def test_new_classes_are_looked_for_if_five_known_ones_occur():
    for known, looked in ((5, True), (4, False)):
        points, names, _ = named_target(range(known), known=known, new=5)
        assert (look(points, names).explained is not None) is looked
    points, names, _ = named_target(range(3), known=20, per_class=80)
    estimate = look(points, names)
    assert estimate.explained is None
    assert "too few classes to look for new ones" in estimate.reason


@pytest.mark.parametrize(("known", "setting"), [(7, "closed"), (8, "open")])
def test_with_few_classes_new_ones_must_be_clear(monkeypatch, known, setting):
    """Nine tenths of the structure explained: enough with seven known classes, too little with eight."""
    monkeypatch.setattr(st, "named_share", lambda *_: 0.9)
    points, names, _ = named_target(range(known), known=known, new=5)
    estimate = look(points, names)
    assert estimate.setting == setting
    assert ("so there is nothing new" in estimate.reason) is (setting == "closed")


def test_shares_must_be_unequal_from_both_starts():
    features, names, _ = named_target(range(3), sharp=1.0)
    points = st.fit_witness_space(features).project(features)
    begun = st.fit_mixture(
        points,
        names,
        begin=st.label_shift(names),
        prior=st.UNEVEN_PRIOR,
        rounds=thresholds.SEARCH_ROUNDS,
    )
    plain = st.fit_mixture(points, names, rounds=thresholds.SEARCH_ROUNDS)
    first, second = (st.effective_share(fit.shares) for fit in (begun, plain))
    assert first < second
    assert look(features, names).effective == pytest.approx(second)


def test_names_that_follow_nothing_cannot_tell():
    points, names, _ = named_target(range(3), new=4)
    shuffled = names[torch.randperm(len(names), generator=torch.Generator().manual_seed(1))]
    estimate = look(points, shuffled)
    assert estimate.setting == "closed"
    assert "too little to tell" in estimate.reason


def test_clusters_without_a_name_begin_with_the_doubtful_half():
    points, names, labels = named_target(range(4), known=4, new=4, sharp=5.0)
    near = torch.cdist(points, points).topk(11, largest=False).indices[:, 1:]
    r = st.with_unnamed(points, names, st.unknown_score(names, near), 4)
    assert r.shape == (len(points), 8)
    torch.testing.assert_close(r.sum(1), torch.ones(len(points)))
    fit = fit_mixture(points, names, begin=r, prior=EVEN_PRIOR)
    estimate = fit.responsibilities[:, 4:].sum(1) > 0.5
    assert float((estimate == (labels >= 4)).float().mean()) > 0.95


def test_k_means_lowers_the_distance_to_its_centres():
    points, _, labels = named_target(range(5), known=5)
    cluster = st.k_means(points, 5)
    hits = sum(int(torch.bincount(labels[cluster == c]).max()) for c in cluster.unique())
    assert hits / len(points) > 0.9
    assert torch.equal(cluster, st.k_means(points, 5))


def test_the_search_for_new_classes_needs_enough_images():
    points, names, _ = named_target(range(8), per_class=7)
    estimate = look(points, names)
    assert estimate.followed > thresholds.FOLLOWED_STRUCTURE
    assert estimate.explained is None
    assert "too few images to look for new ones" in estimate.reason
    assert estimate.to_dict()["explained"] is None


def test_structure_within_two_classes_is_nothing_new():
    g = torch.Generator().manual_seed(0)
    points = torch.randn(400, 4, generator=g)
    names = torch.stack([3 * points[:, 0], -3 * points[:, 0]], dim=1).log_softmax(1)
    estimate = look(points, names)
    assert estimate.followed > thresholds.FOLLOWED_STRUCTURE
    assert estimate.setting == "closed"
    assert "too few classes to look for new ones" in estimate.reason


def test_without_clusters_there_is_nothing_new():
    points = torch.randn(60, 3, generator=torch.Generator().manual_seed(0))
    names = torch.randn(60, 3, generator=torch.Generator().manual_seed(1)).log_softmax(1)
    score = torch.zeros(60)  # no image is put in a cluster without a name
    assert st.named_share(points, names, score) == 1.0


def test_clearly_missing_classes_are_found_though_the_names_follow_little():
    points, names, _ = named_target(range(3), sharp=2.0)
    points = points + 4 * torch.randn(points.shape, generator=torch.Generator().manual_seed(5))
    estimate = look(points, names)
    assert estimate.followed < thresholds.FOLLOWED_STRUCTURE
    assert estimate.effective < thresholds.CLEARLY_UNEVEN_SHARES
    assert estimate.setting == "partial"


@pytest.mark.parametrize("known", [5, 6, 7])
def test_five_to_seven_classes_are_enough(known):
    for new, setting in ((0, "closed"), (5, "open")):
        points, names, _ = named_target(range(known), known=known, new=new)
        assert look(points, names).setting == setting


def test_equal_scores_leave_clusters_without_a_name():
    points, names, _ = named_target(range(4), known=4)
    r = st.with_unnamed(points, names, torch.zeros(len(points)), 4)
    assert int((r[:, 4:].sum(dim=1) > 0).sum()) == len(points) // 2


def test_shares_must_be_clearly_unequal_if_the_names_follow_little():
    assert st.is_uneven(0.86, followed=0.6)
    assert not st.is_uneven(0.86, followed=0.4)
    assert st.is_uneven(0.8, followed=0.4)
    shares = torch.tensor([0.6, 0.3, 0.1])
    unequal, unclear = (
        st.TargetClasses("?", shares, 100 * shares, e, None, 0.4) for e in (0.8, 0.86)
    )
    assert "in unequal shares" in unequal.reason
    assert "follow 40% of the target's structure: too little to tell" in unclear.reason
