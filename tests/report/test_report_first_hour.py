"""What a new reader of a report stumbled over: names cut in two, colours that flatter, words nobody explains."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from page_parser import parse
from report_runs import write_adapt_run
from safetensors.torch import load_file, save_file

from headless import Browser, find_chromium
from usfan.errors import DataError
from usfan.files import write_json
from usfan.maths.validators import DIRECTION
from usfan.report.glossary import VALIDATOR_MEANINGS
from usfan.report.page import write_report

OFFICE = ["back_pack", "desktop_computer", "desk_lamp", "mug", "paper_notebook", "trash_can"]


def with_tensors(run: Path, **changes: torch.Tensor) -> Path:
    tensors = load_file(run / "samples.safetensors") | changes
    save_file(tensors, run / "samples.safetensors")
    return run


def with_metrics(run: Path, **changes: object) -> Path:
    write_json(run / "metrics.json", json.loads((run / "metrics.json").read_text()) | changes)
    return run


def page_of(run: Path):
    return parse(write_report([run], run.parent / "page.html"))


def test_only_certain_images_are_certain_and_wrong(tmp_path):
    run = write_adapt_run(tmp_path / "run", N=120)
    page = page_of(run)
    shown = page.one("r1-gallery-mistakes").all("figure")
    posterior, labels = (
        load_file(run / "samples.safetensors")[name] for name in ("posterior_after", "labels")
    )
    probs = load_file(run / "samples.safetensors")["probs_after"]
    sure = posterior.max(1).values > (1 + 1 / 6) / 2
    count = int((sure & (probs.argmax(1) != labels)).sum())
    assert 0 < count < 12
    assert len(shown) == count
    doubtful = torch.full_like(posterior, 1 / 6)
    page = page_of(with_tensors(run, posterior_after=doubtful))
    assert not [e for e in page.all() if e.attributes.get("id") == "r1-gallery-mistakes"]


def test_changed_predictions_are_shown_before_and_after(tmp_path):
    run = write_adapt_run(tmp_path / "run", N=120)
    tensors = load_file(run / "samples.safetensors")
    before, after = (tensors[f"probs_{when}"].argmax(1) for when in ("before", "after"))
    gallery = page_of(run).one("r1-gallery-changed")
    assert f"{int((before != after).sum())} of 120 predictions changed." in gallery.text
    assert all(" → " in figure.all("strong")[0].text for figure in gallery.all("figure"))
    page = page_of(with_tensors(run, probs_before=tensors["probs_after"]))
    assert not [e for e in page.all() if e.attributes.get("id") == "r1-gallery-changed"]


def test_nothing_changed_is_not_green(tmp_path):
    run = write_adapt_run(tmp_path / "run", N=60)
    (badge,) = page_of(run).all("span", "status")
    assert (badge.text, "good" in badge.attributes["class"]) == ("better", True)
    validators = json.loads((run / "metrics.json").read_text())["validators"]
    run = with_metrics(run, validators=validators | {"drift": 0.0})
    (badge,) = page_of(run).all("span", "status")
    assert (badge.text, "good" in badge.attributes["class"]) == (
        "no prediction changed",
        False,
    )


def test_the_figures_before_and_after(tmp_path):
    run = write_adapt_run(tmp_path / "run", N=60)
    metrics = json.loads((run / "metrics.json").read_text())
    with_metrics(
        run, before=metrics["before"] | {"ece": 60.0}, after=metrics["after"] | {"ece": 37.0}
    )
    tiles = {
        tile.all("dt")[0].text: tile.all("dd")[0].text.replace("\u00a0", " ")
        for tile in page_of(run).all("dl", "tiles")[0].children
    }
    assert tiles["ECE, point estimate"] == "37.0 % 60.0 % before"


def test_the_number_of_given_labels(tmp_path):
    run = write_adapt_run(tmp_path / "run", N=60)
    with_metrics(run, labels={"count": 12})
    facts = {
        fact.all("dt")[0].text: fact.all("dd")[0].text
        for fact in page_of(run).all("dl", "facts")[0].children
    }
    assert facts["labels given"] == "12"
    for strange in ([1], "12", {"count": None}):
        with_metrics(run, labels=strange)
        assert "labels given" not in page_of(run).text


def test_every_term_is_explained(tmp_path):
    page = page_of(write_adapt_run(tmp_path / "run", N=60))
    terms = {row[0]: row[1] for row in page.one("r1-glossary").rows()}
    assert {"ECE", "guard", "validator", "posterior", "source model"} <= terms.keys()
    assert VALIDATOR_MEANINGS.keys() == DIRECTION.keys() | {
        "structure",
        "fit",
        "gain",
        "names",
    }  # the last four: the guard
    for name in ("drift", "certain", "information_maximization"):
        figure = page.one(f"r1-curve-{name}")
        assert len(figure.all("figcaption")[0].text) > 60, name


def demo(root: Path) -> Path:
    """As `usfan demo` leaves its folder: two runs, two source models, figures of all methods."""
    for name in ("mnist-uci", "uci-mnist"):
        write_adapt_run(root / name, N=60)
    for name in ("mnist", "uci"):
        (root / name).mkdir()
        write_json(root / name / "config.json", {"kind": "source"})
    row = {"accuracy": 91.5, "ece": 3.1, "seconds": 2.0}
    write_json(
        root / "metrics.json",
        {p: {"source-only": row, "u-sfan": row} for p in ("mnist-uci", "uci-mnist")},
    )
    return root


def test_a_folder_of_runs_is_the_page_of_its_runs(tmp_path):
    page = parse(write_report([demo(tmp_path / "demo")], tmp_path / "page.html"))
    assert page.all("h1")[0].text == "demo"
    assert [a.all("h2")[0].text for a in page.all("article")] == ["mnist-uci", "uci-mnist"]
    assert page.one("compare-runs")
    assert [row[0] for row in page.one("all-figures-0").rows()] == ["source-only", "u-sfan"]


def test_a_folder_of_nothing_is_refused(tmp_path):
    (tmp_path / "sub").mkdir()
    with pytest.raises(DataError, match="is not a run folder"):
        write_report([tmp_path], tmp_path / "page.html")


def test_a_model_alone_says_how_to_get_charts(tmp_path):
    run = tmp_path / "model"
    run.mkdir()
    write_json(run / "config.json", {"kind": "adapted", "classes": ["a", "b"]})
    text = page_of(run).text
    assert "holds a model alone" in text
    assert "target.report" in text


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    program = find_chromium()
    if program is None:
        pytest.skip(
            "no Chromium on this machine: install chromium to test the report in a browser"
        )
    with Browser(program, tmp_path_factory.mktemp("profile")) as opened:
        yield opened


SPLIT = """
[...document.querySelectorAll('th, td, .picker button, .thumb strong')].flatMap(element => {
  const found = [];
  const walker = document.createTreeWalker(element, NodeFilter.SHOW_TEXT);
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    for (const word of node.data.matchAll(/[\\w_]+/g)) {
      const range = document.createRange();
      range.setStart(node, word.index); range.setEnd(node, word.index + word[0].length);
      const lines = new Set([...range.getClientRects()].filter(r => r.width > 0).map(r => Math.round(r.top)));
      const upright = getComputedStyle(element.querySelector('span') ?? element).writingMode !== 'horizontal-tb';
      if (lines.size > 1 && !upright) found.push(element.tagName + ': ' + word[0]);
    }
  }
  return found;
})
"""


@pytest.mark.parametrize("width", [390, 1440])
def test_no_word_is_split_in_a_browser(browser, tmp_path, width):
    run = write_adapt_run(tmp_path / "run", N=120, K=6, classes=OFFICE)
    browser.open(write_report([run], tmp_path / "page.html"), width)
    assert browser.run("document.body.innerText.includes('back_pack')")
    assert browser.run(SPLIT) == []
    assert browser.run("document.documentElement.scrollWidth <= innerWidth")


def test_a_folder_of_runs_in_a_browser(browser, tmp_path):
    browser.open(write_report([demo(tmp_path / "demo")], tmp_path / "page.html"), 1440)
    assert browser.errors == []
    assert browser.run("document.querySelectorAll('article').length") == 2
    assert browser.run("[...document.images].every(i => i.complete && i.naturalWidth > 0)")
    assert browser.run("document.documentElement.scrollWidth <= innerWidth")
