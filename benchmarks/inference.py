"""Images per second of a frozen network on a CPU, by engine; and JPEGs decoded whole, or at a part of their size.

All engines take turns, so that other load on the machine meets each of them. Views are given: decoding is left out.
"""

from __future__ import annotations

import io
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from measure import Row
from usfan.data.decoding.decode import decode_bytes, planes, squared
from usfan.data.views import InputSpec
from usfan.engine.inference import BackboneAlone, torch_pass
from usfan.engine.openvino_pass import convert, is_installed, precisions
from usfan.engine.runtime import Runtime, keep_freed_memory
from usfan.files import write_json
from usfan.models.backbones import create_backbone

NETWORKS = (
    "tf_efficientnet_lite0",
    "tf_efficientnet_lite2",
    "resnet50",
    "vit_small_patch16_224",
)
COUNT = int(os.environ.get("IMAGES", "64"))
ROUNDS = 5
SIDES = {"4000x3000": (4000, 3000), "2000x1500": (2000, 1500), "640x480": (640, 480)}
Pass = Callable[[torch.Tensor], torch.Tensor]


def suite() -> Iterator[Row]:
    keep_freed_memory()
    yield from decoding()
    for network in NETWORKS:
        yield from engines(network)


@torch.no_grad()
def engines(network: str) -> Iterator[Row]:
    made = create_backbone(network, "none")
    alone = BackboneAlone(made.module).eval()
    pictures = noise(made.spec)
    runtime = Runtime(torch.device("cpu"))
    with ExitStack() as stack:
        passes: dict[str, Pass] = {"onnxruntime": onnx_pass(alone.backbone, made.spec)}
        for precision in precisions() if is_installed() else ():
            fast = convert(alone.backbone, made.spec, precision, torch.get_num_threads())
            passes[f"openvino {precision}"] = fast
        passes["torch"] = stack.enter_context(torch_pass(alone, made.spec, runtime))
        expected = passes["torch"](pictures)
        best = dict.fromkeys(passes, 0.0)
        errors = {}
        for _ in range(ROUNDS):
            for name, through in passes.items():
                started = time.perf_counter()
                features = through(pictures)
                best[name] = max(best[name], COUNT / (time.perf_counter() - started))
                errors[name] = float((features - expected).norm() / expected.norm())
    for name, rate in best.items():
        note = f"features differ by {errors[name]:.1e}"
        yield Row(network, name, rate, "images/s", rate / best["torch"], note=note)


def noise(spec: InputSpec) -> torch.Tensor:
    """Smooth pictures: features of plain noise would be all alike."""
    generator = torch.Generator().manual_seed(0)
    coarse = torch.rand(COUNT, spec.channels, 16, 16, generator=generator)
    fine = torch.nn.functional.interpolate(coarse, size=spec.resize, mode="bicubic")
    return fine.clamp(0, 1).mul(255).to(torch.uint8)


def onnx_pass(backbone: torch.nn.Module, spec: InputSpec) -> Pass:
    """ONNX Runtime, 16 images at a time."""
    import onnxruntime

    from usfan.data.views import test_view

    buffer = io.BytesIO()
    example = torch.zeros(16, *spec.shape)
    torch.onnx.export(backbone, (example,), dynamo=True, verbose=False).save(buffer)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session: Any = onnxruntime.InferenceSession(buffer.getvalue(), options)
    name = session.get_inputs()[0].name

    def through(pictures: torch.Tensor) -> torch.Tensor:
        parts = []
        for part in test_view(pictures, spec).split(16):
            parts.append(torch.from_numpy(session.run(None, {name: part.numpy()})[0]))
        return torch.cat(parts)

    return through


def decoding() -> Iterator[Row]:
    """To 256×256 pixels, in one thread."""
    root = Path(os.environ["PHOTOS"]) if "PHOTOS" in os.environ else None
    for name, size in SIDES.items():
        content = photograph(root, size)
        rates = {}
        for case, side in (("whole", None), ("at a part of its size", 256)):
            seconds = []
            for _ in range(ROUNDS):
                started = time.process_time()
                planes(squared(decode_bytes(content, name, side=side), 256))
                seconds.append(time.process_time() - started)
            rates[case] = 1 / min(seconds)
            ratio = rates[case] / rates["whole"]
            yield Row(f"JPEG {name}", case, rates[case], "images/s of one core", ratio)


def photograph(root: Path | None, size: tuple[int, int]) -> bytes:
    """The first photograph of a folder, enlarged; else noise of all scales."""
    if root is not None:
        image = Image.open(min(root.rglob("*.jpg"))).convert("RGB").resize(size)
    else:
        random = np.random.default_rng(0)
        image = Image.new("RGB", size)
        for scale in (8, 64, 512):
            layer = random.integers(0, 256, (scale, scale, 3), dtype=np.uint8)
            image = Image.blend(image, Image.fromarray(layer).resize(size), 0.5)
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=92)
    return buffer.getvalue()


if __name__ == "__main__":
    # On its own, `python benchmarks/inference.py FILE.json`: what it needs is installed with usfan[fast,onnx].
    rows = []
    for row in suite():
        rows.append(asdict(row))
        print(row.group, row.case, f"{row.value:.1f}", row.unit, row.note, flush=True)
        machine = {"processor": platform.machine(), "threads": torch.get_num_threads()}
        machine |= {"load": os.getloadavg()[0], "torch": torch.__version__}
        write_json(Path(sys.argv[1]), {"machine": machine, "suites": {"inference": rows}})
