"""The questions about a target and the answers to them.

There are two kinds of question. `name`: the label settles the name of a group of images; the model learns from it.
`judge`: the image was drawn at random to compare the adapted model with the source model, and nothing learns from it.
Names come first: the more they are in doubt, the more, at most one for each class. Then come comparisons, until it is
decided which model is better. Answers to names move the names, so that later questions differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from usfan.adaptation.verdict import exchange_note
from usfan.data.decoding.decode import one_line
from usfan.data.few_labels import JUDGE, NAME, SKIP, class_number
from usfan.data.labels import ClassNames
from usfan.errors import DataError
from usfan.labelling.answers import Answer, answer_table
from usfan.labelling.target import LabelTarget
from usfan.maths.decision import NO_ANSWER
from usfan.maths.model_comparison import ModelComparison, compare_models, next_compared
from usfan.maths.names import IN_DOUBT, TargetNaming
from usfan.maths.questions import name_questions
from usfan.maths.user_labels import UserLabels

CANDIDATES = 9
"""Classes that a question offers at once."""


@dataclass(frozen=True)
class Question:
    """An image to label."""

    row: int
    image: str
    kind: str
    """name or judge."""
    candidates: tuple[str, ...]
    """The most probable classes: the first one first, or, of a comparison, in the order of the classes."""


class Board:
    """Questions and answers about one target."""

    def __init__(
        self,
        target: LabelTarget,
        answers: Sequence[Answer] = (),
        names: int | None = None,
        naming: TargetNaming | None = None,
    ) -> None:
        """`names`: how many names to ask for before comparisons; by default in proportion to their doubt, at most one
        for each class. `naming`: that of these answers, if it is known."""
        self.target = target
        self.rows = {image: row for row, image in enumerate(target.images)}
        self.class_names = ClassNames(target.classes)
        doubt = min(target.doubt / IN_DOUBT, 1.0)
        self.names = round(len(target.classes) * doubt) if names is None else names
        self.answers: list[Answer] = []
        for answer in answers:
            self.add(answer)
        self.take(naming or target.naming(self.name_labels))

    def add(self, answer: Answer) -> None:
        """An answer; a second one about the same image replaces the first."""
        if answer.image not in self.rows:
            raise DataError(f"{one_line(answer.image)} is not an image of this run")
        if answer.question not in (NAME, JUDGE):
            raise DataError(f"a question is {NAME} or {JUDGE}, not {one_line(answer.question)}")
        if answer.label != SKIP:
            class_number(f"{one_line(answer.image)}: ", answer.label, self.class_names)
        self.answers = [a for a in self.answers if a.image != answer.image]
        self.answers.append(answer)

    def label_of(self, image: str) -> str | None:
        """Answer to an image."""
        return next((answer.label for answer in self.answers if answer.image == image), None)

    def labels(self, kind: str) -> Tensor:
        """N classes that answer questions of this kind, as `answer_table` has them."""
        return answer_table(self.answers, kind, self.target.images, self.target.classes)

    def update(self) -> None:
        """Let the answers move the names. This takes a second or more with many images."""
        self.take(self.target.naming(self.name_labels))

    @property
    def name_labels(self) -> UserLabels:
        return UserLabels.of_table(self.labels(NAME), len(self.target.classes))

    def take(self, naming: TargetNaming) -> None:
        """Ask by these names from now on."""
        self.soft_labels = naming.labels_now
        self.doubt = naming.clusters.share_in_doubt

    @property
    def comparison(self) -> ModelComparison:
        return compare_models(self.target.before, self.target.after, self.labels(JUDGE))

    @property
    def exchange_note(self) -> str:
        """Names that the adapted model seems to exchange, by all answers; empty if there are none."""
        answers = torch.maximum(self.labels(NAME), self.labels(JUDGE))
        return exchange_note(self.target.after, answers, self.target.classes)

    @property
    def names_left(self) -> int:
        """Names to ask for before comparisons."""
        return max(self.names - sum(answer.question == NAME for answer in self.answers), 0)

    def questions(self, count: int) -> list[Question]:
        """The next questions, the most urgent first."""
        names = self.of_kind(NAME, min(count, self.names_left))
        judged = self.of_kind(JUDGE, count - len(names))
        asked = {question.row for question in names}
        questions = [*names, *(question for question in judged if question.row not in asked)]
        if len(questions) < count:
            rows = {question.row for question in questions}
            more = self.of_kind(NAME, count)
            questions += [question for question in more if question.row not in rows]
        return questions[:count]

    def of_kind(self, kind: str, count: int) -> list[Question]:
        """The next questions of one kind; fewer if no more images are left."""
        if count < 1:
            return []
        table = self.labels(kind)
        if kind == NAME:
            answered = (table != NO_ANSWER).nonzero().flatten()
            points = self.target.view.points
            rows = name_questions(points, self.soft_labels, answered, count)
        else:
            rows = next_compared(self.target.before, self.target.after, table, count)
        return [self.question(row, kind) for row in rows.tolist()]

    def question(self, row: int, kind: str) -> Question:
        """Candidates of a comparison hold both predictions, and their order favours no model."""
        target = self.target
        best = self.soft_labels[row].argsort(descending=True).tolist()
        if kind == JUDGE:
            predictions = {int(target.before[row]), int(target.after[row])}
            best.sort(key=lambda k: k not in predictions)
        best = best[:CANDIDATES]
        if kind == JUDGE:
            best.sort()
        candidates = tuple(target.classes[k] for k in best)
        return Question(row, target.images[row], kind, candidates)
