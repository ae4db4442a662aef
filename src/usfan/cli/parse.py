"""From words to settings, with cyclopts, which only this module uses."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal

import cyclopts
from cyclopts import App, CycloptsError, Parameter

from usfan.cli.flags import COMMANDS, Command, Flag
from usfan.config import convert
from usfan.errors import ConfigError

STDIN = "\0-"
"""Stands for -, which cyclopts takes for an option."""
SEVERAL = inspect.Parameter.VAR_POSITIONAL


def parse(name: str, words: Sequence[str]) -> dict[str, Any]:
    """What was given to a command. ConfigError for what it does not take."""
    command = COMMANDS[name][1]()
    app = build_app({name: command})
    words = [STDIN if word == "-" else word for word in words]
    try:
        _, bound, _ = app.parse_args([name, *words], exit_on_error=False, print_error=False, verbose=False)
    except CycloptsError as error:
        raise ConfigError(told(error, command)) from None
    return {name: restored(value) for name, value in bound.arguments.items()}


def restored(value: Any) -> Any:
    return ["-" if one == STDIN else one for one in value] if isinstance(value, (list, tuple)) else value


def told(error: CycloptsError, command: Command) -> str:
    """One line. A field that is not a flag of this command is shown with --set."""
    if isinstance(error.__cause__, ConfigError):
        return str(error.__cause__)
    if isinstance(error, cyclopts.UnknownOptionError) and "set" in command.flags:
        name = (error.token.keyword or error.token.value).partition("=")[0].lstrip("-").replace("-", "_")
        if name in command.names() or is_method_setting(name):
            return f"--{name.replace('_', '-')} has no flag: give it as --set {name}=VALUE"
    if isinstance(error, cyclopts.UnusedCliTokensError):
        return f"unexpected argument: {ascii((error.unused_tokens or [''])[0])[:80]}"
    text = str(error).rstrip(".")
    return text[:1].lower() + text[1:500]


def is_method_setting(name: str) -> bool:
    from usfan.adaptation.methods import METHODS

    return any(name in method.settings() for method in METHODS.values())


def build_app(commands: dict[str, Command]) -> App:
    app = App(name="usfan", help_flags="--help", version_flags=[], help_format="plaintext")
    for name, command in commands.items():
        app.command(function_of(name, command), name=name, help=COMMANDS[name][0])
    return app


def function_of(name: str, command: Command) -> Callable[..., None]:
    """A function with the command's arguments, for cyclopts to read; it is never called."""

    def function(*_: Any, **__: Any) -> None:
        raise AssertionError

    parameters = [place(flag) for flag in command.places]
    if SEVERAL in {p.kind for p in parameters[:-1]}:  # SOURCE … DATA: all in one, the last is taken off later
        parameters = parameters[:1]
    parameters += [keyword(flag) for flag in command.flags.values()]
    function.__name__ = name
    function.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return function


def place(flag: Flag) -> inspect.Parameter:
    """A positional argument. None is required here: a config file, or the run to continue, may hold it."""
    kind: Any = Literal[flag.choices] if flag.choices else str
    options = Parameter(help=flag.about)
    if flag.several:
        return inspect.Parameter(flag.name, SEVERAL, annotation=Annotated[kind, options])
    only = inspect.Parameter.POSITIONAL_ONLY
    return inspect.Parameter(flag.name, only, default=None, annotation=Annotated[kind | None, options])


def keyword(flag: Flag) -> inspect.Parameter:
    """A flag. Its value is read by `convert`, as in a config file and in Python."""
    options: dict[str, Any] = {"help": flag.about, "negative": "", "allow_repeating": True}
    kind: Any = bool
    if not flag.switch:
        kind = Literal[flag.allowed] if flag.allowed else str
        one = Flag(flag.name, "", flag.type.removeprefix("list[").removesuffix("]"))

        def read(_: Any, tokens: Any) -> Any:
            values = [convert(one, token.value) for token in tokens]
            return values if flag.several else values[0]

        options["converter"] = read
    if flag.several:
        kind, options["consume_multiple"] = list[kind], True
    annotation = Annotated[kind | None, Parameter(**options)]
    return inspect.Parameter(flag.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def completion_script(shell: str) -> str:
    """Completes commands, flags and values of few choices."""
    app = build_app({name: make() for name, (_, make) in COMMANDS.items()})
    return app.generate_completion(shell=shell)  # type: ignore[arg-type]
