"""Settings of stage 2 that depend on the source model."""

from __future__ import annotations

import dataclasses

from usfan.adaptation.methods import find_method
from usfan.config import AdaptConfig
from usfan.models.model import SourceModel
from usfan.models.small_backbones import SMALL_BACKBONES
from usfan.posterior.kronecker import KroneckerPosterior

ENOUGH_PER_CLASS = 4
"""Samples per class, on average, from which a batch is asked to be diverse on its own (docs/results.md)."""
BY_METHOD = ("balance", "anneal", "diversity_memory", "separation", "pseudo_label_warmup")
CHOSEN = (*BY_METHOD, "backbone_lr_scale", "pseudo_label_weight")
"""Settings that the method or the network chooses where the user does not."""
SHORT = 4
"""Epochs under which a run is too short for a schedule."""


def resolve_defaults(config: AdaptConfig, source: SourceModel) -> AdaptConfig:
    """What was not given and depends on the network or the method. All of it was measured (docs/results.md): a network
    that was trained from scratch asks for other settings than one that has seen many photographs."""
    method = find_method(config.method)
    small = source.architecture.get("backbone") in SMALL_BACKBONES
    chosen = {name: getattr(method, name) for name in BY_METHOD}
    chosen["backbone_lr_scale"] = 1.0 if small else 0.1
    chosen["pseudo_label_weight"] = 0.1 if small else 0.3
    averaged = config.refresh == "epoch" and config.normalise_weights
    scheduled = config.epochs >= SHORT and not config.open_set
    if not small:
        chosen["separation"] = 0.0
    if not averaged:
        chosen["balance"] = False
    if small or not averaged or not scheduled:
        chosen["anneal"] = False
    if not small or not scheduled:
        chosen["pseudo_label_warmup"] = 0
    if config.batch_size >= ENOUGH_PER_CLASS * len(source.classes):
        chosen["diversity_memory"] = 0.0
    return dataclasses.replace(config, **{name: v for name, v in chosen.items() if getattr(config, name) is None})


def choose_posterior(posterior: KroneckerPosterior, config: AdaptConfig) -> KroneckerPosterior:
    """The stored posterior, or the same factors under another prior or damping."""
    if config.prior is None and config.damping is None:
        return posterior
    prior = posterior.prior_precision if config.prior is None else config.prior
    return posterior.with_prior(prior, damping=config.damping, weight_decay=config.weight_decay)
