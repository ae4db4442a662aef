"""The commands, as plain functions of their settings in one table. Heavy modules are imported inside."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from usfan.cli.edges import (
    describe_worth,
    load_module,
    must_be_a_file,
    open_data,
    open_runtime,
    say_changes,
    say_skipped,
    take,
)
from usfan.config import RuntimeConfig, TrainConfig, make_config
from usfan.errors import ConfigError
from usfan.progress import bar, console, print_metrics, say, step_progress


def train(settings: dict[str, Any]) -> None:
    from usfan.runs.folder import open_run
    from usfan.training.source import train_source

    out, resume, private = settings["out"], settings.get("resume", False), settings.get("private", False)
    data, seen = open_data(settings)
    values = take(settings, TrainConfig)
    config = make_config(TrainConfig, values)
    runtime, computing = open_runtime(settings, several=True)
    recorded = {**seen, **dataclasses.asdict(config), **computing, "private": private}
    with open_run(runtime, out, recorded, command="train", resume=resume) as run:
        if run.finished() is not None:
            run.drop_checkpoints()
            say(f"{out} is finished already")
            return
        with bar("training", unit="images") as shown:
            model = train_source(data, runtime=runtime, run=run, progress=step_progress(shown), **values)
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
    from usfan.data.class_file import read_classes
    from usfan.runs.folder import open_run
    from usfan.training.posthoc import from_state_dict, refit_posterior
    from usfan.training.source import Rival

    out, model_path = settings["out"], settings["model"]
    resume, private = settings.get("resume", False), settings.get("private", False)
    data, seen = open_data(settings)
    backbone, head, names = (settings.get(k) for k in ("backbone", "head", "classes"))
    names_of = ("prior", "damping", "uncertainty", "members")
    options = make_config(TrainConfig, {k: settings[k] for k in names_of if k in settings})
    other = {"uncertainty": options.uncertainty, "members": options.members}
    rival = Rival(options.uncertainty, settings.get("dropout_rate"), options.members)
    fitted = {"prior": options.prior, "damping": options.damping, "weight_decay": settings.get("weight_decay")}
    classes = None if names is None else read_classes(names)
    runtime, computing = open_runtime(settings, several=True)
    network = {"backbone": backbone, "head": head, "classes": names}
    fixed = {**other, "dropout_rate": rival.rate, "private": private}
    recorded = {"model": model_path, **seen, **network, **fitted, **computing, **fixed}
    with open_run(runtime, out, recorded, command="posterior", resume=resume) as run:
        if run.finished() is not None:
            say(f"{out} is finished already")
            return
        if Path(model_path).is_dir():
            if backbone is not None or head is not None:
                raise ConfigError(
                    f"{model_path} is a model folder, which says what its network is: leave --backbone and --head out"
                )
            fit: Any = functools.partial(refit_posterior, SourceModel.load(model_path), data, runtime)
        else:
            fit = functools.partial(from_state_dict, model_path, backbone, data, runtime, head=head)
        with bar("fitting", len(data)) as shown:
            model = fit(progress=shown.advance, classes=classes, rival=rival, **fitted)
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
    from usfan.adaptation.settings import begun_settings, resolve
    from usfan.adaptation.witness import has_witness
    from usfan.api import for_run, save_adaptation
    from usfan.artifacts.folder import load_config
    from usfan.artifacts.model import SourceModel, came_pretrained
    from usfan.compute.prefetch import decoding
    from usfan.data.few_labels import few_labels
    from usfan.runs.folder import open_run

    if len(settings["source"]) > 1:
        adapt_several(settings)
        return
    out, resume, private = settings["out"], settings.get("resume", False), settings.get("private", False)
    source_path, module = settings["source"][0], load_module(settings.get("module"))
    data, seen = open_data(settings)
    stored = load_config(source_path)
    given = {k: v for k, v in settings.items() if k not in own_names()}
    facts: dict[str, Any] = {
        "pretrained": came_pretrained(stored.architecture),
        "classes": len(stored.classes),
        "witness": has_witness(stored.architecture, stored.summary),
    }
    config, _ = resolve(given, **facts)
    data = for_run(data, stored.classes, config)
    labels = settings.get("labels")
    table = None if labels is None else few_labels(labels, data, stored.classes, root=settings.get("root"))
    runtime, computing = open_runtime(settings, several=True)
    values = begun_settings(given, **facts)
    recorded = {"source": source_path, **seen, "labels": labels, **values, **computing, "private": private}
    with open_run(runtime, out, recorded, command="adapt", resume=resume) as run:
        if run.finished() is not None:
            run.drop_checkpoints()
            say(f"{out} is finished already")
            return
        with decoding(data.without_labels(), stored.spec, runtime) as decoded:
            source = SourceModel.load(source_path, module=module)
            store = decoded()
        with bar("adapting", unit="images") as shown:
            progress = step_progress(shown)
            few = None if table is None else table[store.kept]
            model = run_adaptation(source, store, runtime=runtime, run=run, progress=progress, labels=few, **given)
        if runtime.rank == 0:
            metrics = save_adaptation(run, model, data, open_set=config.may_be_new, private=private)
            say_skipped(data, run, private=private)
            say_changes(out, settings["data"], model, settings.get("module"))
            say_figures(metrics, out)


def say_figures(metrics: dict[str, Any], out: str) -> None:
    """What labels say of an adaptation, if there are any."""
    if "labels" in metrics:
        say(f"labels: {describe_worth(metrics['labels'])}")
    if "after" in metrics:
        names, moments = ("accuracy", "ece", "hos"), ("before", "after")
        print_metrics({f"{name} {when}": metrics[when].get(name) for name in names for when in moments}, out)


def adapt_several(settings: dict[str, Any]) -> None:
    """Each source is adapted in a run folder of its own inside --out; --out itself holds the mixture."""
    from usfan.api import adapt_several as run_several
    from usfan.api import for_run, settled, settled_values
    from usfan.artifacts.model import as_model, check_members
    from usfan.evaluation.samples import adaptation_metrics
    from usfan.runs.folder import open_run

    out, resume, private = settings["out"], settings.get("resume", False), settings.get("private", False)
    paths, module = settings["source"], load_module(settings.get("module"))
    data, seen = open_data(settings)
    given = {k: v for k, v in settings.items() if k not in own_names()}
    sources = [as_model(path, module) for path in paths]
    check_members([(model.classes, model.spec) for model in sources])
    config, _ = settled(sources[0], given)
    data = for_run(data, sources[0].classes, config)
    runtime, computing = open_runtime(settings)
    labels, values = settings.get("labels"), settled_values(sources[0], given)
    recorded = {"source": paths, **seen, "labels": labels, **values, **computing, "private": private}
    with open_run(runtime, out, recorded, command="adapt", resume=resume) as run:
        if run.finished() is not None:
            say(f"{out} is finished already")
            return
        options = {"runtime": runtime, "run": run, "labels": labels, "names": paths, "private": private}
        model = run_several(sources, data, **options, **given)
        say_skipped(data, run, private=private)
        weighed = ", ".join(f"{share:.2f} {path}" for share, path in zip(model.shares, paths, strict=True))
        say(f"mixed by {model.mixing}: {weighed}")
        say_changes(out, settings["data"], model, settings.get("module"))
        metrics = adaptation_metrics(model, data, open_set=config.may_be_new)
        say_figures(metrics, out)


def own_names() -> set[str]:
    """What `adapt` takes beside the settings of the adaptation."""
    own = {"source", "data", "out", "resume", "private", "module", "root", "strict", "unlabelled", "labels"}
    return own | {f.name for f in dataclasses.fields(RuntimeConfig)}


def evaluate(settings: dict[str, Any]) -> None:
    from usfan.artifacts.model import SourceModel
    from usfan.compute.share import first_speaks
    from usfan.data.few_labels import only_labelled
    from usfan.evaluation.evaluate import evaluate as run_evaluation
    from usfan.runs.folder import open_run

    out, model_path, open_set = settings.get("out"), settings["model"], settings.get("open_set", False)
    module, labels = load_module(settings.get("module")), settings.get("labels")
    data, seen = open_data(settings if labels is None else {**settings, "unlabelled": True})
    model = SourceModel.load(model_path, module=module).with_uncertainty(settings.get("uncertainty", "auto"))
    if labels is not None:
        data = only_labelled(data, labels, model.classes, root=settings.get("root"), open_set=open_set)
    runtime, _ = open_runtime(settings, several=True)
    recorded = {"model": model_path, **seen, "labels": labels, "open_set": open_set}
    recorded["uncertainty"] = model.uncertainty.kind
    with contextlib.ExitStack() as stack:
        stack.enter_context(first_speaks(runtime))
        run = None if out is None else stack.enter_context(open_run(runtime, out, recorded, command="evaluate"))
        with bar("evaluating", len(data)) as shown:
            options = {"runtime": runtime, "progress": shown.advance, "folder": model_path}
            metrics = run_evaluation(model, data, open_set=open_set, **options)
        if runtime.rank:
            return
        figures = {k: v for k, v in metrics.items() if isinstance(v, (int, float))}
        if run is not None:
            run.save_metrics(metrics)
            run.scalars({f"evaluate/{name}": value for name, value in figures.items()}, 0)
            run.log("evaluated", **figures)
        say_skipped(data, run)
    print_metrics(metrics, f"{model_path} on {settings['data']}")
    if "labels" in metrics:
        say(f"labels given to adapt: {describe_worth(metrics['labels'])}")
    print(json.dumps(figures))


def predict(settings: dict[str, Any]) -> None:
    from usfan.artifacts.model import SourceModel
    from usfan.compute.share import first_speaks
    from usfan.data.inputs import open_inputs
    from usfan.evaluation.predictions import write_predictions

    out, as_json, coverage = settings.get("out"), settings.get("json", False), settings.get("coverage")
    if coverage is not None and not 0 < coverage <= 1:
        raise ConfigError(f"coverage must be a number above 0 and at most 1; got {coverage}")
    if out is not None:
        must_be_a_file(Path(out), "--out")
    module = load_module(settings.get("module"))
    data = open_inputs(settings["data"], root=settings.get("root"), strict=settings.get("strict", False))
    model = SourceModel.load(settings["model"], module=module).with_uncertainty(settings.get("uncertainty", "auto"))
    runtime, _ = open_runtime(settings, several=out is not None)
    with tempfile.TemporaryDirectory() as folder:
        table = Path(folder, "table.csv") if out is None else Path(out)
        with first_speaks(runtime), bar("predicting", len(data)) as shown:
            count = write_predictions(
                table, model.to(runtime.device), data, coverage, runtime, shown.advance, json_lines=as_json
            )
        if out is None:
            sys.stdout.write(table.read_text(encoding="utf-8"))
    say_skipped(data)
    if out is not None:
        form = "JSON lines" if as_json else "CSV (--json writes JSON lines)"
        say(f"{out}: {count:,} prediction{'s' * (count != 1)}, as {form}")


def report(settings: dict[str, Any]) -> None:
    from usfan.report.page import write_report

    runs, out, root = [Path(run) for run in settings["runs"]], settings.get("out"), settings.get("root")
    if out is not None:
        must_be_a_file(Path(out), "--out")
    path = write_report(runs, Path(out) if out else None, root=Path(root) if root else None)
    say(str(path))


def export(settings: dict[str, Any]) -> None:
    from usfan.artifacts.model import SourceModel
    from usfan.artifacts.onnx import OUTPUTS, TENSOR_OUTPUTS, export_onnx

    out, tensors = Path(settings["onnx"]), settings.get("tensors", False)
    must_be_a_file(out, "--onnx")
    model = SourceModel.load(settings["model"], module=load_module(settings.get("module")))
    model = model.with_uncertainty(settings.get("uncertainty", "auto"))
    with console.status("exporting: the graph is written, and compared with onnxruntime"):
        worst = export_onnx(model, out, tensors=tensors)
    gives = ", ".join(TENSOR_OUTPUTS if tensors else OUTPUTS)
    say(f"{out}: {gives}; onnxruntime agrees to {worst:.1e}")


def methods(settings: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    from usfan.adaptation.methods import METHODS, find_method

    name = settings.get("name")
    if name is None:
        table = Table(title="Methods")
        for column in ("name", "what it does", "weights", "published: Office-31/Office-Home/VisDA-C"):
            table.add_column(column)
        for row in METHODS.values():
            table.add_row(row.name, row.summary, row.certainty.weights, row.published)
    else:
        method = find_method(name)
        table = Table(title=f"{method.name}: {method.summary}")
        for column in ("setting", "default", "what it does"):
            table.add_column(column)
        docs = method.setting_docs()
        for setting, value in method.settings().items():
            table.add_row(setting, "decided by the run" if value is None else str(value), docs.get(setting, ""))
    shown = Console()
    shown.print(table, soft_wrap=not shown.is_terminal)  # one line each if it is read from a pipe


def demo(settings: dict[str, Any]) -> None:
    from usfan.reproduce.digits import run_demo
    from usfan.runs.folder import folder_lock

    out = Path(settings.get("out", "runs/demo"))
    runtime, _ = open_runtime(settings)
    with folder_lock(out):
        run_demo(out, runtime=runtime, seed=settings.get("seed", 0))


def study(settings: dict[str, Any]) -> None:
    from usfan.reproduce.command import study as run_study

    runtime, computing = open_driver(settings)
    run_study(without_computing(settings), runtime, computing)


def reproduce(settings: dict[str, Any]) -> None:
    from usfan.reproduce.command import reproduce as run_benchmark

    runtime, computing = open_driver(settings)
    settings = without_computing(settings)
    run_benchmark(settings.pop("benchmark"), settings, runtime, computing)


def open_driver(settings: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The devices of this process, and what was asked for. On Ray the workers have their own: this one needs none."""
    asked = {**settings, "device": "cpu", "precision": "32"} if settings.get("ray") else settings
    return open_runtime(asked)[0], dataclasses.asdict(make_config(RuntimeConfig, take(settings, RuntimeConfig)))


def without_computing(settings: dict[str, Any]) -> dict[str, Any]:
    """What a study is about, without where it is computed."""
    return {k: v for k, v in settings.items() if k not in {f.name for f in dataclasses.fields(RuntimeConfig)}}


def completion(settings: dict[str, Any]) -> None:
    from usfan.cli.parse import completion_script

    print(completion_script(settings["shell"]))


COMMANDS: dict[str, Callable[[dict[str, Any]], None]] = {
    c.__name__: c
    for c in (demo, train, posterior, adapt, evaluate, predict, report, export, methods, study, reproduce, completion)
}
