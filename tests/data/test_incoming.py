"""Lines of standard input as they come."""

from __future__ import annotations

import io
import os

import pytest

from usfan.data import incoming as module
from usfan.data.incoming import BATCH, incoming


def test_a_partial_batch_comes_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PATIENCE", 0.05)
    reader, writer = os.pipe()
    with open(reader, encoding="utf-8") as file:
        batches = incoming(file)
        os.write(writer, b"a.jpg\r\n\n b.jpg\nc.j")
        assert next(batches) == ["a.jpg", " b.jpg"]
        os.write(writer, b"pg\n" + b"d.jpg\n" * BATCH)
        assert next(batches) == ["c.jpg", *["d.jpg"] * BATCH]
        os.write(writer, b"last.jpg")
        os.close(writer)
        assert list(batches) == [["last.jpg"]]


def test_text_that_stands_in_for_standard_input() -> None:
    assert list(incoming(io.StringIO("a\n\nb\n"))) == [["a", "b"]]
