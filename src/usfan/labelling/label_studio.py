"""Label Studio: questions out as tasks, annotations in as answers, both as its JSON.

A task holds the image (`image`, an address of Label Studio's local files) and, to find it again, its path in the run
and the kind of the question. Questions that teach names bring the model's guess as a prediction. Those that compare
models bring none: a guess that only needs to be confirmed would favour a model.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote
from xml.sax.saxutils import quoteattr

from usfan.data.decoding.decode import one_line
from usfan.data.few_labels import NAME, NONE_OF_THESE, SKIP
from usfan.data.images import common_folder
from usfan.errors import DataError
from usfan.files import MOST_JSON, parse_json, read_named, write_json, write_text
from usfan.labelling.answers import Answer
from usfan.labelling.board import Board, Question

LOCAL_FILES = "/data/local-files/?d="
CHOICES = {"from_name": "label", "to_name": "image", "type": "choices"}


def write_tasks(file: Path, board: Board, questions: Sequence[Question]) -> str:
    """The tasks, and beside them the labelling interface (.xml). Returns the folder that Label Studio must serve."""
    root = common_folder(list(board.target.images))
    write_json(file, [task_of(question, root) for question in questions])
    names = [*board.target.classes, NONE_OF_THESE]
    choices = "\n".join(f"    <Choice value={quoteattr(name)}/>" for name in names)
    text = (
        '<View>\n  <Image name="image" value="$image"/>\n'
        '  <Choices name="label" toName="image" choice="single">\n'
        f"{choices}\n  </Choices>\n</View>\n"
    )
    write_text(file.with_suffix(".xml"), text)
    return root


def task_of(question: Question, root: str) -> dict[str, object]:
    address = LOCAL_FILES + quote(os.path.relpath(question.image, root))
    data = {"image": address, "path": question.image, "question": question.kind}
    task: dict[str, object] = {"data": data}
    if question.kind == NAME:
        guess = {"choices": [question.candidates[0]]}
        task["predictions"] = [
            {"model_version": "usfan", "result": [CHOICES | {"value": guess}]}
        ]
    return task


def read_annotations(file: Path) -> list[Answer]:
    """The answers in an export (the format JSON, not JSON-MIN). A task that all its annotators skipped is a skip."""
    name = one_line(str(file))
    try:
        tasks = parse_json(read_named(file, MOST_JSON))
    except (OSError, ValueError) as error:
        raise DataError(f"{name} cannot be read as JSON: {one_line(str(error))}") from None
    if not isinstance(tasks, list):
        raise DataError(f"{name} must hold a list of tasks: export as JSON from Label Studio")
    answers = []
    for number, task in enumerate(tasks):
        place = f"{name}, task {number}: "
        try:
            data = task["data"]
            image = str(data["path"])
            kind = str(data.get("question", NAME))
            labels = {label_of(annotation) for annotation in task.get("annotations", ())}
        except (AttributeError, LookupError, TypeError):
            expected = "a task of `usfan label RUN --tasks`, with `data` and `annotations`"
            raise DataError(f"{place}expected {expected}") from None
        labels = labels - {SKIP} or labels
        if len(labels) > 1:
            both = " and ".join(one_line(label) for label in sorted(labels))
            raise DataError(f"{place}{one_line(image)} is {both}: keep one")
        answers += [Answer(image, label, kind) for label in labels]
    return answers


def label_of(annotation: dict[str, object]) -> str:
    """The choice of one annotation; none, or a cancelled one, is a skip."""
    results = annotation["result"]
    if annotation.get("was_cancelled") or not results:
        return SKIP
    if not isinstance(results, list):
        raise TypeError
    return str(results[0]["value"]["choices"][0])


def merge(board: Board, answers: Sequence[Answer], file: Path) -> None:
    """Add answers to the board. An image keeps one label."""
    for answer in answers:
        label = board.label_of(answer.image)
        if label not in (None, answer.label):
            raise DataError(
                f"{one_line(answer.image)} is {one_line(answer.label)} in {one_line(str(file))} and "
                f"{one_line(str(label))} before: keep one"
            )
        board.add(answer)
