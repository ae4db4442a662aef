"""Help pages, drawn from the table of flags without the parser: they answer at once."""

from __future__ import annotations

import shutil
import textwrap

from usfan.cli.flags import BUDGET, COMMANDS, Flag

COLUMN = 24
"""Where the texts begin."""
WIDEST = 110


def overview() -> str:
    rows = [entry(name, summary) for name, (summary, _) in COMMANDS.items()]
    about = "Adapt a trained image classifier to unlabelled images from a new domain."
    more = "usfan COMMAND --help lists the arguments of a command; usfan --version prints the version."
    every = entry(spelled(BUDGET), with_default(BUDGET))
    lines = ["Usage: usfan COMMAND [ARGUMENTS]", "", about, "", "Commands:", *rows, "", "Every command:", every]
    return "\n".join([*lines, "", more])


def help_page(name: str) -> str:
    summary, make = COMMANDS[name]
    command = make()
    lines = [f"Usage: usfan {name} {command.usage}", "", summary]
    if command.places:
        lines += ["", "Arguments:", *(entry(flag.metavar or flag.name.upper(), flag.about) for flag in command.places)]
    for title, flags in command.groups.items():
        lines += ["", f"{title}:", *(entry(spelled(flag), with_default(flag)) for flag in flags if flag != BUDGET)]
    return "\n".join([*lines, "", "Every command also takes --budget N, which raises limits (see usfan --help)."])


def entry(left: str, text: str) -> str:
    width = min(shutil.get_terminal_size().columns, WIDEST)
    wrapped = textwrap.wrap(text, max(width - COLUMN, 30), break_on_hyphens=False)
    start = f"  {left:<{COLUMN - 4}}  "
    if len(start) > COLUMN:
        wrapped = [f"  {left}", *(" " * COLUMN + line for line in wrapped)]
        return "\n".join(wrapped)
    return "\n".join([start + wrapped[0], *(" " * COLUMN + line for line in wrapped[1:])])


def spelled(flag: Flag) -> str:
    value = "" if flag.switch else f" {flag.value}{' …' if flag.several else ''}"
    return f"--{flag.name.replace('_', '-')}{value}"


def with_default(flag: Flag) -> str:
    default = "on" if flag.default is True else flag.default
    return flag.about if default is None or flag.switch else f"{flag.about} Default: {default}."
