"""Settings of stage 2 that depend on the source model."""

from __future__ import annotations

import dataclasses
from typing import Any

from usfan.adaptation.methods import find_method
from usfan.artifacts.model import SourceModel
from usfan.config import AdaptConfig, make_config
from usfan.models.small_backbones import SMALL_BACKBONES
from usfan.posterior.kronecker import KroneckerPosterior

ENOUGH_PER_CLASS = 4
"""Samples per class, on average, from which a batch is asked to be diverse on its own (docs/results.md)."""
BY_METHOD = ("balance", "anneal", "diversity_memory", "separation", "pseudo_label_warmup")
CHOSEN = (*BY_METHOD, "backbone_lr_scale", "pseudo_label_weight")
"""Settings that the method or the network chooses where the user does not."""
SHORT = 4
"""Epochs under which a run is too short for a schedule."""
BEFORE = {"anneal": False, "pseudo_label_warmup": 0}
"""What runs had that were begun before checkpoints said what was chosen."""


def chosen_settings(config: AdaptConfig) -> dict[str, Any]:
    return {name: getattr(config, name) for name in CHOSEN}


def begun_with(config: AdaptConfig, state: dict[str, Any]) -> AdaptConfig:
    """A run goes on with what was chosen when it began, though the defaults may have changed since. `state` is that of
    its checkpoint."""
    saved = state.get("chosen")
    then = saved if isinstance(saved, dict) else BEFORE
    taken = {name: then[name] for name in CHOSEN if name in then and getattr(config, name) is None}
    return make_config(AdaptConfig, {**dataclasses.asdict(config), **taken})


def chosen_for(config: AdaptConfig, backbone: str | None, classes: int) -> AdaptConfig:
    """What was not given and depends on the network or the method. All of it was measured (docs/results.md): the small
    networks, which are trained from scratch, ask for other settings than one that has seen many photographs."""
    method = find_method(config.method)
    small = backbone in SMALL_BACKBONES
    chosen = {name: getattr(method, name) for name in BY_METHOD}
    chosen["backbone_lr_scale"] = 1.0 if small else 0.1
    chosen["pseudo_label_weight"] = 0.1 if small else 0.3
    averaged = config.refresh == "epoch" and config.normalise_weights
    scheduled = config.epochs >= SHORT and not config.open_set and not config.partial_set
    if not small:
        chosen["separation"] = 0.0
    if not averaged:
        chosen["balance"] = False
    if small or not averaged or not scheduled:
        chosen["anneal"] = False
    if not small or not scheduled:
        chosen["pseudo_label_warmup"] = 0
    if config.batch_size >= ENOUGH_PER_CLASS * classes:
        chosen["diversity_memory"] = 0.0
    return dataclasses.replace(config, **{name: v for name, v in chosen.items() if getattr(config, name) is None})


def resolve_defaults(config: AdaptConfig, source: SourceModel) -> AdaptConfig:
    return chosen_for(config, source.architecture.get("backbone"), len(source.classes))


def choose_posterior(posterior: KroneckerPosterior, config: AdaptConfig) -> KroneckerPosterior:
    """The stored posterior, or the same factors under another prior or damping."""
    if config.prior is None and config.damping is None:
        return posterior
    prior = posterior.prior_precision if config.prior is None else config.prior
    return posterior.with_prior(prior, damping=config.damping, weight_decay=config.weight_decay)
