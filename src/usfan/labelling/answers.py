"""Answers of the user, in the order in which they were given: the rows of labels.csv.

    path,label,question

`label` is a class, `none of these` for an image of no class of the model, or `skip` for one that nobody can tell.
`question` is `name` for images to learn from and `judge` for images that compare models; a model never learns from the
latter. A table without this column is one of names.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from usfan.budget import allowed
from usfan.data.decoding.decode import one_line
from usfan.data.few_labels import JUDGE, NAME, SKIP
from usfan.data.labels import canonical
from usfan.data.lists import MOST_LIST, entries_of, text_of
from usfan.errors import DataError
from usfan.files import Folder, whole_file
from usfan.maths.decision import NO_ANSWER, SKIPPED
from usfan.metrics.predictions import open_table

ANSWERS_FILE = "labels.csv"
COLUMNS = ("path", "label", "question")


@dataclass(frozen=True)
class Answer:
    """One answer of the user."""

    image: str
    """Its path."""
    label: str
    question: str = NAME


def read_answers(file: Path) -> list[Answer]:
    """The answers in a file of a run; none if it is missing. A link is not followed."""
    with Folder(file.parent) as folder:
        if folder.kind(file.name) == "missing":
            return []
        content = folder.read(file.name, allowed(MOST_LIST))
    return answers_of(text_of(content, file.name, "a table path,label"), file.name)


def answers_of(text: str, name: str) -> list[Answer]:
    """The answers of a table; rows without a label are passed over. An image has one label."""
    answers: dict[str, Answer] = {}
    for entry in entries_of(text, name):
        if entry.label is None:
            continue
        kind = (entry.question or NAME).casefold()
        if kind not in (NAME, JUDGE):
            raise DataError(f"{entry.place}question must be name or judge; got {kind}")
        label = SKIP if entry.label.casefold() == SKIP else entry.label
        answer = Answer(entry.path, label, kind)
        previous = answers.pop(entry.path, answer)
        if previous.label != answer.label:
            raise DataError(
                f"{entry.place}{one_line(entry.path)} is {one_line(answer.label)} here and "
                f"{one_line(previous.label)} before: keep one"
            )
        answers[entry.path] = answer
    return list(answers.values())


def answer_table(
    answers: Iterable[Answer], kind: str, images: Sequence[str], classes: Sequence[str]
) -> Tensor:
    """N classes that answer questions of this kind: K for none of them, `NO_ANSWER`, or `SKIPPED` for images that do
    not count."""
    rows = {image: row for row, image in enumerate(images)}
    numbers = {canonical(name): number for number, name in enumerate(classes)}
    table = torch.full((len(images),), NO_ANSWER)
    for answer in answers:
        number = SKIPPED
        if answer.question == kind and answer.label != SKIP:
            number = numbers.get(canonical(answer.label), len(numbers))
        table[rows[answer.image]] = number
    return table


def write_answers(file: Path, answers: Sequence[Answer]) -> None:
    """The whole table, or the one before."""
    with whole_file(file) as part, open_table(part) as table:
        writer = csv.writer(table)
        writer.writerow(COLUMNS)
        for answer in answers:
            writer.writerow((answer.image, answer.label, answer.question))
