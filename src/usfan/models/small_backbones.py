"""The small networks of the paper and the SHOT recipe: backbones like any other, without weights to download."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


class LeNet(nn.Sequential):
    """SHOT's network for MNIST and USPS: two 5×5 convolutions on 28×28 grey images, 50·4·4 features."""

    num_features = 800
    input_size = (1, 28)
    augment = "none"
    dropout = 0.5

    def __init__(self, channels: int = 1) -> None:
        super().__init__(
            nn.Conv2d(channels, 20, 5),
            nn.MaxPool2d(2),
            nn.ReLU(),
            nn.Conv2d(20, 50, 5),
            nn.Dropout2d(0.5),
            nn.MaxPool2d(2),
            nn.ReLU(),
            nn.Flatten(),
        )


class DigitsCNN(nn.Sequential):
    """The demo's network: three 3×3 convolutions with BatchNorm on 28×28 grey images, 64·3·3 features."""

    num_features = 576
    input_size = (1, 28)
    augment = "resized-crop"
    dropout = 0.0

    def __init__(self, channels: int = 1) -> None:
        layers: list[nn.Module] = []
        for width in (16, 32, 64):
            layers += [
                nn.Conv2d(channels, width, 3, padding=1),
                nn.BatchNorm2d(width),
                nn.ReLU(),
                nn.MaxPool2d(2),
            ]
            channels = width
        super().__init__(*layers, nn.Flatten())


class DTN(nn.Sequential):
    """SHOT's network for SVHN: three 5×5 convolutions of stride 2 with BatchNorm on 32×32 images, 256·4·4 features."""

    num_features = 4096
    input_size = (3, 32)
    augment = "none"
    dropout = 0.5

    def __init__(self, channels: int = 3) -> None:
        super().__init__()
        for i, (before, after, dropout) in enumerate(
            [(channels, 64, 0.1), (64, 128, 0.3), (128, 256, 0.5)]
        ):
            self.add_module(f"conv{i}", nn.Conv2d(before, after, 5, stride=2, padding=2))
            self.add_module(f"bn{i}", nn.BatchNorm2d(after))
            self.add_module(f"drop{i}", nn.Dropout2d(dropout))
            self.add_module(f"relu{i}", nn.ReLU())
        self.add_module("flatten", nn.Flatten())


class CNN13(nn.Module):
    """The network of CIFAR9→STL9: 128-128-128 / 256-256-256 / 512-256-128, LeakyReLU 0.1, global average, 32×32."""

    num_features = 128
    input_size = (3, 32)
    augment = "resized-crop-flip"
    dropout = 0.0

    def __init__(self, channels: int = 3) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        blocks = [[(128, 3, 1)] * 3, [(256, 3, 1)] * 3, [(512, 3, 0), (256, 1, 0), (128, 1, 0)]]
        width = channels
        for number, block in enumerate(blocks):
            if number:
                layers += [nn.MaxPool2d(2), nn.Identity()]  # the authors have no dropout here
            for after, kernel, padding in block:
                layers += [
                    nn.Conv2d(width, after, kernel, padding=padding),
                    nn.BatchNorm2d(after),
                    nn.LeakyReLU(0.1),
                ]
                width = after
        self.layers = nn.Sequential(*layers)

    def forward(self, images: Tensor) -> Tensor:
        maps: Tensor = self.layers(images)
        return maps.mean(dim=(2, 3))


class ToyMLP(nn.Sequential):
    """The toy's network: 2-20-20 with BatchNorm and ReLU, on points given as B × 2 or B × 2 × 1 × 1."""

    num_features = 20
    input_size = (2, 1)
    augment = "none"
    dropout = 0.0

    def __init__(self, channels: int = 2) -> None:
        super().__init__(
            nn.Flatten(),
            nn.Linear(channels, 20),
            nn.BatchNorm1d(20),
            nn.ReLU(),
            nn.Linear(20, 20),
            nn.BatchNorm1d(20),
            nn.ReLU(),
        )


SMALL_BACKBONES: dict[str, Any] = {
    "digits-cnn": DigitsCNN,
    "lenet": LeNet,
    "dtn": DTN,
    "cnn13": CNN13,
    "toy-mlp": ToyMLP,
}
