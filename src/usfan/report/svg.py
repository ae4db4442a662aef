"""A small drawing board: axes in SVG. Colours are CSS classes, so that a figure follows the page's light or dark theme.

All text goes through `Markup.format`, which escapes it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
from markupsafe import Markup
from matplotlib.ticker import MaxNLocator

from usfan.report.blocks import number

LEFT, RIGHT, TOP, BOTTOM = 46, 12, 10, 38
"""Margins around the plotting area, for tick labels and axis names."""


class Axes:
    """A plotting area with linear axes; `x` and `y` are the ranges shown."""

    def __init__(
        self, x: tuple[float, float], y: tuple[float, float], size: tuple[int, int] = (360, 230), left: int = LEFT
    ) -> None:
        self.x, self.y, self.size, self.left = widened(x), widened(y), size, left
        self.parts: list[Markup] = []

    @property
    def width(self) -> float:
        return self.size[0] - self.left - RIGHT

    @property
    def height(self) -> float:
        return self.size[1] - TOP - BOTTOM

    def across(self, values: float | np.ndarray) -> np.ndarray:
        return self.left + (np.asarray(values, float) - self.x[0]) / (self.x[1] - self.x[0]) * self.width

    def down(self, values: float | np.ndarray) -> np.ndarray:
        return TOP + (self.y[1] - np.asarray(values, float)) / (self.y[1] - self.y[0]) * self.height

    def add(self, text: str, *values: object) -> None:
        self.parts.append(Markup(text).format(*values))

    def body(self) -> Markup:
        return Markup("").join(self.parts)

    def frame(
        self,
        x_name: str,
        y_name: str,
        *,
        x_ticks: Sequence[float] | None = None,
        y_ticks: Sequence[float] | None = None,
    ) -> None:
        """Grid lines, ticks and axis names."""
        across = ticks(*self.x) if x_ticks is None else x_ticks
        down = ticks(*self.y, 4) if y_ticks is None else y_ticks
        labels_across, labels_down = tick_labels(across), tick_labels(down)
        bottom, right = TOP + self.height, self.left + self.width
        for i, tick in enumerate(down):
            at = f1(self.down(tick))
            self.add('<path class="grid" d="M{} {}H{}"/>', self.left, at, f1(right))
            label = labels_down[i]
            self.add('<text class="tick" x="{}" y="{}" text-anchor="end" dy="3.5">{}</text>', self.left - 6, at, label)
        for i, tick in enumerate(across):
            at = f1(self.across(tick))
            label = labels_across[i]
            self.add('<text class="tick" x="{}" y="{}" text-anchor="middle">{}</text>', at, f1(bottom + 14), label)
        self.add('<path class="axis" d="M{} {}H{}"/>', self.left, f1(bottom), f1(right))
        middle = self.left + self.width / 2
        self.add(
            '<text class="axis-name" x="{}" y="{}" text-anchor="middle">{}</text>', f1(middle), self.size[1] - 4, x_name
        )
        self.add(
            '<text class="axis-name" transform="translate(11 {}) rotate(-90)" text-anchor="middle">{}</text>',
            f1(TOP + self.height / 2),
            y_name,
        )

    def line(self, x: np.ndarray, y: np.ndarray, css: str) -> None:
        """A polyline that breaks where a value is not finite."""
        self.add('<path class="line {}" d="{}"/>', css, path_of(self.across(x), self.down(y)))

    def area(self, x: np.ndarray, y: np.ndarray, css: str) -> None:
        """The area between a curve and the bottom."""
        floor = f1(TOP + self.height)
        top = path_of(self.across(x), self.down(y))
        self.add('<path class="area {}" d="{}L{} {}L{} {}Z"/>', css, top, f1(self.across(x[-1])), floor,
                 f1(self.across(x[0])), floor)  # fmt: skip

    def bar(self, low: float, high: float, bottom: float, top: float, css: str, title: str) -> None:
        left, right = float(self.across(low)), float(self.across(high))
        upper, lower = float(self.down(top)), float(self.down(bottom))
        self.add(
            '<rect class="bar {}" x="{}" y="{}" width="{}" height="{}"><title>{}</title></rect>',
            css, f1(left + 0.5), f1(upper), f1(max(right - left - 1, 0.5)), f1(max(lower - upper, 0)), title,
        )  # fmt: skip

    def dot(self, x: float, y: float, css: str, title: str, radius: float = 3) -> None:
        self.add(
            '<circle class="dot {}" cx="{}" cy="{}" r="{}"><title>{}</title></circle>',
            css, f1(self.across(x)), f1(self.down(y)), number(radius), title,
        )  # fmt: skip

    def upright(self, x: float, label: str) -> None:
        """A dashed vertical line with a label at its top."""
        at = float(self.across(x))
        self.add('<path class="mark" d="M{} {}V{}"/>', f1(at), TOP, f1(TOP + self.height))
        before = at > self.left + self.width / 2
        self.add(
            '<text class="tick" x="{}" y="{}" text-anchor="{}">{}</text>',
            f1(at - 4 if before else at + 4), TOP + 8, "end" if before else "start", label,
        )  # fmt: skip


def f1(value: float | np.ndarray) -> str:
    """One decimal, none when it is zero: short, and finer than a pixel."""
    return f"{float(value):.1f}".removesuffix(".0")


def path_of(x: np.ndarray, y: np.ndarray) -> str:
    pieces, pen = [], "M"
    for a, b in zip(x.tolist(), y.tolist(), strict=True):
        if math.isfinite(a) and math.isfinite(b):
            pieces.append(f"{pen}{f1(a)} {f1(b)}")
            pen = "L"
        else:
            pen = "M"
    return "".join(pieces)


def widened(limits: tuple[float, float]) -> tuple[float, float]:
    """The range, or one around it if it has no width."""
    low, high = limits
    if not (math.isfinite(low) and math.isfinite(high)):
        return 0.0, 1.0
    room = max(abs(low), abs(high)) * 1e-3
    if high - low > 1e-9 * max(abs(low), abs(high), 1e-9):
        return low, high
    return low - (room or 0.5), high + (room or 0.5)


def padded(values: np.ndarray, share: float = 0.06) -> tuple[float, float]:
    """A range with a little room around all finite values; a tenth around what differs by rounding only."""
    finite = values[np.isfinite(values)]
    if len(finite) == 0:
        return 0.0, 1.0
    low, high = float(finite.min()), float(finite.max())
    spread = high - low if high - low > 1e-4 * max(abs(low), abs(high)) else 0.0
    room = spread * share or abs(high) * 0.1 or 0.5
    return low - room, high + room


def ticks(low: float, high: float, about: int = 5, *, whole: bool = False) -> list[float]:
    """Round numbers from low to high; whole ones for epochs."""
    if not 0 < high - low < 1e300:
        return [low]
    steps = [1, 2, 5, 10] if whole else [1, 2, 2.5, 5, 10]
    found = MaxNLocator(about, integer=whole, steps=steps).tick_values(low, high)
    slack = 1e-9 * (high - low)
    return [round(float(value), 12) for value in found if low - slack <= value <= high + slack] or [low]


def tick_labels(values: Sequence[float]) -> list[str]:
    """The number of decimals that tells neighbours apart."""
    if len(values) < 2:
        return [number(v) for v in values]
    step = min(abs(b - a) for a, b in itertools.pairwise(values))
    if step < 1e-4 and max(map(abs, values)) < 1e-2:
        return [f"{v:.2g}".replace("-", "−") if v else "0" for v in values]
    decimals = max(0, math.ceil(-math.log10(step) - 1e-9))
    if round(step, decimals) != round(step, 6):
        decimals += 1  # a step of 2.5 × 10ⁿ
    return [f"{v:,.{decimals}f}".replace("-", "−") for v in values]
