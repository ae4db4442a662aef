"""The commands: functions with typed arguments, in one table. The parser and the help read them as they are.

`flags` says what the annotations mean. A parameter `settings` holds the settings that the user gave, without defaults.
Heavy modules are imported inside.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from usfan.cli import flags
from usfan.config import RuntimeConfig, TrainConfig, make_config
from usfan.errors import ConfigError, printable
from usfan.store.trackers import TRACKERS
from usfan.uncertainty.registry import UNCERTAINTIES

if TYPE_CHECKING:
    Uncertainty = str
    Tracker = str
else:
    Uncertainty = Literal[("auto", *UNCERTAINTIES)]
    Tracker = Literal[tuple(TRACKERS)]
NO_SETTINGS: dict[str, Any] = {}
HERE = RuntimeConfig()


def demo(
    *,
    out: str = "runs/demo",
    seed: int = 0,
    computing: flags.Device = HERE,
) -> None:
    """Adapt between MNIST and UCI digits with all methods of the paper; results go to runs/demo.

    Args:
        out: Run folder.
        seed: Seed of random draws.
    """
    from usfan.cli.edges import open_runtime
    from usfan.store.run_folder import folder_lock
    from usfan.study.digits import run_demo

    runtime = open_runtime(computing)
    with folder_lock(Path(out), "demo"):
        run_demo(Path(out), runtime=runtime, seed=seed)


def train(
    data: str,
    /,
    *,
    out: str,
    settings: flags.TrainFlags = NO_SETTINGS,
    log: Tracker = "tensorboard",
    resume: bool = False,
    root: str | None = None,
    strict: bool = False,
    private: bool = False,
    computing: flags.ManyProcesses = HERE,
) -> None:
    """Train a source model and fit its posterior."""
    from usfan import workflow
    from usfan.cli.edges import open_data, open_runtime, say_skipped, show_steps
    from usfan.progress import print_metrics, say

    images, record = open_data(data, root=root, strict=strict)
    record |= {**dataclasses.asdict(computing), "private": private}
    runtime = open_runtime(computing, several=True)
    finished = Path(out, "metrics.json").is_file()
    output = workflow.Output(out, resume, private, record, log)
    model = workflow.train(images, settings, runtime, show_steps, output)
    if runtime.rank:
        return
    if finished:
        say(f"{out} is finished already")
        return
    say_skipped(images, logged=not private)
    print_metrics(model.summary, f"{out}: source model, {len(model.classes)} classes")


def posterior(
    model: str,
    data: str,
    /,
    *,
    out: str,
    backbone: str | None = None,
    head: str | None = None,
    classes: str | None = None,
    settings: flags.PosteriorFlags = NO_SETTINGS,
    dropout_rate: float | None = None,
    weight_decay: float | None = None,
    log: Tracker = "tensorboard",
    resume: bool = False,
    root: str | None = None,
    strict: bool = False,
    private: bool = False,
    computing: flags.ManyProcesses = HERE,
) -> None:
    """Fit a posterior to a model that is already trained.

    Args:
        model: Model folder; folder or Hub id of a transformers image classifier; or a state dict with --backbone.
        backbone: timm model that the state dict belongs to.
        head: Name of the last Linear layer; not needed for models of timm and transformers.
        classes: Class names in the order of the outputs: one per line, or a JSON list.
        dropout_rate: Rate of MC dropout; by default that of the training, or 0.1.
        weight_decay: Weight decay of the training, for --prior weight-decay; by default as stored.
    """
    from usfan.cli.edges import fit_model, open_data, open_runtime, save_posterior, say_skipped
    from usfan.progress import bar, say
    from usfan.uncertainty.base import FitSettings
    from usfan.workflow import Output, open_output

    images, record = open_data(data, root=root, strict=strict)
    config = make_config(TrainConfig, settings)
    fit = {name: getattr(config, name) for name in flags.FIT if name != "preset"}
    fit |= {"weight_decay": weight_decay, "dropout_rate": dropout_rate}
    network = {"backbone": backbone, "head": head, "classes": classes}
    record |= {"model": model, **network, **fit, **dataclasses.asdict(computing)}
    record["private"] = private
    runtime = open_runtime(computing, several=True)
    output = Output(out, resume, private, tracker=log)
    with open_output(output, record, runtime, command="posterior") as run:
        assert run is not None
        if run.finished() is not None:
            say(f"{out} is finished already")
            return
        with bar("fitting", len(images)) as display:
            fitted = fit_model(
                model, images, runtime, FitSettings(**fit), **network, progress=display.advance
            )
        if runtime.rank == 0:
            save_posterior(run, fitted, images, private=private)
            say_skipped(images, logged=not private)


def adapt(
    source: list[str],
    data: str,
    /,
    *,
    out: str,
    settings: flags.AdaptFlags = NO_SETTINGS,
    log: Tracker = "tensorboard",
    resume: bool = False,
    dry_run: bool = False,
    labels: str | None = None,
    unlabelled: bool = False,
    root: str | None = None,
    strict: bool = False,
    module: str | None = None,
    private: bool = False,
    computing: flags.LittleComputing = HERE,
) -> None:
    """Adapt a source model to unlabelled images, and say whether it is better there.

    Args:
        source: Model folder or Hub id; one or more.
        data: Images: a folder class/*.jpg, a flat folder, shards (.tar), one image, or a list file. Labels in it are
            used for the figures at the end, never for adapting.
        dry_run: Print the plan and stop: nothing is trained or written.
        labels: Labels of a few of these images to learn from: a table path,label, such as the labels.csv of
            `usfan label`.
        unlabelled: Ignore labels; read folders of any name and depth.
    """
    started = time.perf_counter()
    from usfan import workflow
    from usfan.cli.edges import load_module, open_data, open_runtime, say_adapted, show_steps
    from usfan.progress import say

    network = load_module(module)
    images, record = open_data(data, root=root, strict=strict, unlabelled=unlabelled)
    record |= {"labels": labels, **dataclasses.asdict(computing), "private": private}
    runtime = open_runtime(computing, several=len(source) == 1)
    sources = [workflow.open_source(path, network) for path in source]
    if dry_run:
        print(workflow.describe(sources, images, settings, runtime))
        return
    model = workflow.adapt(
        sources,
        images,
        settings,
        runtime,
        show_steps,
        output=workflow.Output(out, resume, private, record, log, started),
        labels=labels,
    )
    if runtime.rank:
        return
    if model.passes is None:
        say(f"{out} is finished already")
    else:
        say_adapted(model, images, out, data, source, module, private=private)


def check(
    model: str,
    data: str,
    /,
    *,
    out: str | None = None,
    labels: str | None = None,
    fail_under: float | None = None,
    prometheus: str | None = None,
    root: str | None = None,
    strict: bool = False,
    module: str | None = None,
    computing: flags.OneProcess = HERE,
) -> int | None:
    """Estimate how good a model is on unlabelled images. Nothing is trained.

    Args:
        out (FILE.json): File for the figures.
        labels: Labels of images drawn at random, a table path,label: accuracy is measured instead of estimated.
        fail_under (P): Exit code 3 if accuracy is below P percent, 4 if that cannot be told.
        prometheus (FILE.prom): File for the figures as Prometheus reads them.
    """
    from usfan import workflow
    from usfan.cli.edges import load_model, must_be_a_file, open_data, open_runtime, say_skipped
    from usfan.files import write_json, write_text

    if fail_under is not None and not 0 < fail_under <= 100:
        raise ConfigError(
            f"--fail-under must be a percentage above 0, at most 100; got {fail_under:g}"
        )
    for flag, file in (("--out", out), ("--prometheus", prometheus)):
        if file is not None:
            must_be_a_file(Path(file), flag)
    images, _ = open_data(data, root=root, strict=strict, unlabelled=True)
    result = workflow.check(
        load_model(model, module, "auto"), images, open_runtime(computing), labels
    )
    if out is not None:
        write_json(Path(out), result.to_dict())
    if prometheus is not None:
        write_text(Path(prometheus), result.prometheus(model, data))
    say_skipped(images)
    for name, text in result.lines().items():
        print(f"{name}: {printable(text, 300)}")
    if fail_under is None:
        return 0
    below = result.below(fail_under)
    answer = {True: "yes", False: "no", None: "cannot be told"}[below]
    print(f"below {fail_under:g} %: {answer}")
    return {True: 3, False: 0, None: 4}[below]


def label(
    run: str,
    /,
    *,
    ask: int | None = None,
    port: int = 0,
    no_browser: bool = False,
    tasks: str | None = None,
    annotations: str | None = None,
    computing: flags.Device = HERE,
) -> None:
    """Open a page on this machine that asks for the labels that settle most. Answers go to RUN/labels.csv.

    Args:
        run (RUN): Run folder of usfan adapt.
        ask (N): How many questions to ask; by default until it is decided which model is better.
        port: Port of the page on this machine; 0 takes one that is free.
        no_browser: Print the address of the page, and open no browser.
        tasks (FILE.json): Write the questions as tasks of Label Studio instead.
        annotations (FILE.json): Add the answers in an export of Label Studio to RUN/labels.csv instead.
    """
    from usfan.cli.edges import exchange_tasks, must_be_a_file, serve_page

    if ask is not None and ask < 1:
        raise ConfigError(f"--ask must be at least 1; got {ask}")
    if not 0 <= port < 65536:
        raise ConfigError(f"--port must be from 0 to 65535; got {port}")
    if tasks is None and annotations is None:
        serve_page(Path(run), ask, port, browser=not no_browser)
        return
    if tasks is not None:
        must_be_a_file(Path(tasks), "--tasks")
    exchange_tasks(Path(run), ask, tasks, annotations)


def evaluate(
    model: str,
    data: str,
    /,
    *,
    out: str | None = None,
    log: Tracker = "tensorboard",
    open_set: bool = False,
    uncertainty: Uncertainty = "auto",
    labels: str | None = None,
    root: str | None = None,
    strict: bool = False,
    module: str | None = None,
    computing: flags.OneProcess = HERE,
) -> None:
    """Measure accuracy and calibration on labelled images.

    Args:
        out: Run folder for metrics.json.
        open_set: The images may show classes that the model does not know.
        labels: Labels of a few of these images, a table path,label: the figures are of these images alone.
    """
    from usfan.cli.edges import load_model, open_data, open_runtime, say_skipped
    from usfan.data.few_labels import only_labelled
    from usfan.metrics.evaluate import evaluate as run_evaluation
    from usfan.progress import bar, print_metrics
    from usfan.workflow import Output, log_skipped, open_output

    images, record = open_data(data, root=root, strict=strict, unlabelled=labels is not None)
    classifier = load_model(model, module, uncertainty)
    if labels is not None:
        images = only_labelled(images, labels, classifier.classes, open_set=open_set)
    runtime = open_runtime(computing)
    record |= {"model": model, "labels": labels, "open_set": open_set}
    record["uncertainty"] = classifier.uncertainty.kind
    with open_output(Output(out, tracker=log), record, runtime, command="evaluate") as run:
        with bar("evaluating", len(images)) as display:
            progress = display.advance
            metrics = run_evaluation(
                classifier, images, open_set=open_set, runtime=runtime, progress=progress
            )
        figures = {name: f for name, f in metrics.items() if isinstance(f, int | float)}
        if run is not None:
            run.save_metrics(metrics)
            run.scalars({f"evaluate/{name}": figure for name, figure in figures.items()}, 0)
            run.log("evaluated", **figures)
            log_skipped(run, images)
        say_skipped(images, logged=run is not None)
    print_metrics(metrics, f"{model} on {data}")
    print(json.dumps(figures))


def predict(
    model: str,
    data: list[str],
    /,
    *,
    out: str | None = None,
    json: bool = False,
    coverage: float | None = None,
    resume: bool = False,
    ray: str | None = None,
    uncertainty: Uncertainty = "auto",
    root: str | None = None,
    strict: bool = False,
    module: str | None = None,
    computing: flags.OneProcess = HERE,
) -> None:
    """Write a table of predictions: path, label, confidence, entropy, weight, unknown, error.

    Args:
        data: Photographs, folders and list files; - reads paths from standard input, one per line, and answers as
            they come.
        out (FILE): Output file (required, unless --json prints the predictions).
        json: JSON instead of CSV, one object per line; without --out to standard output.
        coverage: Share of the images that get a label; the others abstain.
        resume: Continue the table of a run that was interrupted.
        ray: Ray cluster, auto, or local for this machine (usfan[cluster]). What it returns is code: it must be trusted.
    """
    from usfan.cli.edges import (
        answer_stream,
        check_table,
        load_model,
        open_driver,
        records_on,
        say_skipped,
    )
    from usfan.data.sources import open_inputs, open_stream
    from usfan.metrics.predictions import write_predictions
    from usfan.progress import bar, say

    is_stream = data == ["-"]
    check_table(out, coverage, json=json, resume=resume, is_stream=is_stream, ray=ray)
    images = None if is_stream else open_inputs(data, root=root, strict=strict)
    classifier = load_model(model, module, uncertainty)
    runtime = open_driver(computing, ray)
    classifier = classifier.to(runtime.device)
    with bar("predicting", None if images is None else len(images)) as display:
        progress = display.advance
        if images is None or out is None:
            parts = [images] if images else open_stream(root=root, strict=strict)
            count = answer_stream(classifier, parts, out, coverage, runtime, progress, json)
        else:
            records_of = records_on(ray, computing, model, module, uncertainty)
            write = functools.partial(write_predictions, json_lines=json, resume=resume)
            table = (Path(out), classifier, images, coverage, runtime, progress)
            count = write(*table, records_of=records_of)
            say_skipped(images)
    if out is not None:
        form = "JSON lines" if json else "CSV (--json writes JSON lines)"
        say(f"{out}: {count:,} prediction{'s' * (count != 1)}, as {form}")


def report(
    runs: list[str],
    /,
    *,
    out: str | None = None,
    root: str | None = None,
    computing: flags.Device = HERE,
) -> None:
    """Write one HTML page about one or more runs.

    Args:
        runs (RUN): Run folders, or a folder of runs.
        out (FILE.html): Output file; by default report.html in the first run.
        root: Folder from which the report may show images; by default it shows those of runs made on this machine.
    """
    from usfan.cli.edges import must_be_a_file
    from usfan.progress import say
    from usfan.report.page import write_report

    file = None if out is None else Path(out)
    if file is not None:
        must_be_a_file(file, "--out")
    folders = [Path(run) for run in runs]
    say(str(write_report(folders, file, root=None if root is None else Path(root))))


def export(
    model: str,
    /,
    *,
    onnx: str,
    uncertainty: Uncertainty = "auto",
    module: str | None = None,
    computing: flags.Device = HERE,
) -> None:
    """Export the model as one ONNX graph.

    Args:
        onnx: Output file (required).
    """
    from usfan.cli.edges import load_model, must_be_a_file
    from usfan.progress import console, say
    from usfan.store.onnx import OUTPUTS, export_onnx

    must_be_a_file(Path(onnx), "--onnx")
    classifier = load_model(model, module, uncertainty)
    with console.status("exporting: the graph is written, and compared with onnxruntime"):
        difference = export_onnx(classifier, Path(onnx))
    say(f"{onnx}: {', '.join(OUTPUTS)}; onnxruntime agrees to {difference:.1e}")


def methods(name: str | None = None, /, *, computing: flags.Device = HERE) -> None:
    """List the methods, or the settings of one.

    Args:
        name: A method, to list its settings.
    """
    from rich.console import Console
    from rich.table import Table

    from usfan.adaptation.methods import METHODS, find_method

    if name is None:
        published = "published: Office-31/Office-Home/VisDA-C"
        table = Table("name", "what it does", "weights", published, title="Methods")
        for row in METHODS.values():
            table.add_row(row.name, row.summary, row.certainty.weights, row.published)
    else:
        method = find_method(name)
        title = f"{method.name}: {method.summary}"
        if method.differs:
            title += f"\nThe authors' program: {method.differs}."
        table = Table("setting", "default", "what it does", title=title)
        docs = method.setting_docs()
        for setting, value in method.settings().items():
            default = "decided by the run" if value is None else str(value)
            table.add_row(setting, default, docs.get(setting, ""))
    console = Console()
    console.print(table, soft_wrap=not console.is_terminal)  # a pipe gets one line for each row


def study(
    data: str,
    /,
    *,
    settings: flags.StudyFlags = NO_SETTINGS,
    computing: flags.LittleComputing = HERE,
) -> None:
    """Compare methods on all pairs of your own domains: tables and a report.

    Args:
        data (ROOT): Folder of domain folders, each with one folder of images per class.
    """
    from usfan.cli.edges import open_driver
    from usfan.study.command import study as run_study

    runtime = open_driver(computing, settings.get("ray"))
    run_study({"data": data, **settings}, runtime, dataclasses.asdict(computing))


def reproduce(
    benchmark: Literal[
        "toy", "digits", "office31", "office-home", "visda-c", "domainnet", "cifar-stl"
    ],
    /,
    *,
    settings: flags.ReproduceFlags = NO_SETTINGS,
    computing: flags.LittleComputing = HERE,
) -> None:
    """Reproduce the paper's tables and figures.

    Args:
        benchmark: The benchmark to reproduce.
    """
    from usfan.cli.edges import open_driver
    from usfan.study.command import reproduce as run_benchmark

    runtime = open_driver(computing, settings.get("ray"))
    run_benchmark(benchmark, dict(settings), runtime, dataclasses.asdict(computing))


FUNCTIONS = (
    demo,
    train,
    posterior,
    adapt,
    check,
    label,
    evaluate,
    predict,
    report,
    export,
    methods,
    study,
    reproduce,
)
COMMANDS: dict[str, Callable[..., int | None]] = {
    function.__name__: function for function in FUNCTIONS
}
