"""The command line. Parsing imports nothing heavy; a command imports what it needs when it runs.

Flags come from the fields of the config dataclasses, their help from the fields' docstrings. A YAML file given with
--config holds the same names; flags go on top. Exit codes: `usfan.cli.ending`.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

from usfan import __version__
from usfan.budget import budget
from usfan.cli.ending import exit_code, keep_standard_handles, plain_warnings, stoppable
from usfan.config import WITHHELD, AdaptConfig, RuntimeConfig, TrainConfig, field_docs
from usfan.errors import ConfigError, shown

BENCHMARKS = ("toy", "digits", "office31", "office-home", "visda-c", "domainnet", "cifar-stl")


class Parser(argparse.ArgumentParser):
    """A mistake is one line on stderr."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {shown(message, 500)} (see {self.prog} --help)\n")


def add_fields(parser: argparse.ArgumentParser, *kinds: type, skip: Sequence[str] = ()) -> None:
    """A flag for every field; those not given stay out of the result."""
    for kind in kinds:
        group = parser.add_argument_group((kind.__doc__ or kind.__name__).split("\n")[0].rstrip("."))
        docs = field_docs(kind)
        for item in dataclasses.fields(kind):
            if item.name in skip:
                continue
            flag, text = "--" + item.name.replace("_", "-"), docs.get(item.name, "").replace("%", "%%")
            options: dict[str, Any] = {"dest": item.name, "default": argparse.SUPPRESS}
            if item.type == "bool" and item.default is False:
                group.add_argument(flag, action="store_true", help=text, **options)
            elif str(item.type).startswith("bool"):
                shown = " Default: on." if item.default else ""
                group.add_argument(flag, choices=("on", "off"), help=text + shown, **options)
            else:
                shown = "" if item.default is None else f" Default: {item.default}."
                group.add_argument(flag, metavar=item.name.upper(), help=text + shown, **options)


def build_parser() -> Parser:
    parser = Parser(
        prog="usfan", description="Adapt a trained image classifier to unlabelled images from a new domain."
    )
    parser.add_argument("--version", action="version", version=f"usfan {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=Parser)

    def command(name: str, summary: str, *kinds: type, skip: Sequence[str] = ()) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=summary, description=summary)
        sub.add_argument("--config", metavar="FILE.yaml", help="Settings by name; flags go on top.")
        about = "Multiplies the limits on what a model or a file may cost in memory and time. Default: 1."
        sub.add_argument("--budget", type=float, default=argparse.SUPPRESS, help=about)
        if "seed" not in {f.name for k in kinds for f in dataclasses.fields(k)} - set(skip):
            sub.add_argument("--seed", type=int, default=argparse.SUPPRESS, help="Seed of whatever is drawn.")
        add_fields(sub, *kinds, RuntimeConfig, skip=skip)
        return sub

    data_help = "Folder class/*.jpg, flat folder of images, or list file."
    sub = command("demo", "MNIST and UCI digits, both ways, all methods: a table and pictures in runs/demo.")
    sub.add_argument("--out", default=argparse.SUPPRESS, help="Run folder. Default: runs/demo.")

    sub = command("train", "Train a source model and fit its posterior.", TrainConfig)
    sub.add_argument("data", help=data_help)
    add_run(sub)
    add_data(sub)

    sub = command("posterior", "Fit a posterior to a trained model, post hoc.")
    sub.add_argument("model", help="Model folder, or a state dict with --backbone.")
    sub.add_argument("data", help=data_help)
    sub.add_argument("--backbone", default=argparse.SUPPRESS, help="timm model that the state dict belongs to.")
    sub.add_argument("--head", default=argparse.SUPPRESS, help="Name of its final Linear, where timm does not say.")
    sub.add_argument("--prior", default=argparse.SUPPRESS, help=field_docs(TrainConfig)["prior"])
    sub.add_argument("--damping", default=argparse.SUPPRESS, help=field_docs(TrainConfig)["damping"])
    sub.add_argument(
        "--weight-decay",
        default=argparse.SUPPRESS,
        help="Of the training, for --prior weight-decay; as stored if not given.",
    )
    add_run(sub)
    add_data(sub)

    sub = command("adapt", "Adapt a source model to unlabelled images.", AdaptConfig)
    sub.add_argument("source", help="Model folder or Hub id.")
    sub.add_argument("data", help=data_help + " Labels are used for the figures at the end, never for adapting.")
    add_run(sub)
    add_data(sub)

    sub = command("evaluate", "Figures of a model on labelled images.")
    sub.add_argument("model", help="Model folder or Hub id.")
    sub.add_argument("data", help=data_help)
    sub.add_argument(
        "--open-set", action="store_true", default=argparse.SUPPRESS, help="Other classes count as unknown."
    )
    sub.add_argument("--out", default=argparse.SUPPRESS, help="Run folder for metrics.json.")
    add_data(sub)

    sub = command("predict", "A CSV of predictions: path, label, confidence, entropy, weight, unknown.")
    sub.add_argument("model", help="Model folder or Hub id.")
    sub.add_argument("data", help=data_help)
    sub.add_argument("--out", default=argparse.SUPPRESS, metavar="FILE.csv", help="Where to write. Needed.")
    sub.add_argument(
        "--coverage", type=float, default=argparse.SUPPRESS, help="Abstain on the least certain 1 − coverage."
    )
    add_data(sub)

    sub = command("report", "One HTML page of one or more runs.")
    sub.add_argument("runs", nargs="+", metavar="RUN", help="Run folders.")
    sub.add_argument(
        "--out", default=argparse.SUPPRESS, metavar="FILE.html", help="Default: report.html in the first run."
    )
    about = "Folder that images may be shown from. Default: wherever the images of runs made here lie."
    sub.add_argument("--root", default=argparse.SUPPRESS, help=about)

    sub = command("export", "The model as one ONNX graph: features, logits, certainty.")
    sub.add_argument("model", help="Model folder or Hub id.")
    sub.add_argument("--onnx", default=argparse.SUPPRESS, metavar="FILE", help="Where to write. Needed.")

    command("methods", "The table of methods.")

    sub = command("reproduce", "The paper's tables and figures.", AdaptConfig, skip=("method", "seed"))
    sub.add_argument("benchmark", choices=BENCHMARKS, help="Which one.")
    sub.add_argument("--data", default=argparse.SUPPRESS, metavar="ROOT", help="Folder of the data set.")
    sub.add_argument("--methods", nargs="+", default=argparse.SUPPRESS, help="Default: all.")
    seeds_help = "Default: 2019 2020 2021; of the toy 0 to 19, of digits without --data 0."
    sub.add_argument("--seeds", nargs="+", type=int, default=argparse.SUPPRESS, help=seeds_help)
    sub.add_argument("--jobs", type=int, default=argparse.SUPPRESS, help="Processes side by side; default 1.")
    sub.add_argument("--pairs", nargs="+", default=argparse.SUPPRESS, metavar="A-B", help="Only these tasks.")
    sub.add_argument("--backbone", default=argparse.SUPPRESS, help="Another network than the benchmark's own.")
    sub.add_argument("--pretrained", default=argparse.SUPPRESS, help=field_docs(TrainConfig)["pretrained"])
    sub.add_argument("--source-epochs", type=int, default=argparse.SUPPRESS, help="Epochs of stage 1.")
    sub.add_argument("--out", default=argparse.SUPPRESS, help="Run folder. Default: runs/BENCHMARK.")
    sub.add_argument(
        "--allow-counts", action="store_true", default=argparse.SUPPRESS, help="Accept other numbers of images."
    )
    sub.add_argument(
        "--allow-classes", action="store_true", default=argparse.SUPPRESS, help="Accept missing classes too."
    )
    return parser


def add_run(parser: argparse.ArgumentParser) -> None:
    about = "Run folder: settings, figures, log and the model. Needed."
    parser.add_argument("--out", default=argparse.SUPPRESS, metavar="DIR", help=about)
    parser.add_argument(
        "--resume", action="store_true", default=argparse.SUPPRESS, help="Go on with an interrupted run."
    )
    parser.add_argument(
        "--private",
        action="store_true",
        default=argparse.SUPPRESS,
        help="Leave out paths, file names and, of train and posterior, settings, log and training figures.",
    )


def add_data(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--root", default=argparse.SUPPRESS, help="Folder that a list's paths start from and may not leave."
    )
    parser.add_argument(
        "--strict", action="store_true", default=argparse.SUPPRESS, help="An unreadable image is an error."
    )


REQUIRED = {"train": "out", "posterior": "out", "adapt": "out", "predict": "out", "export": "onnx"}
"""Flags that must be given, on the command line or in the config file."""
TEXTS = {"out", "onnx", "data", "root", "head", "backbone"}
SWITCHES = {"resume", "private", "strict", "allow_counts", "allow_classes"}
"""Settings that no config dataclass checks."""
LISTS = ("methods", "pairs", "seeds")
"""Settings of several values; in a config file a single one will do."""


def read_settings(command: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """YAML first, flags on top; on/off becomes true/false. The config.yaml of a run of the same command will do."""
    path = arguments.pop("config", None)
    settings: dict[str, Any] = {}
    if path is not None:
        from usfan.files import MOST_YAML, parse_yaml, read_named

        try:
            loaded = parse_yaml(read_named(path, MOST_YAML))
        except (OSError, ValueError) as error:
            raise ConfigError(f"--config {path}: {shown(' '.join(str(error).split()), 300)}") from None
        if loaded is not None and not isinstance(loaded, dict):
            raise ConfigError(f"--config {path}: must hold names and values")
        settings = {str(k).replace("-", "_"): v for k, v in (loaded or {}).items()}
        settings = {k: v for k, v in settings.items() if v not in (None, WITHHELD)}
        settings |= {k: [settings[k]] for k in LISTS if k in settings and not isinstance(settings[k], list)}
        for name, value in settings.items():
            if any(isinstance(v, (dict, list, set)) for v in (value if isinstance(value, list) else [value])):
                raise ConfigError(f"--config {path}: {shown(name, 80)} must be a value, or a list of values")
        its_own = settings.pop("command", command)
        if its_own != command:
            raise ConfigError(f"--config {path}: holds the settings of usfan {shown(its_own, 40)}, not of {command}")
        if "root" in arguments:
            check_paths({k: v for k, v in settings.items() if k not in arguments}, path, arguments["root"])
    settings |= arguments
    needed = REQUIRED.get(command)
    if needed is not None and needed not in settings:
        raise ConfigError(f"--{needed} is missing: give it, or put it into the --config file (see --help)")
    for name in sorted(TEXTS & settings.keys()):
        value = settings[name]
        if not isinstance(value, str) or not value or "\0" in value:
            what = "is empty" if value == "" else f"must be a text; got {shown(repr(value), 80)}"
            raise ConfigError(f"{name} {what}")
    switches = {k: v for k, v in settings.items() if k in ON_OFF | SWITCHES and isinstance(v, str)}
    settings |= {k: {"on": True, "off": False}.get(v, v) for k, v in switches.items()}
    for name in sorted(SWITCHES & settings.keys()):
        if not isinstance(settings[name], bool):
            raise ConfigError(f"{name} must be true or false; got {shown(repr(settings[name]), 80)}")
    return settings


def take_number(settings: dict[str, Any], name: str, default: float) -> float:
    value = settings.pop(name, default)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or abs(value) > 1e300:
        raise ConfigError(f"{name} must be a number; got {shown(repr(value), 80)}")
    return float(value)


def check_paths(settings: dict[str, Any], file: str, root: str) -> None:
    """Under --root, the paths in a config file may not leave it: the file may be a stranger's."""
    from usfan.data.lists import inside

    for name in ("cache", "pretrained", "out", "data"):
        value = settings.get(name)
        named = name == "pretrained" and value in ("auto", "none", "offline", "timm")
        if isinstance(value, str) and not named and not inside(os.path.abspath(value), root):
            raise ConfigError(f"--config {file}: {name}: {value} leaves the root {root}")


ON_OFF = {
    f.name for kind in (TrainConfig, AdaptConfig) for f in dataclasses.fields(kind) if str(f.type).startswith("bool")
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = build_parser()
    parsed, unknown = parser.parse_known_args(argv)
    arguments = vars(parsed)
    name = arguments.pop("command")
    if unknown:
        about = f"usfan {name}" if name else "usfan"
        parser.exit(2, f"{about}: unrecognized arguments: {shown(' '.join(unknown), 300)} (see {about} --help)\n")
    if name is None:
        parser.print_help()
        return 0
    keep_standard_handles()
    plain_warnings()
    try:
        with stoppable(), quiet_threads():
            settings = read_settings(name, arguments)
            from usfan.cli import commands

            with budget(take_number(settings, "budget", 1.0)):
                commands.COMMANDS[name](settings)
    except (Exception, KeyboardInterrupt) as error:
        code = exit_code(name, error)
        if code is None:
            raise
        return code
    return 0


@contextlib.contextmanager
def quiet_threads() -> Iterator[None]:
    """The thread that writes curves raises what went wrong in the main thread too: it is said there, once."""
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
