"""The images to label: from a model that `adapt` returned, or from its run folder."""

from __future__ import annotations

import csv
import html
from collections.abc import Container, Sequence
from pathlib import Path

from usfan.data.few_labels import JUDGE, NAME, NONE_OF_THESE, SKIP, FewLabels
from usfan.data.sources import ImageData
from usfan.errors import ConfigError
from usfan.files import whole_file
from usfan.labelling.answers import ANSWERS_FILE, Answer, read_answers, write_answers
from usfan.labelling.board import Board, Question
from usfan.labelling.target import LabelTarget
from usfan.maths.decision import SKIPPED
from usfan.maths.objectives import certainty_weights
from usfan.metrics.changes import image_names, passes_of
from usfan.metrics.predictions import cell, open_table
from usfan.shield import shielded
from usfan.store.model import AdaptedModel

COLUMNS = ("path", "label", "predicted", "certainty", "mutual_information", "question")
COMPARISONS = 14
"""Rows of label_first.csv that compare the models: half of the clear differences are decided by so many."""


class Questions(list[Question]):
    """A list that a notebook shows as a table."""

    def _repr_html_(self) -> str:
        rows = ["<tr><th>image</th><th>question</th><th>candidates</th></tr>"]
        for question in self:
            cells = (question.image, question.kind, ", ".join(question.candidates))
            columns = "".join(f"<td>{html.escape(text)}</td>" for text in cells)
            rows.append(f"<tr>{columns}</tr>")
        return f"<table>{''.join(rows)}</table>"


@shielded
def questions(target: AdaptedModel | str | Path, count: int | None = None) -> Questions:
    """The images to label next, the most urgent first, each with the kind of its question.

    Args:
        target: A model that `adapt` returned, or the folder of its run. Answers in the run's labels.csv count.
        count: How many; by default one name for each class, and as many comparisons as usually decide.
    """
    if count is not None and count < 1:
        raise ConfigError(f"the number of questions must be at least 1; got {count}")
    return Questions(questions_of(open_board(target), count))


def questions_of(board: Board, count: int | None) -> list[Question]:
    """The next questions of a board; without a count, one name for each class, and comparisons."""
    if count is not None:
        return board.questions(count)
    names = board.of_kind(NAME, len(board.target.classes))
    rows = {question.row for question in names}
    comparisons = board.of_kind(JUDGE, COMPARISONS)
    return [*names, *(question for question in comparisons if question.row not in rows)]


def open_board(target: AdaptedModel | str | Path, names: int | None = None) -> Board:
    """The questions about a target, and the answers so far."""
    if isinstance(target, AdaptedModel):
        label_target = LabelTarget.of_model(target)
        return Board(label_target, learned_answers(target, label_target.images), names)
    return Board(LabelTarget.of_run(Path(target)), answers_in(Path(target)), names)


def answers_in(run: Path) -> list[Answer]:
    """The answers in the labels.csv of a run, if there is one."""
    return read_answers(run / ANSWERS_FILE)


def learned_answers(model: AdaptedModel, images: Sequence[str]) -> list[Answer]:
    """The labels that the model learned from."""
    naming = passes_of(model).naming
    assert naming is not None
    labels = naming.labels
    rows = zip(labels.rows.tolist(), labels.labels.tolist(), strict=True)
    named = [Answer(images[row], model.classes[label]) for row, label in rows]
    return [*named, *(Answer(images[row], NONE_OF_THESE) for row in labels.new_rows.tolist())]


def save_questions(
    folder: Path, model: AdaptedModel, data: ImageData, few: FewLabels | None
) -> int:
    """label_first.csv, and labels.csv if the user gave labels. Returns the number of questions."""
    passes = passes_of(model)
    if passes.naming is None:
        return 0
    rows = range(len(passes.after))
    images = image_names(passes, passes.positions.new_tensor(list(rows)), data)
    answers = []
    if few is not None:
        positions = set(passes.positions.tolist())
        answers = user_answers(few, data, model.classes, positions)
        write_answers(folder / ANSWERS_FILE, answers)
    board = Board(LabelTarget.of_model(model, images), answers, naming=passes.naming)
    asked = questions_of(board, None)
    certainty = certainty_weights(passes.after.posterior_probs)
    predicted = passes.after.logits.argmax(dim=1)
    with whole_file(folder / "label_first.csv") as part, open_table(part) as table:
        writer = csv.writer(table)
        writer.writerow(COLUMNS)
        for question in asked:
            row = question.row
            values = (
                question.image,
                "",
                model.classes[int(predicted[row])],
                float(certainty[row]),
                float(passes.after.mutual_information[row]),
                question.kind,
            )
            writer.writerow(cell(value, digits=4) for value in values)
    return len(asked)


def user_answers(
    few: FewLabels, data: ImageData, classes: Sequence[str], positions: Container[int]
) -> list[Answer]:
    """The user's labels as answers, of the images at these positions: others cannot be read."""
    names = [*classes, NONE_OF_THESE]
    answers = []
    for kind, table in ((NAME, few.learn), (JUDGE, few.judge)):
        for position in (table >= 0).nonzero().flatten().tolist():
            if position in positions:
                answers.append(Answer(data.where(position), names[int(table[position])], kind))
    for position in (few.judge == SKIPPED).nonzero().flatten().tolist():
        if position in positions:
            answers.append(Answer(data.where(position), SKIP, JUDGE))
    return answers
