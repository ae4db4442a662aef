"""Data as other libraries hold it: tables of paths, and loaders whose transforms normalise."""

import pandas
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset
from torchvision import transforms
from torchvision.datasets import ImageFolder

import usfan
from small_runs import class_folder
from usfan.errors import DataError

MEAN, STD = (0.2, 0.4, 0.6), (0.5, 0.25, 0.125)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return class_folder(tmp_path_factory.mktemp("data"), images=3)


def test_a_frame_of_paths(folder, monkeypatch):
    paths = sorted(folder.rglob("*.png"))
    names = [path.parent.name for path in paths]
    frame = pandas.DataFrame({"split": 0, "Label": names, "File": [str(p) for p in paths]})
    data = usfan.ImageData(frame)
    assert data.paths == [str(path) for path in paths]
    assert data.labels.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert data.classes == ("class-0", "class-1", "class-2")
    monkeypatch.chdir(folder)
    part = pandas.DataFrame({"path": [f"class-1/{path.name}" for path in paths[:3]]})
    assert len(usfan.ImageData(part)) == 3
    assert usfan.ImageData(part).labels is None
    with pytest.raises(DataError, match=r"no column of paths: its columns are split, label"):
        usfan.ImageData(frame[["split", "Label"]])


@pytest.mark.parametrize("form", ["dataset", "subset", "loader", "sampled"])
def test_a_loader_that_normalises_gives_the_same_pictures(folder, form):
    plain = usfan.ImageData(folder)
    steps = [transforms.ToTensor(), transforms.Normalize(torch.tensor(MEAN), STD)]
    dataset = ImageFolder(str(folder), transforms.Compose([transforms.Compose(steps)]))
    forms = {
        "dataset": dataset,
        "subset": Subset(dataset, range(len(dataset))),
        "loader": DataLoader(dataset, batch_size=4, shuffle=True),
        "sampled": DataLoader(dataset, batch_size=4, sampler=list(range(len(dataset)))),
    }
    data = usfan.ImageData(forms[form])
    assert data.labels.tolist() == plain.labels.tolist()
    for i in range(len(plain)):
        assert torch.equal(data.load(i), plain.load(i))


def test_a_module_takes_the_normalisation_of_its_loader(folder, caplog):
    steps = transforms.Compose([transforms.ToTensor(), transforms.Normalize(MEAN, STD)])
    loader = DataLoader(ImageFolder(str(folder), steps), batch_size=4)
    module = nn.Sequential(nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(48, 3)).eval()
    model = usfan.attach_posterior(module, loader, progress=False)
    images = next(iter(loader))[0]
    expected = module(images).softmax(dim=1)
    torch.testing.assert_close(model.spec.mean, MEAN)
    probs = model.predict(usfan.ImageData(loader).subset(range(4))).probs
    torch.testing.assert_close(probs, expected.detach(), atol=1e-5, rtol=0)


def test_values_that_were_normalised_before_name_the_way_out():
    images = torch.randn(4, 3, 8, 8)
    with pytest.raises(DataError, match=r"spec=usfan.InputSpec\(mean=…, std=…\)"):
        usfan.ImageData(TensorDataset(images, torch.tensor([0, 1, 0, 1]))).load(0)
