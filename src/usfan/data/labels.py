"""Class names and labels: their order, their names, and how two sets of them are matched."""

from __future__ import annotations

import logging
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from usfan.data.decoding.decode import one_line
from usfan.errors import DataError

log = logging.getLogger(__name__)

MAX_CLASSES = 2**20
"""Labels from here on are refused: one wrong number in a list would make a table of classes of that size."""


class Labels(NamedTuple):
    labels: Tensor
    """LongTensor[N], indices into `classes`."""
    classes: tuple[str, ...]
    named: bool
    """False if the classes are plain numbers: such labels are matched by position."""
    guessed: bool = False
    """Whether the names are those of the folders in which the images of a numbered list lie: they may be no classes."""


def name_key(name: str) -> tuple[str, str]:
    """Sorts class names alphabetically whatever their case; names that differ only in case stay apart."""
    return name.casefold(), name


def canonical(name: str) -> str:
    """One spelling for names that look alike: macOS hands out accents decomposed, other systems composed."""
    return unicodedata.normalize("NFC", name)


def checked_classes(classes: Iterable[Any]) -> tuple[str, ...]:
    """The class names a caller gave."""
    if isinstance(classes, str):
        raise DataError(f"classes must be a sequence of names, not the string {classes!r}")
    names = tuple(str(name) for name in classes)
    twice = {name for name, count in Counter(map(canonical, names)).items() if count > 1}
    if twice or not names or "" in names:
        what = f"{some(sorted(twice))} more than once" if twice else "an empty name" if names else "nothing"
        raise DataError(f"classes holds {what}: expected different names")
    return names


def from_names(names: Sequence[str], classes: Sequence[str] | None, what: str) -> Labels:
    """Labels from the class name of each image; without `classes`, in case-insensitive alphabetical order."""
    table = checked_classes(classes) if classes is not None else tuple(sorted(set(names), key=name_key))
    for name in table:
        if any(0xD800 <= ord(c) <= 0xDFFF for c in name):  # bytes of a file name that are not UTF-8
            raise DataError(f"{what} has a class whose name is not UTF-8 ({one_line(name)}): rename its folder")
    spelt = str if classes is None else canonical  # two spellings of one name in one set stay two classes
    place, names = {spelt(name): i for i, name in enumerate(table)}, [spelt(name) for name in names]
    unknown = sorted(set(names) - set(place), key=name_key)
    if unknown:
        raise DataError(f"{what} has {_count(unknown)} not among the classes given ({some(unknown)})")
    return Labels(torch.tensor([place[name] for name in names], dtype=torch.long), table, True)


def from_numbers(numbers: Any, classes: Sequence[str] | None, what: str) -> Labels:
    """Labels that are numbers already; without `classes` they are named '0', '1', …"""
    labels = _integers(numbers, what)
    low, high = int(labels.min()), int(labels.max())
    if low < 0:
        raise DataError(f"{what} has a negative label ({low} for image {int(labels.argmin())}): labels count from 0")
    if classes is None:
        if high >= MAX_CLASSES:
            raise DataError(f"{what} has the label {high}: labels must be below {MAX_CLASSES}")
        return Labels(labels, tuple(str(i) for i in range(high + 1)), False)
    table = checked_classes(classes)
    if high >= len(table):
        raise DataError(f"{what} has the label {high}, but only {len(table)} classes are named: labels count from 0")
    return Labels(labels, table, True)


def from_given(values: Any, classes: Sequence[str] | None, count: int, what: str) -> Labels:
    """Labels as a caller gives them: numbers or names, in a tensor, an array or a sequence."""
    if isinstance(values, Tensor):
        values = values.detach().cpu().numpy()
    if not isinstance(values, np.ndarray):
        if isinstance(values, str) or not isinstance(values, Iterable):
            raise DataError(f"labels of {what} are {values!r}: expected one label per image")
        values = np.asarray(list(values))
    array = values
    if array.ndim != 1:
        raise DataError(f"labels of {what} have shape {'×'.join(map(str, array.shape))}: expected one label per image")
    if len(array) != count:
        raise DataError(f"{what} has {count} images but {len(array)} labels: expected one label per image")
    if array.dtype.kind in "UO" and all(isinstance(value, str) for value in array.tolist()):
        return from_names([str(value) for value in array.tolist()], classes, what)
    return from_numbers(array, classes, what)


def share_no_name(names: Iterable[str], classes: Sequence[str]) -> bool:
    """Whether no name is that of a class, whatever its case."""
    return {canonical(name).casefold() for name in classes}.isdisjoint(canonical(name).casefold() for name in names)


def match(own: Labels, classes: Sequence[str], open_set: bool, what: str) -> Tensor:
    """Labels that index `classes`: by name, or by position if the data has numbers only, or a list has numbers and
    lies in folders of which none is named as a class.

    Images of other classes get the label K = len(classes) with `open_set`, and are refused without. Only classes that
    have images count. Labels that were matched already stay as they are.
    """
    K = len(classes)
    place = {canonical(name): i for i, name in enumerate(classes)}
    folded = {name.casefold(): name for name in classes}
    names = [*own.classes, "unknown"]  # matched before with `open_set`: the label after the last class
    present = [names[i].casefold() for i in own.labels.unique().tolist()]
    by_name = own.named and not (own.guessed and folded.keys().isdisjoint(present))
    if by_name:
        target = [place.get(canonical(name), K) for name in own.classes]
    else:
        target = [min(i, K) for i in range(len(own.classes))]
    labels = torch.tensor([*target, K], dtype=torch.long)[own.labels]
    if by_name and own.guessed and bool((labels != own.labels.clamp(max=K)).any()):
        log.warning("%s numbers its classes otherwise than the model: the names of its folders count", what)
    if own.guessed and not by_name:
        log.warning("%s lies in folders that are not named as the model's classes: its numbers count", what)
    unknown = [names[i] for i in own.labels[labels == K].unique().tolist()]
    if unknown and not open_set:
        hint = "check the folder names" if by_name else f"check the labels (the model knows 0 to {K - 1})"
        meant = [f"{name} for {folded[name.casefold()]}" for name in unknown if name.casefold() in folded]
        if by_name and meant:
            raise DataError(f"{what} has {some(meant)}: class names must have the case that the model's have")
        raise DataError(
            f"{what} has {_count(unknown)} the model does not know ({some(unknown)}): pass --open-set, or {hint}"
        )
    return labels


def some(names: Sequence[str], most: int = 3) -> str:
    """The first few names of many."""
    shown = ", ".join(one_line(name) for name in names[:most])
    return f"{shown}, …" if len(names) > most else shown


def _count(names: Sequence[str]) -> str:
    return f"{len(names)} class" if len(names) == 1 else f"{len(names)} classes"


def _integers(numbers: Any, what: str) -> Tensor:
    if isinstance(numbers, Tensor):
        numbers = numbers.detach().cpu().numpy()
    array = np.asarray(numbers)
    if array.dtype.kind == "f" and array.size and np.isfinite(array).all() and (array == np.round(array)).all():
        array = array.astype(np.int64)
    if array.dtype.kind not in "iu" or array.size == 0:
        raise DataError(f"labels of {what} are {array.dtype}: expected whole numbers or class names")
    if array.dtype == np.uint64 and array.max() > np.iinfo(np.int64).max:
        raise DataError(f"{what} has the label {array.max()}: labels must be below {MAX_CLASSES}")
    return torch.from_numpy(array.astype(np.int64))
