"""Choosing settings without target labels: train on one half of the source images, and adapt to the other half, spoilt.

    python studies/source_shift.py office31 --data ROOT --weights offline --out FILE.json
    python studies/source_shift.py digits --out FILE.json

The rule takes the variant with the highest accuracy, averaged over domains, shifts and seeds. Whoever trains the source
model has these labels, and no target is needed.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

from studies.cells import run_variant  # noqa: E402
from studies.paths import write_rows  # noqa: E402
from studies.variants import VARIANTS  # noqa: E402

from usfan.config import RuntimeConfig  # noqa: E402
from usfan.data.cache import open_store  # noqa: E402
from usfan.data.sources import ImageData  # noqa: E402
from usfan.data.store import Store  # noqa: E402
from usfan.engine.runtime import start_runtime  # noqa: E402
from usfan.store.model import SourceModel  # noqa: E402
from usfan.training.source import train_source  # noqa: E402

DOMAINS = {"A": "amazon", "D": "dslr", "W": "webcam"}
CHOICES = (
    "shot-im",
    "u-sfan",
    "u-sfan balanced",
    "u-sfan default",
    "u-sfan crops",
    "shot",
    "shot crops",
    "u-sfan+ default",
    "u-sfan+ crops",
    "u-sfan+ settled",
    "u-sfan+ settled crops",
    "u-sfan+ certain centroids",
    "u-sfan+ lasting labels",
    "u-sfan+ mixed views",
)


def blurred(x: Tensor, _: torch.Generator) -> Tensor:
    """A quarter of the resolution."""
    small = F.interpolate(x, scale_factor=0.25, mode="area")
    return F.interpolate(small, size=x.shape[-2:], mode="bilinear", align_corners=False)


def dim_and_noisy(x: Tensor, draw: torch.Generator) -> Tensor:
    """Two fifths of the light, and noise of a tenth of the range."""
    return 0.4 * x + 0.1 * torch.randn(x.shape, generator=draw, device=x.device)


def washed_out(x: Tensor, _: torch.Generator) -> Tensor:
    """Hardly any colour, a third of the contrast, too bright."""
    grey = x.mean(dim=1, keepdim=True)
    return 0.55 + 0.35 * (0.8 * grey + 0.2 * x - 0.5)


def turned(x: Tensor, _: torch.Generator) -> Tensor:
    """Turned by 30°, at three quarters of the size."""
    cos = 0.866 / 0.75
    sin = 0.5 / 0.75
    theta = torch.tensor([[cos, -sin, 0.0], [sin, cos, 0.0]], device=x.device).expand(
        len(x), 2, 3
    )
    grid = F.affine_grid(theta, list(x.shape), align_corners=False)
    return F.grid_sample(x, grid, padding_mode="border", align_corners=False)


SHIFTS: dict[str, Callable[[Tensor, torch.Generator], Tensor]] = {
    "blurred": blurred,
    "dim and noisy": dim_and_noisy,
    "washed out": washed_out,
    "turned": turned,
}


def halves(store: Store) -> tuple[Store, Store]:
    """Every other image of each class, as the folder has them, and the rest."""
    assert store.labels is not None
    labels = store.labels.cpu()
    order = torch.cat([(labels == c).nonzero().flatten() for c in labels.unique()])
    return tuple(part_of(store, order[start::2]) for start in (0, 1))  # type: ignore[return-value]


def part_of(store: Store, rows: Tensor) -> Store:
    assert store.labels is not None
    pixels = store.values[rows.to(store.device)]
    labels = store.labels[rows.to(store.labels.device)]
    return dataclasses.replace(
        store,
        values=pixels,
        positions=store.positions[rows.to(store.positions.device)],
        labels=labels,
    )


def spoilt(store: Store, shift: str) -> Store:
    draw = torch.Generator(store.device).manual_seed(0)
    parts = [SHIFTS[shift](part.float() / 255, draw) for part in store.values.split(256)]
    pixels = torch.cat([(p.clamp(0, 1) * 255).round().byte() for p in parts])
    return dataclasses.replace(store, values=pixels)


def office31(args: argparse.Namespace, runtime: Any) -> dict[str, tuple[Store, dict[str, Any]]]:
    network = {"backbone": "tf_efficientnet_lite0", "pretrained": args.weights}
    result = {}
    for letter in args.domains or ("A", "W"):
        data = ImageData(f"{args.data}/{DOMAINS[letter]}")
        if args.images:
            data = data.subset(
                torch.cat(
                    [(data.labels == c).nonzero().flatten()[: args.images] for c in range(31)]
                )
            )
        result[letter] = open_store(data, size=256, device=runtime.device), network
    return result


def digits(args: argparse.Namespace, runtime: Any) -> dict[str, tuple[Store, dict[str, Any]]]:
    from usfan.study.digits import load_mnist5k, load_uci

    network = {"backbone": "digits-cnn"}
    loaders = {"mnist": load_mnist5k, "uci": load_uci}
    stores = {
        n: open_store(loaders[n](), size=28, channels=1, device=runtime.device)
        for n in args.domains or loaders
    }
    return {name: (store, network) for name, store in stores.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("office31", "digits"))
    parser.add_argument("--data")
    parser.add_argument("--weights", default="offline")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--domains", nargs="+", help="A D W, or mnist uci; default: A W, or both"
    )
    parser.add_argument("--shifts", nargs="+", default=list(SHIFTS))
    parser.add_argument("--variants", nargs="+", default=list(CHOICES))
    parser.add_argument("--seeds", type=int, nargs="+", default=[2020])
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument("--target-epochs", type=int, default=15)
    parser.add_argument("--compile", default="graph")
    parser.add_argument("--images", type=int, help="per class: a tiny run to try the script")
    parser.add_argument("--seconds", type=float, default=1e9, help="no new run after so many")
    args = parser.parse_args()
    started = time.time()
    rows = []
    named = {v.name: v for v in VARIANTS}
    runtime = start_runtime(RuntimeConfig(compile=args.compile))
    for seed in args.seeds:
        for domain, (store, network) in globals()[args.what](args, runtime).items():
            if time.time() - started > args.seconds:
                break
            group, other = halves(store)
            model: SourceModel = train_source(
                group, seed=seed, epochs=args.epochs, runtime=runtime, **network
            )
            for shift in args.shifts:
                target = spoilt(other, shift)
                for name in args.variants:
                    if time.time() - started > args.seconds:
                        break
                    row = run_variant(
                        named[name],
                        model,
                        target,
                        runtime,
                        epochs=args.target_epochs,
                        seed=seed,
                    )
                    path = row.pop("path")
                    row["source_accuracy"] = path["accuracy"][0]
                    row["information"] = path["information_maximization"][-1]
                    rows.append(
                        {
                            "data": args.what,
                            "domain": domain,
                            "shift": shift,
                            "seed": seed,
                            **row,
                        }
                    )
                    print(rows[-1], flush=True)
                    write_rows(args.out, f"python studies/source_shift.py {args.what}", rows)
    for name in args.variants:
        group = [r["accuracy"] for r in rows if r["variant"] == name]
        print(f"{name:32s} {statistics.fmean(group):.2f}" if group else name)


if __name__ == "__main__":
    main()
