"""The verdict on an adaptation: better, worse or unknown, and one sentence with figures and the next step.

The terminal, metrics.json, the report and Python show this sentence. Labels decide if there are any. Otherwise the
images do, as far as they can: a gain that is certain counts only if accuracy can be told at all (`estimate`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from torch import Tensor

from usfan.adaptation.estimate import AccuracyEstimate, ends_text
from usfan.adaptation.guard import EpochScore
from usfan.errors import printable
from usfan.maths.agreement import Interval
from usfan.maths.model_comparison import ModelComparison, exchanged_names

ASSUMPTION = "if the source model names its classes rightly"
"""Assumption that no image can show: a source model whose class names are exchanged looks the same."""
USUAL_ANSWERS = 14
"""Labels that decide half of the clear differences (docs/studies/labels.md)."""
LABEL = "usfan label RUN"
NO_DIFFERENCE = "There is no difference worth having"
WIDEST_INTERVAL = 0.5
"""Width of the interval of a measured accuracy that is worth telling: labels of changed images say nothing of the
others."""


@dataclass(frozen=True)
class Verdict:
    """How the adapted model compares with the source model."""

    value: str
    """better, worse or unknown."""
    sentence: str
    next: str = ""
    """Next step that tells more, with the command; RUN stands for the run folder."""

    def to_dict(self) -> dict[str, str]:
        """For JSON."""
        return asdict(self)

    def in_folder(self, folder: str) -> str:
        """Sentence and next step, with the name of the run folder."""
        following = f" {self.next[:1].upper()}{self.next[1:]}" if self.next else ""
        return self.sentence + following.replace("RUN", folder)


def verdict_of(
    score: EpochScore,
    estimate: AccuracyEstimate,
    comparison: ModelComparison | None = None,
    *,
    classes: int,
    in_use: str,
) -> Verdict:
    """From the guard's figures of the model that it judged, the estimated accuracies of both models, and what the
    user's labels say: about random images, or those that it learned from, held out in turn. Until it is known which
    model is better, and after a collapse, the sentence says which one is `in_use`: source or adapted."""
    verdict = judgement(score, estimate, comparison, classes)
    answered = comparison is not None and comparison.answers > 0
    is_open = verdict.value == "unknown" and (answered or score.changed > 0)
    if not is_open and (answered or not score.collapse):
        return verdict
    return replace(verdict, sentence=f"{verdict.sentence} The {in_use} model is in use.")


def judgement(
    score: EpochScore,
    estimate: AccuracyEstimate,
    comparison: ModelComparison | None,
    classes: int,
) -> Verdict:
    if comparison is not None and comparison.answers:
        return measured_verdict(comparison)
    if score.collapse:
        return Verdict("worse", f"The adapted model collapsed: {score.collapse}.")
    if score.changed == 0:
        return Verdict("unknown", "No prediction changed: there is nothing to compare.")
    before = estimate.before
    after = estimate.after
    if before is None or after is None:
        sentence = f"Nobody can tell without labels which model is better: {estimate.reason}."
        if estimate.possible is not None:
            first, second = map(ends_text, estimate.possible)
            sentence += f" {first[:1].upper()}{first[1:]} are right before, {second} after."
        return Verdict("unknown", sentence, ask(max(classes, USUAL_ANSWERS)))
    figures = f"{range_text(before)} right before, {range_text(after)} after, {ASSUMPTION}"
    if score.gain.low > 0:
        sentence = f"The adapted model is better: {figures}."
        return Verdict("better", sentence, f"to be sure, {ask(USUAL_ANSWERS)}")
    if score.gain.high < 0:
        sentence = f"The adapted model is worse: {figures}."
        return Verdict("worse", sentence, f"to be sure, {ask(USUAL_ANSWERS)}")
    sentence = f"The images do not show which model is better: {figures}."
    return Verdict("unknown", sentence, ask(USUAL_ANSWERS))


def measured_verdict(comparison: ModelComparison) -> Verdict:
    """The verdict of the user's labels."""
    decision = comparison.decision
    answers = f"{comparison.answers} label{'s' * (comparison.answers != 1)}"
    if comparison.held_out:
        answers += ", each held out in turn"
    figures = difference_text(comparison.decision.difference)
    adapted = comparison.adapted
    if adapted.high - adapted.low < WIDEST_INTERVAL:
        figures += (
            f", {range_text(comparison.source)} right before and {range_text(adapted)} after"
        )
    if decision.value in ("better", "worse"):
        return Verdict(
            decision.value, f"The adapted model is {decision.value}, by {answers}: {figures}."
        )
    if decision.value == "no difference":
        sentence = f"{NO_DIFFERENCE}, by {answers}: {figures}."
        return Verdict("unknown", sentence)
    sentence = f"It is not decided yet which model is better, by {answers}: {figures}."
    return Verdict("unknown", sentence, ask(decision.more))


def exchange_note(predictions: Tensor, answers: Tensor, classes: Sequence[str]) -> str:
    """What N answers say of names that a model exchanges; empty if nothing."""
    pairs = exchanged_names(predictions.cpu(), answers.cpu(), len(classes))
    texts = [f"{printable(classes[a])} and {printable(classes[b])}" for a, b in pairs]
    if not texts:
        return ""
    return f" By your labels the adapted model seems to exchange {'; '.join(texts)}."


def ask(count: int) -> str:
    return f"label {count} image{'s' * (count != 1)}: {LABEL}"


def difference_text(gain: Interval) -> str:
    """`+10 points (5 to 12)`."""
    value, low, high = (points(end) for end in (gain.value, gain.low, gain.high))
    return f"{value} points ({low} to {high})"


def points(share: float) -> str:
    """`+10`; a decimal more for a loss that would be rounded to 0."""
    if -0.005 <= share < 0:
        return f"{min(100 * share, -0.1):.1f}"
    return f"{100 * share:+.0f}"


def range_text(share: Interval) -> str:
    """`81 % (74 to 88)`."""
    return f"{100 * share.value:.0f} % ({100 * share.low:.0f} to {100 * share.high:.0f})"
