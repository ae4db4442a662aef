"""A network in OpenVINO, on a CPU: one picture per request, as many requests at a time as OpenVINO finds best.

A picture goes alone, so its features do not depend on its neighbours in a batch. Importing OpenVINO sends an event to
its makers unless its telemetry is missing: here it is.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
import threading
import warnings
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from usfan.data.views import InputSpec, centre, normalise
from usfan.models.backbones import network_key, weights_hash
from usfan.threads import threads_for

MOST_KEPT = 2
"""Converted networks that stay in memory: the model and its witness, which are often one."""
NAMES = {"bf16": "bf16", "32": "f32"}
TELEMETRY = "openvino_telemetry"

_kept: dict[tuple[object, ...], OpenVinoPass] = {}
_graphs: dict[tuple[object, ...], Any] = {}
"""The last network that was traced: it may be compiled for another precision."""
_lock = threading.Lock()


def is_installed() -> bool:
    return importlib.util.find_spec("openvino") is not None


def load() -> ModuleType:
    """OpenVINO, without its telemetry."""
    if "openvino" not in sys.modules:
        telemetry = sys.modules.pop(TELEMETRY, None)
        sys.modules[TELEMETRY] = None  # type: ignore[assignment]  # as if it were not installed
        try:
            importlib.import_module("openvino")
        finally:
            del sys.modules[TELEMETRY]
            if telemetry is not None:
                sys.modules[TELEMETRY] = telemetry
    return sys.modules["openvino"]


@functools.cache
def precisions() -> tuple[str, ...]:
    """Those that this processor computes in, the fastest first."""
    abilities = load().Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    return ("bf16", "32") if "BF16" in abilities else ("32",)


class NormalisedBackbone(nn.Module):
    """Takes bytes."""

    def __init__(self, backbone: nn.Module, spec: InputSpec) -> None:
        super().__init__()
        self.backbone = backbone
        self.spec = spec

    def forward(self, pictures: Tensor) -> Tensor:
        features: Tensor = self.backbone(normalise(pictures, self.spec))
        return features


class OpenVinoPass:
    """Features of pictures, by a compiled network."""

    def __init__(self, compiled: Any, spec: InputSpec) -> None:
        self.spec = spec
        self.width = compiled.output(0).shape[1]
        self.queue = load().AsyncInferQueue(compiled)
        self.queue.set_callback(keep)
        self.lock = threading.Lock()

    def __call__(self, pictures: Tensor) -> Tensor:
        features = torch.empty(len(pictures), self.width)
        with self.lock:
            for number, picture in enumerate(centre(pictures, self.spec.size).split(1)):
                self.queue.start_async([picture.numpy(force=True).copy()], features[number])
            self.queue.wait_all()
        return features


def keep(request: Any, row: Tensor) -> None:
    """The features of a finished request."""
    row.copy_(torch.from_numpy(request.get_output_tensor(0).data[0]))


def converted(
    backbone: nn.Module, spec: InputSpec, precision: str, threads: int
) -> tuple[OpenVinoPass, bool]:
    """The network in OpenVINO, and whether it was converted just now."""
    with _lock, threads_for(0):  # on a picture at a time, threads would wait for each other
        network = conversion_key(backbone, spec)
        key = (network, precision, threads)
        fast = _kept.pop(key, None)
        is_new = fast is None
        if fast is None:
            if network not in _graphs:
                _graphs.clear()
                _graphs[network] = traced(backbone, spec)
            fast = compiled(_graphs[network], spec, precision, threads)
        _kept[key] = fast
        for oldest in list(_kept)[:-MOST_KEPT]:
            del _kept[oldest]
    return fast, is_new


@torch.no_grad()
def conversion_key(backbone: nn.Module, spec: InputSpec) -> tuple[object, ...]:
    """Names what a conversion depends on: the weights, the layers, the input, and what the network, in test mode, makes
    of a picture of noise. Two modules of one network share a conversion; two that differ only in `forward` do not."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randint(256, (1, *spec.shape), dtype=torch.uint8, generator=generator)
    features = NormalisedBackbone(backbone, spec)(noise)
    return (weights_hash(backbone), *network_key(backbone, features), spec)


def convert(backbone: nn.Module, spec: InputSpec, precision: str, threads: int) -> OpenVinoPass:
    return compiled(traced(backbone, spec), spec, precision, threads)


@torch.no_grad()
def traced(backbone: nn.Module, spec: InputSpec) -> Any:
    """What the network does with one picture, as OpenVINO's graph. The weights are copied."""
    load()
    from openvino.frontend import FrontEndManager
    from openvino.frontend.pytorch.ts_decoder import TorchScriptPythonDecoder

    example = torch.zeros(1, *spec.shape, dtype=torch.uint8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # tracing is deprecated; nothing else is as fast
        trace = torch.jit.trace(
            NormalisedBackbone(backbone, spec).eval(), example, check_trace=False
        )
        decoder = TorchScriptPythonDecoder(trace, shared_memory=False)
        frontend = FrontEndManager().load_by_framework("pytorch")
        graph = frontend.convert(frontend.load(decoder))
    graph.reshape(list(example.shape))
    return graph


def compiled(graph: Any, spec: InputSpec, precision: str, threads: int) -> OpenVinoPass:
    settings = {
        "PERFORMANCE_HINT": "THROUGHPUT",
        "INFERENCE_PRECISION_HINT": NAMES[precision],
        "INFERENCE_NUM_THREADS": threads,
        "ENABLE_CPU_PINNING": False,  # other programs use the cores too
    }
    return OpenVinoPass(load().Core().compile_model(graph, "CPU", settings), spec)
