"""Several processes on one or more machines, joined by torch.distributed.

torchrun starts them: `torchrun --nproc-per-node 2 -m usfan adapt …`. It tells each process its place by RANK,
LOCAL_RANK, WORLD_SIZE and LOCAL_WORLD_SIZE, and ends all of them if one fails.
"""

from __future__ import annotations

import atexit
import os

import torch


def process_count() -> int:
    """Number of processes that torchrun started, on all machines; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", 1)) if "LOCAL_WORLD_SIZE" in os.environ else 1


def join_processes(kind: str) -> tuple[torch.device, int, int]:
    """Device, rank and number of processes, after all of them have met."""
    device = torch.device(kind)
    if kind == "cuda":
        device = torch.device(kind, int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("nccl" if kind == "cuda" else "gloo")
        atexit.register(leave)
    return device, torch.distributed.get_rank(), torch.distributed.get_world_size()


def leave() -> None:
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
