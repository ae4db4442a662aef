"""Models whose certainty comes from the point estimate, MC dropout or an ensemble: saved, loaded, refused, exported."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
import torch

from tiny_models import tiny_model
from usfan.errors import ConfigError
from usfan.store.model import SourceModel
from usfan.uncertainty.ensemble import Ensemble

KINDS = ("point", "mc-dropout", "ensemble")


def with_ensemble(model: SourceModel, members: int = 3) -> SourceModel:
    generator = torch.Generator().manual_seed(1)
    weight = model.posterior.weight
    bias = model.posterior.bias
    noise = torch.randn(members, *weight.shape, generator=generator)
    biases = (
        None if bias is None else bias + torch.randn(members, len(weight), generator=generator)
    )
    return dataclasses.replace(
        model, uncertainty=Ensemble(weight, bias, weight + noise, biases)
    )


def model_with(kind: str, **options: object) -> SourceModel:
    model = tiny_model(**options)
    return with_ensemble(model) if kind == "ensemble" else model.with_uncertainty(kind, 0.3)


@pytest.fixture
def folder(tmp_path):
    """Of a model with an ensemble."""
    return model_with("ensemble").save(tmp_path / "model")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bias", [True, False])
def test_round_trip(kind, bias, tmp_path):
    model = model_with(kind, head_bias=bias)
    again = SourceModel.load(model.save(tmp_path))
    assert again.uncertainty.kind == kind
    assert again.uncertainty.settings() == model.uncertainty.settings()
    assert (tmp_path / "ensemble.safetensors").exists() == (kind == "ensemble")
    assert "pickle" not in " ".join(path.name for path in tmp_path.iterdir())
    images = torch.randint(256, (5, 1, 28, 28), dtype=torch.uint8)
    for name in ("probs", "label", "entropy", "weight"):
        assert torch.equal(
            getattr(model.predict(images), name), getattr(again.predict(images), name)
        ), name
    plain = tiny_model(head_bias=bias).predict(images)
    assert torch.equal(plain.label, again.predict(images).label)  # the point estimate decides
    assert not torch.allclose(plain.weight, again.predict(images).weight)
    assert kind in repr(again)


def test_a_folder_says_which_kind(tmp_path):
    kinds = {}
    for kind in (*KINDS, "posterior"):
        path = model_with(kind).save(tmp_path / kind)
        kinds[kind] = json.loads((path / "config.json").read_text())["uncertainty"]
    assert kinds == {
        "point": {"kind": "point"},
        "mc-dropout": {"kind": "mc-dropout", "rate": 0.3},
        "ensemble": {"kind": "ensemble", "members": 3},
        "posterior": {"kind": "kronecker"},
    }


def test_a_folder_that_does_not_say_has_the_posterior(folder, edit_config):
    edit_config("uncertainty", ...)
    assert SourceModel.load(folder).uncertainty.kind == "kronecker"


FIELDS = [
    ("uncertainty", 3, "uncertainty must be a table"),
    (
        "uncertainty",
        {},
        "uncertainty.kind must be one of kronecker, point, mc-dropout, ensemble",
    ),
    ("uncertainty.kind", "deep", "uncertainty.kind must be one of"),
    ("uncertainty.members", 1, "uncertainty.members must be a whole number from 2 to 64"),
    ("uncertainty.members", 10**9, "uncertainty.members must be a whole number from 2 to 64"),
    (
        "uncertainty.members",
        4,
        "ensemble.safetensors: 'member_weights' has shape (3, 3, 8), expected (4, 3, 8)",
    ),
    ("uncertainty", {"kind": "mc-dropout"}, "uncertainty.rate must be a number from"),
    (
        "uncertainty",
        {"kind": "mc-dropout", "rate": 1.0},
        "uncertainty.rate must be a number from",
    ),
    (
        "uncertainty",
        {"kind": "mc-dropout", "rate": float("nan")},
        "uncertainty.rate must be a number from",
    ),
]


@pytest.mark.parametrize(("place", "value", "said"), FIELDS)
def test_a_field_that_is_off(refuse, folder, edit_config, place, value, said):
    edit_config(place, value)
    refuse(folder, said)


def test_a_file_that_is_off(refuse, folder, edit_tensors):
    edit_tensors("ensemble", lambda t: t["member_weights"].__setitem__((0, 0, 0), float("nan")))
    refuse(folder, "ensemble.safetensors: 'member_weights' holds NaN")
    edit_tensors("ensemble", lambda t: t.update(member_weights=t["member_weights"][:2]))
    refuse(
        folder, "ensemble.safetensors: 'member_weights' has shape (2, 3, 8), expected (3, 3, 8)"
    )
    edit_tensors(
        "ensemble",
        lambda t: (
            t.update(more=torch.zeros(1)) or t.update(member_weights=torch.zeros(3, 3, 8))
        ),
    )
    refuse(folder, "ensemble.safetensors: unexpected tensor 'more'")
    (folder / "ensemble.safetensors").write_bytes(b"\x80\x04.")
    refuse(folder, "ensemble.safetensors: not readable as safetensors")
    (folder / "ensemble.safetensors").unlink()
    refuse(folder, "no ensemble.safetensors in it")


def test_another_uncertainty_of_the_same_model(caplog):
    model = tiny_model()
    assert model.with_uncertainty("auto") is model
    assert (
        model.with_uncertainty("point").with_uncertainty("posterior").uncertainty
        is model.posterior
    )
    with pytest.raises(
        ConfigError, match="this model has no ensemble: it is trained with the source data"
    ):
        model.with_uncertainty("ensemble")
    with pytest.raises(
        ConfigError, match="uncertainty must be one of posterior, point, mc-dropout, ensemble"
    ):
        model.with_uncertainty("deep")
    trained = tiny_model(dropout=0.4)
    assert trained.with_uncertainty("mc-dropout").uncertainty.rate == 0.4
    assert not caplog.records
    assert model.with_uncertainty("mc-dropout").uncertainty.rate == 0.1
    assert "trained without dropout before its last layer" in caplog.text


@pytest.mark.parametrize("kind", [*KINDS, "posterior"])
@pytest.mark.parametrize("bias", [True, False])
def test_draws_in_a_graph_are_those_of_torch(kind, bias):
    from usfan.store.onnx import model_hash

    model = model_with(kind, head_bias=bias)
    features = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    found = (
        model.uncertainty.part_draws(features, 0.4, 16)(slice(None)).softmax(dim=-1).mean(dim=1)
    )
    torch.testing.assert_close(
        found, model.uncertainty.predictive(features, 0.4, 16), rtol=0, atol=1e-5
    )
    assert kind == "posterior" or model_hash(model) != model_hash(
        dataclasses.replace(model, uncertainty=model.posterior)
    )


@pytest.mark.parametrize("kind", ["mc-dropout", "ensemble"])
def test_exported(kind, tmp_path):
    import onnxruntime

    from usfan.store.onnx import export_onnx

    model = model_with(kind)
    path = tmp_path / "model.onnx"
    assert export_onnx(model, path) < 1e-3
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    assert session.get_modelmeta().custom_metadata_map["uncertainty"] == kind
    photographs = np.random.default_rng(0).integers(0, 256, (3, 28, 28, 1), dtype=np.uint8)
    found = session.run(["certainty"], {"images": photographs})[0]
    wanted = model.predict(photographs).weight
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-3)
