"""Finding, checking and reading a benchmark's copy on disk, by its layout.

- `folders`: domain/class/image.
- `lists`: the same, with `domain_train.txt` and `domain_test.txt` that say which images count, and in which split.
- `arrays`: files of images and labels, see `usfan.data.benchmarks.archives`.
"""

import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

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


def class_folders(place: Path) -> ImageData:
    """The images below a folder of class folders."""
    data = ImageData(place)
    if data.labels is None:
        where = printable(place, 300)
        raise DataError(
            f"{where} holds images, but no class folders; expected {where}/class/*.jpg"
        )
    return data


def read_split(
    benchmark: Benchmark,
    base: Path,
    domain: Domain,
    place: Path,
    split: str,
) -> ImageData:
    """The images of one split. Its classes are the benchmark's, or the folders that are there. No file is decoded."""
    if benchmark.layout == "folders":
        return class_folders(place)
    if benchmark.layout == "arrays":
        pixels, labels = read_images(place, split)
        name = f"{domain.name} ({split})"
        return ImageData(pixels, labels, classes=benchmark.classes, name=name)
    name = f"{domain.name}_{split}.txt"
    files = (base / folder / name for folder in LIST_FOLDERS)
    file = next((file for file in files if file.is_file()), None)
    if file is None:
        raise DataError(f"the list {name} is missing")
    return ImageData(file, root=base).match_classes(benchmark.classes)


def class_counts(data: ImageData) -> Counter[str]:
    """The number of images of each class."""
    assert data.labels is not None
    classes = data.classes or ()
    return Counter(classes[label] for label in data.labels.tolist())


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
                names = class_counts(read_split(benchmark, base, domain, place, split))
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
            if names.total() != count:
                other_counts.append(f"{where} holds {names.total()} images, {count} expected")
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

    `split` is `train` (the default) or `test` if the domain has them. `classes` keeps only the images of these classes
    and labels them in this order: `benchmark.class_split("open").source` for an open-set source, say.
    """
    benchmark = copy.benchmark
    domain = benchmark.domain(name)
    split = split or benchmark.train_split
    data = read_split(benchmark, copy.root, domain, copy.places[domain.short], split)
    if classes is None:
        return data.match_classes(benchmark.classes)
    data = data.match_classes(classes, open_set=True)
    assert data.labels is not None
    return data.subset(data.labels < len(classes))


def missing_domain(base: Path, domain: Domain) -> str:
    """The message for a missing domain."""
    text = f"domain {domain.name!r} is missing (looked for {', '.join(domain.places)})"
    if domain.name == "cifar" and (base / "cifar-10-batches-py").exists():
        text += (
            "; cifar-10-batches-py holds pickles, which are never read: get the binary version"
        )
    return text
