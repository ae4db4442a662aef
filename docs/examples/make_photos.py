"""Draw small example pictures: six kinds of signs, photographed in a studio and in the street.

    python docs/examples/make_photos.py photos

writes photos/studio/CLASS/*.png (labelled: train here) and photos/street/CLASS/*.png (the new domain: adapt to it).
The same seed gives the same pictures.
"""

from __future__ import annotations

import argparse
import math
import random
from pathlib import Path

from PIL import Image, ImageDraw, ImageFilter

SIZE = 96


def ring(corners: int, inner: float) -> list[tuple[float, float]]:
    """A star (or a polygon, with inner 1) with this many corners, in the unit circle."""
    points = []
    for step in range(2 * corners):
        radius = 1.0 if step % 2 == 0 else inner
        angle = math.pi * step / corners - math.pi / 2
        points.append((radius * math.cos(angle), radius * math.sin(angle)))
    return points


SIGNS = {
    "arrow": [(-0.3, 1.0), (-0.3, 0.0), (-0.8, 0.0), (0.0, -1.0), (0.8, 0.0), (0.3, 0.0), (0.3, 1.0)],
    "bolt": [(0.2, -1.0), (-0.7, 0.15), (-0.05, 0.15), (-0.2, 1.0), (0.7, -0.2), (0.05, -0.2)],
    "cross": [
        (-0.3, -1.0), (0.3, -1.0), (0.3, -0.3), (1.0, -0.3), (1.0, 0.3), (0.3, 0.3),
        (0.3, 1.0), (-0.3, 1.0), (-0.3, 0.3), (-1.0, 0.3), (-1.0, -0.3), (-0.3, -0.3),
    ],
    "disc": [(math.cos(a / 20 * math.pi), math.sin(a / 20 * math.pi)) for a in range(40)],
    "house": [
        (-0.8, 1.0), (-0.8, -0.1), (0.0, -1.0), (0.8, -0.1), (0.8, 1.0),
        (0.25, 1.0), (0.25, 0.3), (-0.25, 0.3), (-0.25, 1.0),
    ],
    "star": ring(5, 0.42),
}  # fmt: skip


def placed(
    sign: str, random: random.Random, tilt: float, size: tuple[float, float]
) -> list[tuple[float, float]]:
    """The corners of a sign in the picture: turned, scaled and moved at random."""
    angle = random.uniform(-tilt, tilt)
    scale = random.uniform(*size) * SIZE / 2
    x0, y0 = (SIZE / 2 + random.uniform(-0.1, 0.1) * SIZE for _ in range(2))
    cos = math.cos(angle)
    sin = math.sin(angle)
    return [
        (x0 + scale * (x * cos - y * sin), y0 + scale * (x * sin + y * cos))
        for x, y in SIGNS[sign]
    ]


def studio(sign: str, random: random.Random) -> Image.Image:
    """A filled sign in a clear colour on a light background."""
    shade = random.randint(215, 250)
    picture = Image.new("RGB", (SIZE, SIZE), (shade, shade, shade))
    colour = tuple(random.randint(20, 160) for _ in range(3))
    ImageDraw.Draw(picture).polygon(placed(sign, random, 0.2, (0.55, 0.8)), fill=colour)
    return picture


def street(sign: str, random: random.Random) -> Image.Image:
    """A pale sign on a dark wall with a poster behind it, slightly out of focus and noisy."""
    picture = Image.new("RGB", (SIZE, SIZE), tuple(random.randint(50, 110) for _ in range(3)))
    draw = ImageDraw.Draw(picture)
    x = random.uniform(-20, SIZE)
    y = random.uniform(-20, SIZE)
    shade = random.randint(50, 140)
    draw.rectangle(
        (x, y, x + random.uniform(5, 50), y + random.uniform(3, 20)),
        fill=(shade, shade, shade + 15),
    )
    colour = tuple(random.randint(150, 235) for _ in range(3))
    draw.polygon(placed(sign, random, 0.2, (0.5, 0.8)), fill=colour)
    picture = picture.filter(ImageFilter.GaussianBlur(random.uniform(0.3, 0.8)))
    noise = Image.new("L", (SIZE, SIZE))
    noise.putdata([random.randrange(256) for _ in range(SIZE * SIZE)])
    return Image.blend(picture, noise.convert("RGB"), 0.05)


DOMAINS = {"studio": studio, "street": street}


def make_photos(root: Path, images: int = 40, seed: int = 0) -> None:
    for domain, draw in DOMAINS.items():
        for sign in SIGNS:
            folder = root / domain / sign
            folder.mkdir(parents=True, exist_ok=True)
            for number in range(images):
                draw(sign, random.Random(f"{seed} {domain} {sign} {number}")).save(
                    folder / f"{number:03}.png"
                )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, help="output folder")
    parser.add_argument("--images", type=int, default=40, help="pictures per class and domain")
    options = parser.parse_args()
    make_photos(options.out, options.images)
    print(f"{2 * len(SIGNS) * options.images} pictures in {options.out}")
