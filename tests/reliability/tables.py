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


def kill_table() -> str:
    """Signals, after which a command ends by itself, and kills. What is left behind: tracebacks, half-written files,
    temporary files, processes."""
    signals = load("signals")["commands"].values()
    kills = load("kill")["stages"].values()
    failures = sum(own["failures"] for own in signals)
    lines = []
    for name, runs, count, failed, left in (
        ("signals", signals, "signals", failures, ("tracebacks", "half_written")),
        ("kills", kills, "kills", "–", ("half_written_files", "parts_left", "decoders_left")),
    ):
        behind = sum(own[figure] for own in runs for figure in left)
        sums = [sum(own[n] for own in runs) for n in (count, "resumed", "bit_identical")]
        lines.append([name, sums[0], failed, behind, *sums[1:]])
    return markdown(["", "times", "failures", "left behind", "resumed", "same bits"], lines)


def disk_table() -> str:
    names = ("failed", "clear_line_and_exit_1", "earlier_results_intact", "same_bits")
    header = ["fault", "failed", "one line, exit 1", "earlier results intact", "same bits"]
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
    "model folders, weights, `.pth` files": "models configs weights programs networks mixtures",
    "run folders, studies, caches": "reports resumed pages studies caches boards tracked",
    "data folders, lists, labels, shards": "folders lists labels annotations parts shards",
    "`--config` files": "settings",
    "archives, images, ONNX files": "archives images graphs",
    "bytes to the server of `usfan label`": "requests",
    "full disks, clocks, links laid during writing": "disks clocks races",
}
"""Kinds of `hostile.py`, by what they are."""


def hostile_table() -> str:
    """Files that were damaged, and files that were made to do harm."""
    kinds = load("hostile")["kinds"]
    assert set(kinds) == set(" ".join(HOSTILE.values()).split())
    fuzz = load("fuzz")
    groups = {"damaged model folders": [fuzz["artifacts"]], "damaged images": [fuzz["images"]]}
    groups |= {name: [kinds[kind] for kind in part.split()] for name, part in HOSTILE.items()}
    lines = [
        [
            name,
            number(sum(case["cases"] for case in cases)),
            sum(case["failures"] for case in cases),
            f"{max(case['slowest_cpu_seconds'] for case in cases):.1f} s",
        ]
        for name, cases in groups.items()
    ]
    return markdown(["what", "cases", "failures", "slowest, CPU"], lines)


TABLES: dict[str, Callable[[], str]] = {
    "kill": kill_table,
    "disk": disk_table,
    "soak": soak_table,
    "supply": supply_table,
    "hostile": hostile_table,
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
