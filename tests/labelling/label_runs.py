"""A small run folder of `adapt` for questions: clusters, class names, and pictures on the disk."""

from __future__ import annotations

from pathlib import Path

import torch
from PIL import Image
from torch import Tensor

from usfan.files import write_json, write_tensors, write_yaml
from usfan.maths.neighbours import nearest_neighbours
from usfan.metrics.image_table import mark_of

BROKEN = 5
"""Row of a file that is no image."""


def write_label_run(
    path: Path, N: int = 48, K: int = 7, *, doubt: float = 0.5, wrong: int = 3
) -> tuple[Path, Tensor]:
    """The run and the truth. The adapted model errs on every `wrong`-th image, the source model on every second."""
    generator = torch.Generator().manual_seed(0)
    truth = torch.arange(N) % K
    rows = torch.arange(N)
    points = 6 * torch.eye(K, 8)[truth] + torch.randn(N, 8, generator=generator)
    before = torch.where(rows % 2 == 0, (truth + 1) % K, truth)
    after = torch.where(rows % wrong == 0, (truth + 2) % K, truth)
    tables = {}
    for when, labels in (("before", before), ("after", after)):
        probs = torch.full((N, K), 0.2 / (K - 1))
        probs[rows, labels] = 0.8
        tables |= {f"probs_{when}": probs, f"posterior_{when}": probs.clone()}
    entropy = torch.special.entr(tables["probs_after"]).sum(1)
    tensors = tables | {
        "weight": torch.exp(-entropy),
        "entropy_before": entropy.clone(),
        "entropy_after": entropy,
        "features_before": points[:, :2].contiguous(),
        "features_after": points[:, 2:4].contiguous(),
        "view": points,
        "near": nearest_neighbours(points, 8)[0],
        "names_before": tables["probs_before"].clone(),
    }
    path.mkdir(parents=True)
    (path / ".lock").touch()
    write_tensors(path / "samples.safetensors", tensors)
    images = write_pictures(path.parent / f"{path.name}-images", N)
    classes = [f"class {k:04}" for k in range(K)]
    described = {"paths": images, "classes": classes, "temperature": 0.4, "made": mark_of(path)}
    write_json(path / "samples.json", described)
    sentence = "Nobody can tell without labels which model is better."
    verdict = {
        "value": "unknown",
        "sentence": sentence,
        "next": "label 14 images: usfan label RUN",
    }
    write_json(path / "metrics.json", {"doubt": doubt, "setting": "closed", "verdict": verdict})
    write_yaml(path / "config.yaml", {"command": "adapt", "source": "absent", "data": "absent"})
    return path, truth


def write_pictures(folder: Path, N: int) -> list[str]:
    folder.mkdir()
    paths = []
    for row in range(N):
        tint = (37 * row % 200 + 30, 91 * row % 200 + 30, 53 * row % 200 + 30)
        path = folder / f"{row:03}.png"
        Image.new("RGB", (160, 120), tint).save(path)
        if row == BROKEN:
            path.write_text("no picture")
        paths.append(str(path))
    return paths
