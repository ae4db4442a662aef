"""Answers of the user, in the order in which they were given: the rows of labels.csv.

    path,label,question

`label` is a class, `none of these` for an image of no class of the model, or `skip` for one that nobody can tell.
`question` is `name` for images to learn from and `judge` for images that compare models; a model never learns from the
latter. A table without this column is one of names.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from usfan.data.few_labels import JUDGE, NAME
from usfan.data.lists import entries_of, read_text
from usfan.errors import DataError
from usfan.files import whole_file
from usfan.metrics.predictions import open_table

ANSWERS_FILE = "labels.csv"
COLUMNS = ("path", "label", "question")


@dataclass(frozen=True)
class Answer:
    """What the user says of an image."""

    image: str
    """Its path."""
    label: str
    question: str = NAME


def read_answers(file: str | Path) -> list[Answer]:
    """The answers of a table; rows without a label are passed over. A later row about the same image replaces an
    earlier one."""
    answers: dict[str, Answer] = {}
    for entry in entries_of(read_text(str(file)), Path(file).name):
        if entry.label is None:
            continue
        kind = entry.question or NAME
        if kind not in (NAME, JUDGE):
            raise DataError(f"{entry.place}question must be name or judge; got {kind}")
        answers.pop(entry.path, None)
        answers[entry.path] = Answer(entry.path, entry.label, kind)
    return list(answers.values())


def write_answers(file: Path, answers: Sequence[Answer]) -> None:
    """The whole table, or the one before."""
    with whole_file(file) as part, open_table(part) as table:
        writer = csv.writer(table)
        writer.writerow(COLUMNS)
        for answer in answers:
            writer.writerow((answer.image, answer.label, answer.question))
