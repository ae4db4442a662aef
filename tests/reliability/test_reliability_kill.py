"""A short form of `kill_and_resume.py`: the stages that no other test kills, once each."""

import random

import pytest
from kill_and_resume import passed, stages, study


@pytest.fixture(scope="module")
def all_stages(tmp_path_factory):
    return {stage.name: stage for stage in stages(tmp_path_factory.mktemp("stages"))}


@pytest.mark.parametrize("name", ["posterior", "cache build", "suite"])
def test_killed_and_called_again_it_ends_the_same(name, all_stages, tmp_path):
    figures = study(all_stages[name], 1, tmp_path, random.Random(3))
    assert figures["kills"] >= 1
    assert passed(figures), figures
