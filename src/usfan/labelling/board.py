"""The questions about a target and the answers to them.

There are two kinds of question. `name`: the label settles the name of a group of images; the model learns from it.
`judge`: the image was drawn at random to compare the adapted model with the source model, and nothing learns from it.
Names come first if they are in doubt, one for each class; then judgements until it is decided which model is better.
Answers to names move the names, so that later questions differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from usfan.data.few_labels import JUDGE, NAME, NONE_OF_THESE, SKIP
from usfan.errors import DataError
from usfan.labelling.answers import Answer
from usfan.labelling.target import LabelTarget
from usfan.maths.decision import NO_ANSWER, SKIPPED
from usfan.maths.judgement import Judgement, judge, next_judged
from usfan.maths.names import IN_DOUBT
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
    """The most probable classes, the first one first."""


class Board:
    """Questions and answers about one target."""

    def __init__(
        self, target: LabelTarget, answers: Sequence[Answer] = (), names: int | None = None
    ) -> None:
        """`names`: how many names to ask for before judgements; by default one for each class if names are in doubt."""
        self.target = target
        self.rows = {image: row for row, image in enumerate(target.images)}
        self.numbers = {name: number for number, name in enumerate(target.classes)}
        in_doubt = target.doubt >= IN_DOUBT
        self.names = len(target.classes) * in_doubt if names is None else names
        self.answers: list[Answer] = []
        for answer in answers:
            self.add(answer)
        self.update()

    def add(self, answer: Answer) -> None:
        """An answer; a second one about the same image replaces the first."""
        if answer.image not in self.rows:
            raise DataError(f"{answer.image} is not an image of this run")
        if answer.label not in (*self.numbers, NONE_OF_THESE, SKIP):
            raise DataError(f"the model has no class {answer.label}")
        self.answers = [a for a in self.answers if a.image != answer.image]
        self.answers.append(answer)

    def undo(self) -> Answer | None:
        """Take back the last answer."""
        return self.answers.pop() if self.answers else None

    def labels(self, kind: str) -> Tensor:
        """N classes that answer questions of this kind: K for none of them, `NO_ANSWER`, or `SKIPPED` for images that
        do not count."""
        table = torch.full((len(self.target),), NO_ANSWER)
        for answer in self.answers:
            number = SKIPPED
            if answer.question == kind and answer.label != SKIP:
                number = self.numbers.get(answer.label, len(self.numbers))
            table[self.rows[answer.image]] = number
        return table

    def update(self) -> None:
        """Let the answers move the names. This takes a second or more with many images."""
        learned = UserLabels.of_table(self.labels(NAME), len(self.numbers))
        self.soft_labels = self.target.naming(learned).labels_now

    @property
    def judgement(self) -> Judgement:
        return judge(self.target.before, self.target.after, self.labels(JUDGE))

    @property
    def names_left(self) -> int:
        """Names to ask for before judgements."""
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
            rows = next_judged(self.target.before, self.target.after, table, count)
        return [self.question(row, kind) for row in rows.tolist()]

    def question(self, row: int, kind: str) -> Question:
        most = min(CANDIDATES, len(self.target.classes))
        best = self.soft_labels[row].topk(most).indices.tolist()
        candidates = tuple(self.target.classes[k] for k in best)
        return Question(row, self.target.images[row], kind, candidates)
