"""A stage of training as a value: what is trainable, how long, how fast."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True)
class Stage:
    """Settings of one stage of training, apart from its loss."""

    epochs: int
    batch_size: int
    lr: float
    backbone_lr_scale: float = 0.1
    momentum: float = 0.9
    weight_decay: float = 1e-3
    tune: str = "all"
    """Trained part: "affine" (scales and shifts of BatchNorms only), "new" (the bottleneck), "norm" (BatchNorm too),
    "all"."""
    head: bool = False
    """Whether the head moves too: in stage 1 only."""
    seed: int = 0

    @classmethod
    def of(cls, config: Any, **more: Any) -> Stage:
        """From a config whose settings are all decided; `more` overrides them."""
        names = [field.name for field in fields(cls) if hasattr(config, field.name)]
        settings = {name: getattr(config, name) for name in names}
        return cls(**{**settings, **more})
