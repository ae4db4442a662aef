"""A user's own domains as a benchmark: a folder of domain folders, each with one folder of images per class."""

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import permutations
from pathlib import Path

from usfan.data import folders
from usfan.data.benchmarks.benchmark import WHOLE, Benchmark, Copy, Domain
from usfan.data.benchmarks.layouts import class_counts, class_folders
from usfan.data.decoding.decode import is_image_name
from usfan.data.labels import name_key, some
from usfan.errors import DataError, option, printable

EXPECTED = "expected ROOT/domain/class/*.jpg, with two or more domains"
LONGEST = 60
"""Letters of a domain's name: two of them are in the name of a file."""


def own_domains(root: str | Path) -> Copy:
    """The domains below `root`. A folder without images is no domain; nothing is decoded."""
    root = Path(root)
    where = printable(root, 300)
    if not root.is_dir():
        raise DataError(f"no such folder: {where}; {EXPECTED}")
    counts: dict[str, Counter[str]] = {}
    for place in sorted(root.iterdir(), key=lambda place: name_key(place.name)):
        if place.name.startswith((".", "__")):
            continue
        if place.is_dir():
            with contextlib.suppress(folders.NoImages):
                counts[place.name] = class_counts(class_folders(place))
        elif is_image_name(place.name):
            raise DataError(f"{where} holds images itself; {EXPECTED}")
    if len(counts) < 2:
        content = printable(", ".join(counts), 80) or "no folder"
        raise DataError(f"{where} holds images in {content}; {EXPECTED}")
    check_names(counts)
    totals = {name: images.total() for name, images in counts.items()}
    classes = tuple(sorted(set().union(*counts.values()), key=name_key))
    title = printable(root.resolve().name, 80) or "study"
    benchmark = Benchmark(
        name=title,
        title=title,
        layout="folders",
        domains=tuple(
            Domain(name, name, (name,), {WHOLE: total}) for name, total in totals.items()
        ),
        classes=classes,
        pairs=tuple(permutations(counts, 2)),
        metric="accuracy",
        recipe=None,
        homepage="",
    )
    held = {name: tuple(c for c in classes if c in images) for name, images in counts.items()}
    places = {name: root / name for name in counts}
    return Copy(benchmark, root, places, totals, classes, held=held)


def check_names(names: Iterable[str]) -> None:
    """Names of domains stand in tables and in the names of files, where A-B is the task from A to B."""
    for name in names:
        if "→" in name or not name.isprintable() or len(name) > LONGEST:
            raise DataError(
                f"the domain folder '{printable(name, 80)}' cannot name a column of a table: rename it "
                f"(up to {LONGEST} printable characters, no arrow)"
            )
    tasks = Counter(f"{source}-{target}" for source, target in permutations(names, 2))
    for task, times in tasks.items():
        if times > 1:
            raise DataError(
                f"{task} can mean {times} pairs of these domain folders: rename one of them"
            )


def fitting(
    domains: Copy,
    pairs: Sequence[tuple[str, str]],
    setting: str,
    allow_classes: bool,
) -> Copy:
    """The same domains, after a check that the classes of each pair fit the setting. `allow_classes` leaves out
    classes that not all of these domains have, in closed set."""
    if setting == "closed":
        domains = _closed(domains, pairs, allow_classes)
    for source, target in pairs:
        source_classes = domains.held[source]
        target_classes = domains.held[target]
        new = [name for name in target_classes if name not in source_classes]
        problem = None
        if len(source_classes) < 2:
            problem = f"at least 2 classes are needed, not {len(source_classes)}"
        elif len(new) == len(target_classes):
            problem = "the two domains have no class in common"
        elif new and setting == "partial":
            problem = f"the target has {some(new)} that the source lacks; {option('partial_set', True)} expects none"
        elif not new and setting == "open":
            problem = (
                f"the target has no class that the source lacks, as {option('open_set', True)} expects; "
                f"see {option('pairs')}"
            )
        if problem is not None:
            raise DataError(f"{printable(source, 80)}-{printable(target, 80)}: {problem}")
    return domains


def _closed(
    domains: Copy,
    pairs: Sequence[tuple[str, str]],
    allow_classes: bool,
) -> Copy:
    held = {name: domains.held[name] for pair in pairs for name in pair}
    common = set(domains.classes).intersection(*held.values())
    union = set().union(*held.values())
    for name, classes in held.items():
        lacking = sorted(union.difference(classes), key=name_key)
        if lacking and not allow_classes:
            raise DataError(
                f"{printable(name, 80)} lacks {len(lacking)} of the classes of the other domains "
                f"({some(lacking)}): pass {option('allow_classes', True)} to run on the {len(common)} that all have, "
                f"or {option('partial_set', True)} or {option('open_set', True)}"
            )
    classes = tuple(name for name in domains.classes if name in common)
    return dataclasses.replace(
        domains, classes=classes, held=dict.fromkeys(domains.held, classes)
    )
