"""The tables of docs/results.md, from the rows saved in docs/results/.

A test checks that the page holds them as they are.

.venv/bin/python docs/make_tables.py            # print them
.venv/bin/python docs/make_tables.py --write    # put them into docs/results.md
"""

from __future__ import annotations

import json
import re
import statistics
import sys
from pathlib import Path

HERE = Path(__file__).parent
OPEN_FIGURES = {
    "os": "OS",
    "os_star": "OS*",
    "unknown_accuracy": "UNK",
    "hos": "HOS",
    "auroc_unknown": "AUROC",
    "aupr_unknown": "AUPR",
}


def load(name: str) -> dict:
    return json.loads((HERE / "results" / name).read_text(encoding="utf-8"))


def over_seeds(values: dict[int, list[float]]) -> str:
    """Mean over tasks within each seed, then mean ± std over seeds."""
    means = [statistics.fmean(v) for v in values.values()]
    spread = f" ± {statistics.stdev(means):.1f}" if len(means) > 1 else ""
    return f"{statistics.fmean(means):.1f}{spread}"


def by_seed(rows: list[dict], read) -> dict[int, list[float]]:
    seeds: dict[int, list[float]] = {}
    for row in rows:
        seeds.setdefault(row["seed"], []).append(read(row))
    return seeds


def markdown(header: list[str], lines: list[list[str]]) -> str:
    rule = ["---", *["---:"] * (len(header) - 1)]
    return "\n".join("| " + " | ".join(line) + " |" for line in (header, rule, *lines))


def open_set_table() -> str:
    rows = load("office31-open.json")["rows"]
    lines = []
    for method in dict.fromkeys(r["method"] for r in rows):
        own = [r for r in rows if r["method"] == method]
        lines.append([method, *(over_seeds(by_seed(own, lambda r, f=figure: r[f])) for figure in OPEN_FIGURES)])
    return markdown(["method", *OPEN_FIGURES.values()], lines)


def open_set_scores_table() -> str:
    rows = load("office31-open.json")["rows"]
    methods = ("source-only", "shot-im", "u-sfan")
    lines = []
    for score in rows[0]["detection"]:
        line = [score]
        for method in methods:
            own = [r for r in rows if r["method"] == method]
            area = over_seeds(by_seed(own, lambda r, s=score: r["detection"][s]["auroc"]))
            os = over_seeds(by_seed(own, lambda r, s=score: r["by_score"][s]["os"]))
            hos = over_seeds(by_seed(own, lambda r, s=score: r["by_score"][s]["hos"]))
            line += [area, os, hos]
        lines.append(line)
    return markdown(["score", *(f"{m} {f}" for m in methods for f in ("AUROC", "OS", "HOS"))], lines)


def digits_table() -> str:
    metrics = load("digits.json")["metrics"]
    pairs = list(metrics)
    lines = []
    for method in metrics[pairs[0]]:
        cells = [metrics[pair][method] for pair in pairs]
        lines.append([method, *(text for c in cells for text in (f"{c['accuracy']:.1f}", f"{c['ece']:.1f}"))])
    return markdown(
        ["method", *(f"{pair.replace('-', '→')} {f}" for pair in pairs for f in ("accuracy", "ECE"))], lines
    )


def toy_table() -> str:
    metrics = load("toy.json")["metrics"]
    lines = []
    for method in metrics["mild"]:
        line = [method]
        for shift in ("mild", "strong"):
            cell = metrics[shift][method]
            line += [f"{cell['accuracy']:.1f} ± {cell['std']:.1f}", str(cell["flipped"])]
        lines.append(line)
    return markdown(["method", "mild", "flipped", "strong", "flipped"], lines)


TABLES = {
    "office31-open": open_set_table,
    "office31-open-scores": open_set_scores_table,
    "digits": digits_table,
    "toy": toy_table,
}


def main() -> None:
    page = HERE / "results.md"
    text = page.read_text(encoding="utf-8") if page.is_file() else ""
    for name, make in TABLES.items():
        table = make()
        print(f"{name}\n{table}\n")
        text = re.sub(
            rf"(<!-- table {name} -->\n).*?(\n<!-- end -->)", lambda m, t=table: m[1] + t + m[2], text, flags=re.S
        )
    if "--write" in sys.argv:
        page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
