"""Each method's loss is the one it says it is: the terms against SHOT's program and the paper, in float64."""

import pytest
import torch
from spying import Trace, exact_certainty, spied_run
from torch import Tensor

from usfan.adaptation.centroids import nearest_centroid
from usfan.adaptation.terms.information import InformationMaximization
from usfan.adaptation.thresholds import CENTROID_LEAST
from usfan.maths import objectives

PLAIN = {"balance": False, "anneal": False, "diversity_memory": 0.0}
UNKNOWN = torch.arange(36) % 3 == 2


def recipe(logits: Tensor, weights: Tensor | float = 1.0) -> tuple[Tensor, Tensor]:
    """L_ent and L_div as SHOT's program computes them, in float64."""
    p = logits.double().softmax(1)
    entropy = -(p * torch.log(p + 1e-5)).sum(1)
    mean = p.mean(0)
    return (weights * entropy).mean(), (mean * torch.log(mean + 1e-5)).sum()


def close(value: Tensor | float, expected: Tensor) -> None:
    torch.testing.assert_close(
        torch.as_tensor(value).double(), expected.double(), rtol=1e-5, atol=1e-6
    )


def first_step(trace: Trace) -> tuple[dict[str, float], Tensor, Tensor]:
    """The figures of the first step, its logits, and the sample numbers of its batch."""
    (batch,) = trace.epochs[0].batches
    assert batch.samples.unique().numel() == 36
    return trace.records[0], batch.logits, batch.samples


def call_some_unknown(context) -> None:
    context.guidance.known.copy_((~UNKNOWN).float())
    context.guidance.diverse.copy_(
        context.guidance.known if context.guidance.separates else torch.ones(36)
    )


def test_shot_im_is_the_recipe(source):
    record, logits, _ = first_step(spied_run(source, "shot-im"))
    entropy, diversity = recipe(logits)
    close(record["loss_entropy"], entropy)
    close(record["loss_diversity"], diversity)
    close(record["loss"], entropy + diversity)
    assert "loss_pseudo" not in record


def test_shot_adds_the_pseudo_label_loss(source):
    trace = spied_run(source, "shot", pseudo_label_weight=0.3)
    record, logits, samples = first_step(trace)
    entropy, diversity = recipe(logits)
    outputs = trace.epochs[0].outputs
    labels = nearest_centroid(outputs.features, outputs.probs)[samples]
    picked = logits.double().log_softmax(1)[torch.arange(36), labels]
    close(record["loss_pseudo"], -picked.mean())
    close(record["loss"], entropy + diversity - 0.3 * picked.mean())


@pytest.mark.parametrize(
    ("setting", "threshold"), [("open", 0), ("partial", CENTROID_LEAST), ("closed", 0)]
)
def test_where_pseudo_labels_come_from(source, setting, threshold):
    """Nearest centroids of the known samples, and of the classes that are not rare."""
    trace = spied_run(source, "shot", setting=setting, pseudo_label_weight=0.3)
    outputs = trace.epochs[0].outputs
    (batch,) = trace.epochs[0].batches
    mask = trace.epochs[0].known if setting == "open" else None
    assert mask is None or 0 < float(mask.mean()) < 1
    labels = nearest_centroid(outputs.features, outputs.probs, threshold=threshold, mask=mask)[
        batch.samples
    ]
    picked = -batch.logits.double().log_softmax(1)[torch.arange(36), labels]
    keep = torch.ones(36) if mask is None else mask[batch.samples]
    close(trace.records[0]["loss_pseudo"], (picked * keep).sum() / keep.sum())


def test_u_sfan_balances_its_weights_and_looks_at_the_whole_target_for_diversity(source):
    """Weights of mean 1 within each predicted class; p̂ is nine tenths the target's, one tenth the batch's."""
    trace = spied_run(source, "u-sfan", diversity_memory=0.9)
    record, logits, samples = first_step(trace)
    weights = trace.epochs[0].weights
    outputs = trace.epochs[0].outputs
    predicted = outputs.probs.argmax(1)
    raw = exact_certainty(outputs.posterior_probs)
    assert float(weights.std()) > 0
    for label in predicted.unique():
        members = predicted == label
        close(weights[members], raw[members] / raw[members].mean())
    mean = 0.9 * outputs.probs.double().mean(0) + 0.1 * logits.double().softmax(1).mean(0)
    diversity = (mean * torch.log(mean + 1e-5)).sum()
    close(record["loss_diversity"], diversity)
    close(record["loss"], recipe(logits, weights[samples].double())[0] + diversity)


def test_annealed_certainty_counts_less_from_epoch_to_epoch(source):
    """Powers 2, 4/3 and 2/3 for three epochs."""
    trace = spied_run(source, "u-sfan", **{**PLAIN, "anneal": True}, epochs=3)
    assert len(trace.epochs) == 3
    for epoch, power in zip(trace.epochs, (2, 4 / 3, 2 / 3), strict=True):
        raw = exact_certainty(epoch.outputs.posterior_probs)
        close(epoch.weights, raw**power / (raw**power).mean())


def test_the_memory_of_diversity_has_the_gradient_of_the_batch(source):
    """d L_div / d p̄_k = log m_k + m_k / (m_k + 1e-5), at the mixed mean m, not times the share of the batch."""
    context = spied_run(source, "shot-im").context
    term = InformationMaximization(diversity_memory=0.9).started(context)
    term.refresh(context.source)
    probs = torch.randn(8, 3).softmax(1).requires_grad_()
    mean = term.mean_probs(probs, torch.ones(8))
    close(mean.detach(), 0.9 * context.source.probs.mean(0) + 0.1 * probs.detach().mean(0))
    objectives.diversity(mean).backward()
    slope = torch.log(mean + 1e-5) + mean / (mean + 1e-5)
    close(probs.grad, (slope / 8).detach().expand(8, -1))


def test_u_sfan_weighs_by_the_table_of_the_epoch(source):
    trace = spied_run(source, "u-sfan", **PLAIN)
    record, logits, samples = first_step(trace)
    weights = trace.epochs[0].weights
    close(weights.mean(), torch.ones(()))
    assert float(weights.std()) > 0
    entropy, diversity = recipe(logits, weights[samples].double())
    close(record["loss"], entropy + diversity)


def test_the_paper_preset_weighs_each_step_as_algorithm_1(source):
    """w = exp(−H) of the batch's own predictive under the prior 5e-4, not normalised; γ = ½ and no factor of 2."""
    trace = spied_run(source, "u-sfan", preset="paper")
    record, logits, _ = first_step(trace)
    posterior = source.posterior.with_prior(5e-4)
    assert trace.context.uncertainty.prior_precision == pytest.approx(5e-4)
    weights = posterior.certainty(trace.epochs[0].batches[0].features, 0.4, 128)
    assert float(weights.std()) > 0
    entropy, diversity = recipe(logits, weights.double())
    close(record["loss"], 0.5 * entropy + 0.5 * diversity)


def test_the_authors_preset_weighs_as_their_program(source):
    """Weights of the test views under a prior of variance 5e-4, neither normalised nor balanced; both terms count once.
    They are new ten times in a run."""
    trace = spied_run(source, "u-sfan", preset="authors", epochs=15)
    record, logits, samples = first_step(trace)
    posterior = source.posterior.with_prior(2000.0, damping="factored", curvature="mean")
    first = trace.epochs[0]
    weights = posterior.certainty(first.outputs.features, 0.4, 100)
    close(first.weights, weights)
    entropy, diversity = recipe(logits, weights[samples].double())
    close(record["loss"], entropy + diversity)
    tables = [epoch.weights for epoch in trace.epochs]
    new = [0] + [i for i in range(1, 15) if not torch.equal(tables[i], tables[i - 1])]
    assert new == [0, 2, 3, 5, 6, 8, 9, 11, 12, 14]


def test_shot_im_entropy_weighs_by_the_point_estimate(source):
    trace = spied_run(source, "shot-im-entropy", refresh="step", normalise_weights=False)
    record, logits, _ = first_step(trace)
    entropy, diversity = recipe(logits, exact_certainty((logits.double() / 0.4).softmax(1)))
    close(record["loss"], entropy + diversity)


@pytest.mark.parametrize("separation", [0.5, 1.0])
def test_separation_lowers_the_entropy_of_known_and_raises_that_of_unknown_samples(
    source, separation
):
    trace = spied_run(
        source,
        "u-sfan",
        setting="open",
        separation=separation,
        meddle=call_some_unknown,
        epochs=2,
        **PLAIN,
    )
    (batch,) = trace.epochs[1].batches
    epoch = trace.epochs[1]
    known = ~UNKNOWN[batch.samples]
    entropy, diversity = recipe(
        batch.logits[known], epoch.weights[batch.samples][known].double()
    )
    close(
        trace.records[1]["loss"],
        entropy + diversity - separation * recipe(batch.logits[~known])[0],
    )


@pytest.mark.parametrize(
    ("method", "given"), [("shot-im", {}), ("u-sfan", {**PLAIN, "separation": 0.0})]
)
def test_the_recipe_leaves_unknown_samples_out_of_the_entropy_term_only(source, method, given):
    trace = spied_run(
        source, method, setting="open", meddle=call_some_unknown, epochs=2, **given
    )
    (batch,) = trace.epochs[1].batches
    epoch = trace.epochs[1]
    known = ~UNKNOWN[batch.samples]
    entropy, _ = recipe(batch.logits[known], epoch.weights[batch.samples][known].double())
    close(trace.records[1]["loss"], entropy + recipe(batch.logits)[1])


def test_partial_set_has_no_diversity_term(source):
    record, logits, _ = first_step(spied_run(source, "shot-im", partial_set=True))
    close(record["loss"], recipe(logits)[0])


@pytest.mark.parametrize("separation", [0.0, 1.0])
def test_the_memory_of_diversity_is_over_what_diversity_is_over(source, separation):
    """With the whole target as the batch, the mean that L_div judges is the memory."""
    trace = spied_run(source, "u-sfan", setting="open", separation=separation)
    context = trace.context
    epoch = trace.epochs[0]
    assert 0 < float(epoch.known.mean()) < 1
    term = InformationMaximization(diversity_memory=0.9).started(context)
    term.refresh(epoch.outputs)
    share = epoch.known if separation else torch.ones(36)
    assert torch.equal(context.guidance.diverse, share)
    close(term.marginal, objectives.global_mean(epoch.outputs.probs, objectives.alone, share))


@pytest.mark.parametrize(
    ("given", "shares"),
    [({"pseudo_label_warmup": 2}, [0, 0, 0.1, 0.1]), ({"pseudo_label_warmup": 0}, [0.1] * 4)],
)
def test_the_pseudo_label_loss_waits(source, given, shares):
    records = spied_run(source, "u-sfan+", epochs=4, **given).records
    rest = [r["loss"] - r["loss_entropy"] - r["loss_diversity"] for r in records]
    assert rest == pytest.approx(
        [share * r["loss_pseudo"] for share, r in zip(shares, records, strict=True)], abs=1e-4
    )


def test_each_batch_is_weighed_by_its_own_samples(source):
    """Several batches an epoch: rows of the tables are read by sample number, and none is left out."""
    trace = spied_run(source, "u-sfan", batch_size=9, **PLAIN)
    epoch = trace.epochs[0]
    assert len(epoch.batches) == 4
    losses = [sum(recipe(b.logits, epoch.weights[b.samples].double())) for b in epoch.batches]
    close(trace.records[0]["loss"], torch.stack(losses).mean())
    assert torch.cat([b.samples for b in epoch.batches]).sort().values.tolist() == list(
        range(36)
    )
