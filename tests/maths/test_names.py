"""Namings against enumeration, and what doubt must say of clusters whose names are known or swapped."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import one_hot

from oracles.namings import exact_marginals
from usfan.maths.cluster_mixture import fit_mixture
from usfan.maths.names import (
    View,
    balanced,
    choose,
    learn_labels,
    name_clusters,
    naming_marginals,
    naming_scores,
    smoothed,
)
from usfan.maths.neighbours import nearest_neighbours
from usfan.maths.user_labels import UserLabels

NONE = UserLabels.none()


def clusters(seed: int, confusion: torch.Tensor, each: int = 40):
    """Points in well separated clusters, and names drawn from the confusion matrix (K × K), 0.8 sure."""
    generator = torch.Generator().manual_seed(seed)
    classes = len(confusion)
    labels = torch.arange(classes).repeat_interleave(each)
    centres = 6 * torch.eye(classes, 5)
    points = centres[labels] + torch.randn(len(labels), 5, generator=generator)
    said = torch.multinomial(confusion[labels], 1, generator=generator).flatten()
    probs = one_hot(said, classes).double() * 0.8 + 0.2 / classes
    return points - points.mean(0), probs / probs.sum(1, keepdim=True), labels


@pytest.mark.parametrize(("spread", "error"), [(0.5, 0.12), (1.0, 0.25), (4.0, 0.5)])
def test_marginals_are_near_those_of_all_namings(spread, error):
    generator = torch.Generator().manual_seed(0)
    for _ in range(10):
        scores = spread * torch.randn(6, 6, generator=generator, dtype=torch.float64)
        table = naming_marginals(scores)
        exact = exact_marginals(scores)
        torch.testing.assert_close(table.sum(0), torch.ones(6).double(), atol=0.02, rtol=0)
        torch.testing.assert_close(table.sum(1), torch.ones(6).double())
        assert (table - exact).abs().max() < error
        assert (
            table - exact
        ).abs().mean() < error / 4  # Sinkhorn is more doubtful than the enumeration


def test_marginals_are_exact_where_one_naming_stands_out():
    scores = 8 * torch.eye(5).double()
    torch.testing.assert_close(
        naming_marginals(scores), exact_marginals(scores), atol=2e-3, rtol=0
    )


def test_a_column_constant_changes_no_naming():
    """A source model that says one class everywhere still names by differences."""
    scores = torch.randn(5, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    shifted = scores + torch.tensor([0.0, 5, -3, 0, 1]).double()
    torch.testing.assert_close(
        naming_marginals(scores), naming_marginals(shifted), atol=1e-6, rtol=0
    )


def view_of(points, neighbours=8):
    return View(points, nearest_neighbours(points, neighbours)[0], points.shape[1])


def named(points, probs, labels=NONE):
    """The naming of clusters that EM finds from the names."""
    return name_clusters(view_of(points), probs, labels, [probs])[0]


def doubts(members, probs, labels=NONE):
    """1 − A_cc of clusters that are given."""
    marginals = naming_marginals(naming_scores(members.double(), probs, labels))
    return 1 - marginals.diagonal()


def test_names_that_are_clear_are_not_in_doubt_and_mixed_ones_are():
    good = 0.8 * torch.eye(5) + 0.04
    points, probs, _ = clusters(0, good)
    assert named(points, probs).share_in_doubt < 0.1
    mixed = good.clone()
    mixed[:2] = mixed[:2].mean(0)  # images of the first two classes are named alike
    points, probs, _ = clusters(0, mixed)
    naming = named(points, probs)
    assert naming.doubt[:2].min() > 0.3
    assert naming.doubt[2:].max() < 0.1
    assert naming.soft_labels[:40].max(1).values.mean() < 0.8


def test_one_label_settles_two_names():
    """The cluster that is left gets the name that is left."""
    mixed = 0.8 * torch.eye(5) + 0.04
    mixed[:2] = mixed[:2].mean(0)
    _, probs, labels = clusters(0, mixed)
    members = one_hot(labels, 5)
    two = UserLabels(torch.tensor([3, 17]), torch.tensor([0, 0]))
    assert doubts(members, probs)[:2].min() > 0.3
    assert doubts(members, probs, two)[:2].max() < 0.1


def test_labels_rename_clusters_that_the_source_model_swaps():
    swapped = 0.8 * torch.eye(5)[[1, 0, 2, 3, 4]] + 0.04  # the model calls class 0 class 1
    points, probs, labels = clusters(0, swapped)
    wrong = named(points, probs).soft_labels.argmax(1) == labels
    assert wrong.double().mean() == pytest.approx(0.6, abs=0.02)
    rows = torch.tensor([3, 17, 25, 50, 60, 70])
    few = UserLabels(rows, labels[rows])
    naming, lesson = learn_labels(view_of(points), probs, few)
    pooled = lesson.pooled(naming.known_labels, few)
    assert (pooled.argmax(1) == labels).double().mean() > 0.97


def test_held_out_answers_tell_how_good_the_pool_is():
    points, probs, labels = clusters(6, 0.3 * torch.eye(5) + 0.14, each=60)
    rows = torch.randperm(300, generator=torch.Generator().manual_seed(0))[:60]
    few = UserLabels(rows, labels[rows])
    naming, lesson = learn_labels(view_of(points), probs, few)
    pooled = lesson.pooled(naming.known_labels, few)
    rest = torch.ones(300, dtype=torch.bool)
    rest[rows] = False
    truth = (pooled.argmax(1) == labels)[rest].double().mean()
    held_out = (lesson.held_out.argmax(1) == labels[rows]).double().mean()
    assert float(held_out) == pytest.approx(float(truth), abs=0.1)
    assert (pooled[rows].argmax(1) == labels[rows]).all()  # labelled images keep their labels


def test_random_labels_of_noise_do_not_raise_held_out_answers():
    """Weights that fit held-out labels cannot be fooled by labels that were learned by heart."""
    generator = torch.Generator().manual_seed(7)
    points = torch.randn(200, 5, generator=generator)
    probs = torch.rand(200, 4, generator=generator).double()
    probs = probs / probs.sum(1, keepdim=True)
    rows = torch.arange(40)
    few = UserLabels(rows, torch.randint(4, (40,), generator=generator))
    _, lesson = learn_labels(view_of(points), probs, few)
    right = (lesson.held_out.argmax(1) == few.labels).double().mean()
    assert right < 0.5


def test_images_outside_every_named_cluster_keep_theirs():
    """Clusters without a name are in the soft labels as they are."""
    points, probs, _ = clusters(8, 0.8 * torch.eye(4) + 0.05)
    begin = torch.cat([probs, torch.zeros(len(probs), 2)], dim=1)
    begin[:20] = 0
    begin[:20, 4] = 1
    naming, _ = name_clusters(view_of(points), probs, NONE, [begin], even=False)
    r = naming.fit.responsibilities.double()
    torch.testing.assert_close(naming.soft_labels[:, 4:], r[:, 4:])
    torch.testing.assert_close(
        naming.soft_labels.sum(1), torch.ones(len(r)).double(), atol=1e-4, rtol=0
    )


def test_scores_by_a_loop():
    points, probs, _ = clusters(2, 0.6 * torch.eye(4) + 0.1, each=5)
    r = fit_mixture(points, probs.log(), rounds=2).responsibilities.double()
    told = UserLabels(torch.tensor([1, 8]), torch.tensor([2, 1]))
    scores = naming_scores(r, probs, told)
    for c in range(4):
        for k in range(4):
            share = float((r[:, c] * probs[:, k]).sum() / r[:, c].sum())
            value = 4 * torch.log(torch.tensor(share, dtype=torch.float64))
            for row, label in ((1, 2), (8, 1)):
                right = 0.9 if label == k else 0.1 / 3
                value += r[row, c] * torch.log(torch.tensor(right * 3 / 0.1).double())
            assert float(scores[c, k]) == pytest.approx(float(value), abs=1e-4)


def test_balanced_classes_have_equal_shares():
    log_names = torch.randn(50, 4, generator=torch.Generator().manual_seed(3)).double()
    log_names[:, 0] += 2
    shares = balanced(log_names.log_softmax(1)).mean(0)
    torch.testing.assert_close(shares, torch.full((4,), 0.25).double(), atol=1e-6, rtol=0)


def test_the_second_begin_is_taken_only_if_it_fits_clearly_better():
    points, probs, _ = clusters(4, 0.3 * torch.eye(5) + 0.14)
    near = nearest_neighbours(points, 5)[0]
    names = probs.log()
    first = fit_mixture(points, names)
    second = fit_mixture(points, names, begin=smoothed(names, near).float())
    assert choose([first, first]) == 0
    gain = first.free_energy[-1] - second.free_energy[-1]
    differences = first.energies - second.energies
    clear = gain > float(differences.std()) / len(points) ** 0.5
    assert (choose([first, second]) == 1) == clear
    assert choose([second, first]) == 0 or gain < 0


def test_smoothed_names_agree_with_their_neighbours():
    points, probs, labels = clusters(5, 0.5 * torch.eye(5) + 0.1)
    near = nearest_neighbours(points, 8)[0]
    table = smoothed(probs.log(), near)
    assert (table.argmax(1) == labels).double().mean() > 0.95
    assert (probs.argmax(1) == labels).double().mean() < 0.8
    uneven = smoothed(probs.log()[:60], nearest_neighbours(points[:60], 8)[0], even=False)
    assert (uneven.argmax(1) == labels[:60]).double().mean() > 0.95
