"""Errors that a user can fix, how they name settings, and how they quote a stranger's text.

The command line prints a `UsfanError` as one line and exits with 2; any other exception is a fault.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

LONGEST = 2_000
"""Characters of a message."""


class UsfanError(ValueError):
    """The caller gave something wrong. The message says what, and what to do."""


class DataError(UsfanError):
    """A data set cannot be used as it is."""


class ConfigError(UsfanError):
    """A setting, or a combination of settings, is not allowed."""


class ArtifactError(UsfanError):
    """A model folder is damaged or invalid. The message names the file and the field."""


_FLAGS: ContextVar[bool] = ContextVar("flags", default=False)
FLAG_NAMES = {"run": "out"}
"""Settings that have another name on the command line than in Python."""
PYTHON_FORMS = {
    "workers": 'runtime={{"workers": {}}}',
    "budget": "with usfan.budget.budget({})",
    "module": "load(folder, module=…)",
}
"""Settings that are no arguments in Python, and what to write there."""


@contextlib.contextmanager
def naming_flags() -> Iterator[None]:
    """Inside, messages name settings as flags: the user is on the command line."""
    token = _FLAGS.set(True)
    try:
        yield
    finally:
        _FLAGS.reset(token)


def option(name: str, value: object = None) -> str:
    """A setting as the user writes it here: witness="none" in Python, --witness none on the command line."""
    if _FLAGS.get():
        flag = f"--{FLAG_NAMES.get(name, name).replace('_', '-')}"
        if value is None or value is True:
            return flag
        return f"{flag} {'off' if value is False else value}"
    text = f'"{value}"' if isinstance(value, str) else str(value)
    form = PYTHON_FORMS.get(name, f"{name}={{}}")
    return form.format("" if value is None else text)


def printable(text: object, most: int = LONGEST) -> str:
    """Text as a terminal, a log or a table may hold it: one line, no character that a terminal acts on, cut at `most`.

    Bytes of a file name that are not UTF-8 (surrogates, in Python) become \\xNN.
    """
    cut = str(text)[: most + 1]
    if not cut.isprintable():
        cut = "".join(c if c.isprintable() else _escaped(c) for c in cut)
    return cut if len(cut) <= most else cut[: most - 1] + "…"


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or its type if it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


OUT_OF_MEMORY = (
    "not enough memory",
    "out of memory",
    "can't allocate memory",
    "cannot allocate memory",
    "bad_alloc",
    "failed to map segment",
    "can't start new thread",
    "resource temporarily unavailable",
)
"""Messages of torch, its library loader and threads."""


def out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out."""
    message = str(error).lower()
    return isinstance(error, MemoryError) or any(words in message for words in OUT_OF_MEMORY)


def _escaped(character: str) -> str:
    code = ord(character)
    if 0xDC80 <= code <= 0xDCFF:
        return f"\\x{code - 0xDC00:02x}"
    return ascii(character)[1:-1]
