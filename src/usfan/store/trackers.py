"""Experiment trackers: each sees what a run folder records, and at the end the metrics, the report and the model.

TensorBoard's curves lie in every run folder. MLflow (extra `usfan[mlflow]`) and Weights & Biases are used if the user
names one. Where they write is their own setting (MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_NAME, WANDB_MODE,
WANDB_PROJECT). They may connect somewhere, so no config file can name them.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import pkgutil
import secrets
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module, util
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Protocol

from usfan.errors import ConfigError, first_line, option, printable
from usfan.files import Folder, read_json

if TYPE_CHECKING:
    import numpy as np
    from tensorboard.compat.proto.summary_pb2 import Summary

    from usfan.store.schema import JsonTable

PROJECT = "usfan"
"""The experiment or project of runs that name none."""
LONGEST = 500
"""Characters of a setting that are recorded."""
BINS = 30
"""Of a histogram in TensorBoard."""


MARK = "usfan_run"
"""The tag of a run in MLflow by which a resumed run is continued: a hash of its folder and of the time it began."""
NO_STORE = (
    "MLFLOW_TRACKING_URI must be the address of a server (http://…), or with MLFLOW_ALLOW_FILE_STORE=true that of a "
    "folder (file:///…): MLflow's small client writes to no database"
)


class Tracker(Protocol):
    """The record of one run."""

    def scalars(self, values: Mapping[str, float], step: int) -> None: ...
    def histogram(self, name: str, values: np.ndarray, step: int) -> None: ...
    def finish(self, metrics: Mapping[str, float], folder: Path) -> None:
        """The run is complete: its figures, and its folder, which holds the model."""

    def close(self, *, failed: bool) -> None: ...


class TensorBoardCurves:
    """A file of events in the run folder. It is opened once: TensorBoard's own writer opens its path again and again,
    and follows a link that somebody laid there."""

    def __init__(self, folder: Path, settings: JsonTable) -> None:
        self.folder = folder

    @functools.cached_property
    def file(self) -> BinaryIO:
        name = f"events.out.tfevents.{round(time.time())}.{secrets.token_hex(8)}"
        with Folder(self.folder) as folder:
            return folder.in_place(name, append=True)

    def write(self, step: int, summaries: list[Summary]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.summary.writer.record_writer import RecordWriter

        now = time.time()
        events = [Event(wall_time=now, step=step, summary=summary) for summary in summaries]
        if "file" not in vars(self):
            events.insert(0, Event(wall_time=now, file_version="brain.Event:2"))
        records = RecordWriter(self.file)
        for event in events:
            records.write(event.SerializeToString())
        records.flush()

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        from torch.utils.tensorboard.summary import scalar

        self.write(step, [scalar(name, value) for name, value in values.items()])

    def histogram(self, name: str, values: np.ndarray, step: int) -> None:
        from torch.utils.tensorboard.summary import histogram

        self.write(step, [histogram(name, values, BINS)])

    def finish(self, metrics: Mapping[str, float], folder: Path) -> None:
        pass

    def close(self, *, failed: bool) -> None:
        if "file" in vars(self):
            self.file.close()


class MLflowRun:
    """A run of MLflow: parameters, figures by epoch, the report, and the model as a pyfunc (`usfan.metrics.pyfunc`)."""

    def __init__(self, folder: Path, settings: JsonTable) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        with warnings.catch_warnings():  # of its own code
            warnings.simplefilter("ignore")
            self.mlflow = import_module("mlflow")
            import_module("mlflow.pyfunc")
        try:
            self.client = self.mlflow.MlflowClient()
        except self.mlflow.exceptions.MlflowException as error:
            raise ConfigError(NO_STORE) from error
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        experiment = self.client.get_experiment_by_name(name)
        number = self.client.create_experiment(name) if experiment is None else None
        number = number or experiment.experiment_id
        self.id = self.run_of(folder.resolve(), number)
        for setting, value in settings.items():
            self.client.log_param(self.id, setting, str(value)[:LONGEST])

    def run_of(self, folder: Path, experiment: str) -> str:
        """The run of this folder: a new one, or the one that an interruption ended."""
        moment = (folder / "config.yaml").stat().st_mtime_ns  # written when the run began
        mark = hashlib.sha256(f"{folder} {moment}".encode()).hexdigest()
        before = self.client.search_runs([experiment], f"tags.{MARK} = '{mark}'")
        if before:
            number: str = before[0].info.run_id
            self.client.update_run(number, status="RUNNING")
            return number
        run = self.client.create_run(experiment, tags={MARK: mark}, run_name=folder.name)
        return str(run.info.run_id)

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        Metric = self.mlflow.entities.Metric
        now = round(1000 * time.time())
        metrics = [Metric(name, value, now, step) for name, value in values.items()]
        self.client.log_batch(self.id, metrics=metrics)

    def histogram(self, name: str, values: np.ndarray, step: int) -> None:
        pass  # MLflow has none

    def finish(self, metrics: Mapping[str, float], folder: Path) -> None:
        self.scalars(metrics, 0)
        with artifacts(folder) as (files, model):
            for file in files:
                self.client.log_artifact(self.id, str(file))
            if model is not None:
                from usfan import __version__

                pyfunc = model.with_name("pyfunc")
                self.mlflow.pyfunc.save_model(
                    str(pyfunc),
                    loader_module="usfan.metrics.pyfunc",
                    data_path=str(model),
                    pip_requirements=[f"usfan=={__version__}"],
                )
                self.client.log_artifacts(self.id, str(pyfunc), "model")

    def close(self, *, failed: bool) -> None:
        self.client.set_terminated(self.id, "FAILED" if failed else "FINISHED")


class WandbRun:
    """A run of Weights & Biases: settings, figures by epoch, and an artifact with the report and the model folder."""

    def __init__(self, folder: Path, settings: JsonTable) -> None:
        self.wandb = import_module("wandb")
        project = os.environ.get("WANDB_PROJECT", PROJECT)
        name = folder.resolve().name
        self.run = self.wandb.init(project=project, name=name, config=dict(settings))

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        self.run.log(dict(values), step=step)

    def histogram(self, name: str, values: np.ndarray, step: int) -> None:
        self.run.log({name: self.wandb.Histogram(values)}, step=step)

    def finish(self, metrics: Mapping[str, float], folder: Path) -> None:
        self.run.summary.update(dict(metrics))
        with artifacts(folder) as (files, model):
            artifact = self.wandb.Artifact(f"{folder.resolve().name}-model", type="model")
            for file in files:
                artifact.add_file(str(file))
            if model is not None:
                artifact.add_dir(str(model), name="model")
            self.run.log_artifact(artifact)

    def close(self, *, failed: bool) -> None:
        self.run.finish(exit_code=int(failed))


TRACKERS: dict[str, Callable[[Path, JsonTable], Tracker]] = {
    "tensorboard": TensorBoardCurves,
    "mlflow": MLflowRun,
    "wandb": WandbRun,
}
"""By the name that the user gives; each is made when there is something to record."""


class Trackers:
    """The trackers of one run. One that fails is named and left out: it does not end a training."""

    def __init__(self, names: tuple[str, ...], folder: Path, settings: JsonTable) -> None:
        self.folder = folder
        self.open: dict[str, Tracker] = {}
        for name in names:
            with self.failing_alone(name):
                self.open[name] = TRACKERS[name](folder, settings)

    @contextlib.contextmanager
    def failing_alone(self, name: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # of another program, or of its network
            from usfan.progress import say

            tracker = self.open.pop(name, None)
            say(f"{name} records no more of {self.folder}: {printable(first_line(error), 200)}")
            if tracker is not None:
                with contextlib.suppress(Exception):
                    tracker.close(failed=True)

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        for name, tracker in list(self.open.items()):
            with self.failing_alone(name):
                tracker.scalars(values, step)

    def histogram(self, name: str, values: np.ndarray, step: int) -> None:
        for key, tracker in list(self.open.items()):
            with self.failing_alone(key):
                tracker.histogram(name, values, step)

    def close(self, *, failed: bool) -> None:
        """End the records; those of a run that is complete get its metrics, report and model."""
        file = self.folder / "metrics.json"
        for name, tracker in list(self.open.items()):
            with self.failing_alone(name):
                if not failed and file.is_file():
                    tracker.finish(flat_numbers(read_json(file)), self.folder)
                tracker.close(failed=failed)
        self.open.clear()


def check_tracker(name: str) -> None:
    """ConfigError unless the tracker is known and installed."""
    if name not in TRACKERS:
        raise ConfigError(
            f"log must be one of {', '.join(TRACKERS)}; got {printable(name, 80)}"
        )
    if name != "tensorboard" and util.find_spec(name) is None:
        package = "'usfan[mlflow]'" if name == "mlflow" else name
        raise ConfigError(f"{option('log', name)}: pip install {package}")


def flat_numbers(table: object, prefix: str = "") -> dict[str, float]:
    """The numbers in metrics.json, named by their places: `after/accuracy`. Those of each class are left out: a class
    may have any name."""
    numbers: dict[str, float] = {}
    for name, value in table.items() if isinstance(table, dict) else ():
        place = f"{prefix}{name}"
        if isinstance(value, dict) and name != "per_class_accuracy":
            numbers |= flat_numbers(value, f"{place}/")
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            numbers[place] = float(value)
    return numbers


@contextlib.contextmanager
def artifacts(folder: Path) -> Iterator[tuple[list[Path], Path | None]]:
    """The report and metrics.json, and a folder with the model and nothing else, which is gone afterwards. Without a
    model None."""
    import tempfile

    from usfan.store.model import SourceModel

    # Found by name: the report shows runs, so no run imports it.
    write_report = pkgutil.resolve_name("usfan.report.page:write_report")
    with tempfile.TemporaryDirectory() as place:
        report = write_report([folder], Path(place, "report.html"))
        model = None
        if (folder / "config.json").is_file():
            model = SourceModel.load(folder).save(Path(place, "model"))
        yield [report, folder / "metrics.json"], model
