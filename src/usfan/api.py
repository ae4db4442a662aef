"""The functions of `import usfan`, which do the same as the commands.

Arguments that they share:

    model, source   a model, its folder, or a Hub id
    data            anything that `ImageData` takes
    device          "auto", "cpu" or "cuda"; short for runtime={"device": …}
    run             a folder, which then holds what the command would have written
    progress        True (the default), False, or a function of (steps done, all steps, figures)
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from usfan.adaptation.adapt import adapt as run_adaptation
from usfan.adaptation.given import Given
from usfan.adaptation.settings import begun_settings, resolve
from usfan.adaptation.several import mix_adapted, with_passes
from usfan.adaptation.witness import has_witness
from usfan.adaptation.worth import describe
from usfan.artifacts.folder import MEMBER
from usfan.artifacts.model import AdaptedModel, MixtureModel, SourceModel, as_images, as_model, check_members
from usfan.compute.passes import engine_store
from usfan.compute.runtime import as_runtime
from usfan.config import UNCERTAINTIES, TrainConfig, make_config
from usfan.config_checks import MOST_SOURCES, one_of
from usfan.data.cache import PixelStore
from usfan.data.class_file import read_classes
from usfan.data.few_labels import few_labels
from usfan.data.images import FileImages
from usfan.data.labels import Labels, some
from usfan.data.sources import ImageData
from usfan.errors import ConfigError
from usfan.evaluation.changes import write_changes
from usfan.evaluation.evaluate import evaluate as run_evaluation
from usfan.evaluation.samples import adaptation_metrics, save_samples
from usfan.progress import bar, for_api
from usfan.runs.folder import RunFolder
from usfan.training.posthoc import attach_posterior as attach
from usfan.training.source import Rival
from usfan.training.source import train_source as train

log = logging.getLogger(__name__)


def train_source(
    data: Any,
    *,
    runtime: Any = None,
    device: Any = None,
    run: Any = None,
    resume: bool = False,
    progress: Any = None,
    **settings: Any,
) -> SourceModel:
    """Train a source model on labelled images, and fit its posterior.

    Args:
        data: Labelled images: anything that `ImageData` takes.
        runtime: Settings of the machine (`usfan.config.RuntimeConfig`), as a mapping.
        device: "auto", "cpu" or "cuda".
        run: Folder for the run; with `resume`, an interrupted run in it continues.
        resume: Whether to continue the run in `run`.
        progress: True, False, or a function of (steps done, all steps, figures).
        **settings: Fields of `usfan.config.TrainConfig`: backbone, epochs, seed, …
    """
    config = make_config(TrainConfig, settings)
    engine, data = as_runtime(runtime, device), as_data(data)
    recorded = {"data": data_name(data), **dataclasses.asdict(config)}
    with opened_run(run, recorded, "train", resume) as (folder, own):
        if own and folder.finished() is not None:
            return as_model(folder.path)
        with for_api(progress, "training") as told:
            model = train(data, runtime=engine, run=folder, progress=told, **settings)
        if own and engine.rank == 0:
            model.save(folder.path)
            folder.save_metrics({"classes": len(model.classes), "images": len(data), **model.summary})
            folder.drop_checkpoints()
    return model


def attach_posterior(
    module: nn.Module,
    data: Any,
    head: str | None = None,
    *,
    classes: Any = None,
    runtime: Any = None,
    device: Any = None,
    progress: Any = None,
    uncertainty: str = "posterior",
    dropout_rate: float | None = None,
    members: int = 8,
    **options: Any,
) -> SourceModel:
    """Fit a posterior to a classifier that is already trained. Nothing is retrained, and the module is copied.

    Args:
        module: A torch classifier that ends in a Linear layer.
        data: Images of the training domain, preferably labelled.
        head: Name of that Linear layer; timm models know theirs.
        classes: Names of the outputs in the module's order, as a sequence or a file. If labels show that the order is
            wrong, it is refused, and the error names the order that fits.
        runtime: Settings of the machine, as a mapping.
        device: "auto", "cpu" or "cuda".
        progress: True, False, or a function that is called with the number of images just seen.
        uncertainty: Where certainty comes from: "posterior", "point", "mc-dropout" or "ensemble".
        dropout_rate: Rate of MC dropout.
        members: Heads of an ensemble, which needs labels.
        **options: prior, damping, weight_decay, and spec, the `InputSpec` of the module. timm models know their input;
            for others it is guessed.
    """
    one_of("uncertainty", uncertainty, UNCERTAINTIES)
    options["rival"] = Rival(uncertainty, dropout_rate, members)
    if isinstance(classes, (str, Path)):
        classes = read_classes(classes)
    data, engine = as_data(data), as_runtime(runtime, device)
    if callable(progress):
        return attach(module, data, head, classes=classes, runtime=engine, progress=progress, **options)
    with for_api(progress, "fitting"), bar("fitting", len(data)) as shown:
        return attach(module, data, head, classes=classes, runtime=engine, progress=shown.advance, **options)


def adapt(
    source: Any,
    data: Any,
    method: str = "auto",
    *,
    module: nn.Module | None = None,
    runtime: Any = None,
    device: Any = None,
    run: Any = None,
    resume: bool = False,
    progress: Any = None,
    labels: Any = None,
    **settings: Any,
) -> AdaptedModel:
    """Adapt a model to images of a new domain. Labels in the data are not used.

    Args:
        source: A model, its folder or a Hub id. A list of models with the same classes: each is adapted, and the
            result is their mixture (`MixtureModel`).
        data: The new images: anything that `ImageData` takes.
        method: A name in `usfan.METHODS`; "auto" is u-sfan++ if a pretrained witness is available, else u-sfan.
        module: The network of a model folder that is not timm's.
        runtime: Settings of the machine, as a mapping.
        device: "auto", "cpu" or "cuda".
        run: Folder for the run; with `resume`, an interrupted run in it continues.
        resume: Whether to continue the run in `run`.
        progress: True, False, or a function of (steps done, all steps, figures).
        labels: A few labels of your own: a table with the columns path and label, or a mapping from paths (positions,
            for images in memory) to class names. `history["labels"]` of the result says what they are worth.
        **settings: Fields of `usfan.config.AdaptConfig`, or settings of the method.
    """
    if isinstance(source, (list, tuple)) and len(source) > 1:
        options = {"module": module, "runtime": runtime, "device": device, "resume": resume, "labels": labels}
        return adapt_several(source, data, method, run=run, progress=progress, **options, **settings)
    source = source[0] if isinstance(source, (list, tuple)) and source else source
    name = str(source) if isinstance(source, (str, Path)) else "a model in memory"
    source, engine = as_model(source, module), as_runtime(runtime, device)
    given = {"method": method, **settings}
    config, _ = settled(source, given)
    data = for_run(as_data(data), source.classes, config, figures=isinstance(run, (str, Path)))
    table = None if labels is None else few_labels(labels, data, source.classes)
    recorded = {**member_settings(source, name, data, given), "labels": None}
    if labels is not None:
        recorded["labels"] = str(labels) if isinstance(labels, (str, Path)) else "labels in memory"
    with opened_run(run, recorded, "adapt", resume) as (folder, own):
        if own and folder.finished() is not None:
            return as_model(folder.path, module)  # type: ignore[return-value]
        with for_api(progress, "adapting") as told:
            model = run_adaptation(source, data, runtime=engine, run=folder, progress=told, labels=table, **given)
        assert model.passes is not None
        saved, decoded = model, not hasattr(data, "without_labels")
        if not decoded:
            model.passes = dataclasses.replace(model.passes, images=data.without_labels())
        if own and engine.rank == 0:
            if decoded:  # pixels that were decoded before: each is in its place
                places = dataclasses.replace(model.passes, kept=torch.arange(len(data)))
                saved, data = dataclasses.replace(model, passes=places), images_of(data)
            save_adaptation(folder, saved, data, open_set=config.may_be_new)
    return model


def adapt_several(
    sources: Sequence[Any],
    data: Any,
    method: str = "auto",
    *,
    module: nn.Module | None = None,
    runtime: Any = None,
    device: Any = None,
    run: Any = None,
    resume: bool = False,
    progress: Any = None,
    labels: Any = None,
    names: Sequence[str] = (),
    private: bool = False,
    **settings: Any,
) -> MixtureModel:
    """`adapt` for several sources. The run of each is a folder in `run`: member-1, member-2, … `names` say where the
    sources come from."""
    names = names or [str(one) if isinstance(one, (str, Path)) else f"source {n + 1}" for n, one in enumerate(sources)]
    models, engine = [as_model(one, module) for one in sources], as_runtime(runtime, device)
    must_be_several(models, engine)
    check_members([(one.classes, one.spec) for one in models])
    given = {"method": method, **settings}
    config, row = settled(models[0], given)
    data = for_run(as_data(data), models[0].classes, config, figures=run is not None)
    with opened_run(run, member_settings(models[0], names, data, given), "adapt", resume) as (folder, own):
        if own and folder.finished() is not None:
            return as_model(folder.path, module)  # type: ignore[return-value]
        store, images = engine_store(data, models[0].spec, engine), data
        if not hasattr(data, "without_labels"):  # pixels that were decoded before: each is in its place
            store = dataclasses.replace(store, kept=torch.arange(len(store)))
            images = images_of(store)
        members = []
        for number, source in enumerate(models):
            recorded = member_settings(source, names[number], data, given)
            with opened_run(member_path(folder, number + 1), recorded, "adapt", True) as (part, _):
                with for_api(progress, f"adapting {number + 1} of {len(models)}") as told:
                    members.append(adapt_member(source, store, part, engine, told, data, labels, given))
                if part is not None and part.finished() is None:
                    save_adaptation(part, members[-1], images, open_set=config.may_be_new, private=private)
        mixture = mix_adapted(members, config, row, () if private else names)
        assert mixture.passes is not None
        if labels is not None:
            few = Given.of_table(few_labels(labels, data, mixture.classes)[store.kept], torch.device("cpu"))
            mixture.history["labels"] = describe(few, mixture.passes.before.logits.argmax(dim=1).cpu())
            mixture.summary = {**mixture.summary, "labels": mixture.history["labels"]}
            mixture.passes = dataclasses.replace(mixture.passes, given=few.rows)
        if images is data:
            mixture.passes = dataclasses.replace(mixture.passes, images=data.without_labels())
        if folder is not None:
            folder.log("mixed", mixing=mixture.mixing, shares=list(mixture.shares))
            save_adaptation(folder, mixture, images, open_set=config.may_be_new, private=private)
    return mixture


def adapt_member(
    source: SourceModel, store: Any, run: Any, engine: Any, progress: Any, data: Any, labels: Any, given: dict[str, Any]
) -> AdaptedModel:
    """One source of several, adapted; or, if its run had ended before, as it was saved."""
    if run is not None and run.finished() is not None:
        return with_passes(source, as_model(run.path), store, engine)  # type: ignore[arg-type]
    table = None if labels is None else few_labels(labels, data, source.classes)[store.kept]
    return run_adaptation(source, store, runtime=engine, run=run, progress=progress, labels=table, **given)


def member_settings(source: SourceModel, name: Any, data: Any, given: dict[str, Any]) -> dict[str, Any]:
    """What config.yaml holds of a run with this source."""
    return {"source": name, "data": data_name(data), **settled_values(source, given)}


def member_path(folder: RunFolder | None, number: int) -> Path | None:
    """The run folder of a member. One that is there must be a folder, not a link."""
    if folder is None:
        return None
    name = MEMBER.format(number)
    with folder.opened() as opened:
        there = opened.kind(name) != "missing"
    return folder.inside(name) if there else folder.path / name


def settled(source: SourceModel, given: dict[str, Any]) -> Any:
    """The settings of a run with this model, and its method."""
    return resolve(named(given), **facts_of(source))


def settled_values(source: SourceModel, given: dict[str, Any]) -> dict[str, Any]:
    """The same as a table for config.yaml."""
    return begun_settings(named(given), **facts_of(source))


def named(given: dict[str, Any]) -> dict[str, Any]:
    """The settings that have a name in a file: a witness may be a table of features."""
    return {k: v for k, v in given.items() if k != "witness" or isinstance(v, str)}


def facts_of(source: SourceModel) -> dict[str, Any]:
    witness = has_witness(source.architecture, source.summary)
    return {"pretrained": source.pretrained, "classes": len(source.classes), "witness": witness}


def for_run(data: Any, classes: Sequence[str], config: Any, *, figures: bool = True) -> Any:
    """The target as a run with these settings takes it. Names that the model does not know may be slips: the log says
    so, unless the user said that there are new classes. Without `figures` at the end, labels are not looked at."""
    if not hasattr(data, "for_model"):  # pixels that were decoded before
        return data
    names = data.unknown_names(classes) if config.setting == "auto" else []
    if names:
        what = "labels of these images count as new classes (check the names, or pass --open-set)"
        log.warning("%s: %s: not among the classes of the model; %s", data.name, some(names), what)
    return data.for_model(classes, open_set=config.may_be_new) if figures else data


def must_be_several(models: Sequence[SourceModel], engine: Any) -> None:
    if len(models) > MOST_SOURCES:
        raise ConfigError(f"at most {MOST_SOURCES} sources can be mixed; got {len(models)}")
    if any(model.kind == "mixture" for model in models):
        raise ConfigError("a mixture cannot be a source: give its members, the folders member-1, member-2, … in it")
    if engine.world > 1:
        raise ConfigError("several sources are adapted in one process: leave --devices and --nodes out")


def save_adaptation(
    folder: RunFolder, model: AdaptedModel, data: Any, *, open_set: bool, private: bool = False
) -> dict[str, Any]:
    """All that a run folder of `adapt` holds: the model, metrics.json, what was seen of each image, what changed."""
    data = data.for_model(model.classes, open_set=open_set)
    model.save(folder.path, private=private)
    if model.alternative is not None:
        model.alternative.save(folder.inside("adapted"), private=private)
    metrics = adaptation_metrics(model, data, open_set=open_set)
    metrics |= {} if private else write_changes(folder.path, model, data)
    save_samples(folder.path, model, data, private=private)
    if private:
        folder.withhold("source", "data", "labels", "cache", "root")
    folder.save_metrics(metrics)
    folder.drop_checkpoints()
    return metrics


def evaluate(
    model: Any,
    data: Any,
    *,
    module: nn.Module | None = None,
    open_set: bool = False,
    batch_size: int = 64,
    runtime: Any = None,
    device: Any = None,
    progress: Any = None,
    labels: Any = None,
    **options: Any,
) -> dict[str, Any]:
    """Accuracy and calibration on labelled images, as in `metrics.json`. Percentages go from 0 to 100.

    Args:
        model: A model, its folder or a Hub id.
        data: Labelled images. Classes are matched by name.
        module: The network of a model folder that is not timm's.
        open_set: Whether classes that the model does not know count as unknown.
        batch_size: Images at a time.
        runtime: Settings of the machine, as a mapping.
        device: "auto", "cpu" or "cuda".
        progress: True, False, or a function that is called with the number of images just seen.
        labels: Labels of a few of the images, as for `adapt`: the figures are of these images.
        **options: Further options of `usfan.evaluation.evaluate.evaluate`.
    """
    options |= {"labels": labels, "folder": model if isinstance(model, (str, Path)) else None}
    model, data, engine = as_model(model, module), as_data(data), as_runtime(runtime, device)
    options |= {"open_set": open_set, "batch_size": batch_size, "runtime": engine}
    if callable(progress):
        return run_evaluation(model, data, progress=progress, **options)
    with for_api(progress, "evaluating"), bar("evaluating", len(data)) as shown:
        return run_evaluation(model, data, progress=shown.advance, **options)


def report_model(model: Any, out: str | Path, data: Any = None) -> Path:
    """Write an HTML report to the file `out`.

    Args:
        model: What `adapt` returned; any other model needs `data`.
        out: The file.
        data: Images, for a model that was loaded, and labels.
    """
    from usfan.report.of_model import write_model_report

    return write_model_report(as_model(model), Path(out), None if data is None else as_data(data))


SourceModel.report = report_model


def as_data(data: Any) -> Any:
    """An `ImageData` of whatever was given; pixels that were decoded before stay as they are."""
    return data if isinstance(data, PixelStore) else as_images(data)


def images_of(store: Any) -> Any:
    """Decoded pixels as an `ImageData` with their labels. Features have no image to show: they get blank ones."""
    pixels = store.pixels.cpu() if store.pixels.ndim == 4 else torch.zeros(len(store), 1, 1, 1, dtype=torch.uint8)
    data = ImageData(pixels, name="pixels in memory" if store.pixels.ndim == 4 else "features in memory")
    if store.labels is not None:
        named = store.classes != tuple(map(str, range(len(store.classes))))
        data._set_labels(Labels(store.labels.cpu(), store.classes, named))
    if store.paths is not None:
        data._images, data.paths = FileImages(store.paths), store.paths
    return data


def data_name(data: Any) -> str:
    paths = getattr(data, "paths", None)
    name = getattr(data, "name", "pixels in memory")
    return str(Path(paths[0]).parent) if paths is not None and len(paths) == 1 else str(name)


@contextlib.contextmanager
def opened_run(run: Any, recorded: dict[str, Any], command: str, resume: bool) -> Iterator[tuple[Any, bool]]:
    """The run folder, and whether it was opened here; a `RunFolder` that the caller opened stays the caller's."""
    if run is None or isinstance(run, RunFolder):
        yield run, False
        return
    if not isinstance(run, (str, Path)):
        raise ConfigError(f"run must be the path of a folder; got a {type(run).__name__}")
    with RunFolder(run, recorded, command=command, resume=resume) as folder:
        yield folder, True
