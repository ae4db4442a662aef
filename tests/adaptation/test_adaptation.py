"""Stage 2 through its one door: what it may see, that seeds repeat, and that each method is the value it says it is."""

import dataclasses
import inspect
import weakref

import numpy as np
import pytest
import torch

import usfan
from lookalikes import picture
from usfan.adaptation.adapt import Adaptation
from usfan.adaptation.guard import TRUSTED, WITNESS, Guard
from usfan.adaptation.centroids import nearest_centroid, nearest_gaussian
from usfan.adaptation.settings import begun_with, choose_posterior, resolve_defaults
from usfan.adaptation.weights import raw_weights
from usfan.compute.passes import engine_store, forward, set_mode
from usfan.compute.runtime import start_runtime
from usfan.compute.stepper import no_collection
from usfan.config import LABEL_SOURCES, AdaptConfig, make_config
from usfan.data.cache import PixelStore
from usfan.errors import ConfigError, DataError
from usfan.posterior.predictive import certainty_weights
from usfan.runs.folder import RunFolder
from usfan.scoring import objectives
from usfan.scoring.outputs import Outputs

CLASSES = ("a", "b", "c")
TINY = {"epochs": 2, "batch_size": 8}


def squares(images: int = 12, domain: int = 3, classes: int = 3) -> usfan.ImageData:
    labels = np.tile(np.arange(classes), images)
    pixels = np.stack([picture(int(label), domain, i, 28, grey=True) for i, label in enumerate(labels)])
    return usfan.ImageData(pixels, labels=labels, classes=CLASSES[:classes], name="squares")


@pytest.fixture(scope="module")
def source():
    settings = {"backbone": "digits-cnn", "epochs": 3, "batch_size": 8, "bottleneck": 16}
    return usfan.train_source(squares(domain=0), **settings)


def state(model) -> dict[str, torch.Tensor]:
    return model.classifier.state_dict()


def same(a, b) -> bool:
    return all(torch.equal(state(a)[k], state(b)[k]) for k in state(a))


@pytest.mark.parametrize("method", usfan.METHODS)
def test_same_seed_same_bits(source, method):
    runs = [usfan.adapt(source, squares(), method, seed=5, guard=False, **TINY) for _ in range(2)]
    assert same(*runs)
    assert torch.equal(runs[0].passes.after.probs, runs[1].passes.after.probs)


def test_another_seed_gives_another_model_and_the_source_is_left_alone(source):
    before = {k: v.clone() for k, v in state(source).items()}
    one, other = (usfan.adapt(source, squares(), seed=seed, guard=False, **TINY) for seed in (0, 1))
    assert not same(one, other)
    assert not same(one, source)
    assert all(torch.equal(before[k], v) for k, v in state(source).items())
    weight, bias = one.classifier.head_tensors()
    assert torch.equal(weight, source.classifier.head_tensors()[0])  # the head stays
    assert torch.equal(bias, source.classifier.head_tensors()[1])


def test_source_only_is_the_source(source):
    model = usfan.adapt(source, squares(), "source-only", **TINY)
    assert same(model, source)
    assert (model.history["epochs"], model.history["kept_epoch"]) == (0, 0)
    assert torch.equal(model.passes.before.probs, model.passes.after.probs)


class Untouchable:
    """Labels that nobody may look at."""

    def __getattribute__(self, name):
        raise AssertionError(f"labels were touched: {name}")

    def __getitem__(self, key):
        raise AssertionError("labels were read")


def test_labels_are_never_touched(source):
    data = squares()
    data.labels = Untouchable()
    plain = usfan.adapt(source, squares().without_labels(), "u-sfan+", **TINY)
    assert same(usfan.adapt(source, data, "u-sfan+", **TINY), plain)
    store = engine_store(squares().without_labels(), source.spec, start_runtime(None))
    labelled = PixelStore(store.pixels, store.kept, Untouchable(), CLASSES)
    assert same(usfan.adapt(source, labelled, "u-sfan+", **TINY), plain)


def test_there_is_no_way_in_for_source_data():
    names = list(inspect.signature(usfan.adapt).parameters)
    assert names == ["source", "data", "method", "runtime", "run", "progress", "settings"]
    assert not [name for name in AdaptConfig.__dataclass_fields__ if "source" in name and "pseudo_label" not in name]


def first_step(source, **settings):
    """An adaptation after its first look at the target, and the features and logits of a first batch."""
    runtime = start_runtime(None)
    config = resolve_defaults(make_config(AdaptConfig, {**TINY, **settings}), source)
    store = engine_store(squares().without_labels(), source.spec, runtime)
    run = Adaptation(source, store, config, runtime)
    run.refresh(0)
    set_mode(run.classifier, training=True)
    samples = torch.arange(8)
    with torch.no_grad():
        features, logits = forward(run.classifier, run.feeder.view(samples), runtime)
    run.optimiser.schedule(0)
    run.objective.pseudo_label_weight.fill_(config.pseudo_label_weight)
    return run, samples, features, logits


def recipe(logits: torch.Tensor, weights: torch.Tensor | float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """L_ent and L_div as SHOT's program computes them, in float64."""
    p = logits.double().softmax(1)
    entropy = -(p * torch.log(p + 1e-5)).sum(1)
    mean = p.mean(0)
    return (weights * entropy).mean(), (mean * torch.log(mean + 1e-5)).sum()


def close(value: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(value.double(), expected.double(), rtol=1e-5, atol=1e-6)


def test_shot_im_is_the_recipe(source):
    run, samples, _, logits = first_step(source, method="shot-im")
    loss, loss_entropy, loss_diversity, loss_pseudo = run.step(samples)
    entropy, diversity = recipe(logits)
    close(loss_entropy, entropy)
    close(loss_diversity, diversity)
    close(loss, entropy + diversity)
    assert float(loss_pseudo) == 0


def test_shot_adds_the_pseudo_label_loss(source):
    run, samples, _, logits = first_step(source, method="shot", pseudo_label_weight=0.3)
    loss, _, _, loss_pseudo = run.step(samples)
    entropy, diversity = recipe(logits)
    picked = logits.double().log_softmax(1)[torch.arange(8), run.guidance.pseudo_labels[samples]]
    close(loss_pseudo, -picked.mean())
    close(loss, entropy + diversity - 0.3 * picked.mean())


@pytest.mark.parametrize("open_set", [True, False])
def test_where_pseudo_labels_come_from(source, open_set):
    """Each source of them is what it says, of the known samples where there are others."""
    given = {"method": "shot", "open_set": open_set}
    for name in LABEL_SOURCES:
        run, *_ = first_step(source, pseudo_label_source=name, **given)
        outputs, mask = run.outputs(), run.guidance.known if open_set else None
        probs = outputs.posterior_probs if name == "posterior-centroid" else outputs.probs
        expected = nearest_centroid(outputs.features, probs, mask=mask)
        if name == "gaussian":
            expected = nearest_gaussian(outputs.features, expected, len(CLASSES), mask=mask)
        if name != "propagation":
            assert torch.equal(run.guidance.pseudo_labels, expected)
        assert set(run.guidance.pseudo_labels.tolist()) <= set(range(len(CLASSES)))


def test_u_sfan_balances_its_weights_and_looks_at_the_whole_target_for_diversity(source):
    """Weights of mean 1 within each predicted class; p̂ is nine tenths the target's, one tenth the batch's."""
    run, samples, _, logits = first_step(source, method="u-sfan")
    loss, _, loss_diversity, _ = run.step(samples)
    weights, outputs = run.guidance.weights, run.guard.source
    predicted = outputs.probs.argmax(1)
    raw = outputs.posterior_probs.double()
    raw = torch.exp((raw * raw.log()).sum(1))
    for label in predicted.unique():
        own = predicted == label
        close(weights[own], raw[own] / raw[own].mean())
    mean = 0.9 * outputs.probs.double().mean(0) + 0.1 * logits.double().softmax(1).mean(0)
    close(loss_diversity, (mean * torch.log(mean + 1e-5)).sum())
    close(loss, recipe(logits, weights[samples].double())[0] + loss_diversity)


def test_annealed_certainty_counts_less_from_epoch_to_epoch(source):
    """Powers 2, 1 for two epochs; what is seen after the last is what the last was guided by."""
    run, *_ = first_step(source, method="u-sfan", anneal=True, balance=False, epochs=2)
    for epoch, power in ((0, 2), (1, 1), (2, 1)):
        raw = run.refresh(epoch).posterior_probs.double()
        raw = torch.exp((raw * raw.log()).sum(1))
        close(run.guidance.weights, raw**power / (raw**power).mean())
    assert not resolve_defaults(make_config(AdaptConfig, {"preset": "paper"}), source).anneal


def test_the_memory_of_diversity_has_the_gradient_of_the_batch(source):
    """d L_div / d p̄_k = log m_k + m_k / (m_k + 1e-5), at the mixed mean m, not times the share of the batch."""
    run, _, _, logits = first_step(source, method="u-sfan")
    probs = logits.softmax(1).requires_grad_()
    mean = run.objective.mean_probs(probs, torch.ones(8), torch.ones(8))
    objectives.diversity(mean).backward()
    slope = torch.log(mean + 1e-5) + mean / (mean + 1e-5)
    close(probs.grad, (slope / 8).detach().expand(8, -1))


PLAIN = {"balance": False, "diversity_memory": 0.0}


def test_u_sfan_weighs_by_the_table_of_the_epoch(source):
    run, samples, _, logits = first_step(source, method="u-sfan", **PLAIN)
    loss, _, _, _ = run.step(samples)
    weights = run.guidance.weights
    close(weights.mean(), torch.ones(()))
    assert float(weights.std()) > 0
    entropy, diversity = recipe(logits, weights[samples].double())
    close(loss, entropy + diversity)


def test_the_paper_preset_weighs_each_step_as_algorithm_1(source):
    """w = exp(−H) of the batch's own predictive under the prior 5e-4, not normalised; γ = ½ and no factor of 2."""
    run, samples, features, logits = first_step(source, method="u-sfan", preset="paper")
    loss, _, _, _ = run.step(samples)
    posterior = choose_posterior(source.posterior, run.config)
    assert posterior.prior_precision == pytest.approx(5e-4)
    weights = posterior.certainty(features, 0.4, 128)
    entropy, diversity = recipe(logits, weights.double())
    close(loss, 0.5 * entropy + 0.5 * diversity)


def test_shot_im_entropy_weighs_by_the_point_estimate(source):
    run, samples, features, logits = first_step(
        source, method="shot-im-entropy", refresh="step", normalise_weights=False
    )
    loss, _, _, _ = run.step(samples)
    p = (logits.double() / 0.4).softmax(1)
    weights = torch.exp((p * p.log()).sum(1))
    entropy, diversity = recipe(logits, weights)
    close(loss, entropy + diversity)
    options = {"temperature": 0.4, "samples": 128}
    close(raw_weights("point", features, logits, source.posterior, **options), weights)
    assert bool((raw_weights("none", features, logits, source.posterior, **options) == 1).all())


def test_weights_on_the_pseudo_labels_alone(source):
    settings = {"weigh_entropy": False, "weigh_pseudo_labels": True, "pseudo_label_weight": 0.3}
    run, samples, _, logits = first_step(source, method="u-sfan+", **settings, **PLAIN)
    loss, _, _, loss_pseudo = run.step(samples)
    picked = logits.double().log_softmax(1)[torch.arange(8), run.guidance.pseudo_labels[samples]]
    close(loss_pseudo, -(run.guidance.weights[samples].double() * picked).mean())
    close(loss, sum(recipe(logits)) + 0.3 * loss_pseudo)


def test_weights_inside_the_diversity_term(source):
    run, samples, _, logits = first_step(source, method="u-sfan", weigh_diversity=True, **PLAIN)
    _, _, loss_diversity, _ = run.step(samples)
    weights = run.guidance.weights[samples].double()
    mean = (weights[:, None] * logits.double().softmax(1)).sum(0) / weights.sum()
    close(loss_diversity, (mean * torch.log(mean + 1e-5)).sum())


def test_open_set_separation_lowers_the_entropy_of_known_and_raises_that_of_unknown_samples(source):
    run, samples, _, logits = first_step(source, method="shot-im", open_set=True, separation=1.0)
    known = torch.tensor([1.0, 1, 1, 1, 1, 0, 0, 0])
    run.guidance.known[samples] = known
    loss, _, _, _ = run.step(samples)
    entropy, diversity = recipe(logits[known > 0])
    close(loss, entropy + diversity - recipe(logits[known == 0])[0])


def test_the_recipe_leaves_unknown_samples_out_of_the_entropy_term_only(source):
    run, samples, _, logits = first_step(source, method="shot-im", open_set=True, separation=0.0)
    known = torch.tensor([1.0, 1, 1, 1, 1, 0, 0, 0])
    run.guidance.known[samples] = known
    loss, _, _, _ = run.step(samples)
    close(loss, recipe(logits[known > 0])[0] + recipe(logits)[1])


def test_partial_set_has_no_diversity_term(source):
    run, samples, _, logits = first_step(source, method="shot-im", partial_set=True)
    loss, _, _, _ = run.step(samples)
    close(loss, recipe(logits)[0])


@pytest.mark.parametrize(
    "settings", [{"partial_set": True}, {"batch_norm": "frozen"}, {"neighbours": 3}, {"refresh": "step"}]
)
def test_other_settings_run(source, settings):
    model = usfan.adapt(source, squares(), "u-sfan+", **TINY, **settings)
    assert bool(torch.isfinite(model.passes.after.probs).all())


def test_frozen_batch_norm_keeps_the_statistics_of_the_source(source):
    frozen = usfan.adapt(source, squares(), guard=False, batch_norm="frozen", **TINY)
    names = [k for k in state(source) if "running" in k]
    assert names
    assert all(torch.equal(state(frozen)[k], state(source)[k]) for k in names)


def test_views_while_adapting_are_the_sources_or_those_asked_for(source):
    own = usfan.adapt(source, squares(), guard=False, **TINY)
    same = usfan.adapt(source, squares(), guard=False, augment=source.spec.augment, **TINY)
    other = "none" if source.spec.augment != "none" else "resized-crop"
    changed = usfan.adapt(source, squares(), guard=False, augment=other, **TINY)
    assert all(torch.equal(state(own)[k], state(same)[k]) for k in state(own))
    assert any(not torch.equal(state(own)[k], state(changed)[k]) for k in state(own))
    assert changed.spec == source.spec


def test_the_guard_keeps_what_the_validator_prefers_and_off_keeps_the_last(source):
    kept = usfan.adapt(source, squares(), **TINY)
    scores = [r["validators"]["information_maximization"] for r in kept.history["records"]]
    assert scores[kept.history["kept_epoch"]] == max(scores)
    last = usfan.adapt(source, squares(), guard=False, **TINY)
    assert last.history["kept_epoch"] == 2


def test_a_run_that_diverges_falls_back(source):
    model = usfan.adapt(source, squares(), **{**TINY, "lr": 1e6, "epochs": 3})
    assert bool(torch.isfinite(model.passes.after.probs).all())
    assert model.history["kept_epoch"] < 3


def test_two_classes():
    pair = squares(classes=2)
    model = usfan.train_source(pair, backbone="digits-cnn", epochs=1, batch_size=8, bottleneck=8)
    for settings in ({}, {"open_set": True}, {"partial_set": True}):
        assert usfan.adapt(model, pair, "u-sfan+", **TINY, **settings).passes.after.probs.shape == (24, 2)


def distrusted(knowledge=WITNESS, **validators):
    return Guard.distrust({"drift": 0.4, "doubtful_drift": 0.8, **validators}, knowledge)


def test_the_guard_distrusts_a_run_that_moves_what_the_source_was_certain_of():
    assert distrusted() is None
    assert distrusted(doubtful_drift=TRUSTED) is None
    assert distrusted(doubtful_drift=0.3, drift=0.01) is None
    assert distrusted(doubtful_drift=0.3, knowledge=0.9 * WITNESS) is None
    reason = distrusted(doubtful_drift=0.3)
    assert "40% of the images" in reason
    assert "0.30" in reason


def test_swapped_classes_are_not_kept(source, monkeypatch):
    """The more certain half of the images gets another class: as confident, as diverse, and yet the guard sees it."""
    plain = Adaptation.outputs

    def swapped(self):
        found = plain(self)
        if self.guard.source is None:
            return found
        certain = certainty_weights(found.posterior_probs)
        logits = torch.where((certain > certain.median())[:, None], found.logits.roll(1, dims=1), found.logits)
        return dataclasses.replace(found, logits=5 * logits, probs=(5 * logits).softmax(1))

    monkeypatch.setattr(Adaptation, "outputs", swapped)
    monkeypatch.setattr(Adaptation, "train_epoch", lambda self, epoch: None)
    monkeypatch.setattr(Guard, "source_knowledge", lambda self: 1.0)
    model = usfan.adapt(source, squares(), **TINY)
    before, *_, last = (record["validators"] for record in model.history["records"])
    assert last["information_maximization"] > before["information_maximization"]
    assert last["doubtful_drift"] == 0
    assert model.history["kept_epoch"] == 0
    assert "not trusted" in model.history["guard"]["reason"]
    assert same(model, source)


@pytest.mark.parametrize("settings", [{}, {"open_set": True}])
def test_the_seed_alone_decides_with_dropout_too(settings):
    source = usfan.train_source(squares(), backbone="lenet", epochs=1, batch_size=8, bottleneck=8)
    models = []
    for noise in (1, 2):
        torch.manual_seed(noise)
        models.append(usfan.adapt(source, squares(), guard=False, **TINY, **settings))
    assert same(*models)


@pytest.mark.parametrize("settings", [{"open_set": True}, {"open_set": True, "method": "shot-im"}, {}])
def test_a_run_that_diverges_falls_back_in_open_set_too(source, settings):
    model = usfan.adapt(source, squares(), **{**TINY, "lr": 1e12, "epochs": 3, **settings})
    assert bool(torch.isfinite(model.passes.after.probs).all())
    assert model.history["kept_epoch"] < 3


@pytest.mark.parametrize("weigh", [True, False])
@pytest.mark.parametrize("separation", [0.0, 1.0])
def test_the_memory_of_diversity_is_over_what_diversity_is_over(source, separation, weigh):
    """With the whole target as the batch, the mean that L_div judges is the memory."""
    run, *_ = first_step(source, method="u-sfan", open_set=True, separation=separation, weigh_diversity=weigh)
    outputs, guide = run.guard.source, run.guidance
    assert 0 < float(guide.known.mean()) < 1
    run.objective.config = dataclasses.replace(run.config, diversity_memory=0.0)
    close(run.objective.mean_probs(outputs.probs, guide.weights, guide.known), guide.marginal)


@pytest.mark.parametrize(
    "settings",
    [
        {"balance": True, "normalise_weights": False},
        {"balance": True, "refresh": "step"},
        {"anneal": True, "refresh": "step"},
        {"certainty": "epistemic", "refresh": "step"},
        {"objective_scale": float("nan")},
        {"objective_scale": -1.0},
        {"pseudo_label_weight": float("nan")},
        {"separation": -1.0},
    ],
)
def test_settings_that_cannot_be_kept_are_refused(settings):
    with pytest.raises(ConfigError):
        make_config(AdaptConfig, settings)


def test_defaults_that_depend_on_other_settings(source):
    def chosen(**settings):
        return resolve_defaults(make_config(AdaptConfig, settings), source)

    assert chosen().balance
    assert not chosen(normalise_weights=False).balance
    assert not chosen(refresh="step").balance
    assert not chosen(method="shot-im").balance
    enough = 4 * len(CLASSES)
    assert chosen(batch_size=enough).diversity_memory == 0
    assert chosen(batch_size=enough - 1).diversity_memory == 0.9
    assert chosen(batch_size=enough, diversity_memory=0.5).diversity_memory == 0.5


@pytest.mark.parametrize(
    ("method", "settings", "small", "large"),
    [  # (annealed, epochs before pseudo-labels)
        ("u-sfan", {}, (False, 0), (True, 0)),
        ("u-sfan+", {}, (False, 1), (False, 0)),
        ("shot", {}, (False, 0), (False, 0)),
        ("u-sfan", {"refresh": "step"}, (False, 0), (False, 0)),
        ("u-sfan", {"normalise_weights": False}, (False, 0), (False, 0)),
        ("u-sfan", {"epochs": 3}, (False, 0), (False, 0)),
        ("u-sfan+", {"epochs": 3}, (False, 0), (False, 0)),
        ("u-sfan", {"open_set": True}, (False, 0), (False, 0)),
        ("u-sfan+", {"open_set": True}, (False, 0), (False, 0)),
        ("u-sfan", {"partial_set": True}, (False, 0), (False, 0)),
        ("u-sfan+", {"partial_set": True}, (False, 0), (False, 0)),
        ("u-sfan", {"epochs": 4}, (False, 0), (True, 0)),
        ("u-sfan+", {"epochs": 4}, (False, 1), (False, 0)),
        ("u-sfan", {"preset": "paper", "refresh": "epoch", "normalise_weights": True}, (False, 0), (False, 0)),
        ("u-sfan+", {"preset": "paper", "pseudo_label_warmup": None}, (False, 0), (False, 0)),
        ("u-sfan", {"preset": "paper"}, (False, 0), (False, 0)),
        ("u-sfan+", {"preset": "paper", "refresh": "epoch", "normalise_weights": True}, (False, 0), (False, 0)),
        ("u-sfan", {"anneal": True, "open_set": True}, (True, 0), (True, 0)),
        ("u-sfan", {"anneal": False}, (False, 0), (False, 0)),
        ("u-sfan+", {"pseudo_label_warmup": 0}, (False, 0), (False, 0)),
        ("u-sfan+", {"pseudo_label_warmup": 2, "epochs": 3}, (False, 2), (False, 2)),
    ],
)
def test_schedules_by_method_and_network(source, method, settings, small, large):
    other = dataclasses.replace(source, architecture={**source.architecture, "backbone": "resnet50"})
    for model, wanted in ((source, small), (other, large)):
        config = resolve_defaults(make_config(AdaptConfig, {"method": method, **settings}), model)
        assert (config.anneal, config.pseudo_label_warmup) == wanted


@pytest.mark.parametrize(("given", "shares"), [({}, [0, 0.1, 0.1, 0.1]), ({"pseudo_label_warmup": 0}, [0.1] * 4)])
def test_the_pseudo_label_loss_waits(source, given, shares):
    model = usfan.adapt(source, squares(), "u-sfan+", epochs=4, batch_size=8, guard=False, **given)
    records = [record for record in model.history["records"] if "loss" in record]
    rest = [r["loss"] - r["loss_entropy"] - r["loss_diversity"] for r in records]
    assert rest == pytest.approx([share * r["loss_pseudo"] for share, r in zip(shares, records, strict=True)], abs=1e-4)


class Stopped(Exception):
    pass


@pytest.mark.parametrize("says", [True, False], ids=["says", "does not say"])
def test_a_run_goes_on_with_what_was_chosen_when_it_began(source, tmp_path, monkeypatch, says):
    """Here it began with pseudo-labels at once; the default is to wait."""

    def begin(**settings):
        with RunFolder(tmp_path / "run", {}, command="adapt", resume=True) as run:
            return usfan.adapt(source, squares(), "u-sfan+", epochs=4, batch_size=8, run=run, guard=False, **settings)

    def stop(self, epoch):
        if epoch == 2:
            raise Stopped
        return train(self, epoch)

    train = Adaptation.train_epoch
    with monkeypatch.context() as patch:
        patch.setattr(Adaptation, "train_epoch", stop)
        if not says:  # an earlier version
            patch.setattr("usfan.adaptation.adapt.chosen_settings", lambda config: None)
        with pytest.raises(Stopped):
            begin(pseudo_label_warmup=0)
    with RunFolder(tmp_path / "run", {}, command="adapt", resume=True) as run:
        given = make_config(AdaptConfig, {"pseudo_label_warmup": 2, "anneal": None})
        found = begun_with(given, run.load_checkpoint()[2])
        assert (found.pseudo_label_warmup, found.anneal) == (2, False)  # what is given counts
    assert begin().history["chosen"]["pseudo_label_warmup"] == 0


def test_a_run_that_ended_is_freed_at_once(source):
    """Its tables, gradients and kept states would stay on the GPU until Python collects garbage."""
    store = engine_store(squares().without_labels(), source.spec, start_runtime(None))
    config = resolve_defaults(make_config(AdaptConfig, TINY), source)
    run = Adaptation(source, store, config, start_runtime(None))
    seen = weakref.ref(run)
    with no_collection():
        run.run()
        del run
        assert seen() is None


def test_separation_is_the_small_networks(source):
    large = dataclasses.replace(source, architecture={**source.architecture, "backbone": "resnet50"})
    chosen = [resolve_defaults(make_config(AdaptConfig, {"open_set": True}), model) for model in (source, large)]
    assert [config.separation for config in chosen] == [1.0, 0.0]
    asked = resolve_defaults(make_config(AdaptConfig, {"open_set": True, "separation": 0.5}), large)
    assert asked.separation == 0.5


def test_a_partial_target_is_not_judged_by_its_diversity():
    spread = {"entropy": 1.0, "information_maximization": 1.0}
    sure = {"entropy": 0.1, "information_maximization": 0.5}
    assert Guard(enabled=True).score(spread) > Guard(enabled=True).score(sure)
    assert Guard(enabled=True, partial=True).score(sure) > Guard(enabled=True, partial=True).score(spread)


def test_one_image_is_too_few(source):
    with pytest.raises(DataError, match="one image is too few"):
        usfan.adapt(source, squares().subset([0]), **TINY)
    assert len(usfan.adapt(source, squares().subset([0]), "source-only").passes.after) == 1


def test_what_a_source_model_knows_of_the_target():
    guard = Guard(enabled=True)
    assert guard.source_knowledge() == 0
    for probs, share in ((torch.eye(4), 1.0), (torch.full((5, 4), 0.25), 0.0), (torch.eye(4)[[0, 0, 1, 1]], 0.5)):
        guard.source = Outputs(probs, probs, probs, probs, probs[:, 0])
        assert guard.source_knowledge() == pytest.approx(share, abs=1e-6)
