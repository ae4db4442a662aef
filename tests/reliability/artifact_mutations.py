"""Damage to a model folder, as an accident or a stranger would do it. A folder is a dict of file names and bytes."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable
from typing import Any

Folder = dict[str, bytes]
TENSOR_FILES = ("model.safetensors", "posterior.safetensors")
ODD_NUMBERS = (0, -1, 1, 2**31, 2**63, 2**64, 10**400, -(10**400), 1e308, -1e308, 1e-320, 0.5)
ODD = (
    *ODD_NUMBERS,
    float("nan"),
    float("inf"),
    None,
    True,
    "",
    "x" * 100_000,
    "\ud800",
    "\x1b[31m",
    [],
    {},
    [[]],
    "../..",
)
FLOATS = (float("nan"), float("inf"), -float("inf"), 3e38, -3e38, 1e20, -1.0, 0.0, 1e-45)


def flip_bits(folder: Folder, rng: random.Random) -> None:
    name = rng.choice(list(folder))
    content = bytearray(folder[name])
    for _ in range(rng.choice((1, 1, 2, 8, 40))):
        place = rng.randrange(min(len(content), 2000) if rng.random() < 0.5 else len(content))
        content[place] ^= 1 << rng.randrange(8)
    folder[name] = bytes(content)


def truncate(folder: Folder, rng: random.Random) -> None:
    name = rng.choice(list(folder))
    folder[name] = folder[name][: rng.randrange(len(folder[name]))]


def cut_or_insert(folder: Folder, rng: random.Random) -> None:
    name = rng.choice(list(folder))
    content = folder[name]
    at = rng.randrange(len(content))
    length = rng.randrange(1, 200)
    if rng.random() < 0.5:
        folder[name] = content[:at] + content[at + length :] or b"\0"
    else:
        folder[name] = content[:at] + rng.randbytes(length) + content[at:]


def split_file(content: bytes) -> tuple[dict[str, Any], bytes]:
    length = struct.unpack("<Q", content[:8])[0]
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def join_file(header: Any, data: bytes) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def swap_tensors(folder: Folder, rng: random.Random) -> None:
    """Names, places, shapes or types of two tensors change hands."""
    file = rng.choice(TENSOR_FILES)
    header, data = split_file(folder[file])
    first, second = rng.sample([name for name in header if name != "__metadata__"], 2)
    for field in rng.choice(
        (("data_offsets",), ("shape",), ("dtype",), ("shape", "data_offsets"))
    ):
        header[first][field], header[second][field] = (
            header[second][field],
            header[first][field],
        )
    folder[file] = join_file(header, data)


def huge_header(folder: Folder, rng: random.Random) -> None:
    """A header that claims more than there is: its own length, or the sizes it names."""
    file = rng.choice(TENSOR_FILES)
    header, data = split_file(folder[file])
    kind = rng.randrange(4)
    if kind == 0:
        folder[file] = (
            struct.pack("<Q", rng.choice((2**64 - 1, 2**63, 2**40, 100 << 20, 9 << 20)))
            + folder[file][8:]
        )
        return
    name = rng.choice([n for n in header if n != "__metadata__"])
    if kind == 1:
        header[name]["shape"] = rng.choice(
            ([2**32, 2**32], [10**10], [2**62, 4], [-1], [0], [2**64], [1] * 1000)
        )
    elif kind == 2:
        header[name]["data_offsets"] = rng.choice(
            ([0, 2**63], [5, 1], [-4, 0], [0, 10**12], [0], [2**64, 2**65])
        )
    else:
        header |= {
            f"extra.{i}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
            for i in range(20_000)
        }
    folder[file] = join_file(header, data)


def nested_header(folder: Folder, rng: random.Random) -> None:
    file = rng.choice(TENSOR_FILES)
    depth = rng.choice((100, 1_000, 100_000, 1_000_000))
    opened, closed = rng.choice(((b"[", b"]"), (b'{"a":', b"}")))
    text = b'{"x":' + opened * depth + b"1" + closed * depth + b"}"
    folder[file] = join_file(text, b"\0" * 100)


def json_bomb(folder: Folder, rng: random.Random) -> None:
    """Deep nesting, long numbers, long texts, many keys: as the config, or inside it."""
    depth = rng.choice((500, 5_000, 200_000))
    value = rng.choice(
        (
            "[" * depth + "]" * depth,
            '{"a":' * depth + "1" + "}" * depth,
            "9" * depth,
            f'"{"x" * depth}"',
        )
    )
    value = rng.choice(
        (
            value,
            "[" + ",".join("0" * 1 for _ in range(depth)) + "]",
            '{"a":1' + ',"a":1' * depth + "}",
        )
    )
    text = folder["config.json"].decode()
    if rng.random() < 0.3:
        folder["config.json"] = value.encode()
        return
    place = rng.choice(
        (
            '"summary": ',
            '"classes": ',
            '"samples": ',
            '"input": ',
            '"architecture": ',
            '"version": ',
        )
    )
    at = text.find(place) + len(place)
    folder["config.json"] = (text[:at] + value + ", " + f'"old{place[1:]}' + text[at:]).encode()


def odd_field(folder: Folder, rng: random.Random) -> None:
    """A field of the config gets a strange value, goes, or comes."""
    config = json.loads(folder["config.json"])
    table = config
    while True:
        name = rng.choice(list(table)) if table else "x"
        if isinstance(table.get(name), dict) and table[name] and rng.random() < 0.7:
            table = table[name]
            continue
        break
    kind = rng.randrange(4)
    if kind == 0:
        table.pop(name, None)
    elif kind == 1:
        table[rng.choice(("module", "timm", "head", "x", "unknown_rule", "kind"))] = rng.choice(
            ODD
        )
    elif kind == 2 and isinstance(table.get(name), list):
        table[name] = [rng.choice(ODD) for _ in table[name]]
    else:
        table[name] = rng.choice(ODD)
    folder["config.json"] = json.dumps(config).encode()


def odd_values(folder: Folder, rng: random.Random) -> None:
    """Numbers in a tensor: not finite, huge, negative, or in another order."""
    file = rng.choice(TENSOR_FILES)
    header, data = split_file(folder[file])
    name = rng.choice(
        [n for n in header if n != "__metadata__" and header[n]["dtype"] == "F32"]
    )
    start, stop = header[name]["data_offsets"]
    values = list(struct.unpack(f"<{(stop - start) // 4}f", data[start:stop]))
    if rng.random() < 0.3:
        rng.shuffle(values)
    elif rng.random() < 0.3:
        values = [rng.choice(FLOATS)] * len(values)
    else:
        for _ in range(rng.choice((1, 3, 30))):
            values[rng.randrange(len(values))] = rng.choice(FLOATS)
    folder[file] = join_file(
        header, data[:start] + struct.pack(f"<{len(values)}f", *values) + data[stop:]
    )


def another_file(folder: Folder, rng: random.Random) -> None:
    """A file stands under another's name, is noise, or is empty."""
    name = rng.choice(list(folder))
    other = rng.choice(list(folder))
    folder[name] = rng.choice(
        (
            folder[other],
            b"",
            rng.randbytes(rng.randrange(1, 5000)),
            b"\0" * 5000,
            b"\x80\x02K\x01.",
        )
    )


KINDS: dict[str, Callable[[Folder, random.Random], None]] = {
    function.__name__.replace("_", " "): function
    for function in (
        flip_bits, truncate, cut_or_insert, swap_tensors, huge_header, nested_header,
        json_bomb, odd_field, odd_values, another_file,
    )
}  # fmt: skip


def mutated(original: Folder, others: list[Folder], number: int) -> tuple[str, Folder]:
    """Case `number`: the kind of damage and the damaged folder. Now and then a file of another model comes in."""
    rng = random.Random(number)
    folder = dict(original)
    kind = list(KINDS)[number % len(KINDS)]
    if rng.random() < 0.05:
        name = rng.choice(list(folder))
        folder[name] = rng.choice(others)[name]
    KINDS[kind](folder, rng)
    return kind, folder
