"""The newest kinds of hostile cases: ONNX files, shards, races for names in folders, and records in MLflow.

`hostile.py` runs them.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import shutil
import tarfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

from hostile_later import answers_writer, cache_writer, model_writer, table_writer
from strange import (
    NASTY,
    Act,
    Case,
    Place,
    called,
    no_file,
    odd_text,
    refused,
    refused_or,
)

COUNTS = ("0", "-1", "99999999999", "7 7", "٣", "1.5")
"""Classes of samples in a shard that are numbers, or nearly."""


def graph_cases(place: Place) -> Case:
    """ONNX files with edited metadata where usfan expects something else (it reads none), and odd names in metadata
    that it writes: each value is text, and each table comes back as it was."""
    import onnx

    import usfan
    from tiny_models import tiny_model
    from usfan.store.onnx import metadata

    nothing = onnx.helper.make_graph([], "g", [], [])
    base = onnx.helper.make_model(nothing)
    model = tiny_model()
    readers = ("model", "pretrained", "data", "labels", "report")

    def commands(file: Path, role: str) -> tuple[object, ...]:
        nowhere = place.root / "nowhere"
        out = place.root / "out"
        return {
            "model": ("predict", file, nowhere, "--out", f"{out}.csv"),
            "pretrained": ("train", nowhere, "--pretrained", file, "--out", out),
            "data": ("adapt", nowhere, file, "--out", out),
            "labels": ("check", nowhere, nowhere, "--labels", file),
            "report": ("report", file),
        }[role]

    def written(names: list[str]) -> str:
        model.classes = tuple(names)
        table = metadata(model)
        is_text = all(isinstance(value, str) for value in table.values())
        is_same = json.loads(table["classes"]) == names
        return "done" if is_text and is_same else "BAD: other metadata"

    def case(rng: random.Random, number: int) -> tuple[str, Act]:
        if rng.random() < 0.3:
            names = rng.sample([*NASTY, "cat", "class 1", str(place.outside / "victim")], 3)
            return "names", lambda: refused_or(lambda: written(names))
        file = place.fresh() / f"graph{rng.choice(('.onnx', '', '.pth', '.safetensors'))}"
        graph = onnx.ModelProto()
        graph.CopyFrom(base)
        for key in rng.choices(("classes", "model_sha256", "usfan_version", *NASTY[:6]), k=4):
            value = rng.choice((*NASTY[:6], "[" * 50_000, str(place.outside / "victim")))
            graph.metadata_props.add(key=key, value=value)
        file.write_bytes(graph.SerializeToString())
        role = rng.choice(readers)
        if role == "data" and rng.random() < 0.5:
            return role, lambda: refused(lambda: usfan.ImageData(file))
        return role, lambda: called(*commands(file, role))

    return case


def shard_cases(place: Place) -> Case:
    """Tar files with names that lead elsewhere, links, devices, odd sizes, odd classes, damaged pictures and headers;
    one shard or a folder of them."""
    from artifact_mutations import cut_or_insert, flip_bits, truncate
    from PIL import Image

    import usfan
    from usfan.data.stream import stream

    buffer = io.BytesIO()
    Image.effect_noise((12, 12), 60).save(buffer, "PNG")
    picture = buffer.getvalue()
    kinds = (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE, b"S", b"x")

    def shard(rng: random.Random) -> bytes:
        content = io.BytesIO()
        form = rng.choice((tarfile.PAX_FORMAT, tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT))
        labels = rng.choice(((), ("cat", "dog"), ("cat", "dog"), (*COUNTS, *NASTY[:5])))
        names = rng.choice(((), ("0000", *NASTY[:5], "../up")))
        with tarfile.open(fileobj=content, mode="w", format=form) as archive:
            for number in range(rng.randrange(1, 12)):
                key = rng.choice((f"{number:04}", f"{number:04}", *names))
                parts = {"png": picture if rng.random() < 0.8 else rng.randbytes(60)}
                if labels and rng.random() < 0.98:
                    parts["cls"] = rng.choice(labels).encode()
                for ending, data in parts.items():
                    info = tarfile.TarInfo(f"{key}.{ending}")
                    info.size = len(data)
                    if rng.random() < 0.05:
                        info.type = rng.choice(kinds)
                        info.linkname = str(place.outside / "victim")
                    if rng.random() < 0.01:
                        info.size = rng.choice((0, 1 << 32))
                    with contextlib.suppress(OSError, ValueError):
                        archive.addfile(info, io.BytesIO(data.ljust(info.size & 0xFFFFF)))
        return content.getvalue()

    def case(rng: random.Random, number: int) -> tuple[str, Act]:
        top = place.fresh() / "shards"
        top.mkdir()
        kind = rng.choice(("odd members", "odd members", "damaged", "no file"))
        for count in range(rng.choice((1, 1, 3))):
            folder = {"x": shard(rng)}
            if kind == "damaged":
                rng.choice((cut_or_insert, flip_bits, truncate))(folder, rng)
            (top / f"{count}.tar").write_bytes(folder["x"])
        if kind == "no file":
            kind = no_file(top / "0.tar", rng, place.outside)
            if kind == "pipe":
                (top / "0.tar").unlink()
        source = rng.choice((top, top / "0.tar"))

        def read() -> None:
            data = usfan.ImageData(source)
            list(stream(data.subset(range(min(len(data), 20))), size=8, workers=0))

        return kind, lambda: refused(read)

    return case


@contextlib.contextmanager
def stranger_in(folder: Path, outside: Path, rng: random.Random) -> Iterator[None]:
    """Somebody else may write to the folder: unfinished files, and others with names of usfan's, become links to the
    outside, as fast as that goes. What lies in a folder that only its owner may open stays, and so does a link that
    the user's own file name may be."""
    over = threading.Event()
    victims = [outside / name for name in ("victim", "config.json", "made")]

    def exchange() -> None:
        while not over.is_set():
            with contextlib.suppress(OSError):
                names = [name for name in os.listdir(folder) if name != "table.csv"]
                parts = [name for name in names if name.endswith((".part", ".new"))]
                for name in parts or rng.sample(names, min(len(names), 1)):
                    path = folder / name
                    is_folder = path.is_dir() and not path.is_symlink()
                    if is_folder:
                        path.rename(folder / f"taken-{rng.randrange(10**9)}")
                    else:
                        path.unlink()
                    path.symlink_to(outside if is_folder else rng.choice(victims))

    thread = threading.Thread(target=exchange)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def race_cases(place: Place) -> Case:
    """Models, tables, caches, labels.csv and runs that are written while a stranger exchanges the names there."""
    from small_runs import TINY, class_folder, train_tiny

    makers = {
        "a model": (model_writer, "model"),
        "a table": (table_writer, ""),
        "a cache": (cache_writer, "cache"),
        "labels.csv": (answers_writer, ""),
    }
    writers = {kind: (write(place), name) for kind, (write, name) in makers.items()}
    base = place.root.parent / "base-race"
    data = class_folder(base / "data", images=2)
    model = train_tiny(data, base / "model")
    run = ("adapt", model, data, "--epochs", 1, "--batch-size", 8, "--guard", "off", *TINY)

    def written(kind: str, disk: Path, rng: random.Random) -> str:
        (_, first, second, _), name = writers[kind]
        first(disk)
        with stranger_in(disk / name, place.outside, rng):
            for _ in range(5):
                try:
                    second(disk)
                except OSError as error:
                    if error.strerror is None:
                        return f"BAD: {error!r}"
        return "done"

    def adapted(disk: Path, rng: random.Random) -> str:
        (disk / "run").mkdir()
        with stranger_in(disk / "run", place.outside, rng):
            return called(*run, "--out", disk / "run")

    def case(rng: random.Random, number: int) -> tuple[str, Act]:
        disk = place.fresh() / "disk"
        disk.mkdir()
        if rng.random() < 0.1:
            return "a run", lambda: adapted(disk, rng)
        kind = rng.choice(list(writers))
        return kind, lambda: refused_or(lambda: written(kind, disk, rng))

    return case


def tracked_cases(place: Place) -> Case:
    """The folder of an MLflow store, changed between an interruption and the run that goes on: the run ends well, with
    or without a record."""
    from small_runs import TINY, class_folder, usfan
    from usfan.store.run_folder import RunFolder

    base = place.root.parent / "base-tracked"
    data = class_folder(base / "data", images=2)
    run = ("train", data, "--backbone", "digits-cnn", "--epochs", 2, "--resume", *TINY)
    command = (*run, "--log", "mlflow", "--out", place.root / "run")
    store = place.root / "store"
    address = {"MLFLOW_TRACKING_URI": store.as_uri(), "MLFLOW_ALLOW_FILE_STORE": "true"}
    whole = RunFolder.save_checkpoint

    def stop(self: RunFolder, *given: object) -> None:
        whole(self, *given)  # type: ignore[arg-type]
        raise KeyboardInterrupt

    place.fresh()
    with (
        mock.patch.object(RunFolder, "save_checkpoint", stop),
        mock.patch.dict(os.environ, address),
    ):
        assert usfan(*command) == 130
    shutil.copytree(place.root, base / "first")

    def act() -> str:
        with mock.patch.dict(os.environ, address):
            outcome = called(*command)
        is_whole = (place.root / "run" / "model.safetensors").is_file()
        return outcome if is_whole else f"BAD: {outcome}, no model"

    def case(rng: random.Random, number: int) -> tuple[str, Act]:
        shutil.copytree(base / "first", place.fresh(), dirs_exist_ok=True)
        file = rng.choice(sorted(path for path in store.rglob("*") if path.is_file()))
        if rng.random() < 0.2:
            file.unlink()
            return "gone", act
        file.write_bytes(odd_text(rng))
        return "odd text", act

    return case


MORE_KINDS: dict[str, Callable[[Place], Case]] = {
    "graphs": graph_cases,
    "shards": shard_cases,
    "races": race_cases,
    "tracked": tracked_cases,
}
MORE_SHARES = {"graphs": 0.02, "shards": 0.04, "races": 0.03, "tracked": 0.003}
