"""Hostile folders and files of every kind that a command reads, with a watcher on what lies outside.

    python tests/reliability/hostile.py --cases 20000

Each case makes a folder or file as a stranger would (links at fixed names, holes, aliases, odd values, odd names,
things that are no files, archives that unpack to much) and calls what reads it: loading a model, `usfan report`,
`--resume`, the scan of a data folder, lists, `--config`, weights, archives. A case fails if it raises anything but a
`UsfanError`, shows a traceback or a control character, takes over 10 s of CPU time or 1 GiB above the base, or if a
file outside the output folder changes. The cases run in a process of their own; another compares the files outside.
"""

from __future__ import annotations

import argparse
import bz2
import contextlib
import gzip
import hashlib
import io
import json
import os
import random
import shutil
import struct
import subprocess
import sys
import tempfile
import time
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import measuring
from artifact_mutations import ODD, mutated

MOST_SECONDS = 10.0
MOST_MIB = 1024
BOUND_MIB = 400
"""For loading a model of any valid config and predicting two images, besides three times the size of its files: twice
the floor of `artifacts.cost` for two images and their pixels, the draws (2 million, some ten tables of them)."""
BOUND_SECONDS = 6.0
"""CPU time for the same: twice 4·10⁹ multiplications at 2·10⁹ a second, 1 s for the draws, 1 s to check the files. A
network that the files do not hold is sketched, in less time, and not run."""
SHARES = {
    "models": 0.18,
    "configs": 0.10,
    "reports": 0.02,
    "resumed": 0.02,
    "folders": 0.12,
    "lists": 0.16,
    "settings": 0.12,
    "weights": 0.14,
    "archives": 0.12,
    "images": 0.04,
    "programs": 0.15,
    "labels": 0.10,
    "caches": 0.05,
    "mixtures": 0.02,
    "studies": 0.01,
    "disks": 0.01,
}
"""Of the cases, which are more than these in all: the last six kinds came later.
Reports and resumed runs take 0.3 s each, the others a few milliseconds."""
NASTY = (
    "\x1b]0;owned\x07",
    "a\nb",
    "\r",
    "=1+1",
    "\u202e",
    "x" * 5_000,
    "\ud800",
    "../../victim",
    "</script><b>",
    "\0",
)
Act = Callable[[], str]


class Place:
    """Where a case plays: its own folder, and the files outside that must stay as they are."""

    def __init__(self, root: Path) -> None:
        self.root = root / "case"
        self.outside = root / "outside"
        self.outside.mkdir(parents=True, exist_ok=True)
        for name in (
            "victim",
            "epoch-00001.safetensors",
            ".old.part",
            "report.html",
            "config.json",
        ):
            if not (self.outside / name).exists():
                (self.outside / name).write_text(f"mine: {name}\n")

    def fresh(self) -> Path:
        shutil.rmtree(self.root, ignore_errors=True)
        self.root.mkdir(parents=True)
        return self.root


def digest(folder: Path) -> str:
    """Of every name, kind and content."""
    hashed = hashlib.blake2b()
    for path in sorted(folder.rglob("*")):
        status = path.lstat()
        hashed.update(
            f"{path}\0{status.st_mode}\0{status.st_size}\0{status.st_mtime_ns}\0".encode()
        )
        if path.is_file():
            hashed.update(path.read_bytes())
    return hashed.hexdigest()


def clear(path: Path) -> None:
    """Nothing lies at the path; of a link, the link goes."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def no_file(path: Path, rng: random.Random, outside: Path) -> str:
    """Something that is no regular file takes the place."""
    kind = rng.choice(
        ("link", "link", "dangling", "loop", "device", "pipe", "folder", "hole", "up")
    )
    clear(path)
    if kind == "link":
        path.symlink_to(outside / rng.choice(("victim", "config.json", "report.html")))
    elif kind == "dangling":
        path.symlink_to(outside / "made")
    elif kind == "loop":
        path.symlink_to(path.name)
    elif kind == "device":
        path.symlink_to(rng.choice(("/dev/zero", "/dev/full", "/dev/urandom")))
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "up":
        path.symlink_to(outside)
    else:
        with open(path, "wb") as file:
            file.truncate(rng.choice((1 << 20, 1 << 31, 1 << 40)))
    return kind


def odd_value(value: Any, rng: random.Random, depth: int = 0) -> Any:
    """One value somewhere inside becomes a strange one."""
    if isinstance(value, dict) and value and (depth == 0 or rng.random() < 0.7):
        name = rng.choice(list(value))
        changed = dict(value)
        kind = rng.random()
        if kind < 0.15:
            changed.pop(name)
        elif kind < 0.3:
            changed[rng.choice(NASTY[:-3])] = changed.pop(name)
        else:
            changed[name] = odd_value(value[name], rng, depth + 1)
        return changed
    if isinstance(value, list) and value and rng.random() < 0.7:
        at = rng.randrange(len(value))
        return [*value[:at], odd_value(value[at], rng, depth + 1), *value[at + 1 :]]
    return rng.choice((*ODD, *NASTY))


def odd_text(rng: random.Random) -> bytes:
    """Content for a file of text: bombs and noise."""
    depth = rng.choice((50, 2_000, 100_000))
    return rng.choice(
        (
            b"",
            rng.randbytes(rng.randrange(1, 3_000)),
            b"[" * depth,
            b'{"a":' * depth + b"1" + b"}" * depth,
            b"9" * depth,
            b"[" + b"[]," * depth + b"0]",
            b"a: &a [1,2]\nb: [*a, *a]\n",
            b"- " * depth,
            b"? " * depth,
            b"\xff\xfe\x00",
            b"a: !!python/object/apply:os.system [touch /tmp/x]\n",
            b"1:" * (depth // 4),
            b"x: 2001-99-99\n",
            b"\x1b[31m: {a: 1}\n",
            b"\n" * depth,
            json.dumps({rng.choice(NASTY): 1}).encode(),
        )
    )


def called(*arguments: object) -> str:
    """`usfan ARGUMENTS` in this process: what came of it, and whether what it said is fit for a terminal."""
    from small_runs import usfan
    from usfan import progress

    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
        before = progress.console._file
        progress.console._file = said
        try:
            code = usfan(*arguments)
        finally:
            progress.console._file = before
    text = said.getvalue()
    if "Traceback" in text or not text.replace("\n", "").isprintable():
        return f"BAD: said {text[:200]!a}"
    return {0: "done", 2: "refused", 1: "fault in one line"}.get(code, f"BAD: exit code {code}")


def refused(call: Callable[[], Any]) -> str:
    """What came of a call in Python."""
    from usfan.errors import UsfanError, printable

    try:
        call()
    except UsfanError as error:
        line = printable(" ".join(str(error).split()))
        return "refused" if line and len(line) <= 2_000 else f"BAD: message {line[:100]!a}"
    return "done"


def model_cases(place: Place) -> Callable[[random.Random, int], tuple[str, Act]]:
    from fuzz import base_folders, load_and_predict

    bases = base_folders()

    def case(rng: random.Random, number: int) -> tuple[str, Act]:
        target = place.fresh() / "model"
        target.mkdir()
        kind = "as it is"
        folder = dict(rng.choice(bases))
        if rng.random() < 0.4:
            kind, folder = mutated(folder, bases, number)
        for name, content in folder.items():
            (target / name).write_bytes(content)
        chosen = rng.random()
        if chosen < 0.5:
            kind = no_file(target / rng.choice(list(folder)), rng, place.outside)
        elif chosen < 0.9 and kind == "as it is":
            kind = "odd config"
            config = json.loads(folder["config.json"])
            for _ in range(rng.choice((1, 1, 3))):
                config = odd_value(config, rng)
            if (
                isinstance(config, dict)
                and rng.random() < 0.5
                and isinstance(config.get("input"), dict)
            ):
                config["input"] |= {"size": rng.randrange(1, 4097), "resize": 4096}
                config["samples"] = rng.choice((1, 128, 1 << rng.randrange(24)))
            (target / "config.json").write_text(json.dumps(config))
        if rng.random() < 0.05:
            return kind, lambda: called("report", target)
        return kind, lambda: load_and_predict(target)

    return case


def config_cases(place: Place) -> Callable[[random.Random, int], tuple[str, Act]]:
    """Configs that look valid: loading and predicting stay under bounds known beforehand. Most have files that fit;
    one in seven names another of timm's networks, of any width, which is known not to fit only after a sketch of it."""
    import timm
    from fuzz import base_folders, load_and_predict

    bases = base_folders()
    networks = timm.list_models()

    def case(rng: random.Random, number: int) -> tuple[str, Act]:
        target = place.fresh() / "model"
        target.mkdir()
        folder = rng.choice(bases)
        config = json.loads(folder["config.json"])
        size = rng.choice(
            (config["input"]["size"], rng.randrange(1, 300), rng.randrange(1, 4097))
        )
        config["input"] |= {
            "size": size,
            "resize": rng.randrange(size, 4097) if rng.random() < 0.3 else size,
        }
        config["samples"] = rng.choice((1, 128, 1 << rng.randrange(21)))
        config["temperature"] = 10 ** rng.uniform(-3, 3)
        config["posterior"]["prior_precision"] = 10 ** rng.uniform(-30, 30)
        kind = "valid config"
        if number % 7 == 0:
            kind = "valid config, another network"
            name = rng.choice(networks)
            config["architecture"] |= {
                "backbone": name,
                "bottleneck": rng.choice((0, 256, rng.randrange(1 << 16))),
            }
            if rng.random() < 0.3:
                config["architecture"] = {
                    "module": "Network",
                    "head": rng.choice(("fc", "head", "head.fc")),
                    "timm": name,
                }
            config["classes"] = [
                f"class {i}" for i in range(rng.choice((3, 1_000, rng.randrange(2, 50_000))))
            ]
            channels = rng.choice((1, 3, 3))
            size = rng.choice((32, 224, 224, 256, 384, rng.randrange(1, 1025)))
            stats = {"mean": [0.5] * channels, "std": [0.25] * channels}
            config["input"] |= {"channels": channels, "size": size, "resize": size, **stats}
        for name, content in folder.items():
            (target / name).write_bytes(content)
        (target / "config.json").write_text(json.dumps(config))
        bound = BOUND_MIB + 3 * sum(map(len, folder.values())) / 2**20

        def act() -> str:
            measuring.forget_peak()
            before = measuring.status_mib("VmRSS")
            began = cpu_time()
            outcome = load_and_predict(target)
            grown = measuring.status_mib("VmHWM") - before
            took = cpu_time() - began
            if took > BOUND_SECONDS:
                return f"BAD: {took:.1f} s, over the bound of {BOUND_SECONDS:.0f}"
            return (
                outcome
                if grown <= bound
                else f"BAD: {grown:.0f} MiB, over the bound of {bound:.0f}"
            )

        return kind, act

    return case


RUN_FILES = (
    "config.yaml",
    "metrics.json",
    "log.jsonl",
    "samples.json",
    "samples.safetensors",
    "config.json",
)


def hostile_run(target: Path, rng: random.Random, place: Place, names: tuple[str, ...]) -> str:
    import yaml

    name = rng.choice(names)
    file = target / name
    kind = rng.random()
    if kind < 0.35:
        return no_file(file, rng, place.outside)
    if kind < 0.5 or file.is_symlink() or not file.is_file() or file.stat().st_size > 1 << 24:
        clear(file)
        file.write_bytes(odd_text(rng))
        return "odd text"
    if name.endswith(".safetensors"):
        folder = {name: file.read_bytes(), "model.safetensors": file.read_bytes()}
        from artifact_mutations import cut_or_insert, flip_bits

        rng.choice((flip_bits, cut_or_insert))(folder, rng)
        file.write_bytes(folder[name])
        return "odd tensors"
    with contextlib.suppress(
        ValueError, IndexError, yaml.YAMLError, RecursionError
    ):  # changed before
        change_values(file, rng)
    return "odd values"


def change_values(file: Path, rng: random.Random) -> None:
    import yaml

    if file.name == "log.jsonl":
        lines = file.read_text().splitlines()
        at = rng.randrange(len(lines))
        lines[at] = json.dumps(odd_value(json.loads(lines[at]), rng))
        file.write_text("\n".join(lines))
    elif file.suffix == ".yaml":
        file.write_text(
            yaml.safe_dump(odd_value(yaml.safe_load(file.read_text()), rng), allow_unicode=True)
        )
    else:
        file.write_text(json.dumps(odd_value(json.loads(file.read_text()), rng)))


def report_cases(place: Place) -> Callable[[random.Random, int], tuple[str, Act]]:
    from small_runs import adapt_tiny, class_folder, train_tiny

    base = place.root.parent / "base"
    source = train_tiny(class_folder(base / "source", images=4), base / "model")
    run = adapt_tiny(source, class_folder(base / "target", images=4, domain=3), base / "run")

    def case(rng: random.Random, number: int) -> tuple[str, Act]:
        target = Path(shutil.copytree(run, place.fresh() / "run"))
        kinds = [
            hostile_run(target, rng, place, (*RUN_FILES, "report.html"))
            for _ in range(rng.choice((1, 1, 2)))
        ]
        more = ("--root", place.root) if rng.random() < 0.2 else ()
        return " + ".join(sorted(kinds)), lambda: called("report", target, *more)

    return case


def resume_cases(place: Place) -> Callable[[random.Random, int], tuple[str, Act]]:
    """A run that was interrupted after its first epoch; a stranger's changes; and then --resume."""
    from small_runs import TINY, class_folder, train_tiny, usfan
    from usfan.store.run_folder import RunFolder

    base = place.root.parent / "base-resume"
    data = class_folder(base / "source", images=4)
    model = train_tiny(data, base / "model")
    rest = ("--epochs", 2, "--batch-size", 8, "--resume", *TINY)
    commands = {
        "train": ("train", data, "--backbone", "digits-cnn", *rest),
        "adapt": ("adapt", model, data, *rest),
    }
    whole = RunFolder.save_checkpoint

    def stop(self: RunFolder, *given: Any) -> None:
        whole(self, *given)
        raise KeyboardInterrupt

    for name, command in commands.items():
        RunFolder.save_checkpoint = stop  # type: ignore[method-assign]
        assert usfan(*command, "--out", base / name) == 130
    RunFolder.save_checkpoint = whole  # type: ignore[method-assign]

    def case(rng: random.Random, number: int) -> tuple[str, Act]:
        name = rng.choice(list(commands))
        target = Path(shutil.copytree(base / name, place.fresh() / "run"))
        inside = f"checkpoint/{os.listdir(target / 'checkpoint')[0]}"
        names = (
            "config.yaml",
            "log.jsonl",
            ".lock",
            "checkpoint",
            inside,
            inside,
            "metrics.json",
            "model.safetensors",
        )
        kind = (
            odd_checkpoint(target / inside, rng)
            if rng.random() < 0.3
            else hostile_run(target, rng, place, names)
        )
        return kind, lambda: called(*commands[name], "--out", target)

    return case


def odd_checkpoint(file: Path, rng: random.Random) -> str:
    """A whole file with other content: a state that lacks something, tensors that lack or have other shapes."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    with safe_open(file, "pt") as opened:
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        state = json.loads(opened.metadata()["state"])
    kind = rng.choice(("state", "missing tensor", "odd tensor"))
    name = rng.choice(list(tensors))
    if kind == "state":
        state = odd_value(state, rng)
    elif kind == "missing tensor":
        del tensors[name]
    else:
        tensors[name] = (
            tensors[name]
            .flatten()[:1]
            .clone()
            .to(rng.choice((tensors[name].dtype, tensors[name].dtype)))
        )
    with contextlib.suppress(ValueError, TypeError):
        save_file(tensors, file, {"state": json.dumps(state)})
    return f"checkpoint: {kind}"


def folder_cases(place: Place) -> Callable[[random.Random, int], tuple[str, Act]]:
    """Data folders: links that double, loops, deep folders, odd names, things that are no files."""
    from PIL import Image

    import usfan

    buffer = io.BytesIO()
    Image.new("L", (8, 8), 90).save(buffer, "PNG")
    picture = buffer.getvalue()

    def case(rng: random.Random, number: int) -> tuple[str, Act]:
        top = place.fresh() / "data"
        top.mkdir()
        folders = [os.fsencode(top)]
        for _ in range(rng.randrange(1, 12)):
            inside = rng.choice(folders)
            name = rng.choice(
                (
                    b"cat",
                    b"dog",
                    b"\xff\xfe",
                    "\u202e".encode(),
                    b"a\nb",
                    b"\x1b[31m",
                    b"=1+1",
                    b"x" * 200,
                )
            )
            path = os.path.join(inside, name)
            kind = rng.random()
            with contextlib.suppress(OSError):
                if kind < 0.4:
                    os.mkdir(path)
                    folders.append(path)
                elif kind < 0.55:
                    os.symlink(
                        rng.choice((*folders, path, b"/etc", os.fsencode(place.outside))), path
                    )
                elif kind < 0.65:
                    os.mkfifo(path + b".png")
                elif kind < 0.7:
                    os.symlink(b"/dev/zero", path + b".jpg")
                elif not os.path.lexists(path + b".png"):
                    with open(path + b".png", "wb") as file:
                        file.write(picture if rng.random() < 0.7 else rng.randbytes(50))
        root = rng.choice((None, top))

        def act() -> str:
            from usfan.data.stream import stream

            def read() -> None:
                data = usfan.ImageData(top, root=root)
                list(stream(data.subset(range(min(len(data), 20))), size=8, workers=0))

            return refused(read)

        return "data folder", act

    return case


def list_cases(place: Place) -> Callable[[random.Random, int], tuple[str, Act]]:
    import usfan

    def case(rng: random.Random, number: int) -> tuple[str, Act]:
        file = place.fresh() / "list.txt"
        words = [
            "a.png",
            "cat",
            "0",
            "-1",
            "99999999999",
            "../victim",
            "/etc/passwd",
            str(place.outside / "victim"),
        ]
        lines = [
            " ".join(rng.choice((*words, *NASTY[:-4])) for _ in range(rng.randrange(4)))
            for _ in range(rng.randrange(20))
        ]
        kind = "list"
        if rng.random() < 0.3:
            kind = no_file(file, rng, place.outside)
        elif rng.random() < 0.3:
            file.write_bytes(odd_text(rng))
        else:
            file.write_text("\n".join(lines), errors="replace")
        if kind == "pipe":  # the user's own choice to read from one: it waits for its writer
            file.unlink()
        return kind, lambda: refused(lambda: usfan.ImageData(file))

    return case


def settings_cases(place: Place) -> Callable[[random.Random, int], tuple[str, Act]]:
    import dataclasses

    import yaml

    from usfan.config import AdaptConfig, TrainConfig

    known = {
        c: [f.name for f in dataclasses.fields(k)]
        for c, k in (("train", TrainConfig), ("adapt", AdaptConfig))
    }

    def case(rng: random.Random, number: int) -> tuple[str, Act]:
        file = place.fresh() / "settings.yaml"
        command = rng.choice(("train", "adapt", "predict", "report"))
        kind = "settings"
        if rng.random() < 0.25:
            kind = no_file(file, rng, place.outside)
            if kind == "pipe":
                file.unlink()
        elif rng.random() < 0.3:
            file.write_bytes(odd_text(rng))
        else:
            names = [
                *known.get(command, ["out"]),
                *NASTY[:-3],
                "out",
                "data",
                "root",
                "budget",
                "seed",
            ]
            values = {
                rng.choice(names): rng.choice((*ODD, *NASTY, 1, "on", 0.5))
                for _ in range(rng.randrange(1, 5))
            }
            with contextlib.suppress(yaml.YAMLError, UnicodeEncodeError, ValueError):
                file.write_text(yaml.safe_dump(values, allow_unicode=True))
        nowhere = place.root / "nowhere"
        given = {
            "train": (nowhere,),
            "adapt": (nowhere, nowhere),
            "predict": (nowhere, nowhere),
            "report": (nowhere,),
        }
        out = () if rng.random() < 0.3 else ("--out", place.root / "out")
        return kind, lambda: called(command, *given[command], *out, "--config", file)

    return case


def weight_cases(place: Place) -> Callable[[random.Random, int], tuple[str, Act]]:
    import torch
    from artifact_mutations import cut_or_insert, flip_bits, truncate

    from usfan.models.backbones import create_backbone, load_weights

    network = create_backbone("lenet", "none").module
    content = io.BytesIO()
    torch.save(network.state_dict(), content)
    old = io.BytesIO()
    torch.save(network.state_dict(), old, _use_new_zipfile_serialization=False)

    def packed(rng: random.Random) -> bytes:
        """The same names, deflated, with entries that unpack to much."""
        new = io.BytesIO()
        with (
            zipfile.ZipFile(io.BytesIO(content.getvalue())) as before,
            zipfile.ZipFile(new, "w", zipfile.ZIP_DEFLATED) as after,
        ):
            for name in before.namelist():
                after.writestr(
                    name,
                    before.read(name)
                    if rng.random() < 0.8
                    else bytes(rng.choice((10, 1 << 22))),
                )
        return new.getvalue()

    def case(rng: random.Random, number: int) -> tuple[str, Act]:
        suffix = rng.choice((".pth", ".pth", ".safetensors"))
        file = place.fresh() / f"weights{suffix}"
        kind = rng.choice(
            ("flipped", "cut", "truncated", "packed", "no file", "noise", "pickle")
        )
        folder = {"x": rng.choice((content, old)).getvalue()}
        if kind in ("flipped", "cut", "truncated"):
            {"flipped": flip_bits, "cut": cut_or_insert, "truncated": truncate}[kind](
                folder, rng
            )
        elif kind == "packed":
            folder["x"] = packed(rng)
        elif kind == "noise":
            folder["x"] = odd_text(rng)
        elif kind == "pickle":
            folder["x"] = b"\x80\x02cos\nsystem\nX\x06\x00\x00\x00touch xq\x00\x85q\x01Rq\x02."
        if kind == "no file":
            kind = no_file(file, rng, place.outside)
            if kind == "pipe":
                file.unlink()
        else:
            file.write_bytes(folder["x"])
        return kind, lambda: refused(lambda: load_weights(network, file))

    return case


def archive_cases(place: Place) -> Callable[[random.Random, int], tuple[str, Act]]:
    import numpy as np
    from artifact_mutations import cut_or_insert, flip_bits, truncate

    from usfan.data.benchmarks.archives import read_images

    arrays = io.BytesIO()
    np.savez_compressed(
        arrays, x_train=np.zeros((4, 8, 8), np.uint8), y_train=np.zeros(4, np.uint8)
    )
    idx = gzip.compress(struct.pack(">HBB3I", 0, 8, 3, 4, 8, 8) + bytes(256))
    names = gzip.compress(struct.pack(">HBBI", 0, 8, 1, 4) + bytes(4))
    lines = bz2.compress(
        b"".join(
            b"1 " + b" ".join(b"%d:0.5" % (i + 1) for i in range(256)) + b"\n" for _ in range(4)
        )
    )
    part = zlib.compress(bytes(4_000))
    mat = (
        b"MATLAB 5.0 MAT-file".ljust(124) + b"\0\1IM" + struct.pack("<II", 15, len(part)) + part
    )
    bases = {
        "x.npz": arrays.getvalue(),
        "train-images-idx3-ubyte.gz": idx,
        "usps.bz2": lines,
        "train_32x32.mat": mat,
    }

    def case(rng: random.Random, number: int) -> tuple[str, Act]:
        name = rng.choice(list(bases))
        folder = {name: bases[name]}
        kind = rng.choice(("flipped", "cut", "truncated", "bomb", "as it is", "sizes"))
        if kind in ("flipped", "cut", "truncated"):
            {"flipped": flip_bits, "cut": cut_or_insert, "truncated": truncate}[kind](
                folder, rng
            )
        elif kind == "bomb":
            size = rng.choice((1 << 20, 1 << 23))
            filled = rng.choice((b"\0", b"\n", b"1", b"1 1:1\n")) * size
            made = {".gz": gzip.compress, ".bz2": bz2.compress}.get(Path(name).suffix)
            folder[name] = (
                made(filled[:size])
                if made
                else rng.randbytes(128) + struct.pack("<II", 15, 999) + zlib.compress(filled)
            )
        elif kind == "sizes":
            shape = [rng.choice((0, 1, 2**31, 2**32 - 1)) for _ in range(3)]
            folder[name] = gzip.compress(
                struct.pack(">HBB3I", 0, 8, rng.choice((3, 200)), *shape) + bytes(10)
            )
        target = place.fresh()
        (target / "train-labels-idx1-ubyte.gz").write_bytes(names)
        (target / name).write_bytes(folder[name])
        return kind, lambda: refused(lambda: read_images(target / name, "train"))

    return case


def image_cases(place: Place) -> Callable[[random.Random, int], tuple[str, Act]]:
    """Damaged files, and those that make a decoder work: scans, comments, long headers. By the decoding process."""
    from image_mutations import base_images, mutated_image
    from PIL import Image

    from usfan.data.decoding.pool import decode_in_processes

    contents = base_images()
    buffer = io.BytesIO()
    Image.effect_noise((400, 400), 40).save(buffer, "JPEG", progressive=True)
    jpeg = buffer.getvalue()

    def stalling(rng: random.Random) -> bytes:
        last = jpeg.rindex(b"\xff\xda")
        many = rng.choice((10, 100, 300, 2_000))
        size = b"%d %d" % (rng.choice((8, 3000)), rng.choice((8, 3000)))
        return rng.choice(
            (
                jpeg[:last] + jpeg[last : last + 20] * many + b"\xff\xd9",
                b"P3 " + size + b" 255\n" + b"# x\n" * (many * 100) + b"1 " * 3000,
                b"P6 #" + b"x" * (many * 1000) + b"\n8 8 255\n" + bytes(192),
                b"P6 " + size + b" 65535\n" + bytes(3000 * 600),
                b"GIF89a\x08\x00\x08\x00\x00\x00\x00!\xfe"
                + (b"\xff" + b"x" * 255) * many
                + b"\x00",
                b"P2 " + size + b" 255\n" + b"9" * (many * 1000),
            )
        )

    def case(rng: random.Random, number: int) -> tuple[str, Act]:
        top = place.fresh()
        paths = []
        kinds = Counter()
        for i in range(16):  # a process takes as many at once
            kind, content = (
                ("stalling", stalling(rng))
                if rng.random() < 0.4
                else mutated_image(contents, number * 16 + i)
            )
            (top / f"{i}.bin").write_bytes(content)
            paths.append(str(top / f"{i}.bin"))
            kinds[kind] += 1

        def act() -> str:
            for answer in decode_in_processes(paths, size=16, channels=3, workers=1):
                is_reason = isinstance(answer, str)
                if is_reason and (not answer.isprintable() or len(answer) > 300):
                    return f"BAD: reason {answer[:100]!a}"
            return "decoded or skipped"

        return "16 images", act

    return case


def program_cases(place: Place) -> Callable[[random.Random, int], tuple[str, Act]]:
    """Files of torch.save whose program is changed: steps repeated, exchanged, taken from others."""
    import torch

    from usfan.models.torch_file import read_torch_file

    state = {"a": torch.zeros(3, 2), "b": torch.ones(4).half(), "n": torch.tensor(1)}
    forms = []
    for options in ({}, {"_use_new_zipfile_serialization": False}, {"pickle_protocol": 4}):
        content = io.BytesIO()
        torch.save({"state_dict": state, "x": [1, (2, 3)]}, content, **options)
        forms.append(content.getvalue())
    steps = [
        bytes([code])
        for code in b"()]}NKMJXcqhrj\x85\x86\x87\x88\x8a\x8c\x93\x94QRbsuaet.G0122"
    ]
    steps += [
        b"h\x00h\x00\x86q\x00",
        b"X\xff\xff\xff\x7f",
        b"\x8a\xff",
        b"cos\nsystem\n",
        b"ctorch\nSize\n",
    ]

    def changed(program: bytes, rng: random.Random) -> bytes:
        for _ in range(rng.choice((1, 1, 2, 5))):
            at = rng.randrange(len(program))
            piece = rng.choice(steps) * rng.choice((1, 1, 1, 60, 5_000))
            if rng.random() < 0.3:
                start = rng.randrange(len(program))
                piece = program[start : start + rng.randrange(1, 40)]
            program = program[:at] + piece + program[at + rng.choice((0, 0, 1, 9)) :]
        return program

    def case(rng: random.Random, number: int) -> tuple[str, Act]:
        file = place.fresh() / "weights.pth"
        content = rng.choice(forms)
        if content[:2] == b"PK":
            new = io.BytesIO()
            with (
                zipfile.ZipFile(io.BytesIO(content)) as old,
                zipfile.ZipFile(new, "w") as zipped,
            ):
                for name in old.namelist():
                    part = old.read(name)
                    zipped.writestr(name, changed(part, rng) if name.endswith("pkl") else part)
            content = new.getvalue()
        else:
            content = changed(content, rng)
        file.write_bytes(content)
        return "program", lambda: refused(lambda: read_torch_file(file))

    return case


def label_cases(place: Place) -> Callable[[random.Random, int], tuple[str, Act]]:
    """labels.csv and label_first.csv, and labels in Python, for images in memory and in files."""
    import torch

    import usfan
    from small_runs import class_folder
    from usfan.data.few_labels import few_labels
    from usfan.labelling.answers import read_answers

    base = class_folder(place.root.parent / "base-labels", images=2)
    sources = [usfan.ImageData(torch.zeros(6, 8, 8, dtype=torch.uint8)), usfan.ImageData(base)]
    names = [
        str(base / "class-0" / "000.png"),
        "class-1/001.png",
        "0",
        "5",
        "²",
        "9" * 5000,
        "1.7",
    ]
    odd = [
        *NASTY[:-4],
        "none of these",
        "skip",
        "class-0",
        "class-1",
        "name",
        "judge",
        "",
        "-1",
    ]
    keys = [*names, 1.7, float("inf"), float("nan"), True, None, b"x", 10**30, (), base]

    def case(rng: random.Random, number: int) -> tuple[str, Act]:
        data = rng.choice(sources)
        classes = ("class-0", "class-1", "class-2")
        if rng.random() < 0.3:
            labels = {rng.choice(keys): rng.choice(odd) for _ in range(rng.randrange(4))}
            return "mapping", lambda: refused(lambda: few_labels(labels, data, classes))
        file = place.fresh() / rng.choice(("labels.csv", "label_first.csv"))
        head = rng.choice(
            ("path,label,question", "path,label", "question,label,path", "label", "")
        )
        lines = [
            ",".join(rng.choice((*names, *odd)) for _ in range(rng.randrange(5)))
            for _ in range(rng.randrange(8))
        ]
        file.write_text("\n".join([head, *lines]), errors="replace")
        kind = "table"
        if rng.random() < 0.2:
            file.write_bytes(odd_text(rng))
        elif rng.random() < 0.2:
            kind = no_file(file, rng, place.outside)
            if kind == "pipe":
                file.unlink()
        if rng.random() < 0.3:
            return kind, lambda: refused(lambda: read_answers(file))
        return kind, lambda: refused(lambda: few_labels(file, data, classes))

    return case


def cache_cases(place: Place) -> Callable[[random.Random, int], tuple[str, Act]]:
    """Files of a cache that are links, damaged, of another size, or change while they are read."""
    import threading

    import torch
    from artifact_mutations import cut_or_insert, flip_bits, truncate

    from usfan.data.row_cache import RowCache

    rows = torch.arange(600.0).view(150, 4)

    def case(rng: random.Random, number: int) -> tuple[str, Act]:
        folder = place.fresh() / "cache"
        cache = RowCache(folder, "key", 150, (4,), torch.float32)
        read = lambda: cache.read_or_build(torch.device("cpu"), lambda _: rows.split(64))  # noqa: E731
        read()
        name = rng.choice(("key.rows", "key.json", "key.lock"))
        kind = rng.choice(("no file", "flipped", "cut", "truncated", "race"))
        content = {"x": (folder / name).read_bytes() or b" "}
        if kind == "no file":
            kind = no_file(folder / name, rng, place.outside)
        elif kind in ("flipped", "cut", "truncated"):
            {"flipped": flip_bits, "cut": cut_or_insert, "truncated": truncate}[kind](
                content, rng
            )
            (folder / name).write_bytes(content["x"])

        def exchange() -> None:
            for _ in range(20):
                with contextlib.suppress(OSError):
                    clear(folder / "key.rows")
                    (folder / "key.rows").symlink_to(place.outside / "victim")

        def act() -> str:
            thread = threading.Thread(target=exchange)
            if kind == "race":
                thread.start()
            try:
                table, _ = read()
            except OSError as error:
                return "fault in one line" if error.strerror else f"BAD: {error!r}"
            finally:
                if kind == "race":
                    thread.join()
            return "done" if torch.equal(table, rows) else "BAD: other rows"

        return kind, lambda: refused_or(act)

    return case


def refused_or(act: Act) -> str:
    from usfan.errors import UsfanError

    try:
        return act()
    except UsfanError:
        return "refused"


def mixture_cases(place: Place) -> Callable[[random.Random, int], tuple[str, Act]]:
    """Folders of several models: odd shares, members that are links, mixtures, missing, of others."""
    from fuzz import load_and_predict

    from tiny_models import tiny_model
    from usfan.store.model import MixtureModel

    base = place.root.parent / "base-mixture"
    MixtureModel.of([tiny_model(), tiny_model(seed=1)], [0.4, 0.6]).save(base)
    names = (
        "config.json",
        "member-1",
        "member-2",
        "member-1/config.json",
        "member-2/model.safetensors",
        ".files.new",
    )

    def case(rng: random.Random, number: int) -> tuple[str, Act]:
        target = Path(shutil.copytree(base, place.fresh() / "model"))
        name = rng.choice(names)
        chosen = rng.random()
        if chosen < 0.4:
            kind = no_file(target / name, rng, place.outside)
        elif chosen < 0.5:
            kind = "a mixture in a mixture"
            clear(target / "member-1")
            shutil.copytree(base, target / "member-1")
        elif chosen < 0.6:
            kind = "newer files"
            shutil.copytree(
                base / "member-2", target / ".files.new" / rng.choice(("", "member-1", "a/b/c"))
            )
        else:
            kind = "odd config"
            file = target / rng.choice(("config.json", "config.json", "member-1/config.json"))
            file.write_text(json.dumps(odd_value(json.loads(file.read_text()), rng)))
        return kind, lambda: load_and_predict(target)

    return case


def study_cases(place: Place) -> Callable[[random.Random, int], tuple[str, Act]]:
    """The folder of a stranger's study: its cells, tables and settings; `study` continues it, `report` shows it."""
    from small_runs import TINY, class_folder

    base = place.root.parent / "base-study"
    data = base / "data"
    for number, name in enumerate(("a", "b")):
        class_folder(data / name, images=2, domain=number)
    settings = (
        "--backbone",
        "digits-cnn",
        "--methods",
        "source-only",
        "--seeds",
        0,
        "--source-epochs",
        1,
    )
    command = ("study", data, *settings, "--batch-size", 4, *TINY)
    assert called(*command, "--out", base / "study") == "done"
    files = [path.relative_to(base / "study") for path in (base / "study").rglob("*.json")]
    files += [Path(name) for name in ("config.yaml", "log.jsonl", "cells", "models")]
    files += [
        path.relative_to(base / "study") for path in (base / "study").rglob("*.safetensors")
    ]

    def case(rng: random.Random, number: int) -> tuple[str, Act]:
        target = Path(shutil.copytree(base / "study", place.fresh() / "study"))
        kind = hostile_run(target, rng, place, tuple(map(str, files)))
        if rng.random() < 0.5:
            return kind, lambda: called("report", target)
        return kind, lambda: called(*command, "--out", target)

    return case


def disk_cases(place: Place) -> Callable[[random.Random, int], tuple[str, Act]]:
    """A model is saved over another on a disk (tmpfs) that is full or read-only: the other stays whole. Needs root."""
    from tiny_models import tiny_model
    from usfan.store.model import SourceModel

    old = tiny_model()
    new = tiny_model(seed=1)
    new.temperature = 0.7
    if os.geteuid() != 0:
        return lambda rng, number: ("no root", lambda: "not tried")

    def case(rng: random.Random, number: int) -> tuple[str, Act]:
        disk = place.fresh() / "disk"
        disk.mkdir()
        kind = rng.choice(("full", "full", "read-only"))

        def act() -> str:
            size = rng.randrange(140, 400)
            if subprocess.run(
                ["mount", "-t", "tmpfs", "-o", f"size={size}k", "tmpfs", disk], check=False
            ).returncode:
                return "not tried"
            try:
                try:
                    old.save(disk / "model")
                except OSError:
                    return "no room for the first"
                if kind == "read-only":
                    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
                outcome = "done"
                try:
                    new.save(disk / "model")
                except OSError as error:
                    outcome = (
                        "fault in one line"
                        if str(disk) in str(error.filename)
                        else f"BAD: {error!r}"
                    )
                model = SourceModel.load(disk / "model")
                whole = model.temperature == (0.7 if outcome == "done" else 0.4)
                return outcome if whole else "BAD: another model"
            finally:
                subprocess.run(["umount", "-l", disk], check=True)

        return kind, act

    return case


KINDS: dict[str, Callable[[Place], Callable[[random.Random, int], tuple[str, Act]]]] = {
    "models": model_cases,
    "configs": config_cases,
    "reports": report_cases,
    "resumed": resume_cases,
    "folders": folder_cases,
    "lists": list_cases,
    "settings": settings_cases,
    "weights": weight_cases,
    "archives": archive_cases,
    "images": image_cases,
    "programs": program_cases,
    "labels": label_cases,
    "caches": cache_cases,
    "mixtures": mixture_cases,
    "studies": study_cases,
    "disks": disk_cases,
}


def work(what: str, start: int, stop: int, root: Path, out: Path) -> None:
    """The process of the cases: one line of JSON for each, before the next begins."""
    import faulthandler

    import torch

    torch.set_num_threads(1)
    place = Place(root)
    with contextlib.redirect_stderr(io.StringIO()):
        case = KINDS[what](place)
    warm(place)
    base = measuring.status_mib("VmRSS")
    with open(out, "a", encoding="utf-8") as lines:
        for number in range(start, stop):
            faulthandler.dump_traceback_later(300, exit=True)  # other work may hold the cores
            kind, act = case(random.Random(f"{what} {number}"), number)
            with contextlib.suppress(OSError):
                measuring.forget_peak()
            began = time.perf_counter()
            worked = cpu_time()
            try:
                outcome = act()
            except BaseException as error:
                outcome = f"BAD: {type(error).__name__}: {str(error)[:200]!a}"
            seconds = [round(cpu_time() - worked, 3), round(time.perf_counter() - began, 3)]
            grown = round(measuring.status_mib("VmHWM") - base, 1)
            lines.write(json.dumps([number, kind, outcome, grown, *seconds]) + "\n")
            lines.flush()
        faulthandler.cancel_dump_traceback_later()


def warm(place: Place) -> None:
    """A good model first: some imports wait for it."""
    import torch

    from tiny_models import tiny_model
    from usfan.store.model import SourceModel

    SourceModel.load(tiny_model().save(place.fresh() / "model")).predict(
        torch.zeros(1, 28, 28, dtype=torch.uint8)
    )


def cpu_time() -> float:
    """Of this process and of the decoding processes that ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def run_cases(what: str, count: int, chunk: int = 2500) -> Iterator[list[Any]]:
    """All cases, over as many processes as it takes. After each, the files outside are compared by this process."""
    with tempfile.TemporaryDirectory() as root:
        place = Place(Path(root) / "work")
        before = digest(place.outside)
        done = 0
        while done < count:
            out = Path(root) / f"{done}.jsonl"
            stop = min(count, done + chunk)
            command = [
                sys.executable,
                __file__,
                "--work",
                what,
                str(done),
                str(stop),
                str(place.root.parent),
                str(out),
            ]
            shutil.rmtree(place.root.parent, ignore_errors=True)
            place = Place(place.root.parent)
            before = digest(place.outside)
            ended = subprocess.run(command, check=False, capture_output=True, text=True)
            lines = (
                [json.loads(line) for line in out.read_text().splitlines()]
                if out.is_file()
                else []
            )
            yield from lines
            done += len(lines)
            if digest(place.outside) != before:
                yield [done, "?", "BAD: a file outside was changed", 0.0, 0.0, 0.0]
            if ended.returncode != 0:
                yield [
                    done,
                    "?",
                    f"BAD: the process ended: {ended.stderr[-300:]!a}",
                    0.0,
                    0.0,
                    0.0,
                ]
                done += 1


def study(what: str, count: int) -> dict[str, Any]:
    began = time.perf_counter()
    rows = list(run_cases(what, count))
    bad = [row for row in rows if row[2].startswith("BAD")]
    costly = [row for row in rows if row[4] > MOST_SECONDS or row[3] > MOST_MIB]
    return {
        "cases": len(rows) * (16 if what == "images" else 1),
        "failures": len(bad),
        "over_10_seconds_or_1_gib": len(costly),
        "slowest_cpu_seconds": max(row[4] for row in rows),
        "slowest_wall_seconds": max(row[5] for row in rows),
        "most_mib_above_base": max(row[3] for row in rows),
        "outcomes": dict(Counter(row[2] for row in rows if row not in bad)),
        "kinds": dict(Counter(row[1] for row in rows).most_common(12)),
        "examples_of_failures": [*bad[:10], *costly[:10]],
        "seconds": round(time.perf_counter() - began, 1),
    }


def passed(figures: dict[str, Any]) -> bool:
    return not figures["failures"] and not figures["over_10_seconds_or_1_gib"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=20_000)
    parser.add_argument("--only", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument(
        "--work",
        nargs=5,
        metavar=("WHAT", "START", "STOP", "ROOT", "OUT"),
        help=argparse.SUPPRESS,
    )
    given = parser.parse_args()
    if given.work:
        what, start, stop, root, out = given.work
        work(what, int(start), int(stop), Path(root), Path(out))
        return 0
    figures = {}
    for what in given.only:
        count = round(given.cases * SHARES[what])
        figures[what] = study(what, -(-count // 16) if what == "images" else count)
        print(what, json.dumps(figures[what])[:1500], flush=True)
    file = measuring.RESULTS / "reliability-hostile.json"
    before = (
        json.loads(file.read_text())["kinds"]
        if file.is_file() and len(given.only) < len(KINDS)
        else {}
    )
    figures = before | figures  # of kinds that were not run again, the figures stay
    good = all(map(passed, figures.values()))
    total = sum(own["cases"] for own in figures.values())
    measuring.save("hostile", {"cases": total, "passed": good, "kinds": figures})
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
