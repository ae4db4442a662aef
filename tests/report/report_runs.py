"""Small run folders for the report's tests, written with the same functions as real ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from planning import make_plan
from usfan.files import write_json, write_tensors
from usfan.maths.validators import validate
from usfan.metrics.image_table import mark_of
from usfan.metrics.metrics import calibration_metrics, classification_metrics
from usfan.store.run_folder import RunFolder

EPOCHS = 6
NAMES = (
    "back_pack",
    "bike",
    "calculator",
    "desk lamp",
    "monitor",
    "mug",
    "pen",
    "stapler",
    "trash can",
    "tape",
)


def class_names(K: int) -> list[str]:
    return [NAMES[k] if k < len(NAMES) else f"thing {k}" for k in range(K)]


def clusters(
    N: int, K: int, spread: float, wrong: float, seed: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Labels N, features N×2 around K centres, logits N×K that are wrong on about a share `wrong`."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(N) * K // N
    angle = 2 * torch.pi * torch.arange(K) / K
    centres = 8 * torch.stack([angle.cos(), angle.sin()], dim=1)
    drawn = labels.clone()
    moved = torch.rand(N, generator=generator) < wrong
    drawn[moved] = torch.randint(0, K, (int(moved.sum()),), generator=generator)
    features = centres[drawn] + spread * torch.randn(N, 2, generator=generator)
    logits = torch.randn(N, K, generator=generator) * 0.7
    logits[torch.arange(N), drawn] += (6 / spread) * torch.rand(N, generator=generator)
    return labels, features, logits


def write_images(folder: Path, N: int, most: int = 24) -> list[str]:
    """Paths of N images; the same few files again and again."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for i in range(min(N, most)):
        tint = (37 * i % 200 + 30, 91 * i % 200 + 30, 53 * i % 200 + 30)
        path = folder / f"image-{i:03d}.png"
        Image.radial_gradient("L").resize((64, 48)).convert("RGB").point(
            [min(255, v * t // 128) for t in tint for v in range(256)]
        ).save(path)
        paths.append(str(path))
    return [paths[i % len(paths)] for i in range(N)]


NEXT = "to be sure, label 14 images: usfan label RUN"
ESTIMATE = {"value": 45.0, "low": 32.0, "high": 58.0}


def write_adapt_run(
    path: Path,
    N: int = 240,
    K: int = 6,
    *,
    labels: bool = True,
    open_set: bool = False,
    images: bool = True,
    classes: list[str] | None = None,
    seed: int = 0,
    **settings: Any,
) -> Path:
    """A finished run of `adapt`: every file that the report reads."""
    names = classes or class_names(K)
    given = {"epochs": EPOCHS, "seed": seed, "open_set": open_set, **settings}
    plan = make_plan(given, pretrained=True, classes=K)
    if plan.config.setting == "auto":
        plan = plan.with_setting("closed")
    true, before_map, before_logits = clusters(N, K, 2.6, 0.45, seed)
    _, after_map, after_logits = clusters(N, K, 1.1, 0.08, seed + 1)
    tables = {"probs_before": before_logits.softmax(1), "probs_after": after_logits.softmax(1)}
    tables |= {
        "posterior_before": (0.6 * before_logits).softmax(1),
        "posterior_after": (0.8 * after_logits).softmax(1),
    }
    entropy = {
        w: torch.special.entr(tables[f"posterior_{w}"]).sum(1) for w in ("before", "after")
    }
    tensors = tables | {f"entropy_{w}": h for w, h in entropy.items()}
    tensors |= {
        "weight": torch.exp(-entropy["after"]),
        "features_before": before_map,
        "features_after": after_map,
    }
    if open_set:
        true = torch.where(torch.arange(N) % 5 == 0, K, true)
        tensors["unknown"] = entropy["after"] > entropy["after"].quantile(0.8)
    if labels:
        tensors["labels"] = true
    recorded = {
        "source": "runs/amazon",
        "data": "office31/webcam",
        **plan.settings(),
    }
    with RunFolder(path, recorded, command="adapt") as run:
        epochs = log_epochs(run, tables)
        run.log("kept", epoch=4, of=EPOCHS, reason=f"kept epoch 4 of {EPOCHS}")
        metrics: dict[str, Any] = {
            "method": plan.config.method, "epochs": EPOCHS, "kept_epoch": 4, "seconds": 73.2, "images": N, "skipped": 0,
            "guard": {"on": True, "kept": "adapted", "kept_epoch": 4, "reason": f"kept epoch 4 of {EPOCHS}"},
            "verdict": {"value": "better", "sentence": "The adapted model is better.", "next": NEXT},
            "estimated_accuracy": {"before": ESTIMATE, "after": None, "reason": "names are in doubt"},
            "validators": epochs[4],
        }  # fmt: skip
        if labels:
            metrics |= {w: score(tables, true, names, w) for w in ("before", "after")}
        run.save_metrics(metrics)
    write_tensors(path / "samples.safetensors", tensors)
    paths = write_images(path.parent / "images", N) if images else None
    (path / ".lock").touch()
    described = {"paths": paths, "classes": names, "temperature": 0.4, "made": mark_of(path)}
    write_json(path / "samples.json", described)
    return path


def log_epochs(run: RunFolder, tables: dict[str, Tensor]) -> list[dict[str, float]]:
    found = []
    for epoch in range(EPOCHS + 1):
        t = min(epoch, 4) / 4
        probs = (1 - t) * tables["probs_before"] + t * tables["probs_after"]
        rows = slice(None, None, max(1, len(probs) // 300))
        figures = validate(probs[rows], tables["probs_before"][rows], probs[rows])
        losses = {
            "loss": 1 - 0.8 * t,
            "loss_entropy": 1.2 - t,
            "loss_diversity": -1.5 - 0.2 * t,
            "loss_pseudo": 0.0,
        }
        extra = (
            {**losses, "lr": 0.01 * (1 + 10 * epoch / EPOCHS) ** -0.75, "seconds": 4.2}
            if epoch
            else {}
        )
        run.log("epoch", epoch=epoch, **extra, weight_mean=0.5 + 0.3 * t, validators=figures)
        found.append(figures)
    return found


def score(
    tables: dict[str, Tensor], labels: Tensor, names: list[str], when: str
) -> dict[str, Any]:
    known = labels < len(names)
    figures = classification_metrics(tables[f"probs_{when}"][known], labels[known], names)
    return figures | calibration_metrics(
        tables[f"posterior_{when}"][known], labels[known], "posterior_"
    )
