"""Run folders as they are found: files missing, cut short, or not what they should be. The page says so."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from page_parser import Element, parse
from report_runs import write_adapt_run
from safetensors.torch import load_file

from usfan.files import write_json, write_tensors
from usfan.report.page import write_report
from usfan.report.run import read_run


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_adapt_run(tmp_path_factory.mktemp("runs") / "run", N=60, images=False)


@pytest.fixture
def run(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "run"))


def report(run: Path) -> Element:
    return parse(write_report([run], run / "report.html"))


def said(document: Element) -> str:
    return " ".join(e.text for e in document.all(css="problems"))


@pytest.mark.parametrize(
    "name", ["config.yaml", "metrics.json", "log.jsonl", "samples.safetensors", "samples.json"]
)
@pytest.mark.parametrize("damage", ["missing", "cut", "noise", "empty", "other"])
def test_a_damaged_file_is_named_in_one_line(run: Path, name: str, damage: str) -> None:
    path = run / name
    content = path.read_bytes()
    if damage == "missing":
        path.unlink()
    else:
        changed = {
            "cut": content[: len(content) // 2 + 3],
            "noise": b"\xff\x00{[\n" * 9,
            "empty": b"",
            "other": b"[1, 2]",
        }
        path.write_bytes(changed[damage])
    document = report(run)
    assert document.all("p", "headline")[0].text
    quiet = (name, damage) in {
        ("log.jsonl", "empty"),
        ("config.yaml", "empty"),
        ("config.yaml", "cut"),
    }
    assert quiet or name in said(document)
    assert len(document.all(css="problems")) <= 1


def test_only_a_log_makes_a_report(tmp_path: Path, whole: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    shutil.copy(whole / "log.jsonl", run)
    document = report(run)
    assert "r1-curve-loss" in {e.attributes.get("id") for e in document.all()}


def change(name: str, make: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Path], None]:
    def apply(run: Path) -> None:
        tensors = load_file(run / "samples.safetensors")
        tensors[name] = make(tensors[name])
        write_tensors(run / "samples.safetensors", tensors)

    return apply


def some_nan(table: torch.Tensor) -> torch.Tensor:
    table = table.clone()
    table[:7] = math.nan
    return table


@pytest.mark.parametrize(
    ("apply", "words"),
    [
        (change("labels", lambda t: t + 50), "labels lie outside 0…6"),
        (change("labels", lambda t: t.float()), "labels has shape (60,) and type float32"),
        (change("weight", lambda t: t[:9]), "weight has shape (9,)"),
        (change("features_after", lambda t: t[:, :1]), "features_after has shape (60, 1)"),
        (change("posterior_after", lambda t: t[:, :4]), "posterior_after has shape (60, 4)"),
        (change("probs_before", some_nan), "probs_before holds values that are not finite"),
        (change("probs_after", lambda t: t[:0]), "it holds no predictions"),
    ],
)
def test_a_damaged_table_is_named_and_the_rest_of_the_page_stands(
    run: Path, apply: Callable[[Path], None], words: str
) -> None:
    apply(run)
    document = report(run)
    assert said(document).count("samples.safetensors cannot be read:") == 1
    assert words in said(document)
    ids = {e.attributes.get("id") for e in document.all()}
    assert {"r1-curve-loss", "r1-settings"} <= ids
    assert "r1-classes" not in ids


def test_missing_and_broken_images_are_said(tmp_path: Path) -> None:
    run = write_adapt_run(tmp_path / "run", N=24)
    files = sorted((tmp_path / "images").glob("*.png"))
    for path in files[:12]:
        path.unlink()
    files[12].write_bytes(b"no image")
    document = report(run)
    text = document.one("r1-part-images").text
    assert "file is missing" in text
    assert document.one("r1-part-images").all("img")


@pytest.mark.parametrize(
    "paths", [[1] * 60, [None] * 60, ["a\0b"] * 60, ["/"] * 60, ["x"] * 59, "text"]
)
def test_odd_paths_do_no_harm(run: Path, paths: object) -> None:
    described = json.loads((run / "samples.json").read_text())
    write_json(run / "samples.json", {**described, "paths": paths})
    assert not report(run).one("r1-part-images").all("img")


def test_a_run_that_diverged_is_drawn_with_gaps(run: Path) -> None:
    lines = (run / "log.jsonl").read_text().splitlines()
    entries = [json.loads(line) for line in lines]
    for entry in entries[3:5]:
        entry["loss"] = math.nan
        entry["validators"]["entropy"] = math.inf
    (run / "log.jsonl").write_text("\n".join(json.dumps(e) for e in entries))
    document = report(run)
    assert "not finite at 2 epochs" in document.one("r1-curve-loss").text
    drawn = document.one("r1-curve-loss").all("svg")[0]
    values = [v for e in drawn.all() for v in e.attributes.values()]
    assert not [
        v for v in values if re.search(r"\b(nan|inf)\b", v.lower()) and "not finite" not in v
    ]


ODD = [None, "<b>", [[1]], {"a": {"b": []}}, True, -1, 10**400, math.nan, 1e308]


@pytest.mark.parametrize("odd", ODD, ids=lambda value: str(value)[:12])
def test_odd_values_anywhere_do_no_harm(run: Path, odd: object) -> None:
    metrics = json.loads((run / "metrics.json").read_text())
    inner = {when: dict.fromkeys(metrics[when], odd) for when in ("before", "after")}
    entries = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    for entry in entries[2:]:
        entry |= {k: odd for k in entry if k not in ("event", "epoch")}
    (run / "log.jsonl").write_text(
        "\n".join(json.dumps(e) for e in [*entries, entries[0] | {"epoch": odd}])
    )
    for changed in (dict.fromkeys(metrics, odd), {**metrics, **inner}):
        write_json(run / "metrics.json", changed)
        write_json(
            run / "config.yaml",
            dict.fromkeys(("method", "epochs", "seed", "source", "open_set"), odd),
        )
        assert report(run).all("p", "headline")[0].text


def test_a_log_of_many_figures_takes_bounded_time(run: Path) -> None:
    (run / "samples.safetensors").unlink()
    entries = []
    for epoch in range(3):
        values = {f"figure {i}": float(epoch) for i in range(3000)}
        entries.append(json.dumps({"event": "epoch", "epoch": epoch, **values}))
    (run / "log.jsonl").write_text("\n".join(entries))
    assert len(report(run).one("r1-part-training").all("svg")) == 40


def test_a_resumed_epoch_counts_once(run: Path) -> None:
    lines = (run / "log.jsonl").read_text().splitlines()
    again = json.loads(lines[2]) | {"loss": 0.123}
    (run / "log.jsonl").write_text("\n".join([*lines, json.dumps(again)]))
    epochs = read_run(run).epochs
    assert [e["epoch"] for e in epochs] == list(range(7))
    assert epochs[2]["loss"] == 0.123


@pytest.mark.parametrize(
    ("changes", "status", "words"),
    [
        (
            {"verdict": {"value": "unknown", "sentence": "Nobody can tell."}},
            "warn",
            "Nobody can tell",
        ),
        ({"verdict": {"value": "worse"}}, "warn", "worse"),
        ({"after": {"accuracy": 5.0}}, "warn", "below the source model"),
        ({}, "good", "better"),
    ],
)
def test_the_verdict_is_shown(run: Path, changes: dict, status: str, words: str) -> None:
    metrics = json.loads((run / "metrics.json").read_text())
    write_json(run / "metrics.json", {**metrics, **changes})
    hero = report(run).all("header", "hero")[0]
    assert status in hero.all("span", "status")[0].attributes["class"]
    assert words in hero.text


@pytest.mark.parametrize(
    ("metrics", "headline"),
    [
        (
            {"validation_accuracy": 98.8, "best_epoch": 3, "epochs": 5},
            "Accuracy 98.8 %",
        ),
        ({"accuracy": 71.25, "per_class_accuracy": {"a": 71.25, "b": None}}, "Accuracy 71.2 %"),
        ({"log_evidence": -12.5, "prior_precision": 3.25}, "Run"),
        ({"mnist-uci": {"u-sfan": {"accuracy": 97.4, "ece": 1.5}}}, "Run"),
    ],
)
def test_other_runs_have_a_report_too(tmp_path: Path, metrics: dict, headline: str) -> None:
    write_json(tmp_path / "run" / "metrics.json", metrics)
    document = report(tmp_path / "run")
    assert document.all("p", "headline")[0].text == headline
    assert document.one("r1-part-figures").all("table")
