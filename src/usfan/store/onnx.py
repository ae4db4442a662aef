"""The model as one ONNX graph that describes itself: photographs in, labels and probabilities out.

The graph takes uint8 RGB images N×H×W×3 of any size and does all that `predict` does with them: resizing, cropping,
normalisation, the network, the posterior predictive, the unknown decision. Its metadata holds the class names, the
input, the versions and a hash of the model. With `tensors=True` it takes the network's own input instead, normalised
images N×C×S×S, and gives features, logits and certainty.

Resizing follows Pillow's antialiased bilinear filter, which `predict` uses. Output pixel i of R looks at the input
pixels x of a line of length L with weights

    a_ix = max(0, 1 − |x + ½ − (i + ½)·s| / max(s, 1)),  s = L / R,       divided by their sum over x,

first along the lines, then along the columns; both results are rounded to whole pixels.
"""

from __future__ import annotations

import hashlib
import json
import logging
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from usfan.data.views import InputSpec, centre, statistics
from usfan.errors import UsfanError
from usfan.files import whole_file
from usfan.maths.objectives import certainty_weights, entropy
from usfan.maths.outputs import Outputs
from usfan.store.model import MixtureModel, SourceModel
from usfan.store.model_folder import uncertainty_table

TOLERANCE = 1e-4
"""Tolerance of a graph that takes tensors, against torch."""
PROBABILITY_TOLERANCE = 5e-3
"""Tolerance of a graph that takes photographs, against `predict` on made-up pictures: pixels are rounded after
resizing, and a small network can be steep. A wrong graph differs by far more."""
TENSOR_OUTPUTS = ("features", "logits", "certainty")
OUTPUTS = ("label", "probs", "posterior_probs", "certainty", "unknown")
MEANINGS = {
    "label": "int64 N: the number of the predicted class, an index into `classes`",
    "probs": "float32 N×K: probabilities of the point estimate, which decides the label",
    "posterior_probs": "float32 N×K: probabilities of the posterior predictive (or of the `uncertainty` that the "
    "metadata names), which includes uncertainty",
    "certainty": "float32 N: exp(−entropy of posterior_probs); 1 is certain, 1/K is uniform",
    "unknown": "bool N: judged to be of no known class (always false unless the model was adapted for open set)",
    "features": "float32 N×D: the input of the last layer",
    "logits": "float32 N×K: the output of the last layer",
}
PROBES = ((64, 48), (300, 400), (33, 57))
"""Sizes (height, width) of the made-up photographs that a graph is checked with."""


class OutputsGraph(nn.Module):
    """Images B×C×S×S → outputs of a model, with the same fixed draws as `predict`. `pixels`: they are not normalised
    yet."""

    def __init__(self, model: SourceModel, *, pixels: bool) -> None:
        super().__init__()
        self.model = model
        self.pixels = pixels
        self.members = nn.ModuleList()
        if isinstance(model, MixtureModel):
            self.members.extend(OutputsGraph(member, pixels=pixels) for member in model.members)
            return
        self.classifier = model.classifier
        self.mean, self.std = statistics(model.spec, torch.device("cpu"))
        # The fixed draws are computed here, on real numbers, and not while the graph is traced.
        features = torch.zeros(1, model.posterior.weight.shape[1])
        model.uncertainty.predictive(features, model.temperature, model.samples)

    def forward(self, images: Tensor) -> Outputs:
        model = self.model
        if isinstance(model, MixtureModel):
            return model.mix([member(images) for member in self.members])
        if self.pixels:
            images = (images - self.mean) / self.std
        features, logits = self.classifier(images)
        draws = model.uncertainty.scaled_draws(features, model.temperature, model.samples)
        log_p = draws.log_softmax(dim=-1)
        p = log_p.exp()
        posterior_probs = p.mean(dim=1)
        information = entropy(posterior_probs) + (p * log_p).sum(dim=-1).mean(dim=1)
        return Outputs(features, logits, logits.softmax(dim=1), posterior_probs, information)


class TensorGraph(nn.Module):
    """Normalised images B×C×S×S → features B×D, logits B×K, certainty B."""

    def __init__(self, model: SourceModel) -> None:
        super().__init__()
        self.outputs = OutputsGraph(model, pixels=False)

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        outputs = self.outputs(images)
        return outputs.features, outputs.logits, certainty_weights(outputs.posterior_probs)


class PhotographGraph(nn.Module):
    """uint8 images B×H×W×3 → label B, probs B×K, posterior probs B×K, certainty B, unknown B."""

    def __init__(self, model: SourceModel) -> None:
        super().__init__()
        self.model = model
        self.outputs = OutputsGraph(model, pixels=True)

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        spec = self.model.spec
        pixels = images.permute(0, 3, 1, 2).to(torch.float32)
        if spec.channels == 1:
            pixels = grey(pixels)
        outputs = self.outputs(centre(resized(pixels, spec.resize), spec.size))
        certainty = certainty_weights(outputs.posterior_probs)
        unknown = certainty > 2.0  # never
        rule = getattr(self.model, "unknown_rule", None)
        if rule is not None:
            unknown = rule.flag(outputs)
        label = outputs.logits.argmax(dim=1)
        return label, outputs.probs, outputs.posterior_probs, certainty, unknown


def grey(pixels: Tensor) -> Tensor:
    """B×3×H×W → B×1×H×W by the integer weights of Pillow's mode L."""
    weights = torch.tensor([19595, 38470, 7471], dtype=torch.int32).view(3, 1, 1)
    whole = (pixels.to(torch.int32) * weights).sum(
        dim=1, keepdim=True, dtype=torch.int32
    ) + 0x8000
    return torch.floor(whole.to(torch.float64) / 65536).to(torch.float32)


def resized(pixels: Tensor, side: int) -> Tensor:
    """B×C×H×W → B×C×side×side, as Pillow's antialiased bilinear filter."""
    lines = whole_pixels(pixels @ line_weights(pixels.shape[-1], side).T)
    return whole_pixels(line_weights(pixels.shape[-2], side) @ lines)


def line_weights(length: int, side: int) -> Tensor:
    """side×length weights, rows summing to 1, rounded to 22 binary places as Pillow's are."""
    places = torch.arange(length, dtype=torch.float64) + 0.5
    # Σ (x + ½) = L² / 2, so this is L / side, from a length that may vary.
    scale = places.sum() * 2 / (places.shape[0] * side)
    middle = (torch.arange(side, dtype=torch.float64) + 0.5) * scale
    weights = (1 - (places - middle[:, None]).abs() / scale.clamp_min(1.0)).clamp_min(0.0)
    weights = weights / weights.sum(dim=1, keepdim=True)
    return (torch.floor(weights * 2.0**22 + 0.5) / 2.0**22).to(torch.float32)


def whole_pixels(values: Tensor) -> Tensor:
    return torch.floor(values.clamp(0, 255) + 0.5)


def export_onnx(model: SourceModel, path: Path, *, tensors: bool = False) -> float:
    """Write the graph. Returns its largest difference from `predict`, or from torch for a graph of tensors."""
    try:
        import onnx  # noqa: F401
        import onnxruntime
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise UsfanError(f"export needs {error.name}: install usfan[onnx]") from None
    specs = [member.spec for member in getattr(model, "members", ())]
    if tensors and len({(spec.mean, spec.std) for spec in specs}) > 1:
        raise UsfanError(
            "the members of the mixture normalise images differently: leave --tensors out"
        )
    model.to("cpu")
    model.classifier.eval()
    with warnings.catch_warnings(), torch.no_grad(), whole_file(path, follow=True) as part:
        warnings.simplefilter("ignore")
        logging.getLogger("torch.onnx").setLevel(logging.ERROR)
        program = trace(model, tensors)
        program.model.metadata_props.update(metadata(model, tensors))
        program.model.doc_string = (
            "Made by usfan. The metadata describes its inputs and outputs."
        )
        program.save(str(part), external_data=False)
        session = onnxruntime.InferenceSession(str(part), providers=["CPUExecutionProvider"])
        return check_tensors(model, session) if tensors else check_photographs(model, session)


def trace(model: SourceModel, tensors: bool) -> Any:
    """The graph as an ONNX program for any batch, and for photographs of any size."""
    sizes = {0: torch.export.Dim("batch", min=1, max=65_536)}
    if tensors:
        graph: nn.Module = TensorGraph(model)
        example = random_images(model.spec, 2, seed=0)
    else:
        graph = PhotographGraph(model)
        example = torch.zeros(2, 40, 30, 3, dtype=torch.uint8)
        for axis, name in ((1, "height"), (2, "width")):
            sizes[axis] = torch.export.Dim(name, min=1, max=65_535)
    return torch.onnx.export(
        graph.eval(),
        (example,),
        dynamo=True,
        verbose=False,
        input_names=["images"],
        output_names=list(TENSOR_OUTPUTS if tensors else OUTPUTS),
        dynamic_shapes={"images": sizes},
    )


def random_images(spec: InputSpec, count: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, *spec.shape, generator=generator)


def metadata(model: SourceModel, tensors: bool) -> dict[str, str]:
    """Metadata for users of the file, as texts; lists and tables as JSON."""
    from usfan import __version__

    spec = model.spec
    images = {
        "kind": "photographs",
        "layout": "N×H×W×3, RGB, upright, any H and W",
        "dtype": "uint8",
        "resize": [spec.resize, spec.resize],
        "crop": [spec.size, spec.size],
        "mean": list(spec.mean),
        "std": list(spec.std),
        "done_in_graph": [
            "resize (bilinear, antialiased)",
            "centre crop",
            "(x/255 − mean) / std",
        ],
    }
    if tensors:
        layout = f"N×{spec.shape_text}"
        images |= {"kind": "tensors", "layout": layout, "dtype": "float32", "done_in_graph": []}
    names = TENSOR_OUTPUTS if tensors else OUTPUTS
    rule = getattr(model, "unknown_rule", None)
    tables = {
        "classes": list(model.classes),
        "input": images,
        "outputs": {name: MEANINGS[name] for name in names},
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
    """SHA-256 of all tensors of the network and its uncertainties, by name; and of the class names. Of a mixture, of
    the hashes of its members and how they are mixed."""
    if isinstance(model, MixtureModel):
        members = map(model_hash, model.members)
        parts = [list(model.shares), list(model.classes), *members]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()
    hashed = hashlib.sha256(json.dumps(list(model.classes)).encode())
    tables = [
        ("model", model.classifier.state_dict()),
        ("posterior", model.posterior.tensors()),
    ]
    if model.uncertainty is not model.posterior:
        hashed.update(json.dumps(uncertainty_table(model)).encode())
        tables.append((model.uncertainty.kind, model.uncertainty.tensors()))
    for prefix, table in tables:
        for name, tensor in sorted(table.items()):
            values = tensor.detach().cpu().contiguous()
            hashed.update(f"{prefix}.{name} {values.dtype} {tuple(values.shape)}".encode())
            hashed.update(values.view(-1).view(torch.uint8).numpy().tobytes())
    return hashed.hexdigest()


def check_tensors(model: SourceModel, session: Any) -> float:
    """Compare with torch on a batch of random pixels."""
    images = random_images(model.spec, 3, seed=1)
    expected = TensorGraph(model).eval()(images)
    results = session.run(None, {"images": images.numpy()})
    pairs = zip(results, expected, strict=True)
    worst = max(
        float((torch.from_numpy(result) - value).abs().max()) for result, value in pairs
    )
    if worst > TOLERANCE * max(1.0, float(expected[1].abs().max())):
        raise RuntimeError(
            f"onnxruntime and torch differ by {worst:.1e}: the graph was not written"
        )
    return worst


def check_photographs(model: SourceModel, session: Any) -> float:
    """Compare with `predict` on made-up photographs of several sizes."""
    worst = 0.0
    rng = np.random.default_rng(2)
    for height, width in PROBES:
        small = rng.integers(0, 256, (2, 9, 9, 3), dtype=np.uint8)  # smooth, as photographs are
        enlarged = [Image.fromarray(image).resize((width, height)) for image in small]
        photographs = np.stack([np.asarray(image) for image in enlarged])
        label, probs, _, certainty, unknown = session.run(None, {"images": photographs})
        expected = model.predict(photographs)
        for result, value in ((probs, expected.probs), (certainty, expected.weight)):
            worst = max(worst, float(np.abs(result - value.numpy()).max()))
        same_label = label.tolist() == expected.label.tolist()
        same = same_label and unknown.tolist() == expected.unknown.tolist()
        if worst > PROBABILITY_TOLERANCE or not (same or close_call(expected.probs)):
            raise RuntimeError(
                f"onnxruntime and predict differ by {worst:.1e}: the graph was not written"
            )
    return worst


def close_call(probs: Tensor) -> bool:
    """Whether two classes are so close that rounding decides."""
    best = probs.topk(2, dim=1).values
    return bool((best[:, 0] - best[:, 1]).min() < 2 * PROBABILITY_TOLERANCE)
