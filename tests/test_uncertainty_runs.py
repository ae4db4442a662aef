"""`--uncertainty` from the command line and from Python: what is trained, stored, adapted with and evaluated."""

from __future__ import annotations

import json

import pytest
import torch

import usfan
from small_runs import TINY, adapt_tiny, class_folder, train_tiny
from small_runs import usfan as command
from usfan.store.run_folder import read_run_config
from usfan.uncertainty.ensemble import Ensemble

KINDS = ("point", "mc-dropout", "ensemble")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    root = tmp_path_factory.mktemp("uncertainties")
    return class_folder(root / "source"), class_folder(root / "target", domain=1)


@pytest.fixture(scope="module")
def models(data, tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    flags = {"posterior": (), **{kind: ("--uncertainty", kind) for kind in KINDS}}
    return {
        kind: train_tiny(data[0], root / kind, *more, "--members", 3)
        for kind, more in flags.items()
    }


def test_train_stores_what_was_asked_for(models):
    kinds = {kind: usfan.SourceModel.load(path).uncertainty for kind, path in models.items()}
    assert [kind.kind for kind in kinds.values()] == [
        "kronecker",
        "point",
        "mc-dropout",
        "ensemble",
    ]
    assert kinds["mc-dropout"].rate == 0.5
    assert usfan.SourceModel.load(models["mc-dropout"]).architecture["dropout"] == 0.5
    assert isinstance(kinds["ensemble"], Ensemble)
    assert len(kinds["ensemble"].member_weights) == 3
    posteriors = [
        usfan.SourceModel.load(models[kind]).posterior.tensors()
        for kind in ("posterior", "ensemble")
    ]
    assert all(
        torch.equal(posteriors[0][name], posteriors[1][name]) for name in posteriors[0]
    )  # nothing else changed


@pytest.mark.parametrize("kind", KINDS)
def test_adapt_takes_the_stored_one_or_another(models, data, tmp_path, kind):
    stored = adapt_tiny(models[kind], data[1], tmp_path / "stored", "--method", "u-sfan")
    adapted = usfan.SourceModel.load(stored)
    assert adapted.uncertainty.kind == kind
    metrics = json.loads((stored / "metrics.json").read_text())
    assert metrics["uncertainty"] == kind
    assert 0 <= metrics["after"]["posterior_ece"] <= 100
    other = adapt_tiny(
        models[kind],
        data[1],
        tmp_path / "other",
        "--method",
        "u-sfan",
        "--uncertainty",
        "posterior",
    )
    assert usfan.SourceModel.load(other).uncertainty.kind == "kronecker"
    assert read_run_config(other)["uncertainty"] == "posterior"
    one, two = (
        json.loads((run / "metrics.json").read_text())["before"]["posterior_nll"]
        for run in (stored, other)
    )
    assert one != two
    assert command("report", stored, "--out", tmp_path / "page.html") == 0


def test_weights_come_from_the_uncertainty(models, data):
    """u-sfan with the point estimate's certainty is shot-im weighted by it: the same weights, so the same network."""
    source = usfan.SourceModel.load(models["posterior"])
    given = {"epochs": 2, "batch_size": 8, "guard": False, "progress": False, "device": "cpu"}
    one = usfan.adapt(source, data[1], "u-sfan", uncertainty="point", **given)
    two = usfan.adapt(source, data[1], "u-sfan", weights="point", **given)
    three = usfan.adapt(source, data[1], "u-sfan", **given)
    state = [
        torch.cat([v.flatten().double() for v in m.classifier.state_dict().values()])
        for m in (one, two, three)
    ]
    torch.testing.assert_close(state[0], state[1], rtol=1e-3, atol=1e-5)
    assert float((state[0] - state[2]).abs().max()) > 1e-4
    assert float(one.passes.after.mutual_information.max()) == 0


def test_posterior_after_the_training(models, data, tmp_path):
    flags = ("--uncertainty", "ensemble", "--members", 2)
    assert (
        command(
            "posterior", models["posterior"], data[0], "--out", tmp_path / "e", *flags, *TINY
        )
        == 0
    )
    assert usfan.SourceModel.load(tmp_path / "e").uncertainty.settings() == {"members": 2}
    flags = ("--uncertainty", "mc-dropout", "--dropout-rate", 0.25)
    assert (
        command(
            "posterior", models["posterior"], data[0], "--out", tmp_path / "d", *flags, *TINY
        )
        == 0
    )
    assert usfan.SourceModel.load(tmp_path / "d").uncertainty.settings() == {"rate": 0.25}
    assert (
        command("posterior", models["ensemble"], data[0], "--out", tmp_path / "p", *TINY) == 0
    )
    refitted = usfan.SourceModel.load(tmp_path / "p")
    assert (
        refitted.uncertainty is refitted.posterior
    )  # the old heads do not belong to the new fit
    module = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(28 * 28, 3))
    images = usfan.ImageData(
        torch.randint(256, (30, 1, 28, 28), dtype=torch.uint8), labels=[0, 1, 2] * 10
    )
    attached = usfan.attach_posterior(
        module, images, classes=["0", "1", "2"], uncertainty="ensemble", members=2, progress=False,
        spec=usfan.InputSpec(1, 28, 28, (0.5,), (0.5,), "none"), device="cpu",
    )  # fmt: skip
    assert attached.uncertainty.kind == "ensemble"


def test_evaluate_and_predict_with_another(models, data, tmp_path, capsys):
    figures = []
    for kind in ("posterior", "point", "auto"):
        assert (
            command("evaluate", models["posterior"], data[1], "--uncertainty", kind, *TINY) == 0
        )
        figures.append(json.loads(capsys.readouterr().out.splitlines()[-1]))
    assert figures[0] == figures[2]
    assert figures[0]["accuracy"] == figures[1]["accuracy"]
    assert figures[0]["posterior_nll"] != figures[1]["posterior_nll"]
    out = tmp_path / "table.csv"
    assert (
        command(
            "predict",
            models["ensemble"],
            data[1],
            "--out",
            out,
            "--uncertainty",
            "mc-dropout",
            *TINY,
        )
        == 0
    )
    assert len(out.read_text().splitlines()) == 25


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ("train", "SOURCE", "--uncertainty", "mc-dropout", "--dropout", 0),
            "needs dropout in training",
        ),
        (
            ("train", "SOURCE", "--uncertainty", "mc-dropout", "--bottleneck", 0),
            "and bottleneck is 0",
        ),
        (("train", "SOURCE", "--uncertainty", "ensembles"), "did you mean ensemble?"),
        (("train", "SOURCE", "--members", 1), "members must lie between 2 and 64; got 1"),
        (("train", "SOURCE", "--dropout", 1.0), "dropout must lie between 0 and 0.99"),
        (
            ("adapt", "MODEL", "TARGET", "--uncertainty", "ensemble"),
            "this model has no ensemble",
        ),
        (
            ("adapt", "MODEL", "TARGET", "--set", "dropout_rate=1.5"),
            "dropout_rate must lie between",
        ),
        (
            ("evaluate", "MODEL", "TARGET", "--uncertainty", "ensemble"),
            "this model has no ensemble",
        ),
    ],
)
def test_mistakes(words, said, models, data, tmp_path, capsys):
    places = {"SOURCE": data[0], "TARGET": data[1], "MODEL": models["posterior"]}
    words = [places.get(word, word) for word in words] + ["--out", tmp_path / "run", *TINY]
    network = ("--backbone", "digits-cnn") if words[0] == "train" else ()
    assert command(*words, *network) == 2
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert said in line
    assert not (tmp_path / "run" / "metrics.json").exists()


def test_an_ensemble_without_labels(models, data, tmp_path, capsys):
    flat = tmp_path / "flat"
    flat.mkdir()
    for path in (data[0] / "class-0").iterdir():
        (flat / path.name).write_bytes(path.read_bytes())
    assert command(
        "posterior",
        models["posterior"],
        flat,
        "--out",
        tmp_path / "o",
        "--uncertainty",
        "ensemble",
        *TINY,
    )
    assert (
        "uncertainty ensemble is trained on labels, and the data has none"
        in capsys.readouterr().err
    )
