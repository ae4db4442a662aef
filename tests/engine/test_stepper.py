"""The stepper on a CPU: it just calls, goes on when memory runs out, and lets go of what it held."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from process_worker import CLASSES, SmoothCNN
from small_network import CPU, SPEC, small_store, stage
from torch import Tensor

from usfan.engine.optimiser import Optimiser
from usfan.engine.passes import Feeder, forward, prepare, set_mode, worth_compiling
from usfan.engine.stepper import Stepper
from usfan.models.classifier import Classifier


def test_stepper_on_a_cpu_just_calls() -> None:
    calls: list[Tensor] = []

    def step(samples: Tensor) -> Tensor:
        calls.append(samples)
        return samples.sum()

    stepper = Stepper(step, CPU, 10_000, torch.nn.Identity())
    given = [torch.arange(4), torch.arange(3)]
    assert [int(stepper(samples)) for samples in given] == [6, 3]
    assert calls == given
    assert stepper.graphs == {}
    assert not worth_compiling(CPU, 10**9)


@pytest.mark.parametrize("failing", [0, 2, 3])
def test_out_of_memory_goes_on_with_the_same_result(
    failing: int, caplog: pytest.LogCaptureFixture
) -> None:
    """The batch is taken whole again, with what the backward pass needs elsewhere: the same bits come out."""

    def run(fail_at: int | None) -> Classifier:
        torch.manual_seed(0)
        dropping = Classifier(
            SmoothCNN(), SmoothCNN.num_features, CLASSES, bottleneck=8, dropout=0.5
        )
        classifier = prepare(dropping, SPEC, CPU)
        optimiser = Optimiser(classifier, stage(), 4, CPU)
        feeder = Feeder(small_store(), SPEC, 0, CPU)
        calls = [0]
        set_mode(classifier, "all")

        def step(samples: Tensor) -> Tensor:
            _, logits = forward(classifier, feeder.view(samples), CPU)
            calls[0] += 1
            if calls[0] - 1 == fail_at:
                raise torch.OutOfMemoryError("no room")
            loss = logits.square().mean()
            optimiser.update(loss)
            return loss.detach()

        stepper = Stepper(step, CPU, 4, classifier)
        for number in range(4):
            stepper(torch.arange(number, number + 8))
        assert stepper.offload == (fail_at is not None)
        return classifier

    plain = run(None).state_dict()
    failed = run(failing).state_dict()
    assert all(torch.equal(plain[name], failed[name]) for name in plain)
    assert "ran out of memory" in caplog.text


def test_out_of_memory_in_one_of_several_processes_is_not_hidden() -> None:
    def step(samples: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("no room")

    stepper = Stepper(step, dataclasses.replace(CPU, world=2), 4, torch.nn.Identity())
    with pytest.raises(torch.OutOfMemoryError):
        stepper(torch.arange(3))


def test_a_released_stepper_holds_nothing() -> None:
    stepper = Stepper(lambda x: x, CPU, 4, torch.nn.Identity())
    stepper.graphs[1] = "a graph"
    stepper.release()
    assert not stepper.graphs
    with pytest.raises(RuntimeError, match="released"):
        stepper(torch.zeros(1))
