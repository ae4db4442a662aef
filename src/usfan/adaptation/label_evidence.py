"""What the user's labels say of the source model and the adapted one.

Labels of images that were drawn at random to compare models (`judge`) decide with a guarantee (`maths.judgement`).
Labels that the model learned from are held out in five folds: the answer of names, clusters and the other labels
(`maths.names.Lesson`) stands for the adapted model. This is a guarantee only if the user chose these images at random.

Shapes: N images, K classes, L labels to learn from.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch
from torch import Tensor

from usfan.adaptation.estimate import percentages
from usfan.adaptation.guard import GuardDecision
from usfan.adaptation.verdict import difference_text
from usfan.maths.decision import NO_ANSWER, SKIPPED, decide
from usfan.maths.judgement import Judgement, judge
from usfan.maths.measurement import measured_accuracy
from usfan.maths.names import TargetNaming

log = logging.getLogger(__name__)


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
        table = torch.where(judge_labels != NO_ANSWER, judge_labels, table)
        judged = judge(before.cpu(), after.cpu(), table)
        if judged.answers == 0:
            log.warning(
                "no judge label counts: the first image that usfan asks about has no answer"
            )
            return cls(None, learned)
        return cls(judged, learned)

    @property
    def judgement(self) -> Judgement | None:
        """The first judgement that is decided, that of random images first; if none is, that of random images if any
        of them counts (`maths.judgement`)."""
        both = (self.judged, self.learned)
        judgements = [judgement for judgement in both if judgement and judgement.answers]
        for judgement in judgements:
            if judgement.decision.value != "not yet":
                return judgement
        return judgements[0] if judgements else None

    @property
    def preference(self) -> tuple[str, Judgement] | None:
        """The model that the labels speak for, adapted or source, and the judgement that says so. A model that learned
        from labels needs less evidence to be kept than to be dropped, unless random images speak against it."""
        decided = {"better": "adapted", "worse": "source"}
        judgement = self.judgement
        if judgement is None or judgement.decision.value == "no difference":
            return None
        if judgement.decision.value in decided:
            return decided[judgement.decision.value], judgement
        against = self.judged is not None and self.judged.decision.difference.value < 0
        if self.learned and self.learned.decision.difference.value > 0 and not against:
            return "adapted", self.learned
        return None

    def follow(self, decision: GuardDecision, latest: int) -> GuardDecision:
        """The guard's decision, or that of the labels if they speak; `latest` is the last epoch."""
        if self.preference is None or self.preference[0] == decision.kept:
            return decision
        model, judgement = self.preference
        gain = difference_text(judgement.decision.difference)
        reason = f"your labels decide: {gain} by {judgement.answers} labels"
        if model == "adapted":
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
