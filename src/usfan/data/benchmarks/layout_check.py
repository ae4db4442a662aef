"""Compares a copy on disk with the catalogue, and says in one error all that differs."""

from collections import Counter
from pathlib import Path

from usfan.data.benchmarks.benchmark import WHOLE, Benchmark, Copy
from usfan.data.benchmarks.layouts import find_base, find_place, missing_domain, read_split
from usfan.data.labels import class_count
from usfan.errors import DataError


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
