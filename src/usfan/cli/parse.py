"""From words to settings, with cyclopts, which only this module uses."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from cyclopts import (
    App,
    ArgumentCollection,
    CycloptsError,
    Parameter,
    Token,
    UnknownOptionError,
    UnusedCliTokensError,
)

from usfan.cli.flags import Command
from usfan.errors import ConfigError

STDIN = "\0-"
"""Stands for -, which cyclopts takes for an option."""


def parse(command: Command, words: Sequence[str]) -> dict[str, Any]:
    """The values that the words give, as texts. ConfigError for words that the command does not take."""
    app = build_app([command])
    words = [STDIN if word == "-" else word for word in words]
    try:
        _, bound, _ = app.parse_args(
            [command.name, *words], exit_on_error=False, print_error=False, verbose=False
        )
    except CycloptsError as error:
        problem = explain(error, command)
        raise ConfigError(f"{problem} (see usfan {command.name} --help)") from None
    values: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        values |= value if isinstance(value, dict) else {name: value}
    return values


def build_app(commands: Iterable[Command]) -> App:
    flag = Parameter(
        negative="", allow_repeating=True, consume_multiple=True, converter=read_texts
    )
    app = App(
        name="usfan",
        help_flags="--help",
        version_flags=[],
        help_format="plaintext",
        default_parameter=flag,
        config=require_nothing,
    )
    for command in commands:
        for flags in command.groups:
            Parameter(name="*")(flags)
        app.command(command.function)
    return app


def read_texts(kind: Any, tokens: Sequence[Token]) -> Any:
    """Texts as they are: `usfan.config.convert` reads them, as it reads a config file."""
    texts = ["-" if token.value == STDIN else token.value for token in tokens]
    return texts if "list[" in str(kind) else texts[0]


def require_nothing(app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
    """A required argument may also be in the config file, or in the run to continue."""
    for argument in arguments:
        argument.field_info.required = False


def explain(error: CycloptsError, command: Command) -> str:
    """One line. A setting that has no flag in this command is shown with --set."""
    if isinstance(error, UnknownOptionError) and "set" in command.flags:
        option = (error.token.keyword or error.token.value).partition("=")[0]
        name = option.lstrip("-").replace("-", "_")
        if name in command.hidden or is_method_setting(name):
            return f"{option} has no flag: give it as --set {name}=VALUE"
    if isinstance(error, UnusedCliTokensError):
        return f"unexpected argument: {ascii((error.unused_tokens or [''])[0])[:80]}"
    text = str(error).rstrip(".")
    return text[:1].lower() + text[1:500]


def is_method_setting(name: str) -> bool:
    from usfan.adaptation.methods import METHODS

    return any(name in method.settings() for method in METHODS.values())


def completion_script(commands: Iterable[Command], shell: str) -> str:
    """Completes commands, flags and values of few choices."""
    return build_app(commands).generate_completion(shell=shell)  # type: ignore[arg-type]
