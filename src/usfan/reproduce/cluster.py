"""Cells of a study on Ray: a cluster, or the cores and GPUs of this machine (extra usfan[cluster]).

A task trains one source model, or runs one cell, and writes its files as a study in one process does. The tasks of
cells wait for the task of their source model. If a worker is lost, Ray runs its task again; what it had finished lies
in the folder and is not run again. The folder of the study and the data must lie where all machines can reach them.
Only JSON passes between the driver and the workers.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from usfan.compute.runtime import start_runtime
from usfan.config import RuntimeConfig, make_config
from usfan.errors import ConfigError, UsfanError, shown
from usfan.models.hub import answers
from usfan.progress import console
from usfan.reproduce.place import LOCAL
from usfan.reproduce.suite import Cell, Show, Suite

RETRIES = 3
"""How often a task is repeated if its worker was lost. A cell that needs too much memory must not repeat forever."""
PATIENCE = 10.0
"""Seconds until a file that a worker wrote must be there: network disks show it late."""
OBJECT_STORE = 80 << 20
"""Bytes of shared memory of a local Ray. Rows are small."""


def run_on_ray(study: Suite, show: Show) -> None:
    """Every cell that is missing; `show` gets each row, and whether it is new."""
    missing: list[Cell] = []
    for each in study.cells():
        if study.is_done(each):
            show(study.read_cell(each), False)
        else:
            missing.append(each)
    if not missing:
        return
    with connected(study.place.ray or LOCAL) as ray:
        device = cluster_device(ray, study.computing["device"])
        asked = {"num_cpus": study.place.cores, "num_gpus": study.place.share if device == "cuda" else 0}
        check_resources(ray, asked)
        task = ray.remote(max_retries=RETRIES, **asked)(work)
        told = json.dumps(description(study, device), default=str)
        models = {group: task.remote(told, list(group)) for group in dict.fromkeys(cell[:2] for cell in missing)}
        waiting: dict[Any, Cell | None] = dict.fromkeys(models.values())
        waiting |= {task.remote(told, list(cell), models[cell[:2]]): cell for cell in missing}
        failures: list[tuple[Cell, Exception]] = []
        while waiting:
            for ref in ray.wait(list(waiting), timeout=1.0)[0]:
                cell, answer = waiting.pop(ref), answered(ray, ref)
                if isinstance(answer, Exception):
                    failures += [(cell, answer)] if cell is not None else []
                    continue
                study.hardware.add(answer["hardware"])
                if cell is None:
                    study.keep_description()
                else:
                    show(fetched(study, cell), True)
    if failures:
        (seed, source, target, method), first = failures[0]
        kind = UsfanError if isinstance(first, UsfanError) else OSError
        what = f"{method} {source}→{target} seed {seed}: {first}"
        raise kind(f"{len(failures)} of {len(missing)} cells failed, and what is done stays; the first: {what}")


@contextlib.contextmanager
def connected(address: str) -> Iterator[Any]:
    """Ray at an address. A connection that this process has already is used, and stays."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # Ray would send figures on its use
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    try:
        ray = importlib.import_module("ray")
    except ModuleNotFoundError:
        raise ConfigError("--ray needs Ray, which is not installed: pip install 'usfan[cluster]'") from None
    if ray.is_initialized():
        yield ray
        return
    check_address(address)
    logging.getLogger("ray").setLevel(logging.ERROR)
    own = {"include_dashboard": False, "object_store_memory": OBJECT_STORE} if address == LOCAL else {}
    try:
        with kept_signals():
            ray.init(address=address, log_to_driver=False, logging_level="error", **own)
    except (ConnectionError, ValueError, RuntimeError, OSError) as error:
        raise ConfigError(f"--ray {address}: cannot connect ({shown(' '.join(str(error).split()), 300)})") from None
    try:
        yield ray
    finally:
        ray.shutdown()


def check_address(address: str) -> None:
    """Something answers there: Ray would ask for a quarter of an hour before it gives up."""
    scheme, _, place = address.rpartition("://")
    if address in (LOCAL, "auto") or scheme not in ("", "ray"):
        return
    host, _, port = place.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f"--ray {shown(address, 80)}: write HOST:PORT, ray://HOST:PORT, auto or local")
    if not answers(host.strip("[]"), int(port)):
        raise ConfigError(f"--ray {shown(address, 80)}: nothing answers there; is the cluster up?")


@contextlib.contextmanager
def kept_signals() -> Iterator[None]:
    """Ray takes SIGTERM for itself; the command has its own way to end."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread() and before is not None:
            signal.signal(signal.SIGTERM, before)


def cluster_device(ray: Any, asked: str) -> str:
    """cuda or cpu for the workers: the driver's machine may have no GPU."""
    if asked != "auto":
        return asked
    return "cuda" if ray.cluster_resources().get("GPU", 0) > 0 else "cpu"


def check_resources(ray: Any, asked: dict[str, Any]) -> None:
    """Some machine can run a cell; else its task would wait for ever."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    for flag, key, name in (("--threads", "num_cpus", "CPU"), ("--device cuda: --share", "num_gpus", "GPU")):
        most = max((node.get(name, 0) for node in nodes), default=0)
        if asked[key] > most:
            raise ConfigError(f"{flag} {asked[key]}: no machine of the Ray cluster has more than {most:g} {name}s")


def description(study: Suite, device: str) -> dict[str, Any]:
    """From this a worker opens the same study."""
    given = {**study.given, "data": str(Path(study.given["data"]).absolute()), "threads": study.place.cores}
    workers = study.computing["workers"]
    runtime = {**study.computing, "device": device, "workers": study.place.cores if workers is None else workers}
    return {
        "name": study.name,
        "given": given,
        "out": str(study.out.absolute()),
        "runtime": runtime,
        "folder": os.getcwd(),
    }


def answered(ray: Any, ref: Any) -> dict[str, Any] | Exception:
    """What a task said, or what went wrong with it."""
    try:
        answer = json.loads(ray.get(ref))
    except ray.exceptions.RayError as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        return OSError(f"{type(error).__name__}: {shown(lines[-1], 300)}")
    if "error" in answer:
        return UsfanError(answer["error"]) if answer["mistake"] else OSError(answer["error"])
    return dict(answer)


def fetched(study: Suite, cell: Cell) -> dict[str, Any]:
    """The row of a cell that a worker has written."""
    end = time.monotonic() + PATIENCE
    while not study.is_done(cell):
        if time.monotonic() > end:
            raise ConfigError(
                f"{study.cell_path(*cell)} was written by a worker and is not here: --out must be a folder "
                "that all machines of the cluster share"
            )
        time.sleep(0.1)
    return study.read_cell(cell)


_OPENED: dict[str, Suite] = {}
"""The study of this worker process, with the images it has decoded."""


def work(told: str, part: list[Any], model: str | None = None) -> str:
    """In a worker: train the source model (seed, source), or run the cell (seed, source, target, method)."""
    if model is not None and "error" in json.loads(model):
        return model
    console.quiet = True
    try:
        study = opened(told)
        if len(part) == 2:
            study.ensure_model(part[1], part[0])
        else:
            study.run_cell(*part)
    except UsfanError as error:
        return json.dumps({"error": str(error), "mistake": True})
    except OSError as error:
        return json.dumps({"error": str(error), "mistake": False})
    return json.dumps({"hardware": study.device_name()})


def opened(told: str) -> Suite:
    if told not in _OPENED:
        _OPENED.clear()
        known = json.loads(told)
        with contextlib.suppress(OSError):  # paths of weights may be relative to it
            os.chdir(known["folder"])
        runtime = start_runtime(make_config(RuntimeConfig, known["runtime"]))
        torch.set_num_threads(known["given"]["threads"])
        _OPENED[told] = Suite.open(known["name"], known["given"], Path(known["out"]), runtime)
    return _OPENED[told]
