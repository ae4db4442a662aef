"""The drawing board: ticks, densities, lines and the numbers in the captions."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from usfan.report.blocks import number, seconds
from usfan.report.curves import course, lines, series
from usfan.report.plots import density
from usfan.report.svg import Axes, padded, path_of, tick_labels, ticks

finite = st.floats(-1e6, 1e6, allow_nan=False)


@given(finite, st.floats(1e-4, 1e6))
def test_ticks_lie_inside_and_can_be_told_apart(low: float, span: float) -> None:
    high = low + span
    values = ticks(low, high)
    slack = 1e-6 * span
    assert 2 <= len(values) <= 8
    assert all(low - slack <= v <= high + slack for v in values)
    if span > 1e-3 * abs(low) + 1e-3:
        assert len(set(tick_labels(values))) == len(values)


@given(st.integers(0, 50), st.integers(0, 3000))
def test_epochs_get_whole_ticks(first: int, count: int) -> None:
    values = ticks(first, first + count, 6, whole=True)
    assert 1 <= len(values) <= 8
    assert all(v == int(v) and first <= v <= first + count for v in values)


def test_what_differs_by_rounding_is_drawn_as_level() -> None:
    labels = tick_labels(ticks(*padded(np.array([0.999991, 1.000012, 1.0])), 4))
    assert labels == ["0.9", "1.0", "1.1"]
    low, high = padded(np.array([1.0, 1.01]))
    assert high - low < 0.02


def test_tick_labels_keep_the_decimals_they_need() -> None:
    assert tick_labels([0.9990, 0.9992, 0.9994]) == ["0.9990", "0.9992", "0.9994"]
    assert tick_labels([0.0, 0.25, 0.5]) == ["0.00", "0.25", "0.50"]
    assert tick_labels([-1.0, 0.0, 1.0]) == ["−1", "0", "1"]
    assert tick_labels([0.0, 2e-6, 4e-6]) == ["0", "2e−06", "4e−06"]


@given(st.lists(finite, min_size=1, max_size=20))
def test_any_values_make_a_finite_drawing(values: list[float]) -> None:
    x = np.arange(len(values), dtype=float)
    axes = Axes((0, len(values) - 1), (min(values), max(values)))
    axes.frame("x", "y")
    axes.line(x, np.array(values), "k0")
    assert "nan" not in axes.body()
    assert "inf" not in axes.body()


@pytest.mark.parametrize("values", [[], [0.0], [0.0, 0.0, 2.3], list(np.random.default_rng(0).uniform(0, 2.3, 500))])
def test_a_density_keeps_its_share_of_the_mass(values: list[float]) -> None:
    grid = np.linspace(0, 2.3, 2001)
    curve = density(np.array(values), grid, 1000)
    assert np.trapezoid(curve, grid) == pytest.approx(len(values) / 1000, rel=2e-3, abs=1e-12)


def test_a_line_breaks_where_a_value_is_missing() -> None:
    assert path_of(np.array([0.0, 1, 2, 3]), np.array([0.0, math.nan, 2, 3])) == "M0 0M2 2L3 3"


def test_the_caption_tells_first_last_and_kept() -> None:
    rows = series([{"epoch": i, "x": v} for i, v in enumerate((0.5, 0.9, 0.7))] + [{"epoch": 3, "x": "text"}], "x")
    assert course(rows, 1) == "0.5 → 0.7, 0.9 at the kept epoch 1"
    assert course(rows, 2) == "0.5 → 0.7"
    figure = lines("id", "Title", "y", {"x": rows}, 1, " Higher is better.")
    assert figure.caption == "0.5 → 0.7, 0.9 at the kept epoch 1. Higher is better."
    assert figure.caption in figure.alt
    assert figure.body.count("<circle") == 3


@pytest.mark.parametrize(
    ("value", "text"),
    [(31.24, "31.2"), (0.01234, "0.0123"), (1.2e-5, "1.2e-05"), (12345.6, "12,346"), (12345, "12,345"), (-0.5, "−0.5"),
     (100.0, "100"), (None, "–"), (math.nan, "nan"), ("words", "words")],
)  # fmt: skip
def test_numbers_are_short(value: object, text: str) -> None:
    assert number(value) == text


def test_seconds_are_words() -> None:
    assert [seconds(s) for s in (4.24, 73.2, 59.7, 7325, None)] == [
        "4.2 s",
        "1 min 13 s",
        "1 min 00 s",
        "2 h 02 min",
        "–",
    ]
