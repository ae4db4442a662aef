"""The posterior predictive in logit space, and the certainty weights (Eq. 6 and Algorithm 1 of the paper).

Given the Gaussian posterior of the last layer, the logits of one sample are N(Wφ, Q_B diag(s) Q_Bᵀ) with

    s_k = Σ_d (Q_Aᵀφ)_d² / (a_d b_k + δ)            (exact damping)

so M draws need no draw of the K × D' weights. Writing √s = c G, with G an R × K basis of the functions k ↦ √s_k
(they are smooth in b_k, so R is small: 1 for factored damping, about a dozen else), the draws are

    f_m = Wφ + Σ_r c_r E_rm,     E_rm = Q_B (G_r ∘ ε_m)

and E, of size R × M × K, does not depend on the sample: it is made once. One matrix product of B×R with R×(M·K)
replaces B·M products with Q_B.

Shapes: B batch, K classes, M draws, R basis functions.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

CHUNK_ELEMENTS = {"cpu": 1 << 19, "cuda": 1 << 24}
"""Number of logits that are drawn at once. On a CPU they stay in its cache, which halves the time."""


@functools.lru_cache(maxsize=16)
def sobol_normal(samples: int, dimensions: int, seed: int = 2022) -> Tensor:
    """M × K standard normal values from a scrambled Sobol sequence: the same on every machine and every call.

    Half of them mirror the others, so that their mean is zero; singular values made equal give them the covariance of
    the normal: exactly I for even M ≥ 2K, and orthogonal pairs if there are fewer. Left as they come, Sobol
    draws lose their lead over random ones from some 30 dimensions on.
    """
    half = (samples + 1) // 2
    engine = torch.quasirandom.SobolEngine(dimensions, scramble=True, seed=seed)
    uniform = engine.draw(half, dtype=torch.float64)
    tiny = 2.0**-32
    normal = torch.special.ndtri(uniform.clamp(tiny, 1 - tiny))
    u, _, v = torch.linalg.svd(normal, full_matrices=False)
    draws = u @ v * math.sqrt(half * dimensions / min(half, dimensions))
    return torch.cat([draws, -draws])[:samples]


def low_rank_basis(variance_table: Tensor, tolerance: float = 1e-5) -> Tensor:
    """An orthonormal R × K basis of the functions √s, from D' × K rows 1/(a_d b_k + δ): s is a positive mix of these.

    The rows themselves, and mixes of neighbours at every scale, span the family; the rank is cut where the singular
    values fall under `tolerance` of the first.
    """
    rows = variance_table.double()
    order = rows[:, -1].argsort()
    rows = rows[order]
    family = torch.cat([rows, rows.cumsum(0), rows.flip(0).cumsum(0)]).sqrt()
    family = family / family.norm(dim=1, keepdim=True)
    if len(family) > 512:
        family = family[:: len(family) // 512 + 1]
    basis: Tensor
    _, singular, basis = torch.linalg.svd(family, full_matrices=False)
    rank = int((singular > tolerance * singular[0]).sum())
    return basis[:rank]


def noise_table(basis: Tensor, eigenvectors: Tensor, draws: Tensor) -> Tensor:
    """E, R × M × K: what each basis function adds to the logits in each draw."""
    return torch.einsum("rk,mk,lk->rml", basis, draws, eigenvectors)
