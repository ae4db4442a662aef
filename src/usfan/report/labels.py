"""Questions to the user and the answers, as pictures, and what the answers say of both models."""

from __future__ import annotations

import dataclasses

import torch

from usfan.adaptation.verdict import exchange_note, measured_verdict
from usfan.data.few_labels import JUDGE, NAME, SKIP
from usfan.errors import printable
from usfan.labelling.answers import Answer, answer_table
from usfan.maths.model_comparison import compare_models
from usfan.metrics.stored_images import MOST_NAME, ImageTable
from usfan.report.blocks import Block, Gallery, Note, Thumbnail
from usfan.report.gallery import thumbnails_of
from usfan.report.run import Run

OPEN = "The labels of these images settle most; below each, the prediction. `usfan label RUN` asks for them on a page."
ANSWERS = "The last ones first: your label, and the prediction if it differs."


def label_blocks(id: str, run: Run, images: ImageTable, most: int) -> list[Block]:
    """At most `most` images in a gallery; nothing for a run that asks nothing."""
    paths = images.paths or []
    rows = {path: row for row, path in enumerate(paths) if path}
    answers = [answer for answer in run.answers if answer.image in rows]
    blocks: list[Block] = []
    if answers:
        table = answer_table(answers, JUDGE, paths, images.classes)
        comparison = compare_models(*images.judged, table)
        if comparison.answers:
            blocks.append(Note(measured_verdict(comparison).in_folder(run.folder)))
        every = torch.maximum(table, answer_table(answers, NAME, paths, images.classes))
        note = exchange_note(images.judged[1], every, images.classes)
        if note:
            blocks.append(Note(note.strip()))
        recent = answers[::-1][:most]
        items = thumbnails_of(images, [rows[answer.image] for answer in recent], False)
        marked = [with_answer(*pair) for pair in zip(items, recent, strict=True)]
        title = f"Answers: {len(answers):,}"
        blocks.append(Gallery(f"{id}-gallery-answers", title, ANSWERS, marked))
    labelled = {answer.image for answer in answers}
    open_rows = [rows[q.path] for q in run.questions if q.path in rows.keys() - labelled][:most]
    if open_rows:
        items = thumbnails_of(images, open_rows, False)
        caption = OPEN.replace("RUN", run.folder)
        blocks.append(Gallery(f"{id}-gallery-questions", "To label first", caption, items))
    return blocks


def with_answer(item: Thumbnail, answer: Answer) -> Thumbnail:
    """The label as the title, and whether the model agrees with it."""
    label = printable(answer.label, MOST_NAME)
    mark = "right" if label == item.label else "wrong"
    truth = "" if mark == "right" else f"predicted {item.label}"
    if label == SKIP:
        mark = ""
    return dataclasses.replace(item, label=label, truth=truth, mark=mark)
