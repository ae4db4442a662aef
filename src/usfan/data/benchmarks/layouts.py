"""Finding, inspecting and loading a benchmark's copy on disk, by its layout.

- `folders`: domain/class/image.
- `lists`: the same, with `domain_train.txt` and `domain_test.txt` that say which images count, and in which split.
- `arrays`: files of images and labels, see `usfan.data.benchmarks.archives`.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from usfan.data import folders, lists
from usfan.data.benchmarks.archives import read_images, read_labels
from usfan.data.benchmarks.benchmark import WHOLE, Benchmark, Domain
from usfan.data.labels import some
from usfan.data.sources import ImageData
from usfan.errors import ConfigError, DataError

LIST_FOLDERS = ("", "splits", "image_list", "lists")
"""Where the list files of a `lists` benchmark may lie, below its root."""


@dataclass(frozen=True)
class Inspection:
    """The content of a domain's folder or file."""

    classes: Mapping[str, Mapping[str, int]]
    """Split → class → images."""
    problems: tuple[str, ...] = ()
    """Problems other than classes and counts."""


def find_base(benchmark: Benchmark, root: Path) -> Path:
    """The folder that the domains lie in: the root, or a folder in it that goes by one of the benchmark's names."""
    if not root.is_dir():
        raise DataError(
            f"no such folder: {root}; expected a copy of {benchmark.title}, published at {benchmark.homepage}"
        )
    for base in (root, *(root / name for name in benchmark.folders)):
        if any(find_place(benchmark, base, domain) for domain in benchmark.domains):
            return base
    return root


def find_place(benchmark: Benchmark, base: Path, domain: Domain) -> Path | None:
    """The first existing place; of several folders, the first that contains a class of the benchmark."""
    if benchmark.layout == "arrays":
        tried = (base / f"{place}{ending}" for place in domain.places for ending in ("", ".gz"))
        return next((path for path in tried if path.exists()), None)
    there = [base / place for place in domain.places if (base / place).is_dir()]
    known = set(benchmark.classes)
    for place in there:
        if any(entry.name in known for entry in place.iterdir()):
            return place
    return there[0] if there else None


def find_list(base: Path, domain: Domain, split: str) -> Path | None:
    """The list file of one split."""
    tried = (base / folder / f"{domain.name}_{split}.txt" for folder in LIST_FOLDERS)
    return next((path for path in tried if path.is_file()), None)


def inspect(benchmark: Benchmark, base: Path, domain: Domain, place: Path) -> Inspection:
    """Count the images of each class in each split. Nothing is decoded."""
    if benchmark.layout == "arrays":
        return _inspect_arrays(benchmark, domain, place)
    if benchmark.layout == "lists":
        return _inspect_lists(benchmark, base, domain)
    found = folders.scan(str(place))
    if found.names is None:
        return Inspection({WHOLE: {}}, (f"{place} holds images, but no class folders",))
    return Inspection({WHOLE: Counter(found.names)})


def _inspect_lists(benchmark: Benchmark, base: Path, domain: Domain) -> Inspection:
    counts, problems = {}, []
    for split in domain.splits:
        file = find_list(base, domain, split)
        if file is None:
            problems.append(f"the list {domain.name}_{split}.txt is missing beside the folder {domain.name}")
            continue
        entries = lists.parse(lists.read_text(str(file)))
        counts[split] = Counter(Path(entry.path).parent.name for entry in entries)
        problems += _list_problems(benchmark, base, file, entries)
    return Inspection(counts, tuple(problems))


def _list_problems(benchmark: Benchmark, base: Path, file: Path, entries: Sequence[lists.Entry]) -> list[str]:
    """The first line whose label is not that of its folder, and the first whose file is missing."""
    numbers = {name: str(label) for label, name in enumerate(benchmark.classes)}
    problems = []
    for entry in entries:
        name = Path(entry.path).parent.name
        if name in numbers and entry.label != numbers[name]:
            found = f"class {name!r} has the label {entry.label}, {numbers[name]} expected"
            problems.append(f"{file.name}, line {entry.line}: {found}")
            break
    # One listing per folder: asking for half a million files one by one takes minutes on a network disk.
    listings: dict[Path, set[str]] = {}
    missing = []
    for entry in entries:
        path = base / entry.path
        if path.parent not in listings:
            listings[path.parent] = {item.name for item in path.parent.iterdir()} if path.parent.is_dir() else set()
        if path.name not in listings[path.parent]:
            missing.append(entry)
    if missing:
        problems.append(f"{file.name} names {len(missing)} files that are missing, such as {missing[0].path}")
    return problems


def _inspect_arrays(benchmark: Benchmark, domain: Domain, place: Path) -> Inspection:
    counts, problems = {}, []
    for split in domain.splits:
        labels = read_labels(place, split)
        wrong = labels[labels >= len(benchmark.classes)]
        if wrong.size:
            most = len(benchmark.classes) - 1
            problems.append(f"{domain.name} ({split}) has the label {wrong[0]}, labels from 0 to {most} expected")
        values, times = np.unique(labels[(labels >= 0) & (labels < len(benchmark.classes))], return_counts=True)
        counts[split] = {benchmark.classes[value]: int(n) for value, n in zip(values, times, strict=True)}
    return Inspection(counts, tuple(problems))


def load_domain(
    benchmark: Benchmark, root: Path, name: str, split: str | None = None, *, classes: Sequence[str] | None = None
) -> ImageData:
    """The images of one domain, labelled in the order of the catalogue's class list.

    `split` is `train` or `test` if the domain has them; None is all of it. `classes` keeps only the images of these
    classes and labels them in this order: `benchmark.class_split("open").source` for an open-set source, say.
    """
    domain = benchmark.domain(name)
    splits = domain.splits if split is None or split == WHOLE else (split,)
    if not set(splits) <= set(domain.splits):
        raise ConfigError(f"{domain.name} of {benchmark.title} has no split {split!r}, but {', '.join(domain.splits)}")
    kept = benchmark.classes if classes is None else tuple(classes)
    unknown = [name for name in kept if name not in benchmark.classes]
    if unknown:
        raise ConfigError(f"{benchmark.title} has no class {some(unknown)}")
    base = find_base(benchmark, root)
    place = find_place(benchmark, base, domain)
    if place is None:
        where = domain.homepage or benchmark.homepage
        raise DataError(f"{benchmark.title} at {root}: {missing_domain(base, domain)}; it is published at {where}")
    title = "/".join((benchmark.name, domain.name, *(() if split is None else (split,))))
    if benchmark.layout == "arrays":
        return _load_arrays(benchmark, place, splits, kept, title)
    paths, names = _files(benchmark, base, domain, place, splits)
    chosen = [(path, name) for path, name in zip(paths, names, strict=True) if name in kept]
    if not chosen:
        raise DataError(f"{title} holds no image of the {len(kept)} classes asked for ({some(kept)})")
    return ImageData([path for path, _ in chosen], labels=[name for _, name in chosen], classes=kept, name=title)


def _files(
    benchmark: Benchmark, base: Path, domain: Domain, place: Path, splits: Sequence[str]
) -> tuple[list[str], list[str]]:
    """Paths and class names of a domain that lies in folders."""
    if benchmark.layout == "folders":
        found = folders.scan(str(place))
        if found.names is None:
            raise DataError(f"{place} holds images, but no class folders")
        return found.paths, found.names
    paths: list[str] = []
    for split in splits:
        file = find_list(base, domain, split)
        if file is None:
            raise DataError(f"the list {domain.name}_{split}.txt is missing in {base}")
        paths += lists.read(str(file), str(base), benchmark.classes)[0]
    return paths, [Path(path).parent.name for path in paths]


def _load_arrays(
    benchmark: Benchmark, place: Path, splits: Sequence[str], kept: Sequence[str], title: str
) -> ImageData:
    parts = [read_images(place, split) for split in splits]
    pixels = np.concatenate([part for part, _ in parts]) if len(parts) > 1 else parts[0][0]
    labels = np.concatenate([part for _, part in parts])
    names = np.array(benchmark.classes)[labels]
    if tuple(kept) != benchmark.classes:
        chosen = np.isin(names, kept)
        pixels, names = pixels[chosen], names[chosen]
    return ImageData(pixels, labels=names, classes=kept, name=title)


def missing_domain(base: Path, domain: Domain) -> str:
    """The message for a missing domain."""
    text = f"domain {domain.name!r} is missing (looked for {', '.join(domain.places)})"
    if domain.name == "cifar" and (base / "cifar-10-batches-py").exists():
        text += "; cifar-10-batches-py holds pickles, which are never read: get the binary version"
    return text
