"""On a GPU: the steps of every method can be captured, and captured steps are eager steps."""

from __future__ import annotations

import logging

import pytest
import torch
from process_worker import CLASSES, pictures

from usfan.adaptation.methods import METHODS
from usfan.config import RuntimeConfig
from usfan.data.store import Store
from usfan.engine.runtime import Runtime, start_runtime
from usfan.engine.stepper import Stepper
from usfan.store.model import SourceModel
from usfan.training.source import train_source
from usfan.workflow import adapt_model as adapt

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
TRAINED = [name for name, row in METHODS.items() if row.terms and not row.needs_witness]


def exact(compile: str) -> Runtime:
    """Without TF32, which rounds by the algorithm chosen: that differs between the paths."""
    engine = start_runtime(RuntimeConfig(device="cuda", precision="32", compile=compile))
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    torch.backends.cudnn.fp32_precision = "ieee"
    return engine


def store(seed: int, shift: int) -> Store:
    pixels, labels = pictures(157, seed, shift)
    return Store(
        pixels.cuda(), torch.arange(157), labels, tuple(str(k) for k in range(CLASSES))
    )


@pytest.fixture(scope="module")
def source() -> SourceModel:
    settings = {
        "backbone": "smooth",
        "epochs": 4,
        "batch_size": 32,
        "bottleneck": 16,
        "augment": "none",
    }
    return train_source(store(0, 0), runtime=exact("off"), **settings)


@pytest.mark.parametrize("method", TRAINED)
def test_captured_steps_are_eager_steps(method, source, caplog, monkeypatch):
    """Ten steps: three to warm up, then captured."""
    captured = []
    plain = Stepper._record

    def record(self, inputs):
        result = plain(self, inputs)
        captured.extend(self.graphs)
        return result

    monkeypatch.setattr(Stepper, "_record", record)
    runs = []
    with caplog.at_level(logging.WARNING):
        for compile in ("off", "graph"):
            assert captured == []
            settings = {"guard": False, "epochs": 2, "batch_size": 32, "lr": 1e-3}
            runs.append(adapt(source, store(1, 3), method, runtime=exact(compile), **settings))
    assert 32 in captured
    assert "could not be captured" not in caplog.text
    eager, fast = (run.classifier.state_dict() for run in runs)
    for name in eager:
        torch.testing.assert_close(
            fast[name],
            eager[name],
            rtol=1e-3,
            atol=1e-4,
            msg=lambda text, n=name: f"{n}: {text}",
        )
