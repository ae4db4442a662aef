"""Results as tables: what is averaged, and how it is printed."""

import json
import random
import statistics
from types import SimpleNamespace

import pytest
import torch

from usfan.errors import DataError
from usfan.study.agreement import predicted_classes
from usfan.study.results import Average, Table, aggregate


def rows_of(values):
    """`{(method, task): [value of seed 0, of seed 1, …]}` as result rows."""
    return [
        {"method": method, "task": task, "seed": seed, "accuracy": value, "seconds": 1.5}
        for (method, task), seeds in values.items()
        for seed, value in enumerate(seeds)
    ]


@pytest.fixture
def office_rows():
    rng = random.Random(0)
    tasks = ["W→D", "W→A", "D→W", "D→A", "A→W", "A→D"]  # not the paper's order
    return rows_of(
        {
            (m, t): [rng.uniform(60, 99) for _ in range(3)]
            for m in ("shot-im", "u-sfan")
            for t in tasks
        }
    )


def test_predictions_hold_more_than_32767_classes():
    logits = torch.zeros(2, 40_001)
    logits[:, 40_000] = 1
    unknown = torch.tensor([False, True])
    model = SimpleNamespace(
        passes=SimpleNamespace(after=SimpleNamespace(logits=logits)),
        flag_unknown=lambda outputs: unknown,
        classes=range(40_001),
    )
    assert predicted_classes(model).tolist() == [40_000, 40_001]


def test_average_is_taken_within_seeds():
    """The spread of the average is that of the seeds' averages: here the tasks cancel, and it is nought."""
    table = aggregate(rows_of({("shot", "A→B"): [50, 60], ("shot", "B→A"): [70, 60]}))
    assert table["shot"]["A→B"] == Average(55.0, statistics.stdev([50, 60]), 2)
    assert table["shot"]["avg"] == Average(60.0, 0.0, 2)


def test_one_seed_has_no_spread():
    table = aggregate(rows_of({("shot", "A→B"): [71.25]}))
    assert table["shot"]["A→B"] == Average(71.25, None, 1)
    assert table["shot"]["A→B"].text() == "71.2"
    assert Average(80.44, 0.31, 3).text() == "80.4 ± 0.3"


def test_average_against_a_plain_computation(office_rows):
    table = aggregate(office_rows)
    for method in ("shot-im", "u-sfan"):
        means = [
            statistics.mean(
                r["accuracy"]
                for r in office_rows
                if r["method"] == method and r["seed"] == seed
            )
            for seed in range(3)
        ]
        assert table[method]["avg"].mean == pytest.approx(statistics.mean(means), abs=1e-12)
        assert table[method]["avg"].std == pytest.approx(statistics.stdev(means), abs=1e-12)
        of_source = [
            r["accuracy"]
            for r in office_rows
            if r["method"] == method and r["task"].startswith("A→")
        ]
        assert table[method]["A→*"].mean == pytest.approx(statistics.mean(of_source), abs=1e-12)


def test_half_finished_seeds_do_not_enter_the_average():
    values = {("shot", "A→B"): [50, 60], ("shot", "B→A"): [70], ("u-sfan", "A→B"): [80]}
    table = aggregate(rows_of(values))
    assert table["shot"]["A→B"].seeds == 2
    assert table["shot"]["avg"] == Average(60.0, None, 1)
    assert "avg" not in table["u-sfan"]


def test_rows_that_are_wrong():
    with pytest.raises(DataError, match="a result row lacks seed, os"):
        aggregate([{"method": "shot", "task": "A→B"}], metric="os")
    assert aggregate([]) == {}
    row = {"method": "shot", "task": "A→B", "seed": 0, "accuracy": 50.0}
    for name, value in {"accuracy": "\ud800", "method": ["shot"], "seed": "0"}.items():
        with pytest.raises(DataError, match=f"a result row lacks {name}"):
            aggregate([row, row | {name: value}])


def test_markdown_sets_the_paper_beside_ours(office_rows):
    table = Table.build(office_rows, title="Office-31", benchmark="office31")
    lines = table.to_markdown().splitlines()
    assert lines[0].startswith("Office-31: accuracy in %, 3 seeds, mean ± standard deviation")
    assert lines[0].endswith("paper: Table A2 (resnet50)")
    assert lines[2] == "| method | A→D | A→W | D→A | D→W | W→A | W→D | avg |"
    assert lines[4].startswith("| shot-im | ")
    assert lines[4].count(" ± ") == 7
    assert lines[5] == "| shot-im, paper | 90.6 | 91.2 | 72.5 | 98.3 | 71.4 | 99.9 | 87.3 |"
    assert lines[7] == "| u-sfan, paper | 91.8 | 92.3 | 75.8 | 97.7 | 74.4 | 99.8 | 88.6 |"
    # The paper's other rows follow, each once.
    others = [line.split(" | ")[0].removeprefix("| ") for line in lines[8:]]
    names = ["ResNet-50", "DANN", "DAN", "SAFN", "CDAN", "A²Net", "SHOT", "U-SFAN+"]
    assert others == [f"{name}, paper" for name in names]
    assert len({line.count("|") for line in lines[2:]}) == 1


def test_some_tasks_only_are_set_beside_the_same_of_the_paper():
    """An average over two tasks must not stand beside the paper's over twelve."""
    rows = rows_of({(m, t): [70.0] for m in ("source-only", "u-sfan") for t in ("A→C", "A→P")})
    table = Table.build(rows, title="Office-Home", benchmark="office-home")
    assert table.paper["u-sfan"] == {
        "A→C": 58.5,
        "A→P": 78.6,
        "avg": pytest.approx((58.5 + 78.6) / 2),
    }
    assert "source-only, paper" not in table.to_markdown()
    assert table.paper["DANN"]["avg"] == pytest.approx((45.6 + 59.3) / 2)
    assert "| u-sfan, paper | 58.5 | 78.6 | 68.5 |" in table.to_markdown()


def test_domainnet_is_averaged_by_source_as_in_the_paper():
    names = "CIPQRS"
    rows = rows_of(
        {
            ("u-sfan", f"{a}→{b}"): [10.0 * i + 1]
            for i, a in enumerate(names)
            for b in names
            if a != b
        }
    )
    table = Table.build(rows, title="DomainNet", benchmark="domainnet")
    assert table.columns == ("C→*", "I→*", "P→*", "Q→*", "R→*", "S→*", "avg")
    text = table.to_markdown()
    assert "| u-sfan | 1.00 | 11.00 | 21.00 | 31.00 | 41.00 | 51.00 | 26.00 |" in text
    assert "| u-sfan, paper | 30.88 | 26.44 | 29.91 | 10.44 | 29.32 | 29.99 | 26.13 |" in text
    assert json.loads(table.to_json())["results"]["u-sfan"]["S→C"] == {
        "mean": 51.0,
        "std": None,
        "seeds": 1,
    }


def test_one_task_has_no_average_column():
    rows = rows_of({("shot-im", "CIFAR9→STL9"): [75.0, 76.0]})
    table = Table.build(rows, title="CIFAR9→STL9", benchmark="cifar-stl")
    assert table.columns == ("CIFAR9→STL9",)
    assert "| shot-im, paper | 75.69 |" in table.to_markdown()
    assert "| U-SFAN, paper | 77.04 |" in table.to_markdown()


def test_tables_without_a_counterpart():
    """Digits have no table in the paper, and two domains of DomainNet none by source."""
    digits = Table.build(
        rows_of({("shot", "M→U"): [97.0], ("shot", "U→M"): [96.0]}),
        title="Digits",
        benchmark="digits",
    )
    assert (digits.columns, digits.source, digits.paper) == (("M→U", "U→M", "avg"), "", {})
    few = rows_of({("shot-im", "C→S"): [30.0], ("shot-im", "S→C"): [40.0]})
    assert Table.build(few, title="DomainNet", benchmark="domainnet").columns == (
        "C→S",
        "S→C",
        "avg",
    )


def test_json_holds_everything(office_rows):
    content = json.loads(
        Table.build(office_rows, title="Office-31", benchmark="office31").to_json()
    )
    assert content["paper"]["source"] == "Table A2 (resnet50)"
    assert content["paper"]["methods"]["u-sfan"]["avg"] == 88.6
    assert content["paper"]["methods"]["CDAN"]["W→D"] == 100.0
    assert content["results"]["u-sfan"]["avg"]["seeds"] == 3


def test_names_of_domains_cannot_break_a_table():
    table = Table.build(
        rows_of({("shot", "a|b→{c}_~"): [50.0], ("shot", r"d\e→$5"): [60.0]}), title="*own*"
    )
    head, rule, body = table.to_markdown().strip().splitlines()[2:]
    assert head == r"| method | a\|b→{c}_~ | d\\e→$5 | avg |"
    assert [line.replace(r"\|", "").count("|") for line in (head, rule, body)] == [5, 5, 5]
