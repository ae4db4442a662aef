"""The stepper on a CPU: it just calls, and lets go of what it held."""

from __future__ import annotations

import torch
from small_network import CPU
from torch import Tensor

from usfan.engine.passes import worth_compiling
from usfan.engine.stepper import Stepper


def test_stepper_on_a_cpu_just_calls() -> None:
    calls: list[Tensor] = []

    def step(samples: Tensor) -> Tensor:
        calls.append(samples)
        return samples.sum()

    stepper = Stepper(step, CPU, 10_000)
    given = [torch.arange(4), torch.arange(3)]
    assert [int(stepper(samples)) for samples in given] == [6, 3]
    assert calls == given
    assert stepper.graphs == {}
    assert not worth_compiling(CPU, 10**9)


def test_a_released_stepper_holds_nothing() -> None:
    stepper = Stepper(lambda x: x, CPU, 4)
    stepper.graphs[1] = "a graph"
    stepper.release()
    assert not stepper.graphs
    assert not hasattr(stepper, "step")
