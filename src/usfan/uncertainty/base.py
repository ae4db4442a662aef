"""The base of all uncertainties of a last layer f(z) = Wz + b.

An uncertainty has M draws f_m of the logits of a sample. All figures are means over them (Eq. 6 of the paper):

    p̂ = M⁻¹ Σ_m softmax(f_m / τ),    w = exp(−H(p̂)),    I = H(p̂) − M⁻¹ Σ_m H(softmax(f_m / τ))

A kind is one module with a subclass, and one row in `registry.UNCERTAINTIES`.

Shapes: B batch, K classes, D features, M draws, N source images.
"""

from __future__ import annotations

import dataclasses
import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from usfan.errors import UsfanError
from usfan.maths.objectives import certainty_weights, entropy
from usfan.uncertainty.predictive import CHUNK_ELEMENTS

if TYPE_CHECKING:
    from usfan.uncertainty.kronecker import KroneckerPosterior

Features = Tensor | ArrayLike
"""B × D numbers: a tensor, or anything that numpy turns into an array."""
DrawsOfPart = Callable[[slice], Tensor]
"""A part of a batch → its B × M × K scaled logits."""
StoredSettings = dict[str, float | str | None]
"""Settings in config.json."""
Bounds = tuple[int, int] | tuple[float, float]
"""Lowest and highest value of a stored setting; whole numbers are bounded by whole numbers."""


@dataclass(frozen=True)
class FitSettings:
    """Settings of the posterior and of all kinds; each kind reads those that it has."""

    uncertainty: str = "posterior"
    """Kind of the uncertainty in use, a name in `registry.UNCERTAINTIES`."""
    prior: float | str = "evidence"
    """Prior precision: a positive number, "evidence" or "weight-decay"."""
    damping: str = "exact"
    weight_decay: float | None = None
    """Weight decay of the training, if it is known."""
    dropout_rate: float | None = None
    """Rate of MC dropout, if the user sets one."""
    trained_rate: float = 0.0
    """Rate of dropout before the last layer in the training of the network."""
    members: int = 8
    """Heads of an ensemble."""
    smoothing: float = 0.1
    """Label smoothing of heads that are trained."""
    seed: int = 0
    curvature: str = "sum"
    """Of the loss summed over the data, or of its mean."""


@dataclass(frozen=True, eq=False)
class Uncertainty(ABC):
    """A distribution over the logits of a last layer. Frozen data, and pure functions of it."""

    kind: ClassVar[str]
    """Name in a saved model."""
    needs_source_data: ClassVar[bool] = False
    """Whether `from_posterior` needs features and labels of the source."""
    stored_settings: ClassVar[Mapping[str, Bounds]] = MappingProxyType({})
    """Settings in config.json, with their bounds."""

    weight: Tensor
    """W of the point estimate, K × D: the effective weight, after weight normalisation."""
    bias: Tensor | None
    """b, K, or None for a layer without bias."""

    @classmethod
    def from_posterior(
        cls,
        posterior: KroneckerPosterior,
        settings: FitSettings,
        features: Tensor | None = None,
        labels: Tensor | None = None,
    ) -> Uncertainty:
        """Build this kind for the layer of a posterior; the posterior's own kind is the posterior. Stage 1 passes
        source features N × D and labels N."""
        if isinstance(posterior, cls):
            return posterior
        return cls(posterior.weight, posterior.bias)

    @classmethod
    def training_dropout(
        cls, requested: float | None, network: float, bottleneck: int
    ) -> float:
        """Rate of dropout after the bottleneck in stage 1: `requested` by the user, or that of the network."""
        return network if requested is None else requested

    @classmethod
    def tensor_shapes(
        cls, settings: StoredSettings, weight: Tensor, bias: Tensor | None
    ) -> dict[str, tuple[int, ...]]:
        """Shapes of the tensors in KIND.safetensors, by name. They are checked before a tensor is read."""
        return {}

    @classmethod
    def from_stored(
        cls, posterior: KroneckerPosterior, settings: StoredSettings, tensors: dict[str, Tensor]
    ) -> Uncertainty:
        """Rebuild a saved uncertainty. Settings and shapes are checked already."""
        if isinstance(posterior, cls):
            return posterior
        fields: dict[str, Any] = {**settings, **tensors}
        return cls(posterior.weight, posterior.bias, **fields)

    def settings(self) -> StoredSettings:
        """The settings in config.json."""
        return {name: getattr(self, name) for name in self.stored_settings}

    def tensors(self) -> dict[str, Tensor]:
        """The tensors that a model folder holds for it, beside those of the posterior."""
        tensors = self._all_tensors()
        return {name: tensors[name] for name in tensors if name not in ("weight", "bias")}

    @abstractmethod
    def part_draws(
        self,
        features: Tensor,
        temperature: float,
        samples: int,
        generator: torch.Generator | None = None,
    ) -> DrawsOfPart:
        """A function from a part of the batch to its B × M × K logits f_m / τ. Draws are fixed, or fresh ones from a
        generator if the kind has them, the same for all parts. ONNX traces this function."""

    def draw_size(self, samples: int) -> int:
        """Number of values that the draws of one sample take at once."""
        return samples * len(self.weight)

    def parts(self, rows: Tensor, samples: int) -> Iterator[slice]:
        """Parts of a batch that are drawn at once."""
        limit = CHUNK_ELEMENTS.get(rows.device.type, 1 << 24)
        chunk = max(1, limit // self.draw_size(samples))
        for start in range(0, len(rows), chunk):
            yield slice(start, start + chunk)

    def logits(self, features: Features) -> Tensor:
        """The point estimate, B × K."""
        return torch.nn.functional.linear(self._checked(features), self.weight, self.bias)

    @torch.no_grad()
    def predictive(
        self,
        features: Features,
        temperature: float = 0.4,
        samples: int = 128,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """p̂, B × K (Eq. 6). Like `moments`, it carries no gradient."""
        check_draws(temperature, samples)
        rows = self._checked(features)
        probs = rows.new_empty(len(rows), len(self.weight))
        draws = self.part_draws(rows, temperature, samples, generator)
        for part in self.parts(rows, samples):
            probs[part] = draws(part).softmax(dim=-1).mean(dim=1)
        return probs

    @torch.no_grad()
    def moments(
        self,
        features: Features,
        temperature: float = 0.4,
        samples: int = 128,
        generator: torch.Generator | None = None,
    ) -> tuple[Tensor, Tensor]:
        """p̂, B × K, and the mutual information I, B: the epistemic part of its entropy. They carry no gradient:
        weights are constants of the loss. A part of the batch is drawn at a time."""
        check_draws(temperature, samples)
        rows = self._checked(features)
        probs = rows.new_empty(len(rows), len(self.weight))
        information = rows.new_empty(len(rows))
        draws = self.part_draws(rows, temperature, samples, generator)
        for part in self.parts(rows, samples):
            probs[part], information[part] = draw_moments(draws(part))
        return probs, information.clamp_min(0)

    def certainty(
        self,
        features: Features,
        temperature: float = 0.4,
        samples: int = 128,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """w, B weights exp(−H) of the predictive (Algorithm 1)."""
        return certainty_weights(self.predictive(features, temperature, samples, generator))

    def to(
        self, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> Self:
        """The same uncertainty on another device or in another floating-point type."""
        tensors = self._all_tensors().items()
        moved: dict[str, Any] = {name: t.to(device=device, dtype=dtype) for name, t in tensors}
        return dataclasses.replace(self, **moved)

    def _all_tensors(self) -> dict[str, Tensor]:
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, Tensor)}

    @functools.cached_property
    def _fixed(self) -> dict[int, Tensor]:
        """Tables of the fixed draws, by their number."""
        return {}

    def _checked(self, features: Features) -> Tensor:
        tensor = as_features(features)
        if tensor.ndim != 2 or tensor.shape[1] != self.weight.shape[1]:
            raise UsfanError(
                f"features must be B×{self.weight.shape[1]}; got {tuple(tensor.shape)}"
            )
        return tensor.to(self.weight)


def draw_moments(scaled_draws: Tensor) -> tuple[Tensor, Tensor]:
    """p̂, B × K, and the mutual information I, B, of B × M × K logits f_m / τ. For one draw I is exactly 0, so that a
    rounding error is never taken for a sign of an unknown class."""
    log_p = scaled_draws.log_softmax(dim=-1)
    p = log_p.exp()
    probs = p.mean(dim=1)
    if scaled_draws.shape[1] == 1:
        return probs, torch.zeros_like(probs[:, 0])
    return probs, entropy(probs) + (p * log_p).sum(dim=-1).mean(dim=1)


def check_draws(temperature: float, samples: int) -> None:
    if not temperature > 0 or samples < 1:
        raise UsfanError(
            f"temperature must be positive and samples at least 1; got {temperature} and {samples}"
        )


def as_features(values: Features) -> Tensor:
    """A tensor as it is; a copy of anything that numpy turns into numbers."""
    if isinstance(values, Tensor):
        return values
    try:
        return torch.from_numpy(np.array(values, dtype=np.float64))
    except (TypeError, ValueError) as error:
        raise UsfanError(f"features must be B×D numbers: {error}") from error
