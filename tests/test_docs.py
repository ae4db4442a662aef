"""The docs tell the truth: tables are those of the saved rows, files and commands that are named exist."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from usfan.cli.main import parse_settings

ROOT = Path(__file__).parent.parent


def load_maker():
    spec = importlib.util.spec_from_file_location("make_tables", ROOT / "docs" / "make_tables.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


MAKER = load_maker()


@pytest.mark.parametrize("name", list(MAKER.TABLES))
def test_each_table_is_that_of_its_rows(name):
    page = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    found = re.search(rf"<!-- table {name} -->\n(.*?)\n<!-- end -->", page, flags=re.S)
    assert found is not None
    assert found[1] == MAKER.TABLES[name]()


def test_the_readme_shows_the_digits_table():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert MAKER.digits_table() in readme
    assert MAKER.closed_set_averages() in readme


@pytest.mark.parametrize(
    "page", ["README.md", "docs/results.md", "docs/method.md", "docs/artifact.md", "docs/reliability.md"]
)
def test_links_and_pictures_exist(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        assert (ROOT / page).parent.joinpath(target).exists(), target


def test_modules_named_in_the_method_page_exist():
    text = (ROOT / "docs" / "method.md").read_text(encoding="utf-8")
    named = re.findall(r"`((?:[a-z]+/)+[\w.]+\.(?:py|json))", text)
    assert len(named) > 10
    for name in named:
        assert (ROOT / "src" / "usfan" / name.removeprefix("src/usfan/")).is_file(), name


def test_commands_in_the_readme_parse():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    commands = [line.split("#")[0].split()[1:] for line in text.splitlines() if line.startswith("    usfan ")]
    assert {c[0] for c in commands} >= {"train", "adapt", "evaluate", "predict", "report"}
    for words in commands:
        assert parse_settings(words[0], words[1:])
