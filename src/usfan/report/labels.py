"""Questions to the user and the answers, as pictures, and what the answers say of both models."""

from __future__ import annotations

import dataclasses

import torch

from usfan.adaptation.label_evidence import LabelEvidence
from usfan.adaptation.verdict import exchange_note, measured_verdict
from usfan.data.few_labels import JUDGE, NAME, SKIP
from usfan.errors import printable
from usfan.labelling.answers import Answer, answer_table
from usfan.maths.model_comparison import compare_models
from usfan.metrics.stored_images import MOST_NAME, ImageTable
from usfan.report.blocks import Block, Gallery, Note, Thumbnail
from usfan.report.formatting import is_number, mapping
from usfan.report.gallery import thumbnails_of
from usfan.report.run import Run

OPEN = "The labels of these images settle most; below each, the prediction. A page asks for them: usfan label RUN."
ANSWERS = "The last ones first: your label, and the prediction if it differs."


def judged_by_answers(run: Run) -> Run:
    """The run with the verdict of all answers, if some came after its own."""
    images = run.images
    if images is None or images.paths is None or not run.answers:
        return run
    table = answer_table(shown_answers(run, images), JUDGE, images.paths, images.classes)
    comparison = compare_models(*images.judged, table)
    before = mapping(run.metrics.get("labelled")).get("judge_answers")
    if comparison.answers <= (before if is_number(before) else 0):
        return run
    changes = {
        "verdict": measured_verdict(comparison).to_dict(),
        "labelled": LabelEvidence(comparison).to_dict(),
    }
    return dataclasses.replace(run, metrics=run.metrics | changes)


def shown_answers(run: Run, images: ImageTable) -> list[Answer]:
    """Those about images of the run."""
    paths = set(images.paths or [])
    return [answer for answer in run.answers if answer.image in paths]


def label_blocks(id: str, run: Run, images: ImageTable, most: int) -> list[Block]:
    """At most `most` images in a gallery; nothing for a run that asks nothing."""
    paths = images.paths or []
    rows = {path: row for row, path in enumerate(paths) if path}
    answers = shown_answers(run, images)
    blocks: list[Block] = []
    if answers:
        tables = [answer_table(answers, kind, paths, images.classes) for kind in (JUDGE, NAME)]
        every = torch.maximum(*tables)
        note = exchange_note(images.judged[1], every, images.classes)
        if note:
            blocks.append(Note(note.strip()))
        recent = answers[::-1][:most]
        items = thumbnails_of(images, [rows[answer.image] for answer in recent], False)
        marked = [with_answer(*pair) for pair in zip(items, recent, strict=True)]
        compared = sum(answer.question == JUDGE for answer in answers)
        learned = len(answers) - compared
        title = f"Answers: {len(answers):,} ({learned:,} to learn from, {compared:,} to compare the models)"
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
