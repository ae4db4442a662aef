"""The settings of a command: those of the config file, with --set and flags on top, or those of the run to continue."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import os
import re
import reprlib
import shlex
from dataclasses import Field
from pathlib import Path
from typing import Any

from usfan.cli.flags import Command
from usfan.config import (
    WITHHELD,
    RuntimeConfig,
    convert,
    unknown_setting,
)
from usfan.errors import ConfigError, printable

Settings = dict[str, Any]

FLAGS_ONLY = {
    "module": "is code",
    "ray": "names a cluster whose answers are code",
    "log": "sends figures to another program",
    "out": "names what is written",
    "onnx": "names what is written",
    "cache": "names a folder that is written to",
    "root": "says which files may be read",
    "budget": "lifts the limits on memory and time",
    "config": "is no setting",
    "set": "is no setting",
}
"""Settings that only the user may choose, not a file, which may be a stranger's."""
UNTRUSTED_VALUES = {
    "pretrained": (re.compile("timm"), "downloads weights"),
    "source_pretrained": (re.compile("timm"), "downloads weights"),
    "witness": (re.compile(r".*:timm|\w[\w.-]*/[\w.-]+"), "downloads weights"),
    "method": (re.compile(".*:.*"), "is code"),
}
"""Values that download something or run code, which only the user may ask for."""
MODELS = ("model", "source")
"""Settings that name a folder, or an id of the Hub, which only the user may ask for."""
PATHS = ("pretrained", "data", "classes", "labels", "witness")
"""Settings that name files. With --root, those of a config file may not leave it."""


def read_settings(command: Command, values: Settings) -> Settings:
    """The settings of a command, checked as far as can be without the model."""
    values = dict(values)
    path = values.pop("config", None)
    pairs = read_pairs(values.pop("set", []))
    settings = {} if path is None else read_config_file(command, path, {**pairs, **values})
    settings = check_settings(command, {**settings, **pairs, **values})
    if settings.get("resume") and "out" in settings:
        settings = resume_settings(command, settings)
    for flag in command.flags.values():
        if flag.required and flag.name not in settings:
            name = flag.metavar if flag.positional else flag.option
            raise ConfigError(
                f"{name} is missing: give it, or put it into the --config file (see --help)"
            )
    return settings


def read_pairs(pairs: list[str]) -> Settings:
    """NAME=VALUE pairs as settings; of a name given twice the last counts, as for flags."""
    settings: Settings = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise ConfigError(f"--set {reprlib.repr(pair)}: write NAME=VALUE")
        settings[name.replace("-", "_")] = value
    return settings


def read_config_file(command: Command, path: str, values: Settings) -> Settings:
    """The settings of a YAML file, which may be a stranger's. The config.yaml of a run of the same command works."""
    from usfan.files import read_yaml

    try:
        content = read_yaml(Path(path))
    except (OSError, ValueError) as error:
        message = printable(" ".join(str(error).split()), 300)
        raise ConfigError(f"--config {path}: {message}") from None
    if not isinstance(content, dict | None):
        raise ConfigError(f"--config {path}: must hold names and values")
    settings = {}
    for key, value in (content or {}).items():
        name = str(key).replace("-", "_")
        if name in settings:
            raise ConfigError(
                f"--config {path}: it holds {printable(name, 80)} twice: keep one"
            )
        if value is not None and value != WITHHELD:
            settings[name] = value
    file_command = settings.pop("command", command.name)
    if file_command != command.name:
        other = reprlib.repr(file_command).strip("'\"")
        raise ConfigError(
            f"--config {path}: holds the settings of usfan {other}, not of {command.name}"
        )
    check_trusted(f"--config {path}", settings, values)
    for name in settings:  # a setting that a method does not have is refused by the method
        if name not in command.settings and "set" not in command.flags:
            raise unknown_setting(name, command.settings, f"see usfan {command.name} --help")
    if "root" in values:
        check_paths(path, values["root"], settings, values)
    return settings


def check_trusted(file: str, settings: Settings, values: Settings) -> None:
    """Settings of a file that run code, write, download or lift a limit are refused, unless the user's own replace
    them."""
    for name, value in settings.items():
        if name in values:
            continue
        for text in value if isinstance(value, list) else [value]:
            reason = FLAGS_ONLY.get(name)
            problem = untrusted(name, text)
            if problem:
                reason = f"{printable(str(text), 80)} {problem}"
            elif name in MODELS and not os.path.exists(str(text)):
                reason = f"{printable(text, 80)} is not on this machine"
            if reason:
                raise ConfigError(f"{file}: {name} {reason}: give it on the command line")


def untrusted(name: str, value: object) -> str:
    """What a value of a setting downloads or runs; empty if it does neither. A folder on this machine does not."""
    pattern, problem = UNTRUSTED_VALUES.get(name, (None, ""))
    text = str(value)
    if pattern is None or not pattern.fullmatch(text):
        return ""
    return "" if name == "witness" and os.path.isdir(text) else problem


def check_paths(file: str, root: str, settings: Settings, values: Settings) -> None:
    """Under --root, the paths in a config file may not leave it."""
    from usfan.data.lists import inside

    for name in PATHS:
        value = None if name in values else settings.get(name)
        if name == "pretrained" and value in ("auto", "none", "offline", "timm"):
            continue
        if name == "witness":  # NAME, NAME:FILE or a folder
            value = str(value).rpartition(":")[2]
            value = value if os.path.exists(value) else None
        for path in value if isinstance(value, list) else [value]:
            if isinstance(path, str) and not inside(os.path.abspath(path), root):
                raise ConfigError(f"--config {file}: {name}: {path} leaves the root {root}")


def check_settings(command: Command, settings: Settings) -> Settings:
    """The same with every value of its type, and within its bounds: a mistake is reported before anything is loaded."""
    known = command.settings
    return {
        name: read_value(known[name], value) if name in known else value
        for name, value in settings.items()
    }


def read_value(item: Field[Any], value: Any) -> Any:
    kind = str(item.type)
    if kind.startswith("list["):
        element = copy.copy(item)
        element.type = kind.removeprefix("list[").partition("]")[0]
        return [
            read_value(element, one) for one in (value if isinstance(value, list) else [value])
        ]
    return convert(item, value)


def resume_settings(command: Command, settings: Settings) -> Settings:
    """Those of the run in --out, and the user's on top. `RunFolder` refuses the user's if they differ."""
    from usfan.cli.parse import is_method_setting
    from usfan.store.run_folder import read_run_config

    before = read_run_config(Path(settings["out"])) or {}
    if "setting" in command.settings:
        from usfan.adaptation.plan import expand_short_forms

        settings = expand_short_forms(settings)
    if before.get("command") != command.name:
        return settings
    stored = {}
    same_method = settings.get("method") in (None, before.get("method"))
    for name, value in before.items():
        is_known = name in command.settings or (same_method and is_method_setting(name))
        if is_known and value not in (None, WITHHELD):
            stored[name] = value
    stored.pop("module", None)  # `run` asks for it
    root = {"root": stored.get("root")}  # narrows what may be read
    check_trusted(settings["out"], stored, {**settings, **root})
    return check_settings(command, {**stored, **settings})


def call(command: Command, settings: Settings) -> int:
    """Run a command; returns the exit code. Its parameter `computing` gets the fields of `RuntimeConfig`, `settings`
    what no other takes."""
    rest = dict(settings)
    positional = []
    named: Settings = {}
    for name, parameter in inspect.signature(command.function).parameters.items():
        if name == "settings":
            named[name] = rest  # what the other parameters leave in it
        elif name == "computing":
            fields = {item.name for item in dataclasses.fields(RuntimeConfig)} & rest.keys()
            named[name] = RuntimeConfig(**{field: rest.pop(field) for field in fields})
        elif name in rest and parameter.kind is parameter.POSITIONAL_ONLY:
            positional.append(rest.pop(name))
        elif name in rest:
            named[name] = rest.pop(name)
    return command.function(*positional, **named) or 0


def how_to_continue(name: str, settings: Settings) -> str:
    """The end of the message about an interrupted run: the command that continues it."""
    if name in ("study", "reproduce"):
        return "; run the same command again to continue"
    out = settings.get("out", "")
    if name not in ("train", "posterior", "adapt") or not Path(out, "config.yaml").is_file():
        return ""
    words = ["usfan", name, "--resume", "--out", out]
    for flag in ("log", "module", "budget"):
        if settings.get(flag) is not None:
            words += [f"--{flag}", str(settings[flag])]
    cache = settings.get("cache")
    if cache is not None:  # adapt has no flag for it
        words += ["--set", f"cache={cache}"] if name == "adapt" else ["--cache", str(cache)]
    for flag in UNTRUSTED_VALUES:
        if untrusted(flag, settings.get(flag)):
            words += [f"--{flag.replace('_', '-')}", settings[flag]]
    return f"; to continue: {shlex.join(words)}"
