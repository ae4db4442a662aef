"""Views against an oracle that takes one image at a time; a draw depends on (seed, epoch, sample) and nothing else."""

from __future__ import annotations

import pytest
import torch

from oracles import drawn_views
from usfan.data.views import (
    InputSpec,
    crop_flip,
    keyed_integers,
    keyed_uniform,
    normalise,
    resized_crop,
    test_view,
    train_view,
)

SPEC = InputSpec(3, 8, 11, (0.4, 0.5, 0.6), (0.2, 0.25, 0.3))
KEYS = [(0, 0), (7, 1), (2**31 - 1, 2), (3, 1000)]


def pixels(count: int = 6, channels: int = 3, side: int = 11) -> torch.Tensor:
    return torch.randint(256, (count, channels, side, side), dtype=torch.uint8)


@pytest.mark.parametrize(("seed", "epoch"), KEYS)
@pytest.mark.parametrize("stream", [0, 1, 4])
def test_integers_are_those_of_python(seed, epoch, stream):
    samples = torch.tensor([0, 1, 2, 63, 10**6, 2**40])
    expected = [drawn_views.draw(seed, epoch, s, stream) for s in samples.tolist()]
    assert keyed_integers(seed, epoch, samples, stream).tolist() == expected
    assert keyed_integers(seed, torch.tensor(epoch), samples, stream).tolist() == expected
    uniform = [drawn_views.uniform(seed, epoch, s, stream) for s in samples.tolist()]
    assert keyed_uniform(seed, epoch, samples, stream).tolist() == uniform


@pytest.mark.parametrize(("seed", "epoch"), KEYS)
def test_crops_bit_for_bit(seed, epoch):
    images = pixels()
    rows = torch.tensor([5, 0, 3, 3, 1])
    samples = torch.tensor([105, 100, 103, 7, 2**33])
    found = crop_flip(images, rows, samples, 8, seed, epoch)
    pairs = zip(rows.tolist(), samples.tolist(), strict=True)
    expected = torch.stack(
        [drawn_views.crop_flip(images[r], 8, seed, epoch, s) for r, s in pairs]
    )
    assert found.dtype == torch.uint8
    assert torch.equal(found, expected)
    assert torch.equal(
        train_view(images, rows, samples, SPEC, seed, epoch), normalise(expected, SPEC)
    )


@pytest.mark.parametrize("flips", [True, False])
@pytest.mark.parametrize(("seed", "epoch"), KEYS[:2])
def test_resized_crops(flips, seed, epoch):
    spec = InputSpec(1, 7, 11, (0.5,), (0.5,), "resized-crop-flip" if flips else "resized-crop")
    images = pixels(8, 1)
    samples = torch.arange(20, 28)
    found = resized_crop(images, samples, spec, seed, epoch)
    for image, sample, view in zip(
        normalise(images, spec), samples.tolist(), found, strict=True
    ):
        expected = drawn_views.resized_crop(image, 7, seed, epoch, sample, flips=flips)
        torch.testing.assert_close(view.double(), expected, rtol=0, atol=2e-5)
    rows = torch.arange(8)
    assert torch.equal(train_view(images, rows, samples, spec, seed, epoch), found)


@pytest.mark.parametrize(("seed", "epoch"), KEYS[:2])
@pytest.mark.parametrize("side", [14, 16])
def test_shifts_and_turns(side, seed, epoch):
    spec = InputSpec(1, 14, 14, (0.5,), (0.5,), "shift-turn")
    images = pixels(8, 1, side)
    samples = torch.arange(20, 28)
    found = train_view(images, torch.arange(8), samples, spec, seed, epoch)
    low = (side - 14) // 2
    for image, sample, view in zip(images, samples.tolist(), found, strict=True):
        moved = drawn_views.shift_turn(image, 14, seed, epoch, sample)[
            ..., low : low + 14, low : low + 14
        ]
        torch.testing.assert_close(view.double(), moved / 127.5 - 1, rtol=0, atol=2e-5)


def test_boxes_hold_60_to_100_percent():
    for sample in range(300):
        left, top, width, height = drawn_views.box(0, 0, sample)
        assert 0.55 <= width * height <= 1  # a side that would leave the picture is cut
        assert 0 <= left <= 1 - width + 1e-12
        assert 0 <= top <= 1 - height + 1e-12


@pytest.mark.parametrize(
    "augment", ["crop-flip", "resized-crop-flip", "resized-crop", "shift-turn", "none"]
)
def test_a_view_does_not_depend_on_its_batch(augment):
    spec = InputSpec(3, 8, 11, SPEC.mean, SPEC.std, augment)
    images = pixels(10)
    rows = torch.arange(10)
    samples = torch.arange(10) + 1000
    whole = train_view(images, rows, samples, spec, 5, 3)
    order = torch.randperm(10)
    assert torch.equal(
        train_view(images, rows[order], samples[order], spec, 5, 3), whole[order]
    )
    for i in range(10):
        alone = train_view(
            images[i : i + 1], torch.zeros(1, dtype=torch.long), samples[i : i + 1], spec, 5, 3
        )
        assert torch.equal(alone[0], whole[i])
    if augment != "none":
        assert not torch.equal(train_view(images, rows, samples, spec, 5, 4), whole)
        assert not torch.equal(train_view(images, rows, samples, spec, 6, 3), whole)
        assert not torch.equal(train_view(images, rows, samples + 1, spec, 5, 3), whole)


def test_draws_are_uniform_and_unrelated():
    """20,000 draws: the mean within 5 standard errors, chi-square of 33 crop places within 5 of its mean."""
    samples = torch.arange(20_000)
    streams = [keyed_uniform(0, 0, samples, stream) for stream in range(3)] + [
        keyed_uniform(0, 1, samples, 0)
    ]
    streams.append(keyed_uniform(1, 0, samples, 0))
    table = torch.stack(streams).double()
    assert (table.mean(dim=1) - 0.5).abs().max() < 5 * (1 / 12 / 20_000) ** 0.5
    off = torch.corrcoef(table) - torch.eye(len(table), dtype=torch.float64)
    assert off.abs().max() < 5 / 20_000**0.5
    places = torch.bincount(keyed_integers(0, 0, samples, 0) % 33, minlength=33).double()
    chi_square = ((places - 20_000 / 33) ** 2 / (20_000 / 33)).sum()
    assert abs(chi_square - 32) < 5 * (2 * 32) ** 0.5
    flips = (keyed_integers(0, 0, samples, 2) % 2).double().mean()
    assert abs(flips - 0.5) < 5 * 0.5 / 20_000**0.5


@pytest.mark.parametrize(("side", "low"), [(8, 0), (9, 0), (11, 1), (12, 2)])
def test_test_view_is_the_centre(side, low):
    images = pixels(2, 3, side)
    view = test_view(images, SPEC)
    assert view.shape == (2, 3, 8, 8)
    for c in range(3):
        expected = (
            images[:, c, low : low + 8, low : low + 8].double() / 255 - SPEC.mean[c]
        ) / SPEC.std[c]
        torch.testing.assert_close(view[:, c].double(), expected, rtol=0, atol=1e-5)
