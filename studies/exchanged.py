"""How many answers does it take until exchanged class names show?

    python -m studies.exchanged CACHE OUT.json [--families pacs office31] [--seeds 2019] [--tasks 2] [--pairs 4]

A source model that calls two classes by each other's name looks, without labels, like any other: only the user's
answers differ. So each task is adapted to once; then a user who knows the two classes by the other names answers what
`usfan label` asks, until the page names the pair, at most `MOST` times. `false`: another pair was named first.
Rows also hold the same for the model as it is (`pair` is null): a note is then an error, unless the adapted model
really takes two clusters for each other (`swapped`).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from studies.families.runs import LabelBudget, Runs, commit
from studies.families.task import load_task, ready
from torch import Tensor

from usfan.labelling.answers import Answer
from usfan.labelling.board import Board
from usfan.labelling.target import LabelTarget
from usfan.maths.model_comparison import exchanged_names

MOST = 60


def answer_until_noted(target: LabelTarget, truth: Tensor) -> tuple[int | None, str]:
    """Answers until the board notes a pair, and the note."""
    board = Board(target)
    for number in range(1, MOST + 1):
        questions = board.questions(1)
        if not questions:
            break
        question = questions[0]
        label = target.classes[int(truth[question.row])]
        board.add(Answer(question.image, label, question.kind))
        if question.kind == "name":
            board.update()
        if board.exchange_note:
            return number, board.exchange_note
    return None, ""


def exchange(truth: Tensor, pair: list[int]) -> Tensor:
    table = torch.arange(int(truth.max()) + 1)
    table[pair] = torch.tensor(pair[::-1])
    return table[truth]


def rows_of(
    cache: Path, family: str, source: str, target: str, seed: int, pairs: int
) -> list[dict[str, object]]:
    task = load_task(cache, family, source, target, seed)
    runs = Runs(task, {"guard": True, "setting": "closed"})
    model, _, _ = runs.run("u-sfan++", LabelBudget("none"))
    paths = tuple(f"{number}" for number in range(len(task.labels)))
    board_target = LabelTarget.of_model(model, paths)
    generator = torch.Generator().manual_seed(seed)
    occurring = task.labels.unique()
    rows = []
    for number in range(pairs + 1):
        pair = None
        truth = task.labels
        if number:
            chosen = torch.randperm(len(occurring), generator=generator)[:2]
            pair = sorted(occurring[chosen].tolist())
            truth = exchange(truth, pair)
        answers, note = answer_until_noted(board_target, truth)
        names = pair and f"{task.classes[pair[0]]} and {task.classes[pair[1]]}"
        rows.append(
            {
                "family": family,
                "task": task.name,
                "seed": seed,
                "pair": names,
                "answers": answers,
                "right": bool(names and names in note),
                "swapped": len(exchanged_names(board_target.after, truth, len(task.classes))),
                "commit": commit(),
            }
        )
        print(rows[-1], flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cache", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--families", nargs="+", default=["pacs", "lines", "leaf", "office31"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[2019])
    parser.add_argument("--tasks", type=int, help="of each family, the first so many")
    parser.add_argument("--pairs", type=int, default=4)
    options = parser.parse_args()
    rows = []
    for family in options.families:
        for seed in options.seeds:
            for source, target in ready(options.cache, family)[: options.tasks]:
                rows += rows_of(options.cache, family, source, target, seed, options.pairs)
                options.out.write_text(
                    json.dumps({"note": __doc__, "rows": rows}, indent=0), encoding="utf-8"
                )


if __name__ == "__main__":
    main()
