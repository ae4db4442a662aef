"""Help pages, drawn from the functions of the commands without the parser: they answer at once."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterable

from usfan.cli.commands import COMMANDS
from usfan.cli.flags import Command, Flag, describe

TEXT_COLUMN = 24
"""Where the texts begin."""
PAGE_WIDTH = 110


def overview() -> str:
    commands = [describe(function) for function in COMMANDS.values()]
    budget = commands[0].flags["budget"]
    return "\n".join(
        [
            "Usage: usfan COMMAND [ARGUMENTS]\n",
            "Adapt a trained image classifier to unlabelled images from a new domain.\n",
            "Commands:",
            *(entry(command.name, command.summary) for command in commands),
            "\nEvery command:",
            entry(spelling(budget), text(budget)),
            "\nusfan COMMAND --help lists the arguments of a command; usfan --version prints the version.",
        ]
    )


def help_page(command: Command) -> str:
    flags = command.flags.values()
    lines = [f"Usage: usfan {command.name} {usage(flags)}", "", command.summary]
    sections: dict[str, list[str]] = {}
    for flag in flags:
        title = "Arguments" if flag.positional else flag.title
        if flag.name != "budget":
            sections.setdefault(title, []).append(entry(spelling(flag), text(flag)))
    for title, entries in sections.items():
        lines += ["", f"{title}:", *entries]
    lines += [
        "",
        "Every command also takes --budget N, which raises limits (see usfan --help).",
    ]
    return "\n".join(lines)


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


def entry(name: str, text: str) -> str:
    width = min(shutil.get_terminal_size().columns, PAGE_WIDTH)
    lines = textwrap.wrap(text, max(width - TEXT_COLUMN, 30), break_on_hyphens=False)
    start = f"  {name}"
    if len(start) + 2 <= TEXT_COLUMN:
        start = start.ljust(TEXT_COLUMN) + lines.pop(0)
    return "\n".join([start, *(" " * TEXT_COLUMN + line for line in lines)])


def spelling(flag: Flag) -> str:
    if flag.positional:
        return flag.metavar
    value = "" if flag.switch else f" {'|'.join(flag.choices) or flag.metavar}"
    return f"{flag.option}{value}{' …' if flag.several else ''}"


def text(flag: Flag) -> str:
    default = "on" if flag.field.default is True else flag.field.default
    if default is None or flag.switch or flag.positional:
        return flag.text
    return f"{flag.text} Default: {default}."
