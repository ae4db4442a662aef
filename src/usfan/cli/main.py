"""The command line. Parsing imports nothing heavy; a command imports what it needs when it runs.

A command is a function (`commands`), and its arguments are those of the function (`flags`); argparse reads them
(`parse`). A YAML file given with --config holds the same names; flags override it (`settings`).
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
from usfan.cli.commands import COMMANDS
from usfan.cli.ending import exit_code, keep_standard_handles, plain_warnings, stoppable
from usfan.cli.flags import describe
from usfan.cli.parse import build_parser, overview, parse
from usfan.cli.settings import call, how_to_continue, read_settings
from usfan.errors import ConfigError, naming_flags


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help"):
        print(overview(map(describe, COMMANDS.values())))
        return 0
    if words[0] == "--version":
        print(f"usfan {__version__}")
        return 0
    name = words[0]
    program = f"usfan {name}" if name in COMMANDS else "usfan"
    settings: dict[str, Any] | None = None
    keep_standard_handles()
    plain_warnings()
    try:
        if name not in COMMANDS:
            raise unknown_command(name)
        if {"-h", "--help"} & set(words):
            print(build_parser(describe(COMMANDS[name])).format_help(), flush=True)
            return 0
        with naming_flags(), stoppable(), quiet_threads():
            settings = parse_settings(name, words[1:])
            with budget(settings.pop("budget", 1.0)):
                code = call(describe(COMMANDS[name]), settings)
            sys.stdout.flush()
            return code
    except (Exception, KeyboardInterrupt) as error:
        advice = "" if settings is None else how_to_continue(name, settings)
        fault = exit_code(program, error, advice)
        if fault is None:
            raise
        return fault


def parse_settings(name: str, words: Sequence[str]) -> dict[str, Any]:
    """The settings of a command."""
    command = describe(COMMANDS[name])
    return read_settings(command, parse(command, words))


def unknown_command(name: str) -> ConfigError:
    near = difflib.get_close_matches(name, COMMANDS, n=1)
    hint = f"did you mean {near[0]}?" if near else f"the commands are {', '.join(COMMANDS)}"
    kind = "option" if name.startswith("-") else "command"
    return ConfigError(f"unknown {kind} {ascii(name)[:80]}: {hint} (see usfan --help)")


@contextlib.contextmanager
def quiet_threads() -> Iterator[None]:
    """The thread that writes curves raises its error in the main thread too: it is reported there, once."""
    before = threading.excepthook

    def hook(error: threading.ExceptHookArgs) -> None:
        if not issubclass(error.exc_type, OSError):
            before(error)

    threading.excepthook = hook
    try:
        yield
    finally:
        threading.excepthook = before


if __name__ == "__main__":
    sys.exit(main())
