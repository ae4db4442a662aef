"""The predictions of a run on its N target images: from samples.safetensors and samples.json, or from a model."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, TypeGuard

import torch
from torch import Tensor

from usfan.budget import check_cost
from usfan.errors import DataError, printable
from usfan.files import MOST_JSON, Folder, read_in
from usfan.metrics.image_table import image_tensors, made_here, target_labels
from usfan.metrics.metrics import unknown_name
from usfan.store.model import AdaptedModel
from usfan.tensor_file import open_tensors_in

if TYPE_CHECKING:
    from usfan.data.sources import ImageData

MOST_VALUES = 1 << 28
"""Limit of all tables together: 170,000 images of 345 classes."""
MOST_MAPPING = 32 << 20
"""Bytes of a file of settings or figures."""
MOST_NAME = 200
PREDICTIONS_FILE = "samples.safetensors"
NAMES_FILE = "samples.json"
TABLES = ("probs_before", "probs_after", "posterior_before", "posterior_after")
MAPS = ("features_before", "features_after")
VECTORS = ("weight", "entropy_before", "entropy_after")
DECISIONS = ("decisions_before", "decisions_after")
WHOLE = ("labels", "unknown", *DECISIONS)
"""Vectors of whole numbers, which a run may have."""
NAMING = ("view", "near", "names_before")
"""Tensors that questions need, which a run may have."""


@dataclass(frozen=True)
class ImageTable:
    """Tensors by name, all with N rows; K class names; N paths, or None."""

    tensors: dict[str, Tensor]
    classes: tuple[str, ...]
    paths: list[str] | None = None
    is_copy: bool = False
    """The run names its images, but was made elsewhere: the paths are left out."""

    def no_paths_because(self, advice: str) -> str:
        """The reason why there are no paths, with advice for a run that was made elsewhere."""
        if self.is_copy:
            return f"this run was not made here: {advice}"
        return (
            "the run has no file names (its images were arrays or in shards, or it is private)"
        )

    def __len__(self) -> int:
        return len(next(iter(self.tensors.values())))

    @property
    def labels(self) -> Tensor | None:
        return self.tensors.get("labels")

    @property
    def unknown(self) -> Tensor | None:
        """N booleans: the images that an open-set run flagged."""
        return self.tensors.get("unknown")

    @cached_property
    def predicted(self) -> dict[str, Tensor]:
        """The class of the point estimate, N, `before` and `after`."""
        classes = {}
        for when in ("before", "after"):
            if f"probs_{when}" in self.tensors:
                classes[when] = self.tensors[f"probs_{when}"].argmax(dim=1)
        return classes

    @cached_property
    def names(self) -> list[str]:
        """The classes, and the unknown class of an open set."""
        names = list(self.classes)
        labels = self.labels
        if self.unknown is not None or (labels is not None and int(labels.max()) == len(names)):
            names.append(unknown_name(names))
        return names

    def decisions(self, when: str) -> Tensor:
        """The predicted class, N; K if the final model flagged the image as unknown."""
        predicted = self.predicted[when]
        if when == "after" and self.unknown is not None:
            return torch.where(self.unknown, len(self.classes), predicted)
        return predicted

    @property
    def judged(self) -> tuple[Tensor, Tensor]:
        """N predictions of the two models that labels compare: the source model, and the adapted one, whichever is
        kept."""
        if any(name not in self.tensors for name in DECISIONS):
            return self.predicted["before"], self.decisions("after")
        before, after = (self.tensors[name].long() for name in DECISIONS)
        return before, after

    def groups(self, when: str) -> dict[str, Tensor]:
        """Masks: correct, incorrect and (open set) unknown class; or all, if there are no labels."""
        if self.labels is None:
            return {"all": torch.ones(len(self), dtype=torch.bool)}
        known = self.labels < len(self.classes)
        right = self.predicted[when] == self.labels
        masks = {"correct": right & known, "incorrect": ~right & known}
        return masks if bool(known.all()) else masks | {"unknown class": ~known}


def table_of_model(model: AdaptedModel, data: ImageData | None) -> ImageTable:
    """The table of what `adapt` returned; `data` brings labels and paths."""
    labels = None if data is None else target_labels(model, data, open_set=True)
    tensors = {}
    for name, tensor in image_tensors(model, labels).items():
        tensors[name] = tensor.detach().cpu()
    paths = None
    if data is not None and data.paths is not None and model.passes is not None:
        paths = [data.paths[i] for i in model.passes.positions.tolist()]
    return ImageTable(tensors, tuple(model.classes), paths)


def read_image_table(
    folder: Folder,
    problems: list[str],
    root: Path | None = None,
) -> ImageTable | None:
    """The table of a run folder, or None with a problem.

    The folder's author chose the paths of the images. The report shows those below `root`, which the user names, and
    those of a run that was made in this very folder.
    """
    if folder.kind(PREDICTIONS_FILE) == "missing":
        return None
    try:
        tensors = load_tensors(folder)
        check_tensors(tensors)
    except (OSError, ValueError, RuntimeError) as error:
        problems.append(damaged(PREDICTIONS_FILE, error, folder))
        return None
    N, K = tensors["probs_after"].shape
    description = read_mapping(folder, NAMES_FILE, problems, MOST_JSON)
    names = description.get("classes")
    paths = description.get("paths")
    if not is_list(names, K) or not (paths is None or is_list(paths, N)):
        if description:
            problems.append(f"{NAMES_FILE} cannot be read: it does not fit {PREDICTIONS_FILE}.")
        return ImageTable(tensors, tuple(f"class {k}" for k in range(K)))
    classes = tuple(printable(name, MOST_NAME) for name in names)
    if paths is None:
        return ImageTable(tensors, classes)
    if root is not None:
        return ImageTable(tensors, classes, [path_below(str(path), root) for path in paths])
    if made_here(folder, description.get("made")):
        return ImageTable(tensors, classes, [str(path) for path in paths])
    return ImageTable(tensors, classes, is_copy=True)


def is_list(value: object, length: int) -> TypeGuard[list[object]]:
    return isinstance(value, list) and len(value) == length


def path_below(path: str, root: Path) -> str:
    """The path if it lies below `root` once links are followed, else nothing."""
    real = Path(os.path.realpath(path.replace("\0", "")))
    return path if real.is_relative_to(os.path.realpath(root)) else ""


def load_tensors(folder: Folder) -> dict[str, Tensor]:
    """The tensors that the report knows, if they fit into memory: drawing takes about four times as much."""
    with open_tensors_in(folder, PREDICTIONS_FILE) as file:
        known = (*TABLES, *MAPS, *VECTORS, *WHOLE, *NAMING)
        names = [name for name in known if name in file.keys()]  # noqa: SIM118
        count = sum(math.prod(file.get_slice(name).get_shape()) for name in names)
        check_cost(PREDICTIONS_FILE, count, MOST_VALUES, "values", DataError)
        tensors = {name: file.get_tensor(name) for name in names}
    for name, kind in {"labels": torch.long, "unknown": torch.bool}.items():
        if name in tensors and not tensors[name].is_floating_point():
            tensors[name] = tensors[name].to(kind)
    return tensors


def check_tensors(tensors: dict[str, Tensor]) -> None:
    """Raise unless all are there, with N rows, the right columns and type, and finite values."""
    for name in (*TABLES, *MAPS, *VECTORS):
        if name not in tensors:
            raise DataError(f"{name} is missing")
    table = tensors["probs_after"]
    if table.ndim != 2 or table.numel() == 0:
        raise DataError("it holds no predictions")
    N, K = table.shape
    for name, tensor in tensors.items():
        shape = (N, K) if name in TABLES or name == "names_before" else (N,)
        if name in MAPS:
            shape = (N, 2)
        elif name in ("view", "near"):
            shape = (N, tensor.shape[-1] if tensor.ndim else 0)
        is_whole = name in (*WHOLE, "near")
        if tuple(tensor.shape) != shape or tensor.is_floating_point() == is_whole:
            kind = str(tensor.dtype).removeprefix("torch.")
            raise DataError(f"{name} has shape {tuple(tensor.shape)} and type {kind}")
        if not bool(torch.isfinite(tensor).all()):
            raise DataError(f"{name} holds values that are not finite")
    near = tensors.get("near", torch.zeros(1))
    if int(near.min()) < 0 or int(near.max()) >= N:
        raise DataError(f"near lies outside 0…{N - 1}")
    for name in ("labels", *DECISIONS):
        labels = tensors.get(name, torch.zeros(1))
        if int(labels.min()) < 0 or int(labels.max()) > K:
            raise DataError(f"{name} lie outside 0…{K}")


def read_mapping(
    folder: Folder,
    name: str,
    problems: list[str],
    most: int = MOST_MAPPING,
) -> dict[str, object]:
    """A JSON or YAML file that holds names and values; empty if it is missing, or damaged, which is a problem."""
    if folder.kind(name) == "missing":
        return {}
    try:
        value = read_in(folder, name, most)
        if not isinstance(value, dict):
            raise DataError("it does not hold names and values")
    except (OSError, ValueError) as error:
        problems.append(damaged(name, error, folder))
        return {}
    return {str(key): item for key, item in value.items()}


def damaged(
    name: str,
    error: Exception,
    folder: Folder,
) -> str:
    """The one line that names a damaged file."""
    reason = " ".join(str(error).replace(f"{folder.path}/", "").split())
    return f"{name} cannot be read: {printable(reason or type(error).__name__, 200)}."
