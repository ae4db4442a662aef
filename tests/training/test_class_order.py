"""Class names in another order than the network's outputs are found before they are believed."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import nn
from torchvision.datasets import ImageFolder

import usfan
from usfan.engine.runtime import start_runtime
from usfan.errors import DataError
from usfan.training.class_order import ClassOrderError, better_order, check_order
from usfan.training.posthoc import from_state_dict, refit_posterior
from usfan.uncertainty.base import FitSettings

COLOURS = {"Mug": (230, 30, 30), "Zebra": (30, 230, 30), "apple": (30, 30, 230)}
SPEC = usfan.InputSpec(3, 8, 8, (0.0,) * 3, (1.0,) * 3, "none")


@pytest.fixture
def folder(tmp_path):
    rng = np.random.default_rng(0)
    for name, colour in COLOURS.items():
        (tmp_path / "photos" / name).mkdir(parents=True)
        for i in range(8):
            noise = rng.integers(-25, 26, (12, 16, 3))
            Image.fromarray(np.clip(noise + colour, 0, 255).astype(np.uint8)).save(
                tmp_path / "photos" / name / f"{i}.png"
            )
    return tmp_path / "photos"


class Colours(nn.Module):
    """As trained with `ImageFolder`: output 0 is Mug (red), 1 Zebra (green), 2 apple (blue)."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 3)
        with torch.no_grad():
            self.fc.weight.copy_(8 * torch.eye(3))
            self.fc.bias.zero_()

    def forward(self, images):
        return self.fc(images.mean(dim=(2, 3)))


def test_image_folder_sorts_by_case_and_we_do_not(folder):
    assert ImageFolder(str(folder)).classes == ["Mug", "Zebra", "apple"]
    assert usfan.ImageData(folder).classes == ("apple", "Mug", "Zebra")
    with pytest.raises(ClassOrderError) as raised:
        usfan.attach_posterior(Colours(), folder, head="fc", spec=SPEC)
    assert raised.value.classes == ("Mug", "Zebra", "apple")
    assert str(raised.value) == (
        "the class names are in another order than the model's outputs: 0 % of its predictions fit the labels, "
        "and 100 % do if capitals come first, as in torchvision's ImageFolder (Mug, Zebra, apple): pass "
        "classes=sorted(names), or a file with the names in this order"
    )
    for data in (folder, ImageFolder(str(folder))):  # torchvision's own folder brings its order
        source = usfan.attach_posterior(
            Colours(), data, head="fc", spec=SPEC, classes=["Mug", "Zebra", "apple"]
        )
        assert source.classes == ("Mug", "Zebra", "apple")
        assert usfan.evaluate(source, usfan.ImageData(folder))["accuracy"] == 100
    assert (
        usfan.attach_posterior(
            Colours(), ImageFolder(str(folder)), head="fc", spec=SPEC
        ).classes[2]
        == "apple"
    )


def test_names_for_a_flat_folder(folder):
    source = usfan.attach_posterior(
        Colours(), folder / "Mug", head="fc", spec=SPEC, classes=["Mug", "Zebra", "apple"]
    )
    assert source.predict(folder / "Mug").names == ["Mug"] * 8
    with pytest.raises(DataError, match=r"Mug has 2 classes, the module 3: pass classes="):
        usfan.attach_posterior(
            Colours(), folder / "Mug", head="fc", spec=SPEC, classes=["Mug", "Zebra"]
        )


def test_a_model_folder_with_wrong_names_is_found_and_mended(folder):
    names = ["apple", "Mug", "Zebra"]
    wrong = usfan.attach_posterior(
        Colours(), folder / "Mug", head="fc", spec=SPEC, classes=names
    )
    args = (wrong, usfan.ImageData(folder), start_runtime(), FitSettings(prior=1.0))
    with pytest.raises(ClassOrderError, match="capitals come first"):
        refit_posterior(*args)
    mended = refit_posterior(*args, classes=sorted(names))
    assert mended.classes == ("Mug", "Zebra", "apple")
    with pytest.raises(DataError, match="classes= holds 2 names, the model has 3 classes"):
        refit_posterior(*args, classes=["a", "b"])


def test_a_weights_file_takes_names(folder, tmp_path):
    import timm

    save_file(
        timm.create_model("mobilenetv3_small_050", num_classes=4).state_dict(),
        tmp_path / "w.safetensors",
    )
    module = from_state_dict(str(tmp_path / "w.safetensors"), "mobilenetv3_small_050")
    data = usfan.ImageData(folder)
    with pytest.raises(DataError, match="has 3 classes"):
        usfan.attach_posterior(module, data, prior=1.0)
    names = ["apple", "Mug", "Zebra", "pen"]  # one class more than the folder has images of
    model = usfan.attach_posterior(module, data, classes=names, prior=1.0)
    assert model.classes == tuple(names)


def confused(
    N: int, K: int, order: list[int], right: float, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Labels, and predictions of a network whose output j is class order[j], right on a share."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(K, (N,), generator=generator)
    predicted = torch.tensor(order).argsort()[labels]
    lost = torch.rand(N, generator=generator) > right
    return torch.where(lost, torch.randint(K, (N,), generator=generator), predicted), labels


@pytest.mark.parametrize("right", [0.7, 0.9, 1.0])
@pytest.mark.parametrize(
    ("K", "order"),
    [(3, [1, 2, 0]), (10, [1, 0, *range(2, 10)]), (31, [30, *range(30)]), (5, [4, 3, 2, 1, 0])],
)
def test_orders_that_are_found(K, order, right):
    predicted, labels = confused(40 * K, K, order, right)
    assert better_order(predicted, labels, K) == order
    assert better_order(*confused(40 * K, K, list(range(K)), right), K) is None


def test_no_order_is_invented():
    for seed in range(40):  # networks that know nothing, or little, on few images
        for N, K in ((6, 2), (12, 3), (60, 10), (100, 31), (500, 31)):
            for right in (0.0, 0.3):
                assert better_order(*confused(N, K, list(range(K)), right, seed), K) is None
    assert (
        better_order(torch.tensor([1, 1]), torch.tensor([0, 0]), 3) is None
    )  # two images prove nothing


def test_many_classes_are_told_in_one_line():
    names = [f"thing {i}" for i in range(40)]
    order = list(range(40))
    order[3] = 7
    order[7] = 3
    predicted, labels = confused(2000, 40, order, 0.95)
    with pytest.raises(
        ClassOrderError, match=r"output 3 is thing 7, 7 is thing 3: pass classes= in the order"
    ) as raised:
        check_order(nn.functional.one_hot(predicted, 40).float(), labels, names)
    assert raised.value.classes == tuple(names[k] for k in order)


def test_a_model_that_gets_its_own_images_wrong_is_doubted(caplog):
    labels = torch.arange(300) % 3
    guesses = nn.functional.one_hot(torch.zeros(300, dtype=torch.long), 3).float()
    check_order(guesses, labels, ("a", "b", "c"))
    assert "only 33 % of the labelled images are right" in caplog.text
    caplog.clear()
    check_order(nn.functional.one_hot(labels, 3).float(), labels, ("a", "b", "c"))
    assert not caplog.records
