"""The network: backbone → bottleneck (Linear + BatchNorm) → weight-normalised linear head, as the SHOT recipe has it.

`forward` returns (features B×D, logits B×K). The head is the hypothesis h of the paper, all before it the extractor g.
A foreign classifier that ends in a Linear is wrapped, not rebuilt: that Linear is the head.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from usfan.data.views import InputSpec
from usfan.errors import ConfigError, first_line

LAYER_SETTINGS = ("bottleneck", "dropout", "head_bias", "head_norm")
"""Settings of the layers after the backbone."""
LAYOUT_FREE = ("timm", "torch.nn", "torchvision", "transformers", "usfan")
"""Libraries whose networks give the same whether the channels come first or last."""


class Classifier(nn.Module):
    """g: backbone and bottleneck; h: head."""

    channels_last = True
    """Whether it may be laid out with the channels last, and given images so."""

    def __init__(
        self,
        backbone: nn.Module,
        features: int,
        classes: int,
        *,
        bottleneck: int = 256,
        dropout: float = 0.0,
        head_bias: bool = True,
        head_norm: bool = True,
    ) -> None:
        super().__init__()
        self.backbone = backbone
        width = bottleneck or features
        self.bottleneck: nn.Module = nn.Identity()
        if bottleneck:
            linear = nn.Linear(features, bottleneck)
            nn.init.xavier_normal_(linear.weight)
            nn.init.zeros_(linear.bias)
            self.bottleneck = nn.Sequential(
                linear, nn.BatchNorm1d(bottleneck), nn.Dropout(dropout)
            )
        # The head keeps torch's own initial weight. The recipe means Xavier's, but in its program that touches a copy
        # which weight normalisation overwrites; with Xavier's larger norm the source model is 2 to 8 points worse.
        head = nn.Linear(width, classes, bias=head_bias)
        if head_bias:
            nn.init.zeros_(head.bias)
        self.head = weight_norm(head) if head_norm else head

    def extract(self, images: Tensor) -> Tensor:
        features: Tensor = self.bottleneck(self.backbone(images))
        return features

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        features = self.extract(images)
        return features, self.head(features)

    def head_tensors(self) -> tuple[Tensor, Tensor | None]:
        """The effective weight K×D and the bias K (or None) of the head."""
        # torch's older weight normalisation computes the weight in such a hook.
        for hook in self.head._forward_pre_hooks.values():
            hook(self.head, ())
        bias = self.head.bias
        return (
            self.head.weight.detach().clone(),
            None if bias is None else bias.detach().clone(),
        )

    def parameter_groups(
        self, lr: float, backbone_scale: float, *, head: bool, tune: str = "all"
    ) -> list[dict[str, Any]]:
        """SHOT's learning rates: backbone × `backbone_scale`, the rest × 1. What does not move takes no gradient.

        `tune`: "new" moves the bottleneck only, "norm" the affine parameters of the backbone's BatchNorms too, "all"
        everything, "affine" the affine parameters of all BatchNorms and nothing else. `head=False` freezes the head.
        """
        norms = nn.ModuleList(batch_norms(self.backbone))
        parts = {"all": self.backbone, "norm": norms, "affine": norms, "new": nn.ModuleList()}
        backbone = list(parts[tune].parameters())
        after = self.bottleneck
        if tune == "affine":
            after = nn.ModuleList(batch_norms(self.bottleneck))
        fresh = list(after.parameters())
        if head:
            fresh += self.head.parameters()
        self.requires_grad_(False)
        for parameter in (*backbone, *fresh):
            parameter.requires_grad_(True)
        groups = [
            {"params": backbone, "lr": lr * backbone_scale, "lr_scale": backbone_scale},
            {"params": fresh, "lr": lr, "lr_scale": 1.0},
        ]
        return [group for group in groups if group["params"]]


class WrappedClassifier(Classifier):
    """A foreign module whose last operation is the Linear named `head_name`: the module without it is the backbone."""

    def __init__(self, module: nn.Module, head_name: str) -> None:
        nn.Module.__init__(self)
        head = find_linear(module, head_name)
        self.head_name = head_name
        module.set_submodule(head_name, nn.Identity())
        self.backbone = module
        self.bottleneck = nn.Identity()
        self.head = head


def find_linear(module: nn.Module, name: str) -> nn.Linear:
    try:
        head = module.get_submodule(name)
    except AttributeError:
        head = None
    if not isinstance(head, nn.Linear):
        problem = "is not in the module"
        if head is not None:
            problem = f"is a {type(head).__name__}, not a Linear"
        linears = ", ".join(linear_names(module)[-4:]) or "none"
        raise ConfigError(f"head {name!r} {problem}; its last Linear layers are: {linears}")
    return head


def linear_names(module: nn.Module) -> list[str]:
    """Names of the Linear layers inside a module."""
    children = module.named_modules()
    return [name for name, child in children if isinstance(child, nn.Linear) and name]


def copy_module(module: nn.Module) -> nn.Module:
    """A deep copy. What torch's older weight normalisation computed last is detached first: it could not be copied."""
    for child in module.modules():
        for name, value in vars(child).items():
            if isinstance(value, Tensor) and not value.is_leaf:
                vars(child)[name] = value.detach()
    return copy.deepcopy(module)


def guess_head(module: nn.Module) -> str:
    """The name of the classifier: that of a timm model, else the only Linear; else an error that lists them."""
    linears = linear_names(module)
    get = getattr(module, "get_classifier", None)
    head = get() if callable(get) else None
    for name in linears:
        if module.get_submodule(name) is head:
            return name
    if len(linears) == 1:
        return linears[0]
    raise ConfigError(
        f"pass head=NAME, the final Linear layer; the Linear layers are: {', '.join(linears[-6:]) or 'none'}"
    )


def example_of(spec: InputSpec) -> Tensor:
    """Two images of random pixels."""
    return torch.rand(2, *spec.shape, generator=torch.Generator().manual_seed(0))


def wrap_module(module: nn.Module, head: str | None, example: Tensor) -> WrappedClassifier:
    """Wrap a copy of the user's module, and check on an example batch that it really ends in that Linear."""
    name = head or guess_head(module)
    find_linear(module, name)
    module.eval()
    with torch.no_grad():
        try:
            output = module(example)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # of the module
            shape = "×".join(map(str, example.shape[1:]))
            raise ConfigError(
                f"the module does not take images of {shape} ({first_line(error)}): say what it takes, "
                "spec=usfan.InputSpec(channels, size, resize, mean, std)"
            ) from error
        wrapped = WrappedClassifier(module, name).eval()
        if ends_in_head(wrapped, example, output):
            return wrapped
    raise ConfigError(
        f"the module does not end in {name!r}: its output is not that layer's; take out what follows it"
    )


def ends_in_head(wrapped: WrappedClassifier, example: Tensor, output: object) -> bool:
    """Whether the module's output is that of its head, applied to the features."""
    try:
        features, logits = wrapped(example)
    except Exception:  # of the module: code after the layer may not work without it
        return False
    if not isinstance(output, Tensor) or output.shape != logits.shape or features.ndim != 2:
        return False
    return torch.allclose(output, logits, rtol=1e-4, atol=1e-4)


def is_layout_free(network: nn.Module) -> bool:
    """Whether all its layers come from libraries whose layers take the channels in either place."""
    places = (f"{type(layer).__module__}." for layer in network.modules())
    prefixes = tuple(f"{library}." for library in LAYOUT_FREE)
    return all(place.startswith(prefixes) for place in places)


def lay_out(classifier: Classifier) -> Classifier:
    """The network with the channels last. Only those of known libraries are: another may depend on the layout."""
    if isinstance(classifier, WrappedClassifier):
        classifier.channels_last = is_layout_free(classifier.backbone)
    if classifier.channels_last:
        classifier = classifier.to(memory_format=torch.channels_last)
    return classifier


def plain_layout(module: nn.Module) -> None:
    """Back to torch's default layout. A tensor with one channel counts as laid out either way; only a new view has the
    strides of a new tensor."""
    for tensor in (*module.parameters(), *module.buffers()):
        if tensor.ndim == 4:
            tensor.data = tensor.data.contiguous().view(-1).view(tensor.shape)


def settle_layout(classifier: Classifier, device: torch.device) -> None:
    """Test mode, and on a CPU the layout in memory that a loaded model has, so that the same bits come out of it."""
    if device.type == "cpu":
        plain_layout(classifier)
    classifier.eval()


def batch_norms(module: nn.Module) -> Iterator[nn.modules.batchnorm._BatchNorm]:
    for child in module.modules():
        if isinstance(child, nn.modules.batchnorm._BatchNorm):
            yield child
