"""The report of a whole run: what it says, that it says it in words too, and that it stands alone."""

from __future__ import annotations

import itertools
import json
import re
from collections import Counter
from pathlib import Path

import pytest
from page_parser import Element, parse
from PIL import Image
from report_runs import class_names, write_adapt_run
from safetensors.torch import load_file

from usfan.cli.main import main
from usfan.errors import ConfigError, DataError
from usfan.report import page as page_module
from usfan.report.page import write_report

K = 6
FIGURES = (
    "curve-loss",
    "curve-lr",
    "entropy-before",
    "entropy-after",
    "map-before",
    "map-after",
)
LABELLED = ("reliability-before", "reliability-after", "evaluations", "confusions")


def words(value: float) -> str:
    return f"{value:.1f} %"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_adapt_run(tmp_path_factory.mktemp("runs") / "webcam", N=240, K=K)


@pytest.fixture(scope="module")
def document(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Element:
    return parse(write_report([run], tmp_path_factory.mktemp("page") / "report.html"))


def test_every_part_is_there(document: Element) -> None:
    ids = [e.attributes["id"] for e in document.all() if "id" in e.attributes]
    assert not [i for i, n in Counter(ids).items() if n > 1]
    wanted = {f"r1-{name}" for name in (*FIGURES, *LABELLED, "classes", "settings")}
    wanted |= {f"r1-gallery-{name}" for name in ("certain", "uncertain", "mistakes")}
    assert wanted <= set(ids)
    curves = {i.removeprefix("r1-curve-") for i in ids if i.startswith("r1-curve-")}
    assert {"entropy", "information_maximization", "drift", "certain"} <= curves
    assert "coverage" not in curves  # every class is predicted in every epoch: no curve
    assert not document.all(css="problems")


def test_the_headline_and_the_figures_are_those_of_metrics_json(
    run: Path, document: Element
) -> None:
    metrics = json.loads((run / "metrics.json").read_text())
    before = metrics["before"]
    after = metrics["after"]
    headline = document.all("p", "headline")[0].text
    assert headline == f"Accuracy {words(before['accuracy'])} → {words(after['accuracy'])}"
    for when, figures in (("before", before), ("after", after)):
        legend = [t.text for t in document.one(f"r1-reliability-{when}").all("text")]
        assert f"point estimate, ECE {words(figures['ece'])}" in legend
        assert f"posterior, ECE {words(figures['posterior_ece'])}" in legend
    table = {row[0]: row[1:] for row in document.one("r1-evaluations").rows()}
    assert table["nll"] == [f"{figures['nll']:.3g}" for figures in (before, after)]
    assert "posterior brier" in table
    rows = {row[0]: row for row in document.one("r1-classes").rows()}
    for name in class_names(K):
        assert rows[name][2] == f"{before['per_class_accuracy'][name]:.1f}"
        assert rows[name][3] == f"{after['per_class_accuracy'][name]:.1f}"


def test_the_largest_confusions(run: Path, document: Element) -> None:
    samples = load_file(run / "samples.safetensors")
    labels = samples["labels"].tolist()
    pairs = Counter(zip(labels, samples["probs_after"].argmax(1).tolist(), strict=True))
    wrong = sorted(
        (n for (true, predicted), n in pairs.items() if true != predicted), reverse=True
    )
    names = class_names(K)
    rows = document.one("r1-confusions").rows()
    assert [int(row[2]) for row in rows] == wrong[:20]
    for true, predicted, count, _ in rows:
        assert pairs[names.index(true), names.index(predicted)] == int(count)


def test_every_map_point_is_drawn_and_galleries_hold_twelve(document: Element) -> None:
    for when in ("before", "after"):
        spots = document.one(f"r1-map-{when}").all("g", "spots")
        assert sum(len(group.all("use")) for group in spots) == 240
        assert {group.attributes["data-class"] for group in spots} <= set(map(str, range(K)))
    images = document.one("r1-gallery-certain").all("img")
    assert len(images) == 12
    assert all(i.attributes["src"].startswith("data:image/jpeg;base64,") for i in images)


def test_every_figure_has_words(document: Element) -> None:
    drawings = document.all("svg")
    assert len(drawings) >= 14
    for svg in drawings:
        assert svg.attributes["role"] == "img"
        assert len(svg.attributes["aria-label"]) > 20
    assert all(f.all("figcaption")[0].text for f in document.all("figure", "card"))
    assert all(i.attributes["alt"] for i in document.all("img"))


def test_headings_skip_no_level(document: Element) -> None:
    def walk(element: Element) -> list[int]:
        return [
            n
            for c in element.children
            for n in ([int(c.tag[1])] if re.fullmatch("h[1-6]", c.tag) else walk(c))
        ]

    levels = walk(document)
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(b <= a + 1 for a, b in itertools.pairwise(levels))


def test_the_page_stands_alone_and_is_the_same_every_time(run: Path, tmp_path: Path) -> None:
    first, second = (write_report([run], tmp_path / f"{i}.html").read_bytes() for i in (1, 2))
    assert first == second
    assert len(first) < 1_000_000
    loads = [
        v
        for e in parse(tmp_path / "1.html").all()
        for a, v in e.attributes.items()
        if a in ("src", "href")
    ]
    assert all(v.startswith(("data:", "#")) for v in loads)
    assert not re.search(rb"@import|url\((?!#)|fetch\(|https?://", first)


def test_class_names_are_text_and_never_markup(tmp_path: Path) -> None:
    evil = "<script>alert(1)</script>"
    names = [
        evil,
        '"><img src=x onerror=alert(2)>',
        "a & b",
        "{{ 7 * 7 }}",
        "\udc80 surrogate",
        "</style>",
    ]
    run = write_adapt_run(tmp_path / "<b>run", classes=names, N=60)
    document = parse(write_report([run], tmp_path / "report.html"))
    assert len(document.all("script")) == 1
    assert evil in {row[0] for row in document.one("r1-classes").rows()}
    assert "{{ 7 * 7 }}" in {row[0] for row in document.one("r1-classes").rows()}
    assert not [i for i in document.all("img") if "onerror" in i.attributes]
    assert document.all("h1")[0].text == "<b>run"


def test_without_labels_only_what_needs_them_is_left_out(tmp_path: Path) -> None:
    run = write_adapt_run(tmp_path / "unlabelled", labels=False)
    document = parse(write_report([run], tmp_path / "report.html"))
    ids = {e.attributes.get("id") for e in document.all()}
    assert {
        f"r1-{name}" for name in (*FIGURES, "classes", "gallery-certain", "gallery-uncertain")
    } <= ids
    assert not ids & {f"r1-{name}" for name in LABELLED}
    assert "no labels" in document.one("r1-part-calibration").text
    assert document.all("p", "headline")[0].text == "The adapted model is better"
    next_step = document.all("strong", "next")[0].text
    assert next_step.startswith("To be sure, label 14 images: usfan label ")
    assert "unlabelled" in next_step
    figures = " ".join(document.all("dl", "tiles")[0].text.split())
    assert "estimated accuracy before 45 % 32 to 58 %" in figures.replace("\u00a0", " ")
    assert "estimated accuracy after not known" in figures
    assert document.one("r1-classes").head() == [
        "class",
        "predicted before",
        "predicted after",
        "mean weight",
    ]


def test_questions_and_answers_are_shown_with_what_they_decide(tmp_path: Path) -> None:
    run = write_adapt_run(tmp_path / "run", N=20, labels=False)
    images = sorted(str(file) for file in (tmp_path / "images").iterdir())
    rows = [f"{image},,,,,judge" for image in images[:6]]
    columns = "path,label,predicted,certainty,mutual_information,question"
    (run / "label_first.csv").write_text("\n".join([columns, *rows]))
    answers = [f"{images[0]},bike,judge", f"{images[1]},skip,name", "/elsewhere.png,bike,judge"]
    (run / "labels.csv").write_text("\n".join(["path,label,question", *answers]))
    document = parse(write_report([run], tmp_path / "report.html"))
    assert len(document.one("r1-gallery-questions").all("img")) == 4
    gallery = document.one("r1-gallery-answers")
    assert "Answers: 2" in gallery.text
    assert gallery.all("strong")[0].text == "skip"
    assert "bike" in gallery.text
    (run / "labels.csv").write_text(f"path,label\n{images[0]},bike\n{images[0]},pen\n")
    document = parse(write_report([run], tmp_path / "report.html"))
    assert "bike before: keep one" in document.one("content").text


def test_answers_that_came_after_a_run_decide_its_verdict(tmp_path: Path) -> None:
    run = write_adapt_run(tmp_path / "run", N=24, labels=False)
    page = parse(write_report([run], tmp_path / "report.html")).one("content").text
    assert "The adapted model is worse" not in page
    images = json.loads((run / "samples.json").read_text())
    before = load_file(run / "samples.safetensors")["probs_before"].argmax(dim=1).tolist()
    rows = zip(images["paths"], before, strict=True)
    answers = [f"{path},{images['classes'][label]},judge" for path, label in rows]
    (run / "labels.csv").write_text("\n".join(["path,label,question", *answers]))
    page = parse(write_report([run], tmp_path / "report.html")).one("content").text
    assert "The adapted model is worse, by " in page
    # labels that the model learned from are no answers to this question
    metrics = json.loads((run / "metrics.json").read_text())
    metrics["labelled"] = {"number": 300, "from": "name", "judge_answers": 0}
    (run / "metrics.json").write_text(json.dumps(metrics))
    page = parse(write_report([run], tmp_path / "report.html")).one("content").text
    assert "The adapted model is worse, by " in page


def test_an_open_set_run_shows_the_unknown(tmp_path: Path) -> None:
    run = write_adapt_run(tmp_path / "open", N=300, open_set=True)
    document = parse(write_report([run], tmp_path / "report.html"))
    flagged = int(load_file(run / "samples.safetensors")["unknown"].sum())
    assert len(document.one("r1-gallery-unknown").all("img")) == 12
    rows = {row[0]: row for row in document.one("r1-classes").rows()}
    assert int(rows["unknown"][6]) == flagged
    assert "unknown" in {row[0] for row in document.one("r1-confusions").rows()}


def test_many_classes_and_no_images(tmp_path: Path) -> None:
    run = write_adapt_run(tmp_path / "wide", N=600, K=40, images=False)
    document = parse(write_report([run], tmp_path / "report.html"))
    assert len(document.one("r1-confusions").rows()) == 20
    assert len(document.all(css="picker")[0].all("button")) == 40
    assert "has no file names" in document.one("r1-part-images").text


def compared(document: Element) -> list[dict[str, str]]:
    """The table of several runs: a row for each, by its headings."""
    table = document.one("compare-runs")
    return [dict(zip(table.head(), row, strict=True)) for row in table.rows()]


def test_several_runs_are_compared(tmp_path: Path) -> None:
    one = write_adapt_run(tmp_path / "first" / "webcam", seed=0)
    two = write_adapt_run(tmp_path / "second" / "webcam", seed=5, method="shot-im", lr=0.02)
    three = write_adapt_run(tmp_path / "third" / "dslr", seed=0, labels=False)
    document = parse(write_report([one, two, three], tmp_path / "report.html"))
    assert [row["run"] for row in compared(document)] == [
        "first/webcam",
        "second/webcam",
        "third/dslr",
    ]
    settings = {
        "lr": ["0.01", "0.02", "0.01"],
        "method": ["u-sfan", "shot-im", "u-sfan"],
        "seed": ["0", "5", "0"],
        "weights": ["posterior", "none", "posterior"],
        "separation": ["on", "–", "on"],  # shot-im has no such setting
    }
    for name, values in settings.items():
        assert [row[name] for row in compared(document)][1] == values[1], name
        assert len({row[name] for row in compared(document)}) == 2
    assert "epochs" not in compared(document)[0]
    accuracy = json.loads((two / "metrics.json").read_text())["after"]["accuracy"]
    assert compared(document)[1]["accuracy (%)"] == f"{accuracy:.1f}"
    assert compared(document)[2]["accuracy (%)"] == "–"
    assert len(document.all("article")) == 3


def test_a_setting_that_the_program_decided_stands_there_as_any_other(tmp_path: Path) -> None:
    """`config.yaml` holds every value: six epochs anneal the weights, two do not."""
    run, other = (
        write_adapt_run(tmp_path / name, **given)
        for name, given in (("one", {}), ("two", {"epochs": 2}))
    )
    document = parse(write_report([run, other], tmp_path / "report.html"))
    assert {row[0]: row[1] for row in document.one("r1-settings").rows()}["anneal"] == "on"
    names = ("anneal", "epochs")
    assert [[row[name] for name in names] for row in compared(document)] == [
        ["on", "6"],
        ["off", "2"],
    ]
    document = parse(write_report([run, run], tmp_path / "report.html"))
    assert not set(names) & set(compared(document)[0])


def test_with_many_runs_each_gets_less_so_that_the_page_stays_small(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_module, "MOST_POINTS", 60)
    monkeypatch.setattr(page_module, "MOST_THUMBNAILS", 8)
    document = parse(write_report([run] * 4, tmp_path / "less.html"))
    for i in range(1, 5):
        assert len(document.one(f"r{i}-gallery-certain").all("img")) == 2
        assert "240 images, 15 of them drawn" in document.one(f"r{i}-map-after").text
    ids = [e.attributes["id"] for e in document.all() if "id" in e.attributes]
    assert len(ids) == len(set(ids))


def test_the_command(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "page.html"
    assert main(["report", str(run), "--out", str(out)]) == 0
    assert out.is_file()
    assert main(["report", str(tmp_path / "nowhere"), "--out", str(out)]) == 2
    (tmp_path / "empty").mkdir()
    assert main(["report", str(tmp_path / "empty")]) == 2
    said = capsys.readouterr().err
    assert "nowhere is not a folder" in said
    assert "empty is not a run folder" in said
    assert not (tmp_path / "empty" / "report.html").exists()


def test_a_folder_is_no_place_for_a_page(run: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is a folder"):
        write_report([run], tmp_path)
    with pytest.raises(DataError, match="no run folder"):
        write_report([], tmp_path / "report.html")


def test_a_large_photo_becomes_a_thumbnail(tmp_path: Path) -> None:
    run = write_adapt_run(tmp_path / "run", N=60)
    for path in (tmp_path / "images").glob("*.png"):
        Image.effect_noise((600, 400), 90).save(path)
    assert write_report([run], tmp_path / "report.html").stat().st_size < 600_000
