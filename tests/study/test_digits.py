"""The demo on a few images, and open set on real digits."""

import functools
import io
import json
import re

import pytest
import torch

import usfan
from usfan.adaptation.methods import METHODS
from usfan.engine.runtime import start_runtime
from usfan.store.model import SourceModel
from usfan.study.choices import PAPER
from usfan.study.digits import demo_table, load_mnist5k, load_uci, run_demo


def test_the_demo_writes_what_it_promises(tmp_path, capsys):
    metrics = run_demo(tmp_path, runtime=start_runtime(None), quick=True)
    assert json.loads((tmp_path / "metrics.json").read_text()) == metrics
    assert list(metrics) == ["mnist-uci", "uci-mnist"]
    for pair, rows in metrics.items():
        assert list(rows) == list(PAPER)
        assert all(row.keys() == {"accuracy", "ece", "seconds"} for row in rows.values())
        run = tmp_path / pair
        assert {"config.yaml", "log.jsonl", "metrics.json", "samples.safetensors"} <= {
            p.name for p in run.iterdir()
        }
        assert SourceModel.load(run).method == "u-sfan"
        assert (
            json.loads((run / "metrics.json").read_text())["after"]["accuracy"]
            == rows["u-sfan"]["accuracy"]
        )
    for name in ("mnist", "uci"):
        assert SourceModel.load(tmp_path / name).classes == tuple("0123456789")
    assert (tmp_path / "report.html").stat().st_size > 10_000
    printed = capsys.readouterr()
    assert "report.html" in printed.err
    lines = printed.out.splitlines()
    assert max(map(len, lines)) <= 80
    assert "…" not in printed.out
    assert len(re.findall("u-sfan ", printed.out)) == 2


def test_several_seeds_of_one_method(tmp_path, monkeypatch):
    from usfan.study import digits
    from usfan.study.command import reproduce

    monkeypatch.setattr(digits, "run_demo", functools.partial(run_demo, quick=True))
    reproduce(
        "digits",
        {"seeds": [3, 5], "methods": ["shot-im"], "out": tmp_path},
        start_runtime(None),
    )
    table = json.loads((tmp_path / "metrics.json").read_text())
    row = table["results"]["shot-im"]
    assert list(row) == ["mnist→uci", "uci→mnist", "avg"]
    accuracies = []
    for seed in (3, 5):
        metrics = json.loads((tmp_path / f"seed-{seed}" / "metrics.json").read_text())
        accuracies.append(metrics["mnist-uci"]["shot-im"]["accuracy"])
    assert row["mnist→uci"]["mean"] == pytest.approx(sum(accuracies) / 2)
    assert "| shot-im |" in (tmp_path / "table.md").read_text()
    assert SourceModel.load(tmp_path / "seed-5" / "uci-mnist").method == "shot-im"


def test_the_table_fits_eighty_columns():
    from rich.console import Console

    row = {"accuracy": 100.0, "ece": 100.0, "seconds": 1000.0}
    console = Console(width=80, file=io.StringIO())
    console.print(demo_table("mnist-uci", dict.fromkeys(METHODS, row)))
    assert "accuracy %" in console.file.getvalue()


def test_the_digits_are_what_they_should_be():
    mnist = load_mnist5k()
    uci = load_uci()
    assert (len(mnist), len(uci)) == (5000, 1797)
    assert torch.bincount(mnist.labels).tolist() == [500] * 10
    assert mnist.load(0, 1).shape == (1, 28, 28)
    assert int(uci.load(0, 1).max()) > 200


@pytest.fixture(scope="module")
def open_digits():
    """MNIST 0–5, and all ten digits of UCI."""
    mnist = load_mnist5k()
    uci = load_uci()
    known = mnist.subset((mnist.labels < 6).nonzero().flatten()[::2])
    known = usfan.ImageData(
        torch.stack([known.load(i, 1)[0] for i in range(len(known))]),
        labels=known.labels,
        classes=tuple("012345"),
    )
    return usfan.train_source(known, backbone="digits-cnn", epochs=4, seed=0), uci


def test_open_set_beats_source_only_by_fifteen_points(open_digits):
    """Both are split by the same rule. One image alone gets the flag that it gets in a batch."""
    source, uci = open_digits
    adapted, plain = (
        usfan.adapt(
            source,
            uci,
            method,
            open_set=True,
            epochs=4,
            split="max-softmax",
            decision="max-softmax",
        )
        for method in ("u-sfan", "source-only")
    )
    figures, before = (usfan.evaluate(model, uci, open_set=True) for model in (adapted, plain))
    print(
        f"HOS {figures['hos']:.1f} against {before['hos']:.1f}, {adapted.history['seconds']:.0f} s"
    )
    assert figures["unknown_rule"]["score"] == before["unknown_rule"]["score"] == "max-softmax"
    assert figures["hos"] >= before["hos"] + 15
    together = adapted.predict(uci.subset(range(30)))
    alone = [bool(adapted.predict(uci.subset([i])).unknown) for i in range(30)]
    assert together.unknown.tolist() == alone
    assert 0 < sum(alone) < 30


def test_the_decision_of_the_method_is_stored(open_digits):
    source, uci = open_digits
    adapted = usfan.adapt(
        source, uci.subset(range(0, 1797, 4)), "u-sfan", open_set=True, epochs=1
    )
    assert adapted.unknown_rule.score == METHODS["u-sfan"].split.decision == "max-softmax"


def test_partial_set_runs_on_digits(open_digits):
    source, uci = open_digits
    some = uci.subset(uci.labels < 3)
    model = usfan.adapt(source, some, "u-sfan+", partial_set=True, epochs=1)
    assert model.passes.after.probs.shape == (len(some), 6)
