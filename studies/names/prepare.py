"""Source models and the witness's view of every target, computed once; the other programs of this study read them.

    python -m studies.names.prepare OUT --data ROOT --network NETWORK.pt --family office31 lines … [--device cuda]

ROOT holds office31, pacs, leaf (domain/class/*), emoji (domain/class/*, drawn by `studies.emoji`) and digits.npz.
NETWORK.pt is EfficientNet-Lite0 as TorchScript, and beside it NETWORK.safetensors holds `weight` and `bias` of its
classifier. A source model is a bottleneck (256) and a weight-normalised head on frozen features: SHOT's recipe, as
`usfan train --tune new` has it. Nothing but torch is needed, so that it runs on any machine with an accelerator.

One file per domain: `witness` (N × W, principal components of the witness's testimony) and `labels` (N). One file per
task and seed: `point` and `probs` (N × K; point estimate and posterior predictive), `draws` (N × M × K logits),
`features` (N × H), and the tensors of the posterior.

The line drawings are: grey, Gaussian blur 1.2, PIL's FIND_EDGES, black where above 22 (photo, art_painting) or 28
(cartoon); 108 images per class, chosen at random with seed 0, the same for drawings and originals.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageFilter
from safetensors.torch import load_file, save_file
from studies.image_shifts import SHIFTS
from studies.names.tasks import SEEDS, domain_file, pairs, task_file
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm

from usfan.maths.cluster_mixture import centred_features, fit_witness_space
from usfan.uncertainty.kronecker import KroneckerPosterior

SIDE = 256
CROP = 224
BATCH = 64
EPOCHS = 40
BOTTLENECK = 256
DRAWS = 8
WIDTH = 192
"""Principal components of the witness's testimony that are stored."""
PER_CLASS = 108
BLACK_ABOVE = {"photo": 22, "art_painting": 22, "cartoon": 28}
"""Edge strength above which a pixel of a line drawing is black."""
LEAST = 8
"""Images that a class of emoji needs in both domains."""
FEW = 40
"""Images per class of the small PACS tasks."""
SOFTNESS = 2.0
"""Divides the logits of the witness's own classifier, as in `usfan.adaptation.witness`."""


def line_drawing(image: Image.Image, threshold: int) -> Image.Image:
    grey = image.convert("L").filter(ImageFilter.GaussianBlur(1.2))
    edges = np.asarray(grey.filter(ImageFilter.FIND_EDGES))
    drawn = np.where(edges > threshold, 0, 255).astype(np.uint8)
    return Image.fromarray(drawn).convert("RGB")


def images_of(
    family: str, name: str, data: Path
) -> tuple[list[Path], Callable[..., Image.Image]]:
    """Files of a domain and the change that makes its images of them."""
    base, _, change = name.partition("-")
    folder = {"lines": "pacs", "shifts": "office31"}.get(family, family)
    files = sorted((data / folder / base).glob("*/*"))
    if family == "lines":
        generator = np.random.default_rng(0)
        chosen = []
        for group in sorted({file.parent.name for file in files}):
            members = [file for file in files if file.parent.name == group]
            chosen += [
                members[i] for i in sorted(generator.permutation(len(members))[:PER_CLASS])
            ]
        files = chosen
        if change:
            return files, lambda image, _: line_drawing(image, BLACK_ABOVE[base])
    elif change:
        return files, lambda image, number: SHIFTS[change](
            image.resize((SIDE, SIDE), Image.Resampling.BICUBIC), number
        )
    return files, lambda image, _: image


def decode(job: tuple[int, Path], change: Callable[..., Image.Image]) -> np.ndarray:
    """3 × 256 × 256."""
    number, file = job
    image = change(Image.open(file).convert("RGB"), number)
    resized = image.resize((SIDE, SIDE), Image.Resampling.BILINEAR)
    return np.asarray(resized).transpose(2, 0, 1)


Features = tuple[Tensor, Tensor, Tensor, tuple[str, ...]]


class Domains:
    """Features of domains, computed when first needed."""

    def __init__(self, data: Path, network: Path, device: torch.device) -> None:
        self.data = data
        self.computed: dict[tuple[str, str], Features] = {}
        self.device = device
        self.network = torch.jit.load(str(network), map_location=device).eval()
        self.classifier = load_file(network.with_suffix(".safetensors"), device=str(device))

    def of(self, family: str, name: str) -> Features:
        """Features of crops and of whole images (N × F), labels (N) and classes."""
        key = ({"pacs40": "pacs"}.get(family, family), name)
        if key not in self.computed:
            self.computed[key] = self.compute(*key)
        return self.computed[key]

    @torch.no_grad()
    def compute(self, family: str, name: str) -> Features:
        """Features of crops and of whole images (N × F), labels (N) and classes."""
        files, change = images_of(family, name, self.data)
        classes = tuple(sorted({file.parent.name for file in files}))
        labels = torch.tensor([classes.index(file.parent.name) for file in files])
        with ThreadPoolExecutor(16) as pool:
            arrays = list(pool.map(lambda job: decode(job, change), enumerate(files)))
        edge = (SIDE - CROP) // 2
        crops = []
        wholes = []
        for start in range(0, len(arrays), BATCH):
            pixels = torch.from_numpy(np.stack(arrays[start : start + BATCH])).to(self.device)
            images = pixels.float() / 127.5 - 1
            crops.append(self.network(images[:, :, edge : edge + CROP, edge : edge + CROP]))
            wholes.append(self.network(images))
        return torch.cat(crops), torch.cat(wholes), labels.to(self.device), classes

    def testimony(self, features: Tensor) -> Tensor:
        """[f̂, q̂] of `usfan.adaptation.witness`, N × (F + C)."""
        logits = features @ self.classifier["weight"].T + self.classifier["bias"]
        roots = (logits / SOFTNESS).softmax(1).sqrt()
        return torch.cat([centred_features(features)[0], centred_features(roots)[0]], dim=1)


class DigitDomains(Domains):
    """MNIST (5,000), USPS and UCI digits at 16 × 16; the witness sees the pixels."""

    def __init__(self, data: Path, device: torch.device) -> None:
        self.device = device
        self.computed = {}
        self.stored = np.load(data / "digits.npz")

    def compute(self, family: str, name: str) -> Features:
        pixels = torch.from_numpy(self.stored[f"{name}_x"]).to(self.device).float() / 127.5 - 1
        labels = torch.from_numpy(self.stored[f"{name}_y"]).long().to(self.device)
        flat = pixels.flatten(1)
        return flat, flat, labels, tuple("0123456789")

    def testimony(self, features: Tensor) -> Tensor:
        return features


class SmallNetwork(nn.Module):
    """Two convolutions for 16 × 16 digits."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 32, 5, padding=2),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 3, padding=1),
            nn.BatchNorm2d(64),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
        )

    def forward(self, flat: Tensor) -> Tensor:
        return self.layers(flat.view(-1, 1, 16, 16))


def train_source(
    x: Tensor, y: Tensor, classes: int, seed: int, digits: bool
) -> tuple[nn.Module, nn.Module]:
    """Bottleneck and head by SHOT's recipe; the best of the epochs on a tenth of the images."""
    torch.manual_seed(seed)
    backbone: nn.Module = SmallNetwork() if digits else nn.Identity()
    width = 1024 if digits else x.shape[1]
    linear = nn.Linear(width, BOTTLENECK)
    nn.init.xavier_normal_(linear.weight)
    nn.init.zeros_(linear.bias)
    head = nn.Linear(BOTTLENECK, classes)
    nn.init.zeros_(head.bias)
    body = nn.Sequential(backbone, linear, nn.BatchNorm1d(BOTTLENECK)).to(x.device)
    head = weight_norm(head).to(x.device)
    parameters = [*body.parameters(), *head.parameters()]
    optimiser = torch.optim.SGD(
        parameters, lr=1e-2, momentum=0.9, nesterov=True, weight_decay=1e-3
    )
    order = torch.randperm(len(x)).to(x.device)
    held = order[: len(x) // 10]
    rows = order[len(x) // 10 :]
    epochs = 8 if digits else EPOCHS
    batches = max(1, len(rows) // BATCH)
    best = -1.0
    state: dict[str, Tensor] = {}
    network = nn.Sequential(body, head)
    for epoch in range(epochs):
        network.train()
        shuffled = rows[torch.randperm(len(rows)).to(x.device)]
        for step in range(batches):
            done = (epoch * batches + step) / (epochs * batches)
            for group in optimiser.param_groups:
                group["lr"] = 1e-2 * (1 + 10 * done) ** -0.75
            batch = shuffled[step * BATCH : (step + 1) * BATCH]
            loss = F.cross_entropy(network(x[batch]), y[batch], label_smoothing=0.1)
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
        network.eval()
        with torch.no_grad():
            right = float((network(x[held]).argmax(1) == y[held]).double().mean())
        if right >= best:
            best = right
            state = {k: v.detach().clone() for k, v in network.state_dict().items()}
    network.load_state_dict(state)
    return body.eval(), head.eval()


def shared_classes(domains: Domains, family: str, source: str, target: str) -> tuple[str, ...]:
    """Classes of both domains; for emoji, with enough images in both."""
    _, _, source_labels, source_classes = domains.of(family, source)
    _, _, target_labels, target_classes = domains.of(family, target)
    least = LEAST if family == "emoji" else 1
    shared = []
    for name in source_classes:
        if name in target_classes:
            in_source = int((source_labels == source_classes.index(name)).sum())
            in_target = int((target_labels == target_classes.index(name)).sum())
            if min(in_source, in_target) >= least:
                shared.append(name)
    return tuple(shared)


def rows_of(
    labels: Tensor, own: tuple[str, ...], classes: tuple[str, ...], few: bool
) -> tuple[Tensor, Tensor]:
    """Rows of the images of `classes`, and their labels as positions in `classes`."""
    table = torch.tensor([classes.index(c) if c in classes else -1 for c in own])
    positions = table[labels.cpu()]
    rows = (positions >= 0).nonzero().flatten()
    if few:
        order = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))]
        chosen = [order[positions[order] == k][:FEW] for k in range(len(classes))]
        rows = torch.cat(chosen).sort().values
    return rows.to(labels.device), positions[rows.cpu()].to(labels.device)


@torch.no_grad()
def outputs(
    body: nn.Module, head: nn.Module, posterior: KroneckerPosterior, x: Tensor
) -> dict[str, Tensor]:
    features = body(x)
    return {
        "point": head(features).softmax(1),
        "probs": posterior.predictive(features, 1.0),
        "draws": posterior.draws(features, DRAWS),
        "features": features,
    }


def prepare(family: str, domains: Domains, out: Path, seeds: tuple[int, ...]) -> None:
    digits = family == "digits"
    few = family == "pacs40"
    models: dict[
        tuple[str, tuple[str, ...], int], tuple[nn.Module, nn.Module, KroneckerPosterior]
    ] = {}
    for source, target in pairs(family):
        source_family = "office31" if family == "shifts" else family
        if family == "shifts":
            classes = domains.of("office31", source)[3]
        else:
            classes = shared_classes(domains, family, source, target)
        crop, whole, labels, own = domains.of(family, target)
        rows, positions = rows_of(labels, own, classes, few)
        file = domain_file(out, family, source, target)
        if not file.exists():
            testimony = domains.testimony(whole[rows])
            witness = fit_witness_space(testimony, WIDTH).project(testimony)
            store(file, {"witness": witness, "labels": positions})
        for seed in seeds:
            key = (source, classes, seed)
            if key not in models:
                x, _, y, names = domains.of(source_family, source)
                own_rows, y = rows_of(y, names, classes, few)
                x = x[own_rows]
                body, head = train_source(x, y, len(classes), seed, digits)
                with torch.no_grad():
                    features = body(x)
                    posterior = KroneckerPosterior.fit(
                        features, head(features), head.weight, head.bias, labels=y
                    )
                models[key] = (body, head, posterior)
            body, head, posterior = models[key]
            tensors = outputs(body, head, posterior, crop[rows])
            if family == "shifts":
                del tensors["features"]
            else:
                tensors |= {f"posterior.{k}": v for k, v in posterior.tensors().items()}
                tensors["posterior.precision"] = torch.tensor([posterior.prior_precision])
            store(task_file(out, family, source, target, seed), tensors)
    print(family, len(pairs(family)), "tasks", flush=True)


def store(file: Path, tensors: dict[str, Tensor]) -> None:
    """Float16, but for labels and the posterior."""
    compact = {}
    for name, tensor in tensors.items():
        keep = not tensor.is_floating_point() or name.startswith("posterior")
        compact[name] = (tensor if keep else tensor.half()).detach().cpu().contiguous()
    file.parent.mkdir(parents=True, exist_ok=True)
    save_file(compact, file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--network", type=Path)
    parser.add_argument("--family", nargs="+", required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seeds", nargs="+", type=int, default=list(SEEDS))
    options = parser.parse_args()
    device = torch.device(options.device)
    domains: Domains | None = None
    for family in options.family:
        if family == "digits":
            prepare(
                family, DigitDomains(options.data, device), options.out, tuple(options.seeds)
            )
            continue
        domains = domains or Domains(options.data, options.network, device)
        seeds = options.seeds[:1] if family == "shifts" else options.seeds
        prepare(family, domains, options.out, tuple(seeds))


if __name__ == "__main__":
    main()
