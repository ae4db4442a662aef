"""Gives every setting of a run a value: from the preset, the user, and the facts."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from usfan.adaptation.facts import Facts
from usfan.adaptation.ladder import Rung
from usfan.adaptation.methods import METHODS, Method, find_method
from usfan.config import SETTINGS, AdaptConfig, make_config, read_preset, unknown_setting
from usfan.errors import ConfigError
from usfan.posterior.kronecker import KroneckerPosterior


def resolve(
    given: Mapping[str, Any], *, pretrained: bool, classes: int, witness: bool = False
) -> tuple[AdaptConfig, Method]:
    """The settings of a run and its method, with nothing left open. Names are those of `AdaptConfig` and the method's
    own; `open_set` and `partial_set` are short forms of `setting`."""
    given = {name: value for name, value in given.items() if value is not None}
    given = with_setting(given)
    preset = read_preset(str(given.get("preset", "default")), "adapt")
    if given.get("method", "auto") == "auto":
        usual = "u-sfan++" if witness and given.get("witness") != "none" else "u-sfan"
        given["method"] = preset.get("method", usual)
    method = find_method(str(given["method"]))
    fields = {f.name for f in dataclasses.fields(AdaptConfig)}
    own = {name: value for name, value in given.items() if name not in fields}
    for name in own:
        if name not in method.settings():
            refuse(name, method, fields)
    base = {name: value for name, value in {**method.stage, **preset}.items() if name in fields}
    config = make_config(AdaptConfig, {**base, **{n: v for n, v in given.items() if n in fields}})
    chosen = {name: value for name, value in preset.items() if name in method.settings()}
    setting = "closed" if config.setting == "auto" else config.setting
    facts = Facts(pretrained, classes, config.batch_size, config.epochs, setting)
    method = method.with_settings({**chosen, **own}).decide(facts)
    if config.tune == "auto" and not pretrained:
        config = dataclasses.replace(config, tune="all")
    if config.tune != "auto":
        config = with_rung(config, Rung(config.tune, ""), pretrained=pretrained)
    return config, method


FOLDS = 5
"""Parts of the given labels that are left out in turn, if an adaptation takes seconds."""
MOVING_LABEL_WEIGHT = 0.15
"""Weight of given labels if the whole network is trained. With 10 labels of digits, 1 cost two points (labels seen)."""


def with_rung(config: AdaptConfig, rung: Rung, *, pretrained: bool) -> AdaptConfig:
    """The settings with `tune` and the backbone's learning rate decided."""
    scale = rung.backbone_lr_scale or (0.1 if pretrained else 1.0)
    given = config.backbone_lr_scale
    folds, weight = (FOLDS, 1.0) if rung.tune == "new" else (0, MOVING_LABEL_WEIGHT)
    return dataclasses.replace(
        config,
        tune=rung.tune,
        backbone_lr_scale=scale if given is None else given,
        label_folds=folds if config.label_folds is None else config.label_folds,
        given_label_weight=weight if config.given_label_weight is None else config.given_label_weight,
    )


def with_setting(given: dict[str, Any]) -> dict[str, Any]:
    """`open_set` and `partial_set` as `setting`."""
    short = {"open_set": "open", "partial_set": "partial"}
    asked = [value for name, value in short.items() if given.pop(name, False)]
    if len(asked) > 1:
        raise ConfigError("open-set and partial-set exclude each other: choose one, or --setting universal")
    if asked and given.get("setting", asked[0]) != asked[0]:
        raise ConfigError(f"--{asked[0]}-set and --setting {given['setting']} exclude each other: choose one")
    return {**given, "setting": asked[0]} if asked else given


def own_settings(method: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The given settings that this method has: a study passes them to every method."""
    names = {f.name for f in dataclasses.fields(AdaptConfig)} | METHODS[method].settings().keys()
    return {name: value for name, value in given.items() if name in names}


def refuse(name: str, method: Method, fields: set[str]) -> None:
    others = sorted(row.name for row in METHODS.values() if name in row.settings())
    if others:
        raise ConfigError(f"{method.name} has no setting {name!r}; it belongs to {', '.join(others)}")
    own = method.settings()
    raise unknown_setting(name, {*fields, *own}, f"the settings of {method.name} are {', '.join(own)}")


def recorded_settings(config: AdaptConfig, method: Method) -> dict[str, Any]:
    """All values of the run as a flat table: config.yaml holds them, and they repeat the run."""
    return {**dataclasses.asdict(config), **method.settings()}


def begun_settings(
    given: Mapping[str, Any], *, pretrained: bool, classes: int, witness: bool = False
) -> dict[str, Any]:
    """`recorded_settings` before the run begins. If the setting is decided by a look at the target, what depends on it
    is open as well: None, so that a resumed run decides it again."""
    facts: dict[str, Any] = {"pretrained": pretrained, "classes": classes, "witness": witness}
    found = recorded_settings(*resolve(given, **facts))
    if found["setting"] == "auto":
        for setting in SETTINGS[1:]:
            decided = recorded_settings(*resolve({**given, "setting": setting}, **facts))
            found |= {name: None for name, value in decided.items() if name != "setting" and found[name] != value}
    return found


def choose_posterior(posterior: KroneckerPosterior, config: AdaptConfig) -> KroneckerPosterior:
    """The stored posterior, or the same factors under another prior or damping."""
    if config.prior is None and config.damping is None:
        return posterior
    prior = posterior.prior_precision if config.prior is None else config.prior
    return posterior.with_prior(prior, damping=config.damping, weight_decay=config.weight_decay)
