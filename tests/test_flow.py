"""The flow of the README as typed: train, adapt, evaluate, predict, and a posterior for a model trained elsewhere."""

import csv
import json
import shutil

import pytest
import timm
import torch

import usfan as package
from small_runs import TINY, adapt_tiny, class_folder, train_tiny, usfan

EVALUATED = {
    "accuracy",
    "mean_class_accuracy",
    "per_class_accuracy",
    "nll",
    "brier",
    "ece",
    "entropy",
}
EVALUATED |= {"posterior_nll", "posterior_brier", "posterior_ece"}
OPEN = {"os", "os_star", "unknown_accuracy", "hos", "auroc_unknown", "aupr_unknown"}
COLUMNS = ["path", "label", "confidence", "entropy", "weight", "unknown", "error"]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    root = tmp_path_factory.mktemp("data")
    return {
        "source": class_folder(root / "source", images=20),
        "target": class_folder(root / "target", images=10, domain=3),
        "open": class_folder(root / "open", images=10, domain=3, classes=5),
    }


@pytest.fixture(scope="module")
def source(data, tmp_path_factory):
    return train_tiny(data["source"], tmp_path_factory.mktemp("runs") / "source", "--epochs", 8)


def rows(table) -> list[dict[str, str]]:
    with open(table, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def evaluate(model, data, out, *more) -> dict:
    assert usfan("evaluate", model, data, "--out", out, *TINY, *more) == 0
    return json.loads((out / "metrics.json").read_text())


def check_predictions(model, data, folder, count: int, classes: set[str]) -> None:
    assert usfan("predict", model, data, "--out", folder / "all.csv", *TINY) == 0
    table = rows(folder / "all.csv")
    assert (len(table), list(table[0])) == (count, COLUMNS)
    for row in table:
        assert row["label"] in classes
        assert 1 / len(classes) - 1e-6 <= float(row["weight"]) <= 1
        assert 0 < float(row["confidence"]) <= 1
        assert float(row["entropy"]) >= 0
    assert (
        usfan("predict", model, data, "--out", folder / "half.csv", "--coverage", 0.5, *TINY)
        == 0
    )
    half = rows(folder / "half.csv")
    silent = [float(r["weight"]) for r in half if r["abstained"] == "1"]
    spoken = [float(r["weight"]) for r in half if r["abstained"] == "0"]
    assert (len(spoken), max(silent) <= min(spoken)) == (round(count / 2), True)
    assert all((r["label"] == "") == (r["abstained"] == "1") for r in half)


def test_train_adapt_evaluate_predict(data, source, tmp_path, capsys):
    adapted = adapt_tiny(source, data["target"], tmp_path / "adapted")
    capsys.readouterr()
    metrics = evaluate(adapted, data["target"], tmp_path / "scores")
    assert metrics.keys() >= EVALUATED
    assert metrics["per_class_accuracy"].keys() == {"class-0", "class-1", "class-2"}
    printed = json.loads(capsys.readouterr().out)  # figures on stdout, for scripts
    assert (
        printed["accuracy"]
        == metrics["accuracy"]
        == json.loads((adapted / "metrics.json").read_text())["after"]["accuracy"]
    )
    check_predictions(adapted, data["target"], tmp_path, 30, {"class-0", "class-1", "class-2"})
    again = evaluate(
        package.SourceModel.load(adapted).save(tmp_path / "copy"),
        data["target"],
        tmp_path / "again",
    )
    assert again == metrics


def test_open_set(data, source, tmp_path):
    adapted = adapt_tiny(source, data["open"], tmp_path / "adapted", "--open-set")
    metrics = evaluate(adapted, data["open"], tmp_path / "scores", "--open-set")
    assert metrics.keys() >= (EVALUATED | OPEN)
    assert metrics["count"] == 50
    assert (
        json.loads((adapted / "config.json").read_text())["unknown_rule"]
        == metrics["unknown_rule"]
    )
    usfan("predict", adapted, data["open"], "--out", tmp_path / "table.csv", *TINY)
    flags = [row["unknown"] for row in rows(tmp_path / "table.csv")]
    model = package.SourceModel.load(adapted)
    for i in (0, 17, 49):  # one image alone gets the flag that it gets in a batch
        alone = model.predict(package.ImageData(data["open"]).subset([i]))
        assert str(int(alone.unknown)) == flags[i]


def test_labels_are_not_needed(data, source, tmp_path):
    flat = tmp_path / "flat"
    flat.mkdir()
    for number, file in enumerate(sorted(data["target"].rglob("*.png"))):
        shutil.copy(file, flat / f"{number:02}.png")
    adapted = adapt_tiny(source, flat, tmp_path / "adapted")
    assert "after" not in json.loads((adapted / "metrics.json").read_text())
    labelled = adapt_tiny(source, data["target"], tmp_path / "labelled")
    assert (adapted / "model.safetensors").read_bytes() == (
        labelled / "model.safetensors"
    ).read_bytes()


def test_a_posterior_for_a_model_folder(data, source, tmp_path):
    out = tmp_path / "refitted"
    assert (
        usfan("posterior", source, data["target"], "--out", out, "--prior", "2.5", *TINY) == 0
    )
    metrics = json.loads((out / "metrics.json").read_text())
    assert metrics["prior_precision"] == pytest.approx(2.5)
    assert (out / "model.safetensors").read_bytes() == (
        source / "model.safetensors"
    ).read_bytes()
    adapt_tiny(out, data["target"], tmp_path / "adapted")


def test_a_prior_from_the_weight_decay_of_the_training(data, source, tmp_path, capsys):
    """As stored in the model folder; else as given; else one clear line, before any work."""
    command = ("posterior", source, data["target"], "--prior", "weight-decay", "--out")
    assert usfan(*command, tmp_path / "stored", *TINY) == 0
    assert json.loads((tmp_path / "stored" / "metrics.json").read_text())[
        "prior_precision"
    ] == pytest.approx(30 * 1e-3)
    assert usfan(*command, tmp_path / "given", "--weight-decay", 0.02, *TINY) == 0
    assert json.loads((tmp_path / "given" / "metrics.json").read_text())[
        "prior_precision"
    ] == pytest.approx(30 * 0.02)
    assert (
        json.loads((tmp_path / "given" / "config.json").read_text())["summary"]["weight_decay"]
        == 0.02
    )
    private = package.SourceModel.load(source).save(tmp_path / "private", private=True)
    config = json.loads((private / "config.json").read_text())
    torch.save(timm.create_model("resnet18", num_classes=3).state_dict(), tmp_path / "mine.pth")
    for stored in (None, "much", -1, True):
        config["summary"] = {} if stored is None else {"weight_decay": stored}
        (private / "config.json").write_text(json.dumps(config))
        capsys.readouterr()
        refused = (
            "posterior",
            private,
            data["target"],
            "--prior",
            "weight-decay",
            "--out",
            tmp_path / "none",
        )
        assert usfan(*refused, *TINY) == 2
        said = capsys.readouterr().err
        assert (said.count("\n"), "--weight-decay" in said) == (1, True)
    weights = (
        "posterior",
        tmp_path / "mine.pth",
        data["target"],
        "--backbone",
        "resnet18",
        "--out",
        tmp_path / "none",
    )
    assert usfan(*weights, "--prior", "weight-decay", *TINY) == 2
    assert "--weight-decay" in capsys.readouterr().err
    assert usfan(*command, tmp_path / "none", "--weight-decay", "-1", *TINY) == 2
    assert not (tmp_path / "none").exists()


def test_a_posterior_for_a_state_dict(data, tmp_path, capsys):
    torch.save(timm.create_model("resnet18", num_classes=3).state_dict(), tmp_path / "mine.pth")
    small = class_folder(tmp_path / "small", images=2)
    command = ("posterior", tmp_path / "mine.pth", small, "--backbone")
    assert usfan(*command, "resnet18", "--out", tmp_path / "run", *TINY) == 0
    check_predictions(tmp_path / "run", small, tmp_path, 6, {"class-0", "class-1", "class-2"})
    capsys.readouterr()
    assert usfan(*command, "resnet34", "--out", tmp_path / "other", *TINY) == 2
    assert usfan(*command, "resnet1", "--out", tmp_path / "other", *TINY) == 2
    assert "did you mean" in capsys.readouterr().err
    assert not (tmp_path / "other").exists()


@pytest.mark.shared_data
def test_office31_with_the_offline_backbone(shared_data, tmp_path):
    """DSLR to webcam as in the README, on four classes and a few images."""
    classes = ("back_pack", "bike", "calculator", "mug")
    for domain in ("dslr", "webcam"):
        for name in classes:
            files = sorted((shared_data / "office31" / domain / name).iterdir())[:6]
            (tmp_path / domain / name).mkdir(parents=True)
            for file in files:
                (tmp_path / domain / name / file.name).symlink_to(file.resolve())
    run = ("--batch-size", 16, *TINY)
    backbone = ("--backbone", "tf_efficientnet_lite0", "--epochs", 1)
    assert (
        usfan(
            "train",
            tmp_path / "dslr",
            "--out",
            tmp_path / "source",
            *backbone,
            "--lr",
            0.03,
            *run,
        )
        == 0
    )
    adapt = (
        "adapt",
        tmp_path / "source",
        tmp_path / "webcam",
        "--out",
        tmp_path / "adapted",
        "--epochs",
        1,
    )
    assert usfan(*adapt, *run) == 0
    metrics = evaluate(tmp_path / "adapted", tmp_path / "webcam", tmp_path / "scores")
    assert metrics.keys() >= EVALUATED
    assert metrics["accuracy"] > 40  # chance is 25
    check_predictions(tmp_path / "adapted", tmp_path / "webcam", tmp_path, 24, set(classes))
