"""Speed and memory, side by side with peers: `python benchmarks/run.py [SUITE …] [--out FILE.json]`."""

from __future__ import annotations

import argparse
import platform
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

import cpu
import posterior
import startup
import throughput
from measure import Row
from usfan.files import write_json

SUITES: dict[str, Callable[[], Iterable[Row]]] = {
    "posterior": posterior.suite,
    "startup": startup.suite,
    "memory": startup.memory_suite,
    "throughput": throughput.suite,
    "cpu": cpu.suite,
}


def table(name: str, rows: list[Row]) -> Table:
    grid = Table(title=name)
    for column in ("what", "case"):
        grid.add_column(column)
    for column in ("value", "ratio", "wanted"):
        grid.add_column(column, justify="right")
    grid.add_column("note")
    group = ""
    for row in rows:
        if row.group != group and group:
            grid.add_section()
        value = "–" if row.value is None else f"{row.value:,.2f} {row.unit}"
        ratio = "" if row.ratio is None else f"{row.ratio:,.1f}×"
        if row.wanted is not None and row.ratio is not None:
            ratio = f"[{'green' if row.ratio >= row.wanted else 'red'}]{ratio}[/]"
        wanted = "" if row.wanted is None else f"≥ {row.wanted:g}×"
        grid.add_row(
            "" if row.group == group else row.group, row.case, value, ratio, wanted, row.note
        )
        group = row.group
    return grid


def machine() -> dict[str, str | int]:
    return {
        "processor": platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "suites",
        nargs="*",
        metavar="SUITE",
        help=f"of {', '.join(SUITES)}; all of them by default",
    )
    parser.add_argument("--out", type=Path, help="also write the figures as JSON")
    parser.add_argument(
        "--threads", type=int, help="CPU threads; steady figures on a busy machine need 1"
    )
    parser.add_argument("--data", help="folder of class folders with JPEGs, for throughput")
    parser.add_argument(
        "--backbones",
        nargs="+",
        help="for throughput; resnet50 and tf_efficientnet_lite0 by default",
    )
    parser.add_argument(
        "--weights",
        default="auto",
        help="pretrained weights of EfficientNet-Lite, for throughput",
    )
    options = parser.parse_args()
    throughput.SETTINGS |= {
        k: getattr(options, k) for k in throughput.SETTINGS if getattr(options, k)
    }
    unknown = [name for name in options.suites if name not in SUITES]
    if unknown:
        parser.error(f"no suite named {', '.join(unknown)}; there are {', '.join(SUITES)}")
    if options.threads:
        torch.set_num_threads(options.threads)
    console = Console()
    results: dict[str, list[Row]] = {}
    for name in options.suites or SUITES:
        rows = results[name] = []
        with console.status(name) as status:
            for row in SUITES[name]():
                rows.append(row)
                if options.out:
                    save(options.out, results)
                print(row.group, row.case, row.value, row.unit, row.note, flush=True)
                status.update(f"{name}: {row.group}, {row.case}")
        console.print(table(name, rows))


def save(path: Path, results: dict[str, list[Row]]) -> None:
    """After every row: a run that is cut off keeps what it has."""
    suites = {name: [asdict(row) for row in rows] for name, rows in results.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, {"machine": machine(), "suites": suites})


if __name__ == "__main__":
    main()
