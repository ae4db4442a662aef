"""With --root, no path leaves the root: in a folder, a list, or a config file; by dots, links or plain names."""

import shutil

import pytest
import yaml

from small_runs import TINY, class_folder, usfan


@pytest.fixture
def place(tmp_path):
    """A root with data in it, and something outside that no one may read."""
    class_folder(tmp_path / "root" / "data", images=4)
    class_folder(tmp_path / "outside", images=4)
    return tmp_path


def train(place, data, *more) -> int:
    shutil.rmtree(place / "run", ignore_errors=True)
    small = ("--backbone", "digits-cnn", "--epochs", 1, "--batch-size", 4, *TINY)
    return usfan("train", data, "--out", place / "run", "--root", place / "root", *small, *more)


def test_data_inside_the_root(place):
    assert train(place, place / "root" / "data") == 0


@pytest.mark.parametrize(
    "way", ["folder", "dots", "absolute", "linked file", "linked folder", "linked image"]
)
def test_data_outside_the_root(place, way, capsys):
    root = place / "root"
    outside = place / "outside"
    inner = [f"data/class-{k}/{n:03}.png {k}" for k in range(3) for n in range(4)]
    data = place / "list.txt"
    if way == "folder":
        data = outside
    elif way == "dots":
        inner[5] = "data/../../outside/class-1/001.png 1"
    elif way == "absolute":
        inner[5] = f"{outside}/class-1/001.png 1"
    elif way == "linked file":
        (root / "data" / "class-1" / "001.png").unlink()
        (root / "data" / "class-1" / "001.png").symlink_to(outside / "class-1" / "001.png")
    elif way == "linked folder":
        shutil.rmtree(root / "data" / "class-1")
        (root / "data" / "class-1").symlink_to(outside / "class-1")
    else:  # the same in a folder instead of a list
        (root / "data" / "class-1" / "001.png").unlink()
        (root / "data" / "class-1" / "001.png").symlink_to(outside / "class-1" / "001.png")
        data = root / "data"
    (place / "list.txt").write_text("\n".join(inner) + "\n")
    assert train(place, data) == 2
    line = capsys.readouterr().err.strip()
    assert "leaves the root" in line
    assert len(line.splitlines()) == 1
    assert not (place / "run").exists()


@pytest.mark.parametrize("name", ["pretrained"])
def test_paths_in_a_config_file(place, name, capsys):
    config = place / "config.yaml"
    for value in (
        str(place / "outside" / "x"),
        str(place / "root" / ".." / "outside" / "x"),
        "../x",
    ):
        config.write_text(yaml.safe_dump({name: value}))
        assert train(place, place / "root" / "data", "--config", config) == 2
        assert f"{name}: {value} leaves the root" in capsys.readouterr().err
        assert not (place / "outside" / "x").exists()
    config.write_text(yaml.safe_dump({name: "none"}))
    assert train(place, place / "root" / "data", "--config", config) == 0


def test_a_config_file_cannot_widen_the_root(place, capsys):
    config = place / "config.yaml"
    config.write_text(yaml.safe_dump({"root": "/"}))
    assert train(place, place / "outside", "--config", config) == 2
    assert "leaves the root" in capsys.readouterr().err
