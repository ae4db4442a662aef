"""Figures: what they draw, that they leave matplotlib as it was, and the numbers beside them."""

from __future__ import annotations

import math
import re
from pathlib import Path

import matplotlib
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from report_runs import write_adapt_run

from usfan import figures
from usfan.report.formatting import number, seconds
from usfan.report.inline_svg import THEME, inline_svg, report_style
from usfan.report.page import write_report


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_adapt_run(tmp_path_factory.mktemp("runs") / "run", N=120, open_set=True)


def test_figures_leave_matplotlib_as_it_was(run: Path, tmp_path: Path) -> None:
    with matplotlib.rc_context({"font.size": 17.5, "axes.grid": True, "svg.hashsalt": "mine"}):
        before = dict(matplotlib.rcParams)
        write_report([run], tmp_path / "page.html")
        figures.entropy_densities(run).savefig(tmp_path / "entropy.png")
        assert dict(matplotlib.rcParams) == before
    from matplotlib import pyplot

    assert pyplot.get_fignums() == []


@pytest.mark.parametrize("when", ["before", "after"])
def test_the_densities_of_all_groups_hold_all_images(run: Path, when: str) -> None:
    (axes,) = figures.entropy_densities(run, when=[when]).axes
    assert [text.get_text() for text in axes.get_legend().texts] == [
        "correct",
        "incorrect",
        "unknown class",
    ]
    areas = {"-": 0.0, "--": 0.0}
    for patch in axes.patches:
        heights, edges, _ = patch.get_data()
        if not patch.get_fill():
            areas[patch.get_linestyle()] += float((heights * np.diff(edges)).sum())
    assert areas == pytest.approx({"-": 1, "--": 1})  # of the posterior, of the point estimate


@pytest.mark.parametrize(("most", "points"), [(5000, 120), (50, 50)])
def test_every_image_is_a_point_of_both_maps(run: Path, most: int, points: int) -> None:
    for axes in figures.feature_map(run, most=most).axes:
        assert sum(len(line.get_xdata()) for line in axes.lines) == points


def test_one_panel_before_one_after(run: Path) -> None:
    for draw in (figures.reliability, figures.entropy_densities, figures.feature_map):
        assert [axes.get_title() for axes in draw(run).axes] == [
            "before adaptation",
            "after adaptation",
        ]
        assert len(draw(run, when=["after"]).axes) == 1


def test_svg_is_small_follows_the_theme_and_shares_no_id(run: Path) -> None:
    with report_style():
        texts = [
            inline_svg(figures.entropy_densities(run, when=["after"]), id, 'A "label" & <more>')
            for id in ("one", "one", "two")
        ]
    assert texts[0] == texts[1]
    ids = [set(re.findall(r' id="([^"]*)"', text)) for text in texts]
    assert ids[0]
    assert not ids[0] & ids[2]
    colours = set(re.findall(r"#[0-9a-f]{6}\b", texts[0]))
    assert not colours & set(THEME)
    assert "var(--k0)" in texts[0]
    assert "http" not in texts[0]
    assert "<style" not in texts[0]
    assert 'aria-label="A &#34;label&#34; &amp; &lt;more&gt;"' in texts[0]
    assert len(texts[0]) < 30_000


@settings(max_examples=20, deadline=None)
@given(
    st.lists(
        st.floats(width=64) | st.sampled_from([math.nan, math.inf, 1e308, -1e308]), max_size=20
    )
)
def test_any_values_make_a_drawing(values: list[float]) -> None:
    points = np.array([*enumerate(values)], dtype=float).reshape(-1, 2)
    with report_style():
        svg = inline_svg(figures.curve(points, 1), "id", "label")
    assert not re.search(r"\b(nan|inf)\b", svg.lower())


def test_a_line_breaks_at_a_value_that_is_not_finite() -> None:
    (axes,) = figures.curve(np.array([[0, 1.0], [1, math.inf], [2, 3.0]])).axes
    assert np.isnan(axes.lines[0].get_ydata()).tolist() == [False, True, False]


@pytest.mark.parametrize(
    ("value", "text"),
    [(31.24, "31.2"), (0.01234, "0.0123"), (1.2e-5, "1.2e-05"), (12345.6, "12,346"), (12345, "12,345"), (-0.5, "−0.5"),
     (100.0, "100.0"), (5.0, "5"), (None, "–"), (math.nan, "nan"), ("words", "words")],
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
