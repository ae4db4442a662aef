"""The mixture against naive loops in float64, and the monotone fall of its free energy."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from usfan.errors import UsfanError
from usfan.maths import cluster_mixture as mx


def named_clusters(seed: int, n: int = 60, k: int = 4, d: int = 5, sharp: float = 2.0):
    g = torch.Generator().manual_seed(seed)
    labels = torch.randint(k, (n,), generator=g)
    centres = 2.5 * torch.randn(k, d, generator=g)
    points = centres[labels] + torch.randn(n, d, generator=g)
    points = points - points.mean(0)
    logits = torch.randn(n, k, generator=g)
    logits[torch.arange(n), labels] += sharp
    return points, logits.log_softmax(1), labels


def naive_normal(u, mean, cov):
    x = u - mean
    return -0.5 * float(x @ torch.linalg.inv(cov) @ x) - 0.5 * float(torch.logdet(cov))


def naive_round(points, names, r, lam, b):
    """One M-step for the clusters, an E-step, and F, by loops."""
    u = points.double()
    n = len(points)
    d = points.shape[1]
    k = names.shape[1]
    every = r.shape[1]
    second = sum(torch.outer(x, x) for x in u)
    s2 = float(second.trace()) / (n * d)
    eye = torch.eye(d, dtype=torch.float64)
    mass = [sum(float(r[i, c]) for i in range(n)) for c in range(every)]
    means = [sum(float(r[i, c]) * u[i] for i in range(n)) / (mass[c] + 1) for c in range(every)]
    cov = d * s2 * eye
    for c in range(every):
        cov = cov + torch.outer(means[c], means[c])  # the prior's image at the origin
        for i in range(n):
            cov = cov + float(r[i, c]) * torch.outer(u[i] - means[c], u[i] - means[c])
    cov = cov / (sum(mass) + d)
    new = torch.zeros(n, every, dtype=torch.float64)
    likelihood = 0.0
    for i in range(n):
        said = [float(names[i, c]) if c < k else -math.log(k) for c in range(every)]
        evidence = [lam * said[c] + float(b[c]) for c in range(every)]
        log_p = [naive_normal(u[i], means[c], cov) for c in range(every)]
        norm = sum(math.exp(e) for e in evidence)
        joint = [math.exp(e) / norm * math.exp(p) for e, p in zip(evidence, log_p, strict=True)]
        likelihood += math.log(sum(joint))
        new[i] = torch.tensor(joint) / sum(joint)
    inverse = torch.linalg.inv(cov)
    prior = 0.5 * float(b.square().sum()) + 0.5 * sum(float(m @ inverse @ m) for m in means)
    prior += 0.5 * d * (float(torch.logdet(cov)) + s2 * float(inverse.trace()))
    return torch.stack(means), cov, new, (prior - likelihood) / n


def begin(names, more):
    """Responsibilities to begin with: the names, and for the first fifth of the images clusters without a name."""
    r = torch.cat([names.exp(), torch.zeros(len(names), more)], 1)
    few = len(names) // 5
    if more:
        r[:few] = torch.nn.functional.one_hot(
            torch.arange(few) % more + names.shape[1], r.shape[1]
        ).float()
    return r


@pytest.mark.parametrize("more", [0, 2])
def test_one_round_equals_the_naive_loops(more):
    points, names, _ = named_clusters(0)
    r = begin(names, more)
    fit = mx.fit_mixture(points, names, begin=r, rounds=1)
    lam = float(fit.mixture.gate[0])
    b = fit.mixture.gate[1:]
    means, cov, new, energy = naive_round(points, names, r, lam, b)
    result = fit.mixture.cholesky @ fit.mixture.cholesky.T
    torch.testing.assert_close(fit.mixture.means, means, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(result, cov, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(fit.responsibilities.double(), new, rtol=1e-4, atol=1e-6)
    assert fit.free_energy[0] == pytest.approx(energy, rel=1e-8)


@pytest.mark.parametrize("prior", [mx.EVEN_PRIOR, mx.UNEVEN_PRIOR])
@pytest.mark.parametrize("more", [0, 3])
@pytest.mark.parametrize("seed", range(4))
def test_free_energy_never_rises(seed, more, prior):
    points, names, _ = named_clusters(seed, n=200, k=5, d=8, sharp=1.0)
    energy = mx.fit_mixture(
        points, names, begin=begin(names, more), prior=prior, rounds=40, tolerance=-1.0
    ).free_energy
    assert len(energy) == 40
    # responsibilities are stored in float32, hence the slack
    assert all(after <= before + 1e-7 for before, after in itertools.pairwise(energy))


def test_gate_derivatives_equal_autograd():
    _, names, _ = named_clusters(1)
    r = torch.rand(60, 5, dtype=torch.float64).softmax(1)
    bias = torch.randn(5, dtype=torch.float64) * 0.3

    def objective(theta):
        padded = torch.cat(
            [names.double(), torch.full((60, 1), -math.log(4), dtype=torch.float64)], 1
        )
        return (r * (theta[0] * padded + theta[1:]).log_softmax(1)).sum() - 0.5 * theta[
            1:
        ].square().sum()

    theta = torch.cat([torch.tensor([1.3], dtype=torch.float64), bias])
    gradient, hessian = mx.gate_derivatives(names, r, theta, prior=1.0)
    torch.testing.assert_close(gradient, torch.autograd.functional.jacobian(objective, theta))
    expected = -torch.autograd.functional.hessian(objective, theta)
    expected[0, 0] += 1e-6
    torch.testing.assert_close(hessian, expected)
    assert mx.gate_objective(names, r, theta, prior=1.0) == pytest.approx(
        float(objective(theta))
    )


def test_reliability_follows_the_quality_of_the_names():
    points, good, labels = named_clusters(3, n=400, sharp=3.0)
    noise = torch.randn(400, 4, generator=torch.Generator().manual_seed(5)).log_softmax(1)
    bad = torch.where(
        torch.rand(400, 1, generator=torch.Generator().manual_seed(6)) < 0.3, good, noise
    )
    trusted = mx.fit_mixture(points, good)
    doubted = mx.fit_mixture(points, bad)
    assert trusted.mixture.gate[0] > doubted.mixture.gate[0]
    assert float((doubted.responsibilities.argmax(1) == labels).float().mean()) > 0.9


def test_chunks_change_nothing(monkeypatch):
    points, names, _ = named_clusters(2)
    whole = mx.fit_mixture(points, names, begin=begin(names, 1))
    monkeypatch.setattr(mx, "CHUNK", 7)
    parts = mx.fit_mixture(points, names, begin=begin(names, 1))
    torch.testing.assert_close(
        whole.responsibilities, parts.responsibilities, rtol=1e-4, atol=1e-6
    )


def test_one_image_alone_is_judged_as_in_the_fit():
    points, names, _ = named_clusters(2)
    fit = mx.fit_mixture(points, names, begin=begin(names, 1))
    alone, _ = mx.expectation(fit.mixture, points[3:4], names[3:4])
    torch.testing.assert_close(alone[0], fit.responsibilities[3])


def test_absent_classes_lose_their_share():
    points, names, labels = named_clusters(4, n=400, k=6, d=6, sharp=2.0)
    present = labels < 3
    fit = mx.fit_mixture(points[present], names[present], rounds=50)
    assert float(fit.shares[3:].sum()) < 0.02


def test_images_of_no_class_come_into_clusters_without_a_name():
    points, names, labels = named_clusters(5, n=400, k=6, d=6, sharp=4.0)
    new = labels >= 4
    known = names[:, :4].clone()
    known[new] = torch.full((4,), 0.25).log()
    known = known.log_softmax(1)
    r = torch.cat([known.exp(), torch.zeros(400, 2)], 1)
    doubtful = (known.exp().max(1).values < 0.5).nonzero().flatten()
    r[doubtful] = torch.nn.functional.one_hot(4 + torch.arange(len(doubtful)) % 2, 6).float()
    fit = mx.fit_mixture(points, known, begin=r, prior=mx.UNEVEN_PRIOR, rounds=50)
    result = fit.responsibilities[:, 4:].sum(1) > 0.5
    assert float((result == new).float().mean()) > 0.95


def test_bad_input_is_named():
    with pytest.raises(UsfanError, match="same N"):
        mx.fit_mixture(torch.zeros(3, 2), torch.zeros(4, 2))
    with pytest.raises(UsfanError, match="not finite"):
        mx.fit_mixture(torch.full((3, 2), math.nan), torch.zeros(3, 2))


@pytest.mark.parametrize(("count", "width"), [(300, 200), (60, 200), (40, 8)])
def test_subspace_iteration_finds_the_principal_directions(count, width):
    """Against the decomposition of the covariance: the same variance along orthonormal directions."""
    generator = torch.Generator().manual_seed(0)
    scales = 0.97 ** torch.arange(width)
    features = torch.randn(count, width, generator=generator) * scales + 3
    space = mx.fit_witness_space(features, 20)
    directions = min(20, width, count - 1)
    result = space.project(features).double()
    assert result.shape == (count, directions)
    gram = (space.basis.T @ space.basis).double()
    assert torch.allclose(gram, torch.eye(directions, dtype=torch.float64), atol=1e-4)
    unit = torch.nn.functional.normalize(features.double(), dim=1)
    unit = torch.nn.functional.normalize(unit - unit.mean(0), dim=1)
    exact = torch.linalg.eigvalsh(torch.cov(unit.T)).flip(0)[:directions]
    torch.testing.assert_close(
        result.mean(0), torch.zeros(directions, dtype=torch.float64), rtol=0, atol=1e-5
    )
    assert float(result.var(0).sum()) == pytest.approx(float(exact.sum()), rel=0.01)
    assert torch.allclose(result.var(0)[:5], exact[:5], rtol=0.03)
