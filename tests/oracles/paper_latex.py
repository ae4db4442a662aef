"""Reads the tables of the paper from its LaTeX source: an independent check of the numbers that the package ships.

Every table becomes `{row name: [cell, …]}` in the order of the source; a cell is the number, or None for a dash.
"""

import re
from pathlib import Path

Cells = dict[str, list[float | None]]


def find_paper(folder: Path) -> str | None:
    """The LaTeX source among the files of `folder`, or None."""
    for path in sorted(folder.glob("*.txt")) if folder.is_dir() else []:
        text = path.read_text(encoding="utf-8")
        if r"\label{tab:cda-office-home}" in text:
            return text
    return None


def row_name(tex: str) -> str:
    """`\\ours\\Plus\\: (Ours)` → `U-SFAN+`; citations, font commands and footnote marks go."""
    tex = re.sub(r"\\cite\{[^}]*\}", "", tex).replace(r"\ours", "U-SFAN").replace(r"\Plus", "+")
    tex = (
        re.sub(r"\(ours\)", "", tex, flags=re.IGNORECASE)
        .replace(r"^{\dagger}", "")
        .replace(r"\lambda", "λ")
    )
    tex = re.sub(r"\\phantom\{[^}]*\}", "", tex)
    tex = re.sub(r"\\text\{([^}]*)\}", r"\1", tex).replace("^2", "²")
    tex = (
        re.sub(r"\\(sc|:|,|#)", "", tex).replace("\\ ", " ").replace("$", "").replace("~", " ")
    )
    return (
        re.sub(r"\s+", " ", tex)
        .strip()
        .replace("U-SFAN +", "U-SFAN+")
        .replace("U-SFAN{}+", "U-SFAN+")
    )


def number(tex: str) -> float | None:
    """A cell's number: `\\textbf{71.8}` → 71.8, `$\\sim$ 0.6M` → 600000, `-` → None."""
    tex = (
        re.sub(r"\\textbf\{([^}]*)\}", r"\1", tex)
        .replace(r"$\sim$", "")
        .replace(",", "")
        .strip()
    )
    if tex == "-":
        return None
    scale = {"K": 1e3, "M": 1e6}.get(tex[-1], 1.0)
    return float(tex.rstrip("KM")) * scale


def read_table(paper: str, label: str) -> Cells:
    """The body rows of the tabular that stands before `label`; the header row is left out."""
    before = paper[: paper.index(rf"\label{{{label}}}")]
    body = before[before.rindex(r"\begin{tabularx}") : before.rindex(r"\end{tabularx}")]
    body = re.sub(r"\\(specialrule(\{[^}]*\}){3}|hline|toprule|midrule|bottomrule)", "", body)
    body = re.sub(r"\\begin\{tabularx\}(\{[^}]*\}){2}", "", body)
    lines = [line.strip() for line in body.split(r"\\") if line.strip()]
    rows = [[cell.strip() for cell in line.split("&")] for line in lines]
    return {row_name(row[0]): [number(cell) for cell in row[1:]] for row in rows[1:]}


def read_header(paper: str, label: str) -> list[str]:
    """The header of the same tabular, its first cell left out."""
    before = paper[: paper.index(rf"\label{{{label}}}")]
    body = before[before.rindex(r"\begin{tabularx}") :]
    body = re.sub(r"\\specialrule(\{[^}]*\}){3}|\\toprule", "", body)
    line = re.sub(r"\\begin\{tabularx\}(\{[^}]*\}){2}", "", body).split(r"\\")[0]
    line = re.sub(r"\\rotatebox\{90\}\{([^}]*)\}", r"\1", line).replace(r"$\rightarrow$", "→")
    return [row_name(cell) for cell in line.split("&")][1:]
