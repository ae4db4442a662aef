"""Several processes take the steps of one at the same global batch; torchrun starts them."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from process_worker import CASES, CUTS, NORMS, norm_layer, pictures, study
from process_worker import main as worker
from safetensors.torch import load_file
from torch import Tensor

from small_runs import together
from usfan.cli.main import main
from usfan.engine.accelerate.sync_norm import sync_batch_norms
from usfan.engine.runtime import Runtime

TOLERANCE = 1e-5
Study = dict[str, Tensor]
two_cores = pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="one process per core")


def in_processes(world: int, folder: Path) -> list[Study]:
    """What each of `world` processes found."""
    outs = [folder / f"{world}-{rank}.safetensors" for rank in range(world)]
    together(
        worker,
        [
            (rank, world, str(folder / f"meet-{world}"), str(out))
            for rank, out in enumerate(outs)
        ],
    )
    return [load_file(out) for out in outs]


@pytest.fixture(scope="module")
def alone() -> Study:
    return study(Runtime(torch.device("cpu")))


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> list[Study]:
    return in_processes(2, tmp_path_factory.mktemp("pair"))


def assert_same(found: Study, expected: Study, prefix: str) -> None:
    names = [name for name in expected if name.startswith(prefix + "/")]
    assert names
    for name in names:
        torch.testing.assert_close(
            found[name], expected[name], rtol=TOLERANCE, atol=TOLERANCE, msg=name_first(name)
        )


def name_first(name: str):
    return lambda text: f"{name}: {text}"


@pytest.mark.parametrize("name", ["stage 1", *CASES])
def test_two_processes_take_the_steps_of_one(
    name: str, alone: Study, pair: list[Study]
) -> None:
    for found in pair:
        assert_same(found, alone, name)
    steps = len(alone[f"{name}/losses"])
    assert steps == 10
    assert alone[f"{name}/gradients"].abs().amax(dim=1).min() > 1e-3


def test_the_open_set_case_has_both_kinds(alone: Study) -> None:
    assert 0 < float(alone["open set/known"].mean()) < 1


def test_a_process_without_samples_in_the_last_batch(tmp_path: Path) -> None:
    expected = study(Runtime(torch.device("cpu")), short=True)
    for found in in_processes(3, tmp_path):
        for name in ("stage 1", "open set", "u-sfan by step"):
            assert_same(found, expected, name)


@pytest.mark.parametrize("kind", NORMS)
@pytest.mark.parametrize("cut", CUTS)
def test_batch_norm_over_the_global_batch(
    kind: str, cut: str, alone: Study, pair: list[Study]
) -> None:
    for found in pair:
        for name in (n for n in alone if n.startswith(f"norm {kind} {cut}/")):
            torch.testing.assert_close(
                found[name], alone[name], rtol=1e-9, atol=1e-9, msg=name_first(name)
            )


def test_a_copied_norm_keeps_its_own_statistics() -> None:
    """A copy of a synchronised module must not normalise with the original's weights."""
    layer = norm_layer("2d")
    sync_batch_norms(layer)
    sync_batch_norms(layer)
    clone = copy.deepcopy(layer).eval()
    clone.weight.data.zero_()
    assert torch.equal(
        clone(torch.ones(2, 3, 1, 1, dtype=torch.float64))[0, :, 0, 0], clone.bias
    )
    assert list(clone.state_dict()) == list(norm_layer("2d").state_dict())


def write_folder(folder: Path, count: int, seed: int, shift: int = 0) -> str:
    pixels, labels = pictures(count, seed, shift)
    for i, (picture, label) in enumerate(zip(pixels, labels.tolist(), strict=True)):
        (folder / f"class-{label}").mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.asarray(picture[0])).save(folder / f"class-{label}" / f"{i:03d}.png")
    return str(folder)


def assert_same_model(one: Path, two: Path) -> None:
    for file in ("model.safetensors", "posterior.safetensors"):
        expected = load_file(one / file)
        found = load_file(two / file)
        assert set(found) == set(expected)
        for name, tensor in expected.items():
            torch.testing.assert_close(
                found[name], tensor, rtol=TOLERANCE, atol=TOLERANCE, msg=name_first(name)
            )


def few_labels_of(folder: Path, file: Path) -> Path:
    """A table with the labels of five images: one process has three of them beside its batches, the other two."""
    images = sorted(folder.rglob("*.png"))[::13][:5]
    file.write_text(
        "path,label\n" + "".join(f"{image},{image.parent.name}\n" for image in images)
    )
    return file


def moved(before: Path, after: Path) -> float:
    old = load_file(before / "model.safetensors")
    new = load_file(after / "model.safetensors")
    return max(float((new[name].double() - old[name].double()).abs().max()) for name in old)


@two_cores
def test_two_processes_of_torchrun(tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    source = write_folder(tmp_path / "a", 90, 0)
    target = write_folder(tmp_path / "b", 75, 1, shift=3)
    model, one, two = (str(tmp_path / name) for name in ("model", "one", "two"))
    options = ["--device", "cpu", "--batch-size", "32", "--epochs", "2", "--workers", "0"]
    network = ["--backbone", "test_efficientnet", "--pretrained", "none"]
    assert main(["train", source, "--out", model, *options, *network]) == 0
    # Three steps: this network has kinks, over which a difference in the last bit grows with every step.
    adapt = [
        "adapt",
        model,
        target,
        *options,
        "--method",
        "u-sfan+",
        "--guard",
        "off",
        "--epochs",
        "1",
    ]
    adapt += ["--labels", str(few_labels_of(Path(target), tmp_path / "few.csv"))]
    assert main([*adapt, "--out", one]) == 0
    log = tmp_path / "two.log"
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    with open(log, "wb") as file:
        command = [*launch, "2", "-m", "usfan", *adapt, "--out", two]
        done = subprocess.run(command, stdout=file, stderr=file, timeout=300, check=False)
    assert done.returncode == 0, log.read_text()
    assert_same_model(Path(one), Path(two))
    assert moved(Path(model), Path(one)) > 100 * TOLERANCE
    assert not (tmp_path / "two" / "checkpoint").exists()
    assert len((tmp_path / "two" / "log.jsonl").read_text().splitlines()) == 3
    assert log.read_text().count("the model after the last epoch is kept") == 1
    capfd.readouterr()


def test_a_folder_in_use_is_said_once(pair: list[Study]) -> None:
    assert [int(found["first run"]) for found in pair] == [0, 0]
    assert [int(found["second run"]) for found in pair] == [1, 2]


def test_two_processes_resume_together(pair: list[Study]) -> None:
    for found in pair:
        assert len(found["resumed/losses"]) == 5
        for name in (n for n in found if n.startswith("u-sfan+/weights.")):
            torch.testing.assert_close(
                found[name.replace("u-sfan+", "resumed")], found[name], msg=name_first(name)
            )


def test_processes_find_out_that_they_differ(pair: list[Study]) -> None:
    assert [found["agree"].tolist() for found in pair] == [[True, False]] * 2


def test_one_process_commands_refuse_more(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert main(["reproduce", "toy", "--out", str(tmp_path / "toy")]) == 2
    assert "one process" in capsys.readouterr().err
