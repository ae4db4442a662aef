"""`usfan adapt SOURCE SOURCE … DATA`: each source is adapted, and their mixture is saved, loaded, exported and reported
as any other model."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil

import numpy as np
import pytest
import torch

import usfan
from small_runs import TINY, class_folder, train_tiny
from small_runs import usfan as command
from tiny_models import tiny_model
from usfan.errors import ArtifactError, ConfigError, DataError
from usfan.files import read_yaml
from usfan.maths.unknown import UnknownRule
from usfan.store.model import MixtureModel, SourceModel

RUN = ("--epochs", 2, "--batch-size", 8, "--method", "u-sfan", *TINY)


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """Two source models and a target."""
    root = tmp_path_factory.mktemp("several")
    one = class_folder(root / "one")
    two = class_folder(root / "two", domain=2)
    target = class_folder(root / "target", domain=1)
    return train_tiny(one, root / "a"), train_tiny(two, root / "b", "--seed", 1), target


@pytest.fixture(scope="module")
def run(places, tmp_path_factory):
    out = tmp_path_factory.mktemp("run") / "mixture"
    assert command("adapt", *places, "--out", out, *RUN) == 0
    return out


def folder_of(tmp_path, **more) -> SourceModel:
    members = [tiny_model(seed=0), tiny_model(seed=1)]
    return MixtureModel.of(members, [0.25, 0.75], **more).save(tmp_path / "mixture")


def test_the_run_folder(run, places):
    metrics = json.loads((run / "metrics.json").read_text())
    assert [one["source"] for one in metrics["sources"]] == [str(places[0]), str(places[1])]
    assert sum(one["share"] for one in metrics["sources"]) == pytest.approx(1, abs=1e-3)
    assert {"accuracy", "posterior_ece"} <= metrics["before"].keys() & metrics["after"].keys()
    assert metrics["estimated_accuracy"].keys() == {
        "counts",
        "before",
        "after",
        "reason",
        "possible",
    }
    assert metrics["verdict"]["value"] in ("better", "worse", "unknown")
    assert metrics["guard"]["kept"] in ("adapted", "source")
    assert metrics["settings"]["setting"] == metrics["classes"]["setting"] != "auto"
    assert str(places[0]) in metrics["classes"]["reason"]
    assert read_yaml(run / "config.yaml")["source"] == [str(places[0]), str(places[1])]
    assert {"samples.safetensors", "log.jsonl", "config.json", "changes.csv"} <= {
        p.name for p in run.iterdir()
    }
    assert str(places[0]) not in (run / "config.json").read_text()  # a model folder is shared
    for member in ("member-1", "member-2"):  # a run and a model of its own
        assert json.loads((run / member / "metrics.json").read_text())["method"] == "u-sfan"
        assert usfan.SourceModel.load(run / member).kind == "adapted"


def test_the_mixture_is_that_of_its_members(run, places):
    mixture = usfan.SourceModel.load(run)
    assert isinstance(mixture, MixtureModel)
    assert "members 2 of digits-cnn" in repr(mixture)
    parts = [usfan.SourceModel.load(run / f"member-{n}").predict(places[2]) for n in (1, 2)]
    found = mixture.predict(places[2])
    expected = sum(
        share * part.probs for share, part in zip(mixture.shares, parts, strict=True)
    )
    assert torch.equal(found.label, expected.argmax(dim=1))
    rescaled = (expected.log() / mixture.confidence_temperature).softmax(dim=1)
    torch.testing.assert_close(found.probs, rescaled, rtol=1e-4, atol=1e-5)
    figures = usfan.evaluate(mixture, places[2], progress=False, device="cpu")
    stored = json.loads((run / "metrics.json").read_text())["after"]
    assert figures["accuracy"] == pytest.approx(stored["accuracy"])
    assert figures["posterior_nll"] == pytest.approx(stored["posterior_nll"], abs=1e-3)


def test_it_is_used_as_any_other_model(run, places, tmp_path, capsys):
    assert command("evaluate", run, places[2], *TINY) == 0
    assert "accuracy" in capsys.readouterr().out
    assert command("predict", run, places[2], "--out", tmp_path / "table.csv", *TINY) == 0
    assert len((tmp_path / "table.csv").read_text().splitlines()) == 25
    assert command("report", run, "--out", tmp_path / "page.html") == 0
    assert "u-sfan" in (tmp_path / "page.html").read_text()
    usfan.SourceModel.load(run).report(tmp_path / "other.html", data=usfan.ImageData(places[2]))
    assert (tmp_path / "other.html").stat().st_size > 10_000
    again = usfan.SourceModel.load(run).save(tmp_path / "again")
    assert torch.equal(usfan.SourceModel.load(again).predict(places[2]).probs, usfan.SourceModel.load(run).predict(places[2]).probs)  # fmt: skip  # noqa: E501


def test_a_finished_run_and_an_interrupted_one(run, places, tmp_path, capsys):
    assert command("adapt", *places, "--out", run, "--resume", *RUN) == 0
    assert "finished already" in capsys.readouterr().err
    part = tmp_path / "part"
    shutil.copytree(run, part)
    for name in ("metrics.json", "config.json"):
        (part / name).unlink()
    shutil.rmtree(part / "member-2")
    assert command("adapt", "--out", part, "--resume", *TINY) == 0
    one, two = (json.loads((place / "metrics.json").read_text()) for place in (run, part))
    assert two["after"]["accuracy"] == one["after"]["accuracy"]
    assert two["after"]["nll"] == pytest.approx(one["after"]["nll"], abs=1e-4)
    assert [s["share"] for s in two["sources"]] == pytest.approx(
        [s["share"] for s in one["sources"]], abs=1e-3
    )


def test_from_python(places):
    given = {
        "epochs": 1,
        "batch_size": 8,
        "progress": False,
        "device": "cpu",
        "method": "u-sfan",
    }
    mixture = usfan.adapt(list(places[:2]), places[2], **given)
    assert sum(mixture.shares) == pytest.approx(1)
    assert len(mixture.passes.after) == 24
    # one source is no mixture
    assert usfan.adapt([places[0]], places[2], **given).kind == "adapted"


def test_a_few_labels_go_to_every_source(places, tmp_path, capsys):
    """The figures of the mixture are of the other images, and all its members are told the labels."""
    names = ["class-0/000.png,class-0,name", "class-1/000.png,class-1,name"]
    images = sorted(places[2].glob("*/*.png"))
    others = [path for path in images if path.name != "000.png"]
    judged = [f"{path},{path.parent.name},judge" for path in others]
    judged += [f"{path},skip,judge" for path in images if path.name == "000.png"][2:]
    (tmp_path / "few.csv").write_text("\n".join(["path,label,question", *names, *judged]))
    run = tmp_path / "run"
    assert command("adapt", *places, "--out", run, "--labels", tmp_path / "few.csv", *RUN) == 0
    assert "labels: 2 images of 2 classes" in capsys.readouterr().err
    metrics = json.loads((run / "metrics.json").read_text())
    assert metrics["labelled"]["number"] == len(judged) - judged[-1].endswith("skip,judge")
    assert f"{metrics['labelled']['number']} labels" in metrics["verdict"]["sentence"]
    assert metrics["labels"] == {"count": 2, "classes": 2}
    assert metrics["after"]["count"] == 22
    for member in ("member-1", "member-2"):
        assert json.loads((run / member / "metrics.json").read_text())["labels"]["count"] == 2


def test_labels_are_never_touched_and_classes_are_matched_by_name(places):
    """The second source knows the classes in another order: the mixture puts them in the first one's."""
    source = usfan.SourceModel.load(places[0])
    turned = usfan.SourceModel.load(places[0])
    head = turned.classifier.head
    with torch.no_grad():
        for name, value in dict(head.named_parameters()).items():
            value.copy_(value.flip(0) if value.shape[0] == 3 else value)
            assert name
    posterior = turned.posterior
    moved = {"weight": posterior.weight.flip(0), "bias": posterior.bias.flip(0)}
    moved["class_vectors"] = posterior.class_vectors.flip(0)
    turned = dataclasses.replace(
        turned,
        posterior=dataclasses.replace(posterior, **moved),
        classes=tuple(reversed(turned.classes)),
    )
    given = {"epochs": 0, "progress": False, "device": "cpu", "method": "source-only"}
    mixture = usfan.adapt(
        [source, turned], usfan.ImageData(places[2]).without_labels(), **given
    )
    plain = source.predict(places[2])
    torch.testing.assert_close(mixture.passes.after.probs, plain.probs, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(
        mixture.predict(places[2]).weight, plain.weight, rtol=0, atol=1e-3
    )


def test_open_set(places, tmp_path):
    out = tmp_path / "open"
    wider = class_folder(tmp_path / "wider", classes=4, domain=1)
    assert command("adapt", *places[:2], wider, "--out", out, "--open-set", *RUN) == 0
    metrics = json.loads((out / "metrics.json").read_text())
    assert "hos" in metrics["after"]
    assert usfan.SourceModel.load(out).unknown_rule is not None


def test_private_names_no_path(places, tmp_path, capsys):
    out = tmp_path / "private"
    assert command("adapt", *places, "--out", out, "--private", *RUN) == 0
    assert f"mixed: 0.50 {places[0]}, 0.50 {places[1]}" in capsys.readouterr().err
    for path in out.rglob("*"):
        if path.is_file() and "tfevents" not in path.name:
            assert str(places[0].parent).encode() not in path.read_bytes(), path


def test_exported(tmp_path):
    import onnxruntime

    from usfan.store.onnx import export_onnx, model_hash

    members = [tiny_model(seed=0), tiny_model(seed=1)]
    spec = dataclasses.replace(members[1].spec, mean=(0.4,))  # each normalises for itself
    members[1] = dataclasses.replace(members[1], classes=("<d>", "a", "b|c"), spec=spec)
    mixture = MixtureModel.of(members, [0.4, 0.6])
    path = tmp_path / "model.onnx"
    assert export_onnx(mixture, path) < 1e-3
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    assert json.loads(session.get_modelmeta().custom_metadata_map["classes"]) == [
        "a",
        "b|c",
        "<d>",
    ]
    photographs = torch.randint(256, (4, 28, 28, 1), dtype=torch.uint8).numpy()
    probs, certainty = session.run(["probs", "certainty"], {"images": photographs})
    wanted = mixture.predict(photographs)
    np.testing.assert_allclose(probs, wanted.probs, rtol=0, atol=1e-3)
    np.testing.assert_allclose(certainty, wanted.weight, rtol=0, atol=1e-3)
    assert model_hash(mixture) != model_hash(dataclasses.replace(mixture, shares=(0.6, 0.4)))


def test_round_trip(tmp_path):
    folder = folder_of(tmp_path, method="u-sfan", unknown_rule=UnknownRule("entropy", 0.4))
    again = SourceModel.load(folder)
    assert (again.shares, again.unknown_rule.threshold) == ((0.25, 0.75), 0.4)
    assert sorted(p.name for p in folder.iterdir()) == [
        "config.json",
        "member-1",
        "member-2",
    ]
    images = torch.randint(256, (5, 1, 28, 28), dtype=torch.uint8)
    assert len(again.predict(images)) == 5
    again.with_uncertainty("point").predict(images)


@pytest.mark.parametrize(
    ("place", "value", "said"),
    [
        ("shares", [1.0], "shares must be 2 to 16 numbers from 0 to 1"),
        ("shares", [0.5, "x"], "shares must be 2 to 16 numbers"),
        ("shares", [0.5, float("nan")], "shares must be 2 to 16 numbers"),
        ("shares", [0.5, 0.1], "shares must be numbers whose sum is 1"),
        ("shares", [0.5, 0.25, 0.25], "no member-3 in it"),
        ("shares", [1 / 17] * 17, "shares must be 2 to 16 numbers"),
        ("mixing", "certainty", "mixing must be evidence: adapt the sources again"),
        ("method", 3, "method must be a short text"),
        ("classes", ["a", "b", "c"], "the sources must know the same classes"),
        ("unknown_rule", 3, "unknown_rule: unknown rule: expected the fields"),
    ],
)
def test_a_folder_that_is_off(tmp_path, place, value, said):
    folder = folder_of(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, place: value}))
    with pytest.raises(ArtifactError) as caught:
        SourceModel.load(folder)
    assert said in str(caught.value)


def test_members_that_are_off(tmp_path):
    folder = folder_of(tmp_path)
    nested = folder / "member-2"
    shutil.rmtree(nested)
    shutil.copytree(folder, tmp_path / "copy")
    with pytest.raises(ArtifactError, match="no member-2 in it"):
        SourceModel.load(folder)
    os.symlink(folder / "member-1", nested)
    with pytest.raises(ArtifactError, match="not a folder but a link"):
        SourceModel.load(folder)
    nested.unlink()
    shutil.copytree(tmp_path / "copy", nested)
    with pytest.raises(ArtifactError, match="cannot be a mixture itself"):
        SourceModel.load(folder)


def test_mistakes(run, places, tmp_path, capsys, monkeypatch):
    other = train_tiny(class_folder(tmp_path / "other", classes=2), tmp_path / "two-classes")

    def refused(*words: object) -> str:
        assert command("adapt", *words, "--out", tmp_path / "refused", *RUN) == 2
        assert not (tmp_path / "refused").exists()
        return capsys.readouterr().err.strip().splitlines()[-1]

    assert "sources 1 and 2 differ in class-2" in refused(places[0], other, places[2])
    assert "is a mixture of 2 models, which are adapted one by one" in refused(run, places[2])
    assert "is a mixture of 2 models, which are adapted one by one" in refused(
        run, places[0], places[2]
    )
    with monkeypatch.context() as patch:
        patch.setenv("WORLD_SIZE", "2")
        patch.setenv("LOCAL_WORLD_SIZE", "2")
        assert "this command runs in one process" in refused(*places)
    with pytest.raises(
        ArtifactError, match="is a mixture of 2 models, which are adapted one by one"
    ):
        usfan.adapt([run, places[0]], places[2])
    small = dataclasses.replace(tiny_model(seed=1).spec, size=20)
    with pytest.raises(
        ConfigError, match="sources 1 and 2 take 1×28×28 cut from 28 and 1×20×20 cut from 28"
    ):
        MixtureModel.of(
            [tiny_model(), dataclasses.replace(tiny_model(seed=1), spec=small)], [0.5, 0.5]
        )


def test_models_that_saw_other_images():
    from planning import resolve
    from usfan.adaptation.several import mix_adapted

    given = {"progress": False, "device": "cpu", "method": "source-only"}
    models = [
        usfan.adapt(
            tiny_model(), torch.randint(256, (n, 1, 28, 28), dtype=torch.uint8), **given
        )
        for n in (6, 8)
    ]
    with pytest.raises(DataError, match="must have seen the same images"):
        mix_adapted(models, *resolve({"method": "source-only"}, pretrained=False, classes=3))
