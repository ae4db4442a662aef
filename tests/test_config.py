"""Settings: types, bounds, presets, and what every field says of itself."""

import dataclasses

import pytest

from usfan.config import SPLITS, AdaptConfig, RuntimeConfig, TrainConfig, field_docs, make_config
from usfan.errors import ConfigError
from usfan.scoring.unknown import SCORES


@pytest.mark.parametrize("kind", [TrainConfig, AdaptConfig, RuntimeConfig])
def test_every_field_has_help(kind):
    docs = field_docs(kind)
    assert {f.name for f in dataclasses.fields(kind)} <= docs.keys()
    assert all(docs.values())


def test_text_from_a_flag_becomes_what_the_field_holds():
    config = make_config(AdaptConfig, {"epochs": "3", "lr": "1e-3", "prior": "0.5", "batch_size": 8.0})
    assert (config.epochs, config.lr, config.prior, config.batch_size) == (3, 1e-3, 0.5, 8)
    assert make_config(TrainConfig, {"prior": "weight-decay"}).prior == "weight-decay"
    assert make_config(AdaptConfig, {"pseudo_label_weight": None}).pseudo_label_weight is None


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
        {"guard": "on"},
        {"gamma": 1.5},
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
        make_config(AdaptConfig, given)
    name = next(iter(given))
    assert name.replace("epohcs", "epochs").replace("open_set", "open-set") in str(error.value)


def test_the_paper_preset_is_the_paper_to_the_letter_and_flags_go_on_top():
    paper = make_config(AdaptConfig, {"preset": "paper"})
    literal = (paper.prior, paper.refresh, paper.normalise_weights, paper.objective_scale, paper.temperature)
    assert literal == (5e-4, "step", False, 1.0, 0.4)
    assert (paper.guard, paper.split, paper.gamma, paper.neighbours) == (False, "entropy", 0.5, 0)
    assert make_config(AdaptConfig, {"preset": "paper", "prior": 2.0, "guard": True}).prior == 2.0
    assert make_config(TrainConfig, {"preset": "paper"}).prior == 5e-4


def test_the_scores_that_split_are_those_there_are():
    assert set(SPLITS) == set(SCORES)
