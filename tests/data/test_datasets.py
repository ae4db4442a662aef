"""Torch and torchvision datasets, and sequences of images, as `ImageData`."""

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import Dataset, Subset, TensorDataset

from usfan.data.decoding.decode import UnreadableImage
from usfan.data.sources import ImageData
from usfan.errors import DataError


class Counted(Dataset):
    """Items (image, label); counts how often it is asked."""

    def __init__(self, images, labels):
        self.images = images
        self.answers = labels
        self.asked = 0

    def __len__(self):
        return len(self.images)

    def __getitem__(self, i):
        self.asked += 1
        return self.images[i], self.answers[i]


def test_torch_datasets(make_picture):
    images = [make_picture(i) for i in range(4)]
    chw = [torch.from_numpy(image.copy()).permute(2, 0, 1) for image in images]
    kinds = [
        Counted(images, [1, 0, 1, 2]),
        Counted([Image.fromarray(image) for image in images], np.array([1, 0, 1, 2])),
        Counted([image / 255 for image in chw], torch.tensor([1, 0, 1, 2])),
        TensorDataset(torch.stack(chw), torch.tensor([1, 0, 1, 2])),
        [(image, label) for image, label in zip(images, [1, 0, 1, 2], strict=True)],
        [
            {"image": image, "label": label}
            for image, label in zip(images, [1, 0, 1, 2], strict=True)
        ],
    ]
    for dataset in kinds:
        data = ImageData(dataset)
        assert data.labels.tolist() == [1, 0, 1, 2]
        assert (data.load(3).numpy() == images[3].transpose(2, 0, 1)).all()
    assert ImageData([Image.fromarray(image) for image in images]).labels is None
    assert ImageData(TensorDataset(torch.stack(chw))).labels is None
    names = [(image, name) for image, name in zip(images, "baba", strict=True)]
    assert ImageData(names).classes == ("a", "b")


def test_targets_spare_the_decoding(make_picture):
    dataset = Counted([make_picture(i) for i in range(5)], [0, 1, 2, 1, 0])
    dataset.targets = [0, 1, 2, 1, 0]
    dataset.classes = ["x", "y", "z"]
    data = ImageData(dataset)
    assert dataset.asked == 0
    assert data.classes == ("x", "y", "z")
    part = ImageData(Subset(dataset, [4, 2, 1]))
    assert dataset.asked == 0
    assert part.labels.tolist() == [0, 2, 1]
    assert part.classes == ("x", "y", "z")
    assert (part.load(1).numpy() == make_picture(2).transpose(2, 0, 1)).all()


def test_labels_of_minus_one_mean_none(make_picture):
    dataset = Counted([make_picture(0)] * 2, [-1, -1])
    assert ImageData(dataset).labels is None
    with pytest.raises(DataError, match="labels from -1"):
        ImageData(Counted([make_picture(0)] * 2, [-1, 0]))


def test_torchvision_image_folder_is_read_from_its_files(class_folder):
    from torchvision.datasets import ImageFolder
    from torchvision.transforms import ToTensor

    data = ImageData(ImageFolder(str(class_folder)))
    assert data.paths is not None
    assert data.classes == ("Bike", "apple", "cat")  # its own order, and labels to match
    assert data.match_classes(["apple", "Bike", "cat"]).labels.tolist() == [
        1,
        1,
        1,
        0,
        0,
        0,
        2,
        2,
        2,
    ]
    transformed = ImageData(ImageFolder(str(class_folder), transform=ToTensor()))
    assert transformed.paths is None
    assert (transformed.load(5) == data.load(5)).all()


def test_bad_datasets(make_picture):
    normalised = [(torch.full((3, 8, 8), -1.5), 0)]
    with pytest.raises(DataError, match="take the normalisation out of the transforms"):
        ImageData(normalised).load(0)
    with pytest.raises(DataError, match="cannot take images from a int"):
        ImageData(7)
    with pytest.raises(DataError, match="holds no images"):
        ImageData([])
    with pytest.raises(DataError, match="dict"):
        ImageData({"train": []})

    with pytest.raises(DataError, match="1 of its 2 images have a label"):
        ImageData([(make_picture(0), 1), make_picture(1)])


def test_a_dataset_with_a_broken_file(tmp_path):
    (tmp_path / "a.jpg").write_bytes(b"\xff\xd8\xff\xe0 nothing")

    class Lazy(Dataset):
        def __len__(self):
            return 1

        def __getitem__(self, i):
            return Image.open(tmp_path / "a.jpg").convert("RGB")

    class Later(Counted):
        targets = (0,)

    data = ImageData(Later([str(tmp_path / "a.jpg")], [0]))
    with pytest.raises(UnreadableImage, match=r"a\.jpg"):
        data.load(0)
    with pytest.raises(UnreadableImage, match=r"Lazy\[0\]: .*asked for its label"):
        ImageData(Lazy())
