"""Evidence of the user's labels for the source model or the adapted one.

Labels of images that were drawn at random to compare models (`judge`) decide with a guarantee
(`maths.model_comparison`). Labels that the model learned from are held out in five folds: the answer of names,
clusters and the other labels (`maths.names.Lesson`) stands for the adapted model. This is a guarantee only if the
user chose these images at random.

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
from usfan.maths.measurement import measured_accuracy
from usfan.maths.model_comparison import ModelComparison, compare_models
from usfan.maths.names import TargetNaming

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LabelEvidence:
    """Judgements of both kinds of labels; None if there are none of the kind."""

    random_images: ModelComparison | None = None
    held_out: ModelComparison | None = None

    @classmethod
    def of(
        cls,
        before: Tensor,
        after: Tensor,
        comparison_labels: Tensor | None,
        naming: TargetNaming | None,
    ) -> LabelEvidence:
        """From N predictions of both models, N labels that only compare them, and the naming with its lesson."""
        held_out = None
        table = torch.full_like(before, NO_ANSWER).cpu()
        if naming is not None:
            held_out = compare_by_lesson(before, naming)
            table[naming.labels.all_rows.cpu()] = SKIPPED
        if comparison_labels is None or not bool((comparison_labels >= 0).any()):
            return cls(None, held_out)
        table = torch.where(comparison_labels != NO_ANSWER, comparison_labels, table)
        random_images = compare_models(before.cpu(), after.cpu(), table)
        if random_images.answers == 0:
            log.warning(
                "no judge label counts: the first image that usfan asks about has no answer"
            )
            return cls(None, held_out)
        return cls(random_images, held_out)

    @property
    def comparison(self) -> ModelComparison | None:
        """The first comparison that is decided, that of random images first; if none is, that of random images if any
        of them counts (`maths.model_comparison`)."""
        both = (self.random_images, self.held_out)
        comparisons = [comparison for comparison in both if comparison and comparison.answers]
        for comparison in comparisons:
            if comparison.decision.value != "not yet":
                return comparison
        return comparisons[0] if comparisons else None

    @property
    def preference(self) -> tuple[str, ModelComparison] | None:
        """The model that the labels speak for, adapted or source, and the comparison that says so. A model that learned
        from labels needs less evidence to be kept than to be dropped, unless random images speak against it."""
        decided = {"better": "adapted", "worse": "source"}
        comparison = self.comparison
        if comparison is None or comparison.decision.value == "no difference":
            return None
        if comparison.decision.value in decided:
            return decided[comparison.decision.value], comparison
        against = (
            self.random_images is not None and self.random_images.decision.difference.value < 0
        )
        if self.held_out and self.held_out.decision.difference.value > 0 and not against:
            return "adapted", self.held_out
        return None

    def follow(self, decision: GuardDecision, latest: int) -> GuardDecision:
        """The guard's decision, or that of the labels if they speak; `latest` is the last epoch."""
        if self.preference is None or self.preference[0] == decision.kept:
            return decision
        model, comparison = self.preference
        gain = difference_text(comparison.decision.difference)
        verb = "lean to it" if comparison.decision.value == "not yet" else "decide"
        reason = f"your labels {verb}: {gain} by {comparison.answers} labels"
        if model == "adapted":
            return GuardDecision("adapted", latest, f"{reason}; adapted model kept", latest)
        return GuardDecision("source", 0, f"{reason}; source model kept", decision.candidate)

    def to_dict(self) -> dict[str, object] | None:
        """For JSON, in percent."""
        comparison = self.comparison
        if comparison is None:
            return None
        return {
            "number": comparison.answers,
            "judge_answers": self.random_images.answers if self.random_images else 0,
            "from": "name" if comparison.held_out else "judge",
            "source": percentages(comparison.source),
            "adapted": percentages(comparison.adapted),
        }


def compare_by_lesson(before: Tensor, naming: TargetNaming) -> ModelComparison | None:
    """From N predictions of the source model, and the L labels that were held out in turn."""
    lesson = naming.lesson
    labels = naming.labels
    if lesson is None or not len(labels):
        return None
    count = len(before)
    adapted_right = (lesson.held_out.argmax(dim=1) == labels.labels).cpu()
    source_right = (before[labels.rows] == labels.labels).cpu()
    return ModelComparison(
        decide(adapted_right, source_right, count, count),
        measured_accuracy([(count, source_right)]),
        measured_accuracy([(count, adapted_right)]),
        len(labels),
        held_out=True,
    )
