"""Several sources against the best single one: Office-31 (frozen EfficientNet-Lite0) and digits (MNIST, USPS, UCI).

    python studies/several_sources.py office31 ROOT --cache DIR --out docs/results/several-sources-office31.json
    python studies/several_sources.py digits FOLDER_OF_THE_NPZ_FILES --out docs/results/several-sources-digits.json

ROOT holds Office-31; the folder holds mnist.npz and usps.npz. Every domain is the target once, and the two others are
the sources, trained separately. A row has the accuracy of each adapted source alone, of their mixtures by every rule of
`MIXINGS`, of the mixture by certainty before adaptation, and (Office-31) of DECISION: the
bottlenecks of both sources and their weights trained together, information maximisation and 0.3 × cross-entropy on
pseudo-labels.
Figures are those of the model after the last epoch. Labels are used only for the figures.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

from studies.frozen import CLOSED, OFFICE, office31  # noqa: E402
from studies.paths import write_rows  # noqa: E402

import usfan  # noqa: E402
from usfan.config import RuntimeConfig  # noqa: E402
from usfan.data.sources import ImageData  # noqa: E402
from usfan.engine.features import on_features  # noqa: E402
from usfan.engine.runtime import start_runtime  # noqa: E402
from usfan.maths.objectives import (  # noqa: E402
    certainty_weights,
    diversity,
    entropy,
    recipe_entropy,
)
from usfan.maths.outputs import Outputs  # noqa: E402
from usfan.maths.source_mixture import evidence_shares  # noqa: E402
from usfan.metrics.metrics import calibration_metrics  # noqa: E402
from usfan.store.model import AdaptedModel, SourceModel  # noqa: E402
from usfan.study.digits import DIGITS, load_uci  # noqa: E402

SEEDS = (2019, 2020, 2021)
DIGIT_COUNT = 3_000
"""Images of MNIST and USPS; UCI has 1,797."""
EPOCHS = 15
BATCH = 64
LR = 1e-2
PSEUDO = 0.3
MIXINGS = ("evidence", "certainty", "mean", "learned")
"""evidence is usfan's. certainty: w_s ∝ c_s / c̄_s for each sample, c_s = exp(−H(p̂_s)), c̄_s its mean over the target.
mean: w_s = 1/S. learned: the weights of DECISION (Ahmed et al. 2021), which minimise mean H(p) − H(mean p)."""
LEARNING_STEPS = 500


def mixtures(members: list[AdaptedModel], labels: Tensor) -> dict[str, Any]:
    """Accuracy and calibration of every mixture of these members, and the shares of the first source."""
    passes = [model.passes for model in members if model.passes is not None]
    before = [one.before for one in passes]
    after = [one.after for one in passes]
    row: dict[str, Any] = {"single": [right(out.probs, labels) for out in after]}
    row["single_before"] = [right(out.probs, labels) for out in before]
    probs = torch.stack([out.probs for out in after])
    predictive = torch.stack([out.posterior_probs for out in after])
    for mixing in MIXINGS:
        shares = choose_shares(mixing, before, after)
        weights = shares.to(probs) * torch.ones(probs.shape[1], 1)
        if mixing == "certainty":
            weights = by_certainty(after, shares)
        row[mixing] = right(weighted(probs, weights), labels)
        figures = calibration_metrics(weighted(predictive, weights), labels)
        row[f"{mixing}_ece"] = round(figures["ece"], 2)
        row[f"{mixing}_share"] = round(float(shares[0]), 3)
    plain = by_certainty(after, torch.ones(len(after)))
    row["certainty as it is"] = right(weighted(probs, plain), labels)
    unadapted = by_certainty(before, choose_shares("certainty", before, before))
    row["certainty of the source models"] = right(weighted(probs, unadapted), labels)
    return row


def choose_shares(mixing: str, before: list[Outputs], after: list[Outputs]) -> Tensor:
    """α, S, from the outputs of every source on the target before and after it was adapted."""
    if mixing == "evidence":
        return evidence_shares(before)
    if mixing == "learned":
        return learned_shares(torch.stack([out.probs for out in after]).double())
    weights = torch.ones(len(after), dtype=torch.float64)
    if mixing == "certainty":
        means = [certainty_weights(out.posterior_probs).double().mean() for out in after]
        weights = 1 / torch.stack(means)
    return weights / weights.sum()


def learned_shares(probs: Tensor) -> Tensor:
    """α, S, from the point estimates S × N × K: DECISION's weights."""
    logits = probs.new_zeros(len(probs)).requires_grad_()
    optimiser = torch.optim.Adam([logits], lr=0.1)
    for _ in range(LEARNING_STEPS):
        optimiser.zero_grad()
        mixture = torch.einsum("s,snk->nk", logits.softmax(dim=0), probs)
        loss = entropy(mixture).mean() - entropy(mixture.mean(dim=0))
        loss.backward()
        optimiser.step()
    return logits.detach().softmax(dim=0)


def by_certainty(outputs: list[Outputs], shares: Tensor) -> Tensor:
    """w, N × S: the shares S, times the certainty of each source on each sample."""
    certainties = [certainty_weights(out.posterior_probs) for out in outputs]
    weights = shares.to(certainties[0]) * torch.stack(certainties, dim=1)
    return weights / weights.sum(dim=1, keepdim=True)


def weighted(tables: Tensor, weights: Tensor) -> Tensor:
    """Σ_s w_s p_s, N × K, from S × N × K and w, N × S."""
    return torch.einsum("ns,snk->nk", weights, tables)


def right(probs: Tensor, labels: Tensor) -> float:
    return round(100 * float((probs.argmax(dim=1) == labels).double().mean()), 2)


def decision(
    sources: list[SourceModel], features: Tensor, seed: int
) -> tuple[Tensor, list[float]]:
    """DECISION on frozen features N × F: probabilities N × K of the last iterate, and the weights of the sources."""
    torch.manual_seed(seed)
    networks = [on_features(copy.deepcopy(model.classifier)) for model in sources]
    weights = torch.zeros(len(sources), requires_grad=True)
    for network in networks:
        network.head.requires_grad_(False)
    parameters = [p for network in networks for p in network.bottleneck.parameters()]
    groups = [{"params": parameters}, {"params": [weights]}]
    optimiser = torch.optim.SGD(groups, lr=LR, momentum=0.9, nesterov=True, weight_decay=1e-3)
    steps = EPOCHS * -(-len(features) // BATCH)
    done = 0
    for _ in range(EPOCHS):
        labels = pseudo_labels(networks, weights, features)
        for rows in torch.randperm(len(features)).split(BATCH):
            if len(rows) < 2:
                continue
            for group in optimiser.param_groups:
                group["lr"] = LR * (1 + 10 * done / steps) ** -0.75
            probs = mixture_of(networks, weights, features[rows], train=True)
            loss = recipe_entropy(probs).mean() + diversity(probs.mean(dim=0))
            loss = loss + PSEUDO * torch.nn.functional.nll_loss(
                probs.clamp_min(1e-12).log(), labels[rows]
            )
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            done += 1
    with torch.no_grad():
        return mixture_of(networks, weights, features), [
            round(v, 3) for v in weights.softmax(dim=0).tolist()
        ]


def mixture_of(
    networks: list[Any], weights: Tensor, features: Tensor, *, train: bool = False
) -> Tensor:
    parts = [network.train(train)(features)[1].softmax(dim=1) for network in networks]
    return torch.einsum("s,snk->nk", weights.softmax(dim=0), torch.stack(parts))


@torch.no_grad()
def pseudo_labels(networks: list[Any], weights: Tensor, features: Tensor) -> Tensor:
    """Nearest centroids, in two rounds; distances in each source's features are weighted like the sources."""
    probs = mixture_of(networks, weights, features)
    spaces = [
        torch.nn.functional.normalize(network.eval()(features)[0], dim=1)
        for network in networks
    ]
    for _ in range(2):
        distance = torch.zeros_like(probs)
        for share, space in zip(weights.softmax(dim=0), spaces, strict=True):
            centres = torch.nn.functional.normalize(probs.T @ space, dim=1)
            distance += share * (1 - space @ centres.T)
        labels = distance.argmin(dim=1)
        probs = torch.nn.functional.one_hot(labels, probs.shape[1]).float()
    return labels


def run_office(root: Path, cache: str | None, seeds: list[int], out: Path) -> None:
    domains = office31(root, start_runtime(RuntimeConfig(device="cpu", cache=cache)))
    rows: list[dict[str, Any]] = []
    for seed in seeds:
        sources = {
            d: usfan.train_source(domains[d], **CLOSED, seed=seed, device="cpu") for d in OFFICE
        }
        for target in OFFICE:
            store = domains[target]
            others = OFFICE.replace(target, "")
            assert store.labels is not None
            common = {"task": f"{'+'.join(others)}→{target}", "seed": seed}
            for method in ("u-sfan", "u-sfan++"):
                seen = {"witness": store.values} if method == "u-sfan++" else {}
                arguments = {
                    "seed": seed,
                    "guard": False,
                    "tune": "new",
                    "progress": False,
                    "device": "cpu",
                    **seen,
                }
                began = time.process_time()
                members = [usfan.adapt(sources[s], store, method, **arguments) for s in others]
                seconds = round(time.process_time() - began, 1)
                rows.append(
                    {
                        **common,
                        "method": method,
                        "seconds": seconds,
                        **mixtures(members, store.labels),
                    }
                )
                print(rows[-1], flush=True)
            began = time.process_time()
            probs, shares = decision([sources[s] for s in others], store.values, seed)
            seconds = round(time.process_time() - began, 1)
            row = {
                **common,
                "method": "decision",
                "seconds": seconds,
                "joint": right(probs, store.labels),
            }
            rows.append({**row, "shares": shares})
            print(rows[-1], flush=True)
        write_rows(out, "python studies/several_sources.py office31 ROOT --cache DIR", rows)


def digit_domains(folder: Path) -> dict[str, ImageData]:
    result = {"uci": load_uci()}
    for name in ("mnist", "usps"):
        arrays = np.load(folder / f"{name}.npz")
        images = arrays["x_train"][:DIGIT_COUNT]
        labels = arrays["y_train"][:DIGIT_COUNT].astype(np.int64)
        result[name] = ImageData(images, labels=labels, classes=DIGITS, name=name)
    return result


def run_digits(folder: Path, seeds: list[int], out: Path) -> None:
    domains = digit_domains(folder)
    rows = []
    settings = {"backbone": "digits-cnn", "epochs": 8, "progress": False, "device": "cpu"}
    for seed in seeds:
        sources = {
            d: usfan.train_source(data, **settings, seed=seed) for d, data in domains.items()
        }
        for target, data in domains.items():
            others = [name for name in domains if name != target]
            arguments = {
                "seed": seed,
                "guard": False,
                "epochs": 8,
                "progress": False,
                "device": "cpu",
            }
            began = time.process_time()
            members = [usfan.adapt(sources[s], data, "u-sfan", **arguments) for s in others]
            row = {"task": f"{'+'.join(others)}→{target}", "seed": seed, "method": "u-sfan"}
            assert data.labels is not None
            rows.append(
                {
                    **row,
                    "seconds": round(time.process_time() - began, 1),
                    **mixtures(members, data.labels),
                }
            )
            print(rows[-1], flush=True)
        write_rows(
            out, "python studies/several_sources.py digits FOLDER_OF_THE_NPZ_FILES", rows
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", choices=("office31", "digits"))
    parser.add_argument("root", type=Path)
    parser.add_argument("--cache")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    if options.data == "digits":
        run_digits(options.root, options.seeds, options.out)
    else:
        run_office(options.root, options.cache, options.seeds, options.out)


if __name__ == "__main__":
    main()
