"""Where to compute: device, precision, processes. Lightning Fabric starts the processes and moves tensors between them.

Gradients and batch statistics are summed over processes by hand (`total`), so that several processes take exactly the
step that one process would take on the global batch.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from usfan.config import RuntimeConfig, make_config
from usfan.errors import ConfigError
from usfan.scoring.objectives import alone

log = logging.getLogger(__name__)

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX, M_ARENA_MAX = -1, -2, -4, -8
"""Options of glibc's mallopt."""


@dataclass(frozen=True)
class Runtime:
    """The device of this process, and its place among the others."""

    device: torch.device
    precision: str = "32"
    """32 or bf16."""
    compile: str = "auto"
    workers: int | None = None
    cache: str | None = None
    rank: int = 0
    world: int = 1
    fabric: Any = field(default=None, repr=False)

    def total(self, values: Tensor) -> Tensor:
        """The sum over processes; no gradient passes."""
        if self.world == 1:
            return values
        values = values.clone(memory_format=torch.contiguous_format)
        torch.distributed.all_reduce(values)
        return values

    def gathered(self, rows: Tensor) -> Tensor:
        """The rows of all processes, one process after another; no gradient passes."""
        if self.world == 1:
            return rows
        counts = torch.zeros(self.world, dtype=torch.long, device=self.device)
        counts[self.rank] = len(rows)
        ends = self.total(counts).cumsum(0).tolist()
        whole = rows.new_zeros(ends[-1], *rows.shape[1:])
        whole[ends[self.rank] - len(rows) : ends[self.rank]] = rows
        return self.total(whole)

    def agree(self, number: int) -> bool:
        """Whether all processes hold the same number."""
        value = torch.tensor([number, number**2], dtype=torch.float64, device=self.device)
        total, squares = self.total(value).tolist()
        return bool(squares * self.world == total**2)

    @property
    def total_or_alone(self) -> Callable[[Tensor], Tensor]:
        """`total`, or the identity in a single process."""
        return alone if self.world == 1 else self.total

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        if self.precision == "bf16":
            return torch.autocast(self.device.type, dtype=torch.bfloat16)
        return contextlib.nullcontext()

    @property
    def fast(self) -> bool:
        """Whether steps are compiled and captured when there are enough of them."""
        return self.device.type == "cuda" and self.compile != "off" and self.world == 1


def as_runtime(runtime: Any = None, device: Any = None) -> Runtime:
    """A runtime as a caller may give it: `Runtime`, `RuntimeConfig`, a dict of its fields, or None; and a device."""
    if isinstance(runtime, Runtime):
        if device is not None and torch.device(str(device)).type != runtime.device.type:
            raise ConfigError(f"device={str(device)!r} and a runtime on {runtime.device} exclude each other: give one")
        return runtime
    if runtime is None or isinstance(runtime, Mapping):
        runtime = make_config(RuntimeConfig, dict(runtime or {}))
    if not isinstance(runtime, RuntimeConfig):
        raise ConfigError(
            f"runtime must be a dict such as {{'device': 'cuda', 'workers': 4}} or a RuntimeConfig; got {runtime!r:.80}"
        )
    if device is not None:
        runtime = dataclasses.replace(runtime, device=str(device))
    return start_runtime(runtime)


def start_runtime(config: RuntimeConfig | None = None) -> Runtime:
    """Choose the device and, if several processes were asked for, join them."""
    config = config or RuntimeConfig()
    kind = config.device
    if kind == "auto":
        kind = "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: no CUDA device was found; use --device cpu or auto")
    precision = config.precision
    if precision == "auto":
        precision = "bf16" if kind == "cuda" else "32"
    if kind == "cuda":
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        torch.backends.cudnn.fp32_precision = "tf32"
    else:
        keep_freed_memory()
    rank, world, fabric, device = 0, 1, None, torch.device(kind)
    devices, nodes = process_counts(config)
    if devices * nodes > 1:
        fabric = launch_fabric(kind, devices, nodes)
        rank, world, device = fabric.global_rank, fabric.world_size, fabric.device
    elif kind == "cuda":
        device = torch.device(kind, 0)
    return Runtime(device, precision, config.compile, config.workers, config.cache, rank, world, fabric)


def keep_freed_memory() -> None:
    """Let glibc keep freed blocks for the next layer, instead of giving large ones back to the system and taking them
    anew, page by page: a network on a CPU spends most of its time on that. All threads share one arena: in others glibc
    gives large blocks back all the same. Settings that the user tuned are kept."""
    if any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ):
        return
    with contextlib.suppress(OSError, AttributeError):  # another system, another library
        mallopt = ctypes.CDLL(None).mallopt
        options = ((M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, 2**31 - 1), (M_TOP_PAD, 64 << 20), (M_ARENA_MAX, 1))
        for option, value in options:
            mallopt(option, value)


def process_counts(config: RuntimeConfig) -> tuple[int, int]:
    """Processes per node, and nodes: as requested, or as torchrun has started them."""
    if not (torch.distributed.is_available() and torch.distributed.is_torchelastic_launched()):
        return config.devices, config.nodes
    world, local = int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_WORLD_SIZE"])
    if config.devices * config.nodes not in (1, world):
        raise ConfigError(
            f"--devices {config.devices} --nodes {config.nodes}: torchrun started {world} processes; leave both out"
        )
    return local, world // local


def launch_fabric(kind: str, devices: int, nodes: int) -> Any:
    """Start the processes of this node, or join those that are there; each of them runs the command from its start."""
    there = torch.cuda.device_count() if kind == "cuda" else os.cpu_count() or 1
    if devices > there:
        what = "GPU" if kind == "cuda" else "CPU core"
        raise ConfigError(f"--devices {devices}: this machine has {there} {what}{'s' if there != 1 else ''}")
    from lightning.fabric import Fabric

    for name in ("lightning.fabric", "lightning.pytorch"):
        logging.getLogger(name).setLevel(logging.WARNING)
    try:
        fabric = Fabric(accelerator=kind, devices=devices, num_nodes=nodes, strategy="ddp")
        fabric.launch()
    except ValueError as error:  # the scheduler's own counts differ
        raise ConfigError(f"--devices {devices} --nodes {nodes}: {error}") from None
    return fabric


def seed_everything(*numbers: int, part: int = 0) -> None:
    """Seed torch's global generator (dropout, initial weights) from a few numbers: a run resumed there draws the same.

    `part` sets apart the draws of processes that hold different samples.
    """
    seed = part << 40
    for number in numbers:
        seed = (seed * 1_000_003 + number + 1) % (2**63 - 1)
    torch.manual_seed(seed)


def permutation(count: int, *numbers: int) -> Tensor:
    """A shuffled order of `count` samples, a function of the numbers alone."""
    seed = 17
    for number in numbers:
        seed = (seed * 1_000_003 + number + 1) % (2**63 - 1)
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed))
