"""A few labels of the user's own: every method learns from them, frozen or moving."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from running_terms import random_target, running
from spying import squares, witness_of
from test_label_terms import step

import usfan
from oracles.losses import cross_entropy
from planning import resolve
from usfan.adaptation.methods import METHODS
from usfan.adaptation.target_classes import estimate_target_classes
from usfan.adaptation.terms.pseudo_labels import PseudoLabels
from usfan.adaptation.terms.user_labels import UserLabelsTerm
from usfan.adaptation.witness import thumbnails
from usfan.engine.features import features_of
from usfan.engine.loop import Loop
from usfan.engine.passes import engine_store
from usfan.engine.runtime import start_runtime
from usfan.errors import ConfigError
from usfan.maths.outputs import Outputs
from usfan.maths.user_labels import UserLabels
from usfan.metrics.image_table import adaptation_metrics
from usfan.store.run_folder import RunFolder

TINY = {
    "epochs": 4,
    "batch_size": 8,
    "guard": False,
    "lr": 0.05,
    "progress": False,
}
TINY |= {"given_label_weight": 1.0}
WRONG = {0: "b", 4: "c", 8: "a", 9: "b", 13: "c", 17: "a"}
"""Labels that nothing but the labels themselves can teach: sample i is of class i mod 3."""
TRAINED = [name for name, row in METHODS.items() if row.terms]


def taught(model) -> int:
    predicted = model.passes.after.logits.argmax(dim=1)
    return sum(model.classes[int(predicted[i])] == name for i, name in WRONG.items())


@pytest.mark.parametrize("method", TRAINED)
def test_every_method_learns_from_given_labels(source, method):
    data = squares()
    given = {**TINY, **witness_of(method, data)}
    if method in ("tent", "tent-online"):
        given |= {"epochs": 12, "lr": 0.2}
    plain, told = (
        usfan.adapt(source, data, method, labels=labels, **given) for labels in (None, WRONG)
    )
    assert taught(told) > taught(plain)
    assert "loss_given" in told.history["records"][-1]
    assert told.history["labels"]["count"] == 6


def test_frozen_and_moving_backbones(source):
    frozen = usfan.adapt(
        source, squares(), "shot", labels=WRONG, tune="new", **{**TINY, "epochs": 15}
    )
    moving = usfan.adapt(
        source, squares(), "shot", labels=WRONG, tune="all", **{**TINY, "epochs": 15}
    )
    assert taught(frozen) >= 5
    assert taught(moving) >= 5
    store = features_of(source.classifier, stored(source), source.spec, start_runtime(None))
    given = usfan.adapt(
        source, store, "shot", labels=WRONG, tune="new", **{**TINY, "epochs": 15}
    )
    assert torch.allclose(given.passes.after.probs, frozen.passes.after.probs, atol=1e-5)


def test_the_setting_is_decided_with_given_labels_as_names(source, monkeypatch):
    seen = []

    def spy(features, names, second, **more):
        seen.append(names)
        return estimate_target_classes(features, names, second, **more)

    monkeypatch.setattr("usfan.adaptation.run.estimate_target_classes", spy)
    usfan.adapt(source, squares(), "shot", labels=WRONG, **TINY)
    names = seen[0].exp()
    assert [source.classes[k] for k in names[list(WRONG)].argmax(dim=1)] == list(WRONG.values())
    torch.testing.assert_close(names[list(WRONG)].amax(dim=1), torch.ones(len(WRONG)))
    assert float(names[1].max()) < 1


def test_new_classes_are_looked_for_in_a_second_view(source, monkeypatch):
    """The pixels beside a network from scratch; given features beside its own; its own beside a witness's."""
    seen = []

    def spy(features, names, second, **more):
        seen.append((features, second(torch.tensor([0, 2]))))
        return estimate_target_classes(features, names, second, **more)

    monkeypatch.setattr("usfan.adaptation.run.estimate_target_classes", spy)
    store = stored(source)
    for tune in ("all", "new"):
        usfan.adapt(source, squares(), "shot", tune=tune, **TINY)
        assert torch.equal(
            seen.pop()[1], thumbnails(store, torch.tensor([0, 2]), start_runtime(None), 16)
        )
    given = features_of(source.classifier, store, source.spec, start_runtime(None))
    usfan.adapt(source, given, "shot", tune="new", **TINY)
    assert torch.equal(seen[0][1], given.values[[0, 2]])
    witness = torch.randn(len(store), 20, generator=torch.Generator().manual_seed(0))
    usfan.adapt(source, given, "u-sfan++", witness=witness, tune="new", **TINY)
    features, own = seen[1]
    assert torch.equal(features, witness)
    torch.testing.assert_close(own, seen[0][0][[0, 2]])


def stored(source):
    return engine_store(squares().without_labels(), source.spec, start_runtime(None))


def test_a_run_with_labels_goes_on_as_if_nothing_had_been(source, tmp_path, monkeypatch):
    whole = usfan.adapt(
        source, squares(), "u-sfan+", labels=WRONG, run=tmp_path / "whole", **TINY
    )
    plain = RunFolder.save_checkpoint

    def save_and_stop(self, *rest):
        plain(self, *rest)
        raise KeyboardInterrupt

    monkeypatch.setattr(RunFolder, "save_checkpoint", save_and_stop)
    with pytest.raises(KeyboardInterrupt):
        usfan.adapt(source, squares(), "u-sfan+", labels=WRONG, run=tmp_path / "run", **TINY)
    monkeypatch.setattr(RunFolder, "save_checkpoint", plain)
    again = usfan.adapt(
        source, squares(), "u-sfan+", labels=WRONG, run=tmp_path / "run", resume=True, **TINY
    )
    assert torch.equal(again.passes.after.probs, whole.passes.after.probs)
    assert again.history["labels"] == whole.history["labels"]


def test_terms_are_told_the_label_in_place_of_the_prediction():
    draw = torch.Generator().manual_seed(0)
    logits = torch.randn(5, 3, generator=draw)
    outputs = Outputs(
        torch.randn(5, 2), logits, logits.softmax(1), logits.softmax(1), torch.ones(5)
    )
    given = UserLabels.of_table(torch.tensor([-1, 2, -1, 0, -1]), 3)
    told = given.replace_predictions(outputs)
    assert told.logits.argmax(1)[[1, 3]].tolist() == [2, 0]
    assert torch.allclose(told.logits.softmax(1), told.probs)
    assert torch.allclose(told.probs.sum(1), torch.ones(5))
    assert told.mutual_information.tolist() == [1, 0, 1, 0, 1]
    rest = [0, 2, 4]
    for name in ("logits", "probs", "posterior_probs", "features"):
        assert torch.equal(getattr(told, name)[rest], getattr(outputs, name)[rest])
    assert torch.equal(outputs.logits, logits)  # what the pass said stays as it is


def test_labelled_images_go_beside_the_batch_and_take_turns(source, monkeypatch):
    """Batches and their loss terms stay those of the target; the term is the mean cross-entropy of those beside."""
    seen = []
    plain = Loop.step

    def step(self, samples, staged=None):
        seen.append(samples.tolist())
        return plain(self, samples, staged)

    monkeypatch.setattr(Loop, "step", step)
    model = usfan.adapt(
        source, squares(), "shot-im", labels=WRONG, **{**TINY, "epochs": 1, "lr": 0.0}
    )
    assert {len(samples) for samples in seen} == {
        8 + 4
    }  # at most half as many as the batch has
    beside = [i for samples in seen for i in samples[8:]]
    counts = {i: beside.count(i) for i in WRONG}
    assert sum(counts.values()) == len(beside)
    assert max(counts.values()) - min(counts.values()) <= 1
    assert sorted({i for samples in seen for i in samples[:8]}) == list(range(36))
    assert 0 < model.history["records"][-1]["loss_given"] < 20


def test_the_loss_is_the_mean_cross_entropy_of_those_beside():
    target = random_target()
    given = UserLabels(torch.tensor([4, 9, 30]), torch.tensor([1, 0, 3]))
    context = dataclasses.replace(running(PseudoLabels(0.3), target).context, user_labels=given)
    term = UserLabelsTerm(0.7).started(context)
    samples = torch.tensor([9, 30])
    batch = step(target)
    batch.beside = (samples, target.logits[samples])
    expected = (
        sum(
            cross_entropy(target.logits[i].tolist(), [j == k for j in range(4)])
            for i, k in ((9, 0), (30, 3))
        )
        / 2
    )
    assert float(term(batch)) == pytest.approx(0.7 * expected)
    labels = PseudoLabels(0.3).started(context)
    labels.refresh(target)
    assert labels.labels[given.rows].tolist() == [1, 0, 3]


def test_figures_are_of_the_images_whose_label_was_not_given(source):
    model = usfan.adapt(source, squares(), "shot", labels=WRONG, **TINY)
    metrics = adaptation_metrics(model, squares())
    truth = squares().labels
    rest = torch.tensor([i for i in range(36) if i not in WRONG])
    right = (model.passes.after.logits.argmax(1) == truth)[rest].double().mean()
    assert metrics["after"]["accuracy"] == pytest.approx(100 * float(right))
    assert metrics["before"]["count"] == metrics["after"]["count"] == 30
    assert metrics["labels"] == {"count": 6, "classes": 3}
    chosen = {question.image for question in usfan.questions(model, 30)}
    assert chosen.isdisjoint(squares().where(i) for i in WRONG)  # they have a label already


@pytest.mark.parametrize("method", ["source-only", "bn-adapt", "bn-adapt-online"])
def test_a_method_that_trains_nothing_refuses_labels(source, method):
    with pytest.raises(ConfigError, match=f"{method} trains nothing, so labels cannot help it"):
        usfan.adapt(source, squares(), method, labels=WRONG)


def test_labels_count_less_if_the_whole_network_moves():
    for tune, weight in (("new", 1.0), ("all", 0.15), ("norm", 0.15)):
        config, _ = resolve({"tune": tune}, pretrained=True, classes=3)
        assert config.given_label_weight == weight
    config, _ = resolve({"tune": "all", "given_label_weight": 0.5}, pretrained=True, classes=3)
    assert config.given_label_weight == 0.5


def test_a_weight_of_nothing_and_all_images_labelled(source):
    every = {i: "abc"[i % 3] for i in range(36)}
    model = usfan.adapt(source, squares(), "shot", labels=every, **TINY)
    assert adaptation_metrics(model, squares())["after"]["accuracy"] > 90
    with pytest.raises(ConfigError, match="given_label_weight"):
        usfan.adapt(source, squares(), labels=every, given_label_weight=-1.0)
