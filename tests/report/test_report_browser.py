"""The report in a real browser: no error, nothing loaded, every figure there, tables that sort, a layout that holds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from report_runs import write_adapt_run

from headless import Browser, find_chromium
from usfan.report.page import write_report

COLUMN = "[...document.querySelectorAll('#r1-classes tbody tr')].map(row => row.cells[{0}].dataset.value)"
CUT_OFF = """
[...document.querySelectorAll('main *')].filter(e => {
  const box = e.getBoundingClientRect();
  return box.width > 0 && box.right > innerWidth + 1 && !e.closest('.scroll, nav');
}).map(e => e.tagName + '.' + e.className)
"""


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("browser")
    long = [
        "a very long class name without an end " * 3,
        "Unbroken" * 14,
        "<script>alert(1)</script>",
    ]
    names = [*long, *(f"class {k}" for k in range(9))]
    one = write_adapt_run(folder / "one", N=300, K=12, open_set=True, classes=names)
    two = write_adapt_run(
        folder / "a-second-run-with-a-rather-long-name-that-does-not-fit",
        N=300,
        K=12,
        classes=names,
    )
    bare = write_adapt_run(folder / "bare", N=60, labels=False, images=False)
    (bare / "metrics.json").unlink()
    return {
        "one": write_report([one], folder / "one.html"),
        "several": write_report([one, two, bare], folder / "several.html"),
        "bare": write_report([bare], folder / "bare.html"),
    }


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    program = find_chromium()
    if program is None:
        pytest.skip(
            "no Chromium on this machine: install chromium to test the report in a browser"
        )
    with Browser(program, tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [390, 1440])
@pytest.mark.parametrize("name", ["one", "several", "bare"])
def test_the_layout_holds(
    browser: Browser, pages: dict[str, Path], name: str, width: int, dark: bool
) -> None:
    browser.open(pages[name], width, dark=dark)
    assert browser.errors == []
    assert [r for r in browser.requests if not r.startswith("data:")] == [
        pages[name].resolve().as_uri()
    ]
    assert browser.run("innerWidth") == width
    assert browser.run("document.documentElement.scrollWidth <= innerWidth")
    assert browser.run(CUT_OFF) == []
    hidden = "[...document.querySelectorAll('svg, .gallery img')].filter(e => e.getBoundingClientRect().height < 40)"
    assert browser.run(f"{hidden}.map(e => e.outerHTML.slice(0, 200))") == []
    assert browser.run("document.querySelectorAll('svg').length") >= 10
    light = browser.run(
        "getComputedStyle(document.body).backgroundColor.match(/[0-9]+/g).map(Number)[0]"
    )
    assert (light < 60) == dark


def test_a_heading_sorts_its_table_by_mouse_and_by_keyboard(
    browser: Browser, pages: dict[str, Path]
) -> None:
    browser.open(pages["one"], 1440)
    heading = "document.querySelectorAll('#r1-classes thead th')[{0}]"
    browser.run(f"{heading.format(1)}.querySelector('button').click()")
    images = [float(v) for v in browser.run(COLUMN.format(1))]
    assert images == sorted(images, reverse=True)
    assert len(set(images)) > 1
    assert browser.run(f"{heading.format(1)}.ariaSort") == "descending"
    browser.run(f"{heading.format(3)}.querySelector('button').focus()")
    browser.press("Enter")
    browser.press("Enter")
    accuracy = browser.run(COLUMN.format(3))
    known = [float(v) for v in accuracy if v != ""]
    assert known == sorted(known)
    assert accuracy[len(known) :] == [""] * (len(accuracy) - len(known))
    assert browser.run(f"[{heading.format(1)}.ariaSort, {heading.format(3)}.ariaSort]") == [
        "none",
        "ascending",
    ]
    assert browser.errors == []


def test_a_class_can_be_brought_out_on_both_maps(
    browser: Browser, pages: dict[str, Path]
) -> None:
    browser.open(pages["one"], 390)
    browser.run("document.querySelector('.picker button[data-class=\"4\"]').click()")
    shown = "[...document.querySelectorAll('#r1-part-map .spots:not(.faint)')].map(e => e.dataset.class)"
    assert set(browser.run(shown)) == {"4"}
    browser.run("document.querySelector('.picker button[data-class=\"4\"]').click()")
    assert len(set(browser.run(shown))) > 1


def test_the_theme_button_goes_against_the_machine(
    browser: Browser, pages: dict[str, Path]
) -> None:
    browser.open(pages["one"], 1440, dark=True)
    background = "getComputedStyle(document.body).backgroundColor"
    dark = browser.run(background)
    browser.run("document.getElementById('theme').click()")
    assert browser.run("document.getElementById('theme').textContent") == "Theme: light"
    light = browser.run(background)
    assert light != dark
    browser.open(pages["one"], 1440, dark=True)
    assert browser.run(background) == light, "the choice is remembered"
    browser.run("document.getElementById('theme').click()")
    browser.run("document.getElementById('theme').click()")
    assert browser.run(background) == dark


def test_print_is_black_on_white(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["one"], 1440, dark=True)
    browser.call(
        "Emulation.setEmulatedMedia",
        media="print",
        features=[{"name": "prefers-color-scheme", "value": "dark"}],
    )
    colours = browser.run(
        "(s => [s.backgroundColor, s.color])(getComputedStyle(document.body))"
    )
    browser.call("Emulation.setEmulatedMedia", media="")
    assert colours == ["rgb(255, 255, 255)", "rgb(0, 0, 0)"]


def test_text_stands_out_from_its_ground(browser: Browser, pages: dict[str, Path]) -> None:
    """WCAG AA: 4.5 to 1, on the colours of the theme."""
    pairs = [
        (text, ground)
        for text in ("ink", "soft", "accent")
        for ground in ("page", "card", "wash")
    ]
    pairs += [
        (text, ground) for text in ("good", "warn") for ground in (f"{text}-wash", "card")
    ] + [("wrong", "card")]
    for dark in (False, True):
        browser.open(pages["one"], 1440, dark=dark)
        for text, ground in pairs:
            hexes = [browser.run(f"getComputedStyle(document.documentElement).getPropertyValue('--{n}').trim()")
                     for n in (text, ground)]  # fmt: skip
            assert contrast(*hexes) >= 4.5, (text, ground, dark)


def contrast(one: str, other: str) -> float:
    levels = []
    for colour in (one, other):
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        levels.append(0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2])
    return (max(levels) + 0.05) / (min(levels) + 0.05)


def test_class_names_run_no_script(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["one"], 1440)
    assert browser.run("document.querySelectorAll('script').length") == 1
    assert browser.run(
        "document.getElementById('r1-classes').textContent.includes('<script>alert(1)</script>')"
    )
