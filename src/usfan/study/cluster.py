"""Cells of a study on Ray: a cluster, or the cores and GPUs of this machine (extra usfan[cluster]).

A task trains one source model, or runs one cell, and writes its files as a study in one process does. The tasks of
cells wait for the task of their source model. If a worker is lost, Ray runs its task again; finished cells lie in the
folder and are not run again. The folder of the study and the data must lie where all machines can reach them.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import logging
import os
import secrets
import signal
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from usfan.config import RuntimeConfig, make_config
from usfan.engine.runtime import keep_freed_memory, start_runtime
from usfan.errors import ConfigError, UsfanError, option, printable
from usfan.models.hub import answers
from usfan.progress import console
from usfan.study.results import Row
from usfan.study.suite import Cell, Suite

LOCAL = "local"
"""The address that starts a Ray on this machine."""
RETRIES = 3
"""How often a task is repeated if its worker was lost. A cell that needs too much memory must not repeat forever."""
PATIENCE = 10.0
"""Seconds until a file that a worker wrote must be there: network disks show it late."""
OBJECT_STORE = 80 << 20
"""Bytes of shared memory of a local Ray that runs a study: rows are small."""
LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
"""Environment of a Ray that listens on the loopback address only, on every system."""
PRIORITY = {"RAY_worker_niceness": "0"}
"""Workers have the priority of the command. Ray gives them the lowest, so a busy machine hardly runs them."""


def cells_on_ray(study: Suite) -> Iterator[tuple[Row, bool]]:
    """Row of each cell, and whether it ran now."""
    missing = []
    for cell in study.cells():
        if study.is_done(cell):
            yield study.run_cell(cell), False
        else:
            missing.append(cell)
    if not missing:
        return
    failures: list[tuple[Cell, Exception]] = []
    with connected(study.computing.ray or LOCAL) as ray:
        tasks = start_tasks(ray, study, missing)
        while tasks:
            ready, _ = ray.wait(list(tasks), timeout=1.0)
            for task in ready:
                cell = tasks.pop(task)
                error = task_error(ray, task)
                if error is None:
                    yield written_row(study, cell), True
                else:
                    failures.append((cell, error))
    if failures:
        cell, first = failures[0]
        kind = UsfanError if isinstance(first, UsfanError) else OSError
        raise kind(
            f"{len(failures)} of {len(missing)} cells failed, and what is done stays; the first: "
            f"{cell.method} {cell.task} seed {cell.seed}: {first}"
        )


def start_tasks(ray: Any, study: Suite, missing: list[Cell]) -> dict[Any, Cell]:
    """A task per missing cell. It waits for the task that trains its source model, and fails if that one does."""
    device = study.runtime_settings["device"]
    if device == "auto":  # the machine of this process may have no GPU
        device = "cuda" if ray.cluster_resources().get("GPU", 0) > 0 else "cpu"
    cores = study.computing.cores
    share = study.computing.share if device == "cuda" else 0
    check_resource(ray, option("threads"), "CPU", cores)
    check_resource(ray, f"{option('device', 'cuda')}: {option('share')}", "GPU", share)
    remote = ray.remote(max_retries=RETRIES, num_cpus=cores, num_gpus=share)(work)
    text = json.dumps(description(study, device), default=str)
    models: dict[tuple[int, str], Any] = {}
    tasks: dict[Any, Cell] = {}
    for cell in missing:
        model = (cell.seed, cell.source)
        if model not in models:
            models[model] = remote.remote(text, model)
    for cell in missing:
        tasks[remote.remote(text, tuple(cell), models[cell.seed, cell.source])] = cell
    return tasks


def check_resource(
    ray: Any,
    flag: str,
    resource: str,
    amount: float,
) -> None:
    """Some machine can run a cell; else its task would wait for ever."""
    nodes = [node["Resources"].get(resource, 0) for node in ray.nodes() if node["Alive"]]
    most = max(nodes, default=0)
    if amount > most:
        raise ConfigError(
            f"{flag} {amount}: no machine of the Ray cluster has more than {most:g} {resource}s"
        )


@contextlib.contextmanager
def connected(address: str, object_store: int = OBJECT_STORE) -> Iterator[Any]:
    """Ray at an address, whose answers are code. A connection that this process has already is used, and stays."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # Ray would send figures on its use
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    options: Mapping[str, object] = {}
    with contextlib.ExitStack() as stack:
        if address == LOCAL:
            options = stack.enter_context(private_ray(object_store))
        try:
            ray = importlib.import_module("ray")
        except ModuleNotFoundError:
            raise ConfigError(
                f"{option('ray')} needs Ray, which is not installed: pip install 'usfan[cluster]'"
            ) from None
        if ray.is_initialized():
            yield ray
            return
        check_address(address)
        connect(ray, address, options)
        try:
            yield ray
        finally:
            ray.shutdown()


def connect(ray: Any, address: str, options: Mapping[str, object]) -> None:
    logging.getLogger("ray").setLevel(logging.ERROR)
    handler = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(address=address, log_to_driver=False, logging_level="error", **options)
    except (ConnectionError, ValueError, RuntimeError, OSError) as error:
        reason = printable(" ".join(str(error).split()), 300)
        raise ConfigError(f"{option('ray', address)}: cannot connect ({reason})") from None
    finally:  # Ray takes SIGTERM for itself
        if threading.current_thread() is threading.main_thread() and handler is not None:
            signal.signal(signal.SIGTERM, handler)


@contextlib.contextmanager
def private_ray(object_store: int) -> Iterator[dict[str, object]]:
    """Options of a Ray on this machine that nobody else can reach: it listens on the loopback address, wants a token
    that only its processes know, and works in a folder of the user's."""
    environment = {**LOOPBACK, **PRIORITY, "RAY_AUTH_TOKEN": local_token()}
    before = {name: os.environ.get(name) for name in (*environment, "RAY_AUTH_MODE")}
    os.environ.update(environment)
    os.environ.pop("RAY_AUTH_MODE", None)  # empty, it would mean that no token is needed
    try:
        # Sockets must have short paths. Ray opens its folder for all users, but not the one around it.
        with tempfile.TemporaryDirectory(
            prefix="usfan-", dir="/tmp", ignore_cleanup_errors=True
        ) as folder:
            yield {
                "include_dashboard": False,
                "object_store_memory": object_store,
                "_temp_dir": f"{folder}/ray",
            }
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


@functools.cache
def local_token() -> str:
    """The same for the life of the process: Ray reads it once."""
    return secrets.token_hex(32)


def check_address(address: str) -> None:
    """Something answers there: Ray would ask for a quarter of an hour before it gives up."""
    scheme, _, place = address.rpartition("://")
    if address in (LOCAL, "auto") or scheme not in ("", "ray"):
        return
    flag = option("ray", printable(address, 80))
    host, _, port = place.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f"{flag}: write HOST:PORT, ray://HOST:PORT, auto or local")
    if not answers(host.strip("[]"), int(port)):
        raise ConfigError(f"{flag}: nothing answers there; is the cluster up?")


def description(study: Suite, device: str) -> dict[str, Any]:
    """From this a worker opens the same study."""
    cores = study.computing.cores
    data = Path(study.user_settings["data"]).absolute()
    runtime = study.runtime_settings | {"device": device}
    if runtime["workers"] is None:
        runtime["workers"] = cores
    return {
        "name": study.name,
        "settings": study.user_settings | {"data": str(data), "threads": cores},
        "out": str(study.out.absolute()),
        "runtime": runtime,
        "folder": os.getcwd(),
    }


def task_error(ray: Any, task: Any) -> Exception | None:
    """Why a task failed, or None."""
    try:
        ray.get(task)
    except ray.exceptions.RayTaskError as error:
        cause: Exception = error.cause
        return cause
    except ray.exceptions.RayError as error:  # its worker was lost too often
        lines = str(error).strip().splitlines() or [""]
        return OSError(f"{type(error).__name__}: {printable(lines[-1], 300)}")
    return None


def written_row(study: Suite, cell: Cell) -> Row:
    """The row of a cell that a worker has written."""
    end = time.monotonic() + PATIENCE
    while not study.is_done(cell):
        if time.monotonic() > end:
            raise ConfigError(
                f"{study.cell_path(cell)} was written by a worker and is not here: {option('out')} must be a folder "
                "that all machines of the cluster share"
            )
        time.sleep(0.1)
    return study.run_cell(cell)


_STUDIES: dict[str, Suite] = {}
"""The study of this worker process, with the images it has decoded."""


def work(text: str, part: tuple[Any, ...], model: None = None) -> None:
    """In a worker: train the source model (seed, source), or run the cell (seed, source, target, method)."""
    console.quiet = True
    study = open_study(text)
    if len(part) == 2:
        seed, source = part
        study.ensure_model(source, seed)
    else:
        study.run_cell(Cell(*part))


def open_study(text: str) -> Suite:
    """The study of a description, opened once in a worker."""
    if text not in _STUDIES:
        _STUDIES.clear()
        values = json.loads(text)
        with contextlib.suppress(OSError):  # paths of weights may be relative to it
            os.chdir(values["folder"])
        runtime = start_runtime(make_config(RuntimeConfig, values["runtime"]))
        if runtime.device.type == "cpu":
            keep_freed_memory()
        torch.set_num_threads(values["settings"]["threads"])
        out = Path(values["out"])
        _STUDIES[text] = Suite.open(values["name"], values["settings"], out, runtime)
    return _STUDIES[text]
