"""The named benchmarks: what the paper and SHOT's recipe fix of each, read from `catalogue.json`.

- `recipe` is SHOT's; a benchmark says what it has otherwise, and a source may have a recipe of its own (`recipes`).
  A `note` says what neither SHOT nor the paper fixes.
- `splits` names groups of classes in the source and in the target, if they differ; `all` is every class.
- Classes are in the order of the published labels. DomainNet's counts are those of its cleaned version, and its lists
  leave `t-shirt` out of painting's training split and `syringe` out of its test split.
- The ten `shared` classes of Office-31 are those that Caltech-256 has too; of the others by name, the last eleven are
  the target's unknowns.
"""

import json
from importlib import resources
from itertools import permutations
from typing import Any

from usfan.data.benchmarks.benchmark import Benchmark, ClassSplit, Domain, Recipe
from usfan.errors import ConfigError


def _recipe(base: dict[str, Any], fields: dict[str, Any]) -> Recipe:
    train = base["train"] | fields.get("train", {}) | {"backbone": fields["backbone"]}
    adapt = base["adapt"] | fields.get("adapt", {})
    special = {*fields.get("train", {}), *fields.get("adapt", {})}
    return Recipe(train, adapt, special=frozenset(special))


def _class_splits(fields: dict[str, Any]) -> dict[str, ClassSplit]:
    groups = {**fields.get("groups", {}), "all": fields["classes"]}

    def classes(names: list[str]) -> tuple[str, ...]:
        return tuple(name for group in names for name in groups[group])

    splits = {"closed": [["all"], ["all"]], **fields.get("splits", {})}
    return {
        setting: ClassSplit(classes(source), classes(target))
        for setting, (source, target) in splits.items()
    }


def _benchmark(name: str, fields: dict[str, Any], base: dict[str, Any]) -> Benchmark:
    domains = tuple(Domain(**domain) for domain in fields["domains"])
    pairs = fields.get("pairs", permutations([domain.short for domain in domains], 2))
    recipes = fields.get("recipes", {})
    return Benchmark(
        **{key: fields[key] for key in ("title", "layout", "metric", "homepage", "folders")},
        name=name,
        domains=domains,
        classes=tuple(fields["classes"]),
        pairs=tuple((source, target) for source, target in pairs),
        recipe=_recipe(base, fields["recipe"]),
        recipes={source: _recipe(base, recipe) for source, recipe in recipes.items()},
        class_splits=_class_splits(fields),
    )


def _read() -> dict[str, Benchmark]:
    file = resources.files("usfan.data.benchmarks").joinpath("catalogue.json")
    content = json.loads(file.read_text(encoding="utf-8"))
    base = content["recipe"]
    return {
        name: _benchmark(name, fields, base) for name, fields in content["benchmarks"].items()
    }


BENCHMARKS = _read()


def benchmark(name: str) -> Benchmark:
    """The benchmark with this name."""
    if name not in BENCHMARKS:
        raise ConfigError(
            f"no benchmark {name!r} in the catalogue; it has {', '.join(BENCHMARKS)}"
        )
    return BENCHMARKS[name]
