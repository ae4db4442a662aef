"""The paper's numbers: as printed in its LaTeX source, and consistent where the paper is."""

import math
from pathlib import Path

import pytest

from oracles.paper_latex import find_paper, read_header, read_table
from usfan.data.benchmarks.catalogue import BENCHMARKS
from usfan.study.tables import PaperTable, paper_row, paper_rows, paper_tables

PAPER = find_paper(Path(__file__).resolve().parents[2].parent / "shared" / "paper")
needs_paper = pytest.mark.skipif(
    PAPER is None, reason="needs the paper's source beside the checkout"
)


def paper_table(number: str) -> PaperTable:
    """The table with this printed number."""
    return next(table for table in paper_tables() if table.number == number)


def shipped(number: str) -> dict[str, list[float | None]]:
    table = paper_table(number)
    return {row.printed: [row.values[column] for column in table.columns] for row in table.rows}


@pytest.mark.shared_data
@needs_paper
@pytest.mark.parametrize("number", ["2", "3", "4a", "A2", "A3"])
def test_every_number_is_as_printed(number):
    table = paper_table(number)
    assert shipped(number) == read_table(PAPER, table.label)
    if number not in ("4a", "A3"):  # the header of those two is one word, and classes in short
        assert [*table.columns[:-1], "Avg."] == read_header(PAPER, table.label)


@pytest.mark.shared_data
@needs_paper
def test_tables_that_are_printed_the_other_way_round():
    ablation = dict(
        zip(
            read_header(PAPER, "tab:officehome_ablation"), [60.3, 70.5, 71.2, 71.8], strict=True
        )
    )
    assert read_table(PAPER, "tab:officehome_ablation")["Avg. Acc."] == list(ablation.values())
    assert {name: values[0] for name, values in shipped("1").items()} == ablation
    by_source = read_table(PAPER, "tab:domainnet")
    methods = read_header(PAPER, "tab:domainnet")
    assert shipped("4b") == {
        name: [row[i] for row in by_source.values()] for i, name in enumerate(methods)
    }
    assert [f"{name[0].upper()}→*" for name in by_source][:-1] == list(
        paper_table("4b").columns[:-1]
    )


@pytest.mark.shared_data
@needs_paper
def test_summary_and_text():
    assert list(shipped("A1").values()) == list(read_table(PAPER, "tab:mtda_datasets").values())
    assert shipped("text") == {"SHOT-IM": [75.69], "U-SFAN": [77.04]}
    assert r"$77.04\%$ for \ours vs $75.69\%$ for SHOT-IM" in PAPER


@pytest.mark.shared_data
@needs_paper
def test_no_table_of_results_is_left_out():
    labels = {
        line.split("{")[1].split("}")[0]
        for line in PAPER.splitlines()
        if r"\label{tab:" in line
    }
    assert labels == {table.label for table in paper_tables() if table.number != "text"}


def test_the_printed_averages_that_do_not_follow():
    """The average of each row that prints both an average and the numbers it is of; Table 4b prints two digits."""
    wrong = {}
    count = 0
    for table in paper_tables():
        slack = 0.005 if table.number == "4b" else 0.05
        for row in table.rows:
            values = [
                row.values[c] for c in table.columns if c != "avg" and row.values[c] is not None
            ]
            printed = row.values.get("avg")
            if printed is not None and values:
                count += 1
                computed = math.fsum(values) / len(values)
                if abs(computed - printed) > slack + 1e-9:
                    wrong[table.number, row.printed] = (printed, round(computed, 2))
    assert wrong == {
        ("2", "A²Net"): (72.8, 72.68),
        ("2", "SHOT++"): (73.0, 72.94),
        ("4b", "U-SFAN"): (26.13, 26.16),
        ("A3", "A²Net"): (84.3, 84.36),
    }
    assert count == 12 + 7 + 2 + 10 + 13


def test_columns_and_methods_are_those_of_the_catalogue():
    for table in paper_tables():
        if table.benchmark is None:
            continue
        entry = BENCHMARKS[table.benchmark]
        tasks = [
            column for column in table.columns if "→" in column and not column.endswith("*")
        ]
        assert set(tasks) <= set(entry.tasks)
        assert table.backbone == entry.recipe.train["backbone"]
        assert table.metric == ("os" if table.setting == "open" else entry.metric)
    assert tuple(paper_table("A3").columns[:-1]) == BENCHMARKS["visda-c"].classes
    assert tuple(paper_table("2").columns[:-1]) == BENCHMARKS["office-home"].tasks
    assert tuple(paper_table("A2").columns[:-1]) == BENCHMARKS["office31"].tasks


def test_rows_by_benchmark():
    home = paper_rows("office-home")
    assert home["U-SFAN"]["A→C"] == 58.5
    assert home["U-SFAN"]["avg"] == 71.8
    assert home["SHOT-IM + Ent. weighting"] == {"avg": 71.2}
    assert paper_rows("office-home", "open")["SHOT"]["avg"] == 72.8
    assert paper_rows("visda-c")["DANCE"] == {"S→R": 70.2, "avg": 70.2}
    assert paper_rows("visda-c")["U-SFAN+"] == {"S→R": 82.7, "avg": 82.7}
    assert paper_rows("cifar-stl")["SHOT-IM"] == {"CIFAR9→STL9": 75.69, "avg": 75.69}
    assert paper_rows("digits") == {}
    assert paper_rows("office31", "open") == {}


def test_margins_that_the_paper_claims():
    margins = {
        (name, setting): round(
            paper_row(name, better, setting)["avg"] - paper_row(name, worse, setting)["avg"], 1
        )
        for name, setting, better, worse in [
            ("office31", "closed", "u-sfan", "shot-im"),
            ("office-home", "closed", "u-sfan", "shot-im"),
            ("visda-c", "closed", "u-sfan", "shot-im"),
            ("office-home", "open", "u-sfan", "shot-im"),
        ]
    }
    assert list(margins.values()) == [1.3, 1.3, 0.9, 2.0]


def test_rows_under_our_names():
    assert paper_row("office-home", "source-only") == {"avg": 60.3}
    assert paper_row("office31", "source-only")["avg"] == 76.1
    assert paper_row("office-home", "shot-im-entropy") == {"avg": 71.2}
    assert paper_row("domainnet", "shot") is None
