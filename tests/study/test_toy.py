"""The toy: its data, its files, and what the experiment is to show."""

import json
import math

import pytest
import torch
from PIL import Image

from small_runs import usfan
from usfan.maths.objectives import certainty_weights
from usfan.study import toy, toy_figure
from usfan.study.choices import PAPER
from usfan.study.toy_points import make_points

LINES = (*PAPER, "u-sfan (evidence)", "u-sfan (paper)")


def rows_of(out):
    return json.loads((out / "results.json").read_text())["rows"]


def accuracies(rows, method, task):
    return [row["accuracy"] for row in rows if (row["method"], row["task"]) == (method, task)]


def test_target_classes_are_where_the_protocol_puts_them():
    sources, labels, targets = zip(*(make_points(seed) for seed in range(40)), strict=True)
    source = torch.stack(sources)
    assert source.shape == (40, 500, 2)
    for name, moves in (("mild", (-1, 1.3, 1.5)), ("strong", (-10, 2.3, 3.3))):
        target = torch.stack([each[name] for each in targets])
        for label, (move, clockwise) in enumerate(zip(moves, (10, -10, -10), strict=True)):
            members = labels[0] == label
            moved = (target[:, members].mean(dim=1) - source[:, members].mean(dim=1)).mean(
                dim=0
            )
            # A vector (t, t), at 45°, turned clockwise.
            angle = math.radians(45 - clockwise)
            expected = torch.tensor([math.cos(angle), math.sin(angle)]) * move * math.sqrt(2)
            torch.testing.assert_close(moved, expected, rtol=0, atol=0.1)
            spread = target[:, members].var(dim=1).mean().sqrt()
            assert abs(float(spread) - math.hypot(1.2 * 1.3, 1.5)) < 0.05


def test_run_writes_its_folder(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(toy_figure, "GRID", 40)
    out = tmp_path / "one"
    toy.run_toy((2, 7), out=out, source_epochs=3, epochs=1)
    rows = rows_of(out)
    for task in ("mild", "strong"):
        assert tuple(row["method"] for row in rows if row["task"] == task) == LINES * 2
    files = {"table.md", "table.json", "metrics.json", "results.json"}
    assert {p.name for p in out.iterdir()} == files | {"toy.png", "config.yaml"}
    with Image.open(out / "toy.png") as picture:
        assert picture.width > 2000
    table = (out / "table.md").read_text()
    assert table in capsys.readouterr().out
    assert table.splitlines()[0] == "| method | mild | flipped | strong | flipped |"
    (line,) = [line for line in table.splitlines() if line.startswith("| u-sfan |")]
    strong = accuracies(rows, "u-sfan", "strong")
    assert f"| {sum(strong) / 2:.1f} ± " in line
    assert line.endswith(f"| {sum(value < 50 for value in strong)} |")
    assert usfan("report", out) == 0
    assert "u-sfan (paper)" in (out / "report.html").read_text()


def test_the_command_and_its_config_give_the_same_study(tmp_path, monkeypatch):
    monkeypatch.setattr(
        toy.run_toy, "__kwdefaults__", {"methods": PAPER, "source_epochs": 2, "epochs": 1}
    )
    one = tmp_path / "one"
    two = tmp_path / "two"
    more = ("--seeds", 3, "--methods", "source-only", "u-sfan")
    assert usfan("reproduce", "toy", "--out", one, *more) == 0
    assert usfan("reproduce", "toy", "--out", two, "--config", one / "config.yaml") == 0
    assert {row["method"] for row in rows_of(one)} == {"source-only", *LINES[4:5], *LINES[6:]}
    first, second = ([{**row, "seconds": 0} for row in rows_of(out)] for out in (one, two))
    assert first == second
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
        # of these lines only the picture and the table are tested
        patch.setattr(toy, "VARIANTS", {})
        patch.setattr(toy, "toy_figure", lambda *_: None)
        return toy.run_toy((6, 9), out=out, methods=methods), rows_of(out)


def test_every_method_solves_the_mild_shift(models):
    plain = accuracies(models[1], "source-only", "mild")
    for name in ("shot-im", "u-sfan"):
        adapted = accuracies(models[1], name, "mild")
        assert sum(adapted) / 2 >= 92, name
        assert sum(adapted) > sum(plain), name
        assert min(adapted) >= 50, name


def test_uncertainty_flips_no_more_runs_than_none(models):
    source, plain, guided = (
        accuracies(models[1], name, "strong") for name in ("source-only", "shot-im", "u-sfan")
    )
    assert sum(source) / 2 < 80
    assert sum(value < 50 for value in guided) <= sum(value < 50 for value in plain)
    assert sum(guided) >= sum(plain)


def test_weights_are_low_where_the_source_model_is_wrong(models):
    """The purpose of the posterior: under the strong shift, points that the source model gets wrong count for less."""
    for each in models[0]:
        before = each.adapted["u-sfan", "strong"].passes.before
        right = before.logits.argmax(dim=1) == each.labels
        weights = certainty_weights(before.posterior_probs)
        assert weights[right].mean() > 1.2 * weights[~right].mean()
