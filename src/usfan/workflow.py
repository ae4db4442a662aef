"""The walks of `train`, `adapt` and `check`, which the command line and the Python API call. An adaptation:

    plan      every setting gets a value, from the user, the preset, the method and facts about the model
    prepare   images or features, the witness's description, the judge, the user's labels: each once
    run       train, and let the guard decide                                   → AdaptedModel
    save      the model, metrics.json and tables of the images, into the run folder

Several source models walk one after another over the same images, and the result is their mixture.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from usfan.adaptation.check import Check, check_model, look_at
from usfan.adaptation.forecast import describe_plan
from usfan.adaptation.inputs import prepare
from usfan.adaptation.plan import Plan, SourceFacts, plan_adaptation
from usfan.adaptation.run import run as run_adaptation
from usfan.adaptation.several import mix_adapted, passes_of, with_passes
from usfan.adaptation.tune import MEASURED_IMAGES
from usfan.adaptation.user_labels import record_user_labels
from usfan.config import WITHHELD, TrainConfig, make_config
from usfan.config_checks import MOST_SOURCES
from usfan.data.few_labels import NONE, NOT_RANDOM, FewLabels, few_labels
from usfan.data.images import common_folder
from usfan.data.labels import some
from usfan.data.sources import ImageData
from usfan.data.store import Store
from usfan.data.views import InputSpec
from usfan.engine.loop import Progress
from usfan.engine.passes import engine_store
from usfan.engine.runtime import Runtime, start_runtime
from usfan.errors import ConfigError, option
from usfan.files import write_json
from usfan.labelling.questions import save_questions
from usfan.labelling.target import stored_naming
from usfan.maths.decision import SKIPPED
from usfan.maths.user_labels import UserLabels
from usfan.metrics.changes import write_changes
from usfan.metrics.image_table import adaptation_metrics, save_image_table
from usfan.models.backbones import default_backbone
from usfan.store.model import AdaptedModel, MixtureModel, SourceModel, as_model, check_members
from usfan.store.model_folder import MEMBER, load_config
from usfan.store.run_folder import RunFolder, open_run
from usfan.training.source import train_source

log = logging.getLogger(__name__)

WITNESS = "witness.json"
Display = Callable[[str], contextlib.AbstractContextManager[Progress | None]]
"""Opens the display of a part of the walk, by its label."""


@dataclass(frozen=True)
class SourceHandle:
    """A source model that need not be loaded yet: a plan needs only its folder."""

    name: str
    """Where it comes from, for the record."""
    classes: tuple[str, ...]
    spec: InputSpec
    facts: SourceFacts
    load: Callable[[], SourceModel] = field(repr=False)
    module: nn.Module | None = field(default=None, repr=False)
    """The network, if the model's folder does not hold its architecture."""


@dataclass(frozen=True)
class Output:
    """Where a run is written, and what is recorded of it."""

    folder: str | Path | None = None
    """None: nothing is written."""
    resume: bool = False
    """Whether an interrupted run in the folder continues."""
    private: bool = False
    """Whether paths and file names are left out."""
    record: Mapping[str, Any] = field(default_factory=dict)
    """Further lines of config.yaml."""
    tracker: str = "tensorboard"
    """Who else records the run, a name in `usfan.store.trackers.TRACKERS`."""
    started: float = field(default_factory=time.perf_counter)
    """When the command started, by `time.perf_counter`."""


def describe(
    sources: Sequence[SourceHandle],
    data: ImageData,
    settings: Mapping[str, Any],
    runtime: Runtime,
) -> str:
    """The plan in words, and the time that it will take, measured on a few of the images. Nothing is trained."""
    check_sources(sources, runtime)
    source = sources[0]
    plan = make_plan(source, settings)
    few = data.without_labels().subset(range(min(MEASURED_IMAGES, len(data))))
    started = time.perf_counter()
    images = engine_store(few, source.spec, runtime)
    decoding_seconds = time.perf_counter() - started
    lines = describe_plan(plan, source.load(), images, len(data), runtime)
    lines.append(f"decoding: about {decoding_seconds / len(images) * len(data):.0f} s")
    if len(sources) > 1:
        lines.append(f"this {len(sources)} times, once for each source")
    return "\n".join(lines)


def check(model: SourceModel, data: ImageData, runtime: Runtime, labels: Any = None) -> Check:
    """How good the model is on these images. `labels` are the user's of images drawn at random."""
    few = None
    if labels is not None:
        few = few_labels(labels, data, model.classes, open_set=True)
        if few.from_questions:
            raise ConfigError(
                f"{NOT_RANDOM}: they measure nothing about the others. Label images that you draw at random"
            )
    images, witness = look_at(model, data.without_labels(), runtime)
    return check_model(model, images, runtime, data.where, few, witness)


def train(
    data: ImageData | Store,
    settings: Mapping[str, Any],
    runtime: Runtime,
    display: Display,
    output: Output,
) -> SourceModel:
    """Stage 1 and its run folder. `settings` are fields of `TrainConfig`; None means the default."""
    settings = {name: value for name, value in settings.items() if value is not None}
    config = make_config(TrainConfig, settings)
    settings["backbone"] = config.backbone or default_backbone(config.pretrained)
    record = {"data": data_name(data), **dataclasses.asdict(config), **output.record}
    record["backbone"] = settings["backbone"]
    with open_output(output, record, runtime, command="train") as folder:
        if folder is not None and folder.finished() is not None:
            folder.drop_checkpoints()
            return as_model(folder.path)
        with display("training") as progress:
            model = train_source(
                data, runtime=runtime, run=folder, progress=progress, **settings
            )
        if folder is not None and runtime.rank == 0:
            model.save(folder.path, private=output.private)
            metrics: dict[str, object] = {
                "classes": len(model.classes),
                "images": len(data),
                "skipped": len(data.unreadable),
            }
            if output.private:
                folder.withhold()
            else:
                log_skipped(folder, data)
                metrics |= model.summary
            folder.save_metrics(metrics)
            folder.drop_checkpoints()
    return model


def open_source(
    source: SourceModel | str | Path,
    module: nn.Module | None = None,
    name: str = "a model in memory",
) -> SourceHandle:
    """A model, its folder or a Hub id. `module` is the network of a folder that is not timm's."""
    if isinstance(source, (str, Path)):
        stored = load_config(source)
        facts = SourceFacts.of(
            stored.architecture, stored.summary, len(stored.classes), stored.spec.channels
        )

        def load() -> SourceModel:
            return as_model(source, module)

        return SourceHandle(str(source), stored.classes, stored.spec, facts, load, module)
    model = as_model(source)
    if isinstance(model, MixtureModel):
        raise ConfigError(
            "a mixture cannot be a source: give its members, the folders member-1, member-2, … in it"
        )
    facts = SourceFacts.of(
        model.architecture, model.summary, len(model.classes), model.spec.channels
    )
    return SourceHandle(name, model.classes, model.spec, facts, lambda: model)


def make_plan(
    source: SourceHandle, settings: Mapping[str, Any], witness: Tensor | None = None
) -> Plan:
    """The plan for a source. Features that the caller brings (`witness`) count as a witness that is available."""
    facts = source.facts
    if witness is not None:
        facts = dataclasses.replace(facts, witness=True)
    return plan_adaptation(settings, facts)


def adapt(
    sources: Sequence[SourceHandle],
    data: ImageData | Store,
    settings: Mapping[str, Any],
    runtime: Runtime,
    display: Display,
    *,
    output: Output | None = None,
    labels: Any = None,
    witness: Tensor | None = None,
) -> AdaptedModel:
    """Plan, prepare, run and save.

    `labels` are the user's for a few of the images, as `few_labels` takes them.
    `witness` holds features that the caller brings, N × F, instead of a network that computes them.
    """
    output = output or Output()
    check_sources(sources, runtime)
    source = sources[0]
    plan = make_plan(source, settings, witness)
    if isinstance(data, ImageData):
        data = match_data(data, source.classes, plan, figures=output.folder is not None)
    elif output.folder is not None:
        raise ConfigError("a run folder needs the images themselves; these are decoded already")
    if witness is not None and len(sources) > 1:
        raise ConfigError(
            "features of a witness are for one source model; name the witness instead"
        )
    few = None if labels is None else few_labels(labels, data, source.classes)
    names = [handle.name for handle in sources]
    record = {
        "source": names[0] if len(names) == 1 else names,
        "data": data_name(data),
        **plan.settings(),
        **output.record,
    }
    with open_output(output, record, runtime) as folder:
        if folder is not None and folder.finished() is not None:
            folder.drop_checkpoints()
            return load_adapted(folder.path, source.module)
        model: AdaptedModel
        if len(sources) > 1:
            model = adapt_several(
                sources, plan, data, settings, runtime, display, output, folder, record, few
            )
        else:
            with display("adapting") as progress:
                inputs = prepare(plan, source.load(), data, runtime, few, witness)
                keep_witness(folder, inputs.witness_record)
                model = run_adaptation(inputs, runtime, folder, progress)
        model.history["seconds"] = round(time.perf_counter() - output.started, 3)
        if isinstance(data, ImageData):
            model.passes = dataclasses.replace(passes_of(model), images=data.without_labels())
            if runtime.rank == 0 and folder is not None:
                save_adaptation(folder, model, data, plan, few, private=output.private)
    return model


def decode(data: ImageData | Store, spec: InputSpec, runtime: Runtime) -> Store:
    """The images without their labels."""
    if isinstance(data, Store):
        return data
    return engine_store(data.without_labels(), spec, runtime)


def adapt_model(
    source: SourceModel,
    data: ImageData | Store,
    method: str = "auto",
    *,
    runtime: Runtime | None = None,
    run: RunFolder | None = None,
    progress: Progress | None = None,
    labels: Any = None,
    witness: str | Tensor | None = None,
    **settings: Any,
) -> AdaptedModel:
    """plan, prepare and run, for a model that is loaded: studies save in their own way."""
    runtime = runtime or start_runtime()
    settings["method"] = method
    features = witness if isinstance(witness, Tensor) else None
    if features is None:
        settings["witness"] = witness
    plan = make_plan(open_source(source), settings, features)
    few = None if labels is None else few_labels(labels, data, source.classes)
    inputs = prepare(plan, source, data, runtime, few, features)
    return run_adaptation(inputs, runtime, run, progress)


def adapt_several(
    sources: Sequence[SourceHandle],
    plan: Plan,
    data: ImageData | Store,
    settings: Mapping[str, Any],
    runtime: Runtime,
    display: Display,
    output: Output,
    folder: RunFolder | None,
    record: Mapping[str, Any],
    labels: FewLabels | None,
) -> MixtureModel:
    """Adapt each source in a run folder of its own inside that of the mixture (member-1, member-2, …), and mix them."""
    with display("decoding"):
        images = decode(data, sources[0].spec, runtime)
    members = []
    for number, source in enumerate(sources, start=1):
        member_plan = make_plan(source, settings)
        member_output = Output(member_path(folder, number), resume=True, private=output.private)
        member_record = {**record, "source": source.name, **member_plan.settings()}
        with open_output(member_output, member_record, runtime) as member_folder:
            if member_folder is not None and member_folder.finished() is not None:
                saved = load_adapted(member_folder.path, source.module)
                member = with_passes(source.load(), saved, images, runtime)
                members.append(with_naming(member, member_folder.path, runtime.device))
                continue
            with display(f"adapting {number} of {len(sources)}") as progress:
                few = reorder_labels(labels, sources[0].classes, source.classes)
                inputs = prepare(member_plan, source.load(), images, runtime, few)
                keep_witness(member_folder, inputs.witness_record)
                member = run_adaptation(inputs, runtime, member_folder, progress)
            members.append(member)
            if member_folder is not None and isinstance(data, ImageData):
                target = data.for_model(member.classes, open_set=member_plan.config.may_be_new)
                save_adaptation(
                    member_folder, member, target, member_plan, None, private=output.private
                )
    names = () if output.private else [source.name for source in sources]
    learn = judge = None
    if labels is not None:
        positions = images.positions.cpu()
        learn = labels.learn[positions]
        judge = labels.judge[positions].masked_fill(learn >= 0, SKIPPED)
    mixture = mix_adapted(members, plan.config, plan.method, names, judge)
    if learn is not None and bool((learn >= 0).any()):
        record_user_labels(mixture, UserLabels.of_table(learn, len(mixture.classes)))
    if folder is not None:
        folder.log("mixed", shares=list(mixture.shares))
    return mixture


def with_naming(member: AdaptedModel, folder: Path, device: torch.device) -> AdaptedModel:
    """The clusters of the target as the run of the member stored them."""
    passes = dataclasses.replace(passes_of(member), naming=stored_naming(folder, device))
    return dataclasses.replace(member, passes=passes)


def keep_witness(folder: RunFolder | None, record: Mapping[str, str] | None) -> None:
    """Record the witness of a run, and refuse to continue one that began with another: its images were described in
    another way."""
    if folder is None or record is None:
        return
    first = folder.first_record(WITNESS, dict(record))
    if first != record:
        raise ConfigError(
            f"{folder.path} began with the witness {first.get('name')} ({first.get('hash')}), and here it would be "
            f"{record['name']} ({record['hash']}): bring the same weights, or choose another {option('run')}"
        )


def reorder_labels(
    labels: FewLabels | None, classes: Sequence[str], member_classes: Sequence[str]
) -> FewLabels | None:
    """Labels that index `classes` as labels that index a member's classes, which may stand in another order."""
    if labels is None:
        return None
    known = [member_classes.index(name) for name in classes]
    # −1 (no label) takes the last entry, −2 (skipped) the one before
    order = torch.tensor([*known, len(classes), SKIPPED, NONE])
    return FewLabels(order[labels.learn], order[labels.judge])


def check_sources(sources: Sequence[SourceHandle], runtime: Runtime) -> None:
    if not sources:
        raise ConfigError("no source model is given")
    if len(sources) > MOST_SOURCES:
        raise ConfigError(f"at most {MOST_SOURCES} sources can be mixed; got {len(sources)}")
    if len(sources) > 1 and runtime.world > 1:
        raise ConfigError(
            "several sources are adapted in one process: start the command without torchrun"
        )
    check_members([(source.classes, source.spec) for source in sources])


def match_data(
    data: ImageData, classes: Sequence[str], plan: Plan, *, figures: bool
) -> ImageData:
    """The target with labels that index the model's classes, if there are any and figures are wanted. Names that the
    model does not know may be slips: the log says so, unless the user said that there are new classes."""
    names = data.unknown_names(classes) if plan.config.setting == "auto" else []
    if names:
        log.warning(
            "%s: %s: not among the classes of the model; labels of these images count as new classes "
            "(check the names, or pass %s)",
            data.name,
            some(names),
            option("open_set", True),
        )
    return data.for_model(classes, open_set=plan.config.may_be_new) if figures else data


@contextlib.contextmanager
def open_output(
    output: Output, record: Mapping[str, Any], runtime: Runtime, command: str = "adapt"
) -> Iterator[RunFolder | None]:
    """The run folder, or None if nothing is written."""
    if output.tracker != "tensorboard":
        log = option("log", output.tracker)
        if output.folder is None:
            raise ConfigError(f"{log} records a run folder: give one, {option('run')}")
        if output.private:
            raise ConfigError(
                f"{log} records settings, which a private run leaves out: choose one"
            )
    if output.folder is None:
        yield None
        return
    if not isinstance(output.folder, (str, Path)):
        raise ConfigError(
            f"run must be the path of a folder; got a {type(output.folder).__name__}"
        )
    with open_run(
        runtime,
        output.folder,
        dict(record),
        command=command,
        resume=output.resume,
        tracker=output.tracker,
    ) as folder:
        yield folder


def member_path(folder: RunFolder | None, number: int) -> Path | None:
    """The run folder of a member. One that is there must be a folder, not a link."""
    if folder is None:
        return None
    name = MEMBER.format(number)
    exists = folder.folder.kind(name) != "missing"
    return folder.inside(name) if exists else folder.path / name


def load_adapted(path: Path, module: nn.Module | None = None) -> AdaptedModel:
    model = as_model(path, module)
    assert isinstance(model, AdaptedModel)
    return model


def save_adaptation(
    folder: RunFolder,
    model: AdaptedModel,
    data: ImageData,
    plan: Plan,
    few: FewLabels | None,
    *,
    private: bool,
) -> None:
    """Everything that a run folder of `adapt` holds: the model, metrics.json, tables of the images. Labels in the data
    index the model's classes."""
    open_set = plan.config.may_be_new
    model.save(folder.path, private=private)
    if model.alternative is not None:
        model.alternative.save(folder.inside("adapted"), private=private)
    metrics = adaptation_metrics(model, data, open_set=open_set)
    if private or data.paths is None:  # `usfan label` could show no image
        metrics["verdict"] = {**metrics["verdict"], "next": ""}
    if not private:
        metrics["changed"] = write_changes(folder.path, model, data)
        metrics["label_first"] = save_questions(folder.path, model, data, few)
    save_image_table(folder.path, model, data, private=private)
    if private:
        names = ["source", "data", "labels", "cache", "root"]
        if Path(plan.config.witness.rpartition(":")[2]).exists():
            names.append("witness")
            withhold_witness(folder, metrics)
        folder.withhold(*names)
    else:
        log_skipped(folder, data)
    folder.save_metrics(metrics)
    folder.drop_checkpoints()


def withhold_witness(folder: RunFolder, metrics: dict[str, Any]) -> None:
    """Take the place of the witness, and the name that it has from there, out of the figures and out of its record."""
    metrics["settings"] = {**metrics["settings"], "witness": WITHHELD}
    if metrics.get("witness") is not None:
        metrics["witness"] = {**metrics["witness"], "name": WITHHELD}
        write_json(folder.path / WITNESS, metrics["witness"])


def log_skipped(folder: RunFolder, data: ImageData | Store) -> None:
    """Record the images that could not be read, by their paths below the data, because a log may be shared."""
    unreadable = data.unreadable
    if unreadable:
        root = common_folder(data.paths) if data.paths else ""
        files = {path.removeprefix(root).lstrip("/"): why for path, why in unreadable.items()}
        folder.log("skipped", count=len(files), files=files)


def data_name(data: ImageData | Store) -> str:
    """The folder or file of the images, for the record."""
    if isinstance(data, Store):
        return "images in memory"
    if data.paths is not None and len(data.paths) == 1:
        return str(Path(data.paths[0]).parent)
    return str(data.name)
