"""usfan: adapt a trained image classifier to unlabelled images from a new domain, guided by uncertainty."""

from importlib import import_module
from typing import Any

__version__ = "0.3.0"

_WHERE = {
    "ImageData": "usfan.data.sources",
    "InputSpec": "usfan.data.views",
    "SourceModel": "usfan.api",
    "AdaptedModel": "usfan.api",
    "MixtureModel": "usfan.store.model",
    "Check": "usfan.adaptation.check",
    "Prediction": "usfan.maths.outputs",
    "KroneckerPosterior": "usfan.uncertainty.kronecker",
    "train_source": "usfan.api",
    "attach_posterior": "usfan.api",
    "adapt": "usfan.api",
    "check": "usfan.api",
    "evaluate": "usfan.api",
    "export": "usfan.api",
    "report_runs": "usfan.api",
    "run_study": "usfan.api",
    "Figures": "usfan.api",
    "Images": "usfan.api",
    "LabelSource": "usfan.api",
    "ModelSource": "usfan.api",
    "changed_images": "usfan.metrics.changes",
    "questions": "usfan.labelling.questions",
    "Question": "usfan.labelling.board",
    "information_maximization": "usfan.maths.objectives",
    "METHODS": "usfan.adaptation.methods",
    "Method": "usfan.adaptation.methods",
    "Term": "usfan.adaptation.terms.term",
    "Context": "usfan.adaptation.terms.term",
    "Outputs": "usfan.maths.outputs",
    "Batch": "usfan.engine.loop",
    "keep_freed_memory": "usfan.engine.runtime",
    "ArtifactError": "usfan.errors",
    "ConfigError": "usfan.errors",
    "DataError": "usfan.errors",
    "UsfanError": "usfan.errors",
}
_MODULES = {"figures": "usfan.report.figures"}
__all__ = ["__version__", *_WHERE, *_MODULES]


def __getattr__(name: str) -> Any:
    """Names load what they need when first used: `import usfan` alone loads neither torch nor timm."""
    if name in _MODULES:
        globals()[name] = import_module(_MODULES[name])
        return globals()[name]
    if name not in _WHERE:
        raise AttributeError(f"module 'usfan' has no attribute {name!r}")
    value = getattr(import_module(_WHERE[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_WHERE, *_MODULES])
