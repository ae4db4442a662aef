"""SHOT's optimiser: its schedule, its steps, and what it leaves alone."""

from __future__ import annotations

import pytest
import torch
from process_worker import CLASSES
from small_network import CPU, small_classifier, stage, take_steps

from usfan.engine.optimiser import Optimiser
from usfan.errors import ConfigError
from usfan.models.classifier import Classifier, batch_norms


def test_schedule_falls_as_the_recipe_says() -> None:
    optimiser = Optimiser(small_classifier(), stage(lr=0.02, backbone_lr_scale=0.1), 40, CPU)
    for step in (0, 1, 20, 39):
        expected = 0.02 * (1 + 10 * step / 40) ** -0.75
        assert optimiser.schedule(step) == pytest.approx(expected, rel=1e-12)
        assert [g["lr"] for g in optimiser.sgd.param_groups] == pytest.approx(
            [0.1 * expected, expected], rel=1e-12
        )


def test_first_steps_are_nesterov_by_hand() -> None:
    """v ← μ v + g + λθ,  θ ← θ − lr (g + λθ + μ v)."""
    classifier = small_classifier()
    optimiser = Optimiser(classifier, stage(lr=0.1, momentum=0.9, weight_decay=0.01), 10, CPU)
    theta = classifier.head.bias
    theta.data.fill_(2.0)
    value = 2.0
    velocity = 0.0
    for step in range(3):
        lr = optimiser.schedule(step)
        optimiser.update(3 * theta.sum())
        slope = 3 + 0.01 * value
        velocity = 0.9 * velocity + slope
        value -= lr * (slope + 0.9 * velocity)
        assert theta.detach().tolist() == pytest.approx([value] * CLASSES, rel=1e-5)


def test_frozen_head_is_not_updated() -> None:
    classifier = small_classifier()
    classifier.head.requires_grad_(False)
    before = {k: v.clone() for k, v in classifier.state_dict().items()}
    take_steps(classifier, Optimiser(classifier, stage(head=False), 4, CPU), range(2))
    changed = {k for k, v in classifier.state_dict().items() if not torch.equal(v, before[k])}
    assert not any(k.startswith("head.") for k in changed)
    assert "backbone.0.weight" in changed


def test_optimiser_goes_on_where_it_stopped() -> None:
    whole = small_classifier()
    halves = small_classifier()
    take_steps(whole, Optimiser(whole, stage(), 6, CPU), range(6))
    first = Optimiser(halves, stage(), 6, CPU)
    assert first.tensors() == {}
    take_steps(halves, first, range(3))
    saved = {k: v.clone() for k, v in first.tensors().items()}
    second = Optimiser(halves, stage(), 6, CPU)
    second.restore(saved)
    take_steps(halves, second, range(3, 6))
    for name, tensor in whole.state_dict().items():
        assert torch.equal(tensor, halves.state_dict()[name]), name


def changed_by_steps(classifier: Classifier, optimiser: Optimiser, tune: str) -> set[str]:
    before = {k: v.clone() for k, v in classifier.state_dict().items()}
    take_steps(classifier, optimiser, range(2), tune)
    return {k for k, v in classifier.state_dict().items() if not torch.equal(v, before[k])}


def test_what_does_not_move_has_no_gradient_and_no_state() -> None:
    """Neither memory nor time goes into a frozen part: no gradient, no momentum, no new statistics."""
    sizes = {}
    for tune in ("new", "norm", "all"):
        classifier = small_classifier()
        optimiser = Optimiser(classifier, stage(tune=tune), 4, CPU)
        changed = changed_by_steps(classifier, optimiser, tune)
        norms = {p for layer in batch_norms(classifier.backbone) for p in layer.parameters()}
        allowed = {"new": set(), "norm": norms, "all": set(classifier.backbone.parameters())}[
            tune
        ]
        moving = {p for p in classifier.backbone.parameters() if p.requires_grad}
        assert moving == allowed
        assert all(
            (p.grad is None) == (p not in allowed) for p in classifier.backbone.parameters()
        )
        assert not (set(optimiser.sgd.state) & set(classifier.backbone.parameters())) - allowed
        sizes[tune] = len(optimiser.tensors())
        assert any(name.startswith("backbone.") for name in changed) == (tune != "new")
        assert ("backbone.0.weight" in changed) == (tune == "all")
        assert ("backbone.1.running_mean" in changed) == (tune != "new")
        assert {"bottleneck.0.weight", "head.bias"} <= changed
    assert sizes["new"] < sizes["norm"] < sizes["all"]


def test_parameters_of_terms_move_too() -> None:
    own = torch.ones(3, requires_grad=True)
    optimiser = Optimiser(small_classifier(), stage(lr=0.1), 4, CPU, [own])
    optimiser.schedule(0)
    optimiser.update((own * torch.arange(3)).sum())
    assert own.detach().tolist() == pytest.approx(
        [1 - 1e-4 * 1.9, *(1 - 0.1 * 1.9 * (g + 1e-3) for g in (1, 2))]
    )


def test_nothing_to_train_is_said() -> None:
    classifier = small_classifier()
    classifier.bottleneck = torch.nn.Identity()
    with pytest.raises(ConfigError, match="tune=new: this network has no such layers"):
        Optimiser(classifier, stage(tune="new", head=False), 4, CPU)
    Optimiser(classifier, stage(tune="new", head=False), 0, CPU)
