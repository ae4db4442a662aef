"""Settings of stage 2 that depend on the source model."""

from __future__ import annotations

import dataclasses
from typing import Any

from usfan.adaptation.methods import find_method
from usfan.config import AdaptConfig
from usfan.models.model import SourceModel
from usfan.models.small_backbones import SMALL_BACKBONES
from usfan.posterior.kronecker import KroneckerPosterior

ENOUGH_PER_CLASS = 4
"""Samples per class, on average, from which a batch is asked to be diverse on its own (docs/results.md)."""


def resolve_defaults(config: AdaptConfig, source: SourceModel) -> AdaptConfig:
    """What was not given and depends on the network or the method."""
    method = find_method(config.method)
    small = source.architecture.get("backbone") in SMALL_BACKBONES
    changes: dict[str, Any] = {}
    if config.backbone_lr_scale is None:
        changes["backbone_lr_scale"] = 1.0 if small else 0.1
    if config.pseudo_label_weight is None:
        changes["pseudo_label_weight"] = 0.1 if small else 0.3
    for name in ("balance", "anneal", "diversity_memory", "separation"):
        if getattr(config, name) is None:
            changes[name] = getattr(method, name)
    if config.separation is None and not small:  # measured: it helps a network trained from scratch, and harms others
        changes["separation"] = 0.0
    if config.balance is None and (config.refresh == "step" or not config.normalise_weights):
        changes["balance"] = False
    if config.anneal is None and config.refresh == "step":
        changes["anneal"] = False
    if config.diversity_memory is None and config.batch_size >= ENOUGH_PER_CLASS * len(source.classes):
        changes["diversity_memory"] = 0.0
    return dataclasses.replace(config, **changes)


def choose_posterior(posterior: KroneckerPosterior, config: AdaptConfig) -> KroneckerPosterior:
    """The stored posterior, or the same factors under another prior or damping."""
    if config.prior is None and config.damping is None:
        return posterior
    prior = posterior.prior_precision if config.prior is None else config.prior
    return posterior.with_prior(prior, damping=config.damping, weight_decay=config.weight_decay)
