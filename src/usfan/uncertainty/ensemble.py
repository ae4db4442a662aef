"""An ensemble of heads, each trained on a bootstrap of the source features.

Member m minimises, over its own K × D weights and biases θ_m,

    Σ_i c_mi CE_α(W_m z_i + b_m, y_i) + ½ δ ‖θ_m‖²

with c_m how often a resample of N samples drew each of them (multinomial), CE_α the cross-entropy with smoothed labels
of Eq. 1, and δ the prior precision of the Laplace posterior: with c = 1 this is the MAP estimate whose spread that
posterior describes. The objective is strictly convex, so each member has one optimum, wherever it starts; L-BFGS finds
it. The features, the bottleneck's, are those of the trained network and stay as they are: the members differ in the
last layer only, as the draws of the posterior do.

Shapes: N samples, K classes, D features, M members.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from usfan.config_checks import MOST_MEMBERS, between
from usfan.errors import ConfigError
from usfan.uncertainty.base import DrawsOfPart, FitSettings, StoredSettings, Uncertainty

if TYPE_CHECKING:
    from usfan.uncertainty.kronecker import KroneckerPosterior

STEPS = 300
"""Most iterations of L-BFGS for a member; with Office-31's features about 60 are taken."""


@dataclass(frozen=True, eq=False)
class Ensemble(Uncertainty):
    """M heads."""

    kind = "ensemble"
    needs_source_data = True
    stored_settings = MappingProxyType({"members": (2, MOST_MEMBERS)})

    member_weights: Tensor
    """M × K × D."""
    member_biases: Tensor | None = None
    """M × K, or None for a layer without bias."""

    @classmethod
    def from_posterior(
        cls,
        posterior: KroneckerPosterior,
        settings: FitSettings,
        features: Tensor | None = None,
        labels: Tensor | None = None,
    ) -> Ensemble:
        if features is None:
            raise ConfigError(
                "this model has no ensemble: it is trained with the source data, usfan train --uncertainty ensemble, "
                "or usfan posterior --uncertainty ensemble"
            )
        assert labels is not None, "needs_source_data: the caller has checked this"
        between("members", settings.members, 2, MOST_MEMBERS)
        weight = posterior.weight
        bias = posterior.bias
        generator = torch.Generator().manual_seed(settings.seed)
        weights = []
        biases = []
        for _ in range(settings.members):
            counts = bootstrap_counts(len(features), generator)
            precision = posterior.prior_precision
            head = train_head(
                features, labels, weight, bias, counts, precision, settings.smoothing
            )
            weights.append(head[0])
            biases.extend(head[1:])
        return cls(weight, bias, torch.stack(weights), torch.stack(biases) if biases else None)

    @classmethod
    def tensor_shapes(
        cls, settings: StoredSettings, weight: Tensor, bias: Tensor | None
    ) -> dict[str, tuple[int, ...]]:
        members = int(settings["members"] or 0)
        shapes: dict[str, tuple[int, ...]] = {"member_weights": (members, *weight.shape)}
        if bias is not None:
            shapes["member_biases"] = (members, *bias.shape)
        return shapes

    @classmethod
    def from_stored(
        cls, posterior: KroneckerPosterior, settings: StoredSettings, tensors: dict[str, Tensor]
    ) -> Ensemble:
        return cls(posterior.weight, posterior.bias, **tensors)

    def settings(self) -> StoredSettings:
        return {"members": len(self.member_weights)}

    def part_draws(
        self,
        features: Tensor,
        temperature: float,
        samples: int,
        generator: torch.Generator | None = None,
    ) -> DrawsOfPart:
        M, K, D = self.member_weights.shape
        biases = None if self.member_biases is None else self.member_biases.reshape(M * K)
        weights = self.member_weights.reshape(M * K, D)

        def draws(part: slice) -> Tensor:
            logits = torch.nn.functional.linear(features[part], weights, biases)
            return logits.view(-1, M, K) / temperature

        return draws

    def draw_size(self, samples: int) -> int:
        return len(self.member_weights) * len(self.weight)


def bootstrap_counts(count: int, generator: torch.Generator) -> Tensor:
    """How often each of N samples is drawn in N draws with replacement."""
    indices = torch.randint(count, (count,), generator=generator)
    return torch.bincount(indices, minlength=count).double()


@torch.inference_mode(False)
def train_head(
    features: Tensor,
    labels: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    counts: Tensor,
    precision: float,
    smoothing: float,
) -> list[Tensor]:
    """The optimum of the objective above for counts c: weight and, if there is one, bias. L-BFGS in float64."""
    z = features.detach().double()
    labels = labels.to(features.device)
    counts = counts.to(features.device).double()
    parameters = [
        t.detach().double().clone().requires_grad_() for t in (weight, bias) if t is not None
    ]
    total = counts.sum()
    optimiser = torch.optim.LBFGS(
        parameters,
        max_iter=STEPS,
        tolerance_grad=1e-7,
        tolerance_change=1e-12,
        history_size=20,
        line_search_fn="strong_wolfe",
    )

    def objective() -> Tensor:
        optimiser.zero_grad()
        logits = torch.nn.functional.linear(z, *parameters)
        losses = torch.nn.functional.cross_entropy(
            logits, labels, reduction="none", label_smoothing=smoothing
        )
        norm = torch.stack([p.square().sum() for p in parameters]).sum()
        # Divided by N, so that the tolerances do not depend on it.
        loss = ((counts * losses).sum() + 0.5 * precision * norm) / total
        loss.backward()
        return loss

    with torch.enable_grad():
        optimiser.step(objective)
    return [p.detach().to(weight.dtype) for p in parameters]
