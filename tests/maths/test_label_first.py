"""The images to label first: unsure, like many others, and unlike each other."""

from __future__ import annotations

import pytest
import torch

from usfan.errors import ConfigError
from usfan.maths.label_first import label_first
from usfan.maths.outputs import Outputs


def outputs(features: torch.Tensor, sure: torch.Tensor) -> Outputs:
    """Two classes; `sure` is the probability of the first."""
    probs = torch.stack([sure, 1 - sure], dim=1)
    return Outputs(features, probs.log(), probs, probs, torch.zeros(len(sure)))


def groups(counts: list[int], sure: list[float]) -> tuple[Outputs, torch.Tensor]:
    """Groups of images in directions of their own; which image is of which group."""
    generator = torch.Generator().manual_seed(0)
    group = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    features = 5 * torch.eye(8)[group] + 0.3 * torch.randn(len(group), 8, generator=generator)
    return outputs(features, torch.tensor(sure)[group]), group


def test_one_of_each_uncertain_group_and_none_of_the_sure():
    target, group = groups([40, 40, 40, 40], [0.5, 0.55, 0.6, 0.9999])
    chosen = label_first(target, 3)
    assert sorted(group[chosen].tolist()) == [0, 1, 2]
    assert len(set(chosen.tolist())) == 3
    assert torch.equal(chosen, label_first(target, 3))  # the same every time


def test_the_larger_group_comes_first():
    target, group = groups([20, 90, 50], [0.5, 0.5, 0.5])
    assert group[label_first(target, 3)].tolist() == [1, 2, 0]


def test_an_image_in_the_middle_of_its_group_is_chosen():
    target, _ = groups([60], [0.5])
    unit = torch.nn.functional.normalize(target.features, dim=1)
    distance = (unit - unit.mean(dim=0)).norm(dim=1)
    assert label_first(target, 1).tolist() == [int(distance.argmin())]


def test_images_that_have_a_label_are_not_chosen_again():
    target, _ = groups([30, 30], [0.5, 0.6])
    first = label_first(target, 4)
    assert not set(first.tolist()) & set(label_first(target, 4, labelled=first).tolist())
    everything = label_first(target, 100)
    assert sorted(everything.tolist()) == list(range(60))
    assert len(label_first(target, 100, labelled=first)) == 56


def test_images_that_are_all_the_same():
    same = outputs(torch.ones(9, 4), torch.full((9,), 0.5))
    assert len(set(label_first(same, 3).tolist())) == 3


def test_wrong_input():
    target, _ = groups([5], [0.5])
    with pytest.raises(ConfigError, match="at least 1"):
        label_first(target, 0)
    with pytest.raises(ConfigError, match="hold no features"):
        label_first(outputs(torch.zeros(4, 0), torch.full((4,), 0.5)), 2)
