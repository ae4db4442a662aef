"""Methods on every family of tasks, with a frozen EfficientNet-Lite0 (digits: a small network from scratch).

    python -m studies.families CACHE OUT.jsonl [--families office31 lines] [--methods shot u-sfan++] [--seeds 2019]
        [--labels none random:2xK asked:5xK] [--set setting=auto guard=true] [--only blur dark] [--jobs 1]
    python -m studies.families table OUT.jsonl [--figure kept_accuracy] [--against shot]
    python -m studies.families sources CACHE [--families …] [--seeds 2019 2020 2021]

`studies.families.domains` fills CACHE with features. The first form runs `usfan.workflow.adapt_model`, writes one JSON
row per run and skips rows that OUT.jsonl has; use another file for other code. `accuracy` is that of the last iterate
and, with --set guard=true, `kept_accuracy` that of the model that the guard keeps; both on images without a label.
`random:2xK` gives two labels per class, drawn at random; `asked:2xK` as many, of the images that the program asks for,
in rounds (1, 2, 5 and 10 per class). The table has families as rows and methods as columns: means over tasks ± standard
errors. `sources` trains the source models that the cache lacks.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
from pathlib import Path
from typing import Any

from studies.families.domains import FAMILIES
from studies.families.runs import Job, LabelBudget, key_of, read_rows, run_job, table
from studies.families.task import SEEDS, ready, task_name, tasks

METHODS = ("source-only", "shot-im", "shot", "u-sfan", "u-sfan+", "aad", "u-sfan++")


def setting(text: str) -> tuple[str, Any]:
    """`name=value`, the value as JSON or else as text."""
    name, _, value = text.partition("=")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value


def add_choice(parser: argparse.ArgumentParser, seeds: tuple[int, ...]) -> None:
    parser.add_argument("cache", type=Path)
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--seeds", nargs="+", type=int, default=list(seeds))


def jobs_of(options: argparse.Namespace) -> list[Job]:
    """One job per task and seed, the first seed of all families first."""
    done = frozenset(key_of(row) for row in read_rows(options.out))
    jobs = []
    for seed in options.seeds:
        for family in options.families:
            for source, target in ready(options.cache, family):
                name = task_name(source, target)
                if options.only and not any(text in name for text in options.only):
                    continue
                runs = (options.methods, options.labels, dict(options.set), done)
                job = Job(options.cache, family, source, target, seed, *runs, options.keep)
                jobs.append(job)
    return jobs


def run(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="studies.families", description=__doc__)
    add_choice(parser, SEEDS[:1])
    parser.add_argument("out", type=Path)
    parser.add_argument("--methods", nargs="+", default=list(METHODS))
    parser.add_argument(
        "--labels", nargs="+", type=LabelBudget.parse, default=[LabelBudget("none")]
    )
    parser.add_argument("--set", nargs="+", type=setting, default=[])
    parser.add_argument("--only", nargs="+", help="tasks whose name contains one of these")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--keep", type=Path, help="folder for predictions of each run")
    options = parser.parse_args(arguments)
    jobs = jobs_of(options)
    with (
        multiprocessing.get_context("spawn").Pool(options.jobs) as pool,
        options.out.open("a", encoding="utf-8") as file,
    ):
        for rows in pool.imap_unordered(run_job, jobs):
            for row in rows:
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
                print(
                    *(
                        row[k]
                        for k in ("family", "task", "seed", "method", "labels", "accuracy")
                    )
                )
            file.flush()
            sys.stdout.flush()
    print(table(read_rows(options.out)))


def print_table(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="studies.families table")
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--figure", default="accuracy")
    parser.add_argument("--against", help="a column: print differences to it")
    options = parser.parse_args(arguments)
    rows = [row for file in options.files for row in read_rows(file)]
    print(table(rows, options.figure, options.against))


def train_sources(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="studies.families sources")
    add_choice(parser, SEEDS)
    options = parser.parse_args(arguments)
    for seed in options.seeds:
        for family in options.families:
            count = sum(1 for _ in tasks(options.cache, family, (seed,)))
            print(family, seed, count, "tasks", flush=True)


def main() -> None:
    first = sys.argv[1] if len(sys.argv) > 1 else ""
    commands = {"table": print_table, "sources": train_sources}
    if first in commands:
        commands[first](sys.argv[2:])
    else:
        run(sys.argv[1:])


if __name__ == "__main__":
    main()
