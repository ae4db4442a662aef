"""Labels of the user decide which model is kept, and what the verdict says."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from spying import squares

import usfan
from usfan.adaptation.estimate import with_labels
from usfan.adaptation.guard import Guard, GuardDecision
from usfan.adaptation.label_evidence import LabelEvidence
from usfan.adaptation.naming import name_target
from usfan.data.few_labels import few_labels
from usfan.labelling.questions import user_answers
from usfan.labelling.target import LabelTarget
from usfan.maths.agreement import Interval
from usfan.maths.decision import NO_ANSWER, Decision, comparison_order
from usfan.maths.model_comparison import SEED, ModelComparison
from usfan.maths.names import View
from usfan.maths.user_labels import UserLabels
from usfan.metrics.stored_images import table_of_model
from usfan.workflow import reorder_labels

QUICK = {"epochs": 2, "batch_size": 8, "progress": False}
GUARD = {
    kept: GuardDecision(kept, 5 if kept == "adapted" else 0, "by the images", 5)
    for kept in ("adapted", "source", "undecided")
}


def says(value: str, gain: float, *, held_out: bool = False) -> ModelComparison:
    decision = Decision(value, Interval(gain, gain - 0.1, gain + 0.1), 20, 5)
    source = Interval(0.5, 0.4, 0.6)
    adapted = Interval(0.5 + gain, 0.4 + gain, 0.6 + gain)
    return ModelComparison(decision, source, adapted, 20, held_out)


@pytest.mark.parametrize("kept", list(GUARD))
@pytest.mark.parametrize(
    ("judged", "learned", "expected"),
    [
        (None, None, None),
        (says("better", 0.2), None, "adapted"),
        (says("worse", -0.2), None, "source"),
        (says("not yet", 0.1), None, None),
        (says("no difference", 0.0), None, None),
        (None, says("not yet", 0.1, held_out=True), "adapted"),
        (None, says("not yet", -0.1, held_out=True), None),
        (None, says("worse", -0.3, held_out=True), "source"),
        (says("worse", -0.2), says("better", 0.2, held_out=True), "source"),
        (says("not yet", -0.1), says("better", 0.2, held_out=True), "adapted"),
        (says("not yet", 0.1), says("not yet", 0.2, held_out=True), "adapted"),
        (says("not yet", -0.1), says("not yet", 0.2, held_out=True), None),
        (says("no difference", 0.0), says("not yet", 0.1, held_out=True), None),
    ],
)
def test_the_guard_follows_labels_if_they_speak(kept, judged, learned, expected):
    evidence = LabelEvidence(judged, learned)
    decision = evidence.follow(GUARD[kept], latest=5)
    if expected in (None, kept):
        assert decision == GUARD[kept]
        return
    assert decision.kept == expected
    assert decision.epoch == (5 if expected == "adapted" else 0)
    sign = "+" if expected == "adapted" else "-"
    verb = "lean to it" if evidence.preference[1].decision.value == "not yet" else "decide"
    assert decision.reason.startswith(f"your labels {verb}: {sign}")


def test_answers_of_which_none_counts_say_nothing():
    """Answers about random images that all come after one without an answer: the labels that taught decide."""
    silent = dataclasses.replace(says("not yet", 0.0), answers=0)
    evidence = LabelEvidence(silent, says("not yet", 0.1, held_out=True))
    assert (
        "+10 points (+0 to +20) by 20 labels"
        in evidence.follow(GUARD["source"], latest=5).reason
    )
    assert LabelEvidence(silent, None).to_dict() is None


def test_random_labels_reverse_the_guard_and_give_the_verdict(source, tmp_path):
    """The answers say that the source model is right about every image that changed, or always wrong."""
    data = squares()
    free = usfan.adapt(source, data, "shot", lr=0.5, guard=False, **QUICK)
    first, last = free.passes.path[0], free.passes.path[-1]
    assert int((first != last).sum()) > 3
    for predictions, kept in ((first, "source"), (last, "adapted")):
        answers = tmp_path / f"{kept}.csv"
        rows = [f"{i},{source.classes[int(k)]},judge" for i, k in enumerate(predictions)]
        answers.write_text("\n".join(["path,label,question", *rows]))
        model = usfan.adapt(source, data, "shot", lr=0.5, labels=answers, **QUICK)
        assert model.history["guard"]["kept"] == kept
        assert model.history["verdict"]["value"] == {"source": "worse"}.get(kept, "better")
        labelled = model.history["labelled"]
        best = {"source": "source", "adapted": "adapted"}[kept]
        assert labelled["from"] == "judge"
        assert labelled[best]["value"] == 100.0
        assert torch.equal(model.passes.after.logits.argmax(1).cpu(), predictions.long().cpu())
        # whichever model is kept, questions and tables compare the adapted one with the source
        target = LabelTarget.of_model(model)
        stored = table_of_model(model, data).judged
        for before, after in ((target.before, target.after), stored):
            assert torch.equal(before, first.long().cpu())
            assert torch.equal(after, last.long().cpu())


def test_a_skipped_image_does_not_end_the_judgement(source, tmp_path):
    data = squares()
    order = comparison_order(len(data), SEED).tolist()
    rows = [f"{row},{source.classes[0]},judge" for row in order]
    rows[1] = f"{order[1]},Skip,judge"
    answers = tmp_path / "answers.csv"
    answers.write_text("\n".join(["path,label,question", *rows]))
    model = usfan.adapt(source, data, "shot", labels=answers, **QUICK)
    assert model.history["labelled"]["number"] == len(data) - 1
    few = few_labels(answers, data, source.classes)
    given = [
        answer.label for answer in user_answers(few, data, source.classes, range(len(data)))
    ]
    assert given.count("skip") == 1
    other = reorder_labels(few, source.classes, source.classes[::-1])
    assert other.judge[order[1]] == few.judge[order[1]]


def test_the_believed_accuracy_moves_with_what_labels_settle():
    assert with_labels(0.8, Interval(0.5, 0.0, 1.0)) > 0.7
    assert with_labels(0.8, Interval(0.5, 0.45, 0.55)) == pytest.approx(0.5, abs=0.03)
    assert with_labels(0.8, Interval(0.5, 0.5, 0.5)) == 0.5


def test_labels_that_taught_are_held_out_in_turn(source):
    data = squares()
    labels = {i: source.classes[i % len(source.classes)] for i in range(12)}
    model = usfan.adapt(source, data, "shot", labels=labels, **QUICK)
    labelled = model.history["labelled"]
    assert labelled["number"] == 12
    assert labelled["from"] == "name"
    low, value, high = (labelled["adapted"][name] for name in ("low", "value", "high"))
    assert 0 <= low <= value <= high <= 100


def test_labels_do_not_make_the_source_models_names_certain(source):
    """The estimate of accuracy is about the names that the source model gives, whatever the user says of them."""
    data = squares()
    wrong = {i: source.classes[(i + 1) % len(source.classes)] for i in range(12)}
    free = usfan.adapt(source, data, "shot", **QUICK).history
    taught = usfan.adapt(source, data, "shot", labels=wrong, **QUICK).history
    told = [history["estimated_accuracy"]["before"] for history in (free, taught)]
    assert told[0] == told[1]


def test_labels_of_no_class_do_not_end_the_comparison():
    """An image that is "none of these" teaches, so it is passed over where it stands first in the order."""
    count = 40
    order = comparison_order(count, SEED)
    features = torch.randn(count, 8, generator=torch.Generator().manual_seed(0))
    table = torch.full((count,), -1)
    table[order[0]] = 3
    labels = UserLabels.of_table(table, 3)
    naming = name_target(View.of(features), features[:, :3].softmax(dim=1), "open", labels)
    answers = torch.zeros(count, dtype=torch.long)
    answers[order[0]] = NO_ANSWER
    before, after = answers.clamp_min(0) + 1, answers.clamp_min(0)
    evidence = LabelEvidence.of(before, after, answers, naming)
    assert evidence.random_images.answers == count - 1
    assert evidence.random_images.decision.value == "better"


def test_labels_cannot_keep_a_model_that_was_not_trained(source):
    labels = {i: source.classes[i % len(source.classes)] for i in range(12)}
    settings = {**QUICK, "epochs": 0}
    history = usfan.adapt(source, squares(), "shot", labels=labels, **settings).history
    assert history["guard"]["kept"] == "source"
    assert history["labelled"] is None


def test_the_model_beside_the_source_has_figures_of_its_own(source, monkeypatch):
    """If the guard cannot tell, temperature and estimate of the adapted model are not those of the source model."""
    chance = GuardDecision("undecided", 0, "cannot tell", 4)
    monkeypatch.setattr(Guard, "finish", lambda self: chance)
    model = usfan.adapt(source, squares(), "shot", **{**QUICK, "epochs": 4, "lr": 0.5})
    adapted = model.alternative
    assert adapted.summary["kept_epoch"] == 4
    assert model.summary["kept_epoch"] == 0
    before = model.summary["estimated_accuracy"]
    after = adapted.summary["estimated_accuracy"]
    assert (before["after"] or before["possible"]) != (after["after"] or after["possible"])
    assert adapted.confidence_temperature != model.confidence_temperature


def test_labels_count_after_a_collapse_that_nobody_guards_against(source):
    labels = {i: source.classes[i % len(source.classes)] for i in range(12)}
    settings = {**QUICK, "epochs": 1, "lr": 1000.0, "guard": False}
    assert usfan.adapt(source, squares(), "shot", labels=labels, **settings).history["labelled"]
