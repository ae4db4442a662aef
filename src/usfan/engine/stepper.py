"""The step that both stages take, replayed as a CUDA graph on a GPU.

On a GPU the first steps of each batch size run eagerly (they are real steps, and warm up), then the whole step (view,
forward, loss, backward, update) is captured once and replayed: nothing waits for the host inside an epoch. Where
capture fails the step runs eagerly, and says so.
"""

from __future__ import annotations

import contextlib
import gc
import logging
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from usfan.engine.runtime import Runtime

log = logging.getLogger(__name__)

WARM_UP = 3
WORTH_CAPTURING = 50
"""Number of steps that makes capturing worthwhile under compile="auto"."""


def worth_capturing(runtime: Runtime, steps: int) -> bool:
    return runtime.fast and (runtime.compile != "auto" or steps >= WORTH_CAPTURING)


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """An old graph freed in the middle of a capture would break it. Collecting all garbage before takes longer than the
    capture."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class Stepper:
    """Calls `step(*inputs)`; on a GPU, if it pays, replays it as a CUDA graph, one per batch size."""

    def __init__(self, step: Callable[..., Tensor], runtime: Runtime, steps: int) -> None:
        self.step = step
        self.device = runtime.device
        self.capture = worth_capturing(runtime, steps)
        self.calls: dict[int, int] = {}
        self.graphs: dict[int, tuple[torch.cuda.CUDAGraph, tuple[Tensor, ...], Tensor]] = {}

    def __call__(self, *inputs: Tensor) -> Tensor:
        if not self.capture:
            return self.step(*inputs)
        size = len(inputs[0])
        if size in self.graphs:
            graph, static, result = self.graphs[size]
            for target, value in zip(static, inputs, strict=True):
                target.copy_(value, non_blocking=True)
            graph.replay()
            return result.clone()
        self.calls[size] = self.calls.get(size, 0) + 1
        if self.calls[size] <= WARM_UP:
            return self._on_side_stream(inputs)
        return self._record(inputs)

    def release(self) -> None:
        """No more steps: frees the graphs and the object that owns the step. They refer to each other, and would wait
        for the garbage collection otherwise, with all their memory."""
        self.graphs.clear()
        del self.step

    def _on_side_stream(self, inputs: tuple[Tensor, ...]) -> Tensor:
        stream = torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            result = self.step(*inputs)
        torch.cuda.current_stream(self.device).wait_stream(stream)
        return result

    def _record(self, inputs: tuple[Tensor, ...]) -> Tensor:
        static = tuple(t.clone() for t in inputs)
        graph = torch.cuda.CUDAGraph()
        generator = torch.cuda.default_generators[torch.cuda.current_device()]
        before = generator.clone_state()
        try:
            torch.cuda.synchronize(self.device)
            with no_collection(), torch.cuda.graph(graph):
                result = self.step(*static)
        except Exception as error:
            log.warning(
                "the step could not be captured as a CUDA graph and runs eagerly: %s", error
            )
            self.capture = False
            torch.cuda.synchronize(self.device)
            # A broken capture leaves the generator waiting for the rest of one.
            generator.graphsafe_set_state(before)
            return self.step(*inputs)
        self.graphs[len(inputs[0])] = (graph, static, result)
        graph.replay()
        return result.clone()
