"""Is a label worth more on an image that `label_first` chose than on one drawn at random?

    python studies/label_first.py FEATURES --out docs/results/label-first.json

FEATURES holds pooled features of a frozen ImageNet network, one file per domain (`lite0-office31-amazon-v0.pt`, a state
with `features` N×D and `labels` N). For each task and seed: a source model (bottleneck and head) is trained on the
source's features and adapted to the target's by information maximisation; one image per class is chosen by each rule;
the adaptation is repeated from the source model with the cross-entropy of these labels added. Accuracy is on the
images that none of the rules chose, so that every rule is judged on the same ones.

Rules: random; doubt (the largest entropy of the posterior predictive); clusters (k-means, no weights); label_first.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import statistics
import time
from pathlib import Path

import torch
from torch import Tensor, nn

from usfan.models.classifier import Classifier
from usfan.posterior.kronecker import KroneckerPosterior
from usfan.posterior.predictive import entropy
from usfan.scoring.label_first import label_first
from usfan.scoring.objectives import information_maximization, smoothed_cross_entropy
from usfan.scoring.outputs import Outputs

DOMAINS = ("amazon", "dslr", "webcam")
RULES = ("random", "doubt", "clusters", "label_first")
BATCH = 64


def read(folder: Path, domain: str, net: str) -> tuple[Tensor, Tensor]:
    state = torch.load(folder / f"{net}-office31-{domain}-v0.pt", weights_only=True)
    return state["features"].float(), state["labels"].long()


def train(classifier: Classifier, x: Tensor, loss, *, epochs: int, lr: float, seed: int, head: bool) -> Classifier:
    """SGD on rows of features; `loss(rows, logits)`. The head moves only in stage 1."""
    generator = torch.Generator().manual_seed(seed)
    moving = [*classifier.bottleneck.parameters(), *(classifier.head.parameters() if head else ())]
    optimiser = torch.optim.SGD(moving, lr=lr, momentum=0.9, weight_decay=1e-3, nesterov=True)
    steps, done = epochs * max(1, len(x) // BATCH), 0
    classifier.train()
    for _ in range(epochs):
        for rows in torch.randperm(len(x), generator=generator).split(BATCH):
            if len(rows) < BATCH:
                continue
            for group in optimiser.param_groups:
                group["lr"] = lr * (1 + 10 * done / steps) ** -0.75
            optimiser.zero_grad()
            loss(rows, classifier).backward()
            optimiser.step()
            done += 1
    return classifier.eval()


def source_model(x: Tensor, y: Tensor, classes: int, seed: int) -> tuple[Classifier, KroneckerPosterior]:
    torch.manual_seed(seed)
    classifier = Classifier(nn.Identity(), x.shape[1], classes, bottleneck=256)

    def supervised(rows: Tensor, model: Classifier) -> Tensor:
        return smoothed_cross_entropy(model(x[rows])[1], y[rows], 0.1).mean()

    train(classifier, x, supervised, epochs=20, lr=1e-2, seed=seed, head=True)
    with torch.no_grad():
        posterior = KroneckerPosterior.fit(*classifier(x), *classifier.head_tensors(), labels=y)
    return classifier, posterior


def adapted(source: Classifier, x: Tensor, seed: int, chosen: Tensor, labels: Tensor) -> Classifier:
    """Information maximisation, and the cross-entropy of the labels that were given."""

    def objective(rows: Tensor, model: Classifier) -> Tensor:
        if len(chosen) == 0:
            return 2 * information_maximization(model(x[rows])[1])
        logits = model(x[torch.cat([rows, chosen])])[1]
        told = nn.functional.cross_entropy(logits[len(rows) :], labels)
        return 2 * information_maximization(logits[: len(rows)]) + told

    return train(copy.deepcopy(source), x, objective, epochs=15, lr=1e-2, seed=seed, head=False)


@torch.no_grad()
def outputs_of(classifier: Classifier, posterior: KroneckerPosterior, x: Tensor) -> Outputs:
    features, logits = classifier(x)
    probs, information = posterior.moments(features, 0.4, 128)
    return Outputs(features, logits, logits.softmax(1), probs, information)


def choices(outputs: Outputs, count: int, seed: int) -> dict[str, Tensor]:
    even = torch.full_like(outputs.posterior_probs, 1 / outputs.posterior_probs.shape[1])
    plain = Outputs(outputs.features, outputs.logits, outputs.probs, even, outputs.mutual_information)
    generator = torch.Generator().manual_seed(1000 + seed)
    return {
        "random": torch.randperm(len(outputs), generator=generator)[:count],
        "doubt": entropy(outputs.posterior_probs).topk(count).indices,
        "clusters": label_first(plain, count, seed=seed),
        "label_first": label_first(outputs, count, seed=seed),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("features", type=Path)
    parser.add_argument("--net", default="lite0")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for (source, target), seed in itertools.product(itertools.permutations(DOMAINS, 2), range(given.seeds)):
        started = time.perf_counter()
        x, y = read(given.features, source, given.net)
        tx, ty = read(given.features, target, given.net)
        classes = int(max(y.max(), ty.max())) + 1
        first, posterior = source_model(x, y, classes, seed)
        nothing = torch.empty(0, dtype=torch.long)
        after = adapted(first, tx, seed, nothing, nothing)
        chosen = choices(outputs_of(after, posterior, tx), classes, seed)
        judged = torch.ones(len(tx), dtype=torch.bool)
        judged[torch.cat(list(chosen.values()))] = False

        def accuracy(model: Classifier, tx: Tensor = tx, ty: Tensor = ty, judged: Tensor = judged) -> float:
            with torch.no_grad():
                return 100 * float((model(tx[judged])[1].argmax(1) == ty[judged]).double().mean())

        row = {"task": f"{source}→{target}", "seed": seed, "source": accuracy(first), "adapted": accuracy(after)}
        for rule, picked in chosen.items():
            row[rule] = accuracy(adapted(first, tx, seed, picked, ty[picked]))
            row[f"{rule}_classes"] = len(ty[picked].unique())
        rows.append(row)
        print(json.dumps(row), f"{time.perf_counter() - started:.0f} s", flush=True)
    means = {name: round(statistics.fmean(r[name] for r in rows), 2) for name in ("source", "adapted", *RULES)}
    gains = [r["label_first"] - r["random"] for r in rows]
    figures = {
        "what": "accuracy in %, one label per class; mean of tasks and seeds",
        "network": given.net,
        "mean": means,
        "label_first_over_random": {
            "mean": round(statistics.fmean(gains), 2),
            "better": sum(g > 0 for g in gains),
            "worse": sum(g < 0 for g in gains),
            "of": len(gains),
        },
        "rows": rows,
    }
    print(json.dumps({k: v for k, v in figures.items() if k != "rows"}, indent=2))
    if given.out is not None:
        given.out.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
