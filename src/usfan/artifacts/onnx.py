"""The model as one ONNX graph that explains itself: photographs in, labels and probabilities out.

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

from usfan.artifacts.model import MixtureModel, SourceModel, class_order
from usfan.data.views import centre, statistics
from usfan.errors import UsfanError
from usfan.files import whole_file
from usfan.posterior.ensemble import Ensemble
from usfan.posterior.heads import MCDropout, PointEstimate
from usfan.posterior.kronecker import KroneckerPosterior
from usfan.scoring.mixing import mixed, reordered, source_weights
from usfan.scoring.outputs import Outputs

TOLERANCE = 1e-4
"""Tolerance of a graph that takes tensors, against torch."""
PROBABILITY_TOLERANCE = 5e-3
"""Of a graph that takes photographs, against `predict` on made-up pictures: pixels are rounded after resizing, and a
small network can be steep. A wrong graph differs by far more."""
TENSOR_OUTPUTS = ("features", "logits", "certainty")
OUTPUTS = ("label", "probs", "posterior_probs", "certainty", "unknown")
MEANINGS = {
    "label": "int64 N: the number of the predicted class, an index into `classes`",
    "probs": "float32 N×K: probabilities of the point estimate, which decides the label",
    "posterior_probs": "float32 N×K: probabilities of the posterior predictive (or of the `uncertainty` that the "
    "metadata names), which includes uncertainty",
    "certainty": "float32 N: exp(−entropy of posterior_probs); 1 is certain, 1/K is uniform",
    "unknown": "bool N: judged to be of no known class (always false unless the model was adapted for open set)",
    "features": "float32 N×D: what the last layer sees",
    "logits": "float32 N×K: what the last layer gives",
}
PROBES = ((64, 48), (300, 400), (33, 57))
"""Sizes (height, width) of the made-up photographs that a graph is checked with."""


class PosteriorDraws(nn.Module):
    """Features B×D and logits B×K → B×M×K logits / τ of the posterior's fixed draws."""

    vectors: Tensor
    table: Tensor
    basis: Tensor
    noise: Tensor

    def __init__(self, posterior: KroneckerPosterior, temperature: float, samples: int) -> None:
        super().__init__()
        posterior.predictive(torch.zeros(1, posterior.weight.shape[1]), temperature, samples)
        self.temperature, self.has_bias = temperature, posterior.bias is not None
        self.register_buffer("vectors", posterior.feature_vectors)
        self.register_buffer("table", posterior.variance_table)
        self.register_buffer("basis", posterior.basis)
        self.register_buffer("noise", posterior.noise(samples))

    def forward(self, features: Tensor, logits: Tensor) -> Tensor:
        phi = torch.cat([features, torch.ones_like(features[:, :1])], dim=1) if self.has_bias else features
        coefficients = ((phi @ self.vectors).square() @ self.table).sqrt() @ self.basis.T
        rank, samples, classes = self.noise.shape
        moved = (coefficients / self.temperature) @ self.noise.reshape(rank, samples * classes)
        return moved.reshape(-1, samples, classes) + (logits / self.temperature)[:, None, :]


class PointDraws(nn.Module):
    """The same of the point estimate, M = 1."""

    def __init__(self, temperature: float) -> None:
        super().__init__()
        self.temperature = temperature

    def forward(self, features: Tensor, logits: Tensor) -> Tensor:
        return (logits / self.temperature)[:, None, :]


class DropoutDraws(PointDraws):
    """The same of MC dropout, with its fixed masks."""

    masks: Tensor
    weight: Tensor
    bias: Tensor

    def __init__(self, heads: MCDropout, temperature: float, samples: int) -> None:
        super().__init__(temperature)
        self.register_buffer("masks", heads.masks(samples))
        self.register_buffer("weight", heads.weight)
        self.register_buffer("bias", heads.weight.new_zeros(len(heads.weight)) if heads.bias is None else heads.bias)

    def forward(self, features: Tensor, logits: Tensor) -> Tensor:
        return ((features[:, None, :] * self.masks) @ self.weight.T + self.bias) / self.temperature


class EnsembleDraws(PointDraws):
    """The same of an ensemble, M its members."""

    weight: Tensor
    bias: Tensor

    def __init__(self, heads: Ensemble, temperature: float) -> None:
        super().__init__(temperature)
        self.members, self.classes, features = heads.member_weights.shape
        none = heads.member_biases is None
        self.register_buffer("weight", heads.member_weights.reshape(-1, features).clone())
        zeros = heads.member_weights.new_zeros(self.members * self.classes)
        self.register_buffer("bias", zeros if none else heads.member_biases.flatten().clone())  # type: ignore[union-attr]

    def forward(self, features: Tensor, logits: Tensor) -> Tensor:
        drawn = features @ self.weight.T + self.bias
        return drawn.reshape(-1, self.members, self.classes) / self.temperature


def draws_of(uncertainty: Any, temperature: float, samples: int) -> nn.Module:
    """What draws in the graph as this uncertainty does in torch."""
    if isinstance(uncertainty, MCDropout):
        return DropoutDraws(uncertainty, temperature, samples)
    if isinstance(uncertainty, Ensemble):
        return EnsembleDraws(uncertainty, temperature)
    if isinstance(uncertainty, PointEstimate):
        return PointDraws(temperature)
    return PosteriorDraws(uncertainty, temperature, samples)


class Seen(nn.Module):
    """Images B×C×S×S → what a model says of them, with the same fixed draws as `predict`. `pixels`: the images are not
    normalised yet."""

    mean: Tensor
    std: Tensor

    def __init__(self, model: SourceModel, *, pixels: bool) -> None:
        super().__init__()
        self.pixels, self.classifier = pixels, model.classifier
        self.draws = draws_of(model.uncertainty, model.temperature, model.samples)
        mean, std = statistics(model.spec, torch.device("cpu"))
        self.register_buffer("mean", mean.clone())
        self.register_buffer("std", std.clone())

    def forward(self, images: Tensor) -> Outputs:
        features, logits = self.classifier((images - self.mean) / self.std if self.pixels else images)
        log_p = self.draws(features, logits).log_softmax(dim=-1)
        p = log_p.exp()
        posterior_probs = p.mean(dim=1)
        information = entropy(posterior_probs) + (p * log_p).sum(dim=-1).mean(dim=1)
        return Outputs(features, logits, logits.softmax(dim=1), posterior_probs, information)


class SeenBySeveral(nn.Module):
    """The same of a mixture."""

    shares: Tensor

    def __init__(self, model: MixtureModel, *, pixels: bool) -> None:
        super().__init__()
        self.by_certainty = model.by_certainty
        self.members = nn.ModuleList([Seen(member, pixels=pixels) for member in model.members])
        self.register_buffer("shares", torch.tensor(model.shares))
        for number, member in enumerate(model.members):
            self.register_buffer(f"order_{number}", class_order(model.classes, member.classes))

    def forward(self, images: Tensor) -> Outputs:
        outputs = [
            reordered(member(images), getattr(self, f"order_{number}")) for number, member in enumerate(self.members)
        ]
        return mixed(outputs, source_weights(outputs, self.shares, by_certainty=self.by_certainty))


def seen_by(model: SourceModel, *, pixels: bool) -> nn.Module:
    return SeenBySeveral(model, pixels=pixels) if isinstance(model, MixtureModel) else Seen(model, pixels=pixels)


class Exported(nn.Module):
    """Normalised images B×C×S×S → features B×D, logits B×K, certainty B."""

    def __init__(self, model: SourceModel) -> None:
        super().__init__()
        self.seen = seen_by(model, pixels=False)

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        outputs = self.seen(images)
        return outputs.features, outputs.logits, torch.exp(-entropy(outputs.posterior_probs))


class ExportedWhole(nn.Module):
    """uint8 images B×H×W×3 → label B, probs B×K, posterior probs B×K, certainty B, unknown B."""

    def __init__(self, model: SourceModel) -> None:
        super().__init__()
        self.seen = seen_by(model, pixels=True)
        self.spec, self.rule = model.spec, getattr(model, "unknown_rule", None)

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        pixels = images.permute(0, 3, 1, 2).to(torch.float32)
        if self.spec.channels == 1:
            pixels = grey(pixels)
        outputs = self.seen(centre(resized(pixels, self.spec.resize), self.spec.size))
        certainty = torch.exp(-entropy(outputs.posterior_probs))
        unknown = certainty > 2.0 if self.rule is None else self.rule.flag(outputs)  # without a rule: never
        return outputs.logits.argmax(dim=1), outputs.probs, outputs.posterior_probs, certainty, unknown


def entropy(probs: Tensor) -> Tensor:
    return -(probs * probs.clamp_min(1e-38).log()).sum(dim=-1)


def grey(pixels: Tensor) -> Tensor:
    """B×3×H×W → B×1×H×W by the integer weights of Pillow's mode L."""
    weights = torch.tensor([19595, 38470, 7471], dtype=torch.int32).view(3, 1, 1)
    whole = (pixels.to(torch.int32) * weights).sum(dim=1, keepdim=True, dtype=torch.int32) + 0x8000
    return torch.floor(whole.to(torch.float64) / 65536).to(torch.float32)


def resized(pixels: Tensor, side: int) -> Tensor:
    """B×C×H×W → B×C×side×side, as Pillow's antialiased bilinear filter."""
    height, width = pixels.shape[-2], pixels.shape[-1]
    lines = whole_pixels(pixels @ line_weights(width, side).T)
    return whole_pixels(line_weights(height, side) @ lines)


def line_weights(length: Any, side: int) -> Tensor:
    """side×length weights, rows summing to 1, rounded to 22 binary places as Pillow's are."""
    at = torch.arange(length, dtype=torch.float64) + 0.5
    scale = at.sum() * 2 / (at.shape[0] * side)  # Σ (x + ½) = L² / 2, so this is L / side, from a length that may vary
    middle = (torch.arange(side, dtype=torch.float64) + 0.5) * scale
    weights = (1 - (at - middle[:, None]).abs() / scale.clamp_min(1.0)).clamp_min(0.0)
    return (torch.floor(weights / weights.sum(dim=1, keepdim=True) * 2.0**22 + 0.5) / 2.0**22).to(torch.float32)


def whole_pixels(values: Tensor) -> Tensor:
    return torch.floor(values.clamp(0, 255) + 0.5)


def export_onnx(model: SourceModel, path: Path, *, tensors: bool = False) -> float:
    """Write the graph; gives the largest difference from torch (`tensors`: from `predict` otherwise) that was found."""
    try:
        import onnx  # noqa: F401
        import onnxruntime
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise UsfanError(f"export needs {error.name}: install usfan[onnx]") from None
    if tensors and isinstance(model, MixtureModel) and len({(m.spec.mean, m.spec.std) for m in model.members}) > 1:
        raise UsfanError("the members of the mixture normalise images differently: leave --tensors out")
    model.to("cpu")
    model.classifier.eval()
    with warnings.catch_warnings(), torch.no_grad(), whole_file(path, follow=True) as part:
        warnings.simplefilter("ignore")
        logging.getLogger("torch.onnx").setLevel(logging.ERROR)
        program = tensor_program(model) if tensors else whole_program(model)
        program.model.metadata_props.update(metadata(model, tensors))
        program.model.doc_string = "Made by usfan. What it takes and gives stands in the metadata."
        program.save(str(part), external_data=False)
        session = onnxruntime.InferenceSession(str(part), providers=["CPUExecutionProvider"])
        return check_tensors(model, session) if tensors else check_photographs(model, session)


def tensor_program(model: SourceModel) -> Any:
    spec = model.spec
    example = torch.randn(2, spec.channels, spec.size, spec.size, generator=torch.Generator().manual_seed(0))
    shapes = {"images": {0: torch.export.Dim("batch", min=1, max=65_536)}}
    return exported(Exported(model), example, TENSOR_OUTPUTS, shapes)


def whole_program(model: SourceModel) -> Any:
    example = torch.zeros(2, 40, 30, 3, dtype=torch.uint8)
    sizes = {
        0: torch.export.Dim("batch", min=1, max=65_536),
        1: torch.export.Dim("height", min=1, max=65_535),
        2: torch.export.Dim("width", min=1, max=65_535),
    }
    return exported(ExportedWhole(model), example, OUTPUTS, {"images": sizes})


def exported(graph: nn.Module, example: Tensor, outputs: tuple[str, ...], shapes: dict[str, Any]) -> Any:
    return torch.onnx.export(
        graph.eval(),
        (example,),
        dynamo=True,
        verbose=False,
        input_names=["images"],
        output_names=list(outputs),
        dynamic_shapes=shapes,
    )


def metadata(model: SourceModel, tensors: bool) -> dict[str, str]:
    """Metadata for users of the file, as texts; lists and tables as JSON."""
    from usfan import __version__

    spec = model.spec
    given = {
        "kind": "tensors" if tensors else "photographs",
        "layout": f"N×{spec.channels}×{spec.size}×{spec.size}" if tensors else "N×H×W×3, RGB, upright, any H and W",
        "dtype": "float32" if tensors else "uint8",
        "resize": [spec.resize, spec.resize],
        "crop": [spec.size, spec.size],
        "mean": list(spec.mean),
        "std": list(spec.std),
        "done_in_graph": [] if tensors else ["resize (bilinear, antialiased)", "centre crop", "(x/255 − mean) / std"],
    }
    rule = getattr(model, "unknown_rule", None)
    return {
        "classes": json.dumps(list(model.classes), ensure_ascii=False),
        "input": json.dumps(given, ensure_ascii=False),
        "outputs": json.dumps(
            {name: MEANINGS[name] for name in (TENSOR_OUTPUTS if tensors else OUTPUTS)}, ensure_ascii=False
        ),
        "uncertainty": model.uncertainty.kind,
        "unknown_rule": json.dumps(None if rule is None else rule.to_dict()),
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
        parts = [model.mixing, list(model.shares), list(model.classes), *map(model_hash, model.members)]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()
    hashed = hashlib.sha256(json.dumps(list(model.classes)).encode())
    tables = [("model", model.classifier.state_dict()), ("posterior", model.posterior.tensors())]
    if model.rival is not None:
        hashed.update(json.dumps(model.rival.settings()).encode())
        tables.append((model.rival.kind, model.rival.tensors()))
    for prefix, table in tables:
        for name, tensor in sorted(table.items()):
            values = tensor.detach().cpu().contiguous()
            hashed.update(f"{prefix}.{name} {values.dtype} {tuple(values.shape)}".encode())
            hashed.update(values.view(-1).view(torch.uint8).numpy().tobytes())
    return hashed.hexdigest()


def check_tensors(model: SourceModel, session: Any) -> float:
    """Compare with torch on a batch of random pixels."""
    spec = model.spec
    probe = torch.randn(3, spec.channels, spec.size, spec.size, generator=torch.Generator().manual_seed(1))
    expected = Exported(model).eval()(probe)
    found = session.run(None, {"images": probe.numpy()})
    worst = max(float((torch.from_numpy(f) - e).abs().max()) for f, e in zip(found, expected, strict=True))
    if worst > TOLERANCE * max(1.0, float(expected[1].abs().max())):
        raise RuntimeError(f"onnxruntime and torch differ by {worst:.1e}: the graph was not written")
    return worst


def check_photographs(model: SourceModel, session: Any) -> float:
    """Compare with `predict` on made-up photographs of several sizes."""
    worst, rng = 0.0, np.random.default_rng(2)
    for height, width in PROBES:
        small = rng.integers(0, 256, (2, 9, 9, 3), dtype=np.uint8)  # smooth, as photographs are
        photographs = np.stack([np.asarray(Image.fromarray(s).resize((width, height))) for s in small])
        label, probs, _, certainty, unknown = session.run(None, {"images": photographs})
        expected = model.predict(photographs)
        pairs = ((probs, expected.probs), (certainty, expected.weight))
        worst = max(worst, *(float(np.abs(found - wanted.numpy()).max()) for found, wanted in pairs))
        told = (label.tolist(), unknown.tolist()) == (expected.label.tolist(), expected.unknown.tolist())
        if worst > PROBABILITY_TOLERANCE or not (told or close_call(expected.probs)):
            raise RuntimeError(f"onnxruntime and predict differ by {worst:.1e}: the graph was not written")
    return worst


def close_call(probs: Tensor) -> bool:
    """Whether two classes are so close that rounding decides."""
    best = probs.topk(2, dim=1).values
    return bool((best[:, 0] - best[:, 1]).min() < 2 * PROBABILITY_TOLERANCE)
