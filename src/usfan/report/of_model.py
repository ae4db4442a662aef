"""The report of a model in memory: what `adapt` returned, or any model on given images."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch

from usfan.artifacts.folder import model_config
from usfan.artifacts.model import SourceModel
from usfan.errors import ConfigError, DataError
from usfan.evaluation.evaluate import score_outputs
from usfan.evaluation.samples import adaptation_metrics, flat_map, save_samples
from usfan.files import write_json, write_tensors
from usfan.posterior.predictive import certainty_weights, entropy
from usfan.report.page import write_page
from usfan.report.read_run import read_run
from usfan.scoring.outputs import Outputs


def write_model_report(model: SourceModel, out: Path, data: Any = None) -> Path:
    """Write the page; `data` brings labels, and the images of a model that did not just come from `adapt`."""
    if out.is_dir():
        raise ConfigError(f"{out} is a folder: name the HTML file to write")
    passes = getattr(model, "passes", None)
    images = data if data is not None else getattr(passes, "images", None)
    if passes is None and images is None:
        raise DataError("this model holds no images to report on: give some, report(FILE, data=…)")
    name = getattr(images, "name", "images in memory")
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / (out.stem or "report")
        folder.mkdir()
        write_json(folder / "config.json", model_config(model))
        if images is not None and images.labels is not None:
            images = images.for_model(model.classes, open_set=True)
        if passes is not None:
            rule = getattr(model, "unknown_rule", None)
            labelled = images if images is not None else Unlabelled()
            write_json(folder / "metrics.json", adaptation_metrics(model, labelled, open_set=rule is not None))  # type: ignore[arg-type]
            save_samples(folder, model, labelled)  # type: ignore[arg-type]
        else:
            save_pass(folder, model, images)
        run = read_run(folder, str(name), root=Path(folder.anchor))  # the paths are the user's own
        run.path, run.kind = Path("in memory"), "adapt" if passes is not None else "evaluate"
        run.problems = [problem for problem in run.problems if "is missing" not in problem]
        run.epochs = list(getattr(model, "history", {}).get("records", []))
        return write_page([run], out, follow=True)


class Unlabelled:
    """Images with predictions only."""

    labels = None
    paths = None


def save_pass(folder: Path, model: SourceModel, images: Any) -> None:
    """One pass over the images: what the model says of each, and, with labels, the figures."""
    kept, parts = [], []
    for index, outputs in model.predict_batches(images):
        kept.append(index)
        parts.append(outputs)
    names = ("features", "logits", "probs", "posterior_probs", "mutual_information")
    after = Outputs(*(torch.cat([getattr(part, name) for part in parts]).cpu() for name in names))
    index = torch.cat(kept)
    tensors = {
        "probs_after": after.probs,
        "posterior_after": after.posterior_probs,
        "weight": certainty_weights(after.posterior_probs),
        "entropy_after": entropy(after.posterior_probs),
        "features_after": flat_map(after.features, after.features)[1],
    }
    metrics: dict[str, Any] = {"images": len(index), "skipped": len(images.unreadable)}
    if images.labels is not None:
        labels = images.labels[index]
        tensors["labels"] = labels
        metrics |= {"after": score_outputs(after, labels, model, open_set=bool((labels >= len(model.classes)).any()))}
    write_tensors(folder / "samples.safetensors", tensors)
    paths = None if images.paths is None else [images.paths[i] for i in index.tolist()]
    write_json(folder / "samples.json", {"paths": paths, "classes": list(model.classes)})
    write_json(folder / "metrics.json", metrics)
