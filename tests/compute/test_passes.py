"""The step, the schedule, the batches and the pass over a data set, in one process on a CPU."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor, nn

from process_worker import CLASSES, SmoothCNN, pictures
from usfan.compute import passes as engine
from usfan.compute.accelerate.pointwise import PointwiseConv2d, multiply_pointwise
from usfan.compute.optimiser import Optimiser
from usfan.compute.passes import (
    Feeder,
    count_batches,
    epoch_batches,
    forward,
    forward_store,
    prepare,
    set_mode,
    worth_compiling,
)
from usfan.compute.runtime import Runtime, permutation, process_counts, seed_everything, start_runtime
from usfan.compute.stepper import Stepper
from usfan.config import OptimiserConfig, RuntimeConfig
from usfan.data.cache import PixelStore
from usfan.data.views import InputSpec, test_view, train_view
from usfan.errors import ConfigError
from usfan.models.classifier import Classifier
from usfan.runs.folder import load_checkpoint

CPU = Runtime(torch.device("cpu"))
SPEC = InputSpec(1, 28, 28, (0.5,), (0.5,), "resized-crop")


def small_classifier() -> Classifier:
    torch.manual_seed(0)
    return prepare(Classifier(SmoothCNN(), SmoothCNN.num_features, CLASSES, bottleneck=8), SPEC, CPU)


def small_store(count: int = 30) -> PixelStore:
    return PixelStore.from_tensor(pictures(count, 0)[0])


def take_steps(classifier: Classifier, optimiser: Optimiser, steps: range) -> None:
    feeder = Feeder(small_store(), SPEC, 0, CPU)
    set_mode(classifier, training=True)
    for step in steps:
        optimiser.schedule(step)
        (samples,) = feeder.inputs(torch.arange(step, step + 8))
        _, logits = forward(classifier, feeder.view(samples), CPU)
        optimiser.update(logits.square().mean())


def test_schedule_falls_as_the_recipe_says() -> None:
    optimiser = Optimiser(small_classifier(), OptimiserConfig(lr=0.02, backbone_lr_scale=0.1), 40, CPU, head=True)
    for step in (0, 1, 20, 39):
        expected = 0.02 * (1 + 10 * step / 40) ** -0.75
        assert optimiser.schedule(step) == pytest.approx(expected, rel=1e-12)
        assert [g["lr"] for g in optimiser.sgd.param_groups] == pytest.approx([0.1 * expected, expected], rel=1e-12)


def test_first_steps_are_nesterov_by_hand() -> None:
    """v ← μ v + g + λθ,  θ ← θ − lr (g + λθ + μ v)."""
    classifier = small_classifier()
    config = OptimiserConfig(lr=0.1, momentum=0.9, weight_decay=0.01)
    optimiser = Optimiser(classifier, config, 10, CPU, head=True)
    theta = classifier.head.bias
    theta.data.fill_(2.0)
    value, velocity = 2.0, 0.0
    for step in range(3):
        lr = optimiser.schedule(step)
        optimiser.update(3 * theta.sum())
        slope = 3 + 0.01 * value
        velocity = 0.9 * velocity + slope
        value -= lr * (slope + 0.9 * velocity)
        assert theta.detach().tolist() == pytest.approx([value] * CLASSES, rel=1e-5)


def test_frozen_head_is_not_updated() -> None:
    classifier = small_classifier()
    classifier.head.requires_grad_(False)
    before = {k: v.clone() for k, v in classifier.state_dict().items()}
    take_steps(classifier, Optimiser(classifier, OptimiserConfig(), 4, CPU, head=False), range(2))
    changed = {k for k, v in classifier.state_dict().items() if not torch.equal(v, before[k])}
    assert not any(k.startswith("head.") for k in changed)
    assert "backbone.0.weight" in changed


def test_optimiser_goes_on_where_it_stopped() -> None:
    whole, halves = small_classifier(), small_classifier()
    take_steps(whole, Optimiser(whole, OptimiserConfig(), 6, CPU, head=True), range(6))
    first = Optimiser(halves, OptimiserConfig(), 6, CPU, head=True)
    assert first.tensors() == {}
    take_steps(halves, first, range(3))
    saved = {k: v.clone() for k, v in first.tensors().items()}
    second = Optimiser(halves, OptimiserConfig(), 6, CPU, head=True)
    second.restore(saved)
    take_steps(halves, second, range(3, 6))
    for name, tensor in whole.state_dict().items():
        assert torch.equal(tensor, halves.state_dict()[name]), name


@pytest.mark.parametrize("count", [2, 31, 32, 33, 34, 96, 97, 101])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_epoch_batches_hold_every_sample_and_are_of_one_size(count: int, world: int) -> None:
    shards = [
        list(epoch_batches(count, 32, 7, 2, dataclasses.replace(CPU, rank=rank, world=world))) for rank in range(world)
    ]
    whole = list(epoch_batches(count, 32, 7, 2, CPU))
    assert len(whole) == count_batches(count, 32)
    assert all(len(shard) == len(whole) for shard in shards)
    for number, (batch, size) in enumerate(whole):
        parts = [shard[number] for shard in shards]
        assert all(total == size == len(batch) for _, total in parts)
        assert torch.cat([rows for rows, _ in parts]).sort().values.equal(batch.sort().values)
    seen = torch.cat([batch for batch, _ in whole])
    assert seen.unique().tolist() == list(range(count))
    assert len(seen) == len(whole) * min(32, count)
    assert {size for _, size in whole} == {min(32, count)}
    assert all(len(batch.unique()) == len(batch) for batch, _ in whole)


def test_fewer_than_two_samples_make_no_batch() -> None:
    assert count_batches(1, 32) == count_batches(0, 32) == 0
    assert list(epoch_batches(1, 32, 7, 2, CPU)) == []


def test_order_changes_with_epoch_and_seed_only() -> None:
    assert permutation(50, 1, 2).equal(permutation(50, 1, 2))
    assert not permutation(50, 1, 2).equal(permutation(50, 1, 3))
    assert not permutation(50, 1, 2).equal(permutation(50, 2, 2))


def test_processes_draw_apart_and_the_first_as_one_would() -> None:
    draws = []
    for part in (0, 1, 2):
        seed_everything(3, 4, part=part)
        draws.append(torch.rand(4))
    seed_everything(3, 4)
    assert torch.rand(4).equal(draws[0])
    assert not draws[0].equal(draws[1])
    assert not draws[1].equal(draws[2])


def test_forward_store_is_a_plain_loop() -> None:
    classifier, store = small_classifier(), small_store()
    take_steps(classifier, Optimiser(classifier, OptimiserConfig(), 4, CPU, head=True), range(2))
    features, logits = forward_store(classifier, store, SPEC, CPU, batch_size=7)
    rows = torch.tensor([29, 3, 3, 11])
    some, _ = forward_store(classifier, store, SPEC, CPU, rows=rows)
    assert not classifier.training
    with torch.no_grad():
        for i in range(len(store)):
            z, f = classifier(test_view(store.pixels[i : i + 1], SPEC))
            torch.testing.assert_close(features[i], z[0], rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(logits[i], f[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(some, features[rows], rtol=1e-5, atol=1e-6)


def test_feeder_views_are_keyed_by_sample_and_epoch() -> None:
    store = small_store()
    feeder = Feeder(store, SPEC, 5, CPU)
    samples = torch.tensor([4, 9, 2])
    feeder.epoch.fill_(3)
    expected = train_view(store.pixels, samples, samples, SPEC, 5, 3)
    assert torch.equal(feeder.view(*feeder.inputs(samples)), expected)
    assert torch.equal(feeder.view(samples, store.batch(samples)), expected)
    assert torch.equal(feeder.view(samples[1:]), expected[1:])
    feeder.epoch.fill_(4)
    assert not torch.equal(feeder.view(samples), expected)
    assert feeder.view(samples[:0]).shape == (0, 1, 28, 28)


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
def test_out_of_memory_goes_on_with_the_same_result(failing: int, caplog: pytest.LogCaptureFixture) -> None:
    """The batch is taken whole again, with what the backward pass needs elsewhere: the same bits come out."""

    def run(fail_at: int | None) -> Classifier:
        torch.manual_seed(0)
        dropping = Classifier(SmoothCNN(), SmoothCNN.num_features, CLASSES, bottleneck=8, dropout=0.5)
        classifier = prepare(dropping, SPEC, CPU)
        optimiser = Optimiser(classifier, OptimiserConfig(), 4, CPU, head=True)
        feeder, calls = Feeder(small_store(), SPEC, 0, CPU), [0]
        set_mode(classifier, training=True)

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

    plain, failed = run(None).state_dict(), run(failing).state_dict()
    assert all(torch.equal(plain[name], failed[name]) for name in plain)
    assert "ran out of memory" in caplog.text


def test_out_of_memory_in_one_of_several_processes_is_not_hidden() -> None:
    def step(samples: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("no room")

    stepper = Stepper(step, dataclasses.replace(CPU, world=2), 4, torch.nn.Identity())
    with pytest.raises(torch.OutOfMemoryError):
        stepper(torch.arange(3))


def test_a_pass_that_runs_out_of_memory_takes_halves(monkeypatch: pytest.MonkeyPatch) -> None:
    classifier, store = small_classifier(), small_store()
    expected = forward_store(classifier, store, SPEC, CPU)
    plain, sizes = engine.extract, []

    def crowded(classifier: Classifier, images: Tensor, runtime: Runtime, **options: bool) -> Tensor:
        sizes.append(len(images))
        if len(images) > 10:
            raise torch.OutOfMemoryError("no room")
        return plain(classifier, images, runtime, **options)

    monkeypatch.setattr(engine, "extract", crowded)
    found = forward_store(classifier, store, SPEC, CPU)
    assert sizes == [30, 15, 8, 7, 15, 8, 7]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_batch_norm_frozen_stays_at_its_statistics() -> None:
    classifier = small_classifier()
    set_mode(classifier, training=True, batch_norm="frozen")
    before = classifier.backbone[1].running_mean.clone()
    forward(classifier, torch.rand(4, 1, 28, 28), CPU)
    assert classifier.training
    assert torch.equal(classifier.backbone[1].running_mean, before)
    set_mode(classifier, training=True)
    forward(classifier, torch.rand(4, 1, 28, 28), CPU)
    assert not torch.equal(classifier.backbone[1].running_mean, before)


def test_no_run_folder_no_checkpoint() -> None:
    assert load_checkpoint(None, CPU) is None


def test_runtime_of_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = start_runtime(RuntimeConfig(device="cpu"))
    assert (runtime.rank, runtime.world, runtime.precision, runtime.fast) == (0, 1, "32", False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="no CUDA device"):
        start_runtime(RuntimeConfig(device="cuda"))


def test_torchrun_says_how_many(monkeypatch: pytest.MonkeyPatch) -> None:
    started = {"TORCHELASTIC_RUN_ID": "a", "WORLD_SIZE": "6", "LOCAL_WORLD_SIZE": "3"}
    for name, value in started.items():
        monkeypatch.setenv(name, value)
    assert process_counts(RuntimeConfig()) == (3, 2)
    assert process_counts(RuntimeConfig(devices=3, nodes=2)) == (3, 2)
    with pytest.raises(ConfigError, match="torchrun started 6 processes"):
        process_counts(RuntimeConfig(devices=4))


@pytest.mark.parametrize(
    ("captured", "compiled", "given"),
    [(True, False, ["norms", "products"]), (True, True, ["stems"]), (False, False, [])],
)
def test_layers_by_what_so_many_steps_pay_for(monkeypatch, captured: bool, compiled: bool, given: list[str]) -> None:
    calls: list[str] = []
    monkeypatch.setattr(engine, "worth_capturing", lambda *_: captured)
    monkeypatch.setattr(engine, "worth_compiling", lambda *_: compiled)
    monkeypatch.setattr(engine, "fuse_norms", lambda *_: calls.append("norms"))
    monkeypatch.setattr(engine, "block_stems", lambda *_: calls.append("stems"))
    monkeypatch.setattr(engine, "multiply_pointwise", lambda *_: calls.append("products"))
    classifier = small_classifier()
    classifier.channels_last = True
    engine.speed_up(classifier, CPU, 100)
    assert calls == given
    classifier.channels_last = False
    engine.speed_up(classifier, CPU, 100)
    assert calls == given


def test_layers_are_a_network_s_own_after_the_steps() -> None:
    classifier = small_classifier()
    classifier.backbone = nn.Sequential(nn.Conv2d(3, 4, 1), classifier.backbone)
    multiply_pointwise(classifier)
    assert type(classifier.backbone[0]) is PointwiseConv2d
    engine.after_steps(classifier, CPU)
    assert type(classifier.backbone[0]) is nn.Conv2d


def test_a_released_stepper_holds_nothing() -> None:
    stepper = Stepper(lambda x: x, CPU, 4, torch.nn.Identity())
    stepper.graphs[1] = "a graph"
    stepper.release()
    assert not stepper.graphs
    with pytest.raises(RuntimeError, match="released"):
        stepper(torch.zeros(1))


def test_passes_over_pixels_elsewhere_are_not_captured() -> None:
    assert engine.replayed_pass(small_classifier(), small_store(), SPEC, CPU, 10**6) is None
