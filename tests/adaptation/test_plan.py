"""From what a user gives to a run with nothing left open: presets, the user's own, then facts that can be seen."""

import dataclasses

import pytest
from spying import squares

import usfan
from planning import make_plan
from usfan.adaptation.methods import METHODS, Method
from usfan.config import AdaptConfig
from usfan.errors import ConfigError

SCRATCH = False
PRETRAINED = True
CLASSES = 3


def chosen(pretrained: bool = SCRATCH, classes: int = CLASSES, **given) -> dict:
    """Every setting of the run."""
    plan = make_plan(given, pretrained=pretrained, classes=classes)
    if plan.config.setting == "auto":
        plan = plan.with_setting("closed")
    return plan.settings()


@pytest.mark.parametrize(
    "settings",
    [
        {"balance": True, "normalise_weights": False},
        {"balance": True, "refresh": "step"},
        {"anneal": True, "refresh": "step"},
        {"temperature": 0.0},
        {"weights": "epistemic"},
        {"refresh": "never"},
        {"gamma": 1.5},
        {"objective_scale": float("nan")},
        {"objective_scale": -1.0},
        {"diversity_memory": 1.0},
        {"pseudo_label_weight": float("nan")},
        {"pseudo_label_warmup": -1},
        {"pseudo_label_warmup": 1.5},
        {"separation": -1.0},
        {"split": "size"},
        {"tune": "head"},
        {"setting": "half-open"},
        {"open_set": True, "partial_set": True},
        {"open_set": True, "setting": "partial"},
        {"preset": "papers"},
        {"epochs": -1},
        {"method": "u-sfam"},
    ],
    ids=str,
)
def test_settings_that_cannot_be_kept_are_refused(settings):
    with pytest.raises(ConfigError) as caught:
        chosen(**{"method": "u-sfan+", **settings})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("method", "setting", "said"),
    [
        ("shot-im", "pseudo_label_weight", "belongs to .*u-sfan\\+"),
        ("u-sfan", "objective_scal", "did you mean objective_scale"),
        ("u-sfan", "weight_power", "unknown setting"),
        ("source-only", "gamma", "belongs to .*shot-im"),
    ],
)
def test_a_method_takes_its_own_settings_only(method, setting, said):
    with pytest.raises(ConfigError, match=said):
        chosen(method=method, **{setting: 0.5})


def test_short_forms_of_the_setting():
    assert chosen(open_set=True)["setting"] == chosen(setting="open")["setting"] == "open"
    assert chosen(partial_set=True)["setting"] == "partial"
    plan = make_plan({"open_set": False}, pretrained=False, classes=3)
    assert plan.config.setting == "auto"


def test_defaults_that_depend_on_other_settings():
    assert chosen()["balance"]
    assert not chosen(normalise_weights=False)["balance"]
    assert not chosen(refresh="step")["balance"]
    assert not chosen(method="shot-im")["balance"]
    enough = 4 * CLASSES
    assert chosen(batch_size=enough)["diversity_memory"] == 0
    assert chosen(batch_size=enough - 1)["diversity_memory"] == 0.9
    assert chosen(batch_size=enough, diversity_memory=0.5)["diversity_memory"] == 0.5
    assert chosen(method="shot-im", batch_size=enough - 1)["diversity_memory"] == 0


@pytest.mark.parametrize(
    ("method", "settings", "scratch", "pretrained"),
    [  # (annealed, epochs before pseudo-labels)
        ("u-sfan", {}, (False, None), (True, None)),
        ("u-sfan+", {}, (False, 1), (False, 0)),
        ("shot", {}, (False, 0), (False, 0)),
        ("u-sfan", {"refresh": "step"}, (False, None), (False, None)),
        ("u-sfan", {"normalise_weights": False}, (False, None), (False, None)),
        ("u-sfan", {"epochs": 3}, (False, None), (False, None)),
        ("u-sfan+", {"epochs": 3}, (False, 0), (False, 0)),
        ("u-sfan", {"open_set": True}, (False, None), (False, None)),
        ("u-sfan+", {"open_set": True}, (False, 0), (False, 0)),
        ("u-sfan", {"partial_set": True}, (False, None), (False, None)),
        ("u-sfan+", {"partial_set": True}, (False, 0), (False, 0)),
        ("u-sfan", {"epochs": 4}, (False, None), (True, None)),
        ("u-sfan+", {"epochs": 4}, (False, 1), (False, 0)),
        (
            "u-sfan",
            {"preset": "paper", "refresh": "epoch", "normalise_weights": True},
            (False, None),
            (False, None),
        ),
        ("u-sfan+", {"preset": "paper", "pseudo_label_warmup": None}, (False, 0), (False, 0)),
        ("u-sfan", {"preset": "paper"}, (False, None), (False, None)),
        (
            "u-sfan+",
            {"preset": "paper", "refresh": "epoch", "normalise_weights": True},
            (False, 0),
            (False, 0),
        ),
        ("u-sfan", {"anneal": True, "open_set": True}, (True, None), (True, None)),
        ("u-sfan", {"anneal": False}, (False, None), (False, None)),
        ("u-sfan+", {"pseudo_label_warmup": 0}, (False, 0), (False, 0)),
        ("u-sfan+", {"pseudo_label_warmup": 2, "epochs": 3}, (False, 2), (False, 2)),
    ],
)
def test_schedules_by_method_and_facts(method, settings, scratch, pretrained):
    for start, wanted in ((SCRATCH, scratch), (PRETRAINED, pretrained)):
        found = chosen(start, method=method, **settings)
        assert (found["anneal"], found.get("pseudo_label_warmup")) == wanted


@pytest.mark.parametrize(
    ("given", "name", "scratch", "pretrained"),
    [
        ({"open_set": True}, "separation", 1.0, 0.0),
        ({"separation": 0.5}, "separation", 0.5, 0.5),
        ({}, "tune", "all", "auto"),
        ({"tune": "all"}, "backbone_lr_scale", 1.0, 0.1),
        ({"backbone_lr_scale": 0.3}, "backbone_lr_scale", 0.3, 0.3),
        ({"method": "shot"}, "pseudo_label_weight", 0.1, 0.3),
        ({"method": "shot", "pseudo_label_weight": 0.2}, "pseudo_label_weight", 0.2, 0.2),
    ],
    ids=str,
)
def test_what_pretrained_weights_decide(given, name, scratch, pretrained):
    assert chosen(SCRATCH, **given)[name] == scratch
    assert chosen(PRETRAINED, **given)[name] == pretrained


@pytest.mark.parametrize("method", METHODS)
def test_nothing_is_left_open_and_what_is_recorded_makes_the_same_run(method):
    """But for what the source model brings along (views, posterior, rate of dropout), and what is decided
    by a look at the target: how much of a pretrained backbone moves."""
    for setting in ("closed", "open", "partial"):
        for pretrained in (SCRATCH, PRETRAINED):
            found = chosen(pretrained, method=method, setting=setting)
            if found["tune"] == "auto":
                assert pretrained == PRETRAINED
                found = chosen(pretrained, method=method, setting=setting, tune="new")
            assert {k for k, v in found.items() if v is None} <= {
                "augment",
                "prior",
                "damping",
                "curvature",
                "dropout_rate",
            }
            again = make_plan(found, pretrained=not pretrained, classes=100)
            assert again.settings() == found


@pytest.mark.parametrize(
    ("pretrained", "method", "name"),
    [(True, "u-sfan", "anneal"), (False, "u-sfan+", "pseudo_label_warmup")],
)
def test_what_depends_on_a_setting_to_be_estimated_is_recorded_as_open(
    pretrained, method, name
):
    """Else a resumed run that finds new classes would take the values of a closed set."""
    facts = {"pretrained": pretrained, "classes": 3}
    begun = make_plan({"method": method, "epochs": 6}, **facts).settings()
    assert begun["setting"] == "auto"
    assert begun[name] is None
    for setting in ("closed", "open"):
        first = make_plan({"method": method, "epochs": 6, "setting": setting}, **facts)
        again = make_plan({**begun, "setting": setting}, **facts)
        assert again.settings() == first.settings()
    given = {"anneal": True, "pseudo_label_warmup": 2}[name]
    plan = make_plan({"method": method, "epochs": 6, name: given}, **facts)
    assert plan.settings()[name] == given


NAMES = ("digits-cnn", "lenet", "resnet50", "my-own-network")


@pytest.mark.parametrize("weights", [None, {"from": "file", "hash": "0" * 32}])
def test_the_name_of_a_network_decides_nothing(source, weights):
    """The same network under another name gives the same settings, and the same bits."""
    runs = []
    for name in NAMES:
        renamed = dataclasses.replace(
            source, architecture={"backbone": name, "bottleneck": 16, "pretrained": weights}
        )
        assert renamed.pretrained == (weights is not None)
        runs.append(
            usfan.adapt(renamed, squares(), "u-sfan+", epochs=1, batch_size=8, guard=False)
        )
    settings = [run.history["settings"] for run in runs]
    assert settings == [settings[0]] * len(NAMES)
    assert settings[0]["pseudo_label_weight"] == (0.1 if weights is None else 0.3)
    states = [run.classifier.state_dict() for run in runs]
    assert all(states[0][k].equal(other[k]) for other in states for k in states[0])


def test_presets_are_the_literal_settings():
    paper = chosen(method="u-sfan", preset="paper")
    expected = {
        "prior": 5e-4,
        "guard": False,
        "refresh": "step",
        "normalise_weights": False,
        "objective_scale": 1.0,
    }
    assert expected.items() <= paper.items()
    assert not paper["balance"]
    assert not paper["anneal"]
    assert (paper["gamma"], paper["temperature"], paper["diversity_memory"]) == (0.5, 0.4, 0.0)
    own = chosen(method="u-sfan", preset="paper", objective_scale=3.0, guard=True)
    assert (own["objective_scale"], own["guard"]) == (3.0, True)
    shot = chosen(method="shot", preset="shot", open_set=True)
    assert (shot["setting"], shot["split"], shot["plain_split"], shot["guard"]) == (
        "open",
        "entropy",
        True,
        False,
    )


def test_a_row_sets_the_defaults_of_its_stage():
    METHODS.add(
        Method(
            "short", "few epochs", METHODS["shot-im"].terms, stage={"epochs": 2, "tune": "norm"}
        )
    )
    try:
        assert (chosen(method="short")["epochs"], chosen(method="short")["tune"]) == (2, "norm")
        assert chosen(method="short", epochs=3)["epochs"] == 3
    finally:
        del METHODS["short"]


def test_a_name_is_taken_once():
    with pytest.raises(ConfigError, match="already"):
        METHODS.add(Method("shot", "another"))


def test_every_setting_is_documented():
    for method in METHODS.values():
        assert set(method.setting_docs()) == set(method.settings())
        assert all(method.setting_docs().values())
        assert not set(method.settings()) & set(AdaptConfig.__dataclass_fields__)
