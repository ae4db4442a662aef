"""A benchmark's recipe as settings of the two stages. Own domains have none: the stages have their defaults."""

from __future__ import annotations

from typing import Any

from usfan.config import TrainConfig
from usfan.data.benchmarks.benchmark import Recipe


def train_settings(recipe: Recipe | None) -> dict[str, Any]:
    if recipe is None:
        return {"backbone": TrainConfig.backbone}
    return {
        "backbone": recipe.backbone,
        "epochs": recipe.source_epochs,
        "lr": recipe.lr,
        "batch_size": recipe.batch_size,
        "backbone_lr_scale": recipe.backbone_lr_scale,
        "weight_decay": recipe.weight_decay,
        "label_smoothing": recipe.label_smoothing,
        "validation_share": recipe.val_fraction,
        "patience": 0,
        "bottleneck": recipe.bottleneck or 0,
        "dropout": recipe.bottleneck_dropout,
        "head_bias": recipe.head_bias,
        "augment": "shift-turn" if recipe.shift_turn else plain_view(recipe),
    }


def plain_view(recipe: Recipe) -> str:
    return "none" if not recipe.flip else "resized-crop-flip" if recipe.crop_scale else "crop-flip"


def adapt_settings(recipe: Recipe | None) -> dict[str, Any]:
    if recipe is None:
        return {}
    settings = {
        "epochs": recipe.target_epochs,
        "lr": recipe.lr if recipe.target_lr is None else recipe.target_lr,
        "batch_size": recipe.batch_size,
        "backbone_lr_scale": recipe.backbone_lr_scale,
        "weight_decay": recipe.weight_decay,
        "pseudo_label_weight": recipe.beta,
        "augment": plain_view(recipe),
    }
    if recipe.pseudo_label_warmup is not None:
        settings["pseudo_label_warmup"] = recipe.pseudo_label_warmup
    return settings
