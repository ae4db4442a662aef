"""Strange things: what stands where a file should, odd values, odd texts, and what came of a call on them."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from artifact_mutations import ODD

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
Case = Callable[[random.Random, int], tuple[str, Act]]
"""Makes one case: its kind, and what to do."""


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


def refused_or(act: Act) -> str:
    from usfan.errors import UsfanError

    try:
        return act()
    except UsfanError:
        return "refused"


def cpu_time() -> float:
    """Of this process and of the decoding processes that ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system
