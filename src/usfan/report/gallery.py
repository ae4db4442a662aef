"""Galleries: the images the model is surest of, least sure of, and takes for unknown, as small JPEGs in the page."""

from __future__ import annotations

import base64
import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from usfan.data.decoding.pool import Answer, decode_in_processes
from usfan.errors import option, printable
from usfan.maths.validators import is_certain
from usfan.metrics.stored_images import ImageTable
from usfan.report.blocks import Block, Gallery, Note, Thumbnail

BELOW = "Below each image: the predicted class, its probability, and the weight."
SIDE = 112
"""Pixels of a thumbnail's longer side."""


@dataclass(frozen=True)
class Choice:
    """The images of one gallery: those of a mask, by their weight."""

    key: str
    title: str
    caption: str
    mask: Tensor
    largest_first: bool = True


def galleries(
    prefix: str,
    images: ImageTable,
    choices: Sequence[Choice],
    most: int,
) -> list[Block]:
    """At most `most` images in each; empty galleries are left out."""
    if images.paths is None:
        advice = f"name the folder of its images with {option('root')} to show them"
        return [Note(f"The galleries are left out: {images.no_paths_because(advice)}.")]
    weight = images.tensors["weight"].float()
    blocks: list[Block] = []
    for choice in choices:
        positions = choice.mask.nonzero().flatten()
        count = min(most, len(positions))
        if count:
            _, order = weight[positions].topk(count, largest=choice.largest_first)
            items = thumbnails_of(images, positions[order].tolist(), choice.key == "changed")
            id = f"{prefix}-gallery-{choice.key}"
            blocks.append(Gallery(id, choice.title, choice.caption, items))
    return blocks


def known_images(images: ImageTable) -> Tensor:
    """N: the images that are not flagged as of a new class."""
    if images.unknown is None:
        return torch.ones(len(images), dtype=torch.bool)
    return ~images.unknown


def changed_images(images: ImageTable) -> list[Choice]:
    if "before" not in images.predicted:
        return []
    changed = images.predicted["before"] != images.predicted["after"]
    caption = "The prediction before adaptation → after it; the surest first. "
    caption += f"{int(changed.sum()):,} of {len(images):,} predictions changed."
    return [Choice("changed", "Changed predictions", caption, changed & known_images(images))]


def sure_and_unsure_images(images: ImageTable) -> list[Choice]:
    known = known_images(images)
    rows = [
        Choice("certain", "Most certain", f"The largest weights. {BELOW}", known),
        Choice("uncertain", "Most uncertain", f"The smallest weights. {BELOW}", known, False),
    ]
    if images.unknown is not None:
        caption = "Flagged as a class that the model does not know; the least certain first."
        rows.append(Choice("unknown", "Suspected unknown", caption, images.unknown, False))
    if images.labels is not None:
        certain = is_certain(images.tensors["posterior_after"].float())
        wrong = images.groups("after")["incorrect"] & known & certain
        caption = "Certain, and wrong by the labels: hard images, or wrong labels."
        rows.append(Choice("mistakes", "Certain and wrong", caption, wrong))
    return rows


def thumbnails_of(
    images: ImageTable,
    positions: list[int],
    with_source_prediction: bool,
) -> list[Thumbnail]:
    """Decoded by another process, within its limits on time and memory."""
    assert images.paths is not None
    paths = [images.paths[i] for i in positions]
    usable = [path for path in paths if path and "\0" not in path]
    decoded = decode_in_processes(usable, size=SIDE, channels=None, workers=1)
    answers = dict(zip(usable, decoded, strict=True))
    items = []
    for i, path in zip(positions, paths, strict=True):
        answer = answers.get(path, "not shown")
        items.append(thumbnail(images, i, path, answer, with_source_prediction))
    return items


def thumbnail(
    images: ImageTable,
    i: int,
    path: str,
    answer: Answer,
    with_source_prediction: bool,
) -> Thumbnail:
    """One image with its prediction."""
    decision = int(images.decisions("after")[i])
    label = images.names[decision]
    if with_source_prediction:
        label = f"{images.names[int(images.predicted['before'][i])]} → {label}"
    probability = float(images.tensors["probs_after"][i].amax())
    detail = f"{100 * probability:.0f} % · {float(images.tensors['weight'][i]):.2f}"
    mark = ""
    truth = ""
    if images.labels is not None:
        true = int(images.labels[i])
        mark = "right" if true == decision else "wrong"
        if true != decision:
            truth = f"is {images.names[true]}"
    name = printable(os.sep.join(path.split(os.sep)[-2:]), 200)  # class and file
    uri = ""
    problem = ""
    if isinstance(answer, str):
        problem = f"{os.path.basename(name)}: {answer}"
    else:
        uri = f"data:image/jpeg;base64,{base64.b64encode(answer).decode('ascii')}"
    return Thumbnail(label, truth, detail, name, uri, problem, mark)
