"""Agreement of runs with different seeds, which needs no labels.

Two models that were trained apart, and are as certain as they are right on average, agree on as large a share of the
images as each is right on, in expectation (Jiang et al., "Assessing generalization of SGD via disagreement", ICLR
2022). This does not hold for adapted models: those that are wrong in the same way agree too. But of two settings of a
method, the one whose runs agree more can be expected to be the better one (docs/studies/agreement.md says how far).

Agreement is measured on the images that were adapted to. In open set "unknown" is a prediction like the others.
"""

from __future__ import annotations

import itertools
import statistics
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from usfan.errors import ArtifactError
from usfan.files import write_json, write_text
from usfan.store.model import AdaptedModel
from usfan.study.results import in_markdown, markdown_table
from usfan.tensor_file import read_tensors

if TYPE_CHECKING:
    from usfan.study.suite import Cell, Suite

PREDICTED = "predicted"
"""Name of the predictions in the tensors that lie beside a cell."""
CAPTION = (
    "Images of the target on which runs with different seeds agree, in %; no label is used"
)


def predicted_classes(model: AdaptedModel) -> Tensor:
    """Class of each image that was adapted to; the number of classes stands for unknown."""
    assert model.passes is not None
    outputs = model.passes.after
    unknown = model.flag_unknown(outputs)
    predicted = outputs.logits.argmax(dim=1).masked_fill(unknown, len(model.classes))
    return predicted.to("cpu", torch.int16)


def agreement(predictions: Sequence[Tensor]) -> float:
    """Share of equal predictions in percent, mean over pairs of runs."""
    shares = []
    for one, other in itertools.combinations(predictions, 2):
        shares.append(100 * float((one == other).double().mean()))
    return statistics.fmean(shares)


def task_predictions(study: Suite, cells: Sequence[Cell]) -> dict[int, Tensor]:
    """Seed → predictions; without runs that have none, or those of another number of images."""
    runs = {}
    for cell in cells:
        try:
            predicted = read_tensors(study.tensors_path(cell)).get(PREDICTED)
        except (OSError, ArtifactError):
            continue
        if predicted is not None:
            runs[cell.seed] = predicted
    lengths = Counter(map(len, runs.values()))
    for seed, predicted in list(runs.items()):
        if len(predicted) != lengths.most_common(1)[0][0]:
            del runs[seed]
    return runs


def agreements(study: Suite) -> dict[str, dict[str, float]]:
    """`{method: {task: percent, …, "avg": percent, "seeds": number}}` over the seeds that have every task."""
    table: dict[str, dict[str, float]] = {}
    for method in study.methods:
        cells: dict[str, list[Cell]] = {}
        for cell in study.cells():
            if cell.method == method:
                cells.setdefault(cell.task, []).append(cell)
        tasks = {task: task_predictions(study, runs) for task, runs in cells.items()}
        seeds = sorted(set.intersection(*map(set, tasks.values())))
        if len(seeds) > 1:
            row = {}
            for task, runs in tasks.items():
                row[task] = agreement([runs[seed] for seed in seeds])
            row["avg"] = statistics.fmean(row.values())
            row["seeds"] = len(seeds)
            table[method] = row
    return table


def write_agreement(study: Suite) -> str:
    """agreement.json and agreement.md; the text of the latter, or nothing if no two runs can be compared."""
    table = agreements(study)
    as_json = study.out / "agreement.json"
    as_text = study.out / "agreement.md"
    if not table:
        as_json.unlink(missing_ok=True)
        as_text.unlink(missing_ok=True)
        return ""
    lines = []
    for method, row in table.items():
        figures = [f"{value:.1f}" for name, value in row.items() if name != "seeds"]
        lines.append([method, *figures, str(row["seeds"])])
    head = ["method", *map(in_markdown, next(iter(table.values())))]
    text = f"{CAPTION}\n\n{markdown_table(head, lines)}\n"
    write_json(as_json, table)
    write_text(as_text, text)
    return text
