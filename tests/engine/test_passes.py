"""The batches of an epoch, the views, and the pass over a data set, in one process on a CPU."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from small_network import CPU, SPEC, small_classifier, small_store, stage, take_steps
from torch import Tensor, nn

from usfan.data.views import test_view, train_view
from usfan.engine import passes
from usfan.engine.optimiser import Optimiser
from usfan.engine.passes import (
    Feeder,
    count_batches,
    epoch_batches,
    forward,
    forward_store,
    set_mode,
)
from usfan.engine.runtime import Runtime
from usfan.models.classifier import Classifier


@pytest.mark.parametrize("count", [2, 31, 32, 33, 34, 96, 97, 101])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_epoch_batches_hold_every_sample_and_are_of_one_size(count: int, world: int) -> None:
    shards = [
        list(epoch_batches(count, 32, 7, 2, dataclasses.replace(CPU, rank=rank, world=world)))
        for rank in range(world)
    ]
    whole = list(epoch_batches(count, 32, 7, 2, CPU))
    assert len(whole) == count_batches(count, 32)
    assert all(len(shard) == len(whole) for shard in shards)
    for number, batch in enumerate(whole):
        parts = torch.cat([shard[number] for shard in shards])
        assert parts.sort().values.equal(batch.sort().values)
    seen = torch.cat(whole)
    assert seen.unique().tolist() == list(range(count))
    assert len(seen) == len(whole) * min(32, count)
    assert all(len(batch.unique()) == len(batch) == min(32, count) for batch in whole)


def test_fewer_than_two_samples_make_no_batch() -> None:
    assert count_batches(1, 32) == count_batches(0, 32) == 0
    assert list(epoch_batches(1, 32, 7, 2, CPU)) == []


def test_forward_store_is_a_plain_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passes, "PASS_BATCH", 7)
    classifier = small_classifier()
    store = small_store()
    take_steps(classifier, Optimiser(classifier, stage(), 4, CPU), range(2))
    features, logits = forward_store(classifier, store, SPEC, CPU)
    rows = torch.tensor([29, 3, 3, 11])
    some, _ = forward_store(classifier, store, SPEC, CPU, rows=rows)
    assert not classifier.training
    with torch.no_grad():
        for i in range(len(store)):
            z, f = classifier(test_view(store.values[i : i + 1], SPEC))
            torch.testing.assert_close(features[i], z[0], rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(logits[i], f[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(some, features[rows], rtol=1e-5, atol=1e-6)


def test_feeder_views_are_keyed_by_sample_and_epoch() -> None:
    store = small_store()
    feeder = Feeder(store, SPEC, 5, CPU)
    samples = torch.tensor([4, 9, 2])
    feeder.epoch.fill_(3)
    expected = train_view(store.values, samples, samples, SPEC, 5, 3)
    assert torch.equal(feeder.view(*feeder.inputs(samples)), expected)
    assert torch.equal(feeder.view(samples, store.batch(samples)), expected)
    assert torch.equal(feeder.view(samples[1:]), expected[1:])
    again = feeder.view(samples, again=True)
    assert not torch.equal(again, expected)
    assert torch.equal(feeder.view(samples, store.batch(samples), again=True), again)
    feeder.epoch.fill_(4)
    assert not torch.equal(feeder.view(samples), expected)
    assert feeder.view(samples[:0]).shape == (0, 1, 28, 28)


def test_a_pass_that_runs_out_of_memory_takes_halves(monkeypatch: pytest.MonkeyPatch) -> None:
    classifier = small_classifier()
    store = small_store()
    expected = forward_store(classifier, store, SPEC, CPU)
    plain = passes.extract
    sizes = []

    def crowded(
        classifier: Classifier, images: Tensor, runtime: Runtime, **options: bool
    ) -> Tensor:
        sizes.append(len(images))
        if len(images) > 10:
            raise torch.OutOfMemoryError("no room")
        return plain(classifier, images, runtime, **options)

    monkeypatch.setattr(passes, "extract", crowded)
    found = forward_store(classifier, store, SPEC, CPU)
    assert sizes == [30, 15, 8, 7, 15, 8, 7]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_a_frozen_backbone_stays_in_test_mode() -> None:
    """new: its statistics stay, and its dropout is off; norm: its statistics move; all: everything trains."""
    for tune, statistics, dropout in (
        ("new", False, False),
        ("norm", True, False),
        ("all", True, True),
    ):
        classifier = small_classifier()
        classifier.backbone.append(nn.Dropout(0.5))
        before = [
            m.running_mean.clone() for m in (classifier.backbone[1], classifier.bottleneck[1])
        ]
        set_mode(classifier, tune)
        forward(classifier, torch.rand(4, 1, 28, 28), CPU)
        assert torch.equal(classifier.backbone[1].running_mean, before[0]) != statistics
        assert not torch.equal(classifier.bottleneck[1].running_mean, before[1])
        assert classifier.backbone[-1].training == dropout


def test_passes_over_pixels_elsewhere_are_not_captured() -> None:
    assert passes.replayed_pass(small_classifier(), small_store(), SPEC, CPU, 10**6) is None
