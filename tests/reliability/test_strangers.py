"""A stranger's folders, part two: links, holes, aliases, costs and names. Each test is an attack that once worked."""

import csv
import io
import json
import os
import resource
import signal
import struct
import subprocess
import sys
import time
import zipfile
import zlib
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

import usfan as package
from small_runs import TINY, adapt_tiny, class_folder, train_tiny, usfan
from tiny_models import tiny_model
from usfan.errors import ArtifactError, ConfigError, DataError
from usfan.store.model import SourceModel

RUN = ("--backbone", "digits-cnn", "--epochs", 2, "--batch-size", 8, *TINY)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    root = tmp_path_factory.mktemp("data")
    return class_folder(root / "source", images=4), class_folder(
        root / "target", images=4, domain=3
    )


@pytest.fixture(scope="module")
def source(data, tmp_path_factory):
    return train_tiny(data[0], tmp_path_factory.mktemp("runs") / "source")


@pytest.fixture(scope="module")
def adapted(data, source, tmp_path_factory):
    return adapt_tiny(source, data[1], tmp_path_factory.mktemp("runs") / "adapted")


@pytest.fixture
def copy(adapted, tmp_path):
    """A run folder as it comes out of an archive: other inodes, other times."""
    import shutil

    return Path(shutil.copytree(adapted, tmp_path / "copy"))


@pytest.fixture
def victim(tmp_path):
    """A file outside, and whether it is as it was."""
    file = tmp_path / "victim.txt"
    file.write_text("mine\nall mine")
    return file


@pytest.fixture
def edit_config(tmp_path):
    """A model folder with one field changed."""

    def edit(place: str, value: object) -> Path:
        folder = tiny_model().save(tmp_path / "edited")
        config = json.loads((folder / "config.json").read_text())
        *above, last = place.split(".")
        table = config
        for name in above:
            table = table[name]
        table[last] = value
        (folder / "config.json").write_text(json.dumps(config))
        return folder

    return edit


def sparse_tensors(path: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    """A safetensors file whose numbers are holes: a few kilobytes on the disk, gigabytes to a reader."""
    header = {}
    at = 0
    for name, shape in shapes.items():
        size = 4 * torch.Size(shape).numel()
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    path.unlink(missing_ok=True)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + at)


def memory() -> float:
    """MiB at most, so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


# 1


def test_a_report_does_not_write_through_a_link(copy, victim):
    (copy / "report.html").symlink_to(victim)
    assert usfan("report", copy) == 0
    assert victim.read_text() == "mine\nall mine"
    assert not (copy / "report.html").is_symlink()
    assert "<html" in (copy / "report.html").read_text()


def test_a_class_name_has_one_line_on_the_page(copy):
    described = json.loads((copy / "samples.json").read_text())
    described["classes"][0] = "cat\nssh-ed25519 AAAA attacker\n"
    (copy / "samples.json").write_text(json.dumps(described))
    assert usfan("report", copy) == 0
    assert not [
        line
        for line in (copy / "report.html").read_text().splitlines()
        if line.startswith("ssh-ed25519")
    ]


@pytest.mark.parametrize(
    "name", ["config.json", "model.safetensors", "metrics.json", "samples.json"]
)
def test_a_model_is_not_saved_through_a_link(name, data, source, victim, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / name).symlink_to(victim)
    usfan("adapt", source, data[1], "--out", out, "--epochs", 1, "--resume", *TINY)
    assert victim.read_text() == "mine\nall mine"


# 2


@pytest.mark.parametrize("name", [".lock", "log.jsonl", "config.yaml", "checkpoint"])
def test_resuming_touches_nothing_outside(name, data, tmp_path, victim, capsys):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "epoch-00001.safetensors").write_text("keep")
    (outside / ".x.part").write_text("keep")
    run = tmp_path / "run"
    run.mkdir()
    (run / name).symlink_to(outside if name == "checkpoint" else victim)
    assert usfan("train", data[0], "--out", run, "--resume", *RUN) == 2
    assert "Traceback" not in capsys.readouterr().err
    assert victim.read_text() == "mine\nall mine"
    assert sorted(p.name for p in outside.iterdir()) == [".x.part", "epoch-00001.safetensors"]


def test_a_lock_is_not_made_outside(data, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / ".lock").symlink_to(tmp_path / "made")
    (run / "log.jsonl").symlink_to(tmp_path / "made-too")
    assert usfan("train", data[0], "--out", run, "--resume", *RUN) == 2
    assert not (tmp_path / "made").exists()
    assert not (tmp_path / "made-too").exists()


def test_a_log_with_a_second_name_is_not_appended_to(data, tmp_path, victim):
    run = tmp_path / "run"
    run.mkdir()
    os.link(victim, run / "log.jsonl")
    assert usfan("train", data[0], "--out", run, "--resume", *RUN) == 2
    assert victim.read_text() == "mine\nall mine"


def test_a_study_with_a_linked_folder_is_refused(tmp_path, capsys):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / ".old.part").write_text("keep")
    out = tmp_path / "study"
    out.mkdir()
    (out / ".lock").touch()  # of an earlier demo
    (out / "mnist-uci").symlink_to(outside)
    assert usfan("demo", "--out", out, "--device", "cpu") == 2
    assert "is a link" in capsys.readouterr().err
    assert (outside / ".old.part").exists()


def test_the_cache_of_the_hub_is_made_of_links(tmp_path, victim):
    """A snapshot's files are links into its own repository's store; one that leads elsewhere is refused."""
    repository = tmp_path / "models--me--mine"
    snapshot = repository / "snapshots" / "0123"
    tiny_model().save(snapshot)
    (repository / "blobs").mkdir()
    for name in ("config.json", "model.safetensors", "posterior.safetensors"):
        (snapshot / name).rename(repository / "blobs" / name)
        (snapshot / name).symlink_to(f"../../blobs/{name}")
    assert SourceModel.load(snapshot).classes[0] == "a"
    (snapshot / "config.json").unlink()
    (snapshot / "config.json").symlink_to(victim)
    with pytest.raises(ArtifactError, match=r"config\.json: a link, not a regular file"):
        SourceModel.load(snapshot)


# 4


@pytest.mark.parametrize(
    ("place", "value", "what"),
    [
        ("input.size", 2048, "usfan.budget"),
        ("input.resize", 4096, "usfan.budget"),
        ("samples", 1_677_721, "samples must be a whole number from 1 to"),
    ],
)
def test_a_config_that_asks_for_much(place, value, what, tmp_path):
    model = tiny_model("lenet" if place == "samples" else "cnn13")
    folder = model.save(tmp_path / "edited")
    config = json.loads((folder / "config.json").read_text())
    *above, last = place.split(".")
    (config[above[0]] if above else config)[last] = value
    if last == "size":
        config["input"]["resize"] = value
    (folder / "config.json").write_text(json.dumps(config))
    before = memory()
    began = time.process_time()
    with pytest.raises(ArtifactError) as error:
        SourceModel.load(folder)
    assert what in str(error.value)
    assert memory() - before < 200
    assert time.process_time() - began < 5


def test_a_network_whose_tensors_are_not_there_is_not_run(tmp_path, monkeypatch):
    """Not even as a sketch: on torch's meta device this one, made of LSTMs, takes seconds for an image."""

    def run(*_):
        raise AssertionError("the network was run")

    monkeypatch.setattr("timm.models.sequencer.Sequencer2d.forward", run)
    folder = tiny_model().save(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    config["architecture"]["backbone"] = "sequencer2d_s"
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ArtifactError, match=r"is missing|has shape"):
        SourceModel.load(folder)


def test_a_larger_budget_allows_it(tmp_path):
    from usfan.budget import budget

    folder = tiny_model("cnn13").save(tmp_path / "edited")
    config = json.loads((folder / "config.json").read_text())
    config["input"] |= {"size": 256, "resize": 256}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ArtifactError, match=r"usfan\.budget"):
        SourceModel.load(folder)
    with budget(100):
        assert SourceModel.load(folder).spec.size == 256


@pytest.mark.parametrize("features", [8, 20_000])
def test_a_posterior_of_holes(features, edit_config):
    """With the network's own width it is refused for its holes only if it is large; with another, before it is read."""
    folder = edit_config("posterior.features", features)
    K = 3
    D = features
    shapes = {
        "weight": (K, D),
        "bias": (K,),
        "feature_values": (D + 1,),
        "feature_vectors": (D + 1, D + 1),
    }
    sparse_tensors(
        folder / "posterior.safetensors",
        shapes | {"class_values": (K,), "class_vectors": (K, K)},
    )
    before = memory()
    began = time.process_time()
    with pytest.raises(ArtifactError):
        SourceModel.load(folder)
    assert memory() - before < 300
    assert time.process_time() - began < 5


def test_samples_of_holes(copy):
    sparse_tensors(
        copy / "samples.safetensors",
        {"probs_before": (200_000, 5_000), "probs_after": (200_000, 5_000)},
    )
    before = memory()
    assert usfan("report", copy) == 0
    assert "a file of holes is not read" in (copy / "report.html").read_text()
    assert memory() - before < 300


NINE = list(zip("abcdefg", "bcdefgh", strict=True))
BOMB = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{b}: &{b} [{','.join(['*' + a] * 9)}]\n" for a, b in NINE
)


def test_aliases_in_a_config(copy, data, tmp_path, capsys):
    (copy / "config.yaml").write_text(BOMB)
    began = time.process_time()
    assert usfan("report", copy) == 0
    assert "holds an alias" in (copy / "report.html").read_text()
    assert usfan("train", data[0], "--out", copy, "--resume", *RUN) == 2
    assert "holds an alias" in capsys.readouterr().err
    (tmp_path / "config.yaml").write_text(BOMB)
    assert (
        usfan("train", data[0], "--out", tmp_path / "x", "--config", tmp_path / "config.yaml")
        == 2
    )
    assert time.process_time() - began < 10


def test_weights_that_unpack_to_much(data, tmp_path, capsys):
    plain = tmp_path / "plain.pth"
    packed = tmp_path / "packed.pth"
    torch.save({"fc.weight": torch.zeros(8_000_000)}, plain)
    with (
        zipfile.ZipFile(plain) as old,
        zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as new,
    ):
        for name in old.namelist():
            new.writestr(name, old.read(name))
    assert packed.stat().st_size < 100_000
    command = ("train", data[0], "--out", tmp_path / "run", *RUN, "--pretrained")
    assert usfan(*command, packed) == 2
    assert "unpacks to more than its size" in capsys.readouterr().err


def test_archives_that_unpack_to_much(tmp_path):
    import bz2
    import gzip

    from usfan.data.benchmarks.archives import read_images

    (tmp_path / "usps.bz2").write_bytes(bz2.compress(b"1 1:0.5\n" * 500_000))
    header = struct.pack(">HBB3I", 0, 8, 3, 20_000_000, 1, 1)
    with gzip.open(tmp_path / "train-images-idx3-ubyte.gz", "wb", compresslevel=9) as file:
        file.write(header + bytes(20_000_000))
    (tmp_path / "train-labels-idx1-ubyte.gz").write_bytes(
        gzip.compress(struct.pack(">HBBI", 0, 8, 1, 2) + b"\1\2")
    )
    part = zlib.compress(bytes(20_000_000), 9)
    (tmp_path / "train_32x32.mat").write_bytes(
        bytes(128) + struct.pack("<II", 15, len(part)) + part
    )
    with zipfile.ZipFile(tmp_path / "mnist.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("y_train.npy", bytes(20_000_000))
    before = memory()
    for name in ("usps.bz2", "train_32x32.mat", "mnist.npz", "train-images-idx3-ubyte.gz"):
        with pytest.raises(DataError, match="over the limit"):
            read_images(tmp_path / name, "train")
    assert memory() - before < 100


# 5


def many_scans(path: Path, scans: int, side: int = 2500) -> None:
    """A progressive JPEG that refines the same coefficient again and again, with next to no data."""
    buffer = io.BytesIO()
    Image.new("L", (side, side), 90).save(buffer, "JPEG", progressive=True, quality=30)
    content = buffer.getvalue()
    last = content.rindex(b"\xff\xda")
    path.write_bytes(content[:last] + content[last:-2] * scans + b"\xff\xd9")


def test_images_that_stall_the_decoder(data, source, tmp_path):
    folder = tmp_path / "images"
    folder.mkdir()
    many_scans(folder / "scans.jpg", 4_000)
    (folder / "comments.ppm").write_bytes(
        b"P3 2000 2000 255\n" + b"# a comment\n" * 2_000_000 + b"1 " * 12_000_000
    )
    (folder / "header.ppm").write_bytes(
        b"P6 # " + b"x" * 50_000_000 + b"\n8 8 255\n" + bytes(192)
    )
    Image.new("L", (30, 30), 200).save(folder / "good.png")
    began = time.perf_counter()
    assert usfan("predict", source, folder, "--out", tmp_path / "p.csv", "--device", "cpu") == 0
    assert (
        time.perf_counter() - began < 60
    )  # an image that is decoded all the same takes minutes
    rows = list(csv.DictReader((tmp_path / "p.csv").read_text().splitlines()))
    assert [Path(row["path"]).name for row in rows if not row["error"]] == ["good.png"]
    assert (
        sum(
            "limit" in row["error"] or "costly" in row["error"] or "header" in row["error"]
            for row in rows
        )
        == 3
    )


def test_a_decoder_that_takes_long_is_ended_for_few_images_too(tmp_path, monkeypatch):
    from usfan.data import stream
    from usfan.data.decoding import pool

    Image.new("L", (8, 8)).save(tmp_path / "a.png")
    Image.new("L", (8, 8)).save(tmp_path / "slow.png")
    code = (
        "from usfan.data.decoding import process\nprocess.SECONDS = 0.3\nreal = process.decode_file\n"
        "def slow(path, channels, side):\n    while 'slow' in path: pass\n    return real(path, channels, side)\n"
        "process.decode_file = slow\nprocess.main()"
    )
    monkeypatch.setattr(pool, "_CODE", code)
    data = package.ImageData(tmp_path)
    found = [i for index, _ in stream.stream(data, size=8) for i in index.tolist()]
    assert found == [0]
    assert list(data.unreadable.values()) == ["decoding took over 5 s"]


def test_a_decoder_has_limited_memory(tmp_path, monkeypatch):
    from usfan.data import stream
    from usfan.data.decoding import pool

    Image.new("L", (8, 8)).save(tmp_path / "a.png")
    code = (
        "from usfan.data.decoding import process\n"
        "def large(path, channels, side): bytearray(3 << 30)\nprocess.decode_file = large\nprocess.main()"
    )
    monkeypatch.setattr(pool, "_CODE", code)
    with pytest.raises(DataError, match="not enough memory"):
        list(stream.stream(package.ImageData(tmp_path), size=8))


# 6


def test_doubled_links_are_followed_once(tmp_path):
    top = tmp_path / "data" / "cat"
    top.mkdir(parents=True)
    Image.new("L", (8, 8)).save(top / "a.png")
    level = tmp_path / "data" / "dog"
    for depth in range(24):
        deeper = tmp_path / f"level-{depth}"
        deeper.mkdir()
        level.mkdir(exist_ok=True)
        (level / "one").symlink_to(deeper)
        (level / "two").symlink_to(deeper)
        level = deeper
    Image.new("L", (8, 8)).save(level / "b.png")
    began = time.process_time()
    assert len(package.ImageData(tmp_path / "data")) == 2
    assert time.process_time() - began < 2


def test_deep_folders_and_a_link_to_itself(tmp_path):
    cat = tmp_path / "data" / "cat"
    cat.mkdir(parents=True)
    Image.new("L", (8, 8)).save(cat / "a.png")
    (cat / "self").symlink_to("self")
    (tmp_path / "data" / "loop").symlink_to("loop")
    assert len(package.ImageData(tmp_path / "data")) == 1
    handle = os.open(cat, os.O_RDONLY)
    for _ in range(1900):  # nearly the longest path
        os.mkdir("d", dir_fd=handle)
        inner = os.open("d", os.O_RDONLY, dir_fd=handle)
        os.close(handle)
        handle = inner
    os.close(handle)
    try:
        assert len(package.ImageData(tmp_path / "data")) == 1
    finally:
        subprocess.run(["rm", "-rf", str(cat)], check=True)


# 7


def test_names_that_are_not_utf8(data, source, tmp_path, capsys):
    folder = os.fsencode(tmp_path / "images")
    os.mkdir(folder)
    Image.new("L", (30, 30)).save(tmp_path / "a.png")
    os.rename(tmp_path / "a.png", folder + b"/\xff.png")
    assert (
        usfan("predict", source, tmp_path / "images", "--out", tmp_path / "p.csv", *TINY) == 0
    )
    rows = list(csv.DictReader((tmp_path / "p.csv").read_text(encoding="utf-8").splitlines()))
    assert rows[0]["path"].endswith("images/\\xff.png")
    os.makedirs(os.fsencode(tmp_path / "train") + b"/dog\xfe")
    os.rename(folder + b"/\xff.png", os.fsencode(tmp_path / "train") + b"/dog\xfe/a.png")
    class_folder(tmp_path / "train2", images=2)
    os.rename(tmp_path / "train2" / "class-0", tmp_path / "train" / "class-0")
    capsys.readouterr()
    assert usfan("train", tmp_path / "train", "--out", tmp_path / "run", *RUN) == 2
    assert "name is not UTF-8 ('dog\\xfe')" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


# 8


@pytest.mark.parametrize(
    "flags",
    [
        ("--prior", 1e31),
        ("--temperature", 1e-4),
        ("--temperature", 1e4),
        ("--samples", 2_000_000),
    ],
)
def test_what_would_not_be_read_is_not_written(flags, data, source, tmp_path, refused):
    refused("adapt", source, data[1], "--out", tmp_path / "run", "--epochs", 0, *TINY, *flags)
    assert not (tmp_path / "run").exists()


def test_a_long_label_is_refused_before_the_training(tmp_path, refused, data):
    lines = [
        f"{p} {'x' * 1001 if 'class-0' in str(p) else 'y'}"
        for p in sorted(data[0].rglob("*.png"))
    ]
    (tmp_path / "list.txt").write_text("\n".join(lines))
    assert "1001 characters" in refused(
        "train", tmp_path / "list.txt", "--out", tmp_path / "run", *RUN
    )


def test_saving_uses_the_schema_of_loading(tmp_path):
    model = tiny_model()
    model.temperature = 1e5
    with pytest.raises(ArtifactError, match="temperature must be a number"):
        model.save(tmp_path / "model")
    assert not (tmp_path / "model").exists()


# 9


@pytest.mark.parametrize("flags", [("--lr", 1e308), ("--prior", 1e308), ("--momentum", 1e308)])
def test_huge_numbers(flags, data, tmp_path, refused):
    refused("train", data[0], "--out", tmp_path / "run", *RUN, *flags)


def test_memory_that_runs_out_is_one_line(capsys, monkeypatch):
    from usfan.cli import commands

    def fail():
        raise RuntimeError(
            "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"
        )

    monkeypatch.setitem(commands.COMMANDS, "methods", fail)
    assert usfan("methods") == 1
    assert capsys.readouterr().err.startswith("usfan methods: out of memory: ")


def test_a_decoder_killed_while_it_starts(tmp_path, monkeypatch, source, capsys):
    from usfan.data.decoding import pool

    Image.new("L", (8, 8)).save(tmp_path / "a.png")
    monkeypatch.setattr(pool, "_CODE", "import os; os.kill(os.getpid(), 9)")
    assert (
        usfan("predict", source, tmp_path, "--out", tmp_path / "p.csv", "--device", "cpu") == 1
    )
    assert "could not start" in capsys.readouterr().err


def test_closed_standard_handles(data, source, tmp_path):
    command = f"{sys.executable} -m usfan predict {source} {data[1]} --out {tmp_path}/p.csv --workers 1"
    done = subprocess.run(["bash", "-c", f"exec {command} <&- >&- 2>&-"], timeout=120)
    assert done.returncode == 0
    assert len((tmp_path / "p.csv").read_text().splitlines()) == 13


def test_backbones_that_take_more_than_images():
    from usfan.data.views import InputSpec
    from usfan.models.backbones import probe_features

    class Odd(torch.nn.Module):
        def forward(self, images, positions):
            return images

    with pytest.raises(ConfigError, match="does not take images of 3×8×8"):
        probe_features(Odd(), InputSpec(size=8, resize=8))


DOES_NOT_FIT = (
    "a checkpoint does not fit this run",
    "Another version of usfan",
    "resume with that version, or remove",
)


@pytest.mark.parametrize(
    "damage",
    [
        "no-state",
        "no-best",
        "best-text",
        "no-model",
        "half-a-model",
        "odd-best-state",
        "odd-momentum",
        "state-list",
    ],
)
def test_checkpoints_that_do_not_fit(damage, data, tmp_path, capsys):
    from usfan.store.run_folder import RunFolder

    out = tmp_path / "run"
    real = RunFolder.save_checkpoint

    def stop(self, epoch, tensors, state):
        real(self, epoch, tensors, state)
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunFolder, "save_checkpoint", stop)
        assert usfan("train", data[0], "--out", out, *RUN) == 130
    file = next((out / "checkpoint").iterdir())
    tensors = load_file(file)
    state = {"best": {"accuracy": 50.0, "epoch": 1}}
    if damage in ("no-state", "no-best", "best-text", "state-list"):
        state = {
            "no-state": {},
            "no-best": {"best": {}},
            "best-text": {"best": "x"},
            "state-list": [1],
        }[damage]
    elif damage == "no-model":
        tensors = {k: v for k, v in tensors.items() if not k.startswith("model.")}
    elif damage == "half-a-model":
        tensors.pop(next(k for k in tensors if k.startswith("model.") and k.endswith("weight")))
    elif damage == "odd-best-state":
        tensors["best.x"] = torch.zeros(3)
    else:
        tensors["momentum.0"] = torch.zeros(7)
    save_file(tensors, file, {"state": json.dumps(state)})
    code = usfan("train", data[0], "--out", out, "--resume", *RUN)
    said = capsys.readouterr().err
    assert "Traceback" not in said
    assert (
        code == 0
        if damage == "state-list"
        else (code == 2 and all(words in said for words in DOES_NOT_FIT))
    )


# 10


@pytest.mark.parametrize("name", ['=HYPERLINK("http://evil")', "+1+cmd", "@SUM(A1)", "-2+3"])
def test_tables_hold_no_formula(name):
    from usfan.metrics.predictions import cell

    assert cell(name) == f"'{name}"
    assert cell("-1") == "-1"
    assert cell("cat") == "cat"
    assert cell("a\rb\x1b") == "a\\rb\\x1b"


# 11


def test_names_in_a_config_file_are_escaped(data, tmp_path, refused):
    for text in ('"\\e]0;owned\\a\\e[31m": 1\n', '"\\e[31m": {a: 1}\n', f"{'k' * 30_000}: 1\n"):
        (tmp_path / "c.yaml").write_text(text)
        line = refused(
            "train", data[0], "--out", tmp_path / "run", "--config", tmp_path / "c.yaml"
        )
        assert line.isprintable()
        assert len(line) < 2_100


# 12


def test_a_report_shows_no_image_that_a_stranger_names(copy, data, tmp_path):
    secret = tmp_path / "secret.png"
    Image.effect_noise((64, 64), 90).save(secret)
    described = json.loads((copy / "samples.json").read_text())
    described["paths"] = [str(secret)] * len(described["paths"])
    (copy / "samples.json").write_text(json.dumps(described))
    assert usfan("report", copy) == 0
    page = (copy / "report.html").read_text()
    assert "data:image/jpeg" not in page
    assert "not made here" in page
    assert usfan("report", copy, "--root", data[1]) == 0
    assert "data:image/jpeg" not in (copy / "report.html").read_text()
    assert usfan("report", copy, "--root", tmp_path) == 0
    assert "data:image/jpeg" in (copy / "report.html").read_text()


def test_a_report_of_an_own_run_shows_its_images(adapted, tmp_path):
    assert usfan("report", adapted, "--out", tmp_path / "own.html") == 0
    assert "data:image/jpeg" in (tmp_path / "own.html").read_text()


# 13


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_modules_in_other_precisions(dtype, tmp_path):
    torch.manual_seed(0)
    module = torch.nn.Sequential(
        torch.nn.Flatten(), torch.nn.Linear(64, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3)
    )
    images = torch.randint(256, (12, 8, 8), dtype=torch.uint8)
    labels = torch.arange(12) % 3
    module = module.to(dtype)
    spec = package.InputSpec(1, 8, 8, (0.5,), (0.5,), "none")
    model = package.attach_posterior(
        module, package.ImageData(images, labels), head="3", spec=spec
    )
    assert model.posterior.weight.dtype == torch.float32
    assert next(module.parameters()).dtype == dtype
    again = SourceModel.load(model.save(tmp_path / "m"), module=module)
    assert torch.equal(again.predict(images).label, model.predict(images).label)


# 14


def test_logs_and_reports_hold_no_absolute_path(data, source, tmp_path):
    import shutil

    place = Path(shutil.copytree(data[1], tmp_path / "private-place" / "target"))
    (place / "class-0" / "broken.png").write_text("no image")
    run = adapt_tiny(source, place, tmp_path / "run")
    assert str(tmp_path) not in (run / "log.jsonl").read_text()
    assert "class-0/broken.png" in (run / "log.jsonl").read_text()
    assert usfan("report", run) == 0
    assert str(tmp_path) not in (run / "report.html").read_text()


def test_a_private_run_has_no_curves(data, source, tmp_path):
    """The names of their files hold those of the machine and the process."""
    run = adapt_tiny(source, data[1], tmp_path / "run", "--private")
    assert not [path.name for path in run.iterdir() if "tfevents" in path.name]


# 15


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_lost_signal_ends_the_process_even_so(number, code):
    """An exception in a destructor is printed and forgotten: the process must end nonetheless."""
    script = (
        "import os, sys, time; from usfan.cli import commands, ending, main\n"
        "ending.GRACE = 0.5\n"
        f"class Lost:\n    def __del__(self): os.kill(os.getpid(), {int(number)}); time.sleep(0.1)\n"
        "def work():\n    Lost()\n    time.sleep(60)\n"
        "commands.COMMANDS['methods'] = work; sys.exit(main.main(['methods']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == code


@pytest.mark.parametrize(
    ("number", "code", "word"), [(2, 130, "interrupted"), (15, 143, "terminated")]
)
def test_a_signal_ends_with_one_line(number, code, word):
    script = (
        "import os, sys, time; from usfan.cli import commands, main\n"
        f"commands.COMMANDS['methods'] = lambda: (os.kill(os.getpid(), {number}), time.sleep(60))\n"
        "sys.exit(main.main(['methods']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (code, f"usfan methods: {word}\n")


def test_a_signal_that_a_library_turns_into_another_error():
    script = (
        "import os, sys, time; from usfan.cli import commands, main\n"
        "def work():\n    try: os.kill(os.getpid(), 2); time.sleep(60)\n"
        "    except KeyboardInterrupt: raise ValueError('lost') from None\n"
        "commands.COMMANDS['methods'] = work; sys.exit(main.main(['methods']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (130, "usfan methods: interrupted\n")


# 16


def test_settings_linked_to_a_terminal(data, tmp_path, refused):
    """Reading it would wait for someone to type."""
    import pty

    ours, theirs = pty.openpty()
    (tmp_path / "config.yaml").symlink_to(os.ttyname(theirs))
    refused("train", data[0], "--out", tmp_path / "run", "--config", tmp_path / "config.yaml")
    os.close(ours)
    os.close(theirs)


@pytest.mark.parametrize(
    "name", ["config.json", "config.yaml", "metrics.json", "samples.json", "log.jsonl"]
)
def test_a_report_of_links_to_devices(name, copy):
    (copy / name).unlink()
    (copy / name).symlink_to("/dev/zero")
    assert usfan("report", copy) == 0
    assert f"{name} cannot be read" in (copy / "report.html").read_text()


# what newer commands write and read


def test_the_model_beside_is_not_saved_through_a_link(data, source, tmp_path):
    """The adapted model that the guard is not sure of goes into a folder of its own in the run."""
    from usfan.store.run_folder import RunFolder

    outside = tmp_path / "outside"
    outside.mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text("command: adapt\n")
    (tmp_path / "run" / "adapted").symlink_to(outside)
    with RunFolder(tmp_path / "run", {}, command="adapt", resume=True) as run:
        with pytest.raises(ArtifactError, match="adapted: not a folder but a link"):
            SourceModel.load(source).save(run.inside("adapted"))
        assert run.inside("other").is_dir()
    assert not list(outside.iterdir())


def test_a_report_of_many_runs_follows_no_link(copy, tmp_path, victim):
    root = tmp_path / "all"
    (root / "inner").mkdir(parents=True)
    (root / "linked").symlink_to(copy)
    (root / "inner" / "config.yaml").write_text("command: train\n")
    stolen = {"columns": ["a-b"], "results": {"stolen": {"a-b": {"mean": 1}}}}
    (tmp_path / "table.json").write_text(json.dumps(stolen))
    (root / "table.json").symlink_to(tmp_path / "table.json")
    (root / "picture.png").symlink_to(victim)
    assert usfan("report", root) == 0
    page = (root / "report.html").read_text()
    assert page.count("<article") == 1  # the run that lies inside, not the one that is linked
    assert "stolen" not in page
    assert "table.json cannot be read" in page
    assert "data:image/" not in page


@pytest.mark.parametrize(
    "name",
    ["\x9b31mred", "\u202egnp", "a\x1b[2J", "a\nb"],
    ids=["c1", "backwards", "esc", "line"],
)
def test_json_lines_hold_no_raw_control_character(name):
    from usfan.metrics.predictions import json_line

    line = json_line({"path": name, "label": "Grün 猫"})
    assert line.isprintable()
    assert "Grün 猫" in line
    assert json.loads(line)["path"] == name


def test_a_table_of_changes_holds_no_formula(tmp_path):
    from usfan.metrics.changes import CHANGED, write_records

    row = dict(zip(CHANGED, ("a.png", "=HYPERLINK(1)", "\x1bcat", 0.5, 0.5), strict=True))
    write_records(tmp_path / "changes.csv", CHANGED, [row])
    (found,) = csv.DictReader((tmp_path / "changes.csv").read_text().splitlines())
    assert found["before"] == "'=HYPERLINK(1)"
    assert found["after"] == "\\x1bcat"


@pytest.mark.parametrize("damage", ["empty", "text", "collapsed"])
def test_a_history_that_the_guard_cannot_use_is_refused(damage):
    from dataclasses import asdict

    from usfan.adaptation.guard import EpochScore, Guard
    from usfan.maths.agreement import Interval

    flat = Interval(0.0, 0.0, 0.0)
    look = asdict(EpochScore(0, 0.0, flat, 1.0, (0.5, 0.5), (0.5, 0.5), (0.5, 0.5)))
    changes = {"empty": {}, "text": {"changed": "much"}, "collapsed": {"collapse": "yes"}}[
        damage
    ]
    history = [] if damage == "empty" else [{**look, **changes}, {**look, "epoch": 1}]
    with pytest.raises(ValueError, match=r"could not convert|does not begin"):
        Guard(enabled=True).restore({"history": history}, {})


def test_class_names_of_a_device_or_of_much(tmp_path):
    from usfan.data.lists import read_classes

    with pytest.raises(DataError, match="not a regular file"):
        read_classes("/dev/zero")
    with open(tmp_path / "names.txt", "wb") as file:
        file.truncate(1 << 31)
    with pytest.raises(DataError, match="over the limit"):
        read_classes(tmp_path / "names.txt")
