"""A model folder from a stranger: every damage is one `ArtifactError` that names the file and the field."""

from __future__ import annotations

import resource
import time

import pytest

from usfan.store import model_folder as artifact
from usfan.store.model import SourceModel

HUGE = 10**400


@pytest.mark.parametrize("name", artifact.FILES)
def test_a_missing_file(refuse, folder, name):
    (folder / name).unlink()
    refuse(folder, str(folder), f"no {name} in it")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "not json",
        '{"format": "usfan"',
        "\ufeff{}",
        "[" * 100_000,
        '{"summary": ' * 50_000,
        '{"version": ' + "9" * 10_000 + "}",
    ],
)
def test_a_config_that_is_not_json(refuse, folder, text):
    (folder / "config.json").write_text(text, encoding="utf-8")
    refuse(folder, "config.json", "not readable as JSON")


@pytest.mark.parametrize("content", ["[]", "3", "null", '"usfan"'])
def test_a_config_that_is_no_table(refuse, folder, content):
    (folder / "config.json").write_text(content)
    refuse(folder, "config.json: the file must be a table")


def test_a_config_that_is_too_large(refuse, folder):
    with open(folder / "config.json", "a") as file:
        file.write(" " * (artifact.MAX_CONFIG_BYTES + 1))
    refuse(folder, "config.json: larger than 16,777,216 bytes")


def test_a_config_of_other_bytes(refuse, folder):
    (folder / "config.json").write_bytes(b"\xff\xfe\x00{")
    refuse(folder, "config.json", "not readable as JSON")


@pytest.mark.parametrize(
    "place",
    ["classes", "unknown_rule", "input.mean", "input", "method", "architecture.backbone"],
)
def test_deep_nesting(refuse, folder, edit_config, place):
    """Wherever on the way through the config the limit of recursion strikes, it is an `ArtifactError`."""
    edit_config("kind", "adapted")
    edit_config("method", "u-sfan")
    edit_config(place, "HERE")
    text = (folder / "config.json").read_text()
    for depth in (10, 500, *range(850, 1000, 10), 5000):
        (folder / "config.json").write_text(
            text.replace('"HERE"', '{"score":' * depth + "1" + "}" * depth)
        )
        refuse(folder, "config.json")


FIELDS = [
    ("format", "other", "format must be one of usfan"),
    ("format", ..., "format must be one of usfan"),
    ("version", 2, "version 2 is newer than this usfan reads (1): update usfan"),
    ("version", "1", "version must be a whole number"),
    ("version", True, "version must be a whole number"),
    ("kind", "other", "kind must be one of source, adapted"),
    ("kind", "adapted", "method must be a short text"),
    ("classes", ..., "classes must be a list of 2"),
    ("classes", ["a"], "classes must be a list of 2"),
    ("classes", ["a", "b", 3], "classes must be different, short names"),
    ("classes", ["a", "b", "b"], "classes must be different, short names"),
    ("classes", ["a", "b", "c" * 2000], "classes must be different, short names"),
    ("classes", ["a", "b", "\ud800"], "classes must be different, short names"),
    ("temperature", 0, "temperature must be a number"),
    ("temperature", float("nan"), "temperature must be a number"),
    ("temperature", HUGE, "temperature must be a number"),
    ("samples", 0, "samples must be a whole number"),
    ("samples", 1 << 24, "samples must be a whole number"),
    ("samples", 1.5, "samples must be a whole number"),
    ("input", ..., "input must be a table"),
    ("input.channels", 99, "input.channels must be a whole number from 1 to 16"),
    ("input.size", -1, "input.size must be a whole number"),
    ("input.size", HUGE, "input.size must be a whole number"),
    ("input.size", 3, "input: 1×3×3 images do not fit the network"),
    ("input.size", 20, "input: 1×20×20 images do not fit the network"),
    ("input.resize", 27, "input.resize must be a whole number from 28"),
    ("input.mean", [0.5, 0.5], "input.mean must be 1 numbers"),
    ("input.mean", [HUGE], "input.mean must be 1 numbers"),
    ("input.mean", [float("nan")], "input.mean must be 1 numbers"),
    ("input.mean", "0.5", "input.mean must be 1 numbers"),
    ("input.std", [0.0], "input.std must be 1 numbers"),
    ("input.std", [True], "input.std must be 1 numbers"),
    ("input.augment", "cutmix", "input.augment must be one of"),
    ("posterior.prior_precision", 0.0, "posterior.prior_precision must be a number"),
    ("posterior.prior_precision", -1.0, "posterior.prior_precision must be a number"),
    ("posterior.prior_precision", float("inf"), "posterior.prior_precision must be a number"),
    ("posterior.prior", "guess", "posterior.prior must be one of"),
    ("posterior.damping", "none", "posterior.damping must be one of exact, factored"),
    ("posterior.count", 0, "posterior.count must be a whole number"),
    ("posterior.log_likelihood", 5.0, "posterior.log_likelihood must be a number"),
    ("posterior.features", 9, "are (3, 9, True), those of the network (3, 8, True)"),
    ("posterior.bias", False, "are (3, 8, False), those of the network (3, 8, True)"),
    ("posterior.bias", 1, "posterior.bias must be true or false"),
    ("architecture", ["resnet18"], "architecture must be a table"),
    (
        "architecture.backbone",
        "resnet81",
        "architecture: unknown backbone 'resnet81': did you mean resnet",
    ),
    (
        "architecture.backbone",
        "resnet18.x://y",
        "architecture: backbone 'resnet18.x://y': timm cannot make it",
    ),
    ("architecture.backbone", "lenet", "model.safetensors: "),
    ("architecture.backbone", "x" * 300, "architecture.backbone must be a short text"),
    ("architecture.bottleneck", -1, "architecture.bottleneck must be a whole number"),
    (
        "architecture.bottleneck",
        9,
        "'bottleneck.0.weight' has shape (8, 576), expected (9, 576)",
    ),
    (
        "architecture.bottleneck",
        0,
        "'head.parametrizations.weight.original1' has shape (3, 8), expected (3, 576)",
    ),
    ("architecture.dropout", 1.0, "architecture.dropout must be a number"),
    ("architecture.head_bias", False, "model.safetensors: unexpected tensor 'head.bias'"),
    ("architecture.head_norm", False, "model.safetensors: tensor 'head.weight' is missing"),
    ("architecture.module", "Net", "architecture.head must be a short text"),
]


@pytest.mark.parametrize(("place", "value", "said"), FIELDS)
def test_a_field_that_is_off(refuse, folder, edit_config, place, value, said):
    edit_config(place, value)
    refuse(folder, str(folder), said)


@pytest.mark.parametrize(
    "rule",
    [
        3,
        {},
        {"score": "x", "threshold": 1},
        {"score": "entropy", "threshold": "1"},
        {"score": "entropy", "threshold": HUGE},
        {"score": "entropy", "threshold": float("nan")},
    ],
)
def test_an_unknown_rule_that_is_off(refuse, folder, edit_config, rule):
    edit_config("kind", "adapted")
    edit_config("method", "u-sfan")
    edit_config("unknown_rule", rule)
    refuse(folder, "config.json", "unknown_rule")


def test_other_tables_of_classes(refuse, folder, edit_config):
    edit_config("classes", ["a", "b"])
    refuse(folder, "model.safetensors", "'head.bias' has shape (3,), expected (2,)")
    edit_config("classes", [str(i) for i in range(100_000)])
    edit_config("samples", 200)
    refuse(folder, "samples must be a whole number from 1 to 128")


def test_a_large_config_allocates_nothing(refuse, folder, edit_config):
    """100,000 classes and a bottleneck of 65,536 would be 26 GB; the header is compared before they are made."""
    edit_config("classes", [str(i) for i in range(100_000)])
    edit_config("samples", 16)
    edit_config("architecture.bottleneck", 65_536)
    edit_config("posterior.features", 65_536)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started = time.process_time()
    refuse(folder, "model.safetensors", "bottleneck.0.weight", "expected (65536, 576)")
    assert time.process_time() - started < 2
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) < 200_000  # KiB


def test_a_folder_in_place_of_a_file(refuse, folder):
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").mkdir()
    refuse(folder, "model.safetensors: a folder, not a regular file")


def test_an_untouched_folder_loads(folder, edit_config, edit_tensors):
    """So that the refusals above are for the damage, not for the way it is done."""
    edit_config("temperature", 0.5)
    edit_tensors("model", lambda t: None)
    edit_tensors("posterior", lambda t: None)
    assert SourceModel.load(folder).temperature == 0.5
