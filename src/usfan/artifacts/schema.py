"""The fields of config.json, checked one by one: a stranger wrote the file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from usfan.budget import allowed
from usfan.config import MIXINGS, VIEWS
from usfan.config_checks import DROPOUT_RATES, MOST_MEMBERS, MOST_SOURCES, PRIORS, TEMPERATURES
from usfan.data.views import InputSpec
from usfan.errors import ArtifactError, ConfigError, DataError, shown

MAX_CLASSES = 100_000
MAX_WIDTH = 65_536
MAX_SIDE = 4_096
MAX_NAME = 1_000
MAX_DRAWS = 1 << 21
"""Draws × classes: what a prediction takes, in time and memory, grows with it."""
USUAL_DRAWS = 128
"""Draws that any number of classes may have."""


@dataclass(frozen=True)
class ModelConfig:
    """config.json after the checks."""

    kind: str
    architecture: dict[str, Any]
    classes: tuple[str, ...]
    spec: InputSpec
    posterior: dict[str, Any]
    temperature: float
    samples: int
    summary: dict[str, Any]
    method: str
    unknown_rule: dict[str, Any] | None
    uncertainty: dict[str, Any]
    """The kind of uncertainty in use, and its settings; the posterior ("kronecker") in folders that do not say."""


@dataclass(frozen=True)
class MixtureConfig:
    """config.json of a mixture of several models after the checks; its members lie in folders of their own."""

    classes: tuple[str, ...]
    mixing: str
    shares: tuple[float, ...]
    method: str
    unknown_rule: dict[str, Any] | None
    summary: dict[str, Any]
    kind: str = "mixture"


class _Reader:
    """Reads typed fields from a table, and names a field that is wrong."""

    def __init__(self, values: Any, file: Path, place: str = "") -> None:
        if not isinstance(values, dict):
            raise ArtifactError(f"{file}: {place.rstrip('.') or 'the file'} must be a table")
        self.values, self.file, self.place = values, file, place

    def fail(self, name: str, what: str) -> ArtifactError:
        value = self.values.get(name)
        got = f"a {type(value).__name__} of {len(value)}" if isinstance(value, (dict, list)) else repr(value)
        return ArtifactError(f"{self.file}: {self.place}{shown(name, 80)} must be {what}; got {shown(got, 60)}")

    def text(self, name: str, allowed: tuple[str, ...] | None = None) -> str:
        value = self.values.get(name)
        if not isinstance(value, str) or not value or len(value) > 200 or (allowed and value not in allowed):
            raise self.fail(name, f"one of {', '.join(allowed)}" if allowed else "a short text")
        return value

    def whole(self, name: str, low: int, high: int) -> int:
        value = self.values.get(name)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.fail(name, f"a whole number from {low} to {high}")
        return value

    def number(self, name: str, low: float, high: float) -> float:
        value = self.values.get(name)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
            raise self.fail(name, f"a number from {low} to {high}")
        return float(value)

    def flag(self, name: str) -> bool:
        value = self.values.get(name)
        if not isinstance(value, bool):
            raise self.fail(name, "true or false")
        return value

    def table(self, name: str) -> _Reader:
        return _Reader(self.values.get(name), self.file, f"{self.place}{name}.")


def parse_config(values: Any, file: Path) -> ModelConfig | MixtureConfig:
    reader = _Reader(values, file)
    reader.text("format", ("usfan",))
    version = reader.whole("version", 1, 1_000_000)
    if version > 1:
        raise ArtifactError(f"{file}: version {version} is newer than this usfan reads (1): update usfan")
    kind = reader.text("kind", ("source", "adapted", "mixture"))
    classes = read_classes(reader)
    if kind == "mixture":
        return read_mixture(reader, classes)
    spec = read_spec(reader.table("input"))
    posterior = read_settings(reader.table("posterior"))
    summary = values.get("summary")
    rule = read_rule_table(reader) if kind == "adapted" else None
    samples = reader.whole("samples", 1, most_draws(len(classes)))
    return ModelConfig(
        kind,
        read_architecture(reader.table("architecture")),
        classes,
        spec,
        posterior,
        reader.number("temperature", *TEMPERATURES),
        samples,
        summary if isinstance(summary, dict) else {},
        reader.text("method") if kind == "adapted" else "",
        rule,
        read_uncertainty(reader.table("uncertainty")) if "uncertainty" in values else {"kind": "kronecker"},
    )


def read_mixture(reader: _Reader, classes: tuple[str, ...]) -> MixtureConfig:
    shares, summary = reader.values.get("shares"), reader.values.get("summary")
    several = isinstance(shares, list) and 2 <= len(shares) <= MOST_SOURCES
    if not several or not all(type(v) in (int, float) and 0 <= v <= 1 for v in shares):  # type: ignore[union-attr]
        raise reader.fail("shares", f"2 to {MOST_SOURCES} numbers from 0 to 1, one for each member")
    if not abs(sum(shares) - 1) < 1e-3:  # type: ignore[arg-type]
        raise reader.fail("shares", "numbers whose sum is 1")
    return MixtureConfig(
        classes,
        reader.text("mixing", MIXINGS),
        tuple(float(v) for v in shares),  # type: ignore[union-attr]
        reader.text("method"),
        read_rule_table(reader),
        summary if isinstance(summary, dict) else {},
    )


def read_rule_table(reader: _Reader) -> dict[str, Any] | None:
    rule = reader.values.get("unknown_rule")
    if rule is not None and not isinstance(rule, dict):
        raise reader.fail("unknown_rule", "a table or null")
    return rule


def check_config(values: dict[str, Any], file: Path) -> None:
    """Checks a config before it is written, so that the reader will accept it. Tuples become lists."""
    parse_config(json.loads(json.dumps(values, default=str)), file)


def most_draws(classes: int) -> int:
    return allowed(max(USUAL_DRAWS, MAX_DRAWS // classes))


def check_draws(samples: int, classes: int) -> None:
    """Before a run that would store them."""
    if samples > most_draws(classes):
        raise ConfigError(f"samples must be at most {most_draws(classes)} for {classes} classes; got {samples}")


def check_names(classes: Sequence[str]) -> None:
    """Before a run that would store them."""
    for name in classes:
        if len(name) > MAX_NAME:
            raise DataError(f"a class name of {len(name)} characters ({shown(name, 40)}): the most is {MAX_NAME}")
        if not is_text(name):
            raise DataError(f"the class name {shown(name, 80)} is not UTF-8: rename its folder")
    if not len(classes) <= MAX_CLASSES:
        raise DataError(f"{len(classes)} classes: the most is {MAX_CLASSES}")


def read_classes(reader: _Reader) -> tuple[str, ...]:
    names = reader.values.get("classes")
    if not isinstance(names, list) or not 2 <= len(names) <= MAX_CLASSES or not all(isinstance(n, str) for n in names):
        raise reader.fail("classes", f"a list of 2 to {MAX_CLASSES} names")
    if len(set(names)) != len(names) or any(len(n) > MAX_NAME or not is_text(n) for n in names):
        raise reader.fail("classes", "different, short names")
    return tuple(names)


def is_text(name: str) -> bool:
    """Not a lone surrogate, which JSON can hold but no file or terminal accepts."""
    return not any(0xD800 <= ord(c) <= 0xDFFF for c in name)


def read_architecture(reader: _Reader) -> dict[str, Any]:
    if "module" in reader.values:
        more = {"timm": reader.text("timm")} if "timm" in reader.values else {}
        return {"module": reader.text("module"), "head": reader.text("head"), **more}
    weights = {}
    if "pretrained" in reader.values:  # folders of version 0.1 do not say
        given = reader.values["pretrained"]
        own = None if given is None else reader.table("pretrained")
        weights["pretrained"] = own and {name: own.text(name) for name in ("from", "hash")}
    return {
        **weights,
        "backbone": reader.text("backbone"),
        "bottleneck": reader.whole("bottleneck", 0, MAX_WIDTH),
        "dropout": reader.number("dropout", 0, 0.99),
        "head_bias": reader.flag("head_bias"),
        "head_norm": reader.flag("head_norm"),
    }


def read_spec(reader: _Reader) -> InputSpec:
    channels = reader.whole("channels", 1, 16)
    size = reader.whole("size", 1, MAX_SIDE)
    stats = []
    for name in ("mean", "std"):
        value = reader.values.get(name)
        numbers = isinstance(value, list) and len(value) == channels and all(type(v) in (int, float) for v in value)
        low = -1e6 if name == "mean" else 1e-6
        if not numbers or not all(low <= v <= 1e6 for v in value):  # type: ignore[union-attr]
            raise reader.fail(name, f"{channels} numbers from {low} to 1e6")
        stats.append(tuple(float(v) for v in value))  # type: ignore[union-attr]
    augment = reader.text("augment", VIEWS)
    spec = InputSpec(channels, size, reader.whole("resize", size, MAX_SIDE), stats[0], stats[1], augment)
    unknown = set(reader.values) - {f.name for f in fields(InputSpec)}
    if unknown:
        raise reader.fail(sorted(unknown)[0], "absent: this field is not known")
    return spec


def read_uncertainty(reader: _Reader) -> dict[str, Any]:
    kind = reader.text("kind", ("kronecker", "point", "mc-dropout", "ensemble"))
    if kind == "mc-dropout":
        return {"kind": kind, "rate": reader.number("rate", *DROPOUT_RATES)}
    return {"kind": kind} | ({"members": reader.whole("members", 2, MOST_MEMBERS)} if kind == "ensemble" else {})


def read_settings(reader: _Reader) -> dict[str, Any]:
    likelihood = reader.values.get("log_likelihood")
    if likelihood is not None:
        likelihood = reader.number("log_likelihood", -1e300, 0)
    return {
        "prior_precision": reader.number("prior_precision", *PRIORS),
        "count": reader.whole("count", 1, 1 << 50),
        "prior": reader.text("prior", ("number", "evidence", "weight-decay")),
        "damping": reader.text("damping", ("exact", "factored")),
        "log_likelihood": likelihood,
        "features": reader.whole("features", 1, MAX_WIDTH),
        "bias": reader.flag("bias"),
    }
