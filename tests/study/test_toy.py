"""The toy: its data, its files, and what the experiment is to show."""

import io
import json
import math

import pytest
import torch
from PIL import Image
from rich.console import Console

from small_runs import usfan
from usfan.maths.objectives import certainty_weights
from usfan.study import toy, toy_figure
from usfan.study.choices import PAPER
from usfan.study.toy_points import make_domains

LINES = (*PAPER, "u-sfan (evidence)", "u-sfan (paper)")


def metrics_of(out):
    return json.loads((out / "metrics.json").read_text())


def test_target_classes_are_where_the_protocol_puts_them():
    domains = [make_domains(seed) for seed in range(40)]
    source = torch.stack([each.source for each in domains])
    labels = domains[0].labels
    assert source.shape == (40, 500, 2)
    for name, moves in (("mild", (-1, 1.3, 1.5)), ("strong", (-10, 2.3, 3.3))):
        target = torch.stack([each.targets[name] for each in domains])
        for label, (move, clockwise) in enumerate(zip(moves, (10, -10, -10), strict=True)):
            members = labels == label
            moved = (target[:, members].mean(dim=1) - source[:, members].mean(dim=1)).mean(
                dim=0
            )
            # A vector (t, t), at 45°, turned clockwise.
            angle = math.radians(45 - clockwise)
            expected = torch.tensor([math.cos(angle), math.sin(angle)]) * move * math.sqrt(2)
            torch.testing.assert_close(moved, expected, rtol=0, atol=0.1)
            spread = target[:, members].var(dim=1).mean().sqrt()
            assert abs(float(spread) - math.hypot(1.2 * 1.3, 1.5)) < 0.05


def test_run_writes_its_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(toy_figure, "GRID", 40)
    one = tmp_path / "one"
    quick = {"source_epochs": 3, "epochs": 1, "methods": PAPER}
    toy.run_toy((2, 7), out=one, **quick)
    metrics = metrics_of(one)
    for name in ("mild", "strong"):
        assert tuple(metrics[name]) == LINES
        assert all(row["runs"] == len(row["accuracies"]) == 2 for row in metrics[name].values())
    files = {"metrics.json", "toy.png", "config.yaml", "study.json", "log.jsonl"}
    assert {p.name for p in one.iterdir()} == files
    assert json.loads((one / "study.json").read_text())["epochs"] == 1
    assert len((one / "log.jsonl").read_text().splitlines()) == 3
    with Image.open(one / "toy.png") as picture:
        assert picture.width > 2000
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(toy.toy_table(metrics))
    assert f"{metrics['strong']['u-sfan']['accuracy']:.1f}" in console.export_text()


def test_the_command_and_its_config_give_the_same_study(tmp_path, monkeypatch):
    monkeypatch.setattr(
        toy.run_toy, "__kwdefaults__", {"methods": PAPER, "source_epochs": 2, "epochs": 1}
    )
    one = tmp_path / "one"
    two = tmp_path / "two"
    more = ("--seeds", 3, 5, "--methods", "source-only", "u-sfan")
    assert usfan("reproduce", "toy", "--out", one, *more) == 0
    assert usfan("reproduce", "toy", "--out", two, "--config", one / "config.yaml") == 0
    accuracies = []
    for out in (one, two):
        rows = metrics_of(out)["strong"]
        assert set(rows) == {"source-only", *LINES[4:5], *LINES[6:]}
        accuracies.append({name: row["accuracies"] for name, row in rows.items()})
    assert accuracies[0] == accuracies[1]
    assert not (one / "toy.png").exists()  # it needs shot-im


def test_bad_seeds_are_refused(tmp_path, refused):
    line = refused("reproduce", "toy", "--out", tmp_path / "no", "--seeds", 1, 2, 1)
    assert "each seed may be given once" in line


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Two seeds, of which SHOT-IM flips one."""
    out = tmp_path_factory.mktemp("toy")
    methods = ("source-only", "shot-im", "u-sfan")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            toy, "VARIANTS", {}
        )  # of these lines only the picture and the table are tested
        patch.setattr(toy, "toy_figure", lambda *_: None)
        return toy.run_toy((6, 9), out=out, methods=methods), metrics_of(out)


def test_every_method_solves_the_mild_shift(models):
    rows = models[1]["mild"]
    for name in ("shot-im", "u-sfan"):
        assert rows[name]["accuracy"] >= 92, name
        assert rows[name]["accuracy"] > rows["source-only"]["accuracy"], name
        assert rows[name]["flipped"] == 0, name


def test_uncertainty_flips_no_more_runs_than_none(models):
    rows = models[1]["strong"]
    assert rows["source-only"]["accuracy"] < 80
    assert rows["u-sfan"]["flipped"] <= rows["shot-im"]["flipped"]
    assert rows["u-sfan"]["accuracy"] >= rows["shot-im"]["accuracy"]


def test_weights_are_low_where_the_source_model_is_wrong(models):
    """The purpose of the posterior: under the strong shift, points that the source model gets wrong count for less."""
    for each in models[0]:
        before = each.adapted["strong"]["u-sfan"].passes.before
        right = before.logits.argmax(dim=1) == each.domains.labels
        weights = certainty_weights(before.posterior_probs)
        assert weights[right].mean() > 1.2 * weights[~right].mean()
