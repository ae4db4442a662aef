"""`usfan check`: how good is a model on these images, and what its confidence says."""

from __future__ import annotations

import csv
import dataclasses
import json

import numpy as np
import pytest
import torch
from PIL import Image

import usfan
from oracles.dense import factors
from small_runs import TINY
from small_runs import usfan as command
from tiny_models import tiny_model
from usfan.adaptation.estimate import of_adapted
from usfan.errors import ConfigError
from usfan.maths.agreement import Interval
from usfan.maths.calibration import matching_temperature
from usfan.store.model import MixtureModel
from usfan.uncertainty.kronecker import KroneckerPosterior

NAMES = ("a", "b|c", "<d>")
QUICK = {"epochs": 2, "batch_size": 8, "progress": False}


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """A flat folder of 30 images, one of them broken."""
    root = tmp_path_factory.mktemp("photos")
    generator = np.random.default_rng(0)
    for number in range(30):
        pixels = generator.integers(0, 80 + 80 * (number % 3), (30, 30), dtype=np.uint8)
        Image.fromarray(pixels).save(root / f"{number:02}.png")
    (root / "broken.png").write_bytes(b"no image")
    return root


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_model().save(tmp_path_factory.mktemp("model") / "source")


@pytest.fixture(scope="module")
def adapted(folder, photos):
    return usfan.adapt(folder, photos, lr=0.1, **QUICK)


def labels_of(folder, photos, path, wrong: int):
    """A table of all labels, of which so many are not what the model says."""
    files = sorted(photos.glob("[0-9]*.png"))
    predicted = usfan.SourceModel.load(folder).predict([str(file) for file in files]).label
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("path", "label"))
        for number, (image, label) in enumerate(zip(files, predicted.tolist(), strict=True)):
            writer.writerow((image, NAMES[(label + (number < wrong)) % 3]))
    return path


def test_the_distance_is_that_of_the_dense_second_moment():
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(50, 6, generator=generator, dtype=torch.float64)
    others = torch.randn(9, 6, generator=generator, dtype=torch.float64) + 2
    weight = torch.randn(3, 6, generator=generator, dtype=torch.float64)
    for bias in (None, torch.zeros(3, dtype=torch.float64)):
        logits = features @ weight.T
        posterior = KroneckerPosterior.fit(features, logits, weight, bias)
        second, _ = factors(features, logits, bias is not None)
        ridge = second + second.trace() / 50 * torch.eye(len(second), dtype=torch.float64)

        def leverage(rows, ridge=ridge, bias=bias):
            if bias is not None:
                rows = torch.cat([rows, torch.ones(len(rows), 1, dtype=torch.float64)], dim=1)
            return torch.stack([row @ torch.linalg.inv(ridge) @ row for row in rows])

        expected = leverage(others) / leverage(features).mean()
        torch.testing.assert_close(posterior.distances(others), expected)
        assert float(posterior.distances(features).mean()) == pytest.approx(1)
        assert float(posterior.distances(others).mean()) > 2


def test_the_temperature_matches_mean_confidence_and_keeps_labels():
    logits = 5 * torch.randn(200, 4, generator=torch.Generator().manual_seed(0))
    for accuracy in (0.4, 0.9):
        temperature = matching_temperature(logits, accuracy)
        probs = (logits / temperature).softmax(dim=1)
        assert float(probs.amax(dim=1).mean()) == pytest.approx(accuracy, abs=1e-4)
        assert torch.equal(probs.argmax(dim=1), logits.argmax(dim=1))
    assert matching_temperature(logits, 0.0) == pytest.approx(50)


def test_a_check_of_unlabelled_images(folder, photos):
    result = usfan.check(folder, photos, progress=False)
    assert result.basis == "images"
    assert (result.images, result.unreadable) == (30, 1)
    assert result.shift > 0
    assert set(result.doubtful) <= {str(file) for file in photos.iterdir()}
    stored = json.loads(json.dumps(result.to_dict()))
    assert stored["accuracy"] is None  # random weights follow no structure
    assert stored["reason"]
    assert len(repr(result)) < 100
    assert "<table>" in result._repr_html_()
    possible = stored["possible"]
    assert result.below(possible["high"] + 0.1) is True
    assert result.below((possible["low"] + possible["high"]) / 2) is None
    with pytest.raises(dataclasses.FrozenInstanceError):
        result.shift = 0.0


def test_labels_measure(folder, photos, tmp_path):
    table = labels_of(folder, photos, tmp_path / "labels.csv", wrong=6)
    result = usfan.check(folder, photos, table, progress=False)
    assert result.accuracy.value == pytest.approx(0.8)
    assert result.accuracy.low == result.accuracy.high  # every image has a label
    assert (result.basis, result.labels) == ("labels", 30)
    assert result.below(90) is True
    assert result.below(70) is False


def test_answers_to_questions_are_no_random_sample(folder, photos, tmp_path, caplog):
    table = labels_of(folder, photos, tmp_path / "labels.csv", wrong=6)
    path, label = table.read_text().splitlines()[1].split(",")[:2]
    asked = tmp_path / "asked.csv"
    asked.write_text(f"path,label,question\n{path},{label},judge\n")
    with pytest.raises(ConfigError, match="column question"):
        usfan.check(folder, photos, labels=asked)
    usfan.evaluate(folder, photos, labels=asked)
    assert "figures of these images alone" in caplog.text


def test_exit_codes_and_files(folder, photos, tmp_path, capsys):
    out = tmp_path / "check.json"
    prometheus = tmp_path / "usfan.prom"
    files = ("--out", out, "--prometheus", prometheus)
    assert command("check", folder, photos, *files, *TINY) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 8
    assert lines[1].startswith("accuracy: cannot be told without labels")
    stored = json.loads(out.read_text())
    assert stored["accuracy"] is None
    possible = stored["possible"]
    assert f"; between {possible['low']:.0f} and {possible['high']:.0f} % are right" in lines[1]
    figures = dict(line.rsplit(" ", 1) for line in prometheus.read_text().splitlines())
    names = {name.partition("{")[0]: value for name, value in figures.items()}
    assert names["usfan_accuracy_ratio"] == "NaN"
    assert names["usfan_images"] == "30"
    inside = (possible["low"] + possible["high"]) / 2
    assert command("check", folder, photos, "--fail-under", inside, *TINY) == 4
    assert command("check", folder, photos, "--fail-under", possible["high"] + 1, *TINY) == 3
    table = labels_of(folder, photos, tmp_path / "labels.csv", wrong=6)
    labelled = ("check", folder, photos, "--labels", table, *TINY)
    assert command(*labelled, "--fail-under", 90) == 3
    assert command(*labelled, "--fail-under", 70) == 0
    assert command("check", folder, photos, "--fail-under", 900, *TINY) == 2


@pytest.mark.parametrize("kind", ["mixture", "mc-dropout", "point"])
def test_other_models(kind, photos):
    model = tiny_model().with_uncertainty(kind) if kind != "mixture" else None
    if model is None:
        model = MixtureModel.of([tiny_model(seed=0), tiny_model(seed=1)], [0.25, 0.75])
    result = usfan.check(model, photos, progress=False)
    assert result.images == 30
    assert result.shift > 0


def test_an_adapted_model_is_as_confident_as_it_is_believed_to_be_right(
    adapted, photos, tmp_path
):
    """In the run, in `predict`, and after saving; folders that do not say have temperature 1."""
    temperature = adapted.confidence_temperature
    assert temperature != 1
    after = adapted.passes.after
    torch.testing.assert_close(after.probs, (after.logits / temperature).softmax(dim=1))
    path = adapted.save(tmp_path / "run")
    loaded = usfan.SourceModel.load(path)
    images = [str(file) for file in sorted(photos.glob("[0-9]*.png"))]
    prediction = loaded.predict(images)
    torch.testing.assert_close(prediction.probs, after.probs, rtol=1e-3, atol=1e-4)
    assert torch.equal(prediction.label, after.logits.argmax(dim=1))
    config = json.loads((path / "config.json").read_text())
    assert config.pop("confidence_temperature") == temperature
    (path / "config.json").write_text(json.dumps(config))
    assert usfan.SourceModel.load(path).confidence_temperature == 1


def test_without_the_guard_the_last_iterate_stays_as_it_is(folder, photos):
    model = usfan.adapt(folder, photos, guard=False, **QUICK)
    assert model.confidence_temperature == 1


def test_an_adapted_model_remembers_that_its_accuracy_could_not_be_told(adapted, photos):
    reason = adapted.history["estimated_accuracy"]["reason"]
    assert reason
    assert usfan.check(adapted, photos, progress=False).accuracy is None


def test_an_adapted_model_is_no_better_than_its_adaptation_believed():
    """On six tasks its neighbours agreed so well that it seemed 5 to 22 points better than it was."""
    share = Interval(0.96, 0.86, 1.0)
    earlier = {"value": 80.0, "low": 70.0, "high": 90.0}
    assert of_adapted(share, earlier, 0.9).value == pytest.approx(0.8)
    assert of_adapted(share, earlier, 0.6).value == pytest.approx(0.6)
    assert of_adapted(share, earlier, 0.6).low == pytest.approx(0.5)
    for unknown in (None, "text", {"value": "a", "low": 1}):
        assert of_adapted(share, unknown, 0.9) is None
