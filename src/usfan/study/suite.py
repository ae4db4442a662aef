"""`usfan study` and `usfan reproduce`: all pairs × methods × seeds of the user's domains or of a named benchmark,
resumable, ending in tables and a report. Those of a named benchmark have the paper's numbers beside them.

A source model is trained once per domain and seed and shared by all targets and methods. A finished cell is a small
JSON file, written whole; it is never run twice. Images are decoded once per domain.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

import torch

from usfan.adaptation.guidance import REJECTING
from usfan.adaptation.methods import METHODS
from usfan.adaptation.plan import expand_short_forms, settings_of_method
from usfan.config import RuntimeConfig, read_preset
from usfan.data.benchmarks.benchmark import DEFAULTS, Benchmark, Copy
from usfan.data.benchmarks.layouts import load_domain
from usfan.data.benchmarks.user_domains import fitting
from usfan.data.cache import open_store
from usfan.data.store import Store
from usfan.engine.passes import forward_store
from usfan.engine.runtime import Runtime
from usfan.errors import ArtifactError, ConfigError, option
from usfan.files import (
    Folder,
    append_line,
    read_json,
    write_json,
    write_tensors,
    write_yaml,
)
from usfan.metrics.evaluate import score_outputs
from usfan.models.backbones import choose_weights, create_backbone, default_backbone
from usfan.models.small_backbones import SMALL_BACKBONES
from usfan.progress import bar, console, say
from usfan.report.page import write_report
from usfan.store.model import AdaptedModel, SourceModel
from usfan.store.run_folder import differences, mend_log
from usfan.study.agreement import PREDICTED, predicted_classes, write_agreement
from usfan.study.choices import (
    PAPER,
    USER_SEEDS,
    Computing,
    Pair,
    Settings,
    check_settings,
    take_computing,
    take_domains,
    take_methods,
    take_pairs,
    take_seeds,
    take_source,
    torch_threads,
    user_methods,
)
from usfan.study.results import Row, Table
from usfan.training.source import train_source
from usfan.workflow import adapt_model

LOGGED = ("method", "task", "seed", "accuracy", "seconds")
FEATURES = "features"
"""Folder of the features that cells share while a study runs."""


class Cell(NamedTuple):
    """One run of a study."""

    seed: int
    source: str
    target: str
    method: str

    @property
    def task(self) -> str:
        return f"{self.source}→{self.target}"


@dataclass
class Suite:
    """One study: its choices, and the folder of its cells."""

    domains: Copy
    out: Path
    runtime: Runtime
    methods: tuple[str, ...]
    seeds: tuple[int, ...]
    pairs: tuple[Pair, ...]
    settings: Settings
    """Settings of stage 2."""
    source_settings: Settings
    """Settings of stage 1."""
    computing: Computing
    user_settings: Settings
    """All settings of the user. Another process opens the same study from them."""
    runtime_settings: Settings
    """The fields of `RuntimeConfig`: a worker on another machine opens a runtime of its own."""
    stores: dict[tuple[object, ...], Store] = field(default_factory=dict)
    earlier_methods: Settings = field(default_factory=dict)
    """The settings of methods that the folder holds cells of already."""
    models: dict[Path, SourceModel] = field(default_factory=dict)
    """The source model that was used last, by its folder."""

    @classmethod
    def open(
        cls,
        name: str | None,
        settings: Settings,
        out: Path,
        runtime: Runtime,
        runtime_settings: Settings | None = None,
    ) -> Suite:
        """A study of a named benchmark or, without a name, of the domains in the folder `data`."""
        settings = dict(settings)
        computing = take_computing(settings)
        if name is None and not settings.get("backbone"):
            settings["backbone"] = default_backbone(str(settings.get("pretrained") or "auto"))
        user_settings = dict(settings)
        if computing.threads is not None:
            user_settings["threads"] = computing.threads
        settings = expand_short_forms({"guard": False, **settings})
        setting = str(settings.setdefault("setting", "closed"))
        domains = take_domains(name, settings)
        source_settings = take_source(settings)
        allow_classes = bool(settings.pop("allow_classes", False))
        recipe = domains.benchmark.recipe
        methods = take_methods(settings, PAPER if recipe else user_methods(source_settings))
        seeds = take_seeds(settings, recipe.seeds if recipe else USER_SEEDS)
        pairs = take_pairs(settings, domains)
        check_settings(methods, settings)
        if name is None:
            domains = fitting(domains, pairs, setting, allow_classes)
        for source, target in pairs:
            domains.class_split(setting, source, target)
            train = {**domains.benchmark.recipe_for(source).train, **source_settings}
            if train["backbone"] not in SMALL_BACKBONES:
                choose_weights(train["backbone"], train.get("pretrained", "auto"))
        return cls(
            domains=domains,
            out=out,
            runtime=runtime,
            methods=methods,
            seeds=seeds,
            pairs=pairs,
            settings=settings,
            source_settings=source_settings,
            computing=computing,
            user_settings=user_settings,
            runtime_settings=dataclasses.asdict(RuntimeConfig()) | (runtime_settings or {}),
        )

    @property
    def benchmark(self) -> Benchmark:
        return self.domains.benchmark

    @property
    def setting(self) -> str:
        return str(self.settings["setting"])

    @property
    def rejects(self) -> bool:
        """Whether targets show new classes."""
        return self.setting in REJECTING

    @property
    def metric(self) -> str:
        """The figure of the table: OS in open set, as the paper has it, H-score in the universal case."""
        return {"open": "os", "universal": "hos"}.get(self.setting, self.benchmark.metric)

    @property
    def name(self) -> str | None:
        """Name of the benchmark; None for the user's domains."""
        return self.benchmark.name if self.benchmark.recipe else None

    def run(self, run_cells: CellRunner | None = None) -> Table:
        """All missing cells, then the tables. `run_cells` runs them elsewhere than in this process."""
        self.check_folder()
        config: Settings = {"command": "study"}
        if self.name is not None:
            config = {"command": "reproduce", "benchmark": self.name}
        for name, value in self.user_settings.items():
            if name == "method":
                continue  # it is code, which no file may name
            config[name] = str(value) if isinstance(value, Path) else value
        write_yaml(self.out / "config.yaml", config)
        write_json(self.out / "study.json", self.describe())
        with Folder(self.out) as folder:
            mend_log(folder)
        total = len(list(self.cells()))
        run_cells = run_cells or Suite.cells_here
        with bar("study", total, "cells") as progress:
            for number, (row, is_new) in enumerate(run_cells(self), 1):
                if is_new:
                    self.log_cell(row, f"{number}/{total}")
                    self.table().write(self.out)
                    progress.set(number, total)
        return self.finish()

    def cells_here(self) -> Iterator[tuple[Row, bool]]:
        """Row of each cell, and whether it ran now: one after another, in this process."""
        with torch_threads(self.computing.threads):
            for cell in self.cells():
                is_new = not self.is_done(cell)
                yield self.run_cell(cell), is_new

    def check_folder(self) -> None:
        """A folder holds one study: its models and cells are used again, so the settings must be the same. Before a
        model is trained, they may have been a mistake."""
        path = self.out / "study.json"
        now = self.describe()
        is_used = path.is_file() and (self.out / "models").is_dir()
        before = read_mapping(path) if is_used else now
        self.earlier_methods = before.get("rows", {})
        whole = ("benchmark", "setting", "adapt", "source", "recipes")
        changed = []
        for name in whole:
            if before.get(name) != now[name]:
                changed.append(describe_change(name, now[name], before.get(name)))
        for name, value in now["rows"].items():
            earlier = before.get("rows", {}).get(name, value)
            if earlier != value:
                changed.append(describe_change(name, value, earlier))
        for name, value in now["domains"].items():
            if before.get("domains", {}).get(name, value) != value:
                changed.append(f"images or classes of {name}")
        if changed:
            raise ConfigError(
                f"{self.out} holds a study with other settings ({'; '.join(changed)}): another {option('out')}?"
            )

    def cells(self) -> Iterator[Cell]:
        """Source by source, so that a model is loaded once and its targets follow each other."""
        sources = dict.fromkeys(source for source, _ in self.pairs)
        pairs = sorted(self.pairs, key=lambda pair: list(sources).index(pair[0]))
        for seed in self.seeds:
            for pair in pairs:
                for method in self.methods:
                    yield Cell(seed, *pair, method)

    def cell_path(self, cell: Cell) -> Path:
        name = f"{cell.method}_{cell.source}-{cell.target}_{cell.seed}.json"
        return self.out / "cells" / name

    def tensors_path(self, cell: Cell) -> Path:
        """Predictions of the cell."""
        return self.cell_path(cell).with_suffix(".safetensors")

    def is_done(self, cell: Cell) -> bool:
        return self.cell_path(cell).is_file()

    def run_cell(self, cell: Cell) -> Row:
        """Adapt, score, and write the row and the predictions; a cell that is done is only read."""
        if self.is_done(cell):
            return read_mapping(self.cell_path(cell))
        method = METHODS[cell.method]
        recipe = self.benchmark.recipe_for(cell.source)
        preset = str(self.settings.get("preset") or "default")
        more = {**read_preset(preset, "adapt"), **read_preset(preset, cell.method)}
        usual = recipe.under(more, recipe.adapt)
        usual = {name: value for name, value in usual.items() if name not in method.stage}
        settings = settings_of_method(cell.method, {**usual, **self.settings})
        settings["seed"] = cell.seed
        model = self.source_model(cell.source, cell.seed)
        store = self.target_store(cell, self.benchmark.train_split, model)
        adapted = adapt_model(model, store, cell.method, runtime=self.engine, **settings)
        row = {
            "method": cell.method,
            "task": cell.task,
            "seed": cell.seed,
            "seconds": adapted.history["seconds"],
            **self.score(adapted, cell, store),
            "settings": adapted.history["settings"],
            "hardware": self.device_name(),
            "commit": commit(),
        }
        assert adapted.passes is not None
        probs = adapted.passes.after.probs.half()
        tensors = {PREDICTED: predicted_classes(adapted), "probs": probs}
        write_tensors(self.tensors_path(cell), tensors)
        self.write_images(cell, adapted, store)
        write_json(self.cell_path(cell), row)
        return row

    def write_images(self, cell: Cell, model: AdaptedModel, store: Store) -> None:
        """The images behind the rows of a cell's tensors."""
        path = self.out / "images" / f"{cell.source}-{cell.target}.json"
        if path.is_file():
            return
        labels = None if store.labels is None else store.labels.tolist()
        table = {"classes": model.classes, "paths": store.paths, "labels": labels}
        write_json(path, table)

    def log_cell(self, row: Row, count: str) -> None:
        event = {"event": "cell", "time": round(time.time(), 3)}
        event |= {name: row[name] for name in LOGGED}
        append_line(self.out / "log.jsonl", json.dumps(event, ensure_ascii=False))
        if not console.is_terminal:
            figure = f"{row[self.metric]:.1f} ({row['seconds']:.0f} s)"
            say(f"[{count}] {row['method']} {row['task']} seed {row['seed']}: {figure}")

    def score(
        self,
        model: AdaptedModel,
        cell: Cell,
        store: Store,
    ) -> Row:
        """On the target's test split if there is one, else on the images adapted to."""
        assert model.passes is not None
        outputs = model.passes.after
        if self.benchmark.test_split != self.benchmark.train_split:
            store = self.target_store(cell, self.benchmark.test_split, model)
            passed = forward_store(model.classifier, store, model.spec, self.runtime)
            outputs = model.outputs_of(*passed)
        assert store.labels is not None
        scores = score_outputs(outputs, store.labels, model, open_set=self.rejects)
        del scores["per_class_accuracy"]
        return scores

    def source_model(self, source: str, seed: int) -> SourceModel:
        """Trained or read; the last one stays in memory."""
        self.ensure_model(source, seed)
        folder = self.model_folder(source, seed)
        if folder not in self.models:
            self.models = {folder: SourceModel.load(folder).to(self.runtime.device)}
        return self.models[folder]

    def model_folder(self, source: str, seed: int) -> Path:
        return self.out / "models" / f"{source}_{seed}"

    def ensure_model(self, source: str, seed: int) -> None:
        """Train the source model, unless it is there."""
        folder = self.model_folder(source, seed)
        if (folder / "config.json").is_file():
            return
        settings = {**self.train_settings(source), "seed": seed}
        spec = create_backbone(settings["backbone"], "none").spec
        started = time.perf_counter()
        pair = next(pair for pair in self.pairs if pair[0] == source)
        classes = self.domains.class_split(self.setting, *pair).source
        split = self.benchmark.train_split
        store = self.load_store(source, split, spec.resize, spec.channels, classes)
        model = train_source(store, runtime=self.engine, **settings)
        model.summary["seconds"] = round(time.perf_counter() - started, 2)
        model.save(folder)

    def train_settings(self, source: str) -> Settings:
        """Of stage 1: the user's over the preset's over the recipe's."""
        recipe = self.benchmark.recipe_for(source)
        preset = str(self.source_settings.get("preset") or "default")
        usual = recipe.under(read_preset(preset, "train"), recipe.train)
        return {**usual, **self.source_settings}

    @property
    def comparable(self) -> bool:
        """Whether the paper's numbers may stand beside ours: not if its networks are pretrained and ours are random."""
        recipe = self.benchmark.recipe or DEFAULTS
        settings = {**recipe.train, **self.source_settings}
        is_random = settings["backbone"] in SMALL_BACKBONES
        return recipe.train.get("backbone") in SMALL_BACKBONES or not (
            is_random or settings.get("pretrained") == "none"
        )

    def target_store(
        self,
        cell: Cell,
        split: str,
        model: SourceModel,
    ) -> Store:
        """The images of a target, labelled by the classes of the source model."""
        classes = self.domains.class_split(self.setting, cell.source, cell.target)
        known = None if self.setting == "closed" else classes.source
        size = model.spec.resize
        channels = model.spec.channels
        return self.load_store(cell.target, split, size, channels, classes.target, known)

    def load_store(
        self,
        domain: str,
        split: str,
        size: int,
        channels: int,
        classes: tuple[str, ...],
        known: tuple[str, ...] | None = None,
    ) -> Store:
        """The images of these classes, decoded once; labels index `known`, if it is given."""
        key = (domain, split, size, channels, classes, known)
        if key not in self.stores:
            data = load_domain(self.domains, domain, split, classes=classes)
            if known is not None:
                data = data.match_classes(known, open_set=self.rejects)
            store = open_store(
                data,
                size=size,
                channels=channels,
                device=self.runtime.device,
                cache_dir=self.runtime.cache,
                workers=self.runtime.workers,
            )
            images = f"{data.fingerprint()} {size} {channels}"
            digest = blake2b(images.encode()).hexdigest()
            self.stores[key] = dataclasses.replace(store, key=store.key or digest)
        return self.stores[key]

    @property
    def engine(self) -> Runtime:
        """The runtime that stores features in the study's folder, unless there is a cache: cells with a frozen backbone
        share them, on Ray too."""
        cache = self.runtime.cache or str(self.out / FEATURES)
        return dataclasses.replace(self.runtime, cache=cache)

    def rows(self) -> list[Row]:
        """The rows of all finished cells."""
        return [self.run_cell(cell) for cell in self.cells() if self.is_done(cell)]

    def table(self) -> Table:
        """The cells that are done, beside the paper's."""
        title = f"{self.benchmark.title}, {self.setting} set"
        return Table.build(
            self.rows(),
            title=title,
            benchmark=self.name if self.comparable else None,
            setting=self.setting,
            metric=self.metric,
        )

    def finish(self) -> Table:
        """results.json (the rows), and the tables as Markdown and JSON."""
        table = self.table()
        write_json(self.out / "results.json", {**self.describe(), "rows": self.rows()})
        print(table.write(self.out))
        print(write_agreement(self))
        shutil.rmtree(self.out / FEATURES, ignore_errors=True)
        say(f"{write_report([self.out])}: the tables on one page")
        return table

    def device_name(self) -> str:
        return torch.cuda.get_device_name(0) if self.runtime.device.type == "cuda" else "CPU"

    def describe(self) -> Settings:
        methods = {name: METHODS[name].settings() for name in self.methods}
        domains = {}
        for name, classes in self.domains.held.items():
            domains[name] = {"images": self.domains.counts[name], "classes": list(classes)}
        recipes = {}
        if self.benchmark.recipe:
            for domain in self.benchmark.domains:
                recipe = self.benchmark.recipe_for(domain.short)
                recipes[domain.short] = {"source": recipe.train, "adapt": recipe.adapt}
        return {
            "benchmark": self.benchmark.name,
            "setting": self.setting,
            "methods": list(self.methods),
            "seeds": list(self.seeds),
            "pairs": [f"{source}→{target}" for source, target in self.pairs],
            "adapt": self.settings,
            "rows": {**self.earlier_methods, **methods},
            "source": {**(self.benchmark.recipe or DEFAULTS).train, **self.source_settings},
            "domains": domains,
            "recipes": recipes,
            "notes": list(self.domains.notes),
            "torch": torch.__version__,
            "commit": commit(),
        }


CellRunner = Callable[[Suite], Iterator[tuple[Row, bool]]]
"""Gives the row of each cell, and whether it ran now."""


def describe_change(name: str, now: object, before: object) -> str:
    """`u-sfan: gamma 0.3, not 0.5`, or the name alone."""
    if not isinstance(now, dict) or not isinstance(before, dict):
        return name
    return f"{name}: {differences(now, before)}"


def read_mapping(path: Path) -> Row:
    value = read_json(path)
    if not isinstance(value, dict):
        raise ArtifactError(f"{path}: a mapping was expected")
    return value


@functools.cache
def commit() -> str | None:
    """The commit of this checkout, if it is one."""
    command = ["git", "rev-parse", "--short", "HEAD"]
    folder = Path(__file__).parent
    try:
        output = subprocess.check_output(
            command, cwd=folder, stderr=subprocess.DEVNULL, timeout=5
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return output.decode().strip()
