"""Bad input gives one clear error; awkward numbers give finite results."""

from __future__ import annotations

import math

import pytest
import torch

from oracles.last_layer import last_layer
from usfan.errors import UsfanError
from usfan.uncertainty.kronecker import KroneckerPosterior

LAYER = last_layer(30, 5, 4)
NAN = float("nan")
INF = float("inf")


def fit(prior=1.0, **changes):
    """Fit with some arguments replaced."""
    given = LAYER._asdict() | {"labels": None} | changes
    return KroneckerPosterior.fit(prior=prior, **given)


def with_value(tensor: torch.Tensor, value: float) -> torch.Tensor:
    tensor = tensor.clone()
    tensor.view(-1)[3] = value
    return tensor


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"features": with_value(LAYER.features, NAN)}, "features must be finite"),
        ({"features": with_value(LAYER.features, INF)}, "features must be finite"),
        ({"features": 1e25 * LAYER.features.float()}, "squares overflow"),
        ({"features": LAYER.features.long()}, "features must be finite floating-point"),
        ({"logits": with_value(LAYER.logits, NAN)}, "logits must be finite"),
        ({"weight": with_value(LAYER.weight, NAN)}, "NaN or infinity"),
        ({"bias": with_value(LAYER.bias, INF)}, "NaN or infinity"),
        (
            {"logits": LAYER.logits[:, :1], "weight": LAYER.weight[:1], "bias": LAYER.bias[:1]},
            "at least two classes",
        ),
        ({"features": LAYER.features[:0], "logits": LAYER.logits[:0]}, "at least one sample"),
        ({"logits": LAYER.logits[:-1]}, "same N"),
        ({"features": LAYER.features[0]}, "N×D"),
        ({"weight": LAYER.weight.T}, "weight must be K×D = 4×5"),
        ({"bias": LAYER.bias[:2]}, "bias must hold 4"),
        ({"labels": LAYER.labels[:-1]}, "one class index per sample"),
        ({"labels": LAYER.labels + 1}, "from 0 to 3"),
        ({"labels": LAYER.labels - 1}, "from 0 to 3"),
        ({"labels": LAYER.labels.double()}, "one class index per sample"),
        ({"prior": 0.0}, "positive number.*got 0"),
        ({"prior": -1.0}, "positive number.*got -1"),
        ({"prior": NAN}, "positive number.*got nan"),
        ({"prior": INF}, "positive number.*got inf"),
        ({"prior": "laplace"}, "evidence.*weight-decay.*got 'laplace'"),
        ({"prior": None}, "got None"),
        ({"prior": "weight-decay"}, "needs weight_decay"),
        ({"prior": "weight-decay", "weight_decay": 0.0}, "needs weight_decay"),
        ({"prior": "weight-decay", "weight_decay": INF}, "needs weight_decay"),
        (
            {"prior": "evidence", "weight": 0 * LAYER.weight, "bias": 0 * LAYER.bias},
            "all weights .* zero",
        ),
        ({"damping": "none"}, "damping must be one of exact, factored"),
    ],
)
def test_bad_input_to_fit(changes, message):
    with pytest.raises(UsfanError, match=message) as caught:
        fit(**changes)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((LAYER.features[:, :3],), "features must be B×5"),
        ((LAYER.features[0],), "features must be B×5"),
        ((LAYER.features, 0.0), "temperature must be positive"),
        ((LAYER.features, NAN), "temperature must be positive"),
        ((LAYER.features, 0.4, 0), "samples at least 1"),
    ],
)
def test_bad_input_to_the_predictive(arguments, message):
    posterior = fit()
    for call in (posterior.predictive, posterior.certainty, posterior.moments):
        with pytest.raises(UsfanError, match=message):
            call(*arguments)


def test_bad_input_to_another_prior():
    with pytest.raises(UsfanError, match="positive number"):
        fit().with_prior(-2.0)
    with pytest.raises(UsfanError, match="damping must be"):
        fit().with_prior(2.0, damping="both")


def test_an_empty_batch_has_an_empty_result():
    assert fit().certainty(LAYER.features[:0]).shape == (0,)
    assert fit().predictive(LAYER.features[:0]).shape == (0, 4)


def check_finite(features, logits, weight, bias, prior="evidence", damping="exact"):
    posterior = KroneckerPosterior.fit(features, logits, weight, bias, prior, damping=damping)
    assert 0 < posterior.prior_precision < math.inf
    assert math.isfinite(posterior.log_evidence)
    for value in (*posterior.moments(features), posterior.logit_variance(features[:4])):
        assert bool(value.isfinite().all())
    weights = posterior.certainty(features)
    classes = logits.shape[1]
    assert float(weights.min()) > 0.98 / classes
    assert float(weights.max()) < 1.02
    return posterior


DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("prior", ["evidence", 5e-4, 1e4])
def test_narrow_types(dtype, prior):
    posterior = check_finite(*(t.to(dtype) for t in LAYER.given), prior=prior)
    assert posterior.weight.dtype == (
        torch.float64 if dtype == torch.float64 else torch.float32
    )
    exact = KroneckerPosterior.fit(*LAYER.given, prior).certainty(LAYER.features)
    torch.testing.assert_close(
        posterior.certainty(LAYER.features).double(), exact, rtol=0, atol=0.03
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("damping", ["exact", "factored"])
@pytest.mark.parametrize("prior", ["evidence", 5e-4])
class TestAwkwardNumbers:
    def test_constant_features(self, dtype, damping, prior):
        features = torch.full((30, 5), 2.0, dtype=torch.float64)
        logits = features @ LAYER.weight.T + LAYER.bias
        check_finite(
            *(t.to(dtype) for t in (features, logits, *LAYER.given[2:])), prior, damping
        )

    def test_zero_features(self, dtype, damping, prior):
        features = torch.zeros(30, 5, dtype=torch.float64)
        logits = LAYER.bias.expand(30, 4)
        check_finite(
            *(t.to(dtype) for t in (features, logits, *LAYER.given[2:])), prior, damping
        )

    def test_one_sample(self, dtype, damping, prior):
        check_finite(
            *(t[:1].to(dtype) for t in LAYER.given[:2]),
            *(t.to(dtype) for t in LAYER.given[2:]),
            prior,
            damping,
        )

    def test_duplicated_samples(self, dtype, damping, prior):
        twice = [t[:3].repeat(20, 1).to(dtype) for t in LAYER.given[:2]]
        check_finite(*twice, *(t.to(dtype) for t in LAYER.given[2:]), prior, damping)

    def test_huge_logits(self, dtype, damping, prior):
        scale = 1e4 / float(LAYER.logits.abs().max())
        features, logits, weight, bias = LAYER.given
        check_finite(
            *(t.to(dtype) for t in (features, scale * logits, scale * weight, scale * bias)),
            prior,
            damping,
        )


@pytest.mark.parametrize(
    ("dtype", "damping"),
    [(torch.float16, "factored"), (torch.bfloat16, "exact"), (torch.float64, "exact")],
)
def test_many_classes_few_samples(dtype, damping):
    layer = last_layer(10, 16, 1000)
    check_finite(*(t.to(dtype) for t in layer.given), damping=damping)


@pytest.mark.parametrize(
    "labels",
    [list, lambda t: t.numpy(), lambda t: t.to(torch.uint8)],
    ids=["list", "array", "uint8"],
)
def test_arrays_will_do(labels):
    given = {
        name: getattr(LAYER, name).numpy() for name in ("features", "logits", "weight", "bias")
    }
    found = fit(**given, labels=labels(LAYER.labels))
    expected = fit(labels=LAYER.labels)
    assert found.log_evidence == expected.log_evidence
    assert torch.equal(
        found.logit_variance(LAYER.features), expected.logit_variance(LAYER.features)
    )
    for name in ("predictive", "certainty", "logits", "logit_variance"):
        of_array = getattr(found, name)(LAYER.features.numpy())
        assert torch.equal(of_array, getattr(expected, name)(LAYER.features))
    for features in ([[1.0], [2.0, 3.0]], "features", None):
        with pytest.raises(UsfanError, match="features must be B×"):
            found.predictive(features)
