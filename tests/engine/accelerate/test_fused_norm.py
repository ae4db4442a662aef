"""BatchNorm in fused kernels: torch's own numbers, against float64, in triton's interpreter where there is no GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from usfan.engine.accelerate.fused_norm import (
    FusedNorm,
    fuse_norms,
    fused_kind,
    kernels_run,
    worth_fusing,
)
from usfan.engine.accelerate.layers import plain_layers


def test_kernels_against_float64() -> None:
    """In a process of its own: triton is an interpreter from the start, or never."""
    pytest.importorskip("triton", reason="needs triton")
    worker = Path(__file__).with_name("fused_norm_worker.py")
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    environment = os.environ | ({} if kind == "cuda" else {"TRITON_INTERPRET": "1"})
    done = subprocess.run(
        [sys.executable, worker, kind],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("agrees") == 14


class Net(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.BatchNorm2d(8, affine=False)
        )


def test_layers_change_their_class_and_back() -> None:
    net = Net()
    kinds = [type(layer) for layer in Net()]
    assert [worth_fusing(layer) for layer in net] == [False, True, False, False]
    net[1].__class__ = fused_kind(nn.BatchNorm2d)
    assert isinstance(net[1], FusedNorm)
    assert net.state_dict().keys() == Net().state_dict().keys()
    plain_layers(net)
    assert [type(layer) for layer in net] == kinds


class OwnNorm(nn.BatchNorm2d):
    """A foreign kind with its own forward."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(inputs)


def test_kinds_that_may_do_anything_stay() -> None:
    OwnNorm.__name__ = "BatchNorm2d"
    assert not worth_fusing(OwnNorm(8))
    assert not worth_fusing(nn.SyncBatchNorm(8))
    assert not worth_fusing(nn.BatchNorm2d(8, momentum=None))
    assert not worth_fusing(nn.BatchNorm2d(8).half())


def test_elsewhere_than_on_a_gpu_it_is_torch() -> None:
    torch.manual_seed(0)
    images = torch.randn(4, 3, 6, 6).contiguous(memory_format=torch.channels_last)
    net = Net()
    expected = net(images)
    net[1].__class__ = fused_kind(nn.BatchNorm2d)
    assert torch.equal(net(images), expected)


def test_where_kernels_do_not_run_layers_stay(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU without the interpreter they cannot be launched."""
    monkeypatch.setattr(
        "usfan.engine.accelerate.fused_norm.kernels_run", kernels_run.__wrapped__
    )
    net = Net()
    fuse_norms(net, torch.device("cpu"))
    assert type(net[1]) is nn.BatchNorm2d
    assert "costs speed only" in caplog.text
