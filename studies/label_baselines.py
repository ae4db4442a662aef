"""What labels alone give, beside `studies.families --labels`: the same images, no adaptation.

    python -m studies.label_baselines CACHE OUT.jsonl --families lines leaf [--seeds 2019] [--labels random:1xK]

`labels alone`  logistic regression on the witness's features, its precision averaged by the evidence
`source head`   the source model's head, moved by the labels: Gaussian prior around its weights, precision likewise

Rows are those of `studies.families`, of the images without a label; `python -m studies.families table` prints them.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path

import torch
from studies.families.domains import FAMILIES
from studies.families.runs import UNLABELLED, LabelBudget, Runs, commit
from studies.families.task import Task, cpu, tasks
from torch import Tensor

from usfan.maths.label_head import fit_label_head
from usfan.maths.names import View
from usfan.maths.user_labels import UserLabels
from usfan.workflow import adapt_model

BUDGETS = ("random:1xK", "random:2xK", "random:5xK", "random:10xK")


def predictions(task: Task, table: Tensor) -> dict[str, Tensor]:
    """N classes of each baseline, from N labels (−1 for none)."""
    target = dataclasses.replace(task.target, labels=None)
    model = adapt_model(task.source, target, "source-only", runtime=cpu(), guard=False)
    assert model.passes is not None
    before = model.passes.before
    names = before.logits.double().log_softmax(dim=1)
    labels = UserLabels.of_table(table, len(task.classes))
    own = before.features.double()
    witness = View.of(before.features if task.witness is None else task.witness)
    seen = witness.features.double()
    blank = torch.zeros_like(names)
    return {
        "labels alone": fit_label_head(blank, seen, labels).probs(blank, seen).argmax(dim=1),
        "source head": fit_label_head(names, own, labels).probs(names, own).argmax(dim=1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cache", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--families", nargs="+", choices=FAMILIES, required=True)
    parser.add_argument("--seeds", nargs="+", type=int, default=[2019])
    parser.add_argument("--labels", nargs="+", default=list(BUDGETS))
    options = parser.parse_args()
    torch.set_num_threads(1)
    with options.out.open("a", encoding="utf-8") as file:
        for family in options.families:
            for task in tasks(options.cache, family, options.seeds):
                for text in options.labels:
                    budget = LabelBudget.parse(text)
                    table = Runs(task, {}).labels("u-sfan++", budget)
                    judged = table == UNLABELLED
                    for method, predicted in predictions(task, table).items():
                        right = (predicted == task.labels)[judged].double()
                        row = {
                            "family": family,
                            "task": task.name,
                            "seed": task.seed,
                            "method": method,
                            "labels": str(budget),
                            "settings": {},
                            "commit": commit(),
                            "accuracy": round(100 * float(right.mean()), 2),
                        }
                        file.write(json.dumps(row, ensure_ascii=False) + "\n")
                        file.flush()
                print(family, task.name, task.seed, flush=True)


if __name__ == "__main__":
    main()
