"""The model as one ONNX graph: pixels in, (features, logits, certainty) out; checked against onnxruntime."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path

import torch
from torch import Tensor, nn

from usfan.artifacts.model import SourceModel
from usfan.errors import UsfanError
from usfan.files import whole_file
from usfan.posterior.predictive import certainty_weights

TOLERANCE = 1e-4


class Exported(nn.Module):
    """Normalised images B×C×S×S → features B×D, logits B×K, certainty B, with the same fixed draws as `predict`."""

    vectors: Tensor
    table: Tensor
    basis: Tensor
    noise: Tensor

    def __init__(self, model: SourceModel) -> None:
        super().__init__()
        posterior = model.posterior
        posterior.predictive(torch.zeros(1, posterior.weight.shape[1]), model.temperature, model.samples)
        self.classifier = model.classifier
        self.temperature, self.has_bias = model.temperature, posterior.bias is not None
        self.register_buffer("vectors", posterior.feature_vectors)
        self.register_buffer("table", posterior.variance_table)
        self.register_buffer("basis", posterior.basis)
        self.register_buffer("noise", posterior.noise(model.samples))

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        features, logits = self.classifier(images)
        phi = torch.cat([features, torch.ones_like(features[:, :1])], dim=1) if self.has_bias else features
        coefficients = ((phi @ self.vectors).square() @ self.table).sqrt() @ self.basis.T
        rank, samples, classes = self.noise.shape
        moved = (coefficients / self.temperature) @ self.noise.reshape(rank, samples * classes)
        draws = moved.reshape(-1, samples, classes) + (logits / self.temperature)[:, None, :]
        return features, logits, certainty_weights(draws.softmax(dim=-1).mean(dim=1))


def export_onnx(model: SourceModel, path: Path) -> float:
    """Write the graph; gives the largest difference between torch and onnxruntime on a batch of random pixels."""
    try:
        import onnx  # noqa: F401
        import onnxruntime
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise UsfanError(f"export needs {error.name}: install usfan[onnx]") from None
    model.to("cpu")
    graph = Exported(model).eval()
    spec = model.spec
    example = torch.randn(2, spec.channels, spec.size, spec.size, generator=torch.Generator().manual_seed(0))
    with warnings.catch_warnings(), torch.no_grad(), whole_file(path, follow=True) as part:
        warnings.simplefilter("ignore")
        logging.getLogger("torch.onnx").setLevel(logging.ERROR)
        batch = torch.export.Dim("batch", min=1, max=65_536)
        program = torch.onnx.export(
            graph,
            (example,),
            dynamo=True,
            verbose=False,
            input_names=["images"],
            output_names=["features", "logits", "certainty"],
            dynamic_shapes={"images": {0: batch}},
        )
        program.save(str(part), external_data=False)  # type: ignore[union-attr]
        session = onnxruntime.InferenceSession(str(part), providers=["CPUExecutionProvider"])
        probe = torch.randn(3, spec.channels, spec.size, spec.size, generator=torch.Generator().manual_seed(1))
        expected = graph(probe)
        found = session.run(None, {"images": probe.numpy()})
        worst = max(float((torch.from_numpy(f) - e).abs().max()) for f, e in zip(found, expected, strict=True))
        if worst > TOLERANCE * max(1.0, float(expected[1].abs().max())):
            raise RuntimeError(f"onnxruntime and torch differ by {worst:.1e}: the graph was not written")
    return worst
