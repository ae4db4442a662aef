"""The fields of config.json, checked one by one: a stranger wrote the file."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from usfan.budget import allowed
from usfan.config import RESAMPLING, VIEWS
from usfan.config_checks import CURVATURE, DAMPING, MOST_SOURCES, PRIORS, TEMPERATURES
from usfan.data.views import InputSpec
from usfan.errors import ArtifactError, DataError, UsfanError, printable
from usfan.maths.unknown import UnknownRule
from usfan.uncertainty.kronecker import KroneckerPosterior
from usfan.uncertainty.registry import uncertainties_by_kind

MAX_CLASSES = 100_000
MAX_WIDTH = 65_536
MAX_SIDE = 4_096
MAX_NAME = 1_000
MAX_DRAWS = 1 << 21
"""Draws × classes: what a prediction takes, in time and memory, grows with it."""
USUAL_DRAWS = 128
"""Draws that any number of classes may have."""

JsonTable = dict[str, Any]
"""A table as JSON holds it: names to texts, numbers, lists and tables."""
Rule = type | tuple[str, ...] | tuple[int, int] | tuple[float, float]
"""The values that a field may have: bool; str, a short text; one of several texts; or the bounds of a number, which is
a whole number if they are."""
ARCHITECTURE: dict[str, Rule] = {
    "backbone": str,
    "bottleneck": (0, MAX_WIDTH),
    "dropout": (0.0, 0.99),
    "head_bias": bool,
    "head_norm": bool,
}
POSTERIOR: dict[str, Rule] = {
    "prior_precision": PRIORS,
    "count": (1, 1 << 50),
    "prior": ("number", "evidence", "weight-decay"),
    "damping": DAMPING,
    "features": (1, MAX_WIDTH),
    "bias": bool,
}


@dataclass(frozen=True)
class ModelConfig:
    """config.json after the checks."""

    kind: str
    architecture: JsonTable
    classes: tuple[str, ...]
    spec: InputSpec
    posterior: JsonTable
    temperature: float
    samples: int
    summary: JsonTable
    method: str
    unknown_rule: UnknownRule | None
    uncertainty: JsonTable
    """The kind of uncertainty in use, and its settings; the posterior ("kronecker") in folders that do not say."""
    confidence_temperature: float
    """1 in folders that do not say."""


@dataclass(frozen=True)
class MixtureConfig:
    """config.json of a mixture of several models after the checks. Each member has a folder."""

    classes: tuple[str, ...]
    shares: tuple[float, ...]
    method: str
    unknown_rule: UnknownRule | None
    summary: JsonTable
    confidence_temperature: float
    kind: str = "mixture"


class _Reader:
    """Reads typed fields from a table, and names a field that is wrong."""

    def __init__(self, values: object, file: Path, prefix: str = "") -> None:
        if not isinstance(values, dict):
            raise ArtifactError(f"{file}: {prefix.rstrip('.') or 'the file'} must be a table")
        self.values = values
        self.file = file
        self.prefix = prefix

    def fail(self, name: str, expected: str) -> ArtifactError:
        value = self.values.get(name)
        text = repr(value)
        if isinstance(value, (dict, list)):
            text = f"a {type(value).__name__} of {len(value)}"
        return ArtifactError(
            f"{self.file}: {self.prefix}{printable(name, 80)} must be {expected}; got {printable(text, 60)}"
        )

    def read(self, name: str, rule: Rule) -> Any:
        """The value of a field, if the rule allows it."""
        value = self.values.get(name)
        if rule is bool:
            expected = "true or false"
            valid = isinstance(value, bool)
        elif rule is str:
            expected = "a short text"
            valid = isinstance(value, str) and 0 < len(value) <= 200
        elif isinstance(rule, tuple) and isinstance(rule[0], str):
            expected = f"one of {', '.join(map(str, rule))}"
            valid = value in rule
        else:
            low, high = rule  # type: ignore[misc]
            kind = "whole number" if isinstance(low, int) else "number"
            expected = f"a {kind} from {low} to {high}"
            valid = is_number(value, low, high)
        if not valid:
            raise self.fail(name, expected)
        return value

    def read_all(self, rules: Mapping[str, Rule]) -> JsonTable:
        return {name: self.read(name, rule) for name, rule in rules.items()}

    def numbers(
        self, name: str, low: float, high: float, least: int, most: int
    ) -> tuple[float, ...]:
        """A list of this many numbers within bounds."""
        values: Any = self.values.get(name)
        valid = isinstance(values, list) and least <= len(values) <= most
        if not valid or not all(is_number(value, low, high) for value in values):
            count = str(least) if least == most else f"{least} to {most}"
            raise self.fail(name, f"{count} numbers from {low:g} to {high:g}")
        return tuple(map(float, values))

    def table(self, name: str) -> _Reader:
        return _Reader(self.values.get(name), self.file, f"{self.prefix}{name}.")

    def summary(self) -> JsonTable:
        """Nothing depends on the summary: one that is no table is left out."""
        value = self.values.get("summary")
        return value if isinstance(value, dict) else {}


@contextlib.contextmanager
def blaming(place: str) -> Iterator[None]:
    """Errors inside are those of a file, or of a field in it."""
    try:
        yield
    except (UsfanError, OverflowError, RecursionError) as error:
        raise ArtifactError(f"{place}: {printable(error, 600)}") from None


def is_number(value: object, low: float, high: float) -> bool:
    """Whether a value is a number within bounds; a whole one if the bounds are whole numbers."""
    types = (int,) if isinstance(low, int) else (int, float)
    return type(value) in types and low <= value <= high  # type: ignore[operator]


def parse_config(values: object, file: Path) -> ModelConfig | MixtureConfig:
    network = None
    if (
        isinstance(values, dict) and "model_type" in values
    ):  # a model of transformers, with ours inside
        if "usfan" not in values:
            raise ArtifactError(
                f"{file.parent} is a model of transformers without a posterior: usfan posterior fits one"
            )
        network = {name: value for name, value in values.items() if name != "usfan"}
        values = values["usfan"]
    reader = _Reader(values, file)
    reader.read("format", ("usfan",))
    version = reader.read("version", (1, 1_000_000))
    if version > 1:
        raise ArtifactError(
            f"{file}: version {version} is newer than this usfan reads (1): update usfan"
        )
    kind = reader.read("kind", ("source", "adapted", "mixture"))
    classes = read_classes(reader)
    if kind == "mixture":
        return read_mixture(reader, classes)
    is_adapted = kind == "adapted"
    most_draws = allowed(max(USUAL_DRAWS, MAX_DRAWS // len(classes)))
    return ModelConfig(
        kind,
        read_architecture(reader.table("architecture"), network),
        classes,
        read_spec(reader.table("input")),
        read_posterior_settings(reader.table("posterior")),
        reader.read("temperature", TEMPERATURES),
        reader.read("samples", (1, most_draws)),
        reader.summary(),
        reader.read("method", str) if is_adapted else "",
        read_rule(reader) if is_adapted else None,
        read_uncertainty_settings(reader),
        read_confidence_temperature(reader),
    )


def read_mixture(reader: _Reader, classes: tuple[str, ...]) -> MixtureConfig:
    shares = reader.numbers("shares", 0.0, 1.0, 2, MOST_SOURCES)
    if not abs(sum(shares) - 1) < 1e-3:
        raise reader.fail("shares", "numbers whose sum is 1")
    if reader.values.get("mixing") == "certainty":  # a folder of version 0.2
        raise reader.fail("mixing", "evidence: adapt the sources again")
    return MixtureConfig(
        classes,
        shares,
        reader.read("method", str),
        read_rule(reader),
        reader.summary(),
        read_confidence_temperature(reader),
    )


def read_confidence_temperature(reader: _Reader) -> float:
    name = "confidence_temperature"
    return float(reader.read(name, TEMPERATURES)) if name in reader.values else 1.0


def check_config(values: JsonTable, file: Path) -> None:
    """Checks a config before it is written, so that the reader will accept it. Tuples become lists."""
    parse_config(json.loads(json.dumps(values, default=str)), file)


def check_names(classes: Sequence[str]) -> None:
    """Check class names before a run that would store them."""
    for name in classes:
        if not is_name(name):
            raise DataError(
                f"the class name {printable(name, 80)} ({len(name)} characters) is not UTF-8, or longer than "
                f"{MAX_NAME}: rename its folder"
            )
    if len(classes) > MAX_CLASSES:
        raise DataError(f"{len(classes)} classes: the most is {MAX_CLASSES}")


def read_classes(reader: _Reader) -> tuple[str, ...]:
    names = reader.values.get("classes")
    if not isinstance(names, list) or not 2 <= len(names) <= MAX_CLASSES:
        raise reader.fail("classes", f"a list of 2 to {MAX_CLASSES} names")
    if not all(map(is_name, names)) or len(set(names)) != len(names):
        raise reader.fail("classes", "different, short names")
    return tuple(names)


def is_name(name: object) -> bool:
    """Whether it is a short text without a lone surrogate, which JSON can hold but no file or terminal accepts."""
    if not isinstance(name, str) or len(name) > MAX_NAME:
        return False
    return not any(0xD800 <= ord(c) <= 0xDFFF for c in name)


def read_architecture(reader: _Reader, network: JsonTable | None) -> JsonTable:
    """`network`: the config of a model of transformers."""
    if "module" in reader.values:
        optional = ["timm"] if "timm" in reader.values else []
        table = reader.read_all(dict.fromkeys(["module", "head", *optional], str))
        return table if network is None else {**table, "transformers": network}
    architecture = reader.read_all(ARCHITECTURE)
    if "pretrained" in reader.values:  # folders of version 0.1 do not say
        weights = None
        if reader.values["pretrained"] is not None:
            weights = reader.table("pretrained").read_all({"from": str, "hash": str})
        architecture["pretrained"] = weights
    return architecture


def read_rule(reader: _Reader) -> UnknownRule | None:
    stored = reader.values.get("unknown_rule")
    if stored is None:
        return None
    with blaming(f"{reader.file}: unknown_rule"):
        return UnknownRule.from_dict(stored)


def read_spec(reader: _Reader) -> InputSpec:
    channels = reader.read("channels", (1, 16))
    size = reader.read("size", (1, MAX_SIDE))
    return InputSpec(
        channels,
        size,
        reader.read("resize", (size, MAX_SIDE)),
        reader.numbers("mean", -1e6, 1e6, channels, channels),
        reader.numbers("std", 1e-6, 1e6, channels, channels),
        reader.read("augment", VIEWS),
        # folders of version 0.2 do not say
        reader.read("resampling", RESAMPLING) if "resampling" in reader.values else "bilinear",
    )


def read_uncertainty_settings(reader: _Reader) -> JsonTable:
    if "uncertainty" not in reader.values:
        return {"kind": KroneckerPosterior.kind}
    kinds = uncertainties_by_kind()
    table = reader.table("uncertainty")
    kind = table.read("kind", tuple(kinds))
    return {"kind": kind, **table.read_all(kinds[kind].stored_settings)}


def read_posterior_settings(reader: _Reader) -> JsonTable:
    settings = reader.read_all(POSTERIOR)
    settings["curvature"] = "sum"  # folders of version 0.2 do not say
    if "curvature" in reader.values:
        settings["curvature"] = reader.read("curvature", CURVATURE)
    settings["log_likelihood"] = None
    if reader.values.get("log_likelihood") is not None:
        settings["log_likelihood"] = reader.read("log_likelihood", (-1e300, 0.0))
    return settings
