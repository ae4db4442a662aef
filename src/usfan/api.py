"""The functions of `import usfan`, which do the same as the commands.

The packages `usfan.report` and `usfan.study` have the short names, so two functions are called `report_runs` and
`run_study`.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor, nn

from usfan import workflow
from usfan.adaptation.check import Check
from usfan.config import RuntimeConfig
from usfan.data.lists import read_classes
from usfan.data.sources import ImageData, ImageSource
from usfan.data.store import Store
from usfan.data.views import InputSpec
from usfan.engine.runtime import Runtime, start_runtime
from usfan.metrics.evaluate import evaluate as run_evaluation
from usfan.progress import CountImages, StepProgress, for_api, image_progress
from usfan.shield import shielded
from usfan.store.model import AdaptedModel, SourceModel, as_images, as_model
from usfan.training.posthoc import ImageProcessor
from usfan.training.posthoc import attach_posterior as attach
from usfan.uncertainty.base import FitSettings
from usfan.uncertainty.registry import find_uncertainty
from usfan.workflow import Output, SourceHandle

Images = ImageData | ImageSource
"""Images, or anything that `ImageData` takes."""
ModelSource = SourceModel | str | Path
"""A model, its folder, or a Hub id."""
Setting = str | int | float | bool | None
"""The value of a setting; None means the default."""
RuntimeSettings = Runtime | RuntimeConfig | Mapping[str, Setting]
"""Where to compute: fields of `usfan.config.RuntimeConfig`."""
LabelSource = str | Path | Mapping[str | int, str] | Sequence[tuple[str | int, str]] | Tensor
"""Labels of a few images: a table with the columns path and label, or pairs of a path (a position, for images in
memory) and a class name."""
ShowProgress = bool | StepProgress | None
"""True (the default), False, or a function of (images seen, images in all, figures)."""
Figures = dict[str, object]
"""Figures by name, as in metrics.json."""


@shielded
def train_source(
    data: Images | Store,
    *,
    backbone: str | None = None,
    pretrained: str | None = None,
    epochs: int | None = None,
    tune: str | None = None,
    batch_size: int | None = None,
    lr: float | None = None,
    seed: int | None = None,
    uncertainty: str | None = None,
    preset: str | None = None,
    runtime: RuntimeSettings | None = None,
    device: str | None = None,
    run: str | Path | None = None,
    resume: bool = False,
    log: str = "tensorboard",
    progress: ShowProgress = None,
    **options: Setting,
) -> SourceModel:
    """Train a source model on labelled images, and fit its posterior.

    Args:
        data: Labelled images: anything that `ImageData` takes.
        backbone: One of our small networks, or a timm model.
        pretrained: auto, none, offline, timm (download), or a weights file.
        epochs: Largest number of passes over the images.
        tune: Which parameters are trained: affine, new, norm, all or auto.
        batch_size: Images per step.
        lr: Learning rate of the new layers at the first step.
        seed: Seed of everything that is drawn.
        uncertainty: Where certainty comes from: posterior, point, mc-dropout or ensemble.
        preset: default, paper, authors or shot.
        runtime: Where to compute.
        device: "auto", "cpu" or "cuda"; short for runtime={"device": …}.
        run: Folder for the run, which then holds what the command would have written.
        resume: Whether to continue an interrupted run in `run`.
        log: Who else records the run: tensorboard (nobody), mlflow or wandb, where their own settings say.
        progress: True, False, or a function of (images seen, images in all, figures).
        **options: Other fields of `usfan.config.TrainConfig`.
    """
    settings: dict[str, Setting] = dict(
        backbone=backbone,
        pretrained=pretrained,
        epochs=epochs,
        tune=tune,
        batch_size=batch_size,
    )
    settings |= dict(lr=lr, seed=seed, uncertainty=uncertainty, preset=preset, **options)
    return workflow.train(
        as_store_or_images(data),
        settings,
        start_runtime(runtime, device),
        functools.partial(for_api, progress),
        Output(run, resume, tracker=log),
    )


@shielded
def attach_posterior(
    module: nn.Module,
    data: Images,
    head: str | None = None,
    *,
    classes: Sequence[str] | str | Path | None = None,
    prior: float | str = "evidence",
    damping: str = "exact",
    curvature: str = "sum",
    weight_decay: float | None = None,
    spec: InputSpec | ImageProcessor | None = None,
    uncertainty: str = "posterior",
    dropout_rate: float | None = None,
    members: int = 8,
    runtime: RuntimeSettings | None = None,
    device: str | None = None,
    progress: CountImages = None,
) -> SourceModel:
    """Fit a posterior to a classifier that is already trained. Nothing is retrained, and the module is copied.

    Args:
        module: A torch classifier that ends in a Linear layer, or an image classifier of transformers.
        data: Images of the training domain, preferably labelled.
        head: Name of that Linear layer; models of timm and transformers know theirs.
        classes: Names of the outputs in the module's order, as a sequence or a file. If labels show that the order is
            wrong, it is refused, and the error names the order that fits.
        prior: Prior precision: a positive number, "evidence", or "weight-decay" (× the number of images).
        damping: How the prior enters the factors: "exact" or "factored".
        curvature: Of the loss summed over the images ("sum") or of its mean ("mean").
        weight_decay: Weight decay of the training, for prior="weight-decay".
        spec: Input of the module, or the image processor of a transformers model; guessed for networks of your own.
        uncertainty: Where certainty comes from: "posterior", "point", "mc-dropout" or "ensemble".
        dropout_rate: Rate of MC dropout.
        members: Heads of an ensemble, which needs labels.
        runtime, device: Where to compute.
        progress: True, False, or a function that is called with the number of images just seen.
    """
    find_uncertainty(uncertainty)
    images = as_images(data)
    names = read_classes(classes) if isinstance(classes, (str, Path)) else classes
    fit = functools.partial(
        attach,
        module,
        images,
        head,
        classes=names,
        spec=spec,
        runtime=start_runtime(runtime, device),
        settings=FitSettings(
            uncertainty,
            prior,
            damping,
            weight_decay,
            dropout_rate,
            members=members,
            curvature=curvature,
        ),
    )
    with image_progress(progress, "fitting", len(images)) as advance:
        return fit(progress=advance)


@shielded
def adapt(
    source: ModelSource | Sequence[ModelSource],
    data: Images | Store,
    method: str = "auto",
    *,
    setting: str | None = None,
    tune: str | None = None,
    witness: str | Tensor | None = None,
    guard: bool | None = None,
    labels: LabelSource | None = None,
    epochs: int | None = None,
    lr: float | None = None,
    batch_size: int | None = None,
    seed: int | None = None,
    uncertainty: str | None = None,
    preset: str | None = None,
    module: nn.Module | None = None,
    runtime: RuntimeSettings | None = None,
    device: str | None = None,
    run: str | Path | None = None,
    resume: bool = False,
    log: str = "tensorboard",
    progress: ShowProgress = None,
    **options: Setting,
) -> AdaptedModel:
    """Adapt a model to images of a new domain. Labels in the data are not used.

    Args:
        source: A model, its folder or a Hub id. Several with the same classes give their mixture (`MixtureModel`).
        data: The new images: anything that `ImageData` takes.
        method: A name in `usfan.METHODS`; "auto" is u-sfan++ if a pretrained witness is available, else u-sfan.
        setting: Which classes the images show: auto, closed, partial, open or universal.
        tune: Which parameters are trained: auto, affine, new, norm or all.
        witness: Frozen pretrained network: auto, none, NAME, NAME:WEIGHTS, a folder or a Hub id; or its features.
        guard: Whether to keep the adapted model only if the images show a gain.
        labels: Your own labels of a few of the images.
        epochs, lr, batch_size, seed: Of the training.
        uncertainty: Where certainty comes from: auto, posterior, point, mc-dropout or ensemble.
        preset: default, paper, authors or shot.
        module: The network of a model folder that is not timm's.
        runtime, device: Where to compute.
        run, resume, log: Folder for the run; whether to continue the run in it; who else records it: mlflow or wandb.
        progress: True, False, or a function of (images seen, images in all, figures).
        **options: Other fields of `usfan.config.AdaptConfig`, and settings of the method (`usfan methods NAME`).
    """
    settings: dict[str, Setting] = dict(method=method, setting=setting, tune=tune, guard=guard)
    settings |= dict(epochs=epochs, lr=lr, batch_size=batch_size, seed=seed)
    settings |= dict(uncertainty=uncertainty, preset=preset, **options)
    if isinstance(witness, str):
        settings["witness"] = witness
    return workflow.adapt(
        open_sources(source, module),
        as_store_or_images(data),
        settings,
        start_runtime(runtime, device),
        functools.partial(for_api, progress),
        output=Output(run, resume, record={"labels": label_record(labels)}, tracker=log),
        labels=labels,
        witness=witness if isinstance(witness, Tensor) else None,
    )


def as_store_or_images(data: Images | Store) -> ImageData | Store:
    """Images or features that are in memory as a `Store` stay as they are."""
    return data if isinstance(data, Store) else as_images(data)


def open_sources(
    source: ModelSource | Sequence[ModelSource], module: nn.Module | None
) -> list[SourceHandle]:
    sources = source if isinstance(source, (list, tuple)) else [source]
    return [
        workflow.open_source(one, module, f"source {number}")
        for number, one in enumerate(sources, start=1)
    ]


def label_record(labels: LabelSource | None) -> str | None:
    """The user's labels in config.yaml."""
    if labels is None:
        return None
    return str(labels) if isinstance(labels, (str, Path)) else "labels in memory"


@shielded
def check(
    model: ModelSource,
    data: Images,
    labels: LabelSource | None = None,
    *,
    module: nn.Module | None = None,
    runtime: RuntimeSettings | None = None,
    device: str | None = None,
    progress: bool | None = None,
) -> Check:
    """How good a model is on images without labels: accuracy, shift, classes, the images that fit least.

    Args:
        model: A model, its folder or a Hub id.
        data: The images. Labels in them are not used.
        labels: Labels of images drawn at random, as for `adapt`: accuracy is measured instead of estimated.
        module: The network of a model folder that is not timm's.
        runtime, device: Where to compute.
        progress: True (the default) or False.
    """
    with for_api(progress, "checking"):
        return workflow.check(
            as_model(model, module), as_images(data), start_runtime(runtime, device), labels
        )


@shielded
def evaluate(
    model: ModelSource,
    data: Images,
    *,
    open_set: bool = False,
    labels: LabelSource | None = None,
    batch_size: int = 64,
    module: nn.Module | None = None,
    runtime: RuntimeSettings | None = None,
    device: str | None = None,
    progress: CountImages = None,
) -> Figures:
    """Accuracy and calibration on labelled images, as in `metrics.json`. Percentages go from 0 to 100.

    Args:
        model: A model, its folder or a Hub id.
        data: Labelled images. Classes are matched by name.
        open_set: Whether classes that the model does not know count as unknown.
        labels: Labels of a few of the images, as for `adapt`: the figures are of these images.
        batch_size: Images at a time.
        module: The network of a model folder that is not timm's.
        runtime, device: Where to compute.
        progress: True, False, or a function that is called with the number of images just seen.
    """
    images = as_images(data)
    with image_progress(progress, "evaluating", len(images)) as advance:
        return run_evaluation(
            as_model(model, module),
            images,
            open_set=open_set,
            batch_size=batch_size,
            runtime=start_runtime(runtime, device),
            progress=advance,
            labels=labels,
        )


@shielded
def report_runs(
    runs: Sequence[str | Path], out: str | Path | None = None, root: str | Path | None = None
) -> Path:
    """Write one HTML page about one or more run folders, as `usfan report` does. Returns the file.

    Args:
        runs: Run folders, or folders of runs.
        out: The file; by default report.html in the first run.
        root: Folder from which the page may show images of runs that were made elsewhere.
    """
    from usfan.report.page import write_report

    file = None if out is None else Path(out)
    return write_report(
        [Path(run) for run in runs], file, root=None if root is None else Path(root)
    )


@shielded
def export(model: ModelSource, path: str | Path) -> float:
    """Write the model as one ONNX graph. Returns the largest difference between onnxruntime's and our predictions.

    Args:
        model: A model, its folder or a Hub id.
        path: The file.
    """
    from usfan.store.onnx import export_onnx

    return export_onnx(as_model(model), Path(path))


@shielded
def run_study(
    root: str | Path,
    *,
    methods: Sequence[str] | None = None,
    seeds: Sequence[int] | None = None,
    pairs: Sequence[str] | None = None,
    out: str | Path = "runs/study",
    runtime: RuntimeSettings | None = None,
    device: str | None = None,
    **options: Setting,
) -> Path:
    """Compare methods on all pairs of the domain folders in `root`, as `usfan study` does. Returns the folder `out`.

    Args:
        root: Folder of domain folders, each with one folder of images per class.
        methods: Names in `usfan.METHODS`.
        seeds: One run for each.
        pairs: SOURCE-TARGET; all of them by default.
        out: Folder for the tables, figures and the report.
        runtime, device: Where to compute.
        **options: Settings of training and adaptation.
    """
    from usfan.study.command import study

    settings: dict[str, object] = {"data": str(root), "out": str(out), **options}
    for name, values in {"methods": methods, "seeds": seeds, "pairs": pairs}.items():
        if values is not None:
            settings[name] = list(values)
    study(settings, start_runtime(runtime, device))
    return Path(out)
