"""Decode images in other processes while this one loads the network."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

from usfan.data.sources import ImageData
from usfan.data.store import Store
from usfan.data.views import InputSpec
from usfan.engine.passes import engine_store
from usfan.engine.runtime import Runtime
from usfan.progress import bar


class _Stopped(Exception):
    """No one waits for the images any more."""


@contextlib.contextmanager
def decoding(
    data: ImageData, spec: InputSpec, runtime: Runtime
) -> Iterator[Callable[[], Store]]:
    """Starts to decode; the yielded function waits for the store. Leaving before that stops the decoding."""
    stop = threading.Event()
    with bar("decoding", len(data)) as display, ThreadPoolExecutor(1) as thread:

        def progress(count: int) -> None:
            if stop.is_set():
                raise _Stopped
            display.advance(count)

        coming = thread.submit(engine_store, data, spec, runtime, progress)
        try:
            yield coming.result
        finally:
            stop.set()
