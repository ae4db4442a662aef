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
from hostile_later import LATER_KINDS, LATER_SHARES
from hostile_more import MORE_KINDS, MORE_SHARES
from strange import (
    NASTY,
    RUN_FILES,
    Act,
    Case,
    Place,
    called,
    cpu_time,
    digest,
    hostile_run,
    no_file,
    odd_text,
    odd_value,
    refused,
)

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
    **LATER_SHARES,
    **MORE_SHARES,
}
"""Of the cases, which are more than these in all: the kinds from programs on came later.
Reports and resumed runs take 0.3 s each, the others a few milliseconds."""


def model_cases(place: Place) -> Case:
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


def config_cases(place: Place) -> Case:
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


def report_cases(place: Place) -> Case:
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


def resume_cases(place: Place) -> Case:
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


def folder_cases(place: Place) -> Case:
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


def list_cases(place: Place) -> Case:
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


def settings_cases(place: Place) -> Case:
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


def weight_cases(place: Place) -> Case:
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


def archive_cases(place: Place) -> Case:
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


def image_cases(place: Place) -> Case:
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


def program_cases(place: Place) -> Case:
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


def label_cases(place: Place) -> Case:
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


KINDS: dict[str, Callable[[Place], Case]] = {
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
    **LATER_KINDS,
    **MORE_KINDS,
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
    file = measuring.RESULTS / "reliability-hostile.json"
    # Figures of kinds that are not run stay, and what a run that is stopped has measured.
    figures = json.loads(file.read_text())["kinds"] if file.is_file() else {}
    for what in given.only:
        count = round(given.cases * SHARES[what])
        figures[what] = study(what, -(-count // 16) if what == "images" else count)
        figures[what]["command"] = measuring.command()
        print(what, json.dumps(figures[what])[:1500], flush=True)
        good = all(map(passed, figures.values()))
        total = sum(own["cases"] for own in figures.values())
        measuring.save("hostile", {"cases": total, "passed": good, "kinds": figures})
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
