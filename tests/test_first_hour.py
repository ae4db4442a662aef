"""What hurt in a new user's first hour: own models, own data, defaults. Each at the edge where it was seen."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import usfan
from usfan.errors import ConfigError, naming_flags, option

GREY = usfan.InputSpec(1, 16, 16, (0.5,), (0.5,), "none")


def grey_images(count: int = 30) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (count, 16, 16), dtype=np.uint8)


@pytest.fixture(scope="module")
def grey_model():
    """A classifier of one-channel images, from a plain torch module."""
    torch.manual_seed(0)
    module = nn.Sequential(
        nn.Conv2d(1, 4, 3, stride=4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3)
    )
    data = usfan.ImageData(grey_images(), labels=[0, 1, 2] * 10)
    return usfan.attach_posterior(module, data, spec=GREY, progress=False)


def test_without_a_witness_auto_is_u_sfan(grey_model):
    options = {"epochs": 1, "progress": False, "device": "cpu"}
    assert usfan.adapt(grey_model, grey_images(), **options).method == "u-sfan"
    with pytest.raises(ConfigError, match=r'witness="NAME", or choose method="u-sfan\+"'):
        usfan.adapt(grey_model, grey_images(), "u-sfan++", **options)


def test_a_setting_is_named_as_the_user_writes_it():
    cases = {
        ("witness", "none"): ('witness="none"', "--witness none"),
        ("open_set", True): ("open_set=True", "--open-set"),
        ("guard", False): ("guard=False", "--guard off"),
        ("epochs", 3): ("epochs=3", "--epochs 3"),
        ("run", None): ("run=", "--out"),
        ("workers", 0): ('runtime={"workers": 0}', "--workers 0"),
    }
    for setting, (argument, flag) in cases.items():
        assert option(*setting) == argument
        with naming_flags():
            assert option(*setting) == flag
