"""The studies' variants are rows of the table: each runs, and leaves the table as it was."""

from __future__ import annotations

import copy
import dataclasses
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from sklearn.covariance import ledoit_wolf

sys.path.append(str(Path(__file__).parent.parent))

from studies import emoji
from studies.cells import adapt_variant, run_variant
from studies.labels import GAUSSIAN_ROUNDS, nearest_gaussian
from studies.terms import CertainCentroids, GaussianLabels, LastingLabels, LateLabels
from studies.variants import VARIANTS, Variant

import usfan
from oracles import centroids as oracle
from tiny_models import tiny_model
from usfan.adaptation.certainty import Certainty
from usfan.adaptation.methods import METHODS
from usfan.adaptation.terms.pseudo_labels import PseudoLabels
from usfan.adaptation.terms.term import Context
from usfan.data.store import Store
from usfan.engine.runtime import Runtime
from usfan.maths.neighbours import unit_features
from usfan.maths.outputs import Outputs

CPU = Runtime(torch.device("cpu"))
NAMED = {variant.name: variant for variant in VARIANTS}


def small_store(count: int = 24, seed: int = 0) -> Store:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(3, (count,), generator=generator)
    pixels = torch.randint(256, (count, 1, 28, 28), generator=generator, dtype=torch.uint8)
    return Store(pixels, torch.arange(len(pixels)), labels, ("a", "b|c", "<d>"))


@pytest.fixture(scope="module")
def model():
    return tiny_model()


@pytest.mark.parametrize("name", NAMED)
def test_every_variant_runs(model, name):
    before = dict(METHODS)
    variant = NAMED[name]
    settings = {"epochs": 1, "batch_size": 12, "samples": 16}
    row = run_variant(variant, model, small_store(), CPU, **settings)
    assert row["variant"] == name
    assert len(row["path"]["accuracy"]) == 2
    assert dict(METHODS) == before


def test_no_two_variants_have_one_name():
    assert len(NAMED) == len(VARIANTS) > 20


def weights(model: usfan.AdaptedModel) -> torch.Tensor:
    return torch.cat([v.flatten().double() for v in model.classifier.state_dict().values()])


FINDERS = (CertainCentroids, GaussianLabels, LastingLabels)
CHANGES = [
    v
    for v in VARIANTS
    if v.settles or any(part not in (LateLabels, *FINDERS) for part in v.parts)
]


@pytest.mark.parametrize("variant", CHANGES, ids=lambda variant: variant.name)
def test_each_change_changes_something(model, variant):
    options = {
        "epochs": 1,
        "batch_size": 12,
        "samples": 16,
        "pseudo_label_weight": 1.0,
        "pseudo_label_warmup": 0,
    }
    plain = Variant("plain", variant.method, "", variant.settings)
    one, two = (
        weights(adapt_variant(v, model, small_store(), guard=False, **options))
        for v in (plain, variant)
    )
    assert bool(torch.isfinite(two).all())
    assert not torch.equal(one, two)


@pytest.mark.parametrize("kind", FINDERS)
def test_each_finder_finds_labels_of_its_own(kind):
    features, probs = target(90)
    blurred = (0.5 * probs + 0.5 * target(90)[1]).clamp_min(1e-6)
    outputs = Outputs(features, probs.log(), probs, blurred, torch.rand(90))
    guide = SimpleNamespace(
        known=torch.ones(90), known_mask=None, rare=0, certainty=Certainty("posterior")
    )
    context = Context(90, 4, CPU, 3, 0, guide, outputs)
    plain, own = (term(0.3).started(context) for term in (PseudoLabels, kind))
    other = dataclasses.replace(outputs, probs=probs.roll(7, 0))
    for seen in (outputs, other):  # what lasts differs from the second time on
        plain.refresh(seen)
        own.refresh(seen)
    assert own.labels.shape == (90,)
    assert not torch.equal(plain.labels, own.labels)
    assert set(own.labels.tolist()) <= set(range(4))
    resumed = kind(0.3).started(context)
    resumed.restore(own.tensors())
    resumed.refresh(outputs)
    own.refresh(outputs)
    assert torch.equal(resumed.labels, own.labels)


def test_late_labels_wait_for_a_third_of_the_run(model):
    adapted = adapt_variant(
        NAMED["u-sfan+ own late labels"],
        model,
        small_store(),
        epochs=3,
        batch_size=12,
        guard=False,
    )
    assert adapted.history["settings"]["pseudo_label_warmup"] == 1


def target(samples: int = 60, classes: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    """Features and blurred predictions of classes of unequal size, so that both rounds change labels."""
    centres = 2 * torch.randn(classes, 5)
    labels = torch.randint(classes, (samples,)).clamp_max(torch.randint(1, classes, (samples,)))
    features = centres[labels] + torch.randn(samples, 5)
    return features, (
        torch.nn.functional.one_hot(labels, classes) + 1.2 * torch.randn(samples, classes)
    ).softmax(dim=1)


@pytest.mark.parametrize("masked", [True, False])
def test_nearest_gaussian(masked):
    """Against EM with loops, residuals repeated by their share, and scikit-learn's Ledoit and Wolf."""
    features, probs = target(90)
    labels = probs.argmax(dim=1).clamp_max(2)  # class 3 has no sample
    mask = (torch.rand(90) > 0.3).double() if masked else torch.ones(90, dtype=torch.float64)
    phi = unit_features(features).double()
    share = torch.nn.functional.one_hot(labels, 4).double()
    for _ in range(GAUSSIAN_ROUNDS):
        means = [(share[:, k] * mask) @ phi / (share[:, k] @ mask) for k in range(3)]
        covariance = oracle.shrunk_covariance(
            [(phi - m, share[:, k] * mask) for k, m in enumerate(means)]
        )
        scores = [
            -0.5 * torch.einsum("nd,de,ne->n", phi - m, covariance.inverse(), phi - m)
            for m in means
        ]
        share = torch.stack(
            [*scores, torch.full((90,), -torch.inf, dtype=torch.float64)], dim=1
        ).softmax(dim=1)
    result = nearest_gaussian(features, labels, 4, mask=mask.float() if masked else None)
    assert torch.equal(result, share.argmax(dim=1))
    assert not torch.equal(result, labels)


def test_the_oracle_shrinks_as_scikit_learn():
    x = torch.randn(40, 6, dtype=torch.float64) * torch.arange(1, 7)
    expected, _ = ledoit_wolf(x.numpy(), assume_centered=True)
    result = oracle.shrunk_covariance([(x, torch.ones(40, dtype=torch.float64))])
    torch.testing.assert_close(result, torch.from_numpy(expected))


def test_gaussians_know_wide_directions_and_odd_targets():
    """Two long, thin classes side by side: the nearest centroid cuts them across, a Gaussian does not."""
    truth = torch.arange(2).repeat_interleave(200)
    features = torch.stack([3 * torch.randn(400), truth + 0.05 * torch.randn(400)], dim=1)
    start = torch.where(torch.rand(400) < 0.3, 1 - truth, truth)
    assert (nearest_gaussian(features, start, 2) == truth).double().mean() > 0.95
    nobody = nearest_gaussian(features, start, 2, mask=torch.zeros(400))
    assert torch.equal(nobody, start)
    same = nearest_gaussian(torch.ones(5, 3), torch.zeros(5, dtype=torch.long), 2)
    assert torch.equal(same, torch.zeros(5, dtype=torch.long))


def test_classes_of_an_open_set():
    from studies.frozen import only

    store = Store(
        torch.arange(12.0).view(6, 2),
        torch.arange(6),
        torch.tensor([0, 1, 2, 2, 1, 0]),
        ("a", "b", "c"),
    )
    result = only(store, ("c", "a", "b"), ("b",))
    assert result.labels.tolist() == [1, 0, 1, 1, 0, 1]
    some = only(store, ("c", "a"))
    assert some.labels.tolist() == [1, 0, 0, 1]
    assert some.values[:, 0].tolist() == [0.0, 4.0, 6.0, 10.0]
    assert some.classes == ("c", "a")


def test_decision_trains_sources_and_weights_together():
    """Two equal sources keep equal weights; the one whose head says nothing loses its weight."""
    from studies.several_sources import decision

    generator = torch.Generator().manual_seed(0)
    features = 0.3 * torch.randn(96, 576, generator=generator)
    features[:, :3] += 6 * torch.eye(3)[torch.arange(96) % 3]
    one = tiny_model()
    probs, shares = decision([one, one], features, 0)
    assert probs.shape == (96, 3)
    torch.testing.assert_close(probs.sum(dim=1), torch.ones(96))
    assert shares == [0.5, 0.5]
    mute = dataclasses.replace(one, classifier=copy.deepcopy(one.classifier))
    with torch.no_grad():
        mute.classifier.head.parametrizations.weight.original0.zero_()
    assert decision([one, mute], features, 0)[1][0] > 0.5


@pytest.mark.parametrize(("torn", "kept"), [(False, 2), (True, 0)])
def test_the_old_guard_on_a_run(torn, kept):
    """Three classes of 60 images each. Adaptation mends a tenth of the predictions, or tears a class into two."""
    from studies.old_guard import Run, kept_epoch

    right = torch.arange(180) // 60
    wrong = torch.where(torch.arange(180) % 10 == 0, (right + 1) % 3, right)
    split = torch.where((right == 0) & (torch.arange(180) % 2 == 0), 1, right)
    path = torch.stack([right, split, split] if torn else [wrong, right, right])
    probs = torch.nn.functional.one_hot(path[0], 3).float() * 0.8 + 0.2 / 3
    probs[::10] = torch.nn.functional.one_hot(path[0][::10], 3).float() * 0.1 + 0.3
    near = torch.stack(
        [60 * (i // 60) + (i % 60 + torch.arange(1, 6)) % 60 for i in torch.arange(180)]
    )
    entropy = torch.tensor([0.6, 0.3, 0.1])
    information = torch.tensor([0.4, 0.7, 0.9])
    assert kept_epoch(Run(path, entropy, information, probs, probs, near)) == kept


def test_emoji_situations_share_miss_and_add_what_they_say():
    """Class 0 has too few images in the target, so no situation has it."""
    source, target = torch.arange(len(emoji.GROUPS)).repeat(2, 10)
    target = target[(target != 0) | (torch.arange(len(target)) < 5)]
    splits = {name: emoji.split_of(name, (source, target)) for name in emoji.KNOWN + emoji.NEW}
    for known, shown in splits.values():
        assert 0 not in known + shown
        assert len(set(known)) == len(known)
    assert splits["all"][0] == splits["all"][1]
    assert set(splits["partial"][1]) < set(splits["partial"][0])
    assert set(splits["open"][0]) < set(splits["open"][1])
    known, shown = map(set, splits["universal"])
    assert known & shown
    assert known - shown
    assert shown - known
    store, rows = emoji.store_of(
        (torch.rand(len(target), 3), target), *reversed(splits["few-open"])
    )
    known = splits["few-open"][0]
    expected = [known.index(c) if c in known else len(known) for c in target[rows].tolist()]
    assert store.labels.tolist() == expected
