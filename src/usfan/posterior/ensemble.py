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
from typing import Any

import torch
from torch import Tensor

from usfan.config_checks import MOST_MEMBERS
from usfan.errors import UsfanError
from usfan.posterior.fit import check_batch
from usfan.posterior.heads import Heads

MEMBERS = 8
STEPS = 300
"""Most iterations of L-BFGS for a member; with Office-31's features about 60 are taken."""


@dataclass(frozen=True, eq=False)
class Ensemble(Heads):
    """M heads."""

    kind = "ensemble"

    member_weights: Tensor
    """M × K × D."""
    member_biases: Tensor | None = None
    """M × K, or None for a layer without bias."""

    @classmethod
    def fit(
        cls,
        features: Tensor,
        labels: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        precision: float,
        *,
        members: int = MEMBERS,
        smoothing: float = 0.1,
        seed: int = 0,
    ) -> Ensemble:
        """From features N×D and labels N; `weight` and `bias` are the point estimate's, where each member starts."""
        check_batch(features, torch.nn.functional.linear(features, weight, bias), labels)
        if not 2 <= members <= MOST_MEMBERS:
            raise UsfanError(f"an ensemble has 2 to {MOST_MEMBERS} members; got {members}")
        generator = torch.Generator().manual_seed(seed)
        heads = [
            train_head(
                features,
                labels,
                weight,
                bias,
                bootstrap_counts(len(features), generator).to(features.device),
                precision,
                smoothing,
            )
            for _ in range(members)
        ]
        weights = torch.stack([head[0] for head in heads])
        biases = None if bias is None else torch.stack([head[1] for head in heads if head[1] is not None])
        return cls(weight.detach().clone(), None if bias is None else bias.detach().clone(), weights, biases)

    def count(self, samples: int) -> int:
        return len(self.member_weights)

    def tensors(self) -> dict[str, Tensor]:
        """What `ensemble.safetensors` holds."""
        both = {"member_weights": self.member_weights, "member_biases": self.member_biases}
        return {name: tensor for name, tensor in both.items() if tensor is not None}

    def settings(self) -> dict[str, Any]:
        return {"kind": self.kind, "members": len(self.member_weights)}

    def _draw(self, features: Tensor, samples: int) -> Tensor:
        M, K, D = self.member_weights.shape
        biases = None if self.member_biases is None else self.member_biases.reshape(M * K)
        return torch.nn.functional.linear(features, self.member_weights.reshape(M * K, D), biases).view(-1, M, K)


def bootstrap_counts(count: int, generator: torch.Generator) -> Tensor:
    """How often each of N samples is drawn in N draws with replacement."""
    drawn = torch.randint(count, (count,), generator=generator)
    return torch.bincount(drawn, minlength=count).double()


@torch.inference_mode(False)
def train_head(
    features: Tensor,
    labels: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    counts: Tensor,
    precision: float,
    smoothing: float,
) -> tuple[Tensor, Tensor | None]:
    """The optimum of the objective above for counts c, by L-BFGS in float64 from the head that is given."""
    z, labels, counts = features.detach().double(), labels.to(features.device), counts.to(features.device).double()
    parameters = [t.detach().double().clone().requires_grad_() for t in (weight, bias) if t is not None]
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
        losses = torch.nn.functional.cross_entropy(logits, labels, reduction="none", label_smoothing=smoothing)
        norm = torch.stack([p.square().sum() for p in parameters]).sum()
        loss = ((counts * losses).sum() + 0.5 * precision * norm) / total  # per sample: tolerances know no N
        loss.backward()
        return loss

    with torch.enable_grad():
        optimiser.step(objective)
    found = [p.detach().to(weight.dtype) for p in parameters]
    return found[0], found[1] if bias is not None else None
