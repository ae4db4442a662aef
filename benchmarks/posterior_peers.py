"""What the posterior is measured against: laplace-torch's backends, and draws of all the weights of the layer."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, TensorDataset

from usfan.maths.objectives import certainty_weights
from usfan.uncertainty.fit import append_one
from usfan.uncertainty.kronecker import KroneckerPosterior

BACKENDS = ("CurvlinopsGGN", "BackPackGGN", "AsdlGGN", "CurvlinopsEF", "BackPackEF", "AsdlEF")
"""The GGN ones compute what we do; EF is the empirical Fisher, another and cheaper matrix that needs labels."""


def laplace_fit(
    backend: str, features: Tensor, labels: Tensor, weight: Tensor, bias: Tensor, batch: int
) -> list[Tensor]:
    """laplace-torch's Kronecker posterior of a linear layer; its two factors of the weight.

    The loader hands out slices, so that no time goes into collating single samples.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import laplace
        import laplace.curvature

        head = nn.Linear(weight.shape[1], weight.shape[0])
        head.load_state_dict({"weight": weight, "bias": bias})
        data = TensorDataset(features, labels)
        loader = DataLoader(
            data, batch_size=None, sampler=BatchSampler(SequentialSampler(data), batch, False)
        )
        model = laplace.Laplace(
            head,
            "classification",
            subset_of_weights="all",
            hessian_structure="kron",
            backend=getattr(laplace.curvature, backend),
        )
        model.fit(loader)
    return model.H_facs.kfacs[0]


class WeightDraws:
    """Algorithm 1 with M draws of the K × D' weights: θ = θ_MAP + Q_B (ε ∘ √Rᵀ) Q_Aᵀ, then softmax and mean.

    `rotated=False` never forms θ: it takes φ to the eigenbasis instead, f = Wφ + Q_B (ε ∘ √Rᵀ) Q_Aᵀφ, which saves
    the product with Q_Aᵀ of every draw and is the best that draws of this size can do.
    """

    def __init__(self, posterior: KroneckerPosterior, *, rotated: bool = True) -> None:
        self.posterior = posterior
        self.rotated = rotated
        self.theta = torch.cat([posterior.weight, posterior.bias[:, None]], dim=1)
        self.deviation = posterior.variance_table.T.sqrt().contiguous()
        self.generator = torch.Generator().manual_seed(0)

    @torch.no_grad()
    def certainty(
        self, features: Tensor, temperature: float = 0.4, samples: int = 128
    ) -> Tensor:
        phi = append_one(features)
        noise = torch.randn(samples, *self.theta.shape, generator=self.generator).mul_(
            self.deviation
        )
        if self.rotated:
            theta = (
                self.posterior.class_vectors @ (noise @ self.posterior.feature_vectors.T)
            ).add_(self.theta)
            logits = (phi / temperature) @ theta.mT
        else:
            along = (phi @ self.posterior.feature_vectors / temperature) @ noise.mT
            logits = (along @ self.posterior.class_vectors.T).add_(
                phi @ self.theta.T / temperature
            )
        return certainty_weights(logits.softmax(dim=-1).mean(dim=0))
