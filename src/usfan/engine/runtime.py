"""Where to compute: device, precision, processes.

Gradients and batch statistics are summed over processes by hand (`total`), so that several processes take exactly the
step that one process would take on the global batch.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from usfan.config import RuntimeConfig, make_config
from usfan.engine.processes import join_processes, process_count
from usfan.errors import ConfigError, option
from usfan.maths.objectives import alone

MALLOC_OPTIONS = {
    -4: 0,  # M_MMAP_MAX
    -1: 2**31 - 1,  # M_TRIM_THRESHOLD
    -2: 64 << 20,  # M_TOP_PAD
    -8: 1,  # M_ARENA_MAX
}
"""Options of glibc's mallopt: number and value."""


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
    engine: str = "torch"
    """Engine of passes without a gradient: auto, torch, openvino, or one with its precision, such as openvino-bf16."""
    engine_precisions: tuple[str, ...] = ("bf16", "32")
    """Precisions that OpenVINO may compute in."""

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
        numbers = self.gathered(torch.tensor([number], device=self.device))
        return len(numbers.unique()) == 1

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


def start_runtime(
    runtime: Runtime | RuntimeConfig | Mapping[str, Any] | None = None,
    device: str | torch.device | None = None,
) -> Runtime:
    """Choose the device and, if several processes are to work together, join them. A runtime is taken as it is."""
    if isinstance(runtime, Runtime):
        if device is not None and torch.device(device).type != runtime.device.type:
            raise ConfigError(
                f"device={str(device)!r} and a runtime on {runtime.device} exclude each other: give one"
            )
        return runtime
    config = runtime
    if config is None or isinstance(config, Mapping):
        config = make_config(RuntimeConfig, dict(config or {}))
    if not isinstance(config, RuntimeConfig):
        raise ConfigError(
            f"runtime must be a dict such as {{'device': 'cuda', 'workers': 4}} or a RuntimeConfig; got {runtime!r:.80}"
        )
    if device is not None:
        config = dataclasses.replace(config, device=str(device))
    has_gpu = torch.cuda.is_available()
    if config.device == "cuda" and not has_gpu:
        raise ConfigError(
            f"{option('device', 'cuda')}: no CUDA device was found; use {option('device', 'cpu')}"
        )
    kind = config.device
    if kind == "auto":
        kind = "cuda" if has_gpu and config.engine != "openvino" else "cpu"
    if kind == "cuda" and config.engine == "openvino":
        raise ConfigError(f"{option('engine', 'openvino')} computes on a CPU only")
    precision = config.precision
    if precision == "auto":
        precision = "bf16" if kind == "cuda" else "32"
    if kind == "cuda":
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        torch.backends.cudnn.fp32_precision = "tf32"
        device = torch.device("cuda", 0)
    else:
        device = torch.device(kind)
    rank = 0
    world = 1
    if process_count() > 1:
        device, rank, world = join_processes(kind)
    precisions = ("bf16", "32") if config.precision == "auto" else (config.precision,)
    settings = (config.compile, config.workers, config.cache)
    return Runtime(
        device, precision, *settings, rank, world, config.engine, engine_precisions=precisions
    )


def keep_freed_memory() -> None:
    """Let glibc keep freed blocks for the next layer, instead of giving large ones back to the system and taking them
    anew, page by page: a network on a CPU spends most of its time on that. All threads share one arena: in others glibc
    gives large blocks back all the same. Settings that the user tuned are kept.

    Commands call this. In Python you call it, once, because it cannot be taken back in your process: networks then run
    up to ten times as fast on a CPU under Linux, and memory that was used once stays with the process."""
    if any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ):
        return
    with contextlib.suppress(OSError, AttributeError):  # another system, another library
        mallopt = ctypes.CDLL(None).mallopt
        for option, value in MALLOC_OPTIONS.items():
            mallopt(option, value)


def give_memory_back() -> None:
    """Give freed memory back to the system. The sizes that one pass needs rarely fit into the gaps of another."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def seed_everything(*numbers: int, part: int = 0) -> None:
    """Seed torch's global generator (dropout, initial weights) from a few numbers: a run resumed there draws the same.

    `part` sets apart the draws of processes that hold different images.
    """
    torch.manual_seed(mixed_seed(part << 40, numbers))


def permutation(count: int, *numbers: int) -> Tensor:
    """A shuffled order of `count` images, a function of the numbers alone."""
    generator = torch.Generator().manual_seed(mixed_seed(17, numbers))
    return torch.randperm(count, generator=generator)


def mixed_seed(start: int, numbers: Sequence[int]) -> int:
    seed = start
    for number in numbers:
        seed = (seed * 1_000_003 + number + 1) % (2**63 - 1)
    return seed
