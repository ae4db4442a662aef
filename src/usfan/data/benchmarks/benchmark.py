"""A named benchmark: its domains, classes, counts, pairs, and the recipe it is run with."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from usfan.errors import ConfigError

WHOLE = "all"
"""The split of a domain that is not divided into train and test."""


@dataclass(frozen=True)
class Domain:
    """One domain of a benchmark."""

    short: str
    """The letter used in task names: `A` in `A→W`."""
    name: str
    places: Sequence[str]
    """Paths below the root that are tried in this order. Folders of classes; or, for data that is published as arrays,
    the folder of its files or the training file, whose name tells the format."""
    counts: Mapping[str, int]
    """Images by split: `all`, or `train` and `test`."""
    absent: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Classes that the published split does not hold."""
    homepage: str = ""
    """Page of this domain, if it is not published on the benchmark's page."""
    optional: bool = False
    """Whether the benchmark can be run without it; its pairs are left out then."""


@dataclass(frozen=True)
class ClassSplit:
    """Which classes the source and the target hold, if they differ. Names, in the order of the benchmark's list."""

    source: tuple[str, ...]
    target: tuple[str, ...]


@dataclass(frozen=True)
class Recipe:
    """The settings of a benchmark in the paper and in SHOT's recipe."""

    train: Mapping[str, Any]
    """Fields of `TrainConfig`."""
    adapt: Mapping[str, Any]
    """Fields of `AdaptConfig`, and settings of methods."""
    seeds: tuple[int, ...] = (2019, 2020, 2021)
    special: frozenset[str] = frozenset()
    """Names of the settings that this benchmark has for itself: a preset does not change them."""

    def under(self, preset: Mapping[str, Any], stage: Mapping[str, Any]) -> dict[str, Any]:
        """`train` or `adapt` without the settings that a preset has."""
        names = stage.keys() - (preset.keys() - self.special)
        return {name: stage[name] for name in stage if name in names}


DEFAULTS = Recipe({}, {})
"""For a user's own domains."""


@dataclass(frozen=True)
class Benchmark:
    """One named benchmark."""

    name: str
    """As typed after `usfan reproduce`."""
    title: str
    layout: str
    """`folders` (domain/class/image), `lists` (`domain_train.txt` beside such folders) or `arrays`."""
    domains: tuple[Domain, ...]
    classes: tuple[str, ...]
    """Label k is `classes[k]`, also in published list files."""
    pairs: tuple[tuple[str, str], ...]
    """Tasks as (source, target), by the domains' short names."""
    metric: str
    """`accuracy` or `mean_class_accuracy`."""
    recipe: Recipe | None
    """None for a user's own domains: the settings are the defaults of `usfan train` and `usfan adapt`."""
    homepage: str
    folders: Sequence[str] = ()
    """Names of folders that the domains may lie in, below the root that was given."""
    recipes: Mapping[str, Recipe] = field(default_factory=dict)
    """Source (short) → recipe, for the sources that have their own."""
    class_splits: Mapping[str, ClassSplit] = field(default_factory=dict)
    """Setting (`closed`, `open`, `partial`, `universal`) → the classes of source and target, where they are published.
    Universal: 10 shared, 10 only in the source, 11 new on Office-31; 10/5/50 on Office-Home; 6/3/3 on VisDA-C."""

    @property
    def train_split(self) -> str:
        """The split that a source model is trained on, and that a target is adapted on."""
        return next(iter(self.domains[0].counts))

    @property
    def test_split(self) -> str:
        """The split of the target that accuracy is measured on; without a test split, the images adapted on."""
        return list(self.domains[0].counts)[-1]

    @property
    def tasks(self) -> tuple[str, ...]:
        """Task names, as in the paper's tables."""
        return tuple(f"{source}→{target}" for source, target in self.pairs)

    def recipe_for(self, source: str) -> Recipe:
        """The recipe of all tasks from this source."""
        return self.recipes.get(self.domain(source).short, self.recipe or DEFAULTS)

    def domain(self, name: str) -> Domain:
        """The domain with this short or long name."""
        for domain in self.domains:
            if name in (domain.short, domain.name):
                return domain
        known = ", ".join(f"{domain.name} ({domain.short})" for domain in self.domains)
        raise ConfigError(f"{self.title} has no domain {name!r}; its domains are {known}")

    def class_split(self, setting: str) -> ClassSplit:
        """The classes of source and target in setting `closed`, `open`, `partial` or `universal`."""
        if setting not in self.class_splits:
            raise ConfigError(f"{self.title} has no {setting}-set split in the catalogue")
        return self.class_splits[setting]


@dataclass(frozen=True)
class Copy:
    """The copy of a benchmark on this machine, after the check."""

    benchmark: Benchmark
    root: Path
    places: Mapping[str, Path]
    """Domain (short) → its folder or file."""
    counts: Mapping[str, int]
    """Domain (short) → images in all splits."""
    classes: tuple[str, ...]
    """Those that every domain has: all, unless missing ones were allowed."""
    notes: tuple[str, ...] = ()
    """Differences that were allowed."""
    held: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Domain → its classes, for a user's own domains; empty for a named benchmark, which has one split for all."""

    @property
    def pairs(self) -> tuple[tuple[str, str], ...]:
        """The tasks that can be run with the available domains."""
        return tuple(pair for pair in self.benchmark.pairs if set(pair) <= set(self.places))

    def class_split(
        self,
        setting: str,
        source: str = "",
        target: str = "",
    ) -> ClassSplit:
        """The benchmark's classes that exist here; for own domains, those of the source and the target."""
        if self.held:
            return ClassSplit(self.held[source], self.held[target])
        split = self.benchmark.class_split(setting)
        return ClassSplit(
            tuple(name for name in split.source if name in self.classes),
            tuple(name for name in split.target if name in self.classes),
        )
