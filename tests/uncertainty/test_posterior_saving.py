"""What is saved comes back the same; moving between types keeps the answers; the layer it came from may go on."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load, save

from oracles.last_layer import last_layer, shifted
from usfan.uncertainty.kronecker import KroneckerPosterior

LAYER = last_layer(200, 12, 7, dtype=torch.float32)
NEW = shifted(LAYER.features, 20)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    ("damping", "curvature"), [("exact", "sum"), ("factored", "sum"), ("factored", "mean")]
)
def test_saved_and_loaded(bias, damping, curvature):
    head = (LAYER.weight, LAYER.bias if bias else None)
    form = {"damping": damping, "curvature": curvature}
    posterior = KroneckerPosterior.fit(
        LAYER.features, LAYER.logits, *head, 20.0, labels=LAYER.labels, **form
    )
    tensors = load(save(posterior.tensors()))
    settings = json.loads(json.dumps(posterior.settings()))
    assert ("bias" in tensors) == bias
    again = KroneckerPosterior(**({"bias": None} | tensors), **settings)
    assert again.settings() == posterior.settings()
    assert again.log_evidence == posterior.log_evidence
    assert torch.equal(again.certainty(NEW), posterior.certainty(NEW))
    assert torch.equal(again.logit_variance(NEW), posterior.logit_variance(NEW))


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [
        (torch.float64, 1e-5),
        (torch.float32, 0.0),
        (torch.bfloat16, 0.03),
        (torch.float16, 5e-3),
    ],
)
@pytest.mark.parametrize("bias", [True, False])
def test_another_type(dtype, tolerance, bias):
    head = (LAYER.weight, LAYER.bias if bias else None)
    posterior = KroneckerPosterior.fit(LAYER.features, LAYER.logits, *head, 5.0)
    moved = posterior.to(dtype=dtype)
    assert {t.dtype for t in moved.tensors().values()} == {dtype}
    assert set(moved.tensors()) == set(posterior.tensors())
    weights = moved.certainty(NEW)
    assert weights.dtype == dtype
    torch.testing.assert_close(
        weights.float(), posterior.certainty(NEW), rtol=0, atol=tolerance
    )


def test_another_device():
    moved = KroneckerPosterior.fit(*LAYER.given).to("meta")
    assert {t.device.type for t in moved.tensors().values()} == {"meta"}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_gives_the_same():
    posterior = KroneckerPosterior.fit(*LAYER.given)
    moved = posterior.to("cuda")
    torch.testing.assert_close(
        moved.certainty(NEW.cuda()).cpu(), posterior.certainty(NEW), rtol=0, atol=1e-4
    )


def test_features_of_another_type_are_taken():
    posterior = KroneckerPosterior.fit(*LAYER.given)
    torch.testing.assert_close(posterior.certainty(NEW.double()), posterior.certainty(NEW))


def test_training_the_layer_on_does_not_change_the_posterior():
    head = torch.nn.Linear(12, 7)
    posterior = KroneckerPosterior.fit(
        LAYER.features, head(LAYER.features), head.weight, head.bias
    )
    before = posterior.certainty(NEW)
    with torch.no_grad():
        head.weight.mul_(3)
        head.bias.add_(1)
    assert not posterior.weight.requires_grad
    assert torch.equal(posterior.certainty(NEW), before)
