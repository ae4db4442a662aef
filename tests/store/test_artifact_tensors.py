"""Files of tensors from a stranger: wrong names, shapes, types and values, and files that are none."""

from __future__ import annotations

import json

import pytest
import torch

from tiny_models import tiny_model


def setting(name, value):
    return lambda tensors: tensors.update({name: value})


def spoiling(name, value, at=0):
    return lambda tensors: tensors[name].view(-1).__setitem__(at, value)


def overflowing():
    """9×9 finite values whose products are infinite, and cancel to NaN."""
    return 3e38 * (1 - 2 * (torch.arange(81) % 2)).view(9, 9).cumprod(dim=1).float()


BAD_TENSORS = [
    ("model", lambda t: t.pop("head.bias"), "tensor 'head.bias' is missing"),
    ("model", setting("extra", torch.zeros(1)), "unexpected tensor 'extra'"),
    (
        "model",
        setting("head.bias", torch.zeros(4)),
        "'head.bias' has shape (4,), expected (3,)",
    ),
    (
        "model",
        setting("head.bias", torch.zeros(3).double()),
        "'head.bias' has type F64, expected torch.float32",
    ),
    ("model", setting("head.bias", torch.zeros(3).long()), "'head.bias' has type I64"),
    (
        "model",
        spoiling("backbone.0.weight", float("nan"), 5),
        "'backbone.0.weight' holds NaN or infinity",
    ),
    (
        "model",
        spoiling("backbone.0.weight", float("inf")),
        "'backbone.0.weight' holds NaN or infinity",
    ),
    (
        "model",
        spoiling("backbone.1.running_var", -1.0),
        "'backbone.1.running_var' holds a negative variance",
    ),
    ("posterior", lambda t: t.pop("weight"), "tensor 'weight' is missing"),
    ("posterior", setting("sample", torch.zeros(1, 28, 28)), "unexpected tensor 'sample'"),
    (
        "posterior",
        setting("class_vectors", torch.zeros(3, 4)),
        "'class_vectors' has shape (3, 4), expected (3, 3)",
    ),
    (
        "posterior",
        lambda t: t.update(bias=t["bias"].half()),
        "'bias' has type F16, expected torch.float32",
    ),
    (
        "posterior",
        spoiling("class_values", float("nan")),
        "'class_values' holds NaN or infinity",
    ),
    (
        "posterior",
        spoiling("class_values", -1.0),
        "'class_values' must be non-negative and ascending",
    ),
    (
        "posterior",
        lambda t: t.update(feature_values=t["feature_values"].flip(0)),
        "'feature_values' must be non-negative",
    ),
    (
        "posterior",
        lambda t: t["class_vectors"].mul_(1.1),
        "'class_vectors' is not an orthonormal basis",
    ),
    (
        "posterior",
        spoiling("feature_vectors", 1.5),
        "'feature_vectors' is not an orthonormal basis",
    ),
    (
        "posterior",
        lambda t: t["feature_vectors"].copy_(overflowing()),
        "'feature_vectors' is not an orthonormal basis",
    ),
    (
        "posterior",
        lambda t: t["weight"].add_(0.1),
        "'weight' is not that of the model's last layer",
    ),
    (
        "posterior",
        lambda t: t["bias"].add_(0.1),
        "'bias' is not that of the model's last layer",
    ),
]


@pytest.mark.parametrize(("file", "change", "said"), BAD_TENSORS)
def test_tensors_that_are_off(refuse, folder, edit_tensors, file, change, said):
    edit_tensors(file, change)
    refuse(folder, f"{folder}/{file}.safetensors", said)


@pytest.mark.parametrize("file", ["model", "posterior"])
@pytest.mark.parametrize("size", [0, 7, 8, 100, -100, -1])
def test_a_truncated_file(refuse, folder, file, size):
    path = folder / f"{file}.safetensors"
    path.write_bytes(path.read_bytes()[:size])
    refuse(folder, f"{file}.safetensors", "not readable as safetensors")


@pytest.mark.parametrize("length", [(1 << 64) - 1, 1 << 40, 90 << 20, 9 << 20])
def test_a_huge_header(refuse, folder, length):
    path = folder / "model.safetensors"
    with open(path, "r+b") as file:
        file.write(length.to_bytes(8, "little"))
        file.truncate(10 << 20)  # sparse: there is something to read
    refuse(folder, "model.safetensors", f"its header would have {length} bytes")


def test_a_header_that_claims_more_than_there_is(refuse, folder):
    """1 KB that names a tensor of 40 GB."""
    header = json.dumps(
        {
            "x": {
                "dtype": "F32",
                "shape": [100_000, 100_000],
                "data_offsets": [0, 40_000_000_000],
            }
        }
    )
    (folder / "posterior.safetensors").write_bytes(
        len(header).to_bytes(8, "little") + header.encode() + b"\0" * 900
    )
    refuse(folder, "posterior.safetensors", "not readable as safetensors")


def test_swapped_files(refuse, folder, tmp_path):
    model = folder / "model.safetensors"
    posterior = folder / "posterior.safetensors"
    first = model.read_bytes()
    second = posterior.read_bytes()
    model.write_bytes(second)
    posterior.write_bytes(first)
    refuse(folder, "model.safetensors", "is missing")
    other = tiny_model(seed=1).save(tmp_path / "other")
    model.write_bytes(first)
    posterior.write_bytes((other / "posterior.safetensors").read_bytes())
    refuse(folder, "posterior.safetensors", "the files do not belong together")
