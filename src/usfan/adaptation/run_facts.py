"""Facts that defaults may depend on. The program can see and report them. The name of a network is not one of them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RunFacts:
    """Facts about the source model and the run, before it begins."""

    pretrained: bool
    """Whether the source model's backbone started from pretrained weights."""
    classes: int
    batch_size: int
    epochs: int
    setting: str
    """closed, partial, open or universal."""

    @property
    def per_class(self) -> float:
        """Samples of each class in a batch, on average."""
        return self.batch_size / self.classes
