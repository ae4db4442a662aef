"""Source models that take no training: random weights, a few features, and a real posterior."""

from __future__ import annotations

from typing import Any

import torch

from usfan.adaptation.methods import METHODS
from usfan.models.backbones import create_backbone
from usfan.models.classifier import Classifier
from usfan.store.model import SourceModel
from usfan.uncertainty.kronecker import KroneckerPosterior


def witness_for(method: str, pixels: torch.Tensor) -> dict[str, Any]:
    """Settings that a method needs: the pixels themselves stand for what a witness sees."""
    return {"witness": pixels.flatten(1).float()} if METHODS[method].needs_witness else {}


def tiny_model(backbone: str = "digits-cnn", *, seed: int = 0, **options: Any) -> SourceModel:
    """Three classes, eight features, random weights, and the posterior of its last layer on 60 random images."""
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    made = create_backbone(backbone, "none")
    network = made.module
    features = made.features
    spec = made.spec
    settings = {
        "bottleneck": 8,
        "dropout": 0.0,
        "head_bias": True,
        "head_norm": True,
        **options,
    }
    classifier = Classifier(network, features, 3, **settings).eval()
    images = torch.randn(60, spec.channels, spec.size, spec.size, generator=generator)
    labels = torch.randint(3, (60,), generator=generator)
    with torch.no_grad():
        posterior = KroneckerPosterior.fit(
            *classifier(images), *classifier.head_tensors(), labels=labels
        )
    summary = {"epochs": 1, "validation_accuracy": 50.0}
    return SourceModel(
        classifier,
        posterior,
        ("a", "b|c", "<d>"),
        spec,
        {"backbone": backbone, **settings},
        summary,
    )
