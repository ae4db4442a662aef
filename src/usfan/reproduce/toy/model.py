"""The paper's toy problem, and many copies of its network trained at once.

Three classes in the plane, N = 500 points. The target is made from the source: each class, about its own mean, is
scaled by 1.2, moved by (t, t), turned, and blurred by noise. Under the mild shift the classes stay about where they
were; under the strong one the first class (blue) crosses the plane, into the region of the second (red).

All seeds run side by side. Every tensor of the network has a leading seed dimension S, BatchNorm has S·H channels, and
SGD acts on each number alone, so each of the S networks learns as it would by itself.

Shapes: S seeds, N samples, K classes, D features. Points are S×2×N, features S×D×N, logits S×K×N: with the samples
last, a BatchNorm channel is one contiguous row.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from usfan.errors import ConfigError

# The paper's layout: the three centres that scikit-learn's make_blobs draws in the box ±10 from random state 37.
CENTRES = ((8.88993206, -0.71803651), (-6.14409942, 1.63789754), (2.40168420, 3.68448035))
COUNTS = (167, 167, 166)
SPREAD = 1.3
SCALE = 1.2
TURNS = (-10.0, 10.0, 10.0)
"""Degrees, counter-clockwise. The published program counts clockwise: 10, −10, −10."""
NOISE = 1.5
SHIFTS = {"mild": (-1.0, 1.3, 1.5), "strong": (-10.0, 2.3, 3.3)}
"""How far each class moves, along both axes."""

WIDTHS = (2, 20, 20, 3)
LEARNING_RATE = 1e-3
MOMENTUM = 0.9
WEIGHT_DECAY = 3e-3
SOURCE_STEPS = 5000
TARGET_STEPS = 500
INIT_SEEDS = 1 << 32
"""Added to a seed for the initial weights, which must not follow the draws of the data."""


@dataclass(frozen=True)
class Domains:
    """The data of S seeds."""

    source: Tensor
    """S×2×N."""
    labels: Tensor
    """S×N, the same for source and target: target point i is source point i, moved."""
    targets: dict[str, Tensor]
    """Shift → S×2×N."""


def make_domains(seeds: Iterable[int]) -> Domains:
    """The source and both targets of each seed. A seed's data do not depend on the other seeds."""
    drawn = [one_seed(seed) for seed in seeds]
    if not drawn:
        raise ConfigError("no seeds were given: the toy needs at least one")
    sources, labels, targets = zip(*drawn, strict=True)
    stacked = {name: torch.stack([t[name] for t in targets]) for name in SHIFTS}
    return Domains(torch.stack(sources), torch.stack(labels), stacked)


def one_seed(seed: int) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.repeat_interleave(torch.arange(len(COUNTS)), torch.tensor(COUNTS))
    source = torch.tensor(CENTRES)[labels].T + SPREAD * torch.randn(2, len(labels), generator=generator)
    noise = NOISE * torch.randn(2, len(labels), generator=generator)
    return source, labels, {name: shifted(source, labels, moves) + noise for name, moves in SHIFTS.items()}


def shifted(points: Tensor, labels: Tensor, moves: Sequence[float]) -> Tensor:
    """Each class of 2×N points, about its mean: scaled, moved, then turned (the move is turned too)."""
    result = torch.empty_like(points)
    for k, (move, degrees) in enumerate(zip(moves, TURNS, strict=True)):
        angle = math.radians(degrees)
        turn = torch.tensor([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]])
        own = points[:, labels == k]
        mean = own.mean(dim=1, keepdim=True)
        result[:, labels == k] = turn @ (SCALE * (own - mean) + move) + mean
    return result


def uniform(generators: Sequence[torch.Generator], shape: tuple[int, ...], fan_in: int) -> nn.Parameter:
    """S×shape, within ±1/√fan_in: the distribution that torch's linear layer starts from."""
    draws = torch.stack([torch.rand(shape, generator=generator) for generator in generators])
    return nn.Parameter((2 * draws - 1) / math.sqrt(fan_in))


class StackedBlock(nn.Module):
    """Linear, BatchNorm and ReLU of S networks."""

    running_mean: Tensor
    running_var: Tensor

    def __init__(self, before: int, after: int, generators: Sequence[torch.Generator]) -> None:
        super().__init__()
        self.weight = uniform(generators, (after, before), before)
        self.bias = uniform(generators, (after, 1), before)
        self.scale = nn.Parameter(torch.ones(len(generators), after))
        self.shift = nn.Parameter(torch.zeros(len(generators), after))
        self.register_buffer("running_mean", torch.zeros(len(generators), after))
        self.register_buffer("running_var", torch.ones(len(generators), after))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.baddbmm(self.bias, self.weight, x)
        normal = functional.batch_norm(
            x.reshape(1, -1, x.shape[2]),
            self.running_mean.view(-1),
            self.running_var.view(-1),
            self.scale.view(-1),
            self.shift.view(-1),
            self.training,
        )
        return functional.relu_(normal).view_as(x)


class StackedMLP(nn.Module):
    """S networks 2-20-20-3; the last layer has no bias."""

    def __init__(self, seeds: Iterable[int]) -> None:
        super().__init__()
        generators = [torch.Generator().manual_seed(INIT_SEEDS + seed) for seed in seeds]
        inputs, hidden, features, classes = WIDTHS
        blocks = (StackedBlock(inputs, hidden, generators), StackedBlock(hidden, features, generators))
        self.extractor = nn.Sequential(*blocks)
        self.head = uniform(generators, (classes, features), features)

    def forward(self, points: Tensor) -> tuple[Tensor, Tensor]:
        """Features S×D×N and logits S×K×N."""
        features = self.extractor(points)
        return features, torch.bmm(self.head, features)

    @torch.no_grad()
    def outputs(self, points: Tensor) -> tuple[Tensor, Tensor]:
        """The same in test mode, without gradient."""
        training = self.training
        self.eval()
        features, logits = self(points)
        self.train(training)
        return features, logits

    @torch.no_grad()
    def accuracy(self, points: Tensor, labels: Tensor) -> list[float]:
        """Per cent, one number per seed."""
        right = self.outputs(points)[1].argmax(dim=1) == labels
        return (100 * right.double().mean(dim=1)).tolist()

    def pick(self, index: int) -> StackedMLP:
        """One of the networks, as a stack of one."""
        one = copy.deepcopy(self)
        for values in (*one.parameters(), *one.buffers()):
            values.data = values.data[index : index + 1].clone()
        return one

    @staticmethod
    def joined(stacks: Sequence[StackedMLP]) -> StackedMLP:
        """Several stacks as one, in their order."""
        one = copy.deepcopy(stacks[0])
        every = [(*stack.parameters(), *stack.buffers()) for stack in stacks]
        for values, *parts in zip((*one.parameters(), *one.buffers()), *every, strict=True):
            values.data = torch.cat([part.detach() for part in parts])
        return one


def sgd(parameters: Iterable[nn.Parameter], learning_rate: float = LEARNING_RATE) -> torch.optim.SGD:
    return torch.optim.SGD(parameters, lr=learning_rate, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY, fused=True)


def train_stack(
    network: StackedMLP,
    points: Tensor,
    labels: Tensor,
    steps: int = SOURCE_STEPS,
    advance: Callable[[int], None] = lambda steps: None,
) -> None:
    """Stage 1: plain cross-entropy, full batch."""
    optimiser = sgd(network.parameters())
    network.train()
    for _ in range(steps):
        # The sum over seeds of the mean over samples: each network gets the gradient of its own mean loss.
        loss = functional.cross_entropy(network(points)[1], labels, reduction="sum") / labels.shape[1]
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        advance(len(points))
    network.eval()
