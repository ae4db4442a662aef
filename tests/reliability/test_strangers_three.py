"""Strangers' files, part three: each test is an attack, or a loss, that once worked."""

import contextlib
import io
import json
import os
import pickle
import resource
import struct
import time
import zipfile
from pathlib import Path

import pytest
import torch
import yaml
from timm.layers import Conv2dSame
from torch import nn

import usfan as package
from small_runs import TINY, class_folder, usfan
from tiny_models import tiny_model
from usfan.config import RuntimeConfig
from usfan.data.few_labels import few_labels
from usfan.data.store import Store
from usfan.data.views import InputSpec
from usfan.engine.features import BackboneAlone, features_of, open_cache
from usfan.engine.runtime import start_runtime
from usfan.errors import ArtifactError, ConfigError, DataError
from usfan.files import parse_yaml, written_together
from usfan.models import hub
from usfan.models.backbones import read_state
from usfan.models.torch_file import read_torch_file
from usfan.store.model import SourceModel
from usfan.store.model_folder import FILES


@pytest.fixture
def refuses(capsys):
    def call(*arguments):
        assert usfan(*arguments) == 2
        (line,) = capsys.readouterr().err.strip().splitlines()
        return line

    return call


# 1: config files


@pytest.mark.parametrize(
    ("command", "setting"),
    [
        ("study", {"ray": "ray://127.0.0.1:1"}),
        ("predict", {"ray": "ray://127.0.0.1:1"}),
        ("train", {"pretrained": "timm"}),
        ("train", {"cache": "somewhere"}),
        ("train", {"out": "somewhere"}),
        ("train", {"budget": 1000}),
        ("train", {"root": "/"}),
        ("study", {"source_pretrained": "timm"}),
        ("adapt", {"witness": "resnet50:timm"}),
        ("adapt", {"witness": "somebody/model"}),
        ("adapt", {"source": "somebody/model"}),
        ("predict", {"model": "somebody/model"}),
        ("export", {"onnx": "somewhere"}),
    ],
)
def test_a_config_file_neither_connects_nor_writes(command, setting, refuses, tmp_path):
    file = tmp_path / "settings.yaml"
    file.write_text(yaml.safe_dump(setting))
    (name,) = setting
    line = refuses(command, "--config", file)
    assert f": {name} " in line
    assert "give it on the command line" in line


def test_a_flag_replaces_what_a_config_file_may_not_set(refuses, tmp_path):
    file = tmp_path / "settings.yaml"
    file.write_text("out: elsewhere\npretrained: timm\n")
    flags = ("--out", tmp_path / "run", "--pretrained", "none", "--config", file)
    assert "no such folder" in refuses("train", tmp_path / "nowhere", *flags)


@pytest.mark.parametrize(
    "line", ["pretrained: timm", "cache: /somewhere", "witness: x:timm", "witness: x/y"]
)
def test_resuming_a_strangers_run_neither_connects_nor_writes(line, refuses, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    command = "adapt" if "witness" in line else "train"
    (run / "config.yaml").write_text(f"command: {command}\n{line}\n")
    assert "give it on the command line" in refuses(command, "--resume", "--out", run)


# 2: .pth


def old_file(program: bytes, keys: list[str] | None = None) -> bytes:
    facts = {"protocol_version": 1001, "little_endian": True, "type_sizes": {}}
    parts = [0x1950A86A20F9469CFC6C, 1001, facts]
    content = b"".join(pickle.dumps(part, protocol=2) for part in parts)
    return content + program + pickle.dumps(keys or [], protocol=2)


def new_file(program: bytes) -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        archive.writestr("a/data.pkl", program)
    return content.getvalue()


def nested_key(depth: int) -> bytes:
    """A table with a key that takes 2^depth steps to hash."""
    steps = b")q\x00" + b"h\x00h\x00\x86q\x00" * depth
    return b"\x80\x02}" + steps + b"K\x01s."


def tensor_of(count: int, shape: bytes = b"K\x01\x85", stride: bytes = b"K\x01\x85") -> bytes:
    """A state dict with one tensor, a view of a storage of this many numbers."""
    storage = b"(X\x07\0\0\0storagectorch\nFloatStorage\nX\x01\0\0\x000X\x03\0\0\0cpu"
    number = b"\x8a\x08" + struct.pack("<q", count)
    rebuilt = b"ctorch._utils\n_rebuild_tensor_v2\n("
    end = b"tQK\x00" + shape + stride + b"\x89ccollections\nOrderedDict\n)RtR"
    return b"\x80\x02}X\x01\0\0\0w" + rebuilt + storage + number + end + b"s."


BAD_PROGRAMS = {
    "nested key": nested_key(60),
    "allocation": b"\x80\x02cbuiltins\nbytearray\n\x8a\x05\0\0\0\0\x01\x85R.",
    "a name": b"\x80\x02cos\nsystem\nX\x04\0\0\0true\x85R.",
    "more numbers than the file has": tensor_of(1 << 40),
    "a view outside": tensor_of(1, b"J\0\0\0\x10\x85", b"K\x01\x85"),
    "a view of much": tensor_of(1, b"J\0\0\0\x10\x85", b"K\x00\x85"),
    "a long text": b"\x80\x02X\xff\xff\xff\x7fa.",
    "no end": b"\x80\x02" + b"N" * 1000,
    "a loop in a table": b"\x80\x02}q\x00X\x01\0\0\0ah\x00s.",
}


@pytest.mark.parametrize("form", [new_file, old_file])
@pytest.mark.parametrize("kind", BAD_PROGRAMS)
def test_weights_that_stall_or_allocate(kind, form, tmp_path):
    file = tmp_path / "weights.pth"
    file.write_bytes(form(BAD_PROGRAMS[kind]))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started = time.process_time()
    with pytest.raises(ConfigError):
        read_state(file)
    assert time.process_time() - started < 1
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 << 10


def test_many_steps_are_refused(tmp_path):
    file = tmp_path / "weights.pth"
    file.write_bytes(new_file(b"\x80\x02" + b"]0" * 600_000 + b"}."))
    with pytest.raises(ConfigError):
        read_state(file)


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("protocol", [2, 4])
def test_state_dicts_are_those_that_torch_reads(zipped, protocol, tmp_path):
    """torch's own reader is the oracle."""
    network = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Linear(4, 2))
    base = torch.arange(24.0)
    state = network.state_dict() | {
        "tied": network[0].weight,
        "part": base[4:16].view(3, 4).T,
        "empty": torch.empty(0, 3),
        "half": base.half(),
        "brain": base.bfloat16(),
        "number": torch.tensor(3),
        "mask": base > 3,
    }
    file = tmp_path / "weights.pth"
    options = {"_use_new_zipfile_serialization": zipped, "pickle_protocol": protocol}
    torch.save({"model": state, "epoch": 3, "list": [1, (2.5, None)]}, file, **options)
    expected = torch.load(file, weights_only=False)["model"]
    tensors = read_torch_file(file)
    assert list(tensors) == list(expected)
    for name, tensor in expected.items():
        assert torch.equal(tensors[name], tensor), name
        assert tensors[name].dtype == tensor.dtype


# 3: the cache of features


class Wave(nn.Module):
    """A user's network; its function is no layer."""

    def __init__(self, function):
        super().__init__()
        self.layer = nn.Conv2d(1, 6, 3)
        self.function = function

    def forward(self, images):
        return self.function(self.layer(images)).mean(dim=(2, 3))


def same_weights(one, other):
    other.load_state_dict(one.state_dict())
    return one, other


@pytest.mark.parametrize("kind", ["padding", "function"])
def test_a_network_does_not_get_the_features_of_another(kind, tmp_path):
    """One file of weights, two networks; torch.sin(x) is no layer, so the names of the layers are the same."""
    size, channels = (28, 1) if kind == "function" else (32, 3)
    pair = (Wave(torch.relu), Wave(torch.sin))
    if kind == "padding":  # as of efficientnet_b0 and tf_efficientnet_b0
        layers = (nn.Conv2d(3, 6, 3, 2, padding=1), Conv2dSame(3, 6, 3, 2))
        pair = tuple(
            nn.Sequential(layer, nn.AdaptiveAvgPool2d(1), nn.Flatten()) for layer in layers
        )
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (5, channels, size, size), generator=generator)
    store = Store(pixels.byte(), torch.arange(5), None, None, None, {}, key="images")
    spec = InputSpec(channels, size, size, (0.5,) * channels, (0.5,) * channels)
    runtime = start_runtime(RuntimeConfig(device="cpu", cache=str(tmp_path)))
    for network in same_weights(*pair):
        alone = BackboneAlone(network.eval(), channels_last=False)
        first = features_of(alone, store, spec, runtime).values
        with torch.no_grad():
            expected = network((pixels.float() / 255 - 0.5) / 0.5)
        torch.testing.assert_close(first, expected, rtol=1e-3, atol=1e-4)
        assert torch.equal(features_of(alone, store, spec, runtime).values, first)
    assert len(list(tmp_path.glob("*.rows"))) == 2
    caches = [
        open_cache(["weights"], store, spec, runtime, 4, engine)
        for engine in ("torch", "openvino")
    ]
    assert caches[0].key != caches[1].key


# 4: folders that are not usfan's


def files_in(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.fixture
def foreign(tmp_path):
    folder = tmp_path / "mine"
    (folder / "deep").mkdir(parents=True)
    for name in ("metrics.json", "table.md", "README.md", "config.json", ".old.part"):
        (folder / name).write_text("mine")
    (folder / "deep" / ".tmpabc123").write_text("mine")
    return folder


@pytest.mark.parametrize("command", ["study", "reproduce", "demo"])
@pytest.mark.parametrize("kind", ["any", "run"])
def test_a_study_leaves_a_folder_alone_that_is_not_its_own(
    command, kind, foreign, refuses, tmp_path
):
    if kind == "run":
        (foreign / ".lock").touch()
        (foreign / "config.yaml").write_text("command: train\n")
    before = files_in(foreign)
    more = {"demo": (), "reproduce": ("toy", "--seeds", 0)}
    if command == "study":
        for number, name in enumerate(("a", "b")):
            class_folder(tmp_path / "data" / name, images=2, domain=number)
        more["study"] = (tmp_path / "data", "--backbone", "digits-cnn")
    assert "choose another --out" in refuses(command, *more[command], "--out", foreign)
    assert files_in(foreign) == before


def test_only_our_parts_are_removed(tmp_path):
    from usfan.store.run_folder import folder_lock

    study = tmp_path / "study"
    (study / "models").mkdir(parents=True)
    (study / "notes").mkdir()
    (study / "config.yaml").write_text("command: study\n")
    ours = [study / "models" / f".{name}.0123abcd.part" for name in ("x.json", "y.json")]
    others = [study / "notes" / ".tmpabc123", study / ".old.part"]
    ours[0].mkdir()
    for file in (ours[0] / "x.json", ours[1], *others):
        file.touch()
    with folder_lock(study, "study"):
        pass
    assert not any(file.exists() for file in ours)
    assert all(file.exists() for file in others)


def test_resuming_leaves_a_folder_alone_that_holds_no_run(foreign, refuses, tmp_path):
    before = files_in(foreign)
    data = class_folder(tmp_path / "data", images=2)
    flags = ("--backbone", "digits-cnn", "--resume", "--out", foreign)
    assert "is not a run folder" in refuses("train", data, *flags, *TINY)
    assert files_in(foreign) == before


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_a_table_is_not_written_through_the_link_of_another_user(tmp_path):
    from usfan.files import whole_file

    mine = tmp_path / "mine"
    mine.write_text("mine")
    for owner, text in ((65_534, "mine"), (0, "table")):
        link = tmp_path / f"table-{owner}.csv"
        link.symlink_to(mine)
        os.lchown(link, owner, owner)
        with whole_file(link, follow=True) as part:
            part.write_text("table")
        assert link.read_text() == "table"
        assert mine.read_text() == text


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_a_folder_of_another_user_in_the_place_of_ours_is_refused(tmp_path, monkeypatch):
    """Somebody who may write here exchanges the new folder before it is opened."""
    from usfan import files

    whole = files.Folder.inner

    def exchanged(self: files.Folder, name: str, **options: bool) -> files.Folder:
        os.chown(tmp_path / name, 65_534, 65_534)
        return whole(self, name, **options)

    monkeypatch.setattr(files.Folder, "inner", exchanged)
    with pytest.raises(ArtifactError, match="a folder of another user"):
        files.write_text(tmp_path / "a.txt", "text")


# 5: no network because of a model folder


def test_a_model_folder_asks_no_hub(monkeypatch, tmp_path):
    from usfan.adaptation.witness import automatic_witness

    asked = []
    monkeypatch.setattr(hub, "reachable", lambda: asked.append("hub") or False)
    monkeypatch.setattr("socket.getaddrinfo", lambda *_: asked.append("name") or [])
    model = tiny_model()
    record = {"from": "timm", "hash": "0" * 32}
    model.architecture |= {"backbone": "resnet18", "pretrained": record}
    model.spec = InputSpec(3, 28, 28)
    automatic_witness(model, "1" * 32)
    automatic_witness(model, record["hash"])
    assert asked == []


# 6 and 7: how a folder is written


def test_files_honour_the_umask_and_their_rights(tmp_path):
    before = os.umask(0o027)
    try:
        tiny_model().save(tmp_path / "model")
        config = tmp_path / "model" / "config.json"
        assert config.stat().st_mode & 0o777 == 0o640
        config.chmod(0o600)
        tiny_model().save(tmp_path / "model")
        assert config.stat().st_mode & 0o777 == 0o600
    finally:
        os.umask(before)


class Killed(BaseException):
    """Stands for a signal that nobody can catch: nothing is cleared away."""


def test_a_model_is_replaced_as_a_whole(monkeypatch, tmp_path):
    """The process dies at each of the steps that change names; the folder always holds one model or the other."""
    new = tiny_model(seed=1)
    new.temperature = 0.7
    temperatures = []
    died = True
    while died:
        folder = tiny_model().save(tmp_path / f"model-{len(temperatures)}")
        left = [4 * len(temperatures)]

        def counted(call, left=left):
            def step(*args, **named):
                left[0] -= 1
                if left[0] < 0:
                    raise Killed
                return call(*args, **named)

            return step

        with monkeypatch.context() as patch, contextlib.suppress(Killed):
            for name in ("replace", "rename", "mkdir", "rmdir", "unlink"):
                patch.setattr(os, name, counted(getattr(os, name)))
            new.save(folder)
        died = left[0] < 0
        model = SourceModel.load(folder)
        assert model.temperature in (0.4, 0.7)
        expected = tiny_model() if model.temperature == 0.4 else new
        state = expected.classifier.state_dict()
        for name, tensor in model.classifier.state_dict().items():
            assert torch.equal(tensor, state[name])
        temperatures.append(model.temperature)
        new.save(folder)  # goes on, and clears what lay about
        assert sorted(os.listdir(folder)) == sorted(FILES)
        assert SourceModel.load(folder).temperature == 0.7
    assert temperatures == sorted(temperatures)
    assert len(set(temperatures)) == 2
    assert len(temperatures) > 3


def test_files_in_folders_are_written_together(tmp_path):
    (tmp_path / "a").write_text("old")
    with contextlib.suppress(KeyError), written_together(tmp_path) as part:
        (part / "a").write_text("new")
        raise KeyError
    assert files_in(tmp_path) == {"a": b"old"}
    with written_together(tmp_path) as part:
        (part / "a").write_text("new")
        (part / "inner").mkdir()
        (part / "inner" / "b").write_text("new")
    assert files_in(tmp_path) == {"a": b"new", "inner/b": b"new"}
    (tmp_path / "c").mkdir()
    with contextlib.suppress(IsADirectoryError), written_together(tmp_path) as part:
        (part / "a").write_text("newer")
        (part / "c").write_text("newer")
    assert files_in(tmp_path) == {"a": b"new", "inner/b": b"new"}


@pytest.mark.parametrize("kind", ["link", "deep"])
def test_a_strangers_folder_of_new_files_leads_nowhere(kind, tmp_path):
    model = tiny_model().save(tmp_path / "model")
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "config.json").write_text("{}")
    if kind == "link":
        (model / ".files.new").symlink_to(outside)
        (model / ".files.part").symlink_to(outside)
    else:
        (model / ".files.new" / "a" / "b" / "c").mkdir(parents=True)
    SourceModel.load(model)
    before = files_in(outside)
    try:
        tiny_model().save(model)
    except OSError as error:
        assert str(model) in str(error.filename)  # noqa: PT017
    assert files_in(outside) == before


# 9 and 10: the caller's process; see tests/test_manners.py


def test_no_public_call_tunes_malloc():
    """It cannot be taken back: only commands call it, and the workers of Ray."""
    source = Path(package.__file__).parent
    users = {
        path.relative_to(source).as_posix()
        for path in source.rglob("*.py")
        if "keep_freed_memory()" in path.read_text()
    }
    workers = {"study/cluster.py", "study/predict_on_ray.py"}
    assert users == {"engine/runtime.py", "cli/edges.py"} | workers


# 12: labels


ODD_POSITIONS = ["²", "１", "9" * 5000, float("inf"), 10**5000, 1.7, True, None, b"0"]


@pytest.mark.parametrize("image", ODD_POSITIONS, ids=range(len(ODD_POSITIONS)))
def test_odd_positions_of_labels(image):
    data = package.ImageData(torch.zeros(4, 28, 28, dtype=torch.uint8))
    with pytest.raises(DataError, match="has images 0 to 3, no") as caught:
        few_labels({image: "a"}, data, ("a", "b"))
    assert len(str(caught.value)) < 200


def test_usual_positions_of_labels():
    data = package.ImageData(torch.zeros(4, 28, 28, dtype=torch.uint8))
    labels = {0: "a", "1": "b", torch.tensor(2): "a"}
    assert few_labels(labels, data, ("a", "b")).learn.tolist() == [0, 1, 0, -1]


# 13: YAML


def test_odd_yaml(refuses, tmp_path):
    with pytest.raises(ValueError, match="it holds epochs twice"):
        parse_yaml(b"epochs: 1\nepochs: 2\n")
    assert parse_yaml(b"{a: 1:30, b: 1:30.5, c: 010, d: -12, e: 0, f: 1_000}") == {
        "a": "1:30",
        "b": "1:30.5",
        "c": "010",
        "d": -12,
        "e": 0,
        "f": 1000,
    }
    file = tmp_path / "settings.yaml"
    command = ("train", tmp_path, "--out", tmp_path / "run", "--config", file)
    file.write_text("epochs: 1:30\n")
    assert "epochs must be a whole number; got '1:30'" in refuses(*command)
    file.write_text("batch-size: 8\nbatch_size: 9\n")
    assert "it holds batch_size twice" in refuses(*command)


# 14: numbers


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_no_numbers_are_not_saved(value, tmp_path):
    folder = tiny_model().save(tmp_path / "model")
    before = files_in(folder)
    model = tiny_model()
    with torch.no_grad():
        next(model.classifier.parameters()).flatten()[0] = value
    with pytest.raises(ArtifactError, match=r"model\.safetensors: '.*' holds NaN or infinity"):
        model.save(folder)
    assert files_in(folder) == before


# 15: caches


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to somebody")
@pytest.mark.parametrize("suffix", ["rows", "json"])
def test_a_cache_of_another_user_is_not_read(suffix, tmp_path, caplog):
    from usfan.data.row_cache import RowCache

    cache = RowCache(tmp_path, "key", 3, (2,), torch.float32)
    builds = []

    def build(_):
        builds.append(1)
        yield torch.ones(3, 2)

    for _ in range(2):
        cache.read_or_build(torch.device("cpu"), build)
    assert len(builds) == 1
    os.chown(tmp_path / f"key.{suffix}", 12345, 12345)
    rows, _ = cache.read_or_build(torch.device("cpu"), build)
    assert len(builds) == 2
    assert "another user wrote it" in caplog.text
    assert torch.equal(rows, torch.ones(3, 2))
    assert json.loads((tmp_path / "key.json").read_text())
