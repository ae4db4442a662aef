"""How far runs with different seeds agree, which needs no labels.

Two models that were trained apart, and are as certain as they are right on average, agree on as large a share of the
images as each is right on, in expectation (Jiang et al., "Assessing generalization of SGD via disagreement", ICLR
2022). Adapted models are not so: those that are wrong in the same way agree too. But of two settings of a method, the
one whose runs agree more can be expected to be the better one (docs/studies/agreement.md says how far that held).

It is taken over the images that were adapted to. In open set "unknown" is a prediction like the others.
"""

from __future__ import annotations

import itertools
import statistics
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from usfan.artifacts.model import AdaptedModel
from usfan.errors import ArtifactError
from usfan.files import write_json, write_text
from usfan.reproduce.results import in_markdown
from usfan.tensor_file import read_tensors

if TYPE_CHECKING:
    from usfan.reproduce.suite import Suite

PREDICTED = "predicted"
"""Name of the predictions in the tensors that lie beside a cell."""
CAPTION = "Images of the target on which runs with different seeds agree, in %; no label is used"


def predicted_classes(model: AdaptedModel) -> Tensor:
    """Class of each image that was adapted to; the number of classes stands for unknown."""
    assert model.passes is not None
    outputs = model.passes.after
    unknown = model.flag_unknown(outputs)
    return outputs.logits.argmax(dim=1).masked_fill(unknown, len(model.classes)).to("cpu", torch.int16)


def agreement(predictions: Sequence[Tensor]) -> float:
    """Share of equal predictions in percent, mean over pairs of runs."""
    pairs = itertools.combinations(predictions, 2)
    return statistics.fmean(100 * float((a == b).double().mean()) for a, b in pairs)


def read_predictions(path: Path) -> Tensor | None:
    """None if they are unavailable: no cell, one from before predictions were kept, or a damaged file."""
    try:
        return read_tensors(path).get(PREDICTED)
    except (OSError, ArtifactError):
        return None


def runs_of(study: Suite, method: str, pair: tuple[str, str]) -> dict[int, Tensor]:
    """Predictions by seed. If the data changed between runs, those with the most common number of images."""
    found = {seed: read_predictions(study.tensors_path(seed, *pair, method)) for seed in study.seeds}
    runs = {seed: predicted for seed, predicted in found.items() if predicted is not None}
    usual = Counter(map(len, runs.values())).most_common(1)
    return {seed: predicted for seed, predicted in runs.items() if len(predicted) == usual[0][0]}


def agreements(study: Suite) -> dict[str, dict[str, float]]:
    """`{method: {task: percent, …, "avg": percent, "seeds": number}}` over the seeds that have every task."""
    found: dict[str, dict[str, float]] = {}
    for method in study.methods:
        runs = {pair: runs_of(study, method, pair) for pair in study.pairs}
        seeds = [seed for seed in study.seeds if all(seed in run for run in runs.values())]
        if len(seeds) > 1:
            each = {f"{s}→{t}": agreement([run[seed] for seed in seeds]) for (s, t), run in runs.items()}
            found[method] = {**each, "avg": statistics.fmean(each.values()), "seeds": len(seeds)}
    return found


def write_agreement(study: Suite) -> str:
    """agreement.json and agreement.md; the text of the latter, or nothing if no two runs can be compared."""
    found, files = agreements(study), [study.out / f"agreement.{kind}" for kind in ("json", "md")]
    if not found:
        for file in files:
            file.unlink(missing_ok=True)
        return ""
    columns = list(next(iter(found.values())))
    lines = [
        [method, *(f"{row[c]:{'d' if c == 'seeds' else '.1f'}}" for c in columns)] for method, row in found.items()
    ]
    rule = ["---", *("---:" for _ in columns)]
    head = ["method", *map(in_markdown, columns)]
    table = "\n".join("| " + " | ".join(line) + " |" for line in (head, rule, *lines))
    text = f"{CAPTION}\n\n{table}\n"
    write_json(files[0], found)
    write_text(files[1], text)
    return text
