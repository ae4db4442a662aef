"""What one and several processes do alike, as tensors by name. `main` is one of several processes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from usfan.adaptation.centroids import nearest_centroid
from usfan.adaptation.methods import METHODS
from usfan.adaptation.terms.term import Context, Term
from usfan.data.store import Store
from usfan.engine.accelerate.sync_norm import sync_batch_norms
from usfan.engine.loop import Batch
from usfan.engine.optimiser import Optimiser
from usfan.engine.passes import forward_store
from usfan.engine.runtime import Runtime
from usfan.errors import ConfigError
from usfan.maths.outputs import Outputs
from usfan.models.small_backbones import SMALL_BACKBONES
from usfan.store.model import SourceModel
from usfan.store.run_folder import RunFolder, open_run
from usfan.training.source import train_source
from usfan.uncertainty.fit import batch_factors
from usfan.workflow import adapt_model as adapt

CLASSES = 4


class SmoothCNN(nn.Sequential):
    """No ReLU and no pooling: where these switch, a rounding error in the value is a jump in the gradient."""

    num_features = 144
    input_size = (1, 28)
    augment = "resized-crop"
    dropout = 0.0

    def __init__(self, channels: int = 1) -> None:
        first = [nn.Conv2d(channels, 8, 5, stride=3), nn.BatchNorm2d(8), nn.SiLU()]
        second = [nn.Conv2d(8, 16, 3, stride=2), nn.BatchNorm2d(16), nn.Tanh()]
        super().__init__(*first, *second, nn.Flatten())


SMALL_BACKBONES["smooth"] = SmoothCNN
CASES = {
    "shot-im": {"method": "shot-im"},
    "u-sfan": {"method": "u-sfan"},
    "u-sfan by step": {"method": "u-sfan", "refresh": "step"},
    "u-sfan+": {"method": "u-sfan+"},
    "frozen": {"method": "u-sfan+", "tune": "norm", "partial_set": True},
    "open set": {"method": "u-sfan+", "open_set": True},
    "guarded": {"method": "u-sfan", "guard": True, "diversity_memory": 0.5},
}
NORMS = {"1d": (6, 3), "2d": (6, 3, 4, 5), "act": (6, 3, 4, 4)}
CUTS = {"uneven": 5, "empty": 6}
"""How many of the 6 rows the first of two processes holds; one process holds all."""


def pictures(count: int, seed: int, shift: int = 0) -> tuple[Tensor, Tensor]:
    """Noise over one pattern per class; `shift` moves them all, as another domain would."""
    draw = torch.Generator().manual_seed(seed)
    patterns = torch.rand(CLASSES, 1, 28, 28, generator=torch.Generator().manual_seed(7)).roll(
        shift, 3
    )
    labels = torch.randint(CLASSES, (count,), generator=draw)
    noise = torch.rand(count, 1, 28, 28, generator=draw)
    return ((0.4 * patterns[labels] + 0.6 * noise) * 255).to(torch.uint8), labels


@contextmanager
def recorded_updates() -> Iterator[dict[str, list[Tensor]]]:
    """Loss and gradient of every step taken inside."""
    seen: dict[str, list[Tensor]] = {"losses": [], "gradients": []}
    plain = Optimiser.update

    def update(self: Optimiser, loss: Tensor) -> None:
        plain(self, loss)
        seen["losses"].append(loss.detach().clone())
        grads = [p.grad.flatten() for p in self.parameters if p.grad is not None]
        seen["gradients"].append(torch.cat(grads).clone())

    Optimiser.update = update  # type: ignore[method-assign]
    try:
        yield seen
    finally:
        Optimiser.update = plain  # type: ignore[method-assign]


def stacked(
    name: str, seen: dict[str, list[Tensor]], state: dict[str, Tensor]
) -> dict[str, Tensor]:
    result = {f"{name}/{key}": torch.stack(values) for key, values in seen.items()}
    return result | {
        f"{name}/weights.{k}": v.clone() for k, v in state.items() if v.is_floating_point()
    }


def stage_1(runtime: Runtime) -> tuple[SourceModel, dict[str, Tensor]]:
    """157 pictures, 16 held out: four batches of 32 and one of 13."""
    pixels, labels = pictures(157, 0)
    store = Store(
        pixels, torch.arange(len(pixels)), labels, tuple(str(k) for k in range(CLASSES))
    )
    with recorded_updates() as seen:
        model = train_source(
            store,
            backbone="smooth",
            epochs=2,
            batch_size=32,
            bottleneck=16,
            augment="resized-crop",
            runtime=runtime,
        )
    features, logits = forward_store(model.classifier, store, model.spec, runtime)
    factors = batch_factors(features, logits, bias=True)
    figures = {
        "A": factors.A,
        "B": factors.B,
        "prior precision": torch.tensor(model.posterior.prior_precision),
        "log evidence": torch.tensor(model.posterior.log_evidence),
    }
    return model, stacked("stage 1", seen, model.classifier.state_dict()) | {
        f"stage 1/{k}": v for k, v in figures.items()
    }


@dataclasses.dataclass
class Watch(Term):
    """Adds nothing to the loss; holds on to the tables of the last epoch."""

    def __post_init__(self) -> None:
        self.seen: dict = {}

    def start(self, context: Context) -> None:
        self.seen["guidance"] = context.guidance

    def refresh(self, outputs: Outputs) -> None:
        guidance = self.seen["guidance"]
        self.seen["labels"] = nearest_centroid(
            outputs.features, outputs.probs, threshold=guidance.rare, mask=guidance.known_mask
        )

    def __call__(self, batch: Batch) -> Tensor:
        return batch.logits.new_zeros(())


def stage_2(
    runtime: Runtime, source: SourceModel, name: str, count: int, run: RunFolder | None = None
) -> dict[str, Tensor]:
    """151 pictures: four batches of 32 and one of 23. 130: a last batch of two."""
    store = Store(pictures(count, 1, shift=3)[0], torch.arange(count))
    settings = {"guard": False, "epochs": 2, "batch_size": 32, "samples": 32, **CASES[name]}
    watch = Watch()
    row = METHODS[settings.pop("method")]
    METHODS["watched"] = dataclasses.replace(row, name="watched", terms=(*row.terms, watch))
    with recorded_updates() as seen:
        model = adapt(source, store, "watched", runtime=runtime, run=run, **settings)
    guidance = watch.seen["guidance"]
    after = model.passes.after
    tables = {
        "certainty": guidance.weights,
        "pseudo-labels": watch.seen["labels"],
        "known": guidance.known,
        "features": after.features,
        "posterior": after.posterior_probs,
        "kept epoch": torch.tensor(model.history["kept_epoch"]),
        "epoch losses": torch.tensor([r["loss"] for r in model.history["records"][1:]]),
    }
    if model.unknown_rule is not None:
        tables["threshold"] = torch.tensor(model.unknown_rule.threshold)
    return stacked(name, seen, model.classifier.state_dict()) | {
        f"{name}/{k}": v for k, v in tables.items()
    }


def norm_layer(kind: str) -> nn.Module:
    from timm.layers import BatchNormAct2d

    torch.manual_seed(3)
    layer: nn.Module = {"1d": nn.BatchNorm1d, "2d": nn.BatchNorm2d, "act": BatchNormAct2d}[
        kind
    ](3)
    nn.init.normal_(layer.weight)
    nn.init.normal_(layer.bias)
    return layer.double()


def normalised(runtime: Runtime, kind: str, first: int) -> dict[str, Tensor]:
    """Two steps of a BatchNorm over 6 rows, of which the first process holds `first`: all of the result, summed."""
    layer = norm_layer(kind)
    if runtime.world > 1:
        sync_batch_norms(layer)
    draw = torch.Generator().manual_seed(5)
    result: dict[str, Tensor] = {}
    for step in range(2):
        values = 100 + torch.randn(NORMS[kind], generator=draw, dtype=torch.float64)
        slope = torch.randn(NORMS[kind], generator=draw, dtype=torch.float64)
        own = (
            slice(None)
            if runtime.world == 1
            else (slice(0, first), slice(first, 6), slice(6, 6))[runtime.rank]
        )
        inputs = values[own].requires_grad_()
        layer.zero_grad()
        outputs = layer(inputs)
        (outputs * slope[own]).sum().backward()
        whole = torch.zeros(2, *NORMS[kind], dtype=torch.float64)
        whole[0, own] = outputs.detach()
        whole[1, own] = inputs.grad
        parts = (whole, layer.weight.grad, layer.bias.grad)
        result |= {f"{step}.{i}": runtime.total(part) for i, part in enumerate(parts)}
    layer.eval()
    result["test mode"] = layer(torch.ones(NORMS[kind], dtype=torch.float64)).detach()
    return result | {k: v.double().clone() for k, v in layer.state_dict().items()}


def study(runtime: Runtime, *, short: bool = False) -> dict[str, Tensor]:
    """Everything that is compared; the short one has a last batch of two, which leaves a third process with none."""
    source, result = stage_1(runtime)
    for name in ("open set", "u-sfan by step") if short else CASES:
        result |= stage_2(runtime, source, name, 130 if short else 151)
    for kind in NORMS:
        for cut, first in CUTS.items():
            result |= {
                f"norm {kind} {cut}/{k}": v for k, v in normalised(runtime, kind, first).items()
            }
    return result


def resumed(runtime: Runtime, folder: str) -> dict[str, Tensor]:
    """A run whose first epoch was made by another: only the second is taken."""
    source, _ = stage_1(runtime)
    RunFolder.scalars = RunFolder.histogram = lambda *_: None  # type: ignore[method-assign,assignment]  # slow to import
    with open_run(runtime, folder, {}, command="adapt") as run:
        stage_2(runtime, source, "u-sfan+", 151, run)
    with open_run(runtime, folder, {}, command="adapt", resume=True) as run:
        result = stage_2(runtime, source, "u-sfan+", 151, run)
    return {key.replace("u-sfan+", "resumed"): value for key, value in result.items()}


def refused(runtime: Runtime, folder: str) -> Tensor:
    """How a run into a folder that holds one already ends: 1 with the reason, 2 without a word."""
    try:
        with open_run(runtime, folder, {}, command="adapt"):
            return torch.tensor(0)
    except ConfigError:
        return torch.tensor(1)
    except SystemExit as end:
        return torch.tensor(2 if end.code == 0 else -1)


def main(rank: int, world: int, meeting: str, out: str) -> None:
    from safetensors.torch import save_file

    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=rank, world_size=world
    )
    runtime = Runtime(torch.device("cpu"), rank=rank, world=world)
    result = study(runtime, short=world > 2)
    if world == 2:
        result |= resumed(runtime, out.rsplit("-", 1)[0] + "-resumed")
    result |= {
        "first run": refused(runtime, out.rsplit("-", 1)[0]),
        "second run": refused(runtime, out.rsplit("-", 1)[0]),
        "agree": torch.tensor([runtime.agree(3), runtime.agree(rank)]),
    }
    save_file({k: v.contiguous().clone() for k, v in result.items()}, out)
    torch.distributed.destroy_process_group()
