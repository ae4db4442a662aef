"""The edges of commands: open the data, the model and the devices, and report the outcome."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from usfan.config import RuntimeConfig
from usfan.config_checks import import_name
from usfan.errors import ConfigError, printable
from usfan.progress import StepProgress, bar, console, print_metrics, say, step_progress

if TYPE_CHECKING:
    from torch import nn

    from usfan.data.sources import ImageData
    from usfan.engine.runtime import Runtime
    from usfan.metrics.partial_table import Record
    from usfan.store.model import AdaptedModel, SourceModel
    from usfan.store.run_folder import RunFolder
    from usfan.uncertainty.base import FitSettings

MOST_NAMED = 50
"""Unreadable images that are named on the terminal; all of them are in log.jsonl."""


def open_data(
    data: str, *, root: str | None, strict: bool, unlabelled: bool = False
) -> tuple[ImageData, dict[str, Any]]:
    """The images, and their lines of config.yaml."""
    from usfan.data.sources import ImageData

    record: dict[str, Any] = {"data": data, "root": root, "strict": strict}
    if unlabelled:
        record["unlabelled"] = True
    return ImageData(data, root=root, strict=strict, unlabelled=unlabelled), record


def open_runtime(computing: RuntimeConfig, *, several: bool = False) -> Runtime:
    """The devices. `several`: the command can run in several processes."""
    from usfan.engine.processes import process_count
    from usfan.engine.runtime import keep_freed_memory, start_runtime

    if not several and process_count() > 1:
        raise ConfigError("this command runs in one process: start it without torchrun")
    runtime = start_runtime(computing)
    if runtime.device.type == "cpu":
        keep_freed_memory()
    console.quiet = runtime.rank > 0
    return runtime


def open_driver(computing: RuntimeConfig, ray: str | None) -> Runtime:
    """The devices of a study, or of `predict`. With Ray the workers have devices of their own; this process needs
    none."""
    return open_runtime(dataclasses.replace(computing, device="cpu") if ray else computing)


def load_model(model: str, module: str | None, uncertainty: str) -> SourceModel:
    from usfan.store.model import SourceModel

    return SourceModel.load(model, module=load_module(module)).with_uncertainty(uncertainty)


def load_module(name: str | None) -> nn.Module | None:
    """The network that MODULE:FUNCTION makes. Called only with what the user typed: importing runs its code."""
    if name is None:
        return None
    network = import_name("module", name, "MODULE:FUNCTION, such as my_networks:make")()
    from torch import nn

    if not isinstance(network, nn.Module):
        raise ConfigError(
            f"--module {name}: it must give a torch.nn.Module; got a {type(network).__name__}"
        )
    return network


def must_be_a_file(path: Path, flag: str) -> None:
    """Check before the work that the file can be written."""
    from usfan.files import must_be_writable

    if path.exists() and not path.is_file():
        what = "a folder" if path.is_dir() else "no ordinary file"
        raise ConfigError(f"{path} is {what}: {flag} names the file to write")
    must_be_writable(path.parent, flag)


def fit_model(
    model: str,
    images: ImageData,
    runtime: Runtime,
    settings: FitSettings,
    *,
    backbone: str | None,
    head: str | None,
    classes: str | None,
    progress: Callable[[int], None],
) -> SourceModel:
    """Fit a posterior to this model: a folder says what its network is, a state dict does not."""
    from usfan.data.lists import read_classes
    from usfan.models import hugging_face
    from usfan.store.model import SourceModel
    from usfan.store.model_folder import may_be_hub_id, open_folder
    from usfan.training.posthoc import attach_posterior, from_state_dict, refit_posterior

    names = None if classes is None else read_classes(classes)
    options: dict[str, Any] = {"classes": names, "progress": progress}
    folder = Path(model)
    module: nn.Module | None = None
    if folder.is_dir() or (not folder.is_file() and backbone is None and may_be_hub_id(model)):
        with open_folder(model) as opened:
            folder = opened.path
            if hugging_face.is_saved_network(opened):
                module = hugging_face.load_network(opened)
    else:
        module = from_state_dict(model, backbone, head)
    if module is not None:
        return attach_posterior(
            module, images, head, runtime=runtime, settings=settings, **options
        )
    if backbone is not None or head is not None:
        raise ConfigError(
            f"{model} is a model folder, which says what its network is: leave --backbone and --head out"
        )
    return refit_posterior(SourceModel.load(folder), images, runtime, settings, **options)


def save_posterior(
    run: RunFolder, model: SourceModel, images: ImageData, *, private: bool
) -> None:
    from usfan.workflow import log_skipped

    model.save(run.path, private=private)
    posterior = model.posterior
    figures = {
        "prior_precision": posterior.prior_precision,
        "log_evidence": posterior.log_evidence,
        "effective_parameters": posterior.effective_parameters,
        "count": posterior.count,
        "skipped": len(images.unreadable),
    }
    if private:
        run.withhold()
        del figures["log_evidence"]  # the log-likelihood of the labels is in it
    else:
        run.scalars({f"posterior/{name}": value for name, value in figures.items()}, 0)
        run.log("fitted", **figures)
        log_skipped(run, images)
    run.save_metrics(figures)
    print_metrics(figures, f"{run.path}: posterior")


def check_table(
    out: str | None,
    coverage: float | None,
    *,
    json: bool,
    resume: bool,
    is_stream: bool,
    ray: str | None,
) -> None:
    """Whether `predict` can write what it is to write."""
    if out is not None:
        must_be_a_file(Path(out), "--out")
    elif not json:
        raise ConfigError(
            "--out is missing: name the file to write, or print the predictions with --json (see --help)"
        )
    if coverage is not None and not 0 < coverage <= 1:
        raise ConfigError(f"coverage must be a number above 0 and at most 1; got {coverage}")
    if resume and (out is None or is_stream):
        raise ConfigError("--resume needs --out, and images that are named again")
    if ray is not None and (out is None or is_stream):
        raise ConfigError("--ray needs --out, and images that are named")


def records_on(
    address: str | None,
    computing: RuntimeConfig,
    model: str,
    module: str | None,
    uncertainty: str,
) -> Callable[..., Iterable[Record]]:
    """What gives `write_predictions` the records: Ray at an address, else this process."""
    from usfan.metrics.predictions import prediction_records

    if address is None:
        return prediction_records
    from usfan.study.predict_on_ray import ray_records

    path = os.path.abspath(model) if os.path.exists(model) else model
    load = functools.partial(load_model, path, module, uncertainty)
    return functools.partial(ray_records, address, computing, load)


def answer_stream(
    model: SourceModel,
    parts: Iterable[ImageData],
    out: str | None,
    coverage: float | None,
    runtime: Runtime,
    progress: Callable[[int], None],
    json_lines: bool,
) -> int:
    """Predictions for images that come part by part, to a table or to standard output; gives their number."""
    from usfan.files import whole_file
    from usfan.metrics.predictions import open_table, prediction_records, write_records

    is_stream = isinstance(parts, Iterator)

    def records() -> Iterator[dict[str, Any]]:
        for images in parts:
            total = 1 if is_stream else None  # how many will come, nobody knows
            yield from prediction_records(
                model, images, runtime=runtime, total=total, progress=progress
            )
            say_skipped(images)

    if out is None:
        return write_records(records(), sys.stdout, coverage, json_lines=json_lines)
    with whole_file(Path(out), follow=True) as table, open_table(table) as file:
        return write_records(records(), file, coverage, json_lines=json_lines)


@contextlib.contextmanager
def show_steps(label: str) -> Iterator[StepProgress]:
    """The display of a training."""
    with bar(label, unit="images") as display:
        yield step_progress(display)


def say_skipped(data: ImageData, *, logged: bool = False) -> None:
    """Name the images that could not be read, and count them. `logged`: the log of the run names all of them."""
    from usfan.data.stream import report_skipped

    for line in report_skipped(data.unreadable, len(data), most=MOST_NAMED if logged else None):
        console.print(
            printable(line), style="yellow", markup=False, highlight=False, soft_wrap=True
        )


def say_adapted(
    model: AdaptedModel,
    images: ImageData,
    out: str,
    data: str,
    sources: list[str],
    module: str | None,
    *,
    private: bool,
) -> None:
    """After `adapt`: where the model is, what the guard kept, how many predictions changed, and what to do next."""
    from usfan.adaptation.verdict import Verdict
    from usfan.files import read_json
    from usfan.metrics.changes import describe_changes
    from usfan.store.model import MixtureModel

    say_skipped(images, logged=not private)
    if isinstance(model, MixtureModel):
        weights = [f"{s:.2f} {path}" for s, path in zip(model.shares, sources, strict=True)]
        say(f"mixed: {', '.join(weights)}")
    history = model.history
    outcome = f"adaptation was tried with {model.method}; the source model is kept"
    if history["kept_epoch"]:
        outcome = f"the model, adapted by {model.method}"
    say(f"{out}: {outcome}")
    metrics = read_json(Path(out, "metrics.json"))
    verdict = Verdict(**metrics["verdict"])
    say(f"verdict: {verdict.in_folder(shlex.quote(out))}")
    say(f"guard: {history['guard']['reason'].removeprefix('guard ')}")
    classes = history.get("classes")
    if classes:
        say(f"classes of the target: {classes['setting']} set; {classes['reason']}")
    say(f"changes: {describe_changes(model)}")
    folder = shlex.quote(out)
    option = "" if module is None else f" --module {shlex.quote(module)}"
    say(f"next: usfan predict {folder} {shlex.quote(data)} --out predictions.csv{option}")
    say(f"      usfan report {folder}")
    say_figures(metrics, out)


def say_figures(metrics: dict[str, Any], out: str) -> None:
    """Figures before and after, if there are labels."""
    from usfan.data.few_labels import JUDGE

    if "labels" in metrics:
        labels = metrics["labels"]
        line = f"labels: {labels['count']} images of {labels['classes']} classes to learn from"
        labelled = metrics["labelled"]
        if labelled and labelled["from"] == JUDGE:
            line += f", {labelled['number']} that compare the models"
        say(line)
    if "after" not in metrics:
        return
    figures = {}
    for name in ("accuracy", "ece", "hos"):
        for moment in ("before", "after"):
            figures[f"{name} {moment}"] = metrics[moment].get(name)
    print_metrics(figures, out)


def serve_page(run: Path, ask: int | None, port: int, *, browser: bool) -> None:
    """The page of `usfan label`, until Ctrl-C."""
    try:
        from usfan.labelling.server import PageServer
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"the page needs {error.name}: pip install 'usfan[label]'; or fill in {run}/label_first.csv, "
            "and give it to adapt --labels"
        ) from None
    from usfan.labelling.again import SecondRun
    from usfan.labelling.session import Session

    with contextlib.closing(Session(run, ask)) as session:
        session.must_have_images()
        second_run = SecondRun(run)
        server = PageServer(session, second_run, port)
        say(f"label here, until Ctrl-C: {server.address}")
        if not browser or not open_browser(server.address):
            say(
                f"from elsewhere, first: ssh -L {server.port}:localhost:{server.port} THIS-MACHINE"
            )
            say(
                f"without a page: fill in {run}/label_first.csv (its pictures: usfan report {run})"
            )
        try:
            server.run()
        finally:
            server.close()
            second_run.close()
        say_answers(run, len(session.board.answers))


def open_browser(address: str) -> bool:
    """Whether a browser with windows opened the page; one for terminals would take this one over."""
    import webbrowser

    windows = {"DISPLAY", "WAYLAND_DISPLAY"} & os.environ.keys() or sys.platform == "darwin"
    return bool(windows) and webbrowser.open(address)


def say_answers(run: Path, count: int) -> None:
    from usfan.labelling.again import SecondRun

    say(f"{count} answer{'s' * (count != 1)} in {run / 'labels.csv'}")
    if count:
        say(f"next: {SecondRun(run).command}")


def exchange_tasks(
    run: Path, ask: int | None, tasks: str | None, annotations: str | None
) -> None:
    """Questions out, answers in, as JSON of Label Studio."""
    from usfan.labelling.answers import ANSWERS_FILE, write_answers
    from usfan.labelling.label_studio import merge, read_annotations, write_tasks
    from usfan.labelling.questions import questions_of
    from usfan.labelling.session import Session

    with contextlib.closing(Session(run)) as session:
        board = session.board
        if annotations is not None:
            merge(board, read_annotations(Path(annotations)), Path(annotations))
            write_answers(run / ANSWERS_FILE, board.answers)
            say_answers(run, len(board.answers))
        if tasks is not None:
            root = write_tasks(Path(tasks), board, questions_of(board, ask))
            say(f"{tasks}: tasks for Label Studio; beside it the labelling interface (.xml)")
            say(f"serve the images: LABEL_STUDIO_LOCAL_FILES_DOCUMENT_ROOT={shlex.quote(root)}")
