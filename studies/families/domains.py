"""Domains of every family as features, computed once and kept in a cache folder.

    python -m studies.families.domains CACHE --data ROOT --families office31 pacs lines leaf digits shifts emoji

ROOT holds office31, pacs, leaf and emoji as domain/class/*, and usps.npz; `studies.emoji` draws the emoji. MNIST and
the UCI digits come with packages that the demo needs. One file per domain, CACHE/domains/FAMILY/DOMAIN.safetensors:

    crop     N × 1280   float16; test views (256 → 224): the source model's input
    whole    N × 1280   float16; whole images (256): the witness's input
    labels   N          positions in `classes`

or, for digits, `images` (N × S × S, uint8) instead of features. Class names and file names are in the file's header.
CACHE/READY gains a line when a family is complete. Domains that the cache has are not computed again.

The line drawings are: grey, Gaussian blur 1.2, PIL's FIND_EDGES, black where above 22 (photo, art_painting) or 28
(cartoon). Drawings and originals are the same 108 images per class, chosen at random with seed 0.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageFilter
from safetensors import safe_open
from safetensors.torch import save_file
from studies.image_shifts import SHIFTS
from torch import Tensor

import usfan
from usfan.adaptation.witness import whole
from usfan.config import RuntimeConfig
from usfan.engine.features import BackboneAlone, features_of
from usfan.engine.passes import engine_store
from usfan.engine.runtime import start_runtime
from usfan.models.backbones import create_backbone
from usfan.study.digits import DIGITS, load_mnist5k, load_uci

NETWORK = "tf_efficientnet_lite0"
FAMILIES = (
    "office31",
    "shifts",
    "pacs",
    "pacs40",
    "lines",
    "leaf",
    "emoji",
    "digits",
    "inverted",
    "same",
)
OFFICE = ("amazon", "dslr", "webcam")
PACS = ("photo", "cartoon", "art_painting")
LINES = (
    ("cartoon-lines", "photo"),
    ("cartoon-lines", "art_painting"),
    ("photo", "cartoon-lines"),
    ("photo", "art_painting-lines"),
    ("photo-lines", "photo"),
    ("photo-lines", "art_painting"),
)
EMOJI = """noto-twemoji twemoji-noto noto-openmoji openmoji-noto openmoji-twemoji noto-line openmoji-line noto-flat
flat-noto twemoji-gradient gradient-openmoji noto-contrast contrast-line flat-contrast"""
DIGIT_PAIRS = (("mnist", "uci"), ("uci", "mnist"), ("mnist", "usps"), ("usps", "mnist"))
INVERTED = (("mnist", "mnist-inverted"), ("uci", "uci-inverted"), ("usps", "usps-inverted"))
SAME = ("amazon", "webcam", "photo", "cartoon")
"""Domains that a source model is tested on itself: no shift at all."""
SIDE = 256
LINES_PER_CLASS = 108
BLACK_ABOVE = {"photo": 22, "art_painting": 22, "cartoon": 28}
"""Edge strength above which a pixel of a line drawing is black."""


@dataclass(frozen=True, eq=False)
class Domain:
    """The N images of a domain."""

    labels: Tensor
    """N positions in `classes`."""
    classes: tuple[str, ...]
    files: tuple[str, ...]
    """Class and name of each image's file."""
    crop: Tensor | None = None
    """N × F features of test views."""
    whole: Tensor | None = None
    """N × F features of whole images."""
    images: Tensor | None = None
    """N × S × S grey images, for families that train on images."""

    def rows(self, rows: Tensor) -> Domain:
        """The images at `rows`."""
        pick = {
            name: None if value is None else value[rows]
            for name, value in (
                ("crop", self.crop),
                ("whole", self.whole),
                ("images", self.images),
            )
        }
        files = tuple(self.files[row] for row in rows.tolist())
        return Domain(self.labels[rows], self.classes, files, **pick)


def pairs(family: str) -> tuple[tuple[str, str], ...]:
    """Source and target domains of the tasks of a family."""
    if family == "office31":
        return tuple(itertools.permutations(OFFICE, 2))
    if family == "shifts":
        tasks = itertools.product(SHIFTS, itertools.permutations(OFFICE, 2))
        return tuple((source, f"{target}-{shift}") for shift, (source, target) in tasks)
    if family in ("pacs", "pacs40"):
        return tuple(itertools.permutations(PACS, 2))
    if family == "lines":
        return LINES
    if family == "leaf":
        return (("lab", "field"),)
    if family == "emoji":
        return tuple((task.split("-")[0], task.split("-")[1]) for task in EMOJI.split())
    if family == "digits":
        return DIGIT_PAIRS
    if family == "inverted":
        return INVERTED
    if family == "same":
        return tuple((name, name) for name in SAME)
    raise ValueError(f"no family {family!r}; there are {', '.join(FAMILIES)}")


def stored_as(family: str, domain: str) -> tuple[str, str]:
    """The family under whose name the cache holds a domain: families share their photographs."""
    if family == "pacs40":
        return "pacs", domain
    if family == "same":
        return "office31" if domain in OFFICE else "pacs", domain
    if family == "inverted" and "-" not in domain:
        return "digits", domain
    if family == "shifts" and "-" not in domain:
        return "office31", domain
    return family, domain


def domain_file(cache: Path, family: str, domain: str) -> Path:
    """The cache's file of a domain."""
    folder, name = stored_as(family, domain)
    return cache / "domains" / folder / f"{name}.safetensors"


def load_domain(cache: Path, family: str, domain: str) -> Domain:
    """A domain of the cache, features as float32."""
    with safe_open(domain_file(cache, family, domain), framework="pt") as stored:
        header = stored.metadata()
        tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
    for name in ("crop", "whole"):
        if name in tensors:
            tensors[name] = tensors[name].float()
    classes = tuple(json.loads(header["classes"]))
    return Domain(classes=classes, files=tuple(json.loads(header["files"])), **tensors)


def save_domain(file: Path, domain: Domain) -> None:
    tensors = {"labels": domain.labels}
    for name in ("crop", "whole"):
        features = getattr(domain, name)
        if features is not None:
            tensors[name] = features.half().contiguous()
    if domain.images is not None:
        tensors["images"] = domain.images.contiguous()
    header = {"classes": json.dumps(domain.classes), "files": json.dumps(domain.files)}
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_suffix(".part")
    save_file(tensors, part, metadata=header)
    part.replace(file)


class FrozenNetwork:
    """EfficientNet-Lite0 and the package's pass through it."""

    def __init__(self) -> None:
        self.runtime = start_runtime(RuntimeConfig(device="cpu"))
        self.backbone = create_backbone(NETWORK, "offline")

    def domain(self, data: usfan.ImageData, files: Iterable[str]) -> Domain:
        """Features of these images; `files` names them."""
        store = engine_store(data, self.backbone.spec, self.runtime)
        assert store.labels is not None
        assert store.classes is not None
        alone = BackboneAlone(self.backbone.module)
        features = []
        for spec in (self.backbone.spec, whole(self.backbone.spec, self.backbone.module)):
            features.append(features_of(alone, store, spec, self.runtime).values)
        names = list(files)
        names = [names[position] for position in store.positions.tolist()]
        return Domain(store.labels, store.classes, tuple(names), *features)


def image_files(root: Path) -> list[Path]:
    """Files of class folders, in order."""
    return sorted(file for file in root.glob("*/*") if file.is_file())


def file_names(files: Iterable[Path]) -> list[str]:
    return [f"{file.parent.name}/{file.name}" for file in files]


def of_files(network: FrozenNetwork, files: list[Path]) -> Domain:
    labels = [file.parent.name for file in files]
    return network.domain(usfan.ImageData(files, labels=labels), file_names(files))


def of_pictures(
    network: FrozenNetwork, pictures: Iterable[Image.Image], files: list[Path]
) -> Domain:
    """Features of pictures that were made of these files, all of one size."""
    array = np.stack([np.asarray(picture) for picture in pictures])
    classes = sorted({file.parent.name for file in files})
    labels = [classes.index(file.parent.name) for file in files]
    data = usfan.ImageData(array, labels=labels, classes=classes)
    return network.domain(data, file_names(files))


def line_drawing(image: Image.Image, threshold: int) -> Image.Image:
    """Black lines on white."""
    grey = image.convert("L").filter(ImageFilter.GaussianBlur(1.2))
    edges = np.asarray(grey.filter(ImageFilter.FIND_EDGES))
    drawn = np.where(edges > threshold, 0, 255).astype(np.uint8)
    return Image.fromarray(drawn).convert("RGB")


def per_class(groups: list[str], count: int) -> list[int]:
    """Positions of `count` random members of each group, seed 0."""
    generator = np.random.default_rng(0)
    chosen = []
    for group in sorted(set(groups)):
        members = [i for i, name in enumerate(groups) if name == group]
        chosen += [members[i] for i in sorted(generator.permutation(len(members))[:count])]
    return chosen


def shifted(file: Path, shift: str, number: int) -> Image.Image:
    image = Image.open(file).convert("RGB")
    return SHIFTS[shift](image.resize((SIDE, SIDE), Image.Resampling.BICUBIC), number)


def compute(network: FrozenNetwork, family: str, name: str, data: Path, cache: Path) -> Domain:
    """The domain of a family of photographs or drawings."""
    base, _, change = name.partition("-")
    folder = {"lines": "pacs", "shifts": "office31"}.get(family, family)
    files = image_files(data / folder / base)
    if family == "shifts":
        pictures = (shifted(file, change, number) for number, file in enumerate(files))
        return of_pictures(network, pictures, files)
    if family != "lines":
        return of_files(network, files)
    if change:
        files = [
            files[i] for i in per_class([file.parent.name for file in files], LINES_PER_CLASS)
        ]
        pictures = (
            line_drawing(Image.open(file).convert("RGB"), BLACK_ABOVE[base]) for file in files
        )
        return of_pictures(network, pictures, files)
    original = load_domain(cache, "pacs", name)
    groups = [original.classes[label] for label in original.labels.tolist()]
    return original.rows(torch.tensor(per_class(groups, LINES_PER_CLASS)))


def digits(name: str, data: Path) -> Domain:
    """MNIST (the demo's 5,000), USPS (7,291) or UCI digits (1,797) as grey images of their own size, also inverted."""
    if name.endswith("-inverted"):
        domain = digits(name.removesuffix("-inverted"), data)
        assert domain.images is not None
        return replace(domain, images=255 - domain.images)
    if name == "usps":
        arrays = np.load(data / "usps.npz")
        pixels = torch.from_numpy(arrays["x_train"])
        labels = torch.from_numpy(arrays["y_train"]).long()
    else:
        stored = {"mnist": load_mnist5k, "uci": load_uci}[name]()
        assert stored.labels is not None
        labels = stored.labels
        pixels = torch.stack([stored.load(i, channels=1)[0] for i in range(len(stored))])
    files = tuple(f"{label}/{number}" for number, label in enumerate(labels.tolist()))
    return Domain(labels, DIGITS, files, images=pixels)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cache", type=Path)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--families", nargs="+", choices=FAMILIES, required=True)
    options = parser.parse_args()
    network: FrozenNetwork | None = None
    for family in options.families:
        started = time.perf_counter()
        names = list(dict.fromkeys(itertools.chain.from_iterable(pairs(family))))
        total = 0
        for name in names:
            file = domain_file(options.cache, family, name)
            if not file.exists():
                if family in ("digits", "inverted"):
                    domain = digits(name, options.data)
                else:
                    network = network or FrozenNetwork()
                    folder, _ = stored_as(family, name)
                    domain = compute(network, folder, name, options.data, options.cache)
                save_domain(file, domain)
                print(family, name, len(domain.labels), flush=True)
            total += 1
        seconds = time.perf_counter() - started
        with (options.cache / "READY").open("a") as ready:
            ready.write(f"{family}: {total} domains, {seconds:.0f} s\n")


if __name__ == "__main__":
    main()
