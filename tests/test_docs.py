"""The docs tell the truth: tables are those of the saved rows; links, modules and commands that are named exist."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [
    *(
        ROOT / name
        for name in (
            "README.md",
            "CONTRIBUTING.md",
            "SECURITY.md",
            "CODE_OF_CONDUCT.md",
            "CHANGELOG.md",
        )
    ),
    *sorted((ROOT / "docs").rglob("*.md")),
]
LONG = {"CHANGELOG.md"}
"""Pages that may have more than 1,500 words."""


def load_maker():
    spec = importlib.util.spec_from_file_location(
        "make_tables", ROOT / "docs" / "make_tables.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


MAKER = load_maker()
SHOWN = {
    (page, name): table
    for page in PAGES
    for name, table in re.findall(
        r"<!-- table ([\w-]+) -->\n(.*?)\n?<!-- end -->",
        page.read_text(encoding="utf-8"),
        flags=re.S,
    )
}


@pytest.mark.parametrize("name", list(MAKER.TABLES))
def test_each_table_is_that_of_its_rows(name):
    shown = [table for (_, other), table in SHOWN.items() if other == name]
    assert shown, f"no page shows {name}"
    assert set(shown) == {MAKER.TABLES[name]()}


@pytest.mark.parametrize("page", MAKER.claims())
def test_figures_in_sentences_are_those_of_the_rows(page):
    text = " ".join((ROOT / page).read_text(encoding="utf-8").split())
    for claim in MAKER.claims()[page]:
        assert claim in text, claim


def test_every_table_of_figures_is_computed():
    """A table with more than a few figures is either computed, or its figures stand in no row of numbers."""
    sys.path.insert(0, str(ROOT / "tests" / "reliability"))
    from tables import TABLES as OTHER

    assert {name for _, name in SHOWN} <= set(MAKER.TABLES) | set(OTHER)
    for page in PAGES:
        text = re.sub(
            r"<!-- table [\w-]+ -->.*?<!-- end -->",
            "",
            page.read_text(encoding="utf-8"),
            flags=re.S,
        )
        for line in text.splitlines():
            cells = (
                [cell.strip() for cell in line.strip().strip("|").split("|")]
                if line.startswith("|")
                else []
            )
            figures = [
                cell for cell in cells if re.fullmatch(r"[+−-]?\d+\.\d+( ± \d+\.\d+)?", cell)
            ]
            assert len(figures) < 2, (
                f"{page.name}: a table of figures that nothing computes: {line}"
            )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_exist_and_no_page_is_long(page):
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text):
        if not target.startswith("https://"):
            assert page.parent.joinpath(target).exists(), target
    if page.name not in LONG:
        assert len(text.split()) <= 1500, f"{len(text.split())} words"


def test_results_fit_on_one_page():
    assert len((ROOT / "docs" / "results.md").read_text(encoding="utf-8").splitlines()) < 150


def test_a_study_answers_in_its_first_line():
    for page in (ROOT / "docs" / "studies").glob("*.md"):
        if page.name != "index.md":
            title, _, answer, *_ = page.read_text(encoding="utf-8").splitlines()
            assert title.endswith("?"), page.name
            assert answer.startswith("**"), page.name


def test_modules_named_in_the_method_page_exist():
    text = (ROOT / "docs" / "method.md").read_text(encoding="utf-8")
    named = re.findall(r"`((?:[a-z]+/)+[\w.]+\.(?:py|json))", text)
    assert len(named) > 10
    for name in named:
        assert (ROOT / "src" / "usfan" / name.removeprefix("src/usfan/")).is_file(), name


def test_scripts_named_in_the_docs_exist():
    named = re.compile(r"(?<![\w./(-])((?:src|tests|docs|studies|benchmarks)/[\w./-]+\.\w+)")
    for page in PAGES:
        for name in named.findall(page.read_text(encoding="utf-8")):
            assert (ROOT / name).exists(), f"{page.name}: {name}"


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    pytest.importorskip("material", reason="needs usfan[docs]")
    pytest.importorskip("mkdocstrings", reason="needs usfan[docs]")
    out = tmp_path_factory.mktemp("site")
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "--quiet",
        "--site-dir",
        out,
    ]
    environment = {
        "NO_MKDOCS_2_WARNING": "1",
        "PATH": "/usr/bin:/bin",
        "PYTHONPATH": str(ROOT / "src"),
    }
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr
    return out


def test_the_site_builds_without_a_warning_and_fetches_nothing(site):
    assert "attach_posterior" in (site / "api.html").read_text(encoding="utf-8")
    for page in site.rglob("*.html"):
        fetched = re.findall(
            r"""<(?:script|link|img|iframe)[^>]+(?:src|href)=["']?(https?://[^"' >]+)""",
            page.read_text("utf-8"),
        )
        assert fetched == [], page.name


def test_the_site_in_a_browser(site, tmp_path):
    """From files, without a network: no error, no request, no page wider than a telephone, and a search that finds."""
    sys.path.insert(0, str(ROOT / "tests" / "report"))
    from headless import Browser, find_chromium

    program = find_chromium()
    if program is None:
        pytest.skip("no Chromium")

    def until(script: str) -> object:
        end = time.monotonic() + 30
        while not (found := browser.run(script)):
            assert time.monotonic() < end, script
            time.sleep(0.05)
        return found

    with Browser(program, tmp_path) as browser:
        for name, width in (("results", 400), ("studies/guard", 400), ("index", 1400)):
            size = {
                "width": width,
                "height": 900,
                "deviceScaleFactor": 1,
                "mobile": width < 600,
            }
            browser.call("Emulation.setDeviceMetricsOverride", **size)
            browser.call("Page.navigate", url=(site / f"{name}.html").as_uri())
            until(
                f"location.href.includes('{name}.html') && document.readyState === 'complete'"
            )
            assert browser.run(
                "document.documentElement.scrollWidth <= document.documentElement.clientWidth"
            ), name
        browser.run(
            "const field = document.querySelector('.md-search__input'); field.focus(); field.value = 'guard'"
        )
        until(
            "field.dispatchEvent(new KeyboardEvent('keyup', {bubbles: true})), "
            "document.querySelectorAll('.md-search-result__item').length"
        )
        assert browser.errors == []
        assert [address for address in browser.requests if address.startswith("http")] == []
