"""The paper's claims on Office-31 with a frozen EfficientNet-Lite0, and the open-set tables.

    python -m studies.paper CACHE OUT.jsonl closed parts field open digits certainty choose canary [--seeds …]

`studies.families.domains` fills CACHE (families office31 and digits). Rows that OUT.jsonl has are not run again. A row
has its commit, a digest of its method's code, the settings that were passed and the seconds. The model is that of the
last epoch; labels only score.

closed    six tasks: the methods of the paper, under our settings, the paper's and the authors'
parts     six tasks: U-SFAN without one of its parts, and with the point estimate in place of the posterior
field     six tasks: the field's methods under our settings and, where they have their own, under the authors'
open      six tasks, 10 known and 11 new classes, the split of the literature
certainty the same tasks, with the point estimate in place of the posterior, and at τ = 1
digits    MNIST 0–5 known, UCI digits 6–9 new
choose    the weight of `separation`, on other classes and seeds: random splits of Office-31 (10 known, 11 new)
          and of the digits (6 known, 4 new)
canary    each case on a small task of random features of digits, which a test runs again on the code as it is
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import time
from pathlib import Path
from typing import Any

import torch
from studies.code import code_of
from studies.families.domains import OFFICE, load_domain
from studies.families.runs import commit, read_rows
from studies.families.task import cpu, load_task
from studies.frozen import only

import usfan
from usfan.data.benchmarks.catalogue import benchmark
from usfan.data.store import Store
from usfan.metrics.evaluate import score_outputs
from usfan.store.model import SourceModel
from usfan.study.digits import load_uci
from usfan.training.source import train_source
from usfan.workflow import adapt_model

SEEDS = (2019, 2020, 2021)
CHOICE_SEED = 2022
NETWORK = {"backbone": "tf_efficientnet_lite0", "pretrained": "offline", "tune": "new"}
EPOCHS = 40
FIGURES = ("accuracy", "os", "os_star", "unknown_accuracy", "hos", "auroc_unknown")
PLAIN = {"balance": False, "anneal": False, "diversity_memory": 0.0}
TASKS = tuple(itertools.permutations(OFFICE, 2))
Settings = dict[str, Any]

CLOSED: dict[str, Settings] = {
    "source-only": {"method": "source-only"},
    "shot-im": {"method": "shot-im"},
    "shot": {"method": "shot"},
    "u-sfan (paper)": {"method": "u-sfan", "preset": "paper"},
    "u-sfan (authors)": {"method": "u-sfan", "preset": "authors"},
    "u-sfan (authors, τ = 1)": {"method": "u-sfan", "preset": "authors", "temperature": 1.0},
    "u-sfan (default)": {"method": "u-sfan"},
    "u-sfan+ (default)": {"method": "u-sfan+"},
}
PARTS: dict[str, Settings] = {
    "point estimate": {"method": "u-sfan", "uncertainty": "point"},
    "point estimate, τ = 1": {"method": "u-sfan", "uncertainty": "point", "temperature": 1.0},
    "posterior, τ = 1": {"method": "u-sfan", "temperature": 1.0},
    "not balanced": {"method": "u-sfan", "balance": False},
    "not annealed": {"method": "u-sfan", "anneal": False},
    "no memory": {"method": "u-sfan", "diversity_memory": 0.0},
    "neither": {"method": "u-sfan", **PLAIN},
    "no weights, memory": {"method": "shot-im", "diversity_memory": 0.9},
    "authors, point": {"method": "u-sfan", "preset": "authors", "uncertainty": "point"},
}
FIELD: dict[str, Settings] = {
    **{name: {"method": name} for name in ("upa", "lsc", "nrc", "aad", "cowa")},
    **{f"{name} (authors)": {"method": name, "preset": "authors"} for name in ("nrc", "aad")},
}
OPEN: dict[str, Settings] = {
    "source-only": {"method": "source-only"},
    "shot-im": {"method": "shot-im"},
    "shot": {"method": "shot"},
    "u-sfan": {"method": "u-sfan"},
    "u-sfan+": {"method": "u-sfan+"},
    "u-sfan (authors)": {"method": "u-sfan", "preset": "authors"},
    "u-sfan, separation 1": {"method": "u-sfan", "separation": 1.0},
    "u-sfan+, separation 1": {"method": "u-sfan+", "separation": 1.0},
}
CERTAINTY: dict[str, Settings] = {
    "point estimate": {"method": "u-sfan", "uncertainty": "point"},
    "point estimate, τ = 1": {"method": "u-sfan", "uncertainty": "point", "temperature": 1.0},
    "posterior, τ = 1": {"method": "u-sfan", "temperature": 1.0},
}
DIGITS: dict[str, Settings] = {
    "source-only": {"method": "source-only"},
    "shot-im": {"method": "shot-im"},
    "u-sfan": {"method": "u-sfan"},
    "u-sfan+": {"method": "u-sfan+"},
    "u-sfan, separation 0": {"method": "u-sfan", "separation": 0.0},
    "u-sfan+, separation 0": {"method": "u-sfan+", "separation": 0.0},
}
CHOOSE: dict[str, Settings] = {
    "shot-im": {"method": "shot-im"},
    **{f"separation {w:g}": {"method": "u-sfan", "separation": w} for w in (0, 0.1, 0.3, 1)},
}


def random_split(count: int, known: int, new: int, number: int) -> tuple[list[int], list[int]]:
    """Classes of source and target, drawn at random."""
    generator = torch.Generator().manual_seed(1000 + number)
    order = torch.randperm(count, generator=generator).tolist()
    return order[:known], order[: known + new]


def features_of(cache: Path, domain: str) -> Store:
    stored = load_domain(cache, "office31", domain)
    assert stored.crop is not None
    rows = torch.arange(len(stored.labels))
    return Store(stored.crop, rows, stored.labels, stored.classes)


def office_source(cache: Path, domain: str, classes: tuple[str, ...], seed: int) -> SourceModel:
    store = only(features_of(cache, domain), classes)
    return train_source(store, seed=seed, epochs=EPOCHS, runtime=cpu(), **NETWORK)


class Rows:
    """Runs one cell at a time, and writes those that the file lacks."""

    def __init__(
        self, out: Path, only_cases: list[str] | None = None, targets: list[str] | None = None
    ) -> None:
        self.out = out
        self.only_cases = only_cases
        self.targets = (*(targets or OFFICE), "uci")
        self.done = {self.key(row) for row in read_rows(out)}

    @staticmethod
    def key(row: dict[str, Any]) -> tuple[object, ...]:
        return tuple(row[name] for name in ("table", "task", "seed", "case"))

    def lacks(self, table: str, task: str, seed: int, cases: dict[str, Settings]) -> bool:
        return any(self.wants(table, task, seed, case) for case in cases)

    def wants(self, table: str, task: str, seed: int, case: str) -> bool:
        if self.only_cases and case not in self.only_cases:
            return False
        if task.split("→")[-1] not in self.targets:
            return False
        return (table, task, seed, case) not in self.done

    def run(
        self,
        table: str,
        task: str,
        seed: int,
        cases: dict[str, Settings],
        source: SourceModel,
        target: Store | usfan.ImageData,
        **settings: Any,
    ) -> None:
        for case, changes in cases.items():
            name = {"table": table, "task": task, "seed": seed, "case": case}
            if self.wants(table, task, seed, case):
                self.write(
                    name, run_cell(source, target, {**settings, **changes, "seed": seed})
                )

    def write(self, name: dict[str, Any], row: dict[str, Any]) -> None:
        with self.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps({**name, **row}, ensure_ascii=False) + "\n")
        figures = (row["accuracy"], row.get("os"), row.get("hos"))
        print(*name.values(), *figures, flush=True)


def run_cell(
    source: SourceModel, target: Store | usfan.ImageData, settings: Settings
) -> dict[str, Any]:
    """Figures of the model after the last epoch."""
    started = time.perf_counter()
    model = adapt_model(source, target, runtime=cpu(), guard=False, **settings)
    seconds = time.perf_counter() - started
    assert model.passes is not None
    rejects = settings.get("setting") == "open"
    scores = score_outputs(model.passes.after, target.labels, model, open_set=rejects)
    row = {name: round(scores[name], 2) for name in FIGURES if name in scores}
    row |= {"settings": settings, "commit": commit(), "code": code_of(settings["method"])}
    return {**row, "seconds": round(seconds, 2)}


def closed(rows: Rows, cache: Path, table: str, cases: dict[str, Settings], seed: int) -> None:
    for source, target in TASKS:
        if not rows.lacks(table, f"{source}→{target}", seed, cases):
            continue
        task = load_task(cache, "office31", source, target, seed)
        settings = {"setting": "closed", "tune": "new"}
        rows.run(table, task.name, seed, cases, task.source, task.target, **settings)


def opened(
    rows: Rows,
    cache: Path,
    table: str,
    cases: dict[str, Settings],
    seed: int,
    split: tuple[tuple[str, ...], tuple[str, ...]],
) -> None:
    known, shown = split
    for source in OFFICE:
        others = [other for other in OFFICE if other != source]
        tasks = [f"{source}→{other}" for other in others]
        if not any(rows.lacks(table, task, seed, cases) for task in tasks):
            continue
        model = office_source(cache, source, known, seed)
        for task, other in zip(tasks, others, strict=True):
            store = only(features_of(cache, other), shown, known)
            settings = {"setting": "open", "tune": "new"}
            rows.run(table, task, seed, cases, model, store, **settings)


def digits(
    rows: Rows,
    cache: Path,
    table: str,
    cases: dict[str, Settings],
    seed: int,
    known: list[int],
) -> None:
    """From MNIST to all UCI digits: 4 source epochs, 8 target epochs."""
    names = tuple(str(digit) for digit in sorted(known))
    images = {}
    for name in ("mnist", "uci"):
        stored = load_domain(cache, "digits", name)
        assert stored.images is not None
        pictures = stored.images.numpy()
        images[name] = usfan.ImageData(pictures, labels=stored.labels, classes=stored.classes)
    part = torch.isin(images["mnist"].labels, torch.tensor(sorted(known)))
    data = images["mnist"].subset(part.nonzero().flatten()).match_classes(names)
    source = train_source(data, backbone="digits-cnn", epochs=4, seed=seed, runtime=cpu())
    target = images["uci"].match_classes(names, open_set=True)
    settings = {"setting": "open", "epochs": 8}
    rows.run(table, "mnist→uci", seed, cases, source, target, **settings)


@functools.cache
def canary_task(setting: str) -> tuple[SourceModel, Store]:
    """Digits as random features: a source model of 600 images, and 300 others, blurred sideways. In open set the model
    knows 0 to 5."""
    digits = load_uci()
    assert digits.labels is not None
    pixels = torch.stack([digits.load(i, channels=1)[0] for i in range(900)]).float() / 255
    shape = (pixels[0].numel(), 576)
    weights = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    features = (pixels.flatten(1) @ weights).relu() / 10
    blurred = (0.6 * pixels + 0.4 * pixels.roll(2, dims=2)).flatten(1)
    moved = (blurred @ weights).relu() / 10
    every = tuple(str(digit) for digit in range(10))
    known = every[:6] if setting == "open" else every
    rows = torch.arange(900)
    source = only(Store(features[:600], rows[:600], digits.labels[:600], every), known)
    target = only(Store(moved[600:], rows[:300], digits.labels[600:900], every), every, known)
    settings = {"backbone": "digits-cnn", "tune": "new", "epochs": 5, "seed": 0}
    return train_source(source, runtime=cpu(), **settings), target


def canaries() -> dict[str, Settings]:
    """Each case of the tables."""
    cases = {
        name: {**case, "setting": "closed"}
        for name, case in {**CLOSED, **PARTS, **FIELD}.items()
    }
    cases |= {f"{name}, open": {**case, "setting": "open"} for name, case in OPEN.items()}
    return cases


def canary_row(case: str) -> dict[str, Any]:
    settings = {"epochs": 5, "tune": "new", "seed": 0, **canaries()[case]}
    return run_cell(*canary_task(settings["setting"]), settings)


def choose(rows: Rows, cache: Path) -> None:
    every = benchmark("office31").classes
    for number in (1, 2, 3):
        split = tuple(
            tuple(every[label] for label in part) for part in random_split(31, 10, 11, number)
        )
        opened(rows, cache, f"choose photographs {number}", CHOOSE, CHOICE_SEED, split)
    for number in (1, 2):
        known, _ = random_split(10, 6, 4, number)
        digits(rows, cache, f"choose digits {number}", CHOOSE, CHOICE_SEED, known)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cache", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("tables", nargs="+")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    parser.add_argument("--cases", nargs="+", help="only these")
    parser.add_argument("--targets", nargs="+", default=list(OFFICE), help="only these")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = Rows(options.out, options.cases, options.targets)
    split = benchmark("office31").class_split("open")
    open_sets = {"open": OPEN, "certainty": CERTAINTY}
    closed_sets = {"closed": CLOSED, "parts": PARTS, "field": FIELD}
    for table in options.tables:
        if table == "choose":
            choose(rows, options.cache)
            continue
        if table == "canary":
            for case in options.cases or canaries():
                rows.write(
                    {"table": table, "task": "digits", "seed": 0, "case": case},
                    canary_row(case),
                )
            continue
        for seed in options.seeds:
            if table in closed_sets:
                closed(rows, options.cache, table, closed_sets[table], seed)
            elif table in open_sets:
                classes = (split.source, split.target)
                opened(rows, options.cache, table, open_sets[table], seed, classes)
            elif table == "digits":
                digits(rows, options.cache, table, DIGITS, seed, list(range(6)))


if __name__ == "__main__":
    main()
