"""Kinds of hostile cases that came later: caches, mixtures, studies, disks and clocks; then what newer commands read.

`hostile.py` runs them.
"""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import json
import os
import random
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from strange import (
    NASTY,
    Act,
    Case,
    Place,
    called,
    clear,
    hostile_run,
    no_file,
    odd_text,
    odd_value,
    refused,
    refused_or,
)

MOMENTS = (-(2**31), 0, 1, 10**9, 2**31, 2**32 + 5, 4 * 10**9)
"""Times of files in seconds: from 1901 to 2106."""


def cache_cases(place: Place) -> Case:
    """Files of a cache that are links, damaged, of another size, or change while they are read."""
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
                    clear(folder / name)
                    (folder / name).symlink_to(place.outside / "victim")

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


def mixture_cases(place: Place) -> Case:
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


def study_cases(place: Place) -> Case:
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


def disk_cases(place: Place) -> Case:
    """What a command writes goes to a disk (tmpfs) that is full or read-only: what was there stays. Needs root."""
    writers = [
        write(place) for write in (model_writer, table_writer, cache_writer, answers_writer)
    ]

    def case(rng: random.Random, number: int) -> tuple[str, Act]:
        disk = place.fresh() / "disk"
        disk.mkdir()
        least, first, second, whole = rng.choice(writers)
        is_full = rng.random() < 0.6
        size = least + rng.randrange(least)

        def act() -> str:
            if not mount_small(disk, size):
                return "not tried"
            try:
                try:
                    first(disk)
                except OSError:
                    return "no room for the first"
                if not is_full:
                    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
                outcome = "done"
                try:
                    second(disk)
                except OSError as error:
                    is_named = str(disk) in str(error.filename)
                    outcome = "fault in one line" if is_named else f"BAD: {error!r}"
                return outcome if whole(disk, outcome == "done") else "BAD: other content"
            finally:
                subprocess.run(["umount", "-l", disk], check=True)

        return "full" if is_full else "read-only", act

    return case


Writer = tuple[
    int, Callable[[Path], object], Callable[[Path], object], Callable[[Path, bool], bool]
]
"""KiB that the first content takes, the first writing, the second, and whether the folder holds what it should: the
second content if that was written (True), else the first."""


def mount_small(disk: Path, kib: int) -> bool:
    """Whether a tmpfs of this size lies at the folder now."""
    command = ["mount", "-t", "tmpfs", "-o", f"size={kib}k", "tmpfs", disk]
    return os.geteuid() == 0 and subprocess.run(command, check=False).returncode == 0


def model_writer(place: Place) -> Writer:
    from tiny_models import tiny_model
    from usfan.store.model import SourceModel

    old = tiny_model()
    new = tiny_model(seed=1)
    new.temperature = 0.7

    def whole(disk: Path, is_new: bool) -> bool:
        return SourceModel.load(disk / "model").temperature == (
            0.7 if is_new else old.temperature
        )

    return (
        140,
        lambda disk: old.save(disk / "model"),
        lambda disk: new.save(disk / "model"),
        whole,
    )


def table_writer(place: Place) -> Writer:
    """A table of predictions over another."""
    import torch

    import usfan
    from tiny_models import tiny_model
    from usfan.metrics.predictions import write_predictions

    model = tiny_model()
    images = usfan.ImageData(torch.zeros(400, 28, 28, dtype=torch.uint8))
    old = "path,label\n" * 1000

    def first(disk: Path) -> None:
        (disk / "table.csv").write_text(old)

    def second(disk: Path) -> None:
        write_predictions(disk / "table.csv", model, images)

    def whole(disk: Path, is_new: bool) -> bool:
        text = (disk / "table.csv").read_text()
        return text.count("\n") == 401 if is_new else text == old

    return 60, first, second, whole


def cache_writer(place: Place) -> Writer:
    """A second file in a folder of cached rows."""
    import torch

    from usfan.data.row_cache import RowCache

    rows = torch.arange(64.0 * 512).view(64, 512)

    def write(disk: Path, key: str) -> None:
        cache = RowCache(disk / "cache", key, 64, (512,), torch.float32)
        cache.read_or_build(torch.device("cpu"), lambda _: [rows])

    def whole(disk: Path, is_new: bool) -> bool:
        cpu = torch.device("cpu")
        keys = ["one", "two"] if is_new else ["one"]
        found = [
            RowCache(disk / "cache", key, 64, (512,), torch.float32).read(cpu) for key in keys
        ]
        return all(table is not None and torch.equal(table, rows) for table in found)

    return 160, lambda disk: write(disk, "one"), lambda disk: write(disk, "two"), whole


def answers_writer(place: Place) -> Writer:
    """One more answer in labels.csv."""
    from usfan.labelling.answers import Answer, read_answers, write_answers

    old = [Answer(f"folder/{number:05}.png", "a class") for number in range(2000)]
    new = [*old, Answer("folder/last.png", "a class")]

    def whole(disk: Path, is_new: bool) -> bool:
        return read_answers(disk / "labels.csv") == (new if is_new else old)

    def write(disk: Path, answers: list[Answer]) -> None:
        write_answers(disk / "labels.csv", answers)

    return 80, lambda disk: write(disk, old), lambda disk: write(disk, new), whole


@contextlib.contextmanager
def jumping_clock(rng: random.Random) -> Iterator[None]:
    """The time of day leaps by up to 20 years, forwards and back, whenever somebody looks."""
    now = time.time()

    def look() -> float:
        return now + rng.choice((0.0, 1.0, -1.0, rng.uniform(-6e8, 6e8)))

    def look_finely() -> int:
        return int(look() * 1e9)

    with mock.patch("time.time", look), mock.patch("time.time_ns", look_finely):
        yield


def clock_cases(place: Place) -> Case:
    """The clock jumps while a run, a table or a cache goes on from files of any age: the same bits come out."""
    from small_runs import TINY, class_folder, train_tiny, usfan
    from usfan.store.run_folder import RunFolder

    base = place.root.parent / "base-clock"
    data = class_folder(base / "data", images=4)
    model = train_tiny(data, base / "model")
    commands = {
        "adapt": ("adapt", model, data, "--epochs", 2, "--batch-size", 8, "--resume", *TINY),
        "train": ("train", data, "--backbone", "digits-cnn", "--epochs", 2, "--resume", *TINY),
        "predict": ("predict", model, data, *TINY),
    }
    whole = RunFolder.save_checkpoint

    def stop(self: RunFolder, *given: Any) -> None:
        whole(self, *given)
        raise KeyboardInterrupt

    expected = {}
    for name, command in commands.items():
        assert usfan(*command, "--out", base / f"{name}-whole") == 0
        expected[name] = bits_of(base / f"{name}-whole")
        with mock.patch.object(RunFolder, "save_checkpoint", stop):
            assert usfan(*command, "--out", base / name) == (0 if name == "predict" else 130)

    def case(rng: random.Random, number: int) -> tuple[str, Act]:
        name = rng.choice(list(commands))
        top = place.fresh()
        out = top / "out"
        if name != "predict":
            shutil.copytree(base / name, out)
        cached = name == "predict" and rng.random() < 0.5  # a run continues with its own cache
        cache = ("--cache", top / "cache") if cached else ()

        def act() -> str:
            for _ in range(2 if cache else 1):  # the second run finds the cache
                for path in (*data.rglob("*"), *model.iterdir(), *top.rglob("*")):
                    moment = rng.choice(MOMENTS)
                    os.utime(path, (moment, moment))
                with jumping_clock(rng):
                    outcome = called(*commands[name], "--out", out, *cache)
                if outcome != "done" or bits_of(out) != expected[name]:
                    return f"BAD: {outcome}, or other bits"
            return outcome

        return name + (", cached" if cache else ""), act

    return case


def bits_of(out: Path) -> str:
    """Digest of a table, or of the tensors of a model."""
    files = [out]
    if out.is_dir():
        files = [out / name for name in ("model.safetensors", "posterior.safetensors")]
    return hashlib.blake2b(b"".join(file.read_bytes() for file in files)).hexdigest()


def board_cases(place: Place) -> Case:
    """TensorBoard's files in a run folder that a command goes on with: odd ones, and links at names to come."""
    from small_runs import TINY, class_folder, train_tiny, usfan
    from usfan.store.run_folder import RunFolder

    base = place.root.parent / "base-board"
    data = class_folder(base / "data", images=4)
    model = train_tiny(data, base / "model")
    command = ("adapt", model, data, "--epochs", 2, "--batch-size", 8, "--resume", *TINY)
    whole = RunFolder.save_checkpoint

    def stop(self: RunFolder, *given: Any) -> None:
        whole(self, *given)
        raise KeyboardInterrupt

    with mock.patch.object(RunFolder, "save_checkpoint", stop):
        assert usfan(*command, "--out", base / "run") == 130

    def case(rng: random.Random, number: int) -> tuple[str, Act]:
        target = Path(shutil.copytree(base / "run", place.fresh() / "run"))
        now = int(time.time())
        kind = rng.choice(("next name", "next name", "odd content", "no file", "many"))
        if kind == "next name":
            for moment in range(now, now + 8):
                for count in range(3):
                    name = (
                        f"events.out.tfevents.{moment:010}.{socket.gethostname()}.{os.getpid()}"
                    )
                    (target / f"{name}.{count}").symlink_to(place.outside / "victim")
        elif kind == "many":
            for count in range(300):
                (target / f"events.out.tfevents.{count}").touch()
        else:
            (events,) = target.glob("events.out.tfevents.*")
            if kind == "no file":
                kind = no_file(events, rng, place.outside)
            else:
                events.write_bytes(odd_text(rng))
        private = ("--private",) if rng.random() < 0.2 else ()
        return kind, lambda: called(*command, "--out", target, *private)

    return case


def part_cases(place: Place) -> Case:
    """The rows of a table that an interrupted `predict` left, changed by somebody."""
    import numpy as np

    import usfan
    from tiny_models import tiny_model
    from usfan.metrics.predictions import job_of, prediction_records, write_predictions

    model = tiny_model()
    pixels = np.random.default_rng(0).integers(0, 256, (200, 28, 28), dtype=np.uint8)
    data = usfan.ImageData(pixels)
    records = prediction_records(model, data.subset(range(128)))
    lines = [json.dumps(record).encode() for record in records]
    header = json.dumps({"job": job_of(model, data, None)}).encode()

    def case(rng: random.Random, number: int) -> tuple[str, Act]:
        out = place.fresh() / "table.csv"
        part = Path(f"{out}.part")
        rows = list(lines)
        kind = rng.choice(("odd value", "odd text", "repeated", "no file", "order"))
        at = rng.randrange(len(rows))
        if kind == "odd value":
            rows[at] = json.dumps(odd_value(json.loads(rows[at]), rng)).encode()
        elif kind == "odd text":
            rows[at] = odd_text(rng)
        elif kind == "repeated":
            rows *= rng.choice((2, 5, 40))
        elif kind == "order":
            rng.shuffle(rows)
        part.write_bytes(b"\n".join([header, *rows]) + b"\n" * rng.choice((0, 1)))
        if kind == "no file":
            kind = no_file(part, rng, place.outside)

        def act() -> str:
            write_predictions(out, model, data, resume=True)
            text = out.read_text()
            is_table = text.count("\n") == 201 and text.replace("\n", "").isprintable()
            return "done" if is_table else "BAD: no whole table"

        return kind, lambda: refused_or(act)

    return case


def annotation_cases(place: Place) -> Case:
    """Exports of Label Studio, and the tables of answers that they become."""
    from label_runs import write_label_run

    from usfan.labelling.answers import read_answers, write_answers
    from usfan.labelling.label_studio import merge, read_annotations
    from usfan.labelling.questions import open_board

    run, _ = write_label_run(place.root.parent / "base-annotations")
    board = open_board(run)
    tasks = [
        {
            "data": {"path": board.target.images[row], "question": kind, "image": "x"},
            "annotations": [
                {"result": [{"value": {"choices": [label]}}], "was_cancelled": False}
            ],
        }
        for row, kind, label in (
            (1, "name", "class 0001"),
            (2, "judge", "none of these"),
            (3, "name", "skip"),
        )
    ]

    def case(rng: random.Random, number: int) -> tuple[str, Act]:
        top = place.fresh()
        file = top / "export.json"
        kind = "odd value"
        chosen = rng.random()
        if chosen < 0.7:
            value: Any = tasks
            for _ in range(rng.choice((1, 1, 3))):
                value = odd_value(value, rng)
            file.write_text(json.dumps(value))
        elif chosen < 0.85:
            kind = "odd text"
            file.write_bytes(odd_text(rng))
        else:
            kind = no_file(file, rng, place.outside)
            if kind == "pipe":
                file.unlink()

        def act() -> str:
            answers = read_annotations(file)
            board.answers = []
            merge(board, answers, file)
            write_answers(top / "labels.csv", board.answers)
            read_answers(top / "labels.csv")
            return "done"

        return kind, lambda: refused(act)

    return case


PAGE_FILES = (
    "samples.json",
    "samples.safetensors",
    "metrics.json",
    "config.yaml",
    "labels.csv",
)


def page_cases(place: Place) -> Case:
    """A run that somebody changed, opened by `usfan label`: its page, and what it says to any request."""
    from label_runs import write_label_run

    from usfan.files import write_json
    from usfan.labelling.again import SecondRun
    from usfan.labelling.answers import Answer, write_answers
    from usfan.labelling.server import Page, create_app
    from usfan.labelling.session import Session
    from usfan.metrics.image_table import mark_of

    run, _ = write_label_run(place.root.parent / "base-page")
    images = json.loads((run / "samples.json").read_text())["paths"]
    write_answers(run / "labels.csv", [Answer(images[1], "class 0001")])
    origin = "http://127.0.0.1:80"

    def open_page(target: Path, rng: random.Random) -> str:
        with contextlib.closing(Session(target)) as session:
            client = create_app(Page(session, SecondRun(target)), 80, "t").test_client()
            for _ in range(6):
                method, path, body = odd_request(rng)
                reply = client.open(
                    f"/t/{path}",
                    method=method,
                    data=body,
                    base_url="http://127.0.0.1:80",
                    headers={"Origin": origin, "Content-Type": "application/json"},
                )
                if reply.status_code >= 500:
                    return f"BAD: {reply.status_code} {path} {reply.text[:200]!a}"
                if reply.is_json and method != "HEAD":
                    json.loads(reply.text, parse_constant=lambda name: 1 / 0)
        return "done"

    def case(rng: random.Random, number: int) -> tuple[str, Act]:
        target = Path(shutil.copytree(run, place.fresh() / "run"))
        described = json.loads((target / "samples.json").read_text())
        write_json(target / "samples.json", described | {"made": mark_of(target)})
        kind = "as it is"
        if rng.random() < 0.8:
            kind = hostile_run(target, rng, place, PAGE_FILES)
        return kind, lambda: refused_or(lambda: open_page(target, rng))

    return case


def odd_request(rng: random.Random) -> tuple[str, str, bytes]:
    """Method, path below the token, body."""
    window = rng.choice(("window-one", "window-two", "w", "x" * 300, "\u202e" * 9, ""))
    action = rng.choice(
        ("answer", "answer", "answer", "undo", "state", "image", "classes", "page.js")
    )
    kinds = ("name", "judge", "else", "", None)
    labels = ("class 0001", "none of these", "skip", *NASTY[:-4], 3)
    fields = {
        "row": rng.choice((*range(6), -1, 48, 10**30, 1.0, True, None, "0")),
        "label": rng.choice(labels),
        "kind": rng.choice(kinds),
        "window": window,
    }
    body = json.dumps(fields).encode()
    if rng.random() < 0.2:
        body = odd_text(rng)
    if action in ("answer", "undo"):
        return "POST", action, body
    path = action
    if action == "state":
        path = f"state?window={window}"
    elif action == "image":
        path = f"image/{rng.choice((0, 5, 47, 48, -1, '..%2f..', 10**40, '%00', '1/2'))}"
    return rng.choice(("GET", "GET", "HEAD", "PUT", "OPTIONS")), path, b""


def request_cases(place: Place) -> Case:
    """Bytes that are no request, or one that never ends, to the page's own server; then it still answers."""
    from label_runs import write_label_run

    from usfan.labelling.again import SecondRun
    from usfan.labelling.server import PageServer
    from usfan.labelling.session import Session

    run, _ = write_label_run(place.root.parent / "base-request")
    server = PageServer(Session(run), SecondRun(run))
    threading.Thread(target=server.run, daemon=True).start()
    token = server.address.rstrip("/").rsplit("/", 1)[1]

    def case(rng: random.Random, number: int) -> tuple[str, Act]:
        kind, content = odd_bytes(rng, token, server.port)

        def act() -> str:
            with socket.create_connection(("127.0.0.1", server.port), timeout=5) as connection:
                connection.settimeout(0.3)
                reply = b""
                with contextlib.suppress(OSError):
                    connection.sendall(content)
                    reply = connection.recv(1 << 16)
            if reply and not 200 <= int(reply[9:12]) < 500 and reply[9:12] != b"501":
                return f"BAD: {reply[:200]!a}"
            again = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
            again.request("GET", f"/{token}/classes")
            status = again.getresponse().status
            again.close()
            return "answers" if status == 200 else f"BAD: afterwards {status}"

        return kind, act

    return case


def odd_bytes(rng: random.Random, token: str, port: int) -> tuple[str, bytes]:
    host = b"Host: 127.0.0.1:%d\r\n" % port
    origin = b"Origin: http://127.0.0.1:%d\r\n" % port
    path = f"/{token}/answer".encode()
    post = b"POST " + path + b" HTTP/1.1\r\n" + host + origin
    choices = {
        "noise": rng.randbytes(rng.randrange(1, 5000)),
        "no end": b"GET /" + token.encode() + b"/ HTTP/1.1\r\n" + host,
        "long header": b"GET / HTTP/1.1\r\n" + b"X: " + b"x" * 40_000 + b"\r\n\r\n",
        "many headers": b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 4_000 + b"\r\n",
        "long path": b"GET /"
        + b"x" * rng.choice((5_000, 100_000))
        + b" HTTP/1.1\r\n"
        + host
        + b"\r\n",
        "huge body": post + b"Content-Length: 99999999999\r\n\r\n" + b"x" * 9_000,
        "negative body": post + b"Content-Length: -1\r\n\r\n",
        "two lengths": post + b"Content-Length: 3\r\nContent-Length: 40\r\n\r\n{}x",
        "chunks": post + b"Transfer-Encoding: chunked\r\n\r\n" + b"ffff\r\n" + b"x" * 9_000,
        "odd chunk": post + b"Transfer-Encoding: chunked\r\n\r\n-5\r\nx\r\n0\r\n\r\n",
        "odd host": b"GET " + path + b" HTTP/1.1\r\nHost: \xff\xfe\r\n\r\n",
        "two hosts": b"GET " + path + b" HTTP/1.1\r\n" + host + b"Host: evil\r\n\r\n",
        "absolute": b"GET http://evil.example" + path + b" HTTP/1.1\r\n" + host + b"\r\n",
        "upwards": b"GET /"
        + token.encode()
        + b"/../../../etc/passwd HTTP/1.1\r\n"
        + host
        + b"\r\n",
        "odd method": b"\x00BREW / HTTP/9.9\r\n" + host + b"\r\n",
        "pipelined": (b"GET /x HTTP/1.1\r\n" + host + b"\r\n") * 50,
    }
    kind = rng.choice(list(choices))
    return kind, choices[kind]


NETWORK_FILES = ("config.json", "preprocessor_config.json", "model.safetensors")


def network_cases(place: Place) -> Case:
    """A stranger's classifier of transformers: its folder, and what usfan saved of it."""
    import transformers
    from artifact_mutations import cut_or_insert, flip_bits
    from fuzz import load_and_predict

    from small_runs import TINY, class_folder

    base = place.root.parent / "base-network"
    data = class_folder(base / "data", images=2)
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    names = {"num_labels": 3, "id2label": {0: "class-0", 1: "class-1", 2: "class-2"}}
    config = transformers.ViTConfig(
        **small, intermediate_size=16, image_size=16, patch_size=8, **names
    )
    transformers.ViTForImageClassification(config).save_pretrained(base / "theirs")
    side = {"height": 16, "width": 16}
    transformers.ViTImageProcessor(size=side).save_pretrained(base / "theirs")
    fit = ("posterior", base / "theirs", data, "--out", base / "ours", *TINY)
    assert called(*fit) == "done"

    def case(rng: random.Random, number: int) -> tuple[str, Act]:
        is_ours = rng.random() < 0.4
        origin = base / ("ours" if is_ours else "theirs")
        target = Path(shutil.copytree(origin, place.fresh() / "network"))
        file = target / rng.choice(NETWORK_FILES[: 1 if is_ours else 3])
        chosen = rng.random()
        if chosen < 0.15:
            kind = no_file(file, rng, place.outside)
        elif chosen < 0.25:
            kind = "odd text"
            file.write_bytes(odd_text(rng))
        elif file.suffix == ".safetensors":
            kind = "odd tensors"
            folder = {"model.safetensors": file.read_bytes()}
            rng.choice((flip_bits, cut_or_insert))(folder, rng)
            file.write_bytes(folder["model.safetensors"])
        else:
            kind = f"odd {file.name}"
            value = json.loads(file.read_text())
            for _ in range(rng.choice((1, 1, 3))):
                value = with_number(value, rng) if rng.random() < 0.5 else odd_value(value, rng)
            if isinstance(value, dict) and rng.random() < 0.2:
                value["auto_map"] = {
                    "AutoConfig": "evil.C",
                    "AutoImageProcessor": "evil.C",
                    "AutoModelForImageClassification": "evil.C",
                }
                (target / "evil.py").write_text("raise SystemExit('code of a stranger ran')")
            file.write_text(json.dumps(value))
        if is_ours:
            return kind, lambda: load_and_predict(target)
        out = place.root / "out"
        return kind, lambda: called("posterior", target, data, "--out", out, *TINY)

    return case


def with_number(value: Any, rng: random.Random) -> Any:
    """A table in which one value is a number of any size, as sizes of layers are."""
    if not isinstance(value, dict) or not value:
        return value
    number = rng.choice((0, -1, 1, 3, 2**15, 10**9, 2**63, 1e308, 0.0, float("nan")))
    return value | {rng.choice(list(value)): number}


LATER_KINDS: dict[str, Callable[[Place], Case]] = {
    "caches": cache_cases,
    "mixtures": mixture_cases,
    "studies": study_cases,
    "disks": disk_cases,
    "clocks": clock_cases,
    "boards": board_cases,
    "parts": part_cases,
    "annotations": annotation_cases,
    "pages": page_cases,
    "requests": request_cases,
    "networks": network_cases,
}
LATER_SHARES = {
    "caches": 0.04,
    "mixtures": 0.04,
    "studies": 0.01,
    "disks": 0.01,
    "clocks": 0.003,
    "boards": 0.004,
    "parts": 0.02,
    "annotations": 0.04,
    "pages": 0.03,
    "requests": 0.02,
    "networks": 0.02,
}
