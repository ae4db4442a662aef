"""From what was given to the settings that a command gets: config file, --set and flags, or the run to continue."""

from __future__ import annotations

import dataclasses
import os
import reprlib
import shlex
from pathlib import Path
from typing import Any

from usfan.cli.flags import COMMANDS, Command, Flag
from usfan.config import WITHHELD, AdaptConfig, RuntimeConfig, TrainConfig, convert, make_config, unknown_setting
from usfan.errors import ConfigError, shown
from usfan.files import read_yaml

CONFIGS = (TrainConfig, AdaptConfig, RuntimeConfig)


def read_settings(name: str, given: dict[str, Any]) -> dict[str, Any] | None:
    """The settings of a command, checked as far as can be without the model: the config file's, then --set and flags on
    top. None if all that is asked for is a run that is finished, and whose settings were withheld."""
    command = COMMANDS[name][1]()
    given = with_last_place(command, given)
    path, pairs = given.pop("config", None), given.pop("set", [])
    settings = {} if path is None else read_config_file(name, command, path, given)
    chosen = set_values(command, pairs)
    for twice in sorted(chosen.keys() & given.keys()):
        raise ConfigError(f"{twice} is given twice: as a flag, and with --set")
    settings = checked(name, command, {**settings, **chosen, **given})
    finished = False
    if command.resumable and settings.get("resume") and "out" in settings:
        settings, finished = resumed(name, command, settings)
    missing = [item for item in command.required if item not in settings]
    if name == "predict" and not settings.get("json") and "out" not in settings:
        missing.append("out")
    if missing and finished:
        return None
    if missing:
        raise ConfigError(f"{spelled(command, missing[0])} (see --help)")
    return settings


def spelled(command: Command, missing: str) -> str:
    """What is missing, and how to give it."""
    if missing not in command.flags:
        place = next(flag for flag in command.places if flag.name == missing)
        return f"{place.metavar or missing.upper()} is missing: give it, or put it into the --config file"
    name = f"--{missing.replace('_', '-')}"
    if "json" in command.flags:
        return f"{name} is missing: name the file to write, or print the predictions with --json"
    return f"{name} is missing: give it, or put it into the --config file"


def with_last_place(command: Command, given: dict[str, Any]) -> dict[str, Any]:
    """SOURCE … DATA: all came as sources; the last of them is DATA."""
    first, last = (command.places[0], command.places[-1]) if command.places else (None, None)
    if first is None or last is None or first == last or not first.several:
        return dict(given)
    values = given.get(first.name, [])
    if len(values) == 1:
        raise ConfigError(f"{first.name.upper()} and {last.name.upper()} are needed; got {values[0]} only")
    return {**given, first.name: values[:-1], last.name: values[-1]} if values else dict(given)


def read_config_file(name: str, command: Command, path: str, given: dict[str, Any]) -> dict[str, Any]:
    """The settings of a YAML file, which may be a stranger's. The config.yaml of a run of the same command works."""
    try:
        loaded = read_yaml(Path(path))
    except (OSError, ValueError) as error:
        raise ConfigError(f"--config {path}: {shown(' '.join(str(error).split()), 300)}") from None
    if loaded is not None and not isinstance(loaded, dict):
        raise ConfigError(f"--config {path}: must hold names and values")
    settings = {str(k).replace("-", "_"): v for k, v in (loaded or {}).items()}
    settings = {k: v for k, v in settings.items() if v is not None and v != WITHHELD}
    for key, value in settings.items():
        if any(isinstance(v, (dict, list, set)) for v in (value if isinstance(value, list) else [value])):
            raise ConfigError(f"--config {path}: {reprlib.repr(key)} must be a value, or a list of values")
    its_own = settings.pop("command", name)
    if its_own != name:
        raise ConfigError(
            f"--config {path}: holds the settings of usfan {reprlib.repr(its_own).strip(QUOTES)}, not of {name}"
        )
    if "module" in settings:
        raise ConfigError(f"--config {path}: module is code: only the flag --module can name it")
    must_be_known(command, settings)
    if "root" in given:
        check_paths({k: v for k, v in settings.items() if k not in given}, path, given["root"])
    return settings


QUOTES = "'\""


def must_be_known(command: Command, settings: dict[str, Any]) -> None:
    """Refuse names that the command does not have; those of a method's settings the method refuses."""
    known = command.names()
    for name in settings:
        if name in known or command.open_ended:
            continue
        if any(name == f.name for kind in CONFIGS for f in dataclasses.fields(kind)):
            raise ConfigError(f"this command has no setting {name!r}: see --help")
        raise unknown_setting(name, known, "see --help")


def set_values(command: Command, pairs: list[str]) -> dict[str, Any]:
    """NAME=VALUE pairs as settings."""
    fields = {f.name for kind in command.kinds for f in dataclasses.fields(kind)}
    found: dict[str, Any] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        name = name.replace("-", "_")
        if not equals or not name:
            raise ConfigError(f"--set {reprlib.repr(pair)}: write NAME=VALUE")
        if name in found:
            raise ConfigError(f"--set gives {name} twice")
        if name in command.names() - fields:
            raise ConfigError(f"--set {name}: is a flag of its own, --{name.replace('_', '-')}")
        found[name] = value
    return found


def checked(name: str, command: Command, settings: dict[str, Any]) -> dict[str, Any]:
    """The same with every value of its type, and within its bounds: a mistake is found before anything is loaded."""
    settings = dict(settings)
    names = command.names()
    for kind in (TrainConfig if name in ("train", "posterior") else AdaptConfig, RuntimeConfig):
        values = {f.name: settings[f.name] for f in dataclasses.fields(kind) if f.name in settings.keys() & names}
        config = make_config(kind, values)
        settings |= {field: getattr(config, field) for field in values}
    fields = {f.name for kind in CONFIGS for f in dataclasses.fields(kind)}
    for flag in (*command.places, *command.flags.values(), *map(as_flag, command.kinds)):
        for item in flag if isinstance(flag, tuple) else (flag,):
            if item.name in settings and item.name not in fields:
                settings[item.name] = checked_value(item, settings[item.name])
    return settings


def as_flag(kind: type) -> tuple[Flag, ...]:
    return tuple(Flag(f.name, "", str(f.type)) for f in dataclasses.fields(kind))


def checked_value(flag: Flag, value: Any) -> Any:
    """A value that no config checks."""
    if flag.several:
        one = Flag(flag.name, "", flag.type.removeprefix("list[").removesuffix("]"))
        return [checked_value(one, item) for item in (value if isinstance(value, list) else [value])]
    if flag.type != "str":
        return convert(flag, value)
    if not isinstance(value, str) or not value or "\0" in value:
        what = "is empty" if value == "" else f"must be a text; got {reprlib.repr(value)[:80]}"
        raise ConfigError(f"{flag.name} {what}")
    if flag.choices and value not in flag.choices:
        raise ConfigError(f"{flag.name} must be one of {', '.join(flag.choices)}; got {reprlib.repr(value)}")
    return value


def check_paths(settings: dict[str, Any], file: str, root: str) -> None:
    """Under --root, the paths in a config file may not leave it: the file may be a stranger's."""
    from usfan.data.lists import inside

    for name in ("cache", "pretrained", "out", "data", "classes", "labels"):
        value = settings.get(name)
        named = name == "pretrained" and value in ("auto", "none", "offline", "timm")
        for path in value if isinstance(value, list) else [value]:
            if isinstance(path, str) and not named and not inside(os.path.abspath(path), root):
                raise ConfigError(f"--config {file}: {name}: {path} leaves the root {root}")


def resumed(name: str, command: Command, settings: dict[str, Any]) -> tuple[dict[str, Any], bool]:
    """The settings of the run in --out, and whether it has ended; what was given beside --resume must agree with it."""
    from usfan.cli.parse import is_method_setting
    from usfan.runs.folder import differences, read_run_config

    out = Path(settings["out"])
    before = read_run_config(out)
    if before is None:
        return settings, False
    if "setting" in command.names():
        from usfan.adaptation.settings import with_setting

        settings = with_setting(settings)
    given = {k: v for k, v in settings.items() if k not in ("out", "resume", "module", "budget")}
    if isinstance(given.get("source"), list) and len(given["source"]) == 1:
        given["source"] = given["source"][0]
    changed = differences({"command": name, **given}, before)
    if changed:
        raise ConfigError(
            f"{out} holds a run with other settings ({shown(', '.join(changed), 600)}): "
            "leave these flags out to continue it, or choose another --out"
        )
    kept = {k: v for k, v in before.items() if v is not None and v != WITHHELD and k not in ("command", "module")}
    must_be_known(command, kept)
    for strange in kept.keys() - command.names() - {"setting"}:
        if not is_method_setting(strange):
            raise ConfigError(
                f"{out} has a setting '{shown(strange, 80)}' that this version does not know: it was begun by another "
                "version; choose another --out"
            )
    return checked(name, command, {**kept, **settings}), (out / "metrics.json").is_file()


def to_go_on(name: str, settings: dict[str, Any]) -> str:
    """For an interrupted run: the command that continues it."""
    out = settings.get("out")
    if name in ("study", "reproduce"):
        return "; run the same command again to continue"
    if name not in COMMANDS or not COMMANDS[name][1]().resumable or not out or not Path(out, "config.yaml").is_file():
        return ""
    words = ["usfan", name, "--resume", "--out", str(out)]
    if "module" in settings:
        words += ["--module", settings["module"]]
    return f"; to continue: {shlex.join(words)}"
