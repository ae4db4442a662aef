"""Our results as a table: mean ± standard deviation over seeds, beside the paper's numbers.

A result row is a mapping with `method`, `task` (`A→W`), `seed`, and a metric such as `accuracy`; it may hold more.
The average over tasks is taken within each seed first, so its ± is the spread of the average, not of the tasks.
Standard deviations are those of a sample (n − 1); one seed has none.
"""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from usfan.errors import DataError
from usfan.files import write_text
from usfan.study.tables import Numbers, paper_row, paper_rows, tables_of

Row = dict[str, Any]
TWO_DIGITS = ("domainnet", "cifar-stl")
"""Benchmarks whose numbers the paper prints with two decimals."""


@dataclass(frozen=True)
class Average:
    """One figure over seeds."""

    mean: float
    std: float | None
    seeds: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Average:
        std = statistics.stdev(values) if len(values) > 1 else None
        return cls(math.fsum(values) / len(values), std, len(values))

    def text(self, digits: int = 1) -> str:
        mean = f"{self.mean:.{digits}f}"
        return mean if self.std is None else f"{mean} ± {self.std:.{digits}f}"


Averages = dict[str, dict[str, Average]]
"""Method → column → average."""


def aggregate(rows: Iterable[Row], metric: str = "accuracy") -> Averages:
    """`{method: {task: Average, …, "A→*": Average, …, "avg": Average}}`, in the order of the rows.

    `A→*` is the average over the targets of source A. It and `avg` count only the seeds that have all of their tasks,
    and are left out if there are none: an average over half of the tasks is not comparable.
    """
    values: dict[str, dict[str, dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
    for row in rows:
        kinds = {"method": str, "task": str, "seed": int, metric: int | float}
        missing = [name for name, kind in kinds.items() if not isinstance(row.get(name), kind)]
        if missing:
            raise DataError(f"a result row lacks {', '.join(missing)}: {row}")
        method = row["method"]
        task = row["task"]
        seed = row["seed"]
        values[method][task][seed] = float(row[metric])
    tasks = list(dict.fromkeys(task for each in values.values() for task in each))
    averages: Averages = {}
    for method, by_task in values.items():
        row = {}
        for task, by_seed in by_task.items():
            row[task] = Average.of(list(by_seed.values()))
        for name, members in task_groups(tasks).items():
            groups = [by_task.get(task, {}) for task in members]
            means = []
            for seed in sorted(set.intersection(*map(set, groups))):
                values_of_seed = [by_seed[seed] for by_seed in groups]
                means.append(math.fsum(values_of_seed) / len(members))
            if means:
                row[name] = Average.of(means)
        averages[method] = row
    return averages


def task_groups(tasks: Sequence[str]) -> dict[str, Sequence[str]]:
    """The tasks of each average: one for each source with more than one target, and one over all tasks."""
    by_source: dict[str, list[str]] = defaultdict(list)
    for task in tasks:
        if "→" in task:
            by_source[f"{task.split('→')[0]}→*"].append(task)
    groups: dict[str, Sequence[str]] = {
        name: members for name, members in by_source.items() if len(members) > 1
    }
    if tasks:
        groups["avg"] = tasks
    return groups


@dataclass(frozen=True)
class Table:
    """Results of one benchmark and setting, ready to print."""

    title: str
    metric: str
    columns: tuple[str, ...]
    """The columns that are printed; `averages` may hold more."""
    averages: Averages
    paper: Mapping[str, Numbers] = field(default_factory=dict)
    """The paper's rows: of methods that were run here under our names, the others under their printed names."""
    source: str = ""
    """Which of the paper's tables the numbers come from."""
    digits: int = 1

    @classmethod
    def build(
        cls,
        rows: Iterable[Row],
        *,
        title: str,
        benchmark: str | None = None,
        setting: str = "closed",
        metric: str = "accuracy",
    ) -> Table:
        """Aggregate `rows` and set the paper's table of `benchmark` beside them."""
        averages = aggregate(rows, metric)
        tables = tables_of(benchmark, setting)
        printed = tables[0].columns if tables else ()
        columns = choose_columns(averages, printed)
        paper = {}
        others = paper_rows(benchmark, setting)
        for method in averages:
            row = paper_row(benchmark, method, setting)
            if row is not None:
                others = {name: other for name, other in others.items() if other != row}
                paper[method] = row
        paper |= others
        return cls(
            title=title,
            metric=metric,
            columns=columns,
            averages=averages,
            paper={name: same_tasks(row, columns, printed) for name, row in paper.items()},
            source=" and ".join(table.source for table in tables),
            digits=2 if benchmark in TWO_DIGITS else 1,
        )

    def lines(self) -> list[list[str]]:
        """Name and texts of each line: ours, below it the paper's of the same method; then the paper's others."""
        lines = []
        for name in dict.fromkeys([*self.averages, *self.paper]):
            lines.append(self.line(name, self.averages.get(name, {})))
            numbers = self.paper.get(name, {})
            row = {column: Average(number, None, 1) for column, number in numbers.items()}
            lines.append(self.line(f"{name}, paper", row))
        return [line for line in lines if any(line[1:])]

    def line(self, name: str, row: Mapping[str, Average]) -> list[str]:
        texts = [name]
        for column in self.columns:
            texts.append(row[column].text(self.digits) if column in row else "")
        return texts

    def caption(self) -> str:
        seeds = set()
        for row in self.averages.values():
            seeds |= {average.seeds for average in row.values()}
        fewest = min(seeds, default=0)
        most = max(seeds, default=0)
        count = str(most) if fewest == most else f"{fewest} to {most}"
        text = f"{self.title}: {self.metric.replace('_', ' ')} in %, {count} seed"
        if seeds != {1}:
            text += "s, mean ± standard deviation"
        return f"{text}; paper: {self.source}" if self.source else text

    def write(self, out: Path) -> str:
        """Writes table.md, table.json, and the latter again as metrics.json; returns the Markdown."""
        write_text(out / "table.md", self.to_markdown() + "\n")
        write_text(out / "table.json", self.to_json() + "\n")
        write_text(out / "metrics.json", self.to_json() + "\n")
        return self.to_markdown()

    def to_markdown(self) -> str:
        head = ["method", *map(in_markdown, self.columns)]
        return f"{in_markdown(self.caption())}\n\n{markdown_table(head, self.lines())}\n"

    def to_json(self) -> str:
        """Everything, also the columns that are not printed."""
        results = {}
        for method, row in self.averages.items():
            results[method] = {
                column: dataclasses.asdict(average) for column, average in row.items()
            }
        content = {
            "title": self.title,
            "metric": self.metric,
            "columns": self.columns,
            "results": results,
            "paper": {"source": self.source, "methods": self.paper},
        }
        return json.dumps(content, indent=2, ensure_ascii=False) + "\n"


def choose_columns(averages: Averages, printed: Sequence[str]) -> tuple[str, ...]:
    """Tasks in the paper's order, then others, then the average. If the paper has one column per source, so do we."""
    names = dict.fromkeys(column for row in averages.values() for column in row)
    by_source = any(column in names for column in printed if column.endswith("→*"))
    columns = []
    for column in dict.fromkeys((*printed, *names)):
        if column in names and column != "avg" and column.endswith("→*") == by_source:
            columns.append(column)
    return tuple(columns) if len(columns) == 1 else (*columns, "avg")


def same_tasks(row: Numbers, columns: Sequence[str], printed: Sequence[str]) -> Numbers:
    """The paper's row with the average of the tasks that are in our table, if those are not all of the paper's.

    A row without numbers for each task has no such average.
    """
    tasks = [column for column in columns if column != "avg"]
    if "avg" not in printed or set(tasks) == set(printed) - {"avg"}:
        return row
    numbers = {task: row[task] for task in tasks if task in row}
    if len(numbers) == len(tasks):
        numbers["avg"] = math.fsum(numbers.values()) / len(tasks)
    return numbers


def in_markdown(text: str) -> str:
    """A name in a table: nothing in it ends the cell or changes the type."""
    return "".join(f"\\{letter}" if letter in "\\|*`<" else letter for letter in text)


def markdown_table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    rule = ["---", *["---:"] * (len(head) - 1)]
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, rule, *lines))
