"""The naming of a target: clusters of its images in a view, their names by the source model and the user's labels.

Made once in a run, before anything is trained, from the source posterior's predictive. The view is the witness's, or
the source model's own features if there is no witness. Where EM begins depends on the classes that are expected:

    closed     the names, and smoothed names
    partial    both after label shift, because some classes are missing
    open, universal    label shift, and clusters without a name for the half of the images that are named worst
"""

from __future__ import annotations

import torch
from torch import Tensor

from usfan.adaptation.guidance import REJECTING, UNEVEN
from usfan.adaptation.target_classes import label_shift, unknown_score, with_unnamed
from usfan.maths.names import (
    Begins,
    TargetNaming,
    View,
    both_begins,
    learn_labels,
    name_clusters,
    smoothed,
)
from usfan.maths.user_labels import UserLabels

FLOOR = 1e-12


@torch.no_grad()
def name_target(
    view: View, probs: Tensor, setting: str, labels: UserLabels | None = None
) -> TargetNaming:
    """From the source model's N × K probabilities."""
    if labels is None:
        labels = UserLabels.none().to(probs.device)
    even = setting not in (*UNEVEN, *REJECTING)
    begins: Begins = both_begins
    if setting in REJECTING:
        begins = unnamed_begins
    elif setting in UNEVEN:
        begins = shifted_begins
    if len(labels):
        naming, lesson = learn_labels(view, probs, labels, begins, even=even)
        return TargetNaming(view, probs, setting, naming, labels, lesson)
    tables = begins(view, probs, even=even)
    naming, _ = name_clusters(view, probs, labels, tables, even=even)
    return TargetNaming(view, probs, setting, naming, labels)


def shifted_begins(view: View, probs: Tensor, *, even: bool) -> list[Tensor]:
    """Some classes may be missing."""
    shifted = label_shift(probs.clamp_min(FLOOR).log())
    return [shifted, smoothed(shifted.clamp_min(FLOOR).log(), view.near, even=even)]


def unnamed_begins(view: View, probs: Tensor, *, even: bool) -> list[Tensor]:
    """Some classes may be new, and have clusters without a name."""
    names = probs.clamp_min(FLOOR).log()
    score = unknown_score(names, view.near)
    return [with_unnamed(view.points, names, score, names.shape[1])]
