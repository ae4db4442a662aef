"""Labels of a few target images, for `adapt` and `evaluate`: a table, a list or a mapping of paths and classes.

Paths are those of the images of the data. A relative path counts from the table's folder, the working folder or the
data's folder, whichever has the image. A row without a label is passed over, so that `label_first.csv` of a run can be
filled in as far as one likes.
"""

from __future__ import annotations

import logging
import operator
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import SupportsIndex

import torch
from torch import Tensor

from usfan.data.decoding.decode import one_line
from usfan.data.images import common_folder
from usfan.data.labels import ClassNames, some
from usfan.data.lists import absolute, entries_of, read_text
from usfan.data.sources import ImageData
from usfan.data.store import Store
from usfan.errors import DataError, option
from usfan.maths.decision import SKIPPED

log = logging.getLogger(__name__)
NOT_RANDOM = "this table has the column question, as answers to `usfan label` have, which chose their images"
NONE = -1
"""Stands for an image without a label."""
NONE_OF_THESE = "none of these"
"""The label of an image that is of no class of the model."""
SKIP = "skip"
"""The label of an image that nobody can tell."""
NAME = "name"
JUDGE = "judge"
"""Why a label was asked for: to learn from, or to compare models. A model never learns from the latter."""

ImageName = str | os.PathLike[str] | SupportsIndex
"""A path, or a position in the data."""
UserLabelSource = (
    str
    | os.PathLike[str]
    | Mapping[ImageName, object]
    | Iterable[tuple[ImageName, object]]
    | Tensor
)
"""A file, a mapping from images to class names, pairs of both, or a tensor with −1 for images without a label."""


@dataclass(frozen=True, eq=False)
class FewLabels:
    """Labels of a few of N images: the index of a class, K for an image of no class of the model, −1 for none."""

    learn: Tensor
    """N: labels to learn from."""
    judge: Tensor
    """N: labels that only compare models; `SKIPPED` for an image that nobody can tell."""
    from_questions: bool = False
    """Whether some answer a question of `usfan label`: their images were chosen, so they are no random sample."""

    @property
    def all(self) -> Tensor:
        return torch.where(self.learn >= 0, self.learn, self.judge)


def few_labels(
    labels: UserLabelSource | FewLabels,
    data: ImageData | Store,
    classes: Sequence[str],
    *,
    open_set: bool = False,
) -> FewLabels:
    """The user's labels of images of `data`. A tensor has labels to learn from. With `open_set`, names that the model
    does not know are new classes."""
    if isinstance(labels, Tensor):
        table = labels.detach().cpu().long()
        labels = FewLabels(table, torch.full_like(table, NONE))
    elif not isinstance(labels, FewLabels):
        labels = _tables(labels, data, classes, open_set)
    if labels.learn.shape != (len(data),):
        raise DataError(
            f"labels must have one entry per image, {len(data)}, with −1 for none; got {tuple(labels.learn.shape)}"
        )
    least = min(int(labels.learn.min()), int(labels.judge.clamp_min(NONE).min()))
    if least < NONE or bool((labels.all > len(classes)).any()):
        raise DataError(
            f"labels must be from 0 to {len(classes) - 1}, {len(classes)} for none of the classes, or −1 for none"
        )
    if not bool((labels.all >= 0).any()):
        raise DataError("no label is given: fill in the column `label` of some images")
    return labels


def only_labelled(
    data: ImageData,
    labels: UserLabelSource,
    classes: Sequence[str],
    *,
    open_set: bool = False,
) -> ImageData:
    """The images of `data` that the user labelled, with these labels. Without `open_set`, those of the model's
    classes."""
    few = few_labels(labels, data, classes, open_set=open_set)
    if few.from_questions:
        log.warning("%s: figures of these images alone, not of all", NOT_RANDOM)
    table = few.all
    labelled = (table >= 0) & (table < len(classes) + open_set)
    if not bool(labelled.any()):
        raise DataError(
            f"no label is of a class of the model: pass {option('open_set', True)} to count the others"
        )
    part = data.subset(labelled)
    return part._with(labels=table[labelled], classes=tuple(classes), named=True)


def _tables(
    labels: object, data: ImageData | Store, classes: Sequence[str], open_set: bool
) -> FewLabels:
    model = ClassNames(classes)
    positions = {path: position for position, path in enumerate(data.paths or ())}
    folders = [os.getcwd()]
    if isinstance(labels, (str, os.PathLike)):
        folders.insert(0, os.path.dirname(absolute(labels)))
    if data.paths:
        folders.append(common_folder(data.paths))
    table = torch.full((len(data),), NONE)
    is_judge = torch.zeros(len(data), dtype=torch.bool)
    skipped = []
    from_questions = False
    for place, image, name, question in _rows(labels):
        position = _position(place, image, data, positions, folders)
        from_questions |= question is not None
        if name.casefold() == SKIP:
            skipped.append(position)
            continue
        number = class_number(place, name, model, open_set)
        previous = int(table[position])
        if previous not in (NONE, number):
            before = [*classes, NONE_OF_THESE][previous]
            raise DataError(
                f"{place}{one_line(str(image))} is {name} here and {before} before: keep one"
            )
        table[position] = number
        is_judge[position] = question == JUDGE
    none = torch.full_like(table, NONE)
    judge = torch.where(is_judge, table, none)
    for position in skipped:
        if table[position] == NONE:
            judge[position] = SKIPPED
    return FewLabels(torch.where(is_judge, none, table), judge, from_questions)


def _rows(labels: object) -> Iterator[tuple[str, ImageName, str, str | None]]:
    """Place, image, class name and question (None for none) of the labels in a file, a mapping or pairs."""
    if isinstance(labels, (str, os.PathLike)):
        file = absolute(labels)
        for entry in entries_of(read_text(file), os.path.basename(file)):
            question = entry.question and entry.question.casefold()
            if question not in (None, NAME, JUDGE):
                raise DataError(
                    f"{entry.place}question is {NAME} or {JUDGE}, not {one_line(question)}"
                )
            if entry.label is not None:
                yield entry.place, entry.path, entry.label, question
        return
    items = labels.items() if isinstance(labels, Mapping) else labels
    if not isinstance(items, Iterable):
        kind = type(labels).__name__
        raise DataError(
            f"labels must be a file, or pairs of an image and its class; got a {kind}"
        )
    for number, item in enumerate(items):
        place = f"labels, item {number}: "
        if not isinstance(item, (tuple, list)) or len(item) != 2:
            raise DataError(f"{place}expected an image (a path or a position) and its class")
        yield place, item[0], str(item[1]), None


def _position(
    place: str,
    image: ImageName,
    data: ImageData | Store,
    positions: dict[str, int],
    folders: list[str],
) -> int:
    """The position of an image, which is named by its path (from one of the folders) or its position."""
    name = getattr(data, "name", "the data")
    if positions and isinstance(image, (str, os.PathLike)):
        path = os.path.expanduser(image)
        for folder in folders:
            position = positions.get(os.path.abspath(os.path.join(folder, path)))
            if position is not None:
                return position
        problem = f"{one_line(path)} is not an image of {name}"
        raise DataError(f"{place}{problem}: give labels of images in it")
    position = _number(image)
    if not 0 <= position < len(data):
        expected = f"{name} has images 0 to {len(data) - 1}"
        is_huge = (
            isinstance(image, int) and image.bit_length() > 64
        )  # Python refuses to print some
        text = "such number" if is_huge else one_line(repr(image)[:80])
        raise DataError(f"{place}{expected}, no {text}")
    return position


def _number(image: object) -> int:
    """A whole number, or its digits; −1 for anything else."""
    if isinstance(image, str):
        return int(image) if re.fullmatch(r"[0-9]{1,12}", image) else -1
    is_whole = not isinstance(image, bool) and hasattr(image, "__index__")
    try:
        return operator.index(image) if is_whole else -1  # type: ignore[arg-type]
    except TypeError:  # an array of several numbers
        return -1


def class_number(place: str, name: str, model: ClassNames, open_set: bool = False) -> int:
    """The index of a class, or the number of classes for an image of none of them; with `open_set` also for a name that
    is no class in any case."""
    number = model.number(name)
    if number is not None:
        return number
    if name.casefold() == NONE_OF_THESE or (open_set and not model.has_any([name])):
        return len(model.index)
    similar = model.similar(name)
    hint = (
        f"did you mean {similar}?" if similar else f"its classes are {some(list(model.index))}"
    )
    raise DataError(
        f"{place}the model has no class {one_line(name)}: {hint} (write `{NONE_OF_THESE}` for an image of no class)"
    )
