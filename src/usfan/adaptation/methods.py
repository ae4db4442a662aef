"""The table of methods. A method is a value: which weights, which pseudo-labels. To add one, add a row."""

from __future__ import annotations

from dataclasses import dataclass

from usfan.errors import ConfigError


@dataclass(frozen=True)
class Method:
    """What a method does with the target; everything else is the one loop's."""

    name: str
    summary: str
    adapts: bool = True
    """False: the source model is returned as it is."""
    weights: str = "none"
    """Weights of the entropy term: "none" (1 for all), "point" (exp(−H) of the point estimate), "posterior"."""
    pseudo_labels: bool = False
    """Cross-entropy with nearest-centroid pseudo-labels, refreshed every epoch."""
    pseudo_label_warmup: int = 0
    """Epochs before that loss: the first labels come from features under the source's BatchNorm statistics."""
    balance: bool = False
    """Weights of mean 1 within each predicted class, not only over the target."""
    anneal: bool = False
    """Certainty counts twice as much in the first epoch, and hardly in the last (`AdaptConfig.anneal`)."""
    diversity_memory: float = 0.0
    """Share of the mean prediction in L_div that is the whole target's (`AdaptConfig.diversity_memory`)."""
    separation: float = 0.0
    """Open set: weight of raising the entropy of samples judged unknown (`AdaptConfig.separation`)."""
    split: str = "entropy"
    """Open set: the score that separates known from unknown while adapting (`adaptation.open_set.SCORES`)."""
    decision: str = "entropy"
    """Open set: the score by which the adapted model then judges an image."""


METHODS: dict[str, Method] = {
    m.name: m
    for m in (
        Method("source-only", "the source model, not adapted", adapts=False),
        Method("shot-im", "information maximisation, every sample alike"),
        Method("shot-im-entropy", "shot-im, weighted by the certainty of the point estimate", weights="point"),
        Method("shot", "shot-im and nearest-centroid pseudo-labels", pseudo_labels=True),
        Method(
            "u-sfan",
            "shot-im, weighted by the certainty of the posterior predictive",
            weights="posterior",
            balance=True,
            anneal=True,
            diversity_memory=0.9,
            separation=1.0,
            split="posterior-entropy",
            decision="max-softmax",
        ),
        Method(
            "u-sfan+",
            "weights as u-sfan's, and nearest-centroid pseudo-labels",
            weights="posterior",
            balance=True,
            diversity_memory=0.9,
            separation=1.0,
            pseudo_labels=True,
            pseudo_label_warmup=1,
            split="posterior-entropy",
            decision="max-softmax",
        ),
    )
}


def find_method(name: str) -> Method:
    if name not in METHODS:
        raise ConfigError(f"unknown method {name!r}: choose from {', '.join(METHODS)}")
    return METHODS[name]
