"""State dicts that `torch.save` wrote (.pth, .pt, .bin), read without unpickling.

Such a file holds a program for Python's pickle machine, and the numbers of the tensors:

    zip    NAME/data.pkl, the program; NAME/data/KEY, the numbers of a storage, not compressed
    old    magic number, version, facts about the machine, the program, the keys of the storages (all of them programs);
           then for each key a count and the numbers

The machine here makes tables, lists, tuples, texts, numbers and tensors, and nothing else: no name in a program is
looked up or called. A tensor is a view of a storage; sizes are compared with the file before anything is allocated.
"""

from __future__ import annotations

import math
import struct
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, NamedTuple

import torch
from torch import Tensor

from usfan.budget import allowed, check_cost
from usfan.errors import ConfigError

MOST_DESCRIBED = 16 << 20
"""Bytes of the program: 10,000 tensors take one million."""
MOST_STEPS = 1_000_000
"""Steps of the program: a tensor takes about 60."""
MOST_DIMENSIONS = 16
WRAPPERS = ("state_dict", "model", "model_state_dict")
"""Names of a table in a table."""
MAGIC = 0x1950A86A20F9469CFC6C
OLD_VERSION = 1001
DTYPES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
}
NUMBERS = {b"J": "<i", b"K": "<B", b"M": "<H"}
TEXTS = {b"X": "<I", b"\x8c": "<B", b"U": "<B"}
CONSTANTS = {b"N": None, b"\x88": True, b"\x89": False, b")": ()}
TUPLES = {b"\x85": 1, b"\x86": 2, b"\x87": 3}
IGNORED = {b"\x80": 1, b"\x95": 8}
"""Version and frame, and the bytes that follow."""
MISTAKES = (
    LookupError,
    TypeError,
    ValueError,
    AttributeError,
    EOFError,
    OSError,
    OverflowError,
    NotImplementedError,
    RuntimeError,
    struct.error,
    zipfile.BadZipFile,
)
"""Errors of a file that is none of the two kinds."""


class Name(NamedTuple):
    """A name of Python that a program mentions."""

    module: str
    name: str


class Storage(NamedTuple):
    """Numbers of one type that tensors are views of."""

    key: str
    dtype: torch.dtype
    length: int

    @property
    def size(self) -> int:
        return self.length * self.dtype.itemsize


class View(NamedTuple):
    """A tensor whose numbers have not been read."""

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


Value = object
Numbers = Callable[[Storage], bytes]
"""Reads a storage."""


@dataclass
class Machine:
    """Runs the programs in `content`, one after another."""

    content: bytes
    position: int = 0
    steps: int = 0
    stack: list[Value] = field(default_factory=list)
    marks: list[int] = field(default_factory=list)
    memo: dict[int, Value] = field(default_factory=dict)
    storages: dict[str, Storage] = field(default_factory=dict)

    def run(self) -> Value:
        """The result of the next program. Raises one of `MISTAKES`."""
        self.stack.clear()
        self.memo.clear()
        while (code := self.read(1)) != b".":
            self.steps += 1
            if self.steps > allowed(MOST_STEPS):
                raise ValueError("too many steps")
            if not self.push(code):
                self.change(code)
        return self.stack.pop()

    def read(self, count: int) -> bytes:
        part = self.content[self.position : self.position + count]
        if len(part) < count:
            raise EOFError
        self.position += count
        return part

    def number(self, form: str) -> int:
        return int(struct.unpack(form, self.read(struct.calcsize(form)))[0])

    def line(self) -> str:
        end = self.content.index(b"\n", self.position)
        text = self.read(end - self.position).decode()
        self.position += 1
        return text

    def since_mark(self) -> list[Value]:
        start = self.marks.pop()
        part = self.stack[start:]
        del self.stack[start:]
        return part

    def push(self, code: bytes) -> bool:
        """Whether the step puts something on the stack and takes nothing away."""
        value: Value
        if code in CONSTANTS:
            value = CONSTANTS[code]
        elif code == b"G":
            (value,) = struct.unpack(">d", self.read(8))
        elif code in NUMBERS:
            value = self.number(NUMBERS[code])
        elif code in TEXTS:
            value = self.read(self.number(TEXTS[code])).decode()
        elif code == b"\x8a":
            value = int.from_bytes(self.read(self.number("<B")), "little", signed=True)
        elif code == b"}":
            value = {}
        elif code == b"]":
            value = []
        elif code == b"c":
            value = Name(self.line(), self.line())
        elif code in (b"h", b"j"):
            value = self.memo[self.number("<B" if code == b"h" else "<I")]
        else:
            return False
        self.stack.append(value)
        return True

    def change(self, code: bytes) -> None:
        """A step that takes something from the stack, or notes something."""
        stack = self.stack
        if code in IGNORED:
            self.read(IGNORED[code])
        elif code in (b"q", b"r"):
            self.memo[self.number("<B" if code == b"q" else "<I")] = stack[-1]
        elif code == b"\x94":
            self.memo[len(self.memo)] = stack[-1]
        elif code == b"(":
            self.marks.append(len(stack))
        elif code == b"t":
            stack.append(tuple(self.since_mark()))
        elif code in TUPLES:
            count = TUPLES[code]
            stack[-count:] = [tuple(stack[-count:])]
        elif code in (b"s", b"u"):
            items = self.since_mark() if code == b"u" else [stack.pop(-2), stack.pop()]
            fill(stack[-1], items[::2], items[1::2])
        elif code in (b"a", b"e"):
            parts = self.since_mark() if code == b"e" else [stack.pop()]
            stack[-1].extend(parts)  # type: ignore[attr-defined]
        elif code == b"\x93":
            stack[-2:] = [Name(*map(str, stack[-2:]))]
        elif code == b"Q":
            stack.append(self.storage(*stack.pop()))  # type: ignore[misc]
        elif code == b"R":
            arguments = stack.pop()
            stack.append(build(stack.pop(), *arguments))  # type: ignore[misc]
        elif code == b"b" and isinstance(stack[-2], dict):  # versions of layers
            stack.pop()
        else:
            raise ValueError(f"unknown step {code!r}")

    def storage(
        self, kind: str, dtype: Name, key: str, _: str, count: int, view: None = None
    ) -> Storage:
        if kind != "storage" or dtype.module != "torch" or view is not None or count < 0:
            raise ValueError("no storage")
        storage = Storage(key, DTYPES[dtype.name], count)
        if self.storages.setdefault(key, storage) != storage:
            raise ValueError("two storages of one name")
        return storage


def fill(table: Value, keys: list[Value], values: list[Value]) -> None:
    """Put items into a table. A nested tuple as a key would be hashed in 2^depth steps."""
    if not isinstance(table, dict) or not all(type(key) in (str, int) for key in keys):
        raise TypeError("no table, or a key that is neither a text nor a number")
    table.update(zip(keys, values, strict=True))


def build(name: Value, *arguments: Value) -> Value:
    """The value that a program asks for by the name of a function."""
    if name == ("collections", "OrderedDict"):
        table: dict[Value, Value] = {}
        for key, value in arguments[0] if arguments else ():  # type: ignore[attr-defined]
            fill(table, [key], [value])
        return table
    if name == ("torch._utils", "_rebuild_parameter") and isinstance(arguments[0], View):
        return arguments[0]
    if name in (("torch._utils", "_rebuild_tensor_v2"), ("torch._utils", "_rebuild_tensor")):
        return view_of(*arguments[:4])  # type: ignore[arg-type]
    raise ValueError(f"unknown name {name}")


def view_of(
    storage: Storage, offset: int, shape: tuple[int, ...], stride: tuple[int, ...]
) -> View:
    """A view that stays inside its storage, and has no more elements than that."""
    numbers = [offset, *shape, *stride]
    if not all(type(number) is int and number >= 0 for number in numbers):
        raise ValueError("a size is no number")
    if len(shape) != len(stride) or len(shape) > MOST_DIMENSIONS:
        raise ValueError("shape and stride differ")
    last = offset + sum((n - 1) * step for n, step in zip(shape, stride, strict=True))
    elements = math.prod(shape)
    if elements and (last >= storage.length or elements > storage.length):
        raise ValueError("a tensor leaves its storage")
    return View(storage, offset, shape, stride)


def read_torch_file(path: Path) -> dict[str, Tensor]:
    """The named tensors in a file of `torch.save`. ConfigError if it holds anything else."""
    try:
        with path.open("rb") as file:
            size = path.stat().st_size
            if not zipfile.is_zipfile(file):
                file.seek(0)
                return read_old(path, file, size)
            with zipfile.ZipFile(file) as archive:
                return read_zip(path, archive, size)
    except ConfigError:
        raise
    except MISTAKES as error:
        raise ConfigError(
            f"{path} is not a state dict that can be read safely: it was not written by torch.save, or holds more than "
            "tensors by name; write it with torch.save(model.state_dict(), FILE), or as safetensors"
        ) from error


def read_zip(path: Path, archive: zipfile.ZipFile, size: int) -> dict[str, Tensor]:
    entries = {entry.filename: entry for entry in archive.infolist()}
    if sum(entry.file_size for entry in entries.values()) > size:
        raise ConfigError(
            f"{path} unpacks to more than its size: write it with torch.save, which does not compress"
        )
    (program,) = (name for name in entries if name.split("/")[-1] == "data.pkl")
    folder = program.removesuffix("data.pkl")
    check_described(path, entries[program].file_size)
    order = f"{folder}byteorder"
    if order in entries and archive.read(order) != b"little":
        raise ValueError("another byte order")
    machine = Machine(archive.read(program))
    value = machine.run()

    def numbers(storage: Storage) -> bytes:
        return archive.read(f"{folder}data/{storage.key}")

    return with_numbers(path, value, machine, numbers, size)


def read_old(path: Path, file: BinaryIO, size: int) -> dict[str, Tensor]:
    machine = Machine(file.read(min(size, allowed(MOST_DESCRIBED))))
    if machine.run() != MAGIC or machine.run() != OLD_VERSION:
        raise ValueError("no file of torch.save")
    facts = machine.run()
    if not isinstance(facts, dict) or facts.get("little_endian") is not True:
        raise ValueError("another byte order")
    value = machine.run()
    keys = machine.run()
    check_described(path, machine.position)
    file.seek(machine.position)
    starts: dict[str, int] = {}
    for key in keys:  # type: ignore[attr-defined]
        storage = machine.storages[key]
        if int.from_bytes(file.read(8), "little") != storage.length:
            raise ValueError("a storage of another size")
        starts[key] = file.tell()
        file.seek(storage.size, 1)

    def numbers(storage: Storage) -> bytes:
        file.seek(starts[storage.key])
        return file.read(storage.size)

    return with_numbers(path, value, machine, numbers, size - machine.position)


def check_described(path: Path, size: int) -> None:
    check_cost(f"{path}: its table of tensors has", size, MOST_DESCRIBED, "bytes", ConfigError)


def with_numbers(
    path: Path, value: Value, machine: Machine, numbers: Numbers, most: int
) -> dict[str, Tensor]:
    """The table of tensors, at the top or under one of the usual names. The storages fit into `most` bytes."""
    if sum(storage.size for storage in machine.storages.values()) > most:
        raise ValueError("more numbers than the file has")
    for key in WRAPPERS:
        if isinstance(value, dict) and isinstance(value.get(key), dict):
            value = value[key]
    storages: dict[str, Tensor] = {}
    tensors = {}
    for name, view in value.items() if isinstance(value, dict) else [(None, None)]:
        if not isinstance(name, str) or not isinstance(view, View):
            raise ConfigError(f"{path} does not hold a state dict (a table of named tensors)")
        key = view.storage.key
        if key not in storages:
            storages[key] = as_tensor(numbers(view.storage), view.storage)
        tensors[name] = storages[key].as_strided(view.shape, view.stride, view.offset)
    return tensors


def as_tensor(content: bytes, storage: Storage) -> Tensor:
    if len(content) != storage.size:
        raise ValueError("a storage of another size")
    if not content:
        return torch.empty(0, dtype=storage.dtype)
    return torch.frombuffer(bytearray(content), dtype=storage.dtype)
