"""The tables of docs/reliability.md and docs/strangers-files.md, from docs/results/reliability-*.json.

A test compares them.

python tests/reliability/tables.py            # print them
python tests/reliability/tables.py --write    # put them into the pages
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from typing import Any

from measuring import RESULTS

PAGES = [RESULTS.parent / name for name in ("reliability.md", "strangers-files.md")]


def load(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"reliability-{name}.json").read_text(encoding="utf-8"))


def markdown(header: list[str], lines: list[list[Any]]) -> str:
    rule = ["---", *["---:"] * (len(header) - 1)]
    return "\n".join(
        "| " + " | ".join(map(str, line)) + " |" for line in (header, rule, *lines)
    )


def number(value: int) -> str:
    return f"{value:,}"


def fuzz_table() -> str:
    figures = load("fuzz")
    lines = []
    for what in ("artifacts", "images"):
        own = figures[what]
        outcomes = ", ".join(f"{number(n)} {name}" for name, n in own["outcomes"].items())
        lines.append(
            [
                {"artifacts": "model folders", "images": "image files"}[what],
                number(own["cases"]),
                own["failures"],
                f"{own['slowest_cpu_seconds']:.2f} s",
                f"{own['slowest_wall_seconds']:.2f} s",
                own["over_2_seconds_wall"],
                f"{own['most_mib_above_imports']:.0f} MiB",
                outcomes,
            ]
        )
    return markdown(
        [
            "what",
            "cases",
            "failures",
            "slowest, CPU",
            "slowest, wall",
            "over 2 s, wall",
            "most memory above the imports",
            "outcomes",
        ],
        lines,
    )


def kill_table() -> str:
    stages = load("kill")["stages"]
    names = (
        "kills",
        "runs",
        "resumed",
        "bit_identical",
        "half_written_files",
        "parts_left",
        "decoders_left",
    )
    header = [
        "stage",
        "kills",
        "runs",
        "resumed",
        "same bits",
        "half-written files",
        "left-over parts",
        "orphans",
    ]
    return markdown(
        header, [[stage, *(own[n] for n in names)] for stage, own in stages.items()]
    )


def disk_table() -> str:
    names = (
        "cases",
        "failed",
        "clear_line_and_exit_1",
        "earlier_results_intact",
        "resumed",
        "same_bits",
    )
    header = [
        "fault",
        "cases",
        "failed",
        "of these: one line, exit 1",
        "earlier results intact",
        "resumed",
        "same bits",
    ]
    return markdown(
        header,
        [[fault, *(own[n] for n in names)] for fault, own in load("disk")["faults"].items()],
    )


def soak_table() -> str:
    lines = []
    for what, own in ((name, load("soak")[name]) for name in ("adapt", "predict")):
        count = own.get("adaptations") or own.get("images")
        ends = [f"{own['rss_mib_after_warm_up']:.0f} → {own['rss_mib_at_the_end']:.0f} MiB"]
        for name in ("handles", "threads"):
            known = f"{name}_at_the_end" in own
            ends.append(
                f"{own[f'{name}_after_warm_up']} → {own[f'{name}_at_the_end']}"
                if known
                else "–"
            )
        title = {
            "adapt": "adaptations in one process",
            "predict": "images in one `usfan predict`",
        }[what]
        lines.append([title, number(count), *ends, f"{own['seconds']:.0f} s"])
    return markdown(["what", "count", "memory", "handles", "threads", "time"], lines)


def supply_table() -> str:
    lines = []
    for name, own in load("supply")["suites"].items():
        versions = ", ".join(
            f"{package} {own['versions'][package]}" for package in ("torch", "timm", "numpy")
        )
        lines.append(
            [
                name,
                own["python"],
                versions,
                number(own["passed"]),
                own["failed"],
                own["skipped"],
            ]
        )
    return markdown(["suite", "Python", "packages", "passed", "failed", "skipped"], lines)


HOSTILE = {
    "models": "model folders",
    "configs": "valid configs, loaded",
    "reports": "run folders, `report`",
    "resumed": "run folders, `--resume`",
    "folders": "data folders",
    "lists": "lists",
    "settings": "`--config` files",
    "weights": "weights",
    "archives": "archives",
    "images": "images, 16 at a time",
    "programs": "programs in `.pth` files",
    "labels": "tables and mappings of labels",
    "disks": "full and read-only disks",
}
HOSTILE_LATER = {
    "networks": "`transformers` folders",
    "parts": "interrupted tables",
    "annotations": "Label Studio exports",
    "pages": "runs for `usfan label`",
    "requests": "bytes to its server",
    "boards": "TensorBoard's files",
    "caches": "caches",
    "mixtures": "mixtures",
    "clocks": "clocks that jump",
    "studies": "studies",
    "shards": "shards (`.tar`)",
    "graphs": "ONNX files and metadata",
    "races": "links laid during writing",
    "tracked": "stores of MLflow",
}


def outcomes(figures: dict[str, Any]) -> str:
    return ", ".join(f"{number(count)} {name}" for name, count in figures["outcomes"].items())


def hostile_table() -> str:
    kinds = load("hostile")["kinds"]
    lines = [
        [
            name,
            number(kinds[kind]["cases"]),
            kinds[kind]["failures"],
            f"{kinds[kind]['slowest_cpu_seconds']:.1f} s",
            f"{kinds[kind]['slowest_wall_seconds']:.1f} s",
            f"{kinds[kind]['most_mib_above_base']:.0f} MiB",
            outcomes(kinds[kind]),
        ]
        for kind, name in HOSTILE.items()
    ]
    header = ["what", "cases", "failures", "slowest, CPU", "slowest, wall", "most memory"]
    return markdown([*header, "outcomes"], lines)


def hostile_later_table() -> str:
    kinds = load("hostile")["kinds"]
    lines = [
        [
            name,
            number(kinds[kind]["cases"]),
            f"{kinds[kind]['slowest_cpu_seconds']:.1f} s",
            outcomes(kinds[kind]),
        ]
        for kind, name in HOSTILE_LATER.items()
        if kind in kinds
    ]
    return markdown(["what", "cases", "slowest, CPU", "outcomes"], lines)


def signals_table() -> str:
    header = [
        "command",
        "signals",
        "failures",
        "slowest end",
        "tracebacks",
        "half-written",
        "resumed",
        "same bits",
    ]
    names = ("tracebacks", "half_written", "resumed", "bit_identical")
    return markdown(
        header,
        [
            [
                name,
                own["signals"],
                own["failures"],
                f"{own['slowest_end_seconds']:.1f} s",
                *(own[n] for n in names),
            ]
            for name, own in load("signals")["commands"].items()
        ],
    )


TABLES: dict[str, Callable[[], str]] = {
    "fuzz": fuzz_table,
    "kill": kill_table,
    "disk": disk_table,
    "soak": soak_table,
    "supply": supply_table,
    "hostile": hostile_table,
    "hostile-later": hostile_later_table,
    "signals": signals_table,
}


def main() -> None:
    for name, make in TABLES.items():
        print(f"{name}\n{make()}\n")
    if "--write" in sys.argv:
        for page in PAGES:
            text = page.read_text(encoding="utf-8")
            for name, make in TABLES.items():
                pattern = rf"(<!-- table {name} -->\n).*?(<!-- end -->)"
                table = make()
                text = re.sub(
                    pattern, lambda m, t=table: f"{m[1]}{t}\n{m[2]}", text, flags=re.S
                )
            page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
