"""The network, its learning rates, and foreign networks as classifiers."""

from __future__ import annotations

import pytest
import timm
import torch
import torchvision
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from usfan.errors import ConfigError
from usfan.models.classifier import (
    Classifier,
    batch_norms,
    copy_module,
    guess_head,
    wrap_module,
)


class Net(nn.Module):
    """A hand-written network: two Linear layers, the last is `out.last`."""

    def __init__(
        self, *, bias: bool = True, norm: str = "none", after: nn.Module | None = None
    ) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 6 * 6, 10), nn.ReLU()
        )
        last: nn.Module = nn.Linear(10, 3, bias=bias)
        if norm == "new":
            last = weight_norm(last)
        elif norm == "old":
            last = nn.utils.weight_norm(last)
        self.out = nn.ModuleDict({"last": last})
        self.after = after or nn.Identity()

    def forward(self, images: Tensor) -> Tensor:
        return self.after(self.out["last"](self.body(images)))


def small(**options) -> Classifier:
    return Classifier(nn.Sequential(nn.Flatten(), nn.Linear(12, 7)), 7, 3, **options)


def images(side: int = 8, count: int = 4) -> Tensor:
    return torch.randn(count, 3, side, side)


@pytest.mark.parametrize("bottleneck", [5, 0])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("norm", [True, False])
def test_shapes_and_head(bottleneck, bias, norm):
    classifier = small(bottleneck=bottleneck, head_bias=bias, head_norm=norm).eval()
    features, logits = classifier(torch.randn(6, 3, 2, 2))
    width = bottleneck or 7
    assert features.shape == (6, width)
    assert logits.shape == (6, 3)
    weight, own_bias = classifier.head_tensors()
    assert weight.shape == (3, width)
    assert (own_bias is None) != bias
    torch.testing.assert_close(nn.functional.linear(features, weight, own_bias), logits)
    assert not weight.requires_grad


def test_weight_normalisation():
    """The weight is g v / ‖v‖, row by row: a change of v's length changes nothing, of g everything."""
    classifier = small()
    weight, _ = classifier.head_tensors()
    g, v = (getattr(classifier.head.parametrizations.weight, f"original{i}") for i in (0, 1))
    torch.testing.assert_close(weight, g * v / v.norm(dim=1, keepdim=True))
    with torch.no_grad():
        v.mul_(3)
    torch.testing.assert_close(classifier.head_tensors()[0], weight)
    with torch.no_grad():
        g.mul_(2)
    torch.testing.assert_close(classifier.head_tensors()[0], 2 * weight)


@pytest.mark.parametrize("head", [True, False])
def test_learning_rates(head):
    classifier = small(bottleneck=5)
    groups = classifier.parameter_groups(0.01, 0.1, head=head)
    by_scale = {g["lr_scale"]: g for g in groups}
    assert by_scale[0.1]["lr"] == pytest.approx(0.001)
    assert by_scale[1.0]["lr"] == 0.01
    names = {id(p): n for n, p in classifier.named_parameters()}
    slow, fast = ({names[id(p)] for p in by_scale[s]["params"]} for s in (0.1, 1.0))
    assert slow == {n for n in names.values() if n.startswith("backbone.")}
    assert fast == {
        n
        for n in names.values()
        if n.startswith("bottleneck.") or (head and n.startswith("head."))
    }


def test_no_empty_group():
    assert [
        g["lr_scale"] for g in small(bottleneck=0).parameter_groups(0.1, 0.5, head=False)
    ] == [0.5]


def test_batch_norms():
    assert len(list(batch_norms(torchvision.models.resnet18(num_classes=2)))) == 20
    assert len(list(batch_norms(small(bottleneck=5)))) == 1


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.parametrize(
    ("module", "head", "width"),
    [
        (lambda: torchvision.models.resnet18(num_classes=3), None, 512),
        (lambda: torchvision.models.resnet18(num_classes=3), "fc", 512),
        (lambda: timm.create_model("resnet18", num_classes=3), None, 512),
        (Net, "out.last", 10),
        (lambda: Net(bias=False), "out.last", 10),
        (lambda: Net(norm="new"), "out.last", 10),
        (lambda: Net(norm="old"), "out.last", 10),
    ],
)
def test_wrapping(module, head, width):
    module = module()
    batch = images(8 if isinstance(module, Net) else 32)
    module.eval()
    with torch.no_grad():
        before = module(batch)
    wrapped = wrap_module(copy_module(module), head, batch)
    with torch.no_grad():
        features, logits = wrapped.eval()(batch)
    assert features.shape == (4, width)
    torch.testing.assert_close(logits, before)
    weight, bias = wrapped.head_tensors()
    torch.testing.assert_close(
        nn.functional.linear(features, weight, bias), before, rtol=1e-5, atol=1e-5
    )
    groups = wrapped.parameter_groups(0.01, 0.1, head=False)
    assert [g["lr_scale"] for g in groups] == [0.1]
    assert not {id(p) for p in wrapped.head.parameters()} & {id(p) for p in groups[0]["params"]}


class ReadsTheWeight(Net):
    """Uses the layer's weight, not the layer: without the layer it cannot run."""

    def forward(self, images: Tensor) -> Tensor:
        return nn.functional.linear(self.body(images), self.out["last"].weight)


@pytest.mark.parametrize(
    "module",
    [
        lambda: Net(after=nn.Softmax(dim=1)),
        lambda: Net(after=nn.Linear(3, 3)),
        lambda: Net(after=nn.Unflatten(1, (3, 1))),
        ReadsTheWeight,
    ],
)
def test_a_module_that_goes_on_after_the_layer_is_refused(module):
    with pytest.raises(ConfigError, match=r"does not end in 'out\.last'"):
        wrap_module(module(), "out.last", images())


@pytest.mark.parametrize(
    ("head", "said"),
    [
        ("nowhere", "is not in the module"),
        ("out", "is a ModuleDict, not a Linear"),
        ("body.0", "is a Conv2d"),
    ],
)
def test_a_wrong_name_lists_the_right_ones(head, said):
    with pytest.raises(
        ConfigError, match=rf"{said}.*its last Linear layers are: body\.3, out\.last"
    ):
        wrap_module(Net(), head, images())


def test_guessing_the_head():
    assert guess_head(torchvision.models.resnet18(num_classes=2)) == "fc"
    assert guess_head(timm.create_model("resnet18", num_classes=2)) == "fc"
    assert guess_head(timm.create_model("vit_tiny_patch16_224", num_classes=2)) == "head"
    assert guess_head(timm.create_model("convnext_atto", num_classes=2)) == "head.fc"
    with pytest.raises(ConfigError, match=r"pass head=NAME.*body\.3, out\.last"):
        guess_head(Net())
    with pytest.raises(ConfigError, match="the Linear layers are: none"):
        guess_head(nn.Conv2d(1, 1, 1))
    with pytest.raises(ConfigError, match="pass head=NAME"):
        guess_head(timm.create_model("resnet18", num_classes=0))
