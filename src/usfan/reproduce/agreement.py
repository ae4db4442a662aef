"""How far runs with different seeds agree: a figure of a study that needs no label.

Two models that were trained apart, and are as certain as they are right on average, agree on as large a share of the
images as each is right on, in expectation (Jiang et al., "Assessing generalization of SGD via disagreement", ICLR
2022). Adapted models are more certain than right, so agreement is above accuracy; but of two settings of a method, the
one whose runs agree more can be expected to be the better one (docs/results.md says how far that held).
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import load_file
from torch import Tensor

from usfan.files import write_json, write_text

if TYPE_CHECKING:
    from usfan.reproduce.suite import Suite

PREDICTED = "predicted"
"""Name of the predictions in the tensors that lie beside a cell."""


def agreement(predictions: Sequence[Tensor]) -> float:
    """Share of equal predictions in percent, mean over pairs of runs."""
    pairs = itertools.combinations(predictions, 2)
    return statistics.fmean(100 * float((a == b).double().mean()) for a, b in pairs)


def read_predictions(path: Path) -> Tensor | None:
    """None where the cell is not there, or from before predictions were kept."""
    return load_file(path).get(PREDICTED) if path.is_file() else None


def agreements(study: Suite) -> dict[str, dict[str, float]]:
    """`{method: {task: percent, …, "avg": percent}}` over the seeds that have every task; none with fewer than two."""
    found: dict[str, dict[str, float]] = {}
    for method in study.methods:
        runs: dict[tuple[str, str], dict[int, Tensor]] = {pair: {} for pair in study.pairs}
        for seed, pair in itertools.product(study.seeds, study.pairs):
            predicted = read_predictions(study.tensors_path(seed, *pair, method))
            if predicted is not None:
                runs[pair][seed] = predicted
        seeds = [seed for seed in study.seeds if all(seed in run for run in runs.values())]
        if len(seeds) > 1:
            each = {f"{s}→{t}": agreement([run[seed] for seed in seeds]) for (s, t), run in runs.items()}
            found[method] = {**each, "avg": statistics.fmean(each.values())}
    return found


def write_agreement(study: Suite) -> str:
    """agreement.json and agreement.md; the text of the latter, or nothing where no two runs can be compared."""
    found = agreements(study)
    if not found:
        return ""
    columns = list(next(iter(found.values())))
    lines = [[method, *(f"{row[c]:.1f}" for c in columns)] for method, row in found.items()]
    rule = ["---", *("---:" for _ in columns)]
    table = "\n".join("| " + " | ".join(line) + " |" for line in (["method", *columns], rule, *lines))
    text = f"Images on which runs with different seeds agree, in %; no label is used\n\n{table}\n"
    write_json(study.out / "agreement.json", found)
    write_text(study.out / "agreement.md", text)
    return text


def predicted_classes(logits: Tensor) -> Tensor:
    return logits.argmax(dim=1).to("cpu", torch.int16)
