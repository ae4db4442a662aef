"""Compares a copy on disk with the catalogue, and says in one error all that differs."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from usfan.data.benchmarks.benchmark import WHOLE, Benchmark, Domain, Found
from usfan.data.benchmarks.layouts import find_base, find_place, missing_domain, read_split
from usfan.data.labels import class_count
from usfan.errors import DataError

MOST = 8
"""Problems that are listed; the others are counted."""


def check(
    benchmark: Benchmark,
    root: Path,
    *,
    domains: Sequence[str] | None = None,
    allow_counts: bool = False,
    allow_classes: bool = False,
) -> Found:
    """Compare the copy of a benchmark below `root` with the catalogue, before anything is run.

    One `DataError` names all that is missing, unexpected or miscounted. `domains` limits the check to some of them.
    `allow_counts` lets other counts pass, `allow_classes` missing classes and other counts: the result notes them.
    """
    expected = benchmark.domains
    if domains is not None:
        expected = tuple(benchmark.domain(name) for name in domains)
    base = find_base(benchmark, root)
    places: dict[str, Path] = {}
    counts: dict[str, int] = {}
    problems: list[str] = []
    notes: list[str] = []
    lacking = notes if allow_classes else problems
    other_counts = notes if allow_counts or allow_classes else problems
    classes = benchmark.classes
    for domain in expected:
        place = find_place(benchmark, base, domain)
        if place is None:
            missing = missing_domain(base, domain)
            # A domain asked for by name is needed, even if the benchmark could be run without it.
            if domain.optional and domains is None:
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
            absent = absent_classes(benchmark, domain, split, set(names))
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
        raise DataError(f"{benchmark.title} at {root}: {list_problems(benchmark, problems)}")
    return Found(benchmark, base, places, counts, classes, tuple(notes))


def absent_classes(
    benchmark: Benchmark, domain: Domain, split: str, names: set[str]
) -> list[str]:
    """The classes that a split of a domain should have, and does not."""
    known = names.union(domain.absent.get(split, ()))
    return [name for name in benchmark.classes if name not in known]


def list_problems(benchmark: Benchmark, problems: Sequence[str]) -> str:
    """The first problems, the number of the others, and where the data set is published."""
    listed = "; ".join(problems[:MOST])
    if len(problems) > MOST:
        listed += f"; and {len(problems) - MOST} more problems"
    return f"{listed}; the data set is published at {benchmark.homepage}"
