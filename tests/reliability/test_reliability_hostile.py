"""A short form of `hostile.py`, in this process: the full one has 20,000 cases."""

import random

import pytest
from hostile import KINDS, Place, digest

COUNTS = {
    "models": 25,
    "configs": 10,
    "reports": 4,
    "resumed": 4,
    "images": 1,
    "mixtures": 10,
    "studies": 3,
    "disks": 4,
    "clocks": 2,
    "boards": 4,
    "pages": 12,
    "requests": 16,
    "networks": 12,
    "races": 20,
    "tracked": 3,
}


@pytest.mark.parametrize("what", list(KINDS))
def test_hostile_cases(what, tmp_path):
    place = Place(tmp_path / "work")
    before = digest(place.outside)
    case = KINDS[what](place)
    for number in range(COUNTS.get(what, 40)):
        kind, act = case(random.Random(f"short {what} {number}"), number)
        outcome = act()
        assert not outcome.startswith("BAD"), (number, kind, outcome)
        assert digest(place.outside) == before, (number, kind)


def test_the_watcher_would_notice(tmp_path):
    place = Place(tmp_path / "work")
    before = digest(place.outside)
    (place.outside / "victim").write_text("changed")
    assert digest(place.outside) != before
