"""Finding, checking and reading a benchmark's copy on disk, by its layout.

- `folders`: domain/class/image.
- `lists`: the same, with `domain_train.txt` and `domain_test.txt` that say which images count, and in which split.
- `arrays`: files of images and labels, see `usfan.data.benchmarks.archives`.
"""

import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from usfan.data import folders
from usfan.data.benchmarks.archives import read_images
from usfan.data.benchmarks.benchmark import WHOLE, Benchmark, Copy, Domain
from usfan.data.labels import class_count
from usfan.data.sources import ImageData
from usfan.errors import DataError, printable

LIST_FOLDERS = ("", "splits", "image_list", "lists")
"""Folders below the root in which the list files of a `lists` benchmark may lie."""


def find_base(benchmark: Benchmark, root: Path) -> Path:
    """The folder that the domains lie in: the root, or a folder in it that goes by one of the benchmark's names."""
    if not root.is_dir():
        expected = f"a copy of {benchmark.title}, published at {benchmark.homepage}"
        raise DataError(f"no such folder: {root}; expected {expected}")
    for base in (root, *(root / name for name in benchmark.folders)):
        if any(find_place(benchmark, base, domain) for domain in benchmark.domains):
            return base
    return root


def find_place(benchmark: Benchmark, base: Path, domain: Domain) -> Path | None:
    """The first existing place; of several folders, the first that contains a class of the benchmark."""
    if benchmark.layout == "arrays":
        files = (base / f"{place}{ending}" for place in domain.places for ending in ("", ".gz"))
        return next((file for file in files if file.exists()), None)
    places = [base / place for place in domain.places if (base / place).is_dir()]
    for place in places:
        if not set(benchmark.classes).isdisjoint(os.listdir(place)):
            return place
    return places[0] if places else None


def class_folders(place: Path) -> tuple[list[str], list[str]]:
    """The path and the class of every image below a folder of class folders."""
    paths, names = folders.scan(str(place))
    if names is None:
        where = printable(place, 300)
        raise DataError(
            f"{where} holds images, but no class folders; expected {where}/class/*.jpg"
        )
    return paths, names


def read_split(
    benchmark: Benchmark,
    base: Path,
    domain: Domain,
    place: Path,
    split: str,
) -> tuple[list[str] | np.ndarray, list[str]]:
    """The images of one split, as paths or pixels, and the class of each. No file is decoded."""
    if benchmark.layout == "folders":
        return class_folders(place)
    if benchmark.layout == "lists":
        return _listed(benchmark, base, f"{domain.name}_{split}.txt")
    pixels, labels = read_images(place, split)
    last = len(benchmark.classes) - 1
    if labels.max(initial=0) > last:
        limits = f"labels from 0 to {last} expected"
        raise DataError(f"{domain.name} ({split}) has the label {labels.max()}, {limits}")
    return pixels, [benchmark.classes[label] for label in labels.tolist()]


def _listed(benchmark: Benchmark, base: Path, name: str) -> tuple[list[str], list[str]]:
    """The paths of a published list, and their folders, whose labels must be those of the benchmark."""
    files = (base / folder / name for folder in LIST_FOLDERS)
    file = next((file for file in files if file.is_file()), None)
    if file is None:
        raise DataError(f"the list {name} is missing")
    data = ImageData(file, root=base, classes=benchmark.classes)
    paths = data.paths or []
    names = [Path(path).parent.name for path in paths]
    numbers = [] if data.labels is None else data.labels.tolist()
    for path, class_name, number in zip(paths, names, numbers, strict=False):
        expected = benchmark.classes[number]
        if class_name in benchmark.classes and class_name != expected:
            image = f"{class_name}/{Path(path).name}"
            raise DataError(f"{name}: {image} has the label {number} of the class {expected!r}")
    return paths, names


def check(
    benchmark: Benchmark,
    root: Path,
    *,
    allow_counts: bool = False,
    allow_classes: bool = False,
) -> Copy:
    """Compare the copy of a benchmark below `root` with the catalogue, before anything is run.

    One `DataError` names all that is missing, unexpected or miscounted. `allow_counts` lets other counts pass,
    `allow_classes` missing classes and other counts: the result notes them.
    """
    base = find_base(benchmark, root)
    places: dict[str, Path] = {}
    counts: dict[str, int] = {}
    problems: list[str] = []
    notes: list[str] = []
    lacking = notes if allow_classes else problems
    other_counts = notes if allow_counts or allow_classes else problems
    classes = benchmark.classes
    for domain in benchmark.domains:
        place = find_place(benchmark, base, domain)
        if place is None:
            missing = missing_domain(base, domain)
            if domain.optional:
                notes.append(f"{missing}; it is published at {domain.homepage}")
            else:
                problems.append(missing)
            continue
        images: Counter[str] = Counter()
        for split, count in domain.counts.items():
            try:
                names = read_split(benchmark, base, domain, place, split)[1]
            except DataError as error:
                problems.append(str(error))
                continue
            images.update(names)
            where = domain.name if split == WHOLE else f"{domain.name} ({split})"
            known = {*names, *domain.absent.get(split, ())}
            absent = [name for name in benchmark.classes if name not in known]
            strange = sorted(set(names) - set(benchmark.classes))
            if strange:
                text = (
                    f"{where} has {class_count(strange)} that {benchmark.title} does not have"
                )
                problems.append(f"{text}, and lacks {class_count(absent)} (renamed?)")
            elif absent:
                lacking.append(f"{where} lacks {class_count(absent)}")
            if len(names) != count:
                other_counts.append(f"{where} holds {len(names)} images, {count} expected")
        places[domain.short] = place
        counts[domain.short] = images.total()
        classes = tuple(name for name in classes if name in images)
    if problems:
        source = f"the data set is published at {benchmark.homepage}"
        raise DataError(f"{benchmark.title} at {root}: {'; '.join(problems)}; {source}")
    return Copy(benchmark, base, places, counts, classes, tuple(notes))


def load_domain(
    copy: Copy,
    name: str,
    split: str | None = None,
    *,
    classes: Sequence[str] | None = None,
) -> ImageData:
    """The images of one domain, labelled in the order of the catalogue's class list.

    `split` is `train` or `test` if the domain has them; None is all of it. `classes` keeps only the images of these
    classes and labels them in this order: `benchmark.class_split("open").source` for an open-set source, say.
    """
    benchmark = copy.benchmark
    domain = benchmark.domain(name)
    names: list[str] = []
    parts: list[list[str] | np.ndarray] = []
    for part in domain.counts if split is None else [split]:
        place = copy.places[domain.short]
        images, image_classes = read_split(benchmark, copy.root, domain, place, part)
        parts.append(images)
        names += image_classes
    title = "/".join([benchmark.name, domain.name] + ([] if split is None else [split]))
    all_images = np.concatenate(parts) if len(parts) > 1 else parts[0]
    data = ImageData(all_images, names, classes=benchmark.classes, name=title)
    if classes is None:
        return data
    return data.subset(np.isin(names, classes)).match_classes(classes)


def missing_domain(base: Path, domain: Domain) -> str:
    """The message for a missing domain."""
    text = f"domain {domain.name!r} is missing (looked for {', '.join(domain.places)})"
    if domain.name == "cifar" and (base / "cifar-10-batches-py").exists():
        text += (
            "; cifar-10-batches-py holds pickles, which are never read: get the binary version"
        )
    return text
