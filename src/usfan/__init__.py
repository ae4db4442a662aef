"""usfan: adapt a trained image classifier to unlabelled images from a new domain, guided by uncertainty."""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_WHERE = {
    "ImageData": "usfan.data.sources",
    "InputSpec": "usfan.data.views",
    "SourceModel": "usfan.artifacts.model",
    "AdaptedModel": "usfan.artifacts.model",
    "Prediction": "usfan.scoring.outputs",
    "KroneckerPosterior": "usfan.posterior.kronecker",
    "train_source": "usfan.training.source",
    "attach_posterior": "usfan.training.posthoc",
    "adapt": "usfan.adaptation.adapt",
    "evaluate": "usfan.evaluation.evaluate",
    "information_maximization": "usfan.scoring.objectives",
    "METHODS": "usfan.adaptation.methods",
    "ArtifactError": "usfan.errors",
    "ConfigError": "usfan.errors",
    "DataError": "usfan.errors",
    "UsfanError": "usfan.errors",
}
__all__ = ["__version__", *_WHERE]


def __getattr__(name: str) -> Any:
    """Names load what they need when first used: `import usfan` alone loads neither torch nor timm."""
    if name not in _WHERE:
        raise AttributeError(f"module 'usfan' has no attribute {name!r}")
    value = getattr(import_module(_WHERE[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_WHERE])
