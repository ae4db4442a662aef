"""SHOT's optimiser: SGD with Nesterov momentum, the learning rate falling as lr · (1 + 10 p)^(−0.75).

p is the share of the steps done. Over several processes the gradients are summed before the update, so that all of them
take the step of the global batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from usfan.engine.runtime import Runtime
from usfan.engine.stage import Stage
from usfan.errors import ConfigError
from usfan.models.classifier import Classifier


class Optimiser:
    """Updates what the stage lets move."""

    def __init__(
        self,
        classifier: Classifier,
        stage: Stage,
        steps: int,
        runtime: Runtime,
        layers: Sequence[Tensor] = (),
    ) -> None:
        """`layers`: parameters of terms that bring layers along."""
        groups = classifier.parameter_groups(
            stage.lr, stage.backbone_lr_scale, head=stage.head, tune=stage.tune
        )
        if layers:
            groups.append({"params": list(layers), "lr": stage.lr, "lr_scale": 1.0})
        self.parameters = [p for g in groups for p in g["params"]]
        if steps and not self.parameters:
            raise ConfigError(
                f"tune={stage.tune}: this network has no such layers to train; choose another tune"
            )
        cuda = runtime.device.type == "cuda"
        if cuda:  # a tensor, so that a captured step reads the new value
            for group in groups:
                group["lr"] = torch.tensor(float(group["lr"]), device=runtime.device)
        self.sgd = torch.optim.SGD(
            groups or [{"params": [], "lr_scale": 1.0}],
            momentum=stage.momentum,
            nesterov=stage.momentum > 0,
            weight_decay=stage.weight_decay,
            fused=cuda or None,
        )
        self.lr = stage.lr
        self.steps = max(1, steps)
        self.runtime = runtime

    def schedule(self, step: int) -> float:
        """Set the learning rates for this step."""
        factor = (1 + 10 * step / self.steps) ** -0.75
        for group in self.sgd.param_groups:
            value = self.lr * group["lr_scale"] * factor
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(value)
            else:
                group["lr"] = value
        return float(self.lr * factor)

    def update(self, loss: Tensor) -> None:
        self.sgd.zero_grad(set_to_none=True)
        loss.backward()
        if self.runtime.world > 1:
            self.sum_gradients()
        self.sgd.step()

    def sum_gradients(self) -> None:
        """One message for all gradients. A parameter without a gradient has none in any process, because all run the
        same graph."""
        grads = [p.grad for p in self.parameters if p.grad is not None]
        sizes = [grad.numel() for grad in grads]
        flat = torch.cat([grad.reshape(-1) for grad in grads])
        parts = self.runtime.total(flat).split(sizes)
        for grad, part in zip(grads, parts, strict=True):
            grad.copy_(part.view_as(grad))

    def tensors(self) -> dict[str, Tensor]:
        """The momentum buffers, for a checkpoint."""
        tensors = {}
        for i, parameter in enumerate(self.parameters):
            momentum = self.sgd.state.get(parameter, {}).get("momentum_buffer")
            if momentum is not None:
                tensors[f"momentum.{i}"] = momentum
        return tensors

    def restore(self, tensors: dict[str, Tensor]) -> None:
        for i, parameter in enumerate(self.parameters):
            momentum = tensors.get(f"momentum.{i}")
            if momentum is None:
                continue
            if momentum.shape != parameter.shape:
                raise ValueError(f"momentum.{i} has another shape than its parameter")
            self.sgd.state[parameter]["momentum_buffer"] = momentum.to(parameter)
