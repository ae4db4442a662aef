"""The two pages on reliability: their tables are those of the saved figures, what they name exists and passed."""

import re

import pytest
from kill_and_resume import passed as kill_passed
from soak import passed as soak_passed
from tables import PAGES, TABLES, load

from usfan.cli.commands import COMMANDS
from usfan.cli.flags import describe

ROOT = PAGES[0].parents[1]
TEXT = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)


@pytest.mark.parametrize("name", list(TABLES))
def test_each_table_is_that_of_its_figures(name):
    found = re.search(rf"<!-- table {name} -->\n(.*?)\n<!-- end -->", TEXT, flags=re.S)
    assert found is not None
    assert found[1] == TABLES[name]()


def test_scripts_and_targets_exist():
    scripts = re.findall(r"python (tests/[\w/]+\.py)", TEXT)
    assert len(set(scripts)) >= 4
    for script in [*scripts, *re.findall(r"`(tests/[\w/]+\.py)`", TEXT)]:
        assert (ROOT / script).is_file(), script
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"make ([a-z-]+)", TEXT):
        assert f"\n{target}:" in makefile, target


def test_flags_that_are_named_exist():
    every = {
        flag.option
        for command in COMMANDS.values()
        for flag in describe(command).flags.values()
    }
    for flag in set(re.findall(r"`(--[a-z-]+)`", TEXT)):
        assert flag in every, flag


def test_the_saved_figures_are_those_of_runs_that_passed():
    fuzz = load("fuzz")
    assert (fuzz["artifacts"]["cases"], fuzz["images"]["cases"]) == (20_000, 5_000)
    assert not any(
        fuzz[what][name]
        for what in ("artifacts", "images")
        for name in ("failures", "over_2_seconds")
    )
    assert load("hostile")["passed"]
    assert load("hostile")["cases"] >= 20_000
    assert load("signals")["passed"]
    kill = load("kill")
    assert kill["kills"] >= 50
    assert all(map(kill_passed, kill["stages"].values()))
    assert load("disk")["passed"]
    soak = load("soak")
    assert (soak["adapt"]["adaptations"], soak["predict"]["images"]) == (1_000, 200_000)
    assert soak_passed(soak["adapt"])
    assert soak_passed(soak["predict"])
