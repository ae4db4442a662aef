"""Every block of code in the README and the docs runs, with small pictures and one epoch.

A block whose title starts with "Needs" wants data or time that is not here: its commands must parse, its scripts exist.
"""

from __future__ import annotations

import contextlib
import importlib.util
import re
import shutil
import sys
from pathlib import Path
from types import FunctionType

import pytest

import usfan
from usfan.adaptation.methods import METHODS
from usfan.cli.main import parse_settings
from usfan.study import digits

ROOT = Path(__file__).parent.parent


def load(path: Path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


RUNNER = load(ROOT / "docs" / "run_pages.py")
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
CODE = {page: RUNNER.blocks(page.read_text(encoding="utf-8")) for page in PAGES}
LANGUAGES = {"python", "sh", "text", "bibtex"}


REAL = {"tutorial.md"}
"""Runs with the network that it names; the other pages take a small one, which needs a tenth of the time."""


def few_of(load):
    """Every tenth image of a data set."""

    def few():
        whole = load()
        return whole.subset(range(0, len(whole), 10))

    return few


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """Pictures, a source model and an adapted model, as the pages name them."""
    root = tmp_path_factory.mktemp("world")
    load(ROOT / "docs" / "examples" / "make_photos.py").make_photos(root / "photos", 4)
    with contextlib.chdir(root):
        train = "train photos/studio --out runs/studio --backbone dtn"
        for line in (train, "adapt runs/studio photos/street --out runs/street"):
            RUNNER.run_here(RUNNER.small_command(line.split(" ")))
    (root / "docs").symlink_to(ROOT / "docs")
    return root


def test_every_block_is_of_a_kind_that_is_checked():
    for page, found in CODE.items():
        for block in found:
            assert block.language in LANGUAGES, (
                f"{page.name}: a block of {block.language or 'no language'}"
            )
        text = page.read_text(encoding="utf-8")
        assert text.count("\n```") == 2 * len(found), f"{page.name}: a fence that is not closed"


def test_every_public_name_has_an_example_that_runs():
    """In the API reference or in the page on methods, whose blocks run below; the reference describes each."""
    pages = [ROOT / "docs" / name for name in ("api.md", "first-method.md")]
    code = "\n".join(
        block.text
        for page in pages
        for block in CODE[page]
        if block.language == "python" and not block.needs
    )
    used = set(re.findall(r"usfan\.((?:figures\.)?\w+)", code))
    reference = pages[0].read_text(encoding="utf-8")
    public = {name: getattr(usfan, name) for name in usfan.__all__ if name != "__version__"}
    figures = public.pop("figures")
    members = re.search(r"members: \[(.*)\]", reference)[1].split(", ")
    public |= {f"figures.{name}": getattr(figures, name) for name in members}
    for name, value in public.items():
        if isinstance(value, type | FunctionType):
            assert name in used, f"usfan.{name} has no example"
            place = value.__module__
            if place not in ("usfan.errors", figures.__name__):
                place += f".{value.__name__}"
            assert f"::: {place}\n" in reference, f"usfan.{name} is not in the reference"


@pytest.mark.parametrize(
    "page",
    [p for p, found in CODE.items() if any(b.needs for b in found)],
    ids=lambda p: str(p.relative_to(ROOT)),
)
def test_commands_that_need_more_are_valid(page):
    for block in CODE[page]:
        for words in block.commands() if block.needs and block.language == "sh" else ():
            if words[0] == "usfan":
                assert parse_settings(words[1], words[2:])
            elif words[:2] == ["python", "-m"]:
                module = ROOT / words[2].replace(".", "/")
                program = (
                    module / "__main__.py" if module.is_dir() else module.with_suffix(".py")
                )
                assert program.is_file(), words
            elif words[0] == "python":
                assert (ROOT / words[1]).is_file(), words
            else:
                assert words[0] == "pip", words


@pytest.mark.parametrize(
    "page",
    [
        p
        for p, found in CODE.items()
        if any(b.language in ("python", "sh") and not b.needs for b in found)
    ],
    ids=lambda p: str(p.relative_to(ROOT)),
)
def test_a_page_runs(page, world, tmp_path, monkeypatch):
    backbone = None if page.name in REAL else "dtn"
    shutil.copytree(world, tmp_path / "work", symlinks=True)
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setattr(digits, "load_mnist5k", few_of(digits.load_mnist5k))
    monkeypatch.setattr(digits, "load_uci", few_of(digits.load_uci))
    known = set(METHODS)
    runner = RUNNER.Page(page, small=True, backbone=backbone)
    for block in CODE[page]:
        if block.language not in ("python", "sh") or block.needs:
            continue
        runner.run(block)
        following = next((b for b in CODE[page] if b.start > block.end), None)
        if following is not None and following.title == "Output":
            assert following.text.strip(), (
                "an output is shown, but it is empty: run docs/run_pages.py --write"
            )
    for name in set(METHODS) - known:
        del METHODS[name]
