"""Class names and labels: their order, their names, and how two sets of them are matched."""

from __future__ import annotations

import difflib
import os
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from usfan.data.decoding.decode import one_line
from usfan.errors import DataError, option

MAX_CLASSES = 2**20
"""Labels from here on are refused: one wrong number in a list would make a table of classes of that size."""


LabelValues = Tensor | np.ndarray | Iterable[int] | Iterable[str]
"""One label per image: numbers that count from 0, or class names."""


class Labels(NamedTuple):
    labels: Tensor
    """LongTensor[N], indices into `classes`."""
    classes: tuple[str, ...]
    named: bool
    """False if the classes are plain numbers: such labels are matched by position."""


def name_key(name: str) -> tuple[str, str]:
    """Sorts class names alphabetically whatever their case; names that differ only in case stay apart."""
    return name.casefold(), name


def canonical(name: str) -> str:
    """One spelling for names that look alike: macOS hands out accents decomposed, other systems composed."""
    return unicodedata.normalize("NFC", name)


class ClassNames:
    """The classes of a model, found by name."""

    def __init__(self, classes: Sequence[str]) -> None:
        self.index = {canonical(name): number for number, name in enumerate(classes)}
        self.folded = {name.casefold(): name for name in self.index}

    def number(self, name: str) -> int | None:
        """The index of the class with exactly this name."""
        return self.index.get(canonical(name))

    def has_any(self, names: Iterable[str]) -> bool:
        """Whether one of the names is that of a class, whatever its case."""
        return any(canonical(name).casefold() in self.folded for name in names)

    def similar(self, name: str) -> str | None:
        """The class that the user may have meant."""
        near = difflib.get_close_matches(canonical(name).casefold(), self.folded, n=1)
        return self.folded[near[0]] if near else None


def checked_classes(classes: Iterable[object]) -> tuple[str, ...]:
    """The class names that a caller gave, which must differ."""
    if isinstance(classes, str):
        raise DataError(f"classes must be a sequence of names, not the string {classes!r}")
    names = tuple(str(name) for name in classes)
    counts = Counter(map(canonical, names))
    wrong = [name for name, count in counts.items() if count > 1 or not name]
    if wrong or not names:
        problem = f"{some(wrong)} more than once, or an empty name" if wrong else "no name"
        raise DataError(f"classes holds {problem}: expected different names")
    return names


def check_numbering(
    paths: Sequence[str],
    labels: Tensor,
    classes: Sequence[str],
    data_name: str,
) -> None:
    """Refuse a numbered list whose images lie in folders that are named as other classes than their numbers say."""
    names = ClassNames(classes)
    for path, label in zip(paths, labels.tolist(), strict=True):
        folder = os.path.basename(os.path.dirname(path))
        number = names.number(folder)
        if number is not None and number != label:
            raise DataError(
                f"{data_name} numbers its classes in another order than the model: {one_line(path)} has the number "
                f"{label}, and {one_line(folder)} is number {number} of the model; write class names instead of numbers"
            )


def read_labels(values: LabelValues, count: int, data_name: str) -> Labels | None:
    """Labels as a caller or a dataset gives them: numbers or names, in a tensor, an array or a sequence.

    None if all of them are None or −1: torchvision and Hugging Face mark unlabelled splits so.
    """
    if isinstance(values, Tensor):
        values = values.detach().cpu().numpy()
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise DataError(f"labels of {data_name} are {values!r}: expected one label per image")
    array = values
    if not isinstance(array, np.ndarray):
        array = np.asarray([item.item() if hasattr(item, "item") else item for item in values])
    if array.shape != (count,):
        shape = "×".join(map(str, array.shape)) or "no"
        raise DataError(
            f"{data_name} has {count} images but {shape} labels: expected one label per image"
        )
    items = array.tolist()
    missing = items.count(None)
    if 0 < missing < count:
        labelled = f"{count - missing} of its {count} images have a label"
        raise DataError(f"{data_name}: {labelled}: expected all or none")
    if all(item in (None, -1) for item in items):
        return None
    if all(isinstance(item, str) for item in items):
        return _from_names(items, data_name)
    return _from_numbers(array, data_name)


def match(
    labels: Labels,
    classes: Sequence[str],
    open_set: bool,
    data_name: str,
) -> Tensor:
    """Labels that index `classes`: by name, or by position if the data has numbers only.

    Images of other classes get the label K = len(classes) with `open_set`, and are refused without. Only classes that
    have images count. Labels that were matched already stay as they are.
    """
    K = len(classes)
    if labels.named:
        model = ClassNames(classes)
        table = [model.index.get(canonical(name), K) for name in labels.classes]
        hint = "check the names (upper and lower case differ)"
    else:
        table = [min(number, K) for number in range(len(labels.classes))]
        hint = f"check the labels (the model knows 0 to {K - 1})"
    names = [
        *labels.classes,
        "unknown",
    ]  # after a first match, K is the label of unknown classes
    matched = torch.tensor([*table, K])[labels.labels]
    unknown = [names[number] for number in labels.labels[matched == K].unique().tolist()]
    if unknown and not open_set:
        raise DataError(
            f"{data_name} has {class_count(unknown)} that the model does not know: "
            f"pass {option('open_set', True)}, or {hint}"
        )
    return matched


def some(names: Sequence[str], most: int = 3) -> str:
    """The first few names of many."""
    listed = ", ".join(one_line(name) for name in names[:most])
    return f"{listed}, …" if len(names) > most else listed


def class_count(names: Sequence[str]) -> str:
    """The number of classes and the first few names."""
    noun = "class" if len(names) == 1 else "classes"
    return f"{len(names)} {noun} ({some(names)})"


def _from_names(names: Sequence[str], data_name: str) -> Labels:
    """The classes are in case-insensitive alphabetical order."""
    table = tuple(sorted(set(names), key=name_key))
    for name in table:
        if re.search("[\ud800-\udfff]", name):  # bytes of a file name that are not UTF-8
            problem = f"a class whose name is not UTF-8 ({one_line(name)})"
            raise DataError(f"{data_name} has {problem}: rename its folder")
    index = {name: number for number, name in enumerate(table)}
    return Labels(torch.tensor([index[name] for name in names]), table, True)


def _from_numbers(array: np.ndarray, data_name: str) -> Labels:
    """The classes are named '0', '1', …"""
    if array.dtype.kind not in "iu":
        expected = "expected whole numbers or class names"
        raise DataError(f"labels of {data_name} are {array.dtype}: {expected}")
    low = int(array.min())
    high = int(array.max())
    if low < 0 or high >= MAX_CLASSES:
        expected = f"expected numbers from 0 to {MAX_CLASSES - 1}"
        raise DataError(f"{data_name} has labels from {low} to {high}: {expected}")
    names = tuple(str(number) for number in range(high + 1))
    return Labels(torch.from_numpy(array.astype(np.int64)), names, False)
