"""The page of `usfan label` in a real browser, served as a user's: labelling by keyboard on a telephone's width."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from label_runs import BROKEN, write_label_run

from headless import Browser, find_chromium
from usfan.data.few_labels import NONE_OF_THESE, SKIP
from usfan.files import write_yaml
from usfan.labelling.again import SecondRun
from usfan.labelling.answers import read_answers
from usfan.labelling.server import PageServer
from usfan.labelling.session import Session

ROW = "Number(document.getElementById('picture').dataset.row)"
SAVED = "Number(document.getElementById('answers').textContent)"
IDLE = "!busy"
END_TEXT = "document.getElementById('end-text').textContent"
CUT_OFF = """
[...document.querySelectorAll('main *')].filter(e => {
  const box = e.getBoundingClientRect();
  return box.width > 0 && (box.right > innerWidth + 1 || box.left < -1);
}).map(e => e.tagName + '.' + e.className)
"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    program = find_chromium()
    if program is None:
        pytest.skip(
            "no Chromium on this machine: install chromium to test the page in a browser"
        )
    with Browser(program, tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@contextmanager
def served(browser: Browser, run: Path, ask: int | None = None) -> Iterator[str]:
    """The address of the page of a run. The browser leaves it at the end."""
    session = Session(run, ask)
    server = PageServer(session, SecondRun(run))
    thread = threading.Thread(target=server.run)
    thread.start()
    yield server.address
    browser.call("Page.navigate", url="about:blank")
    server.server.trigger.pull_trigger(server.close)  # its own thread closes it
    thread.join(30)
    assert not thread.is_alive()
    session.close()


def press(browser: Browser, key: str, saved: int) -> None:
    browser.press(key)
    browser.wait_for(f"{SAVED} === {saved} && {IDLE}")


def test_twenty_images_by_keyboard_with_a_reload(browser: Browser, tmp_path: Path) -> None:
    run, _ = write_label_run(tmp_path / "run", doubt=0.0)
    with served(browser, run, ask=20) as address:
        browser.open(address, 400)
        assert browser.run("document.documentElement.scrollWidth <= innerWidth")
        assert browser.run(CUT_OFF) == []
        buttons = "[...document.querySelectorAll('#candidates button, .actions button')]"
        assert (
            browser.run(f"Math.max(...{buttons}.map(e => e.getBoundingClientRect().bottom))")
            <= 844
        )
        expected = {}
        for number in range(20):
            if number == 10:
                browser.open(address, 400)
                assert browser.run(SAVED) == 10
            row = int(browser.run(ROW))
            key, label = {3: ("s", SKIP), 5: ("n", NONE_OF_THESE)}.get(
                number, (str(row % 7 + 1), f"class {row % 7:04}")
            )
            press(browser, key, number + 1)
            expected[row] = label
            if number < 19:  # beside the buttons, the answer that was saved
                said = browser.run("document.getElementById('last').textContent")
                assert said == ("skipped" if label == SKIP else label) + ": saved"
        assert len(expected) == 20
        answers = {int(Path(a.image).stem): a.label for a in read_answers(run / "labels.csv")}
        assert answers == expected
        assert browser.run("!document.getElementById('end').hidden")
        assert "the next run keeps the better model" in browser.run(END_TEXT) or (
            "Or adapt again" in browser.run(END_TEXT)
        )
        press(browser, "u", 19)
        assert int(browser.run(ROW)) == row
        assert browser.errors == []
        assert all(url.startswith((address, "data:")) for url in browser.requests)


def test_search_and_a_file_that_cannot_be_shown(browser: Browser, tmp_path: Path) -> None:
    run, _ = write_label_run(tmp_path / "run", N=40, K=31, doubt=0.0)
    with served(browser, run) as address:
        browser.open(address, 1400)
        assert browser.run("document.querySelectorAll('#candidates button').length") == 9
        for key in "/0030":
            browser.press(key)
        assert browser.run("document.querySelectorAll('#matches li').length") == 1
        press(browser, "Enter", 1)
        for key in ("/", "c", "ArrowDown"):
            browser.press(key)
        press(browser, "Enter", 2)
        assert [a.label for a in read_answers(run / "labels.csv")] == [
            "class 0030",
            "class 0001",
        ]
        assert browser.errors == []
        browser.run(
            f"showPicture({BROKEN}); document.getElementById('picture').dataset.row = {BROKEN}"
        )
        browser.wait_for("!document.getElementById('missing').hidden")
        assert "cannot be shown (not an image of a known format)" in browser.run(
            "document.getElementById('missing').textContent"
        )


@pytest.mark.parametrize("classes", [31, 1000])
def test_many_classes_on_a_telephone(browser: Browser, tmp_path: Path, classes: int) -> None:
    """Nothing is cut off, and every class is a few keys away."""
    run, _ = write_label_run(tmp_path / "run", N=64, K=classes, doubt=0.0)
    with served(browser, run) as address:
        browser.open(address, 400)
        assert browser.run(CUT_OFF) == []
        last = f"class {classes - 1:04}"
        for key in f"/{classes - 1:04}":
            browser.press(key)
        assert browser.run(CUT_OFF) == []
        press(browser, "Enter", 1)
        press(browser, "9", 2)
        first, second = read_answers(run / "labels.csv")
        assert first.label == last
        assert second.label.startswith("class ")


def test_two_tabs_label_different_images(browser: Browser, tmp_path: Path) -> None:
    """The first answer about an image counts, and the other tab says so."""
    run, _ = write_label_run(tmp_path / "run", doubt=0.0)
    with served(browser, run) as address:
        first_tab = browser.session
        browser.open(address, 400)
        first = int(browser.run(ROW))
        second_tab = browser.new_tab()
        browser.open(address, 1280)
        second = int(browser.run(ROW))
        assert first != second
        press(browser, "1", 1)
        third = int(browser.run(ROW))
        assert third not in (first, second)
        browser.session = first_tab
        press(browser, "2", 2)
        assert int(browser.run(ROW)) not in (first, second, third)
        answers = {int(Path(a.image).stem): a.label for a in read_answers(run / "labels.csv")}
        assert answers == {second: "class 0000", first: "class 0001"}
        browser.session = second_tab
        browser.run(f"state.questions[0].row = {first}")  # as if it had come too late
        press(browser, "3", 2)
        said = browser.run("document.getElementById('last').textContent")
        assert said == "another window has answered this one: class 0001"
        browser.call("Page.navigate", url="about:blank")
        browser.session = first_tab


def test_adapting_again_by_keyboard(browser: Browser, tmp_path: Path) -> None:
    """The key works at the end only, and the page says how it went."""
    run, _ = write_label_run(tmp_path / "run", doubt=0.0)
    write_yaml(run / "config.yaml", {"source": str(run), "data": str(tmp_path)})
    with served(browser, run, ask=1) as address:
        browser.open(address, 400)
        browser.press("a")
        press(browser, "1", 1)
        assert browser.run("state.adapt.status") == "idle"
        assert browser.run("!document.getElementById('adapt-key').hidden")
        browser.press("a")
        browser.wait_for("state.adapt.status === 'failed'")  # the run is no model
        said = browser.run("document.getElementById('adapt-text').textContent")
        assert said.startswith("It failed: usfan adapt: ")
        assert browser.run(CUT_OFF) == []
