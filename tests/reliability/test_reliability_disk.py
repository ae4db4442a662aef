"""A short form of `disk.py`: a quota, a folder without rights, a clock that jumps, files that go."""

import os
import subprocess

import pytest
from disk import (
    Bench,
    file_size_limit,
    full_disk,
    jumping_clocks,
    read_only,
    summary,
    vanishing_images,
)
from faults import attempt, small_disk


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    return Bench(tmp_path_factory.mktemp("bench"))


def check(rows):
    figures = summary(rows)
    assert 0 < figures["failed"] == figures["clear_line_and_exit_1"] == figures["cases"], rows
    assert (
        figures["earlier_results_intact"]
        == figures["resumed"]
        == figures["same_bits"]
        == figures["cases"]
    ), rows


@pytest.mark.parametrize("name", ["train", "suite"])
def test_a_quota_on_file_sizes(bench, name):
    check(file_size_limit(bench, name, (0.5,)))


def test_a_folder_without_rights(bench):
    check(read_only(bench, "posterior"))


def test_a_full_disk(bench, tmp_path):
    try:
        with small_disk(tmp_path / "try", 1 << 20):
            pass
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("a small disk can be mounted by root only")
    check(full_disk(bench, "adapt", (0.5,)))


def test_a_clock_that_jumps(bench):
    (row,) = jumping_clocks(bench, "adapt", (1,))
    assert row == {"command": "adapt", "exit": 0, "again": 0, "same": True}


def test_images_that_vanish_are_skipped_by_name(bench):
    assert vanishing_images(bench) == {
        "vanished": 3,
        "exit": 0,
        "images": 57,
        "named": True,
        "of": 60,
    }


def test_a_source_model_that_vanishes(bench, tmp_path):
    done = attempt(
        "adapt", tmp_path / "gone", bench.target, "--out", tmp_path / "run", "--device", "cpu"
    )
    assert done.code == 2
    assert done.text.strip() == f"usfan adapt: {tmp_path / 'gone'}: no such model folder"
    assert os.listdir(tmp_path) == []
