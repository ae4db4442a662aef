"""Decoding goes on while the network is loaded; what stops the one stops the other."""

import threading
import time

import pytest
import torch

from small_runs import class_folder
from usfan.data import cache
from usfan.data.decoding.decode import UnreadableImage
from usfan.data.sources import ImageData
from usfan.data.views import InputSpec
from usfan.engine.prefetch import decoding
from usfan.engine.runtime import Runtime

SPEC = InputSpec(3, 16, 16)
HERE = Runtime(torch.device("cpu"), workers=0)


@pytest.fixture
def data(tmp_path):
    return ImageData(class_folder(tmp_path / "data", images=30))


def test_the_store_is_the_one_that_is_waited_for(data):
    with decoding(data, SPEC, HERE) as decoded:
        assert torch.equal(decoded().values, cache.open_store(data, size=16).values)
        assert decoded() is decoded()


def test_it_has_begun_before_anyone_waits(data, monkeypatch):
    begun = threading.Event()
    plain = cache.stream
    monkeypatch.setattr(cache, "stream", lambda *a, **k: begun.set() or plain(*a, **k))
    with decoding(data, SPEC, HERE) as decoded:
        assert begun.wait(30)
        assert len(decoded()) == 90


def test_a_network_that_cannot_be_loaded_stops_the_decoding(data, monkeypatch):
    seen = []
    plain = cache.stream

    def slow(*arguments, **options):
        for index, pixels in plain(*arguments, **{**options, "batch_size": 1}):
            seen.append(index)
            time.sleep(0.02)
            yield index, pixels

    monkeypatch.setattr(cache, "stream", slow)
    before = threading.active_count()
    with pytest.raises(ValueError, match="no model"), decoding(data, SPEC, HERE):
        raise ValueError("no model")
    assert len(seen) < 90
    assert threading.active_count() <= before


def test_a_broken_file_under_strict_is_said_by_who_waits(data):
    with open(data.paths[3], "wb"):
        pass
    data.strict = True
    with (
        decoding(data, SPEC, HERE) as decoded,
        pytest.raises(UnreadableImage, match=r"003\.png: empty file"),
    ):
        decoded()
