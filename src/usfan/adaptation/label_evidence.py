"""What the user's labels say of the source model and the adapted one.

Labels of images that were drawn at random to compare models (`judge`) decide with a guarantee (`maths.judgement`).
Labels that the model learned from are held out in five folds: the answer of names, clusters and the other labels
(`maths.names.Lesson`) stands for the adapted model. This is a guarantee only if the user chose these images at random.

Shapes: N images, K classes, L labels to learn from.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from usfan.adaptation.estimate import percentages
from usfan.adaptation.guard import GuardDecision
from usfan.maths.decision import NO_ANSWER, SKIPPED, decide
from usfan.maths.judgement import Judgement, judge
from usfan.maths.measurement import measured_accuracy
from usfan.maths.names import TargetNaming


@dataclass(frozen=True)
class LabelEvidence:
    """Judgements of both kinds of labels; None if there are none of the kind."""

    judged: Judgement | None = None
    learned: Judgement | None = None

    @classmethod
    def of(
        cls,
        before: Tensor,
        after: Tensor,
        judge_labels: Tensor | None,
        naming: TargetNaming | None,
    ) -> LabelEvidence:
        """From N predictions of both models, N labels that only compare them, and the naming with its lesson."""
        learned = None
        table = torch.full_like(before, NO_ANSWER).cpu()
        if naming is not None and naming.lesson is not None:
            learned = judge_lesson(before, naming)
            table[naming.labels.all_rows.cpu()] = SKIPPED
        if judge_labels is None or not bool((judge_labels >= 0).any()):
            return cls(None, learned)
        table = torch.where(judge_labels >= 0, judge_labels, table)
        return cls(judge(before.cpu(), after.cpu(), table), learned)

    @property
    def judgement(self) -> Judgement | None:
        """The judgement that counts: of random images, unless these are silent and the others are not. Answers about
        random images may all come after one without an answer; then none counts (`maths.judgement`)."""
        both = (self.judged, self.learned)
        judgements = [judgement for judgement in both if judgement and judgement.answers]
        for judgement in judgements:
            if judgement.decision.value != "not yet":
                return judgement
        return judgements[0] if judgements else None

    @property
    def preferred(self) -> str | None:
        """The model that the labels speak for: adapted, source, or None. A model that learned from labels needs less
        evidence to be kept than to be dropped."""
        decided = {"better": "adapted", "worse": "source"}
        for judgement in (self.judged, self.learned):
            if judgement and judgement.decision.value in decided:
                return decided[judgement.decision.value]
        if self.learned and self.learned.decision.difference.value > 0:
            return "adapted"
        return None

    def follow(self, decision: GuardDecision, latest: int) -> GuardDecision:
        """The guard's decision, or that of the labels if they speak; `latest` is the last epoch."""
        judgement = self.judgement
        if judgement is None or self.preferred in (None, decision.kept):
            return decision
        gain = 100 * judgement.difference
        reason = f"your labels decide: {gain:+.0f} points by {judgement.answers} labels"
        if self.preferred == "adapted":
            return GuardDecision("adapted", latest, f"{reason}; adapted model kept", latest)
        return GuardDecision("source", 0, f"{reason}; source model kept", decision.candidate)

    def to_dict(self) -> dict[str, object] | None:
        """For JSON, in percent."""
        judgement = self.judgement
        if judgement is None:
            return None
        return {
            "number": judgement.answers,
            "from": "name" if judgement.held_out else "judge",
            "source": percentages(judgement.source),
            "adapted": percentages(judgement.adapted),
        }


def judge_lesson(before: Tensor, naming: TargetNaming) -> Judgement | None:
    """From N predictions of the source model, and the L labels that were held out in turn."""
    lesson = naming.lesson
    labels = naming.labels
    if lesson is None or not len(labels):
        return None
    count = len(before)
    adapted_right = (lesson.held_out.argmax(dim=1) == labels.labels).cpu()
    source_right = (before[labels.rows] == labels.labels).cpu()
    return Judgement(
        decide(adapted_right, source_right, count, count),
        measured_accuracy([(count, source_right)]),
        measured_accuracy([(count, adapted_right)]),
        len(labels),
        held_out=True,
    )
