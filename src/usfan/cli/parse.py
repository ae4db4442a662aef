"""From words to settings, and help pages: a parser for each command, made from its flags."""

from __future__ import annotations

import argparse
import difflib
import shutil
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from usfan.cli.flags import Command, Flag
from usfan.errors import ConfigError

TEXT_COLUMN = 24
"""Where the texts of a help page begin."""
PAGE_WIDTH = 110


class Page(argparse.RawDescriptionHelpFormatter):
    """A help page that breaks no word at its hyphen."""

    def __init__(self, prog: str) -> None:
        width = min(shutil.get_terminal_size().columns, PAGE_WIDTH)
        super().__init__(prog, max_help_position=TEXT_COLUMN, width=width)

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(text, width, break_on_hyphens=False)


class Parser(argparse.ArgumentParser):
    """Texts as they are: `usfan.config.convert` reads them, as it reads a config file. What is required may also be in
    the config file, or in the run to continue."""

    def __init__(self, description: str, epilog: str) -> None:
        super().__init__(
            usage=argparse.SUPPRESS,
            description=description,
            epilog=epilog,
            formatter_class=Page,
            add_help=False,
            allow_abbrev=False,
            argument_default=argparse.SUPPRESS,
        )

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def parse(command: Command, words: Sequence[str]) -> dict[str, Any]:
    """The values that the words give, as texts. ConfigError for words that the command does not take."""
    try:
        known, rest = build_parser(command).parse_known_intermixed_args(words)
        if rest:
            raise unknown_word(rest, command)
    except ConfigError as error:
        raise ConfigError(f"{error} (see usfan {command.name} --help)") from None
    values = vars(known)
    if "source" in values:  # of several words the last one is the data
        *values["source"], values["data"] = values["source"]
    return {name: value for name, value in values.items() if value != []}


def build_parser(command: Command) -> Parser:
    flags = command.flags.values()
    parser = Parser(
        f"Usage: usfan {command.name} {usage(flags)}\n\n{command.summary}",
        "Every command also takes --budget N, which raises limits (see usfan --help).",
    )
    groups: dict[str, Any] = {}
    for flag in flags:
        title = "Arguments" if flag.positional else flag.title
        if title not in groups:
            groups[title] = parser.add_argument_group(title)
        groups[title].add_argument(
            flag.name if flag.positional else flag.option, **options(flag)
        )
    return parser


def options(flag: Flag) -> dict[str, Any]:
    """A flag in the words of argparse."""
    result: dict[str, Any] = {"help": help_text(flag)}
    if flag.switch:
        return {**result, "action": "store_true"}
    result["metavar"] = flag.metavar
    if flag.positional:
        result["nargs"] = "*" if flag.several else "?"
        return result
    if flag.choices:
        result["metavar"] = "|".join(flag.choices)
    if flag.several:
        result |= {"action": "extend", "nargs": "+"}
    return result


def help_text(flag: Flag) -> str:
    if flag.name == "budget":
        return argparse.SUPPRESS
    text = flag.text.replace("%", "%%")
    default = "on" if flag.field.default is True else flag.field.default
    if default is None or flag.switch or flag.positional:
        return text
    return f"{text} Default: {default}."


def usage(flags: Iterable[Flag]) -> str:
    """Positional arguments, then what else is required."""
    words = []
    for flag in flags:
        value = f"{{{','.join(flag.choices)}}}" if flag.choices else flag.metavar
        if not flag.positional:
            words += [f"{flag.option} {value}"] if flag.required else []
        elif flag.several:
            words.append(f"{value} [{value} …]")
        else:
            words.append(value if flag.required else f"[{value}]")
    return " ".join([*words, "[OPTIONS]"])


def overview(commands: Iterable[Command]) -> str:
    """The help of the program."""
    page = Parser(
        "Usage: usfan COMMAND [ARGUMENTS]\n\n"
        "Your image classifier meets new images: check it there, adapt it, label a few of them, and decide.",
        "Every command takes --budget N, a factor on the limits of memory and time that a model or a file may use.\n"
        "usfan COMMAND --help lists the arguments of a command; usfan --version prints the version.",
    )
    group = page.add_argument_group("Commands")
    for command in commands:
        group.add_argument(command.name, help=command.summary)
    return page.format_help()


def unknown_word(words: Sequence[str], command: Command) -> ConfigError:
    """One line. A setting that has no flag in this command is shown with --set."""
    unknown = [word for word in words if word.startswith("-")]
    if not unknown:
        return ConfigError(f"unexpected argument: {ascii(words[0])[:80]}")
    option = unknown[0].partition("=")[0]
    name = option.lstrip("-").replace("-", "_")
    if "set" in command.flags and (name in command.hidden or is_method_setting(name)):
        return ConfigError(f"{option} has no flag: give it as --set {name}=VALUE")
    known = [flag.option for flag in command.flags.values() if not flag.positional]
    near = difflib.get_close_matches(option[:80], known, n=1)
    hint = f". Did you mean {near[0]}?" if near else ""
    return ConfigError(f"unknown option: {option[:80]}{hint}")


def is_method_setting(name: str) -> bool:
    from usfan.adaptation.methods import METHODS

    return any(name in method.settings() for method in METHODS.values())
