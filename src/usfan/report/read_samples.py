"""samples.safetensors and samples.json: what a run kept of each of its N target images, checked before it is drawn."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from usfan.budget import check_cost
from usfan.errors import DataError, shown
from usfan.evaluation.samples import made_here
from usfan.files import MOST_JSON, MOST_YAML, Folder, parse_json, parse_yaml
from usfan.tensor_file import open_tensors_in

MOST_VALUES = 1 << 28
"""Limit of all tables together: 170,000 images of 345 classes."""
MOST_MAPPING = 32 << 20
"""Bytes of a file of settings or figures."""
MOST_NAME = 200
TABLES = ("probs_before", "probs_after", "posterior_before", "posterior_after")
VECTORS = ("weight", "entropy_before", "entropy_after", "unknown", "labels")
MAPS = ("features_before", "features_after")
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
WHOLE = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


@dataclass(frozen=True)
class Samples:
    """Tensors by name, all with N rows; K class names; N paths or None."""

    tensors: dict[str, Tensor]
    classes: tuple[str, ...]
    paths: list[str] | None
    why_no_paths: str = ""

    def __len__(self) -> int:
        return len(next(iter(self.tensors.values())))

    def get(self, name: str) -> Tensor | None:
        return self.tensors.get(name)

    @property
    def labels(self) -> Tensor | None:
        return self.tensors.get("labels")

    @property
    def unknown(self) -> Tensor | None:
        return self.tensors.get("unknown")

    @cached_property
    def predicted(self) -> dict[str, Tensor]:
        """The class of the point estimate, N, `before` and `after`."""
        found = {when: self.get(f"probs_{when}") for when in ("before", "after")}
        return {when: probs.argmax(dim=1) for when, probs in found.items() if probs is not None}

    def groups(self, when: str) -> dict[str, Tensor]:
        """Masks: correct, incorrect and (open set) unknown class; or all, when nothing is known of the labels."""
        if self.labels is None or when not in self.predicted:
            return {"all": torch.ones(len(self), dtype=torch.bool)}
        known, right = self.labels < len(self.classes), self.predicted[when] == self.labels
        masks = {"correct": right & known, "incorrect": ~right & known}
        return masks if bool(known.all()) else masks | {"unknown class": ~known}


def read_samples(
    folder: Folder, classes: list[str] | None, problems: list[str], root: Path | None = None
) -> Samples | None:
    """Whoever wrote the folder says where the images lie. They are shown if they lie below `root`, which the user gave,
    or if the run was made in this very place."""
    if folder.kind("samples.safetensors") == "missing":
        return None
    tensors = load_tensors(folder, problems)
    described = read_mapping(folder, "samples.json", problems, MOST_JSON)
    tensors = consistent(tensors, problems)
    if not tensors:
        return None
    N = len(next(iter(tensors.values())))
    K = next((tensors[t].shape[1] for t in TABLES if t in tensors), 0)
    names = class_names(described.get("classes"), classes, K, problems)
    labels = tensors.get("labels")
    if labels is not None and (int(labels.min()) < 0 or int(labels.max()) > len(names)):
        problems.append(f"samples.safetensors: labels lie outside 0…{len(names)}: what needs labels is left out.")
        del tensors["labels"]
    paths, why = described.get("paths"), "the run keeps no file names (its images were arrays, or it is private)"
    if described == {}:
        paths, why = None, "the file names are not known: samples.json cannot be used"
    if paths is not None and not (isinstance(paths, list) and len(paths) == N):
        problems.append(f"samples.json: there must be one path for each of the {N} samples: images are left out.")
        paths, why = None, "samples.json does not name one file for each sample"
    if paths is not None:
        paths = [str(path) for path in paths]
        if root is not None:
            paths = [path if is_below(path, root) else "" for path in paths]
        elif not made_here(folder, described.get("made")):
            paths, why = None, "this run was not made here: name the folder of its images with --root to show them"
    return finite_rows(Samples(tensors, names, paths, why), problems)


def is_below(path: str, root: Path) -> bool:
    """Once links are followed."""
    try:
        real, top = os.path.realpath(path), os.path.realpath(root)
        return os.path.commonpath([real, top]) == top
    except (ValueError, OSError):  # a NUL character in it
        return False


def load_tensors(folder: Folder, problems: list[str]) -> dict[str, Tensor]:
    """All that are known, if they fit into memory: drawing takes about four times as much."""
    try:
        with open_tensors_in(folder, "samples.safetensors") as file:
            there = set(file.keys())
            names = [name for name in (*TABLES, *VECTORS, *MAPS) if name in there]
            count = sum(math.prod(file.get_slice(name).get_shape()) for name in names)
            check_cost("samples.safetensors", count, MOST_VALUES, "values", DataError)
            return {name: file.get_tensor(name) for name in names}
    except (OSError, ValueError, RuntimeError) as error:
        problems.append(f"samples.safetensors cannot be read: {first_words(error, folder)}.")
        return {}


def read_mapping(folder: Folder, name: str, problems: list[str], most: int = MOST_MAPPING) -> dict[str, Any]:
    """A JSON or YAML file that holds names and values; empty, with a problem noted, when it does not."""
    if folder.kind(name) == "missing":
        return {}
    try:
        yaml = name.endswith(".yaml")
        value = parse_yaml(folder.read(name, MOST_YAML)) if yaml else parse_json(folder.read(name, most))
    except (OSError, ValueError) as error:
        problems.append(f"{name} cannot be read: {first_words(error, folder)}.")
        return {}
    if not isinstance(value, dict):
        problems.append(f"{name} does not hold names and values: it was left out.")
        return {}
    return {str(key): item for key, item in value.items()}


def first_words(error: Exception, folder: Folder) -> str:
    text = " ".join(str(error).replace(f"{folder.path}/", "").split())
    return shown(text or type(error).__name__, 200)


def consistent(tensors: dict[str, Tensor], problems: list[str]) -> dict[str, Tensor]:
    """Those with the N rows (and K columns) of the first table, in a type that can be drawn."""
    first = next((tensors[t] for t in (*TABLES, *VECTORS, *MAPS) if t in tensors and tensors[t].ndim), None)
    if first is None or len(first) == 0:
        problems.append("samples.safetensors holds no sample: what needs each image's prediction is left out.")
        return {}
    N = len(first)
    K = next((t.shape[1] for name in TABLES if (t := tensors.get(name)) is not None and t.ndim == 2), 0)
    good: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        wanted = (N, K) if name in TABLES else (N, 2) if name in MAPS else (N,)
        whole = name in ("labels", "unknown")
        if tuple(tensor.shape) != wanted or 0 in wanted or tensor.dtype not in (WHOLE if whole else FLOATS):
            problems.append(
                f"samples.safetensors: {name} has shape {tuple(tensor.shape)} and type {str(tensor.dtype)[6:]}, "
                f"not {wanted} {'whole numbers' if whole else 'floats'}: it was left out."
            )
        else:
            good[name] = tensor.long() if name == "labels" else tensor.bool() if name == "unknown" else tensor
    return good


def class_names(given: Any, fallback: list[str] | None, K: int, problems: list[str]) -> tuple[str, ...]:
    for names in (given, fallback):
        if isinstance(names, list) and (len(names) == K or (K == 0 and names)):
            return tuple(shown(n, MOST_NAME) for n in names)
    if given is not None:
        problems.append(f"samples.json: there must be {K} class names: classes are shown by number.")
    return tuple(f"class {i}" for i in range(K))


def finite_rows(samples: Samples, problems: list[str]) -> Samples | None:
    """Without the samples that hold a value which is not finite: a run that diverged."""
    keep = torch.ones(len(samples), dtype=torch.bool)
    for tensor in samples.tensors.values():
        if tensor.is_floating_point():
            keep &= torch.isfinite(tensor).reshape(len(tensor), -1).all(dim=1)
    bad = int((~keep).sum())
    if bad == 0:
        return samples
    problems.append(f"{bad} of {len(samples)} samples hold values that are not finite: they were left out.")
    if bad == len(samples):
        return None
    paths = samples.paths
    if paths is not None:
        paths = [paths[i] for i in keep.nonzero().flatten().tolist()]
    return Samples({k: t[keep] for k, t in samples.tensors.items()}, samples.classes, paths, samples.why_no_paths)
