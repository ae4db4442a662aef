"""What every command takes, as data. Flags that are fields of a config have their type, help and default from there.

Commands are listed without heavy imports; a `Command` is built only when it is used.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from usfan.config import ADVANCED, AdaptConfig, RuntimeConfig, TrainConfig, choices_of
from usfan.field_docs import field_docs

BENCHMARKS = ("toy", "digits", "office31", "office-home", "visda-c", "domainnet", "cifar-stl")
SHELLS = ("bash", "zsh", "fish")


@dataclass(frozen=True)
class Flag:
    """A flag or, among the `places` of a command, a positional argument."""

    name: str
    about: str
    type: str = "str"
    """As a field's annotation; "list[…]" takes several values."""
    default: Any = None
    """Shown in the help. What is not given stays out of the settings."""
    metavar: str | None = None
    choices: tuple[str, ...] = ()

    @property
    def value(self) -> str:
        """What stands for the value in the help."""
        return "|".join(self.allowed) or self.metavar or self.name.upper()

    @property
    def allowed(self) -> tuple[str, ...]:
        on_off = self.type.startswith("bool") and not self.switch
        return ("on", "off") if on_off else self.choices

    @property
    def several(self) -> bool:
        return self.type.startswith("list[")

    @property
    def switch(self) -> bool:
        """Stands alone: --resume. A field that is on by default takes on or off."""
        return self.type == "bool" and not self.default


@dataclass(frozen=True)
class Command:
    """The arguments of one command."""

    usage: str
    places: tuple[Flag, ...] = ()
    """Positional arguments, in order. One that is a list takes all that are left."""
    groups: dict[str, tuple[Flag, ...]] = dataclasses.field(default_factory=dict)
    """Flags under their titles in the help, the common ones first."""
    kinds: tuple[type, ...] = ()
    """Configs whose every field may stand in a config file, and in --set if the command has it."""
    required: tuple[str, ...] = ()
    """Must be given on the command line or in the config file."""
    open_ended: bool = False
    """Takes the settings of a method too, which the method checks."""
    resumable: bool = False

    @property
    def flags(self) -> dict[str, Flag]:
        return {flag.name: flag for group in self.groups.values() for flag in group}

    def names(self) -> set[str]:
        """Everything that may stand in a config file. A module is named by the user alone: it is code."""
        fields = {f.name for kind in self.kinds for f in dataclasses.fields(kind)}
        own = {flag.name for flag in self.places} | self.flags.keys()
        return (fields | own) - {"config", "set", "module"}


def fields(kind: type, *names: str) -> tuple[Flag, ...]:
    """These fields of a config as flags."""
    docs, found = field_docs(kind), {f.name: f for f in dataclasses.fields(kind)}
    return tuple(
        Flag(name, docs.get(name, ""), str(found[name].type), found[name].default, choices=choices_of(kind, name))
        for name in names
        if name in found
    )


def others(kind: type, shown: Iterable[Flag] = (), *, without: Iterable[str] = ()) -> tuple[Flag, ...]:
    """The fields of a config that no other group shows."""
    seen = {flag.name for flag in shown} | set(without)
    return fields(kind, *(f.name for f in dataclasses.fields(kind) if f.name not in seen))


DATA = Flag("data", "A folder class/*.jpg, a flat folder of images, one image, or a list file.")
MODEL = Flag("model", "Model folder or Hub id.")
OUT = Flag("out", "Run folder: settings, figures, log and the model (required).", metavar="DIR")
RESUME = Flag("resume", "Continue the interrupted run in --out with its settings.", "bool")
PRIVATE = Flag(
    "private",
    "Leave out paths and file names; train and posterior also leave out settings, log and training figures.",
    "bool",
)
ROOT = Flag("root", "Base folder of relative paths in a list; no image may be outside it.", metavar="DIR")
STRICT = Flag("strict", "Stop if an image is unreadable, instead of skipping it.", "bool")
BUDGET = Flag("budget", "Factor on the limits of memory and time that a model or a file may use.", "float", 1.0)
CONFIG = Flag("config", "Settings by name; flags override them.", metavar="FILE.yaml")
SEED = Flag("seed", "Seed of random draws.", "int", 0)
MODULE = Flag(
    "module",
    "For a network that is not from timm: function that returns it. The module is imported.",
    metavar="MODULE:FUNCTION",
)
LABELS = Flag(
    "labels",
    "Labels of a few of these images to learn from: a table path,label, such as label_first.csv, filled in.",
    metavar="FILE",
)
UNLABELLED = Flag("unlabelled", "Ignore labels; read folders of any name and depth.", "bool")
OPEN_SET = Flag("open_set", "The images may show classes that the model does not know.", "bool")
PARTIAL_SET = Flag("partial_set", "The target may lack classes that the model knows.", "bool")
UNCERTAINTY = Flag(
    "uncertainty",
    "Where certainty comes from: posterior, point (the point estimate), mc-dropout, ensemble, or auto (as stored).",
    default="auto",
    choices=choices_of(AdaptConfig, "uncertainty"),
)
SET = Flag(
    "set",
    "Less common settings, and those of the method: see `usfan methods NAME`.",
    "list[str]",
    metavar="NAME=VALUE",
)
COMPUTING = ("device", "devices", "nodes", "workers", "cache", "precision")


def every_command(*more: Flag) -> dict[str, tuple[Flag, ...]]:
    """The group of a command that computes little: what all commands take."""
    return {"Every command": (*more, *fields(RuntimeConfig, "device"), BUDGET, CONFIG)}


def demo() -> Command:
    out = Flag("out", "Run folder.", default="runs/demo", metavar="DIR")
    return Command("[OPTIONS]", groups={"Common": (out,), **every_command(SEED)})


def train() -> Command:
    common = (
        OUT,
        *fields(TrainConfig, "backbone", "pretrained", "epochs", "seed", "tune", "batch_size", "lr", "preset"),
        RESUME,
    )
    return Command(
        "DATA --out DIR [OPTIONS]",
        (DATA,),
        {
            "Common": common,
            "Training and posterior": others(TrainConfig, common),
            "Data and run folder": (ROOT, STRICT, PRIVATE),
            "Computing": (*others(RuntimeConfig), BUDGET, CONFIG),
        },
        (TrainConfig, RuntimeConfig),
        required=("data", "out"),
        resumable=True,
    )


def posterior() -> Command:
    return Command(
        "MODEL DATA --out DIR [OPTIONS]",
        (dataclasses.replace(MODEL, about="Model folder, or a state dict with --backbone."), DATA),
        {
            "Common": (
                OUT,
                Flag("backbone", "timm model that the state dict belongs to."),
                Flag("head", "Name of the last Linear layer; not needed for timm models."),
                Flag("classes", "Class names in the order of the outputs: one per line, or JSON.", metavar="FILE"),
                *fields(TrainConfig, "prior", "damping", "uncertainty", "members"),
                Flag("dropout_rate", "Rate of MC dropout; by default that of the training, or 0.1.", "float | None"),
                Flag(
                    "weight_decay",
                    "Weight decay of the training, for --prior weight-decay; by default as stored.",
                    "float | None",
                ),
                RESUME,
            ),
            "Data and run folder": (ROOT, STRICT, PRIVATE),
            "Computing": (SEED, *others(RuntimeConfig, without=["compile"]), BUDGET, CONFIG),
        },
        (RuntimeConfig,),
        required=("model", "data", "out"),
        resumable=True,
    )


def adapt() -> Command:
    common = (
        OUT,
        *fields(AdaptConfig, "method", "epochs", "seed", "setting"),
        OPEN_SET,
        PARTIAL_SET,
        *fields(AdaptConfig, "preset", "guard"),
        RESUME,
    )
    labels = "Labels in it are used for the figures at the end, never for adapting."
    source = Flag("source", "Model folder or Hub id; one or more.", "list[str]")
    data = dataclasses.replace(DATA, about=f"{DATA.about} {labels}")
    return Command(
        "SOURCE [SOURCE …] DATA --out DIR [OPTIONS]",
        (source, data),
        {
            "Common": common,
            "Adaptation": (*others(AdaptConfig, common, without=ADVANCED), SET),
            "Data and model": (LABELS, UNLABELLED, ROOT, MODULE, PRIVATE),
            "Computing": (*others(RuntimeConfig, without=ADVANCED), BUDGET, CONFIG),
        },
        (AdaptConfig, RuntimeConfig, DataOptions),
        required=("source", "data", "out"),
        open_ended=True,
        resumable=True,
    )


@dataclass(frozen=True)
class DataOptions:
    """Options of the data that `adapt` takes by --set."""

    strict: bool = False
    """An unreadable image is an error."""


def evaluate() -> Command:
    about = "Labels of a few of these images, a table path,label: the figures are of these images alone."
    labels = dataclasses.replace(LABELS, about=about)
    return Command(
        "MODEL DATA [OPTIONS]",
        (MODEL, DATA),
        {
            "Common": (dataclasses.replace(OUT, about="Run folder for metrics.json."), OPEN_SET, UNCERTAINTY),
            "Data and model": (labels, ROOT, STRICT, MODULE),
            "Computing": (SEED, *fields(RuntimeConfig, *COMPUTING), BUDGET, CONFIG),
        },
        required=("model", "data"),
    )


def predict() -> Command:
    data = "Photographs, folders and list files; - reads paths from standard input, one per line."
    return Command(
        "MODEL DATA [DATA …] --out FILE.csv [OPTIONS]",
        (MODEL, Flag("data", data, "list[str]")),
        {
            "Common": (
                Flag("out", "Output file (required, unless --json prints the predictions).", metavar="FILE"),
                Flag("json", "JSON instead of CSV, one object per line; without --out to standard output.", "bool"),
                Flag("coverage", "Share of the images that get a label; the others abstain.", "float | None"),
                UNCERTAINTY,
            ),
            "Data and model": (ROOT, STRICT, MODULE),
            "Computing": (SEED, *fields(RuntimeConfig, *COMPUTING), BUDGET, CONFIG),
        },
        required=("model", "data"),
    )


def report() -> Command:
    out = Flag("out", "Output file; by default report.html in the first run.", metavar="FILE.html")
    about = "Folder from which the report may show images; by default it shows those of runs made on this machine."
    root = Flag("root", about, metavar="DIR")
    runs = Flag("runs", "Run folders, or a folder of runs.", "list[str]", metavar="RUN")
    groups = {"Common": (out, root), **every_command(SEED)}
    return Command("RUN [RUN …] [OPTIONS]", (runs,), groups, required=("runs",))


def export() -> Command:
    onnx = Flag("onnx", "Output file (required).", metavar="FILE")
    tensors = Flag("tensors", "The graph takes preprocessed images and returns features and logits.", "bool")
    groups = {"Common": (onnx, tensors, UNCERTAINTY, MODULE), **every_command(SEED)}
    return Command("MODEL --onnx FILE [OPTIONS]", (MODEL,), groups, required=("model", "onnx"))


def methods() -> Command:
    name = Flag("name", "A method, to list its settings.")
    return Command("[NAME] [OPTIONS]", (name,), every_command(SEED))


def completion() -> Command:
    shell = Flag("shell", "Which shell.", choices=SHELLS)
    return Command("SHELL", (shell,), every_command(SEED), required=("shell",))


LAST_ITERATE = Flag(
    "guard", "Keep the source model if adaptation seems to have done harm.", "bool | None", default="off"
)
PAIRS = Flag("pairs", "Run only these pairs of domains.", "list[str]", metavar="A-B")
RAY = Flag("ray", "Run cells in parallel with Ray: the address of a cluster, or local.", metavar="ADDRESS")


def study() -> Command:
    root = Flag("data", "Folder of domain folders, each with one folder of images per class.", metavar="ROOT")
    methods = "Methods to compare; by default those of the paper, and u-sfan++ if the backbone is pretrained."
    return study_command(
        "ROOT [OPTIONS]",
        root,
        (
            Flag("methods", methods, "list[str]"),
            Flag("seeds", "Random seeds; by default 0 1 2.", "list[int]"),
            PAIRS,
            Flag("out", "Run folder.", default="runs/study", metavar="DIR"),
            RAY,
        ),
        fields(TrainConfig, "backbone")[0],
        Flag("allow_classes", "Keep only the classes that all domains share.", "bool"),
    )


def reproduce() -> Command:
    return study_command(
        f"{{{','.join(BENCHMARKS)}}} [OPTIONS]",
        Flag("benchmark", "The benchmark to reproduce.", choices=BENCHMARKS),
        (
            Flag("data", "Folder of the data set.", metavar="ROOT"),
            Flag("methods", "Methods to run; by default those of the paper.", "list[str]"),
            Flag("seeds", "By default 2019 2020 2021; toy: 0 to 19; digits without --data: 0.", "list[int]"),
            PAIRS,
            Flag("out", "Run folder; by default runs/BENCHMARK.", metavar="DIR"),
            RAY,
        ),
        Flag("backbone", "Network to use instead of the benchmark's own."),
        Flag("allow_counts", "Accept a data set with other numbers of images.", "bool"),
        Flag("allow_classes", "Accept a data set with missing classes.", "bool"),
    )


def study_command(usage: str, place: Flag, common: tuple[Flag, ...], backbone: Flag, *data: Flag) -> Command:
    """Flags of the two commands that run pairs × methods × seeds."""
    given = (*fields(AdaptConfig, "setting", "epochs", "preset"), LAST_ITERATE)
    adaptation = (*given, OPEN_SET, PARTIAL_SET, *others(AdaptConfig, given, without={*ADVANCED, "method", "seed"}))
    about = "Epochs of the source training; set its other settings by --set source_NAME=VALUE."
    source = (backbone, *fields(TrainConfig, "pretrained"), Flag("source_epochs", about, "int | None"))
    computing = (
        Flag("seed", "One seed, instead of --seeds.", "int"),
        *others(RuntimeConfig, without=ADVANCED),
        Flag("share", "With Ray, the share of a GPU per cell.", "float", 0.5),
        Flag("threads", "CPU threads per cell; with Ray also the cores per cell (default 1).", "int | None"),
    )
    return Command(
        usage,
        (place,),
        {
            "Common": common,
            "Source models": source,
            "Adaptation": (*adaptation, SET),
            "Data": data,
            "Computing": (*computing, BUDGET, CONFIG),
        },
        (AdaptConfig, RuntimeConfig),
        required=(place.name,),
        open_ended=True,
    )


COMMANDS: dict[str, tuple[str, Callable[[], Command]]] = {
    "demo": ("Adapt between MNIST and UCI digits with all methods of the paper; results go to runs/demo.", demo),
    "train": ("Train a source model and fit its posterior.", train),
    "posterior": ("Fit a posterior to a model that is already trained.", posterior),
    "adapt": ("Adapt a source model to unlabelled images.", adapt),
    "evaluate": ("Measure accuracy and calibration on labelled images.", evaluate),
    "predict": ("Write a table of predictions: path, label, confidence, entropy, weight, unknown, error.", predict),
    "report": ("Write one HTML page about one or more runs.", report),
    "export": ("Export the model as one ONNX graph.", export),
    "methods": ("List the methods, or the settings of one.", methods),
    "study": ("Compare methods on all pairs of your own domains: tables, figures and a report.", study),
    "reproduce": ("Reproduce the paper's tables and figures.", reproduce),
    "completion": ("Print shell completion of commands, flags and values.", completion),
}
"""By name: one line for the overview, and what makes the rest."""
