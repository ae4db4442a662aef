"""Several processes on one or more machines, joined by torch.distributed.

torchrun tells each process its place by RANK, LOCAL_RANK, WORLD_SIZE and LOCAL_WORLD_SIZE. Without torchrun, the first
process of a machine starts the others: each runs the same command from its start, with the same variables set. Messages
go through MASTER_ADDR and MASTER_PORT; on several machines the user sets these and NODE_RANK.
"""

from __future__ import annotations

import atexit
import os
import socket
import subprocess
import sys
import threading
import time

import torch

from usfan.config import RuntimeConfig
from usfan.errors import ConfigError
from usfan.progress import in_notebook

PATIENCE = 10
"""Seconds that the first process waits at its end for the others."""


def process_counts(config: RuntimeConfig) -> tuple[int, int]:
    """Processes per machine, and machines: as requested, or as torchrun has started them."""
    if "LOCAL_WORLD_SIZE" not in os.environ:
        return config.devices, config.nodes
    world = int(os.environ["WORLD_SIZE"])
    local = int(os.environ["LOCAL_WORLD_SIZE"])
    if config.devices * config.nodes not in (1, world):
        raise ConfigError(
            f"--devices {config.devices} --nodes {config.nodes}: torchrun started {world} processes; leave both out"
        )
    return local, world // local


def join_processes(kind: str, devices: int, nodes: int) -> tuple[torch.device, int, int]:
    """Device, rank and number of processes, after all of them have met."""
    check_devices(kind, devices)
    if "LOCAL_WORLD_SIZE" not in os.environ:
        start_processes(devices, nodes)
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device(kind, local_rank) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(device)
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // devices))
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("nccl" if kind == "cuda" else "gloo")
        atexit.register(leave)
    return device, torch.distributed.get_rank(), torch.distributed.get_world_size()


def check_devices(kind: str, devices: int) -> None:
    if kind == "cuda":
        available = torch.cuda.device_count()
        name = "GPU"
    else:
        available = os.cpu_count() or 1
        name = "CPU core"
    if devices > available:
        plural = "" if available == 1 else "s"
        raise ConfigError(f"--devices {devices}: this machine has {available} {name}{plural}")


def start_processes(devices: int, nodes: int) -> None:
    """Start the other processes of this machine."""
    place = {"WORLD_SIZE": str(devices * nodes), "LOCAL_WORLD_SIZE": str(devices)}
    node = 0
    if nodes == 1:
        place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    elif {"MASTER_ADDR", "MASTER_PORT", "NODE_RANK"} <= os.environ.keys():
        node = int(os.environ["NODE_RANK"])
    else:
        raise ConfigError(
            f"--nodes {nodes}: start the command on each machine, by torchrun or with MASTER_ADDR, MASTER_PORT "
            "and NODE_RANK set"
        )
    command = this_command()
    children = []
    for local_rank in range(devices):
        place |= {"LOCAL_RANK": str(local_rank), "RANK": str(node * devices + local_rank)}
        if local_rank == 0:
            os.environ.update(place)
        else:
            children.append(subprocess.Popen(command, env={**os.environ, **place}))
    threading.Thread(target=watch, args=(children,), daemon=True).start()
    atexit.register(wait_for, children)


def this_command() -> list[str]:
    """The command that started this process."""
    import __main__

    if __main__.__spec__ is not None:
        return [sys.executable, "-m", __main__.__spec__.name, *sys.argv[1:]]
    if in_notebook() or not os.path.isfile(sys.argv[0]):
        raise ConfigError(
            "several processes need a script: start it by torchrun, or use one process"
        )
    return [sys.executable, os.path.abspath(sys.argv[0]), *sys.argv[1:]]


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def watch(children: list[subprocess.Popen[bytes]]) -> None:
    """End all processes if one fails: the others would wait for its messages for ever."""
    codes: list[int | None] = [None]
    while None in codes:
        time.sleep(1)
        codes = [child.poll() for child in children]
        if any(codes):
            for child in children:
                child.kill()
            os._exit(1)


def wait_for(children: list[subprocess.Popen[bytes]]) -> None:
    for child in children:
        try:
            child.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            child.kill()


def leave() -> None:
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
