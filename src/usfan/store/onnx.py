"""The model as one ONNX graph that describes itself: photographs in, labels and probabilities out.

The graph takes uint8 images N×H×W×C of any size, RGB or grey as the network does. It does all that `predict` does
with them: resizing, cropping, normalisation, the network, the posterior predictive, the unknown decision. Its metadata
holds the class names, the input, the versions and a hash of the model.
"""

from __future__ import annotations

import hashlib
import json
import logging
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import save
from torch import Tensor, nn

from usfan.data.views import InputSpec, centre, statistics
from usfan.errors import UsfanError
from usfan.files import whole_file
from usfan.maths.objectives import certainty_weights
from usfan.maths.outputs import Outputs
from usfan.shield import shielded
from usfan.store.model import MixtureModel, SourceModel
from usfan.store.model_folder import model_config, model_tensors
from usfan.uncertainty.base import draw_moments

if TYPE_CHECKING:
    import onnx_ir as ir

TOLERANCE = 5e-3
"""Largest difference of a probability from that of `predict` on made-up pictures: pixels are rounded after resizing,
and a small network can be steep. A wrong graph differs by far more."""
OUTPUTS = {
    "label": "int64 N: the number of the predicted class, an index into `classes`; the number of classes if `unknown`",
    "probs": "float32 N×K: probabilities of the point estimate, which decides the label",
    "posterior_probs": "float32 N×K: probabilities of the posterior predictive (or of the `uncertainty` that the "
    "metadata names), which includes uncertainty",
    "certainty": "float32 N: exp(−entropy of posterior_probs); 1 is certain, 1/K is uniform",
    "unknown": "bool N: judged to be of no known class (always false unless the model was adapted for open set)",
}
PROBES = ((64, 48), (300, 400), (33, 57))
"""Sizes (height, width) of the made-up photographs that a graph is checked with."""


class OutputsGraph(nn.Module):
    """Pixels B×C×S×S in 0…255 → outputs of a model, with the same fixed draws as `predict`."""

    def __init__(self, model: SourceModel) -> None:
        super().__init__()
        self.model = model
        self.members = nn.ModuleList()
        if isinstance(model, MixtureModel):
            self.members.extend(map(OutputsGraph, model.members))
            return
        self.classifier = model.classifier
        self.mean, self.std = statistics(model.spec, torch.device("cpu"))
        # The fixed draws are computed here, on real numbers, and not while the graph is traced.
        features = torch.zeros(1, model.posterior.weight.shape[1])
        model.uncertainty.predictive(features, model.temperature, model.samples)

    def forward(self, pixels: Tensor) -> Outputs:
        model = self.model
        if isinstance(model, MixtureModel):
            return model.mix([member(pixels) for member in self.members])
        features, logits = self.classifier((pixels - self.mean) / self.std)
        draws = model.uncertainty.part_draws(features, model.temperature, model.samples)
        posterior_probs, information = draw_moments(draws(slice(None)))
        return Outputs(features, logits, model.rescale(logits), posterior_probs, information)


class PhotographGraph(nn.Module):
    """uint8 images B×H×W×C → label B, probs B×K, posterior probs B×K, certainty B, unknown B."""

    def __init__(self, model: SourceModel) -> None:
        super().__init__()
        self.model = model
        self.outputs = OutputsGraph(model)

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        spec = self.model.spec
        pixels = images.permute(0, 3, 1, 2).to(torch.float32)
        outputs = self.outputs(centre(resized(pixels, spec), spec.size))
        certainty = certainty_weights(outputs.posterior_probs)
        unknown = certainty > 2.0  # never
        rule = getattr(self.model, "unknown_rule", None)
        if rule is not None:
            unknown = rule.flag(outputs)
        label = outputs.logits.argmax(dim=1).masked_fill(unknown, len(self.model.classes))
        return label, outputs.probs, outputs.posterior_probs, certainty, unknown


def resized(pixels: Tensor, spec: InputSpec) -> Tensor:
    """B×C×H×W → B×C×R×R, or with the proportions kept R×W' or H'×R; as Pillow resizes: first along the lines, then
    along the columns."""
    kernel, _, crop = spec.resampling.partition("-")
    height, width = pixels.shape[2:]
    size = (spec.resize, spec.resize)
    if crop:
        short: Any = torch.sym_min(height, width)
        size = (spec.resize * height // short, spec.resize * width // short)
    return resized_to(resized_to(pixels, (height, size[1]), kernel), size, kernel)


def resized_to(pixels: Tensor, size: tuple[int, int], kernel: str) -> Tensor:
    """Antialiased, rounded to whole pixels."""
    values = nn.functional.interpolate(pixels, size, mode=kernel, antialias=True)
    return torch.floor(values + 0.5).clamp(0, 255)


@shielded
def export_onnx(model: SourceModel, path: Path) -> float:
    """Write the graph. Returns its largest difference from `predict`."""
    try:
        import onnx  # noqa: F401
        import onnxruntime  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise UsfanError(f"export needs {error.name}: install usfan[onnx]") from None
    kernel = model.spec.resampling.partition("-")[0]
    if kernel not in ("bilinear", "bicubic"):
        raise UsfanError(f"export: ONNX resizes images bilinear or bicubic, not {kernel}")
    device = model.posterior.weight.device
    model.to("cpu")
    model.classifier.eval()
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    try:
        logger.setLevel(logging.ERROR)
        return write_graph(model, path)
    finally:
        logger.setLevel(level)
        model.to(device)


def write_graph(model: SourceModel, path: Path) -> float:
    """Write the graph of a model on the CPU. Returns its largest difference from `predict`."""
    import onnxruntime

    with warnings.catch_warnings(), torch.no_grad(), whole_file(path, follow=True) as part:
        warnings.simplefilter("ignore")
        program = trace(model)
        clear_traces(program.model)
        program.model.metadata_props.update(metadata(model))
        program.model.doc_string = (
            "Made by usfan. The metadata describes its inputs and outputs."
        )
        program.save(str(part), external_data=False)
        session = onnxruntime.InferenceSession(str(part), providers=["CPUExecutionProvider"])
        return check_graph(model, session)


def trace(model: SourceModel) -> Any:
    """The graph as an ONNX program for any batch of photographs of any size."""
    dims = ("batch", "height", "width")
    sizes = {axis: torch.export.Dim(name, min=1, max=65_535) for axis, name in enumerate(dims)}
    return torch.onnx.export(
        PhotographGraph(model).eval(),
        (torch.zeros(2, 40, 30, model.spec.channels, dtype=torch.uint8),),
        dynamo=True,
        verbose=False,
        input_names=["images"],
        output_names=list(OUTPUTS),
        dynamic_shapes={"images": sizes},
    )


def clear_traces(graph_model: ir.Model) -> None:
    """Remove what torch notes about each node: it holds paths and lines of the exporter's installation."""
    graphs: list[ir.Graph | ir.Function] = [graph_model.graph, *graph_model.functions.values()]
    for graph in graphs:
        graph.metadata_props.clear()
        for node in graph.all_nodes():
            node.metadata_props.clear()
            for value in node.outputs:
                value.metadata_props.clear()


def metadata(model: SourceModel) -> dict[str, str]:
    """Metadata for users of the file, as texts; lists and tables as JSON."""
    from usfan import __version__

    spec = model.spec
    colours = "grey" if spec.channels == 1 else "RGB"
    rule = getattr(model, "unknown_rule", None)
    tables = {
        "classes": list(model.classes),
        "input": {
            "layout": f"N×H×W×{spec.channels}, {colours}, upright, any H and W, uint8",
            "resize": [spec.resize, spec.resize],
            "crop": [spec.size, spec.size],
            "mean": list(spec.mean),
            "std": list(spec.std),
            "done_in_graph": f"{spec.resampling} antialiased resize, centre crop, (x/255 − mean) / std",
        },
        "outputs": OUTPUTS,
        "unknown_rule": None if rule is None else rule.to_dict(),
    }
    return {
        **{name: json.dumps(table, ensure_ascii=False) for name, table in tables.items()},
        "uncertainty": model.uncertainty.kind,
        "model_sha256": model_hash(model),
        "usfan_version": __version__,
        "torch_version": str(torch.__version__),
        "kind": model.kind,
        "method": getattr(model, "method", ""),
    }


def model_hash(model: SourceModel) -> str:
    """SHA-256 of all that decides the predictions: the config without the summary, and the tensors."""
    config = model_config(model, private=True)
    digest = hashlib.sha256(json.dumps(config, default=str).encode())
    if isinstance(model, MixtureModel):
        for member in model.members:
            digest.update(model_hash(member).encode())
        return digest.hexdigest()
    for tensors in model_tensors(model).values():
        digest.update(save({name: t.contiguous() for name, t in tensors.items()}))
    return digest.hexdigest()


def check_graph(model: SourceModel, session: Any) -> float:
    """Compare with `predict` on made-up photographs of several sizes."""
    worst = 0.0
    rng = np.random.default_rng(2)
    for height, width in PROBES:
        small = rng.integers(0, 256, (2, 9, 9, 3), dtype=np.uint8)  # smooth, as photographs are
        mode = "L" if model.spec.channels == 1 else "RGB"
        pictures = [Image.fromarray(image).convert(mode) for image in small]
        enlarged = [np.asarray(picture.resize((width, height))) for picture in pictures]
        photographs = np.stack(enlarged).reshape(2, height, width, -1)
        label, probs, _, certainty, unknown = session.run(None, {"images": photographs})
        expected = model.predict(photographs)
        for result, value in ((probs, expected.probs), (certainty, expected.weight)):
            worst = max(worst, float(np.abs(result - value.numpy()).max()))
        same_label = label.tolist() == expected.label.tolist()
        same = same_label and unknown.tolist() == expected.unknown.tolist()
        if worst > TOLERANCE or not (same or close_call(expected.probs)):
            raise RuntimeError(
                f"onnxruntime and predict differ by {worst:.1e}: the graph was not written"
            )
    return worst


def close_call(probs: Tensor) -> bool:
    """Whether two classes are so close that rounding decides."""
    best = probs.topk(2, dim=1).values
    return bool((best[:, 0] - best[:, 1]).min() < 2 * TOLERANCE)
