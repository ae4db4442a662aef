"""LSC, NRC and AaD: hand-computed values, loops over samples, derivatives, and any order of the batch."""

from __future__ import annotations

import math

import pytest
import torch
from running_terms import (
    Network,
    a_batch,
    in_threads,
    outputs,
    pictures,
    random_target,
    running,
)
from torch import Tensor

from oracles import field as oracle
from usfan.adaptation.terms.aad import AttractDisperse, dispersion
from usfan.adaptation.terms.bank import Bank
from usfan.adaptation.terms.lsc import LocalStructure
from usfan.adaptation.terms.nrc import Reciprocity, affinity
from usfan.engine.loop import Batch
from usfan.engine.runtime import Runtime
from usfan.errors import ConfigError
from usfan.maths import neighbours
from usfan.maths.outputs import Outputs

TERMS = {"lsc": LocalStructure, "nrc": Reciprocity, "aad": AttractDisperse}
SAMPLES = torch.tensor([3, 17, 8, 30, 21, 5])
LINE = outputs(torch.tensor([[0.9, 0.1], [0.8, 0.2], [0.4, 0.6], [0.1, 0.9]]).log(), torch.tensor(
    [[1.0, 0.0], [0.95, 0.05], [0.8, 0.5], [0.0, 1.0]]
))  # fmt: skip
"""Four samples at growing angles; each is nearest to the one before it or after it."""


def step(term: Bank, target: Outputs, samples: Tensor = SAMPLES, done: float = 0.3) -> Batch:
    """A batch whose features and predictions are not those of the last pass."""
    network = Network(target.features.shape[1], target.logits.shape[1])
    return a_batch(samples, pictures(len(target))[samples], network, done)


def known_rows(target: Outputs, sample: int, done: float = 0.0) -> Batch:
    """One sample as the last pass saw it."""
    row = slice(sample, sample + 1)
    features = target.features[row]
    logits = target.logits[row]
    return Batch(
        torch.tensor([sample]), features, features, logits, torch.tensor(done), lambda x: (x, x)
    )


def test_lsc_by_hand():
    term = running(LocalStructure(neighbours=2), LINE)
    # sample 0 (0.9, 0.1): its own row, and neighbour 1 (0.8, 0.2)
    expected = -math.log(0.81 + 0.01) - math.log(0.72 + 0.02)
    assert float(term(known_rows(LINE, 0))) == pytest.approx(expected)


def test_nrc_by_hand():
    term = running(Reciprocity(neighbours=2, further_neighbours=1), LINE)
    # sample 2: neighbours 1 and 0; their nearest are 0 and 1, so neither is reciprocal
    first = 0.8 * 0.4 + 0.2 * 0.6
    second = 0.9 * 0.4 + 0.1 * 0.6
    assert float(term(known_rows(LINE, 2))) == pytest.approx(
        -0.1 * (first + second) - 0.1 * (second + first)
    )
    # sample 0: neighbours 1, whose nearest is 0 itself, and 2, whose nearest is 1
    features_of_batch = 0.9**2 + 0.1**2
    near = 0.72 + 0.02
    far = 0.36 + 0.06
    assert float(term(known_rows(LINE, 0))) == pytest.approx(
        -near - 0.1 * far - 0.1 * (features_of_batch + near)
    )


@pytest.mark.parametrize(("decay", "alpha"), [(0.0, 1.0), (1.0, 1 / 6), (5.0, 6.0**-5)])
def test_aad_by_hand(decay, alpha):
    term = running(AttractDisperse(neighbours=1, dispersion_decay=decay), LINE)
    both = Batch(
        torch.tensor([0, 3]), LINE.features[[0, 3]], LINE.features[[0, 3]], LINE.logits[[0, 3]],
        torch.tensor(0.5), lambda x: (x, x),
    )  # fmt: skip
    pulled = (0.72 + 0.02) + (0.04 + 0.54)  # 0 to 1, 3 to 2
    pushed = 2 * (0.09 + 0.09)  # 0 and 3, each from the other
    assert float(term(both)) == pytest.approx((alpha * pushed - pulled) / 2)
    assert set(both.notes) == {"loss_neighbours", "loss_dispersion"}


@pytest.mark.parametrize("name", ["nrc", "aad"])
def test_bank_and_loss_are_those_of_loops(name):
    """Two steps: the second sees what the first wrote, and a refresh overwrites both. LSC: `test_authors`."""
    target = random_target()
    term = running(TERMS[name](neighbours=3), target)
    weights = [1.0] * len(target)
    bank = oracle.Bank(target.features.tolist(), target.probs.tolist())
    for samples in (SAMPLES, torch.tensor([8, 2, 39, 17])):
        batch = step(term, target, samples)
        bank.write(samples.tolist(), batch.features.tolist(), batch.probs.tolist())
        expected = {
            "nrc": oracle.nrc(bank, samples.tolist(), 3, 3, 0.1, weights),
            "aad": oracle.aad(
                bank, samples.tolist(), 3, 1 / 4, weights
            ),  # α = (1 + 10 · 0.3)^−1
        }
        assert float(term(batch).detach()) == pytest.approx(expected[name], rel=1e-6)
    assert not torch.allclose(term.probs, target.probs)
    term.refresh(target)
    torch.testing.assert_close(term.probs, target.probs)


@pytest.mark.parametrize("name", TERMS)
def test_derivative(name):
    """With the bank as the step finds it: no gradient passes through it."""
    target = random_target()
    term = running(TERMS[name](), target)
    plain = step(term, target)
    near = term.look(plain)
    term.look = lambda batch: near

    def loss(logits: Tensor) -> Tensor:
        return term(
            Batch(
                plain.samples,
                plain.images,
                plain.features.detach(),
                logits,
                plain.done,
                plain.forward,
            )
        )

    assert torch.autograd.gradcheck(loss, plain.logits.detach().requires_grad_())
    assert not term.probs.requires_grad
    assert not term.features.requires_grad


@pytest.mark.parametrize("name", TERMS)
def test_the_order_of_the_batch_does_not_matter(name):
    target = random_target()
    term = running(TERMS[name](), target)
    order = torch.tensor([4, 2, 0, 5, 1, 3])
    one = term(step(term, target))
    table = term.probs.clone()
    term.refresh(target)
    torch.testing.assert_close(term(step(term, target, SAMPLES[order])), one)
    torch.testing.assert_close(term.probs, table)


@pytest.mark.parametrize("name", TERMS)
@pytest.mark.parametrize("cut", [3, 1, 6])
def test_processes_share_the_bank_and_take_one_step(name, cut):
    """Two processes with parts of a batch, one of them perhaps with none: same loss, bank, and sum of gradients."""
    target = random_target()
    order = torch.randperm(40)[:6]

    def work(runtime: Runtime) -> tuple[Tensor, Tensor, Tensor]:
        term = running(TERMS[name](), target, runtime=runtime)
        features_of_batch = (
            order if runtime.world == 1 else (order[:cut], order[cut:])[runtime.rank]
        )
        batch = step(term, target, features_of_batch)
        loss = term(batch)
        grads = torch.autograd.grad(loss, batch.forward.parameters)
        return loss.detach(), term.probs, torch.cat([g.flatten() for g in grads])

    (loss, bank, gradient) = work(Runtime(torch.device("cpu")))
    parts = in_threads(2, work)
    for part in parts:
        torch.testing.assert_close(part[0], loss)
        torch.testing.assert_close(part[1], bank)
    torch.testing.assert_close(parts[0][2] + parts[1][2], gradient)


def test_unknown_samples_do_not_count():
    target = random_target()
    term = running(AttractDisperse(), target)
    term.guidance.known[SAMPLES[3:]] = 0
    batch = step(term, target)
    bank = oracle.Bank(target.features.tolist(), target.probs.tolist())
    bank.write(SAMPLES.tolist(), batch.features.tolist(), batch.probs.tolist())
    expected = oracle.aad(bank, SAMPLES[:3].tolist(), 3, 0.25, [1.0] * 40)
    assert float(term(batch).detach()) == pytest.approx(expected, rel=1e-6)
    assert float(dispersion(term.context, batch.probs.detach(), torch.zeros(6))) == 0


def test_neighbours_in_pieces(monkeypatch):
    """A bank so large that the batch is compared with it a row at a time; and one smaller than the neighbours."""
    bank = torch.nn.functional.normalize(torch.randn(50, 4), dim=1)
    rows = torch.randperm(50)[:7]
    whole = neighbours.nearest_in_bank(bank[rows], bank, 5, rows)
    assert whole.tolist() == [
        oracle.nearest(bank[i].tolist(), bank.tolist(), 5, i) for i in rows.tolist()
    ]
    monkeypatch.setattr(neighbours, "SIMILARITIES", 100)
    assert torch.equal(neighbours.nearest_in_bank(bank[rows], bank, 5, rows), whole)
    assert neighbours.nearest_in_bank(bank[:2], bank[:2], 5, torch.arange(2)).tolist() == [
        [1],
        [0],
    ]
    assert neighbours.nearest_in_bank(bank[:0], bank, 5, rows[:0]).shape == (0, 5)


def test_affinity():
    further = torch.tensor([[[0, 2], [3, 4]], [[1, 5], [5, 1]]])
    assert affinity(torch.tensor([2, 1]), further, 0.25).tolist() == [[1.0, 0.25], [1.0, 1.0]]


@pytest.mark.parametrize("kind", TERMS.values())
def test_no_neighbours_are_refused(kind):
    with pytest.raises(ConfigError, match="neighbours must be at least 1"):
        kind(neighbours=0)
