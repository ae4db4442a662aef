"""The toy: stacked networks against ordinary ones, and what the experiment is to show."""

import io
import json
import math

import pytest
import torch
from PIL import Image
from rich.console import Console
from torch import nn
from torch.nn import functional

from small_runs import usfan
from usfan.adaptation.centroids import nearest_centroid
from usfan.adaptation.methods import METHODS
from usfan.adaptation.terms.pseudo_labels import PseudoLabels
from usfan.errors import ConfigError
from usfan.posterior.kronecker import KroneckerPosterior
from usfan.reproduce.toy import adapt as toy_adapt
from usfan.reproduce.toy import experiment as toy
from usfan.reproduce.toy.adapt import TOY_METHODS, VARIANTS, StackedPosterior, adapt_stack
from usfan.reproduce.toy.model import StackedMLP, make_domains, train_stack
from usfan.scoring.objectives import information_maximization

SEEDS = (3, 11, 4)


def ordinary(stack: StackedMLP, index: int) -> nn.Sequential:
    """One of the stacked networks as a module like any other, float64."""
    network = nn.Sequential(
        nn.Linear(2, 20),
        nn.BatchNorm1d(20),
        nn.ReLU(),
        nn.Linear(20, 20),
        nn.BatchNorm1d(20),
        nn.ReLU(),
        nn.Linear(20, 3, bias=False),
    ).double()
    state = {"6.weight": stack.head[index]}
    for block, first in zip(stack.extractor, ("0", "3"), strict=True):
        norm = str(int(first) + 1)
        state[f"{first}.weight"], state[f"{first}.bias"] = block.weight[index], block.bias[index, :, 0]
        state[f"{norm}.weight"], state[f"{norm}.bias"] = block.scale[index], block.shift[index]
        state[f"{norm}.running_mean"], state[f"{norm}.running_var"] = (
            block.running_mean[index],
            block.running_var[index],
        )
        state[f"{norm}.num_batches_tracked"] = torch.tensor(0)
    network.load_state_dict(state)
    return network


def assert_same(stack: StackedMLP, index: int, network: nn.Sequential, atol: float = 1e-11) -> None:
    mine, theirs = ordinary(stack, index).state_dict(), network.state_dict()
    for name in theirs:
        if not name.endswith("num_batches_tracked"):
            torch.testing.assert_close(mine[name], theirs[name], rtol=1e-9, atol=atol)


def plain_sgd(parameters):
    return torch.optim.SGD(parameters, lr=1e-3, momentum=0.9, weight_decay=3e-3)


@pytest.fixture
def trained():
    """Three seeds after a few source steps, in float64."""
    domains, stack = make_domains(SEEDS), StackedMLP(SEEDS).double()
    train_stack(stack, domains.source.double(), domains.labels, steps=60)
    return domains, stack


def test_stacked_training_is_ordinary_training():
    domains, stack = make_domains(SEEDS), StackedMLP(SEEDS).double()
    points = domains.source.double()
    networks = [ordinary(stack, i) for i in range(len(SEEDS))]
    train_stack(stack, points, domains.labels, steps=3)
    for i, network in enumerate(networks):
        optimiser = plain_sgd(network.parameters())
        for _ in range(3):
            optimiser.zero_grad()
            functional.cross_entropy(network(points[i].T), domains.labels[i]).backward()
            optimiser.step()
        assert_same(stack, i, network)


@pytest.mark.parametrize("name", ["shot-im", "shot-im-entropy", "u-sfan+", "u-sfan (paper)"])
def test_stacked_adaptation_is_ordinary_adaptation(trained, name):
    domains, source = trained
    points, variant = domains.targets["strong"].double(), VARIANTS[name]
    posterior = StackedPosterior.fit(source, domains.source.double(), variant.prior, variant.samples)
    before = {key: value.clone() for key, value in source.state_dict().items()}
    adapted = adapt_stack(source, posterior, points, variant, steps=2)
    # KroneckerPosterior draws through a basis that is cut at 1e-5; without it the two agree to rounding.
    atol = 1e-7 if METHODS[variant.method].certainty.weights == "posterior" else 1e-11
    for i in range(len(SEEDS)):
        alone = adapt_one(ordinary(source, i), domains.source[i].double().T, points[i].T, name)
        assert_same(adapted, i, alone, atol)
    assert all(torch.equal(before[key], value) for key, value in source.state_dict().items())


def adapt_one(network: nn.Sequential, source_points: torch.Tensor, points: torch.Tensor, name: str) -> nn.Sequential:
    """Two steps of one network, written out."""
    variant, method, extractor, head = VARIANTS[name], METHODS[VARIANTS[name].method], network[:-1], network[-1]
    network.eval()
    with torch.no_grad():
        features = extractor(source_points)
        posterior = KroneckerPosterior.fit(features, head(features), head.weight, None, variant.prior)

    def weights(features, logits):
        if method.certainty.weights == "none":
            return torch.ones(len(points), dtype=torch.float64)
        if method.certainty.weights == "point":
            p = (logits / 0.4).softmax(1)
            return torch.exp((p * p.log()).sum(1))
        return posterior.certainty(features, 0.4, variant.samples)

    with torch.no_grad():
        features = extractor(points)
        w = weights(features, head(features))
        w = w / w.mean()
    optimiser = plain_sgd(extractor.parameters())
    for _ in range(2):
        # Ten refreshes in a run: in one of two steps, at every step.
        network.eval()
        with torch.no_grad():
            labels = nearest_centroid(extractor(points), network(points).softmax(1))
        network.train()
        features = extractor(points)
        logits = head(features)
        if variant.every_step:
            w = weights(features.detach(), logits.detach())
        p = logits.softmax(1)
        mean = p.mean(0)
        loss = (
            (-(w[:, None] * p * (p + 1e-5).log()).sum(1).mean() + (mean * (mean + 1e-5).log()).sum())
            * variant.scale
            / 2
        )
        if method.has(PseudoLabels):
            loss = loss + 0.3 * functional.cross_entropy(logits, labels)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return network


def test_stacked_predictive_is_the_posteriors_own(trained):
    domains, stack = trained
    posterior = StackedPosterior.fit(stack, domains.source.double(), 3e-3, samples=128)
    features, logits = stack.outputs(domains.source.double())
    there = stack.outputs(domains.targets["strong"].double())[0]
    probs = posterior.predictive(there)
    for i in range(len(SEEDS)):
        one = KroneckerPosterior.fit(features[i].T, logits[i].T, stack.head[i].detach(), None, 3e-3)
        torch.testing.assert_close(probs[i].T, one.predictive(there[i].T, 0.4, 128), rtol=0, atol=1e-5)
    torch.testing.assert_close(posterior.pick(1).predictive(there[1:2])[0], probs[1])


def test_stacked_objective_is_the_objective(trained):
    domains, stack = trained
    logits = stack.outputs(domains.targets["strong"].double())[1]
    weights = torch.rand(3, 500, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    expected = torch.stack([information_maximization(f.T, w, 0.3) for f, w in zip(logits, weights, strict=True)])
    torch.testing.assert_close(information_maximization(logits.mT, weights, 0.3), expected)


def test_target_classes_are_where_the_protocol_puts_them():
    domains = make_domains(range(40))
    for shift, moves in (("mild", (-1, 1.3, 1.5)), ("strong", (-10, 2.3, 3.3))):
        for k, (move, clockwise) in enumerate(zip(moves, (10, -10, -10), strict=True)):
            of_class = domains.labels[0] == k
            source, target = domains.source[:, :, of_class], domains.targets[shift][:, :, of_class]
            moved = (target.mean(dim=2) - source.mean(dim=2)).mean(dim=0)
            # A vector (t, t), at 45°, turned clockwise.
            angle = math.radians(45 - clockwise)
            expected = torch.tensor([math.cos(angle), math.sin(angle)]) * move * math.sqrt(2)
            torch.testing.assert_close(moved, expected, rtol=0, atol=0.1)
            spread = target.var(dim=2).mean().sqrt()
            assert abs(float(spread) - math.hypot(1.2 * 1.3, 1.5)) < 0.05
    assert domains.source.shape == (40, 2, 500)


def test_a_seed_does_not_depend_on_the_others():
    both, alone = make_domains([5, 9]), make_domains([9])
    assert torch.equal(both.source[1], alone.source[0])
    assert torch.equal(both.targets["strong"][1], alone.targets["strong"][0])
    assert torch.equal(StackedMLP([5, 9]).head[1], StackedMLP([9]).head[0])
    assert not torch.equal(both.source[0], both.source[1])


def test_bad_seeds_are_refused():
    with pytest.raises(ConfigError, match="at least one"):
        toy.study_toy([])
    with pytest.raises(ConfigError, match="once"):
        toy.study_toy([1, 2, 1])


def test_some_methods_only(tmp_path):
    metrics = toy.run_toy((2,), out=tmp_path, methods=["u-sfan", "source-only"], source_steps=40, target_steps=6)
    assert set(metrics["mild"]) == {"source-only", "u-sfan", "u-sfan (evidence)", "u-sfan (paper)"}
    assert not (tmp_path / "toy.png").exists()


def test_run_writes_its_folder_and_repeats_itself(tmp_path):
    steps = []
    quick = {"source_steps": 40, "target_steps": 6}
    metrics = toy.run_toy((2, 7), out=tmp_path / "toy", progress=steps.append, **quick)
    again = toy.study_toy((2, 7), **quick).metrics
    for shift in ("mild", "strong"):
        for name in VARIANTS:
            assert metrics[shift][name]["accuracies"] == again[shift][name]["accuracies"]
            assert metrics[shift][name]["runs"] == 2
    assert sum(steps) == 2 * (40 + 2 * (len(VARIANTS) - 1) * 6)
    assert json.loads((tmp_path / "toy" / "metrics.json").read_text()) == metrics
    files = {"metrics.json", "toy.png", "config.yaml", "study.json", "log.jsonl"}
    assert {p.name for p in (tmp_path / "toy").iterdir()} == files
    assert json.loads((tmp_path / "toy" / "study.json").read_text())["target_steps"] == 6
    lines = [json.loads(line) for line in (tmp_path / "toy" / "log.jsonl").read_text().splitlines()]
    assert len(lines) == 2 + 2 * len(VARIANTS)
    with Image.open(tmp_path / "toy" / "toy.png") as picture:
        assert picture.width > 2000
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(toy.table(metrics))
    assert f"{metrics['strong']['u-sfan']['accuracy']:.1f}" in console.export_text()


def test_its_config_gives_the_same_study_again(tmp_path, monkeypatch):
    real, short = toy.study_toy, {"source_steps": 4, "target_steps": 2}
    monkeypatch.setattr(toy, "study_toy", lambda seeds, **given: real(seeds, **{**given, **short}))
    one, two = tmp_path / "one", tmp_path / "two"
    assert usfan("reproduce", "toy", "--out", one, "--seeds", 3, 5, "--methods", "source-only", "u-sfan") == 0
    assert usfan("reproduce", "toy", "--out", two, "--config", one / "config.yaml") == 0
    found = [json.loads((out / "metrics.json").read_text())["strong"] for out in (one, two)]
    assert len(found[0]["u-sfan"]["accuracies"]) == 2
    accuracies = [{name: row["accuracies"] for name, row in metrics.items()} for metrics in found]
    assert accuracies[0] == accuracies[1]


@pytest.fixture(scope="module")
def study():
    """Six seeds, a shorter source stage; the target stage as it is."""
    return toy.study_toy(range(6), source_steps=1000, variants=TOY_METHODS)


def test_every_method_solves_the_mild_shift(study):
    for name in TOY_METHODS:
        assert study.metrics["mild"][name]["accuracy"] >= 92, name
        assert study.metrics["mild"][name]["flipped"] == 0, name
    for name in set(TOY_METHODS) - {"source-only"}:
        assert study.metrics["mild"][name]["accuracy"] > study.metrics["mild"]["source-only"]["accuracy"], name


def test_uncertainty_flips_no_more_runs_than_none(study):
    strong = study.metrics["strong"]
    assert strong["source-only"]["accuracy"] < 80
    assert strong["u-sfan"]["flipped"] <= strong["shot-im"]["flipped"]
    assert strong["u-sfan+"]["flipped"] <= strong["shot-im"]["flipped"]
    assert strong["u-sfan"]["accuracy"] >= strong["shot-im"]["accuracy"]


def test_weights_are_low_where_the_source_model_is_wrong(study):
    """What the posterior is for: under the strong shift, samples that the source model gets wrong count for less."""
    points, labels = study.domains.targets["strong"], study.domains.labels
    features, logits = study.source.outputs(points)
    right = logits.argmax(dim=1) == labels
    weights = toy_adapt.stacked_weights("posterior", features, logits, study.posteriors["u-sfan"], normalise=True)
    torch.testing.assert_close(weights.mean(dim=1), torch.ones(6))
    assert all(w[r].mean() > 1.2 * w[~r].mean() for w, r in zip(weights, right, strict=True))
