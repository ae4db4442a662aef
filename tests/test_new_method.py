"""A method from outside the package, one row and one term, runs through `adapt`, `reproduce` and `report`. It needs
nothing but `import usfan`.

The term draws each prediction to the bank's predictions of the sample's nearest neighbours in the features of the last
pass, and the batch apart: −mean_i [p_i·q_i] + w Σ_k p̂_k log p̂_k.
"""

import json
from dataclasses import dataclass

import pytest
import torch
from PIL import Image
from torch import Tensor

import usfan as package
from lookalikes import make, picture
from small_runs import TINY, adapt_tiny, class_folder, train_tiny, usfan


@dataclass
class Neighbourly(package.Term):
    """Predictions of neighbours are alike."""

    near: int = 3
    """Neighbours that a prediction is drawn to."""
    spread_weight: float = 1.0
    """Weight of the diversity of the batch."""

    def start(self, context: package.Context) -> None:
        self.bank = torch.zeros(context.count, context.classes, device=context.device)

    def refresh(self, outputs: package.Outputs) -> None:
        features = torch.nn.functional.normalize(outputs.features, dim=1)
        nearest = (features @ features.T).topk(self.near + 1).indices
        self.bank.copy_(outputs.probs[nearest[:, 1:]].mean(dim=1))

    def __call__(self, batch: package.Batch) -> Tensor:
        alike = (batch.probs * self.bank[batch.samples]).sum(dim=1)
        together = self.context.mean(alike, batch)
        batch.notes["loss_together"] = -together
        diversity = package.information_maximization(batch.logits, gamma=1.0)
        return self.spread_weight * diversity - together


@pytest.fixture
def neighbourly():
    package.METHODS.add(
        package.Method(
            "neighbourly",
            "neighbours are predicted alike",
            (Neighbourly(),),
            stage={"epochs": 3},
        )
    )
    yield package.METHODS["neighbourly"]
    del package.METHODS["neighbourly"]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    root = tmp_path_factory.mktemp("data")
    return {
        "source": class_folder(root / "source", images=12),
        "target": class_folder(root / "target", images=12, domain=3),
    }


@pytest.fixture(scope="module")
def source(data, tmp_path_factory):
    return train_tiny(data["source"], tmp_path_factory.mktemp("runs") / "source", "--epochs", 6)


def test_python(neighbourly, source, data):
    model = package.SourceModel.load(source)
    given = {"batch_size": 12, "guard": False}
    adapted = package.adapt(
        model, package.ImageData(data["target"]), "neighbourly", spread_weight=0.5, **given
    )
    records = adapted.history["records"][1:]
    assert len(records) == 3  # the row's epochs
    assert records[-1]["loss_together"] < records[0]["loss_together"] < 0
    settings = adapted.history["settings"]
    assert (settings["method"], settings["near"], settings["spread_weight"]) == (
        "neighbourly",
        3,
        0.5,
    )
    with pytest.raises(package.ConfigError, match="did you mean spread_weight"):
        package.adapt(
            model, package.ImageData(data["target"]), "neighbourly", spread_weigth=0.5
        )
    assert set(neighbourly.setting_docs()) >= {"near", "spread_weight"}


def test_the_command_line_and_the_report(neighbourly, source, data, tmp_path):
    method = ("--method", "neighbourly", "--guard", "off")
    one = adapt_tiny(source, data["target"], tmp_path / "one", *method, "--set", "near=2")
    two = adapt_tiny(source, data["target"], tmp_path / "two", "--guard", "off")
    assert json.loads((one / "metrics.json").read_text())["method"] == "neighbourly"
    assert package.SourceModel.load(one).method == "neighbourly"
    lines = [json.loads(line) for line in (one / "log.jsonl").read_text().splitlines()]
    assert all(
        "loss_together" in line for line in lines if line["event"] == "epoch" and line["epoch"]
    )
    assert usfan("report", one, two, "--out", tmp_path / "report.html") == 0
    page = (tmp_path / "report.html").read_text()
    assert "neighbourly" in page
    assert "near" in page


def test_a_study_of_a_benchmark(neighbourly, tmp_path, capsys):
    root = make("digits", tmp_path / "data")
    out = tmp_path / "study"
    fast = (
        "--backbone",
        "lenet",
        "--source-epochs",
        1,
        "--epochs",
        1,
        "--seeds",
        0,
        "--pairs",
        "M-U",
        *TINY,
    )
    methods = ("--methods", "source-only", "neighbourly")
    assert (
        usfan(
            "reproduce",
            "digits",
            "--data",
            root,
            "--out",
            out,
            "--allow-classes",
            *fast,
            *methods,
        )
        == 0
    )
    assert "| neighbourly |" in (out / "table.md").read_text()
    row = json.loads((out / "cells" / "neighbourly_M-U_0.json").read_text())
    assert row["settings"]["near"] == 3
    assert usfan("report", out, "--out", tmp_path / "report.html") == 0
    assert "neighbourly" in (tmp_path / "report.html").read_text()
    capsys.readouterr()


def test_the_row_is_gone_afterwards(source, refused, tmp_path):
    Image.fromarray(picture(0, 0, 0)).save(tmp_path / "a.png")
    line = refused(
        "adapt", source, tmp_path, "--out", tmp_path / "run", "--method", "neighbourly", *TINY
    )
    assert "neighbourly" in line
