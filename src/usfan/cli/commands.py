"""The commands, as plain functions of their settings in one table. Heavy modules are imported inside."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from usfan.cli.settings import (
    drop_seed,
    must_be_a_file,
    nothing_left,
    open_data,
    open_runtime,
    say_skipped,
    take,
    without_runtime,
)
from usfan.config import AdaptConfig, RuntimeConfig, TrainConfig, make_config
from usfan.errors import ConfigError
from usfan.progress import bar, console, print_metrics, say, step_progress


def train(settings: dict[str, Any]) -> None:
    from usfan.runs.folder import open_run
    from usfan.training.source import train_source

    out, data_path = settings.pop("out"), settings.pop("data")
    resume, private = bool(settings.pop("resume", False)), bool(settings.pop("private", False))
    data = open_data(settings, data_path)
    values = take(settings, TrainConfig)
    config = make_config(TrainConfig, values)
    runtime_values = {k: v for k, v in settings.items() if k in {f.name for f in dataclasses.fields(RuntimeConfig)}}
    runtime = open_runtime(settings, several=True)
    recorded = {"data": data_path, **dataclasses.asdict(config), **runtime_values}
    with open_run(runtime, out, recorded, command="train", resume=resume) as run:
        if run.finished() is not None:
            run.drop_checkpoints()
            say(f"{out} is finished already")
            return
        with bar("training", unit="images") as shown:
            model = train_source(
                data, runtime=runtime, run=run, progress=step_progress(shown, config.batch_size), **values
            )
        if runtime.rank == 0:
            model.save(run.path, private=private)
            if private:
                run.withhold()
            shown_summary = {} if private else model.summary
            counts = {"images": len(data), "skipped": len(data.unreadable)}
            run.save_metrics({"classes": len(model.classes), **counts, **shown_summary})
            run.drop_checkpoints()
            say_skipped(data, run, private=private)
            print_metrics(model.summary, f"{out}: source model, {len(model.classes)} classes")


def posterior(settings: dict[str, Any]) -> None:
    from usfan.artifacts.model import SourceModel
    from usfan.runs.folder import open_run
    from usfan.training.posthoc import from_state_dict, refit_posterior

    out, model_path, data_path = settings.pop("out"), settings.pop("model"), settings.pop("data")
    resume, private = bool(settings.pop("resume", False)), bool(settings.pop("private", False))
    drop_seed(settings)
    data = open_data(settings, data_path)
    backbone, head = settings.pop("backbone", None), settings.pop("head", None)
    given: dict[str, Any] = {k: settings.pop(k) for k in ("prior", "damping", "weight_decay") if k in settings}
    options = make_config(TrainConfig, given)
    runtime = open_runtime(settings, several=True)
    fitted: dict[str, Any] = {"prior": options.prior, "damping": options.damping}
    fitted["weight_decay"] = options.weight_decay if "weight_decay" in given else None
    recorded = {"model": model_path, "data": data_path, "backbone": backbone, "head": head, **fitted}
    with open_run(runtime, out, recorded, command="posterior", resume=resume) as run:
        if run.finished() is not None:
            say(f"{out} is finished already")
            return
        if Path(model_path).is_dir():
            if backbone is not None or head is not None:
                raise ConfigError(
                    f"{model_path} is a model folder, which says what its network is: leave --backbone and --head out"
                )
            fit = functools.partial(refit_posterior, SourceModel.load(model_path), data, runtime)
        else:
            fit = functools.partial(from_state_dict, model_path, backbone, data, runtime, head=head)
        with bar("fitting", len(data)) as shown:
            model = fit(progress=shown.advance, **fitted)
        if runtime.rank:
            return
        model.save(run.path, private=private)
        figures = {
            "prior_precision": model.posterior.prior_precision,
            "log_evidence": model.posterior.log_evidence,
            "effective_parameters": model.posterior.effective_parameters,
            "count": model.posterior.count,
            "skipped": len(data.unreadable),
        }
        if private:
            run.withhold()
            del figures["log_evidence"]  # the log-likelihood of the labels is in it
        else:
            run.scalars({f"posterior/{name}": value for name, value in figures.items()}, 0)
            run.log("fitted", **figures)
        run.save_metrics(figures)
        say_skipped(data, run, private=private)
        print_metrics(figures, f"{out}: posterior")


def adapt(settings: dict[str, Any]) -> None:
    from usfan.adaptation.adapt import adapt as run_adaptation
    from usfan.artifacts.folder import load_config
    from usfan.artifacts.model import SourceModel
    from usfan.compute.prefetch import decoding
    from usfan.evaluation.samples import adaptation_metrics, save_samples
    from usfan.runs.folder import open_run

    out, source_path, data_path = settings.pop("out"), settings.pop("source"), settings.pop("data")
    resume, private = bool(settings.pop("resume", False)), bool(settings.pop("private", False))
    data = open_data(settings, data_path)
    values = take(settings, AdaptConfig)
    config = make_config(AdaptConfig, values)
    runtime_values = {k: v for k, v in settings.items() if k in {f.name for f in dataclasses.fields(RuntimeConfig)}}
    stored = load_config(source_path)
    if data.labels is not None:
        data.match_classes(stored.classes, open_set=config.open_set)
    runtime = open_runtime(settings, several=True)
    recorded = {"source": source_path, "data": data_path, **dataclasses.asdict(config), **runtime_values}
    with open_run(runtime, out, recorded, command="adapt", resume=resume) as run:
        if run.finished() is not None:
            run.drop_checkpoints()
            say(f"{out} is finished already")
            return
        with decoding(data.without_labels(), stored.spec, runtime) as decoded:
            source = SourceModel.load(source_path)
            store = decoded()
        with bar("adapting", unit="images") as shown:
            progress = step_progress(shown, config.batch_size)
            model = run_adaptation(source, store, runtime=runtime, run=run, progress=progress, **values)
        if runtime.rank == 0:
            model.save(run.path, private=private)
            metrics = adaptation_metrics(model, data, open_set=config.open_set)
            save_samples(run.path, model, data, private=private)
            if private:
                run.withhold("source", "data", "cache")
            run.save_metrics(metrics)
            run.drop_checkpoints()
            say_skipped(data, run, private=private)
            say(f"{config.method}: {model.history['guard']['reason']}")
            if "after" in metrics:
                shift = {
                    f"{name} {when}": metrics[when].get(name)
                    for name in ("accuracy", "ece", "hos")
                    for when in ("before", "after")
                }
                print_metrics(shift, out)


def evaluate(settings: dict[str, Any]) -> None:
    from usfan.artifacts.model import SourceModel
    from usfan.compute.share import first_speaks
    from usfan.evaluation.evaluate import evaluate as run_evaluation
    from usfan.runs.folder import open_run

    out, model_path, data_path = settings.pop("out", None), settings.pop("model"), settings.pop("data")
    open_set = bool(settings.pop("open_set", False))
    drop_seed(settings)
    data = open_data(settings, data_path)
    model = SourceModel.load(model_path)
    runtime = open_runtime(settings, several=True)
    recorded = {"model": model_path, "data": data_path, "open_set": open_set}
    with contextlib.ExitStack() as stack:
        stack.enter_context(first_speaks(runtime))
        run = None if out is None else stack.enter_context(open_run(runtime, out, recorded, command="evaluate"))
        with bar("evaluating", len(data)) as shown:
            metrics = run_evaluation(model, data, open_set=open_set, runtime=runtime, progress=shown.advance)
        if runtime.rank:
            return
        figures = {k: v for k, v in metrics.items() if isinstance(v, (int, float))}
        if run is not None:
            run.save_metrics(metrics)
            run.scalars({f"evaluate/{name}": value for name, value in figures.items()}, 0)
            run.log("evaluated", **figures)
        say_skipped(data, run)
    print_metrics(metrics, f"{model_path} on {data_path}")
    print(json.dumps(figures))


def predict(settings: dict[str, Any]) -> None:
    from usfan.artifacts.model import SourceModel
    from usfan.compute.share import first_speaks
    from usfan.evaluation.predictions import write_predictions

    out, model_path, data_path = Path(settings.pop("out")), settings.pop("model"), settings.pop("data")
    coverage = settings.pop("coverage", None)
    if coverage is not None and not (isinstance(coverage, (int, float)) and 0 < coverage <= 1):
        raise ConfigError(f"coverage must be a number above 0 and at most 1; got {coverage}")
    must_be_a_file(out, "--out")
    drop_seed(settings)
    data = open_data(settings, data_path)
    model = SourceModel.load(model_path)
    runtime = open_runtime(settings, several=True)
    with first_speaks(runtime), bar("predicting", len(data)) as shown:
        count = write_predictions(out, model.to(runtime.device), data, coverage, runtime, shown.advance)
    say_skipped(data)
    say(f"{out}: {count} predictions")


def report(settings: dict[str, Any]) -> None:
    from usfan.report.page import write_report

    runs, out = [Path(r) for r in settings.pop("runs")], settings.pop("out", None)
    root = settings.pop("root", None)
    nothing_left(without_runtime(settings))
    if out is not None:
        must_be_a_file(Path(out), "--out")
    path = write_report(runs, Path(out) if out else None, root=Path(root) if root else None)
    say(str(path))


def export(settings: dict[str, Any]) -> None:
    from usfan.artifacts.model import SourceModel
    from usfan.artifacts.onnx import export_onnx

    out, model_path = Path(settings.pop("onnx")), settings.pop("model")
    must_be_a_file(out, "--onnx")
    nothing_left(without_runtime(settings))
    with console.status("exporting: the graph is written, and compared with onnxruntime"):
        worst = export_onnx(SourceModel.load(model_path), out)
    say(f"{out}: features, logits, certainty; onnxruntime agrees to {worst:.1e}")


def methods(settings: dict[str, Any]) -> None:
    from rich.table import Table

    from usfan.adaptation.methods import METHODS

    nothing_left(without_runtime(settings))
    table = Table(title="Methods")
    for column in ("name", "what it does", "weights", "pseudo-labels"):
        table.add_column(column)
    for method in METHODS.values():
        table.add_row(method.name, method.summary, method.weights, "yes" if method.pseudo_labels else "no")
    from rich.console import Console

    shown = Console()
    shown.print(table, soft_wrap=not shown.is_terminal)  # one line each for whoever reads it from a pipe


def demo(settings: dict[str, Any]) -> None:
    from usfan.reproduce.digits import run_demo
    from usfan.runs.folder import folder_lock

    out = Path(settings.pop("out", "runs/demo"))
    seed = make_config(AdaptConfig, take(settings, AdaptConfig)).seed
    runtime = open_runtime(settings)
    nothing_left(settings)
    with folder_lock(out):
        run_demo(out, runtime=runtime, seed=seed)


def reproduce(settings: dict[str, Any]) -> None:
    from usfan.reproduce.command import reproduce as run_suite

    name = settings.pop("benchmark")
    runtime = open_runtime(settings)
    run_suite(name, settings, runtime)


COMMANDS: dict[str, Callable[[dict[str, Any]], None]] = {
    c.__name__: c for c in (demo, train, posterior, adapt, evaluate, predict, report, export, methods, reproduce)
}
