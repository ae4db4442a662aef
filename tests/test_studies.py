"""Scripts of studies that other figures rest on: splits, mixtures, the old guard."""

from __future__ import annotations

import copy
import dataclasses
import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parent.parent))

from studies import emoji

from tiny_models import tiny_model
from usfan.data.store import Store


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
