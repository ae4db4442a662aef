"""One case of `startup`, in a process of its own: START WHAT STOP ARGUMENTS…; the last line of its output is @JSON."""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from typing import Any

START = float(sys.argv[1])
WHAT = sys.argv[2]
STOP = sys.argv[3]
result: dict[str, float] = {}


def reached(name: str) -> None:
    result.setdefault(name, time.monotonic() - START)


def cpu_seconds() -> float:
    parts = (
        resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    )
    return sum(p.ru_utime + p.ru_stime for p in parts)


def status(field: str) -> float:
    """MiB, from /proc."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(field)) / 1024


def leave() -> None:
    print("@" + json.dumps(result), flush=True)
    os._exit(0)


def adapt() -> None:
    import usfan.progress

    def watch(shown: Any) -> Any:
        def step(*_: Any) -> None:
            reached("step")
            leave()

        return step

    usfan.progress.step_progress = watch
    from usfan.adaptation.run import Adaptation
    from usfan.cli import main as cli
    from usfan.store.model import SourceModel

    plain_load = SourceModel.load
    plain_outputs = Adaptation.outputs

    def load(*arguments: Any, **options: Any) -> Any:
        source = plain_load(*arguments, **options)
        reached("model")
        return source

    def outputs(self: Any, *source: Any) -> Any:
        reached("pass")
        result.setdefault("cpu", cpu_seconds())
        if STOP == "pass":
            leave()
        return plain_outputs(self, *source)

    SourceModel.load = load  # type: ignore[method-assign]
    Adaptation.outputs = outputs  # type: ignore[method-assign]
    cli.main(sys.argv[4:])


def train() -> None:
    """To where the first step begins: imports, files, network, all images decoded; STOP step: to where it ends."""
    from usfan.cli import main as cli
    from usfan.engine.loop import Loop
    from usfan.training import source

    plain_backbone = source.create_backbone
    plain_step = Loop.step

    def backbone(*arguments: Any, **options: Any) -> Any:
        made = plain_backbone(*arguments, **options)
        reached("model")
        return made

    def step(self: Any, *batch: Any) -> Any:
        reached("begins")
        result.setdefault("cpu", cpu_seconds())
        if STOP == "step":
            plain_step(self, *batch)
            reached("step")
        leave()

    source.create_backbone = backbone
    Loop.step = step  # type: ignore[method-assign]
    cli.main(sys.argv[4:])


def over_images() -> None:
    """evaluate or predict, timed from where the model sees images to the end."""
    from usfan.cli import main as cli
    from usfan.store.model import SourceModel

    plain = SourceModel.predict_batches

    def batches(self: Any, *arguments: Any, **options: Any) -> Any:
        began = time.monotonic()
        cpu = cpu_seconds()
        images = 0
        for index, outputs in plain(self, *arguments, **options):
            images += len(index)
            yield index, outputs
        seconds = time.monotonic() - began
        result.update(seconds=seconds, busy=(cpu_seconds() - cpu) / seconds, images=images)

    SourceModel.predict_batches = batches  # type: ignore[method-assign]
    code = cli.main(sys.argv[4:])
    result["peak"] = status("VmHWM")
    if code == 0:
        leave()
    sys.exit(code)


def digits() -> None:
    """Peak memory of a stage on some digits, above what is there once everything is imported."""
    import timm  # noqa: F401
    import torch._dynamo  # noqa: F401

    import usfan.metrics.image_table  # noqa: F401
    from usfan.data.cache import open_store
    from usfan.study.digits import load_mnist5k
    from usfan.training.source import train_source
    from usfan.workflow import adapt_model as run_adaptation

    whole = load_mnist5k()  # sorted by class
    data = whole.subset(range(0, len(whole), len(whole) // int(sys.argv[4])))
    source = (
        None
        if STOP == "train"
        else train_source(
            whole.subset(range(0, len(whole), 50)), backbone="digits-cnn", epochs=1
        )
    )
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # begin the peak anew
    before = status("VmRSS")
    store = open_store(data, size=28, channels=1)
    made = (
        train_source(store, backbone="digits-cnn", epochs=1)
        if source is None
        else run_adaptation(source, store, epochs=1)
    )
    tensors = made.classifier.state_dict().values()
    held = store.values.numel() + sum(t.numel() * t.element_size() for t in tensors)
    result.update(peak=status("VmHWM") - before, held=held / 2**20)
    leave()


{
    "adapt": adapt,
    "train": train,
    "evaluate": over_images,
    "predict": over_images,
    "digits": digits,
}[WHAT]()
