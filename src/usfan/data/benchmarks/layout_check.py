"""Compares a copy on disk with the catalogue, and says in one error all that differs."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from usfan.data.benchmarks.benchmark import WHOLE, Benchmark, Domain, Found
from usfan.data.benchmarks.layouts import Inspection, find_base, find_place, inspect, missing_domain
from usfan.data.labels import some
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

    A missing domain, a missing or unexpected class and a wrong count are one `DataError` that names them all, and says
    where the data set is published. `domains` limits the check to some of them. `allow_counts` lets other counts pass,
    `allow_classes` missing classes and other counts: the result notes them.
    """
    wanted = benchmark.domains if domains is None else tuple(benchmark.domain(name) for name in domains)
    base = find_base(benchmark, root)
    places: dict[str, Path] = {}
    counts: dict[str, int] = {}
    problems: list[str] = []
    notes: list[str] = []
    classes = list(benchmark.classes)
    for domain in wanted:
        place = find_place(benchmark, base, domain)
        if place is None:
            # A domain asked for by name is wanted, even if the benchmark could be run without it.
            if domain.optional and domains is None:
                notes.append(f"{missing_domain(base, domain)}; it is published at {domain.homepage}")
            else:
                problems.append(missing_domain(base, domain))
            continue
        found = inspect(benchmark, base, domain, place)
        places[domain.short] = place
        counts[domain.short] = sum(sum(split.values()) for split in found.classes.values())
        unexpected, absent = _class_problems(benchmark, domain, found)
        problems += [*found.problems, *unexpected]
        (notes if allow_classes else problems).extend(absent)
        (notes if allow_counts or allow_classes else problems).extend(_count_problems(benchmark, domain, found))
        present = {name for split in found.classes.values() for name in split}
        classes = [name for name in classes if name in present]
    if problems:
        raise DataError(_message(benchmark, root, problems))
    return Found(benchmark, base, places, counts, tuple(classes), tuple(notes))


def _class_problems(benchmark: Benchmark, domain: Domain, found: Inspection) -> tuple[list[str], list[str]]:
    """Classes that do not belong there, each with what is missing instead; and classes that are only missing."""
    unexpected, absent = [], []
    for split, classes in found.classes.items():
        where = _where(domain, split)
        excused = domain.absent.get(split, ())
        gone = [name for name in benchmark.classes if name not in classes and name not in excused]
        strange = sorted(set(classes) - set(benchmark.classes))
        if strange:
            what = "the class" if len(strange) == 1 else f"{len(strange)} classes"
            text = f"{where} has {what} {some(strange)} that {benchmark.title} does not have"
            unexpected.append(f"{text}, and lacks {some(gone)} (renamed?)" if gone else text)
        elif gone:
            what = "the class" if len(gone) == 1 else f"{len(gone)} of {len(benchmark.classes)} classes:"
            absent.append(f"{where} lacks {what} {some(gone)}")
    return unexpected, absent


def _count_problems(benchmark: Benchmark, domain: Domain, found: Inspection) -> list[str]:
    problems = []
    for split, expected in domain.counts.items():
        classes: Mapping[str, int] | None = found.classes.get(split)
        count = sum(classes.values()) if classes is not None else expected
        if count != expected:
            problems.append(f"{_where(domain, split)} holds {count} images, {expected} expected")
    return problems


def _where(domain: Domain, split: str) -> str:
    return domain.name if split == WHOLE else f"{domain.name} ({split})"


def _message(benchmark: Benchmark, root: Path, problems: Sequence[str]) -> str:
    shown = "; ".join(problems[:MOST])
    more = f"; and {len(problems) - MOST} more problems" if len(problems) > MOST else ""
    return f"{benchmark.title} at {root}: {shown}{more}; the data set is published at {benchmark.homepage}"
