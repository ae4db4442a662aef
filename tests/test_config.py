"""Settings: types, bounds, presets, and what every field says of itself."""

import dataclasses

import pytest

from planning import resolve
from usfan.adaptation.methods import METHODS
from usfan.config import (
    AdaptConfig,
    RuntimeConfig,
    TrainConfig,
    field_docs,
    make_config,
)
from usfan.errors import ConfigError


def resolved(given):
    return resolve(given, pretrained=False, classes=10)


@pytest.mark.parametrize("kind", [TrainConfig, AdaptConfig, RuntimeConfig])
def test_every_field_has_help(kind):
    docs = field_docs(kind)
    assert {f.name for f in dataclasses.fields(kind)} <= docs.keys()
    assert all(docs.values())


@pytest.mark.parametrize("method", METHODS.values(), ids=lambda method: method.name)
def test_every_setting_of_a_method_has_help(method):
    assert method.settings().keys() <= {
        name for name, text in method.setting_docs().items() if text
    }


def test_a_field_of_few_values_takes_these_and_no_others():
    for kind in (TrainConfig, AdaptConfig, RuntimeConfig):
        for item in dataclasses.fields(kind):
            if "choices" not in item.metadata:
                continue
            choices = item.metadata["choices"]
            for value in choices:
                assert getattr(make_config(kind, {item.name: value}), item.name) == value
            with pytest.raises(ConfigError, match=f"did you mean {choices[0]}"):
                make_config(kind, {item.name: choices[0] + "x"})


def test_text_from_a_flag_becomes_what_the_field_holds():
    config = make_config(
        AdaptConfig, {"epochs": "3", "lr": "1e-3", "prior": "0.5", "batch_size": 8.0}
    )
    assert (config.epochs, config.lr, config.prior, config.batch_size) == (3, 1e-3, 0.5, 8)
    assert make_config(TrainConfig, {"prior": "weight-decay"}).prior == "weight-decay"
    assert make_config(AdaptConfig, {"prior": None}).prior is None
    assert make_config(AdaptConfig, {"guard": "off"}).guard is False
    assert make_config(RuntimeConfig, {"compile": True}).compile == "on"  # as YAML reads on
    assert (
        resolved({"method": "shot", "pseudo_label_weight": "0.5"})[1].settings()[
            "pseudo_label_weight"
        ]
        == 0.5
    )
    assert resolved({"balance": "off"})[1].settings()["balance"] is False


@pytest.mark.parametrize(
    "given",
    [
        {"epochs": "2.5"},
        {"epochs": True},
        {"epochs": "inf"},
        {"lr": "fast"},
        {"lr": float("nan")},
        {"lr": -1},
        {"lr": float("inf")},
        {"guard": "maybe"},
        {"gamma": 1.5},
        {"objective_scale": -1},
        {"diversity_memory": 2},
        {"pseudo_label_weight": -1, "method": "shot"},
        {"pseudo_label_warmup": -1, "method": "shot"},
        {"separation": float("nan"), "setting": "open"},
        {"prior": 0},
        {"prior": -3},
        {"prior": float("nan")},
        {"prior": "guess"},
        {"batch_size": 1},
        {"samples": 0},
        {"temperature": 0},
        {"seed": -1},
        {"seed": 2**40},
        {"refresh": "never"},
        {"split": "guess"},
        {"damping": "none"},
        {"method": "dann"},
        {"open_set": True, "partial_set": True},
        {"epohcs": 3},
    ],
    ids=str,
)
def test_what_is_not_allowed(given):
    with pytest.raises(ConfigError) as error:
        resolved(given)
    name = next(iter(given))
    assert name.replace("epohcs", "epochs").replace("open_set", "open-set") in str(error.value)


def test_the_paper_preset_is_the_paper_to_the_letter_and_flags_go_on_top():
    for name, own in (("paper", "u-sfan"), ("shot", "shot"), ("default", "u-sfan++")):
        assert (
            resolve({"preset": name}, pretrained=True, classes=31, witness=True)[1].name == own
        )
    assert (
        resolve({"preset": "paper", "method": "shot-im"}, pretrained=True, classes=31)[1].name
        == "shot-im"
    )
    config, method = resolved({"preset": "paper"})
    own = method.settings()
    literal = (
        config.prior,
        own["refresh"],
        own["normalise_weights"],
        own["objective_scale"],
        own["temperature"],
    )
    assert literal == (5e-4, "step", False, 1.0, 0.4)
    assert (config.guard, own["split"], own["gamma"], own["anneal"]) == (
        False,
        "entropy",
        0.5,
        False,
    )
    above, _ = resolved({"preset": "paper", "prior": 2.0, "guard": True})
    assert (above.prior, above.guard) == (2.0, True)
    assert make_config(TrainConfig, {"preset": "paper"}).prior == 5e-4
    with pytest.raises(ConfigError, match="did you mean paper"):
        resolved({"preset": "papre"})
