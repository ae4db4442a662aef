"""The Hugging Face Hub, asked only if it can be reached: without a network its client keeps trying for a minute."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Iterator
from urllib.parse import urlsplit

PATIENCE = 5.0
"""Seconds to wait for the Hub's first answer."""
PROXIES = ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")


def reachable() -> bool:
    """Whether the Hub answers. Behind a proxy that cannot be asked: it counts as reachable."""
    from huggingface_hub import constants

    if any(os.environ.get(name) for name in PROXIES):
        return True
    place = urlsplit(constants.ENDPOINT)
    port = place.port or (80 if place.scheme == "http" else 443)
    return answers(place.hostname or "", port)


def answers(host: str, port: int) -> bool:
    """Whether something takes connections at an address that the user named."""
    try:
        socket.create_connection((host, port), timeout=PATIENCE).close()
    except OSError:
        return False
    return True


@contextlib.contextmanager
def hub_or_cache() -> Iterator[bool]:
    """Inside, the Hub's client asks the Hub if it can be reached (yields True), else only its own cache."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE or reachable():
        yield not constants.HF_HUB_OFFLINE
        return
    with cache_only():
        yield False


_lock = threading.Lock()
_inside = [0, False]
"""How many blocks of `cache_only` are open, in all threads, and the client's own setting before the first."""


@contextlib.contextmanager
def cache_only() -> Iterator[None]:
    """Inside, the Hub's client reads its cache on this machine and sends no request."""
    from huggingface_hub import constants

    with _lock:
        if _inside[0] == 0:
            _inside[1] = constants.HF_HUB_OFFLINE
            constants.HF_HUB_OFFLINE = True
        _inside[0] += 1
    try:
        yield
    finally:
        with _lock:
            _inside[0] -= 1
            if _inside[0] == 0:
                constants.HF_HUB_OFFLINE = bool(_inside[1])
