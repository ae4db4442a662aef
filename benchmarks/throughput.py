"""Images per second of stage 2 on a GPU, real JPEGs: ours, its ingredients switched off in turn, the plain recipe.

`python benchmarks/run.py throughput --data FOLDER [--backbones resnet50 …]`. A case is timed over three epochs in the
steady state, views and refreshes included; decoding, compiling and warming up are rows of their own.
The ceiling is the same step on a batch that is already there: no views, no weights, no refresh.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from typing import Any

import torch

from measure import Row
from stage_2 import opened, refresh
from usfan.adaptation.run import Adaptation
from usfan.config import RuntimeConfig
from usfan.data.cache import open_store
from usfan.data.sources import ImageData
from usfan.data.store import Store
from usfan.engine.runtime import Runtime, start_runtime
from usfan.store.model import SourceModel
from usfan.training.source import train_source

SETTINGS: dict[str, Any] = {
    "data": None,
    "backbones": ["resnet50", "tf_efficientnet_lite0"],
    "weights": "auto",
}
TIMED_EPOCHS = 3


def fix_batch(run: Adaptation) -> None:
    """The bare step: the same batch every time, no views."""
    spec = run.source.spec
    shape = (run.plan.config.batch_size, spec.channels, spec.size, spec.size)
    fixed = torch.randn(shape, device=run.runtime.device).contiguous(
        memory_format=torch.channels_last
    )
    run.loop.feeder.view = lambda samples, staged=None, compiled=False: fixed  # type: ignore[method-assign]


def suite() -> Iterator[Row]:
    if not torch.cuda.is_available() or SETTINGS["data"] is None:
        yield Row(
            "throughput",
            "not run",
            None,
            "",
            note="needs a GPU and --data FOLDER of class folders",
        )
        return
    graph = start_runtime(RuntimeConfig(compile="graph"))
    data = ImageData(SETTINGS["data"])
    began = time.perf_counter()
    store = open_store(data, size=256, device=graph.device)
    torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    yield Row(
        "decode once",
        "CPU, all cores",
        len(data) / seconds,
        "images/s",
        note=f"{len(data)} JPEGs, {seconds:.1f} s",
    )
    for backbone in SETTINGS["backbones"]:
        yield from of_backbone(backbone, data, store, graph)


def of_backbone(backbone: str, data: ImageData, store: Store, graph: Runtime) -> Iterator[Row]:
    weights = SETTINGS["weights"] if "lite" in backbone else "none"
    source = train_source(
        store, backbone=backbone, pretrained=weights, tune="all", epochs=1, runtime=graph
    )
    plain, _, _ = plain_recipe(source, data)
    yield Row(
        backbone, "plain recipe: PIL, DataLoader, TF32, eager", plain, "images/s", ratio=1.0
    )
    compiled, eager = (dataclasses.replace(graph, compile=c) for c in ("on", "off"))
    top, _, warm = steady(source, store, compiled, "shot-im", bare=True)
    yield Row(
        backbone, "ceiling: the compiled, captured step alone", top, "images/s", top / plain
    )
    yield Row(backbone, "compile and warm up", warm, "s")
    least = 3.0 if backbone == "resnet50" else None
    cases: list[tuple[str, Runtime, str, dict[str, Any]]] = [
        ("u-sfan", compiled, "u-sfan", {}),
        ("shot-im", compiled, "shot-im", {}),
        ("shot", compiled, "shot", {}),
        ("u-sfan, weights every step", compiled, "u-sfan", {"refresh": "step"}),
        ("shot-im without compile", graph, "shot-im", {}),
        ("u-sfan without compile", graph, "u-sfan", {}),
        ("u-sfan without compile and capture", eager, "u-sfan", {}),
    ]
    if least:  # a network with depthwise convolutions takes half a minute to set up for another type or layout
        cases.append(
            (
                "u-sfan, captured, float32 (TF32)",
                dataclasses.replace(graph, precision="32"),
                "u-sfan",
                {},
            )
        )
    for name, runtime, method, settings in cases:
        speed, memory, _ = steady(source, store, runtime, method, **settings)
        wanted = least if name == "u-sfan" else None
        note = f"{100 * speed / top:.0f} % of the ceiling, peak {memory:.1f} GB"
        yield Row(backbone, name, speed, "images/s", speed / plain, wanted=wanted, note=note)


def steady(
    source: SourceModel,
    store: Store,
    runtime: Runtime,
    method: str,
    *,
    bare: bool = False,
    **settings: Any,
) -> tuple[float, float, float]:
    """Images per second in the steady state, peak gigabytes, and seconds of the first epoch. `bare`: the step alone, no
    views and no refreshes."""
    torch.cuda.reset_peak_memory_stats()
    unlabelled = dataclasses.replace(store, labels=None, classes=None)
    with opened(source, unlabelled, runtime, method=method, **settings) as run:
        if bare:
            fix_batch(run)
        began = time.perf_counter()
        outputs = refresh(run, 0)
        run.train_epoch(0, outputs)
        torch.cuda.synchronize()
        warm = time.perf_counter() - began
        began = time.perf_counter()
        for epoch in range(1, 1 + TIMED_EPOCHS):
            run.train_epoch(epoch, outputs if bare else refresh(run, epoch))
        torch.cuda.synchronize()
        seconds = time.perf_counter() - began
        images = TIMED_EPOCHS * run.loop.batches * run.plan.config.batch_size
    return images / seconds, torch.cuda.max_memory_allocated() / 1e9, warm


def plain_recipe(
    source: SourceModel, data: ImageData, steps: int = 40
) -> tuple[float, float, float]:
    """What a plain program does for SHOT-IM: PIL and a DataLoader, TF32, eager SGD. Images per second."""
    import copy
    import os

    from torch.utils.data import DataLoader
    from torchvision.datasets import ImageFolder
    from torchvision.transforms import v2

    spec = source.spec
    view = v2.Compose(
        [
            v2.Resize((spec.resize, spec.resize)),
            v2.RandomCrop(spec.size),
            v2.RandomHorizontalFlip(),
            v2.PILToTensor(),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize(spec.mean, spec.std),
        ]
    )
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    net = (
        copy.deepcopy(source.classifier)
        .cuda()
        .to(memory_format=torch.contiguous_format)
        .train()
    )
    sgd = torch.optim.SGD(
        net.parameters(), lr=1e-3, momentum=0.9, nesterov=True, weight_decay=1e-3
    )
    workers = max(1, (os.cpu_count() or 2) - 2)
    loader = DataLoader(
        ImageFolder(SETTINGS["data"], view),
        64,
        shuffle=True,
        num_workers=workers,
        drop_last=True,
    )
    done = 0
    began = time.perf_counter()
    warm = 0.0
    for images, _ in loader:
        probs = net(images.cuda())[1].softmax(dim=1)
        entropy = -(probs * torch.log(probs + 1e-5)).sum(dim=1).mean()
        mean = probs.mean(dim=0)
        loss = entropy + (mean * torch.log(mean + 1e-5)).sum()
        sgd.zero_grad()
        loss.backward()
        sgd.step()
        done += 1
        if done == 5:
            torch.cuda.synchronize()
            warm = time.perf_counter() - began
            began = time.perf_counter()
        if done == steps:
            break
    torch.cuda.synchronize()
    return 64 * (done - 5) / (time.perf_counter() - began), 0.0, warm
