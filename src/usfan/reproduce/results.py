"""Our results as a table: mean ± standard deviation over seeds, beside the paper's numbers.

A result row is a mapping with `method`, `task` (`A→W`), `seed`, a metric such as `accuracy`, and what else was noted.
The average over tasks is taken within each seed first, so its ± is the spread of the average, not of the tasks.
Standard deviations are those of a sample (n − 1); one seed has none.
"""

import json
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from usfan.errors import DataError
from usfan.reproduce.tables import paper_row, paper_rows, tables_of

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Cell:
    """One figure over seeds."""

    mean: float
    std: float | None
    seeds: int

    @classmethod
    def of(cls, values: Sequence[float]) -> "Cell":
        return cls(math.fsum(values) / len(values), statistics.stdev(values) if len(values) > 1 else None, len(values))

    def text(self, digits: int = 1) -> str:
        mean = f"{self.mean:.{digits}f}"
        return mean if self.std is None else f"{mean} ± {self.std:.{digits}f}"


def aggregate(rows: Iterable[Row], metric: str = "accuracy") -> dict[str, dict[str, Cell]]:
    """`{method: {task: Cell, …, "A→*": Cell, …, "avg": Cell}}`, methods and tasks in the order they first appear.

    `A→*` is the average over the targets of source A. It and `avg` count only the seeds that have all of their tasks,
    and are left out if there are none: an average over half of the tasks is not comparable.
    """
    values: dict[str, dict[str, dict[Any, float]]] = defaultdict(lambda: defaultdict(dict))
    for row in rows:
        method, task, seed, value = _fields(row, metric)
        if seed in values[method][task]:
            raise DataError(f"two results for method {method!r}, task {task!r}, seed {seed}: keep one of them")
        values[method][task][seed] = value
    groups = _groups(dict.fromkeys(task for tasks in values.values() for task in tasks))
    table: dict[str, dict[str, Cell]] = {}
    for method, tasks in values.items():
        cells = {task: Cell.of(list(seeds.values())) for task, seeds in tasks.items()}
        for name, members in groups.items():
            common = set.intersection(*(set(tasks.get(task, {})) for task in members))
            means = [math.fsum(tasks[task][seed] for task in members) / len(members) for seed in sorted(common)]
            if means:
                cells[name] = Cell.of(means)
        table[method] = cells
    return table


def _fields(row: Row, metric: str) -> tuple[str, str, Any, float]:
    missing = [name for name in ("method", "task", "seed", metric) if row.get(name) is None]
    if missing:
        raise DataError(f"a result row lacks {', '.join(missing)}: {dict(row)}")
    return str(row["method"]), str(row["task"]), row["seed"], float(row[metric])


def _groups(tasks: Iterable[str]) -> dict[str, list[str]]:
    """The averages that are taken: one for each source with more than one target, and one over all tasks."""
    by_source: dict[str, list[str]] = defaultdict(list)
    every = list(tasks)
    for task in every:
        if "→" in task:
            by_source[f"{task.split('→')[0]}→*"].append(task)
    groups = {name: members for name, members in by_source.items() if len(members) > 1}
    return {**groups, "avg": every} if every else groups


@dataclass(frozen=True)
class Table:
    """Results of one benchmark and setting, ready to print."""

    title: str
    metric: str
    columns: tuple[str, ...]
    """The columns that are printed; `cells` may hold more."""
    cells: Mapping[str, Mapping[str, Cell]]
    """Our method → column → figure."""
    paper: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """The paper's rows of methods that were run here, under our names."""
    others: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """The paper's other rows, under their printed names."""
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
    ) -> "Table":
        """Aggregate `rows` and set the paper's table of `benchmark` beside them."""
        rows = list(rows)
        cells = aggregate(rows, metric)
        tables = tables_of(benchmark, setting) if benchmark else ()
        printed = tables[0].columns if tables else ()
        methods = dict.fromkeys(str(row["method"]) for row in rows)
        columns = _columns(cells, printed)
        own = {method: paper_row(benchmark, method, setting) for method in methods} if benchmark else {}
        rest = {name: row for name, row in paper_rows(benchmark or "", setting).items() if row not in own.values()}
        return cls(
            title=title,
            metric=metric,
            columns=columns,
            cells=cells,
            paper={name: _same_tasks(row, columns, printed) for name, row in own.items() if row},
            others={name: _same_tasks(row, columns, printed) for name, row in rest.items()},
            source=" and ".join(table.source for table in tables),
            digits=2 if benchmark in ("domainnet", "cifar-stl") else 1,
        )

    def lines(self) -> list[tuple[str, list[str]]]:
        """Name and texts of each line: ours, below it the paper's of the same method; then the paper's others."""
        lines = []
        for method, row in self.cells.items():
            lines.append((method, [row[c].text(self.digits) if c in row else "" for c in self.columns]))
            if method in self.paper:
                lines.append((f"{method}, paper", self._numbers(self.paper[method])))
        lines += [(f"{name}, paper", self._numbers(numbers)) for name, numbers in self.others.items()]
        return [(name, texts) for name, texts in lines if any(texts)]

    def _numbers(self, numbers: Mapping[str, float]) -> list[str]:
        return [f"{numbers[c]:.{self.digits}f}" if c in numbers else "" for c in self.columns]

    def caption(self) -> str:
        seeds = sorted({cell.seeds for row in self.cells.values() for cell in row.values()})
        count = "no" if not seeds else f"{seeds[0]}" if len(seeds) == 1 else f"{seeds[0]} to {seeds[-1]}"
        text = f"{self.title}: {self.metric.replace('_', ' ')} in %, {count} seed{'' if seeds == [1] else 's'}"
        text += ", mean ± standard deviation" if any(n > 1 for n in seeds) else ""
        return f"{text}; paper: {self.source}" if self.source else text

    def to_markdown(self) -> str:
        head = ["method", *map(in_markdown, self.columns)]
        body = [[name, *texts] for name, texts in self.lines()]
        rule = ["---", *("---:" for _ in self.columns)]
        return (
            "\n".join(
                [in_markdown(self.caption()), "", *("| " + " | ".join(line) + " |" for line in [head, rule, *body])]
            )
            + "\n"
        )

    def to_latex(self) -> str:
        """A `table` that needs the package booktabs."""
        body = [_tex_line([name, *texts]) for name, texts in self.lines()]
        return "\n".join(
            [
                r"\begin{table}",
                r"  \centering",
                rf"  \caption{{{_tex(self.caption())}}}",
                rf"  \begin{{tabular}}{{l{'r' * len(self.columns)}}}",
                r"    \toprule",
                f"    {_tex_line(['method', *self.columns])}",
                r"    \midrule",
                *(f"    {line}" for line in body),
                r"    \bottomrule",
                r"  \end{tabular}",
                r"\end{table}",
                "",
            ]
        )

    def to_json(self) -> str:
        """Everything, also the columns that are not printed."""
        figures = {
            method: {c: {"mean": cell.mean, "std": cell.std, "seeds": cell.seeds} for c, cell in row.items()}
            for method, row in self.cells.items()
        }
        paper = {"source": self.source, "methods": self.paper, "others": self.others}
        head = {"title": self.title, "metric": self.metric, "columns": self.columns}
        return json.dumps({**head, "results": figures, "paper": paper}, indent=2, ensure_ascii=False) + "\n"


def _same_tasks(row: Mapping[str, float], columns: Sequence[str], printed: Sequence[str]) -> dict[str, float]:
    """The paper's row with the average of the tasks that are in our table, where those are not all of the paper's.

    A row without numbers for each task has no such average.
    """
    ours = [column for column in columns if column != "avg"]
    if "avg" not in printed or set(ours) == set(printed) - {"avg"}:
        return dict(row)
    kept = {column: row[column] for column in ours if column in row}
    return {**kept, "avg": math.fsum(kept.values()) / len(kept)} if len(kept) == len(ours) else kept


def _columns(cells: Mapping[str, Mapping[str, Cell]], printed: Sequence[str]) -> tuple[str, ...]:
    """Tasks in the paper's order, then others, then the average. If the paper has one column per source, so do we."""
    seen = dict.fromkeys(column for row in cells.values() for column in row)
    grouped = any(column in seen for column in printed if column.endswith("→*"))
    wanted = [column for column in seen if column != "avg" and column.endswith("→*") == grouped]
    ordered = [column for column in printed if column in wanted]
    ordered += [column for column in wanted if column not in ordered]
    return tuple(ordered) if len(ordered) == 1 else (*ordered, "avg")


_TEX = {
    "→": r"$\rightarrow$",
    "±": r"$\pm$",
    "²": "$^2$",
    "λ": r"$\lambda$",
    "%": r"\%",
    "&": r"\&",
    "_": r"\_",
    "#": r"\#",
    "$": r"\$",
    "{": r"\{",
    "}": r"\}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "\\": r"\textbackslash{}",
}


def in_markdown(text: str) -> str:
    """A name in a table: nothing in it ends the cell or changes the type."""
    return "".join(f"\\{letter}" if letter in "\\|*`<" else letter for letter in text)


def _tex(text: str) -> str:
    return "".join(_TEX.get(letter, letter) for letter in text)


def _tex_line(cells: Sequence[str]) -> str:
    return " & ".join(_tex(cell) for cell in cells) + r" \\"
