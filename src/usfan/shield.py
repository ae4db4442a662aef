"""Good manners in somebody's process: a public call leaves it as it was, and is not disturbed by its settings.

Inside a public call torch computes as in a fresh process: float32, gradients on, no autocast, no inference mode, no
default device. After it, these settings, the random numbers of torch, Python and NumPy, the number of threads, the
precision of products, warnings, loggers, matplotlib's backend and the training mode of networks are as before.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import random
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from usfan.config_checks import MOST_SOURCES

P = ParamSpec("P")
R = TypeVar("R")
PRECISIONS: tuple[Any, ...] = (torch.backends.cuda.matmul, torch.backends.cudnn)
"""Hold torch's settings of TF32."""


@dataclass(frozen=True)
class ProcessState:
    """Settings that all threads of a process share."""

    dtype: torch.dtype
    torch_random: Tensor
    cuda_random: list[Tensor]
    python_random: object
    numpy_random: object
    precisions: list[str]
    filters: list[object]
    levels: dict[str | None, int]
    """Levels of all loggers; None is the root."""
    backend: object
    """matplotlib's; None if it is not loaded."""

    @classmethod
    def now(cls) -> ProcessState:
        return cls(
            dtype=torch.get_default_dtype(),
            torch_random=torch.get_rng_state(),
            cuda_random=torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],
            python_random=random.getstate(),
            numpy_random=np.random.get_state(),  # noqa: NPY002
            precisions=[part.fp32_precision for part in PRECISIONS],
            filters=list(warnings.filters),
            levels=log_levels(),
            backend=plot_settings().get("backend"),
        )

    def restore(self) -> None:
        torch.set_default_dtype(self.dtype)
        torch.set_rng_state(self.torch_random)
        if self.cuda_random:
            torch.cuda.set_rng_state_all(self.cuda_random)
        random.setstate(self.python_random)  # type: ignore[arg-type]
        np.random.set_state(self.numpy_random)  # type: ignore[arg-type]  # noqa: NPY002
        for part, precision in zip(PRECISIONS, self.precisions, strict=True):
            if part.fp32_precision != precision:
                part.fp32_precision = precision
        if warnings.filters != self.filters:
            warnings.filters[:] = self.filters  # type: ignore[index]
            warnings._filters_mutated()  # type: ignore[attr-defined]
        for name, level in log_levels().items():
            before = self.levels.get(name, level)
            if level != before:
                logging.getLogger(name).setLevel(before)
        if self.backend is not None and plot_settings().get("backend") != self.backend:
            dict.__setitem__(plot_settings(), "backend", self.backend)


def log_levels() -> dict[str | None, int]:
    loggers = logging.root.manager.loggerDict.items()
    levels: dict[str | None, int] = {None: logging.root.level}
    for name, logger in list(loggers):
        if isinstance(logger, logging.Logger):
            levels[name] = logger.level
    return levels


def plot_settings() -> dict[str, object]:
    """matplotlib's settings, read without choosing a backend."""
    module = sys.modules.get("matplotlib")
    settings = getattr(module, "rcParams", {})
    return settings if isinstance(settings, dict) else {}


_lock = threading.Lock()
_before: list[ProcessState] = []
"""The state before the first of the calls that run now, in any thread."""
_calls = 0
_thread = threading.local()


@contextlib.contextmanager
def process_kept() -> Iterator[None]:
    """The shared settings are those of a fresh process until the last of the calls that run at the same time ends."""
    global _calls
    with _lock:
        if _calls == 0:
            _before[:] = [ProcessState.now()]
            torch.set_default_dtype(torch.float32)
        _calls += 1
    try:
        yield
    finally:
        with _lock:
            _calls -= 1
            if _calls == 0:
                _before.pop().restore()


@contextlib.contextmanager
def thread_kept() -> Iterator[None]:
    """The settings of this thread are those of a fresh one."""
    threads = torch.get_num_threads()
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        for kind in ("cpu", "cuda"):
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        if torch.get_default_device().type != "cpu":
            stack.enter_context(torch.device("cpu"))
        try:
            yield
        finally:
            if torch.get_num_threads() != threads:
                torch.set_num_threads(threads)


@contextlib.contextmanager
def shield() -> Iterator[None]:
    """Around a public call. Inside another one it does nothing."""
    if getattr(_thread, "inside", False):
        yield
        return
    _thread.inside = True
    try:
        with process_kept(), thread_kept():
            yield
    finally:
        _thread.inside = False


@contextlib.contextmanager
def modes_kept(*networks: object) -> Iterator[None]:
    """The layers of networks, or of models, train or test afterwards as they did before."""
    modes: dict[nn.Module, bool] = {}
    for network in networks:
        module = getattr(network, "classifier", network)
        if isinstance(module, nn.Module):
            modes.update((layer, layer.training) for layer in module.modules())
    try:
        yield
    finally:
        for layer, mode in modes.items():
            layer.training = mode


def shielded(function: Callable[P, R]) -> Callable[P, R]:
    """A public function, or method of a model, as one call that leaves the process and its arguments as they were."""

    @functools.wraps(function)
    def call(*args: P.args, **named: P.kwargs) -> R:
        arguments = [*args, *named.values()]
        for several in [one for one in arguments if isinstance(one, (list, tuple))]:
            arguments.extend(several[:MOST_SOURCES])
        with shield(), modes_kept(*arguments):
            return function(*args, **named)

    return call


def shielded_steps(function: Callable[P, Iterator[R]]) -> Callable[P, Iterator[R]]:
    """The same for a generator, whose caller computes between its steps."""

    @functools.wraps(function)
    def steps(*args: P.args, **named: P.kwargs) -> Iterator[R]:
        parts = function(*args, **named)
        try:
            while True:
                with shield(), modes_kept(*args):
                    try:
                        part = next(parts)
                    except StopIteration:
                        return
                yield part
        finally:
            parts.close()  # type: ignore[attr-defined]

    return steps
