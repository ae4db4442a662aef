"""The command line. Parsing imports nothing heavy; a command imports what it needs when it runs.

Flags come from the fields of the config dataclasses, their help from the fields' docstrings (`flags`); cyclopts parses
them (`parse`). A YAML file given with --config holds the same names; flags override it (`settings`).
Exit codes: `usfan.cli.ending`.
"""

from __future__ import annotations

import contextlib
import difflib
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from usfan import __version__
from usfan.budget import budget
from usfan.cli.ending import exit_code, keep_standard_handles, plain_warnings, stoppable
from usfan.cli.flags import COMMANDS
from usfan.cli.help import help_page, overview
from usfan.errors import ConfigError, shown


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help"):
        print(overview())
        return 0
    if words[0] == "--version":
        print(f"usfan {__version__}")
        return 0
    name, settings = words[0], {}
    keep_standard_handles()
    plain_warnings()
    try:
        if name not in COMMANDS:
            raise no_command(name)
        if {"-h", "--help"} & set(words):
            print(help_page(name), flush=True)
            return 0
        with stoppable(), quiet_threads():
            found = parse_settings(name, words[1:])
            if found is None:
                return 0
            settings = found
            from usfan.cli import commands

            with budget(settings.pop("budget", 1.0)):
                commands.COMMANDS[name](dict(settings))
            sys.stdout.flush()
    except (Exception, KeyboardInterrupt) as error:
        code = exit_code(program(name), error, lambda: going_on(name, settings))
        if code is None:
            raise
        return code
    return 0


def going_on(name: str, settings: dict[str, Any]) -> str:
    """How to continue an interrupted command, if it had begun."""
    if not settings:
        return ""
    from usfan.cli.settings import to_go_on

    return to_go_on(name, settings)


def parse_settings(name: str, words: Sequence[str]) -> dict[str, Any] | None:
    """The settings of a command; None if the run that they name is finished."""
    from usfan.cli.parse import parse
    from usfan.cli.settings import read_settings

    try:
        given = parse(name, words)
    except ConfigError as error:
        raise ConfigError(f"{error} (see usfan {name} --help)") from None
    settings = read_settings(name, given)
    if settings is None:
        print(shown(f"{given['out']} is finished already"), file=sys.stderr)
    return settings


def program(name: str) -> str:
    return f"usfan {name}" if name in COMMANDS else "usfan"


def no_command(name: str) -> ConfigError:
    near = difflib.get_close_matches(name, COMMANDS, n=1)
    hint = f"did you mean {near[0]}?" if near else f"the commands are {', '.join(COMMANDS)}"
    what = "option" if name.startswith("-") else "command"
    return ConfigError(f"unknown {what} {ascii(name)[:80]}: {hint} (see usfan --help)")


@contextlib.contextmanager
def quiet_threads() -> Iterator[None]:
    """The thread that writes curves raises what went wrong in the main thread too: it is reported there, once."""
    before = threading.excepthook

    def hook(given: threading.ExceptHookArgs) -> None:
        if not issubclass(given.exc_type, OSError):
            before(given)

    threading.excepthook = hook
    try:
        yield
    finally:
        threading.excepthook = before


if __name__ == "__main__":
    sys.exit(main())
