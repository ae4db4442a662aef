"""The arguments of commands: their types, their texts, and the groups of flags that are fields of dataclasses.

A command is a function (`commands`). The annotation of a parameter is its type, or a group of fields (`group`).
Its text is in the docstring of the function, or of the field. Nothing heavy is imported here.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
from collections.abc import Callable, Iterable
from dataclasses import Field, dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin, get_type_hints

from usfan.config import AdaptConfig, RuntimeConfig, TrainConfig, choice, number
from usfan.config_checks import MOST_SEED
from usfan.field_docs import field_docs

METAVARS = {
    "out": "DIR",
    "root": "DIR",
    "config": "FILE.yaml",
    "labels": "FILE",
    "classes": "FILE",
    "onnx": "FILE",
    "module": "MODULE:FUNCTION",
    "set": "NAME=VALUE",
    "pairs": "A-B",
    "method": "NAME",
    "ray": "ADDRESS",
}
"""Stand for values in the help, if the name of the argument does not."""
DATA_AND_MODEL = ("labels", "unlabelled", "root", "strict", "module", "private")
"""Arguments of the second group of a help page."""
COMPUTING = "Computing"


@dataclass(frozen=True)
class Flag:
    """One argument of a command: a parameter of its function, or a field of a group."""

    field: Field[Any]
    text: str
    title: str
    """The group of the help page."""
    metavar: str
    positional: bool = False
    required: bool = False

    @property
    def name(self) -> str:
        return self.field.name

    @property
    def option(self) -> str:
        """The name on the command line."""
        return f"--{self.name.replace('_', '-')}"

    @property
    def type(self) -> str:
        return str(self.field.type)

    @property
    def several(self) -> bool:
        return self.type.startswith("list[")

    @property
    def switch(self) -> bool:
        """Whether it stands alone: --resume. A field that is on by default takes on or off."""
        return self.type == "bool" and not self.field.default

    @property
    def choices(self) -> tuple[str, ...]:
        if self.type.startswith("bool"):
            return () if self.switch else ("on", "off")
        return () if "float" in self.type else self.field.metadata.get("choices", ())


def fields(kind: type, title: str, *names: str, without: Iterable[str] = ()) -> list[Flag]:
    """These fields of a dataclass as flags; without names, all but some."""
    docs = field_docs(kind)
    flags = {}
    for item in dataclasses.fields(kind):
        metavar = METAVARS.get(item.name, item.name.upper())
        flags[item.name] = Flag(item, docs[item.name], title, metavar)
    return [flags[name] for name in names or flags if name not in without]


@dataclass(frozen=True)
class Group:
    """The annotation of a parameter that holds several flags."""

    flags: list[Flag]
    hidden: tuple[Field[Any], ...]
    """Fields that have no flags, but may stand in a config file and in --set."""


def group(*parts: list[Flag], hidden: type | None = None) -> Group:
    """These flags, and the fields of `hidden` without flags."""
    flags = [flag for part in parts for flag in part]
    return Group(flags, dataclasses.fields(hidden) if hidden else ())


@dataclass(frozen=True)
class Command:
    """A command, as its function describes it."""

    function: Callable[..., int | None]
    summary: str
    flags: dict[str, Flag]
    hidden: dict[str, Field[Any]]
    """Fields that may stand in a config file and in --set, also without a flag."""

    @property
    def name(self) -> str:
        return self.function.__name__

    @property
    def settings(self) -> dict[str, Field[Any]]:
        """Everything that may stand in a config file."""
        flags = {name: flag.field for name, flag in self.flags.items()}
        return {**self.hidden, **flags}


@functools.cache
def describe(function: Callable[..., int | None]) -> Command:
    """The arguments of a command, read from the signature and the docstring of its function."""
    text = inspect.cleandoc(function.__doc__ or "")  # as Python 3.13 keeps it
    summary, _, arguments = text.partition("Args:")
    docs = {name: (metavar, text) for name, metavar, text in ARGUMENT.findall(arguments)}
    hints = get_type_hints(function)
    command = Command(function, " ".join(summary.split()), {}, {})
    for name, parameter in inspect.signature(function).parameters.items():
        hint = hints[name]
        if isinstance(hint, Group):
            command.flags.update((flag.name, flag) for flag in hint.flags)
            command.hidden.update((item.name, item) for item in hint.hidden)
        else:
            command.flags[name] = parameter_flag(parameter, hint, *docs.get(name, ("", "")))
    return command


ARGUMENT = re.compile(r"^ {4}(\w+)(?: \((.+?)\))?: (.+(?:\n {8}.+)*)", re.MULTILINE)
"""A line `name (METAVAR): text` of a docstring, and the lines that continue it."""


def parameter_flag(parameter: inspect.Parameter, hint: Any, metavar: str, text: str) -> Flag:
    name = parameter.name
    required = parameter.default is parameter.empty
    item: Field[Any] = dataclasses.field()
    if get_origin(hint) is Literal:
        item = choice(*get_args(hint))
        hint = str
    item.name = name
    item.type = inspect.formatannotation(hint)
    item.default = None if required else parameter.default
    return Flag(
        item,
        " ".join(text.split()) or field_docs(SharedArguments)[name],
        "Data and model" if name in DATA_AND_MODEL else "Common",
        metavar or METAVARS.get(name, name.upper()),
        parameter.kind is parameter.POSITIONAL_ONLY,
        required,
    )


@dataclass
class SharedArguments:
    """Texts of arguments that several commands have; the docstring of a command can say something else."""

    data: str
    """Images: a folder class/*.jpg, a flat folder, shards (.tar), one image, or a list file."""
    model: str
    """Model folder or Hub id."""
    out: str
    """Run folder: settings, figures, log and the model (required)."""
    log: str
    """Also record the run in mlflow (usfan[mlflow]) or wandb, in the place that their own settings name."""
    resume: bool
    """Continue the interrupted run in --out with its settings."""
    uncertainty: str
    """Where certainty comes from: posterior, point (the point estimate), mc-dropout, ensemble, or auto (as stored)."""
    root: str
    """Base folder of relative paths in a list; no image may be outside it."""
    strict: bool
    """Stop if an image is unreadable, instead of skipping it."""
    module: str
    """Function that returns the network, if timm does not make it. The module is imported."""
    private: bool
    """Leave out paths and file names; train and posterior also leave out settings, log and training figures."""


@dataclass(frozen=True)
class EveryCommand:
    """Flags of all commands."""

    seed: int = number(0, 0, MOST_SEED)
    """Seed of random draws."""
    budget: float = 1.0
    """Factor on the limits of memory and time that a model or a file may use."""
    config: str | None = None
    """Settings by name; flags override them."""


@dataclass(frozen=True)
class AdaptOptions:
    """Settings of an adaptation that are no fields of `AdaptConfig`."""

    open_set: bool = False
    """The images may show classes that the model does not know."""
    partial_set: bool = False
    """The target may lack classes that the model knows."""
    set: list[str] | None = None
    """Less common settings, and those of the method: see `usfan methods NAME`."""


@dataclass(frozen=True)
class StudyOptions:
    """Flags that `study` and `reproduce` share."""

    data: str | None = None
    """Folder of the data set."""
    methods: list[str] | None = None
    """Methods to run; by default those of the paper, and u-sfan++ on your own data if the backbone is pretrained."""
    method: str | None = None
    """A method of your own beside these, MODULE:NAME. Importing it runs its code."""
    seeds: list[int] | None = None
    """Random seeds; by default 0 1 2, or for benchmarks 2019 2020 2021; toy: 0 to 19; digits without --data: 0."""
    pairs: list[str] | None = None
    """Run only these pairs of domains."""
    out: str | None = None
    """Run folder; by default runs/study or runs/BENCHMARK."""
    ray: str | None = None
    """Run cells in parallel with Ray: the address of a cluster, or local."""
    backbone: str | None = None
    """Any timm model, or digits-cnn, lenet, dtn, cnn13, toy-mlp; by default the benchmark's own, or the pretrained
    network on this machine."""
    pretrained: str = TrainConfig.pretrained
    """auto (weights on this machine), timm (download), offline, a weights file, or none (random weights)."""
    source_epochs: int | None = None
    """Epochs of the source training; set its other settings by --set source_NAME=VALUE."""
    guard: bool | None = None
    """Keep the adapted model only if the images show a gain. Default: off."""
    allow_counts: bool = False
    """Accept a data set with other numbers of images."""
    allow_classes: bool = False
    """Accept missing classes: keep those that all domains share."""
    seed: int | None = None
    """One seed, instead of --seeds."""
    share: float = 0.5
    """With Ray, the share of a GPU per cell."""
    threads: int | None = None
    """CPU threads per cell; with Ray also the cores per cell (default 1)."""


FIT = ("prior", "damping", "curvature", "uncertainty", "members", "preset")
"""Fields of `TrainConfig` that fit a posterior."""
ADAPTATION = ("batch_size", "lr", "tune", "witness", "uncertainty")
"""Fields of `AdaptConfig` that have flags. The others are given with --set, or in a config file."""


def study_group(common: list[str], data: list[str]) -> Group:
    """Flags of the two commands that run pairs × methods × seeds."""
    title = "Adaptation"
    return group(
        fields(StudyOptions, "Common", *common),
        fields(StudyOptions, "Source models", "backbone", "pretrained", "source_epochs"),
        fields(AdaptConfig, title, "setting", "epochs", "preset"),
        fields(StudyOptions, title, "guard"),
        fields(AdaptOptions, title, "open_set", "partial_set"),
        fields(AdaptConfig, title, *ADAPTATION),
        fields(AdaptOptions, title, "set"),
        fields(StudyOptions, "Data", *data),
        fields(StudyOptions, COMPUTING, "seed", "share", "threads"),
        hidden=AdaptConfig,
    )


if TYPE_CHECKING:
    TrainFlags = dict[str, Any]
    PosteriorFlags = dict[str, Any]
    AdaptFlags = dict[str, Any]
    StudyFlags = dict[str, Any]
    ReproduceFlags = dict[str, Any]
    Device = RuntimeConfig
    OneProcess = RuntimeConfig
    ManyProcesses = RuntimeConfig
    LittleComputing = RuntimeConfig
else:
    common = ["backbone", "pretrained", "epochs", "seed", "tune", "batch_size", "lr", "preset"]
    TrainFlags = group(
        fields(TrainConfig, "Common", *common),
        fields(TrainConfig, "Training and posterior", without=common),
    )
    PosteriorFlags = group(
        fields(TrainConfig, "Common", *FIT),
        fields(EveryCommand, "Common", "seed"),
    )
    AdaptFlags = group(
        fields(AdaptConfig, "Common", "method", "epochs", "seed", "setting"),
        fields(AdaptOptions, "Common", "open_set", "partial_set"),
        fields(AdaptConfig, "Common", "preset", "guard"),
        fields(AdaptConfig, "Adaptation", *ADAPTATION),
        fields(AdaptOptions, "Adaptation", "set"),
        hidden=AdaptConfig,
    )
    common = ["methods", "seeds", "pairs", "out", "ray"]
    StudyFlags = study_group([*common, "method"], ["allow_classes"])
    ReproduceFlags = study_group(["data", *common], ["allow_counts", "allow_classes"])
    every = fields(EveryCommand, COMPUTING)
    last = fields(EveryCommand, COMPUTING, without=["seed"])
    Device = group(fields(RuntimeConfig, COMPUTING, "device"), every)
    OneProcess = group(
        fields(RuntimeConfig, COMPUTING, "device", "workers", "cache", "precision", "engine"),
        every,
    )
    ManyProcesses = group(fields(RuntimeConfig, COMPUTING), last)
    LittleComputing = group(
        fields(RuntimeConfig, COMPUTING, "device", "workers"), last, hidden=RuntimeConfig
    )
