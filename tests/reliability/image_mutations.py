"""Damage to image files: that of `test_image_fuzz.py`, and files made to cost far more than their size."""

from __future__ import annotations

import io
import random
import struct
import zlib

import measuring  # noqa: F401 (the path to the other test modules)
from PIL import Image
from test_image_fuzz import mutate, originals

from lookalikes import picture


def base_images() -> list[bytes]:
    def make_picture(seed: int, width: int, height: int):
        return picture(seed, 0, 0, side=max(width, height))[:height, :width]

    return originals(make_picture)


def png_chunk(kind: bytes, content: bytes) -> bytes:
    return (
        struct.pack(">I", len(content))
        + kind
        + content
        + struct.pack(">I", zlib.crc32(kind + content))
    )


def png_bomb(rng: random.Random) -> bytes:
    """A few kilobytes that name up to four billion pixels, or a text of gigabytes."""
    width, height = rng.choice(
        (
            (8192, 8192),
            (65_535, 1),
            (1, 65_535),
            (30_000, 30_000),
            (2**31 - 1, 2**31 - 1),
            (0, 9),
        )
    )
    packed = zlib.compress(b"\0" * min(4_000_000, width * height), 9)
    header = struct.pack(
        ">IIBBBBB",
        width,
        height,
        rng.choice((1, 8, 16)),
        rng.choice((0, 2, 3, 6)),
        0,
        0,
        rng.randrange(2),
    )
    text = png_chunk(
        rng.choice((b"zTXt", b"iCCP")), b"x\0\0" + zlib.compress(b"a" * 20_000_000, 9)
    )
    middle = text if rng.random() < 0.5 else b""
    return (
        b"\x89PNG\r\n\x1a\n"
        + png_chunk(b"IHDR", header)
        + middle
        + png_chunk(b"IDAT", packed)
        + png_chunk(b"IEND", b"")
    )


def bmp_bomb(rng: random.Random) -> bytes:
    width, height = rng.choice(
        ((30_000, 30_000), (2**31 - 1, 1), (8_000, -8_000), (1, 2**31 - 1), (-5, 5))
    )
    header = struct.pack(
        "<IiiHHIIiiII",
        40,
        width,
        height,
        1,
        rng.choice((1, 4, 8, 24)),
        rng.choice((0, 1, 2)),
        0,
        0,
        0,
        0,
        0,
    )
    return b"BM" + struct.pack("<IHHI", 54 + 100, 0, 0, 54) + header + rng.randbytes(100)


def tiff_bomb(rng: random.Random) -> bytes:
    """A directory that points to itself, or tags with billions of entries."""
    tags = [
        (256, 4, 1, rng.choice((9, 10**5, 2**31))),
        (257, 4, 1, rng.choice((9, 10**5))),
        (258, 3, 1, 8),
    ]
    tags += [
        (259, 3, 1, rng.choice((1, 5, 7, 8))),
        (273, 4, rng.choice((1, 2**30)), 8),
        (279, 4, 1, rng.choice((81, 2**31))),
    ]
    body = b"".join(struct.pack("<HHII", *tag) for tag in tags)
    return (
        b"II*\0"
        + struct.pack("<I", 8)
        + struct.pack("<H", len(tags))
        + body
        + struct.pack("<I", 8)
        + rng.randbytes(200)
    )


def gif_bomb(rng: random.Random) -> bytes:
    buffer = io.BytesIO()
    frames = [Image.new("P", (50, 50), i) for i in range(30)]
    frames[0].save(buffer, "GIF", save_all=True, append_images=frames[1:])
    content = bytearray(buffer.getvalue())
    content[6:10] = struct.pack(
        "<HH", *rng.choice(((65_535, 65_535), (65_535, 1), (0, 0), (8_000, 8_000)))
    )
    return bytes(content)


BOMBS = (png_bomb, bmp_bomb, tiff_bomb, gif_bomb)


def mutated_image(contents: list[bytes], number: int) -> tuple[str, bytes]:
    """Case `number`: every fifth is a bomb, now and then mutated itself."""
    rng = random.Random(number)
    if number % 5:
        return "mutated", mutate(contents[number % len(contents)], contents, rng)
    bomb = rng.choice(BOMBS)
    content = bomb(rng)
    return bomb.__name__.replace("_", " "), mutate(
        content, contents, rng
    ) if rng.random() < 0.3 else content
