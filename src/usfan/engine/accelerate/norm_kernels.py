"""The kernels of `fused_norm`, and what launches them.

x, y and their gradients are M×C in rows (channels last); mean, variance, weight and bias are C in float32. `partial` is
2×S×C, two sums over each of S shares of the rows.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = {"ROWS": 64, "COLUMNS": 32}
"""Size of the tile that a program holds. One size for every layer: each would be compiled apart."""
PROGRAMS = 528
"""Programs that a sum is shared among: four for each processor of a large GPU."""
UNCHANGING = ("count", "eighths", "share", "shares", "low", "high", "eps", "momentum")
"""Numbers for which no kernel is compiled again."""


@triton.jit
def _tile(eighths, COLUMNS: tl.constexpr):
    """Columns of this program, a mask of those that exist, and the number of channels, a multiple of eight."""
    channels = eighths * 8
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    return columns, columns < channels, channels


@triton.jit
def _places(start, count, columns, there, channels, ROWS: tl.constexpr):
    """The positions of the elements of the tile from row `start`, and a mask of those that exist."""
    rows = start + tl.arange(0, ROWS)
    return rows.to(tl.int64)[:, None] * channels + columns[None, :], (rows < count)[
        :, None
    ] & there[None, :]


@triton.jit(do_not_specialize=UNCHANGING)
def _sums(x, partial, count, eighths, share, shares, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Σ (x − x₀) and Σ (x − x₀)² over this program's share of the rows."""
    columns, there, channels = _tile(eighths, COLUMNS)
    first = tl.load(x + columns, mask=there, other=0.0).to(tl.float32)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    square = tl.zeros([ROWS, COLUMNS], tl.float32)
    begin = tl.program_id(0) * share
    for start in range(begin, tl.minimum(begin + share, count), ROWS):
        places, inside = _places(start, count, columns, there, channels, ROWS)
        values = tl.load(x + places, mask=inside, other=0.0)
        centred = tl.where(inside, values.to(tl.float32) - first[None, :], 0.0)
        total += centred
        square += centred * centred
    place = partial + tl.program_id(0) * channels + columns
    tl.store(place, tl.sum(total, axis=0), mask=there)
    tl.store(place + shares * channels, tl.sum(square, axis=0), mask=there)


@triton.jit
def _both(partial, columns, there, channels, shares, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The two sums over all shares."""
    one = tl.zeros([ROWS, COLUMNS], tl.float32)
    two = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, shares, ROWS):
        places, inside = _places(start, shares, columns, there, channels, ROWS)
        one += tl.load(partial + places, mask=inside, other=0.0)
        two += tl.load(partial + shares * channels + places, mask=inside, other=0.0)
    return tl.sum(one, axis=0), tl.sum(two, axis=0)


@triton.jit(do_not_specialize=UNCHANGING)
def _finish(
    x, partial, mean, variance, mean_kept, variance_kept, batches, count, eighths, shares, momentum,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Statistics of the batch; the running ones move towards them."""
    columns, there, channels = _tile(eighths, COLUMNS)
    total, square = _both(partial, columns, there, channels, shares, ROWS, COLUMNS)
    apart = total / count
    batch_mean = tl.load(x + columns, mask=there, other=0.0).to(tl.float32) + apart
    spread = square / count - apart * apart
    spread = tl.where(spread < 0, 0.0, spread)  # and what is not a number stays so
    tl.store(mean + columns, batch_mean, mask=there)
    tl.store(variance + columns, spread, mask=there)
    unbiased = spread * (count / tl.maximum(count - 1.0, 1.0))
    old = tl.load(mean_kept + columns, mask=there, other=0.0)
    tl.store(mean_kept + columns, old + momentum * (batch_mean - old), mask=there)
    old = tl.load(variance_kept + columns, mask=there, other=0.0)
    tl.store(variance_kept + columns, old + momentum * (unbiased - old), mask=there)
    if tl.program_id(1) == 0:
        tl.store(batches, tl.load(batches) + 1)


@triton.jit
def _numbers(mean, variance, weight, bias, eps, columns, there):
    """Of each column: mean, 1/√(σ² + ε), and the scale and shift that they make with weight and bias."""
    centre = tl.load(mean + columns, mask=there, other=0.0)
    inverse = 1.0 / tl.sqrt(tl.load(variance + columns, mask=there, other=1.0) + eps)
    scale = tl.load(weight + columns, mask=there, other=0.0) * inverse
    return (
        centre,
        inverse,
        scale,
        tl.load(bias + columns, mask=there, other=0.0) - centre * scale,
    )


@triton.jit(do_not_specialize=UNCHANGING)
def _transform(
    x,
    y,
    mean,
    variance,
    weight,
    bias,
    eps,
    count,
    eighths,
    low,
    high,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    columns, there, channels = _tile(eighths, COLUMNS)
    _, _, scale, shift = _numbers(mean, variance, weight, bias, eps, columns, there)
    places, inside = _places(tl.program_id(0) * ROWS, count, columns, there, channels, ROWS)
    value = (
        tl.load(x + places, mask=inside, other=0.0).to(tl.float32) * scale[None, :]
        + shift[None, :]
    )
    value = tl.where(value < low, low, value)  # and what is not a number passes
    value = tl.where(value > high, high, value)
    tl.store(y + places, value.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _passed(x, grad, places, inside, centre, inverse, scale, shift, low, high):
    """The gradient before the clamp, and x̂."""
    values = tl.load(x + places, mask=inside, other=0.0).to(tl.float32)
    gradient = tl.load(grad + places, mask=inside, other=0.0).to(tl.float32)
    before = values * scale[None, :] + shift[None, :]
    passed = tl.where((before <= low) | (before >= high), 0.0, gradient)
    return passed, (values - centre[None, :]) * inverse[None, :]


@triton.jit(do_not_specialize=UNCHANGING)
def _gradient_sums(
    x, grad, mean, variance, weight, bias, eps, partial, count, eighths, share, shares, low, high,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Σ g and Σ g x̂ over this program's share of the rows."""
    columns, there, channels = _tile(eighths, COLUMNS)
    centre, inverse, scale, shift = _numbers(mean, variance, weight, bias, eps, columns, there)
    one = tl.zeros([ROWS, COLUMNS], tl.float32)
    two = tl.zeros([ROWS, COLUMNS], tl.float32)
    begin = tl.program_id(0) * share
    for start in range(begin, tl.minimum(begin + share, count), ROWS):
        places, inside = _places(start, count, columns, there, channels, ROWS)
        passed, unit = _passed(
            x, grad, places, inside, centre, inverse, scale, shift, low, high
        )
        one += passed
        two += passed * unit
    place = partial + tl.program_id(0) * channels + columns
    tl.store(place, tl.sum(one, axis=0), mask=there)
    tl.store(place + shares * channels, tl.sum(two, axis=0), mask=there)


@triton.jit(do_not_specialize=UNCHANGING)
def _gradient_finish(
    partial, d_bias, d_weight, eighths, shares, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    columns, there, channels = _tile(eighths, COLUMNS)
    one, two = _both(partial, columns, there, channels, shares, ROWS, COLUMNS)
    tl.store(d_bias + columns, one, mask=there)
    tl.store(d_weight + columns, two, mask=there)


@triton.jit(do_not_specialize=UNCHANGING)
def _gradient(
    x, grad, mean, variance, weight, bias, eps, d_bias, d_weight, d_x, count, eighths, low, high,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    columns, there, channels = _tile(eighths, COLUMNS)
    centre, inverse, scale, shift = _numbers(mean, variance, weight, bias, eps, columns, there)
    places, inside = _places(tl.program_id(0) * ROWS, count, columns, there, channels, ROWS)
    passed, unit = _passed(x, grad, places, inside, centre, inverse, scale, shift, low, high)
    one = tl.load(d_bias + columns, mask=there, other=0.0) / count
    two = tl.load(d_weight + columns, mask=there, other=0.0) / count
    result = scale[None, :] * (passed - one[None, :] - unit * two[None, :])
    tl.store(d_x + places, result.to(d_x.dtype.element_ty), mask=inside)


def _sizes(inputs: Tensor) -> tuple[int, int, int]:
    """Rows, channels, and blocks of columns."""
    channels = inputs.shape[1]
    return inputs.numel() // channels, channels, triton.cdiv(channels, TILE["COLUMNS"])


def _shares(count: int, blocks: int) -> tuple[int, int]:
    """Rows in a share, whole tiles of them, and the number of shares."""
    tiles = triton.cdiv(count, TILE["ROWS"])
    share = TILE["ROWS"] * triton.cdiv(tiles, max(1, PROGRAMS // blocks))
    return share, triton.cdiv(count, share)


def batch_statistics(inputs: Tensor, layer: Any) -> tuple[Tensor, Tensor]:
    """Mean and variance of the batch; the running ones of the layer, and its count of batches, move."""
    count, channels, blocks = _sizes(inputs)
    share, shares = _shares(count, blocks)
    partial = torch.empty(2, shares, channels, device=inputs.device)
    mean, variance = torch.empty(2, channels, device=inputs.device)
    running = layer.running_mean, layer.running_var, layer.num_batches_tracked
    _sums[shares, blocks](inputs, partial, count, channels // 8, share, shares, **TILE)
    _finish[1, blocks](
        inputs,
        partial,
        mean,
        variance,
        *running,
        count,
        channels // 8,
        shares,
        layer.momentum,
        **TILE,
    )
    return mean, variance


def transformed(inputs: Tensor, numbers: tuple[Any, ...], low: float, high: float) -> Tensor:
    """y. `numbers` are mean, variance, weight, bias and ε."""
    count, channels, blocks = _sizes(inputs)
    result = torch.empty_like(inputs)
    grid = (triton.cdiv(count, TILE["ROWS"]), blocks)
    _transform[grid](inputs, result, *numbers, count, channels // 8, low, high, **TILE)
    return result


def gradients(
    inputs: Tensor, grad: Tensor, numbers: tuple[Any, ...], low: float, high: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of inputs, weight and bias, for mean and variance of the batch itself."""
    count, channels, blocks = _sizes(inputs)
    share, shares = _shares(count, blocks)
    partial = torch.empty(2, shares, channels, device=inputs.device)
    d_bias, d_weight = torch.empty(2, channels, device=inputs.device)
    d_inputs = torch.empty_like(inputs)
    sizes = (count, channels // 8)
    _gradient_sums[shares, blocks](
        inputs, grad, *numbers, partial, *sizes, share, shares, low, high, **TILE
    )
    _gradient_finish[1, blocks](partial, d_bias, d_weight, channels // 8, shares, **TILE)
    grid = (triton.cdiv(count, TILE["ROWS"]), blocks)
    _gradient[grid](
        inputs, grad, *numbers, d_bias, d_weight, d_inputs, *sizes, low, high, **TILE
    )
    return d_inputs, d_weight, d_bias
