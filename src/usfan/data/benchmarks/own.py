"""A user's own domains as a benchmark: a folder of domain folders, each with one folder of images per class."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import permutations
from pathlib import Path

from usfan.data import folders
from usfan.data.benchmarks.benchmark import WHOLE, Benchmark, Domain, Found
from usfan.data.decoding.decode import SUFFIXES
from usfan.data.labels import name_key, some
from usfan.errors import DataError, shown

EXPECTED = "expected ROOT/domain/class/*.jpg, with two or more domains"
LONGEST = 60
"""Letters of a domain's name: two of them are in the name of a file."""


def own_domains(root: str | Path) -> Found:
    """What lies below `root`. A folder without images is no domain; nothing is decoded."""
    root = Path(root)
    if not root.is_dir():
        raise DataError(f"no such folder: {shown(root, 300)}; {EXPECTED}")
    inner = sorted((p for p in root.iterdir() if not p.name.startswith((".", "__"))), key=lambda p: name_key(p.name))
    if any(p.suffix.lower() in SUFFIXES for p in inner if not p.is_dir()):
        raise DataError(f"{shown(root, 300)} holds images itself; {EXPECTED}")
    held = {place.name: counts for place in inner if place.is_dir() and (counts := class_counts(place, root))}
    if len(held) < 2:
        what = f"one domain ({shown(next(iter(held)), 80)})" if held else "no folder with images"
        raise DataError(f"{shown(root, 300)} holds {what}; {EXPECTED}")
    check_names(held)
    classes = tuple(sorted({name for counts in held.values() for name in counts}, key=name_key))
    domains = tuple(Domain(name, name, (name,), {WHOLE: counts.total()}) for name, counts in held.items())
    title = shown(root.resolve().name, 80) or "study"
    pairs = tuple(permutations(held, 2))
    benchmark = Benchmark(title, title, "folders", domains, classes, pairs, "accuracy", recipe=None, homepage="")
    return Found(
        benchmark,
        root,
        places={name: root / name for name in held},
        counts={name: counts.total() for name, counts in held.items()},
        classes=classes,
        held={name: tuple(c for c in classes if c in counts) for name, counts in held.items()},
    )


def class_counts(place: Path, root: Path) -> Counter[str]:
    """Images of each class of a domain; none if the folder has no images."""
    if not folders.holds_images(str(place)):
        return Counter()
    names = folders.scan(str(place)).names
    if names is None:
        where = f"{shown(root.name, 80)}/{shown(place.name, 80)}"
        raise DataError(f"{where} holds images, but no class folders; {EXPECTED}")
    return Counter(names)


def check_names(names: Iterable[str]) -> None:
    """Names of domains stand in tables and in the names of files, where A-B is the task from A to B."""
    for name in names:
        if "→" in name or not name.isprintable() or len(name) > LONGEST:
            raise DataError(
                f"the domain folder '{shown(name, 80)}' cannot name a column of a table: rename it "
                f"(up to {LONGEST} printable characters, no arrow)"
            )
    tasks = Counter(f"{source}-{target}" for source, target in permutations(names, 2))
    for task, times in tasks.items():
        if times > 1:
            raise DataError(f"{task} can mean {times} pairs of these domain folders: rename one of them")


def fitting(found: Found, pairs: Sequence[tuple[str, str]], setting: str, allow_classes: bool) -> Found:
    """The same, after a check that the classes of each pair fit the setting. `allow_classes` leaves out classes that
    not all of these domains have, in closed set."""
    used = {name: found.held[name] for name in dict.fromkeys(name for pair in pairs for name in pair)}
    if setting == "closed":
        shared = [c for c in found.classes if all(c in classes for classes in used.values())]
        if not allow_classes:
            for name, classes in used.items():
                lacking = [c for c in found.classes if c not in classes and any(c in o for o in used.values())]
                if lacking:
                    raise DataError(
                        f"{shown(name, 80)} lacks {len(lacking)} of the classes of the other domains "
                        f"({some(lacking)}): pass --allow-classes to run on the {len(shared)} that all have, "
                        "or --partial-set or --open-set"
                    )
        kept = tuple(shared)
        enough(kept, "all domains have")
        return dataclasses.replace(found, classes=kept, held=dict.fromkeys(found.held, kept))
    for source, target in pairs:
        enough(used[source], f"{shown(source, 80)} has")
        common = set(used[source]) & set(used[target])
        new = [c for c in used[target] if c not in used[source]]
        task = f"{shown(source, 80)}-{shown(target, 80)}"
        if not common:
            raise DataError(f"{task}: the two domains have no class in common")
        if new and setting == "partial":
            raise DataError(f"{task}: the target has {some(new)} that the source lacks; --partial-set expects none")
        if not new and setting == "open":
            raise DataError(
                f"{task}: the target has no class that the source lacks, as --open-set expects; see --pairs"
            )
    return found


def enough(classes: Sequence[str], whose: str) -> None:
    if len(classes) < 2:
        raise DataError(f"{whose} {len(classes)} class{'' if len(classes) == 1 else 'es'}: at least 2 are needed")
