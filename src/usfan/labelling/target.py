"""Facts about a target that questions need: from a model that `adapt` just returned, or from its run folder.

Shapes: N images, K classes, W directions of the view, n neighbours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from usfan.adaptation.naming import name_target
from usfan.errors import DataError
from usfan.files import Folder
from usfan.maths.names import TargetNaming, View
from usfan.maths.user_labels import UserLabels
from usfan.metrics.changes import image_names, passes_of
from usfan.metrics.stored_images import ImageTable, read_image_table, read_mapping
from usfan.store.model import AdaptedModel

STORED = ("view", "near", "names_before")


def stored_naming(run: Path, device: torch.device) -> TargetNaming | None:
    """The clusters of a run's target; None if the run did not store them."""
    with Folder(run) as folder:
        table = read_image_table(folder, [])
        metrics = read_mapping(folder, "metrics.json", [])
    if table is None or any(name not in table.tensors for name in STORED):
        return None
    view, near, names = (table.tensors[name].to(device) for name in STORED)
    setting = str(metrics.get("setting", "closed"))
    return name_target(View(view.float(), near.long()), names.double(), setting)


@dataclass(frozen=True, eq=False)
class LabelTarget:
    """The images of a target, as two models see them."""

    classes: tuple[str, ...]
    images: tuple[str, ...]
    """N paths, or `image 17` for images without one."""
    view: View
    names: Tensor
    """N × K probabilities of the source model."""
    setting: str
    before: Tensor
    after: Tensor
    """N predictions of the source model and of the adapted one; K stands for unknown."""
    doubt: float
    """Share of the images whose cluster may have a wrong name."""

    def __len__(self) -> int:
        return len(self.before)

    def naming(self, labels: UserLabels) -> TargetNaming:
        """Clusters and names that follow the user's labels."""
        return name_target(self.view, self.names, self.setting, labels)

    @classmethod
    def of_model(cls, model: AdaptedModel, images: Sequence[str] | None = None) -> LabelTarget:
        """A model that `adapt` returned."""
        passes = passes_of(model)
        naming = passes.naming
        if naming is None:
            raise DataError("too few images or classes: there is nothing to ask about")
        rows = torch.arange(len(passes.after))
        before, after = passes.decisions or (
            model.decide(passes.before),
            model.decide(passes.after),
        )
        return cls(
            model.classes,
            tuple(images or image_names(passes, rows, None)),
            naming.view,
            naming.source,
            naming.setting,
            before.cpu(),
            after.cpu(),
            naming.clusters.share_in_doubt,
        )

    @classmethod
    def of_run(cls, path: Path) -> LabelTarget:
        """The run folder of an adaptation."""
        problems: list[str] = []
        with Folder(path) as folder:
            table = read_image_table(folder, problems)
            metrics = read_mapping(folder, "metrics.json", problems)
        if table is None or problems:
            problem = problems[0] if problems else "it has no table of images"
            raise DataError(f"{path} is not a run of usfan adapt: {problem}")
        return cls.of_table(table, metrics, path)

    @classmethod
    def of_table(cls, table: ImageTable, metrics: dict[str, object], path: Path) -> LabelTarget:
        if table.paths is None or any(name not in table.tensors for name in STORED):
            reason = "it is of an older version"
            if table.paths is None:
                advice = "label the folder that usfan adapt wrote, where it wrote it"
                reason = table.no_paths_because(advice)
            raise DataError(f"{path} cannot ask: {reason}")
        doubt = metrics.get("doubt")
        return cls(
            table.classes,
            tuple(table.paths),
            View(table.tensors["view"].float(), table.tensors["near"].long()),
            table.tensors["names_before"].double(),
            str(metrics.get("setting", "closed")),
            *table.judged,
            float(doubt) if isinstance(doubt, (int, float)) else 1.0,
        )
