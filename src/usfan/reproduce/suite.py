"""`usfan study` and `usfan reproduce`: all pairs × methods × seeds of own domains or of a named benchmark, resumable,
ending in tables, figures and a report. Those of a named benchmark have the paper's numbers beside them.

A source model is trained once per domain and seed and shared by all targets and methods. A finished cell is a small
JSON file, written whole; it is never run twice. Images are decoded once per domain.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch

from usfan.adaptation.adapt import adapt
from usfan.adaptation.guidance import REJECTING
from usfan.adaptation.methods import METHODS
from usfan.adaptation.settings import own_settings, with_setting
from usfan.artifacts.model import AdaptedModel, SourceModel
from usfan.compute.passes import forward_store
from usfan.compute.runtime import Runtime
from usfan.config import RuntimeConfig
from usfan.data.benchmarks.benchmark import DEFAULTS, Benchmark, Found
from usfan.data.benchmarks.layouts import load_domain
from usfan.data.benchmarks.own import fitting
from usfan.data.cache import PixelStore, open_store
from usfan.errors import ConfigError
from usfan.evaluation.evaluate import score_outputs
from usfan.files import Folder, append_line, read_json, write_json, write_tensors, write_text, write_yaml
from usfan.models.backbones import create_backbone
from usfan.progress import say
from usfan.report.page import write_report
from usfan.reproduce.agreement import PREDICTED, predicted_classes, write_agreement
from usfan.reproduce.choices import (
    OWN_SEEDS,
    PAPER,
    check_settings,
    chosen_pairs,
    commit,
    find_domains,
    own_methods,
    read_mapping,
    take_methods,
    take_seeds,
    take_source,
)
from usfan.reproduce.digits_figure import correct_areas, entropies_of, entropy_figure
from usfan.reproduce.live import LiveTable
from usfan.reproduce.place import Place, limited_threads, take_place
from usfan.reproduce.results import Table
from usfan.reproduce.suite_figure import table_figure
from usfan.runs.folder import mend_log
from usfan.scoring.outputs import Outputs
from usfan.tensor_file import read_tensors
from usfan.training.source import train_source

SHOWN_METRICS = ("accuracy", "mean_class_accuracy", "nll", "brier", "ece", "posterior_nll", "posterior_ece", "entropy")
OPEN_METRICS = (
    "os",
    "os_star",
    "unknown_accuracy",
    "hos",
    "auroc_unknown",
    "aupr_unknown",
    "transductive_os",
    "transductive_hos",
)


LOGGED = ("method", "task", "seed", "accuracy", "seconds")
ENTROPY_METHODS = ("shot-im", "u-sfan")
"""Point estimate and posterior of the entropy densities."""
FEATURES = "features"
"""Folder of the features that cells share while a study runs."""
MOST_FIGURES = 6
"""A study of more tasks than this draws no entropy densities."""


Cell = tuple[int, str, str, str]
"""Seed, source, target, method."""
Show = Callable[[dict[str, Any], bool], None]
"""Takes the row of a cell, and whether it was run now."""


@dataclass
class Suite:
    """One study: what to run, and where its cells lie."""

    benchmark: Benchmark
    found: Found
    """The domains, and where they lie."""
    out: Path
    runtime: Runtime
    methods: tuple[str, ...]
    seeds: tuple[int, ...]
    pairs: tuple[tuple[str, str], ...]
    settings: dict[str, Any]
    """AdaptConfig's, as the user gave them."""
    source_settings: dict[str, Any]
    setting: str = "closed"
    stores: dict[tuple[Any, ...], PixelStore] = field(default_factory=dict)
    on_cell: Callable[[dict[str, Any]], None] | None = None
    place: Place = field(default_factory=Place)
    computing: dict[str, Any] = field(default_factory=dict)
    """The fields of `RuntimeConfig` as they were given: a worker on another machine opens its own runtime."""
    hardware: set[str] = field(default_factory=set)
    """Devices that ran cells."""
    given: dict[str, Any] = field(default_factory=dict)
    """The settings as they were given, from which another process opens the same study."""
    earlier: dict[str, Any] = field(default_factory=dict)
    """The rows of methods that the folder holds cells of already."""

    @classmethod
    def open(
        cls,
        name: str | None,
        settings: dict[str, Any],
        out: Path,
        runtime: Runtime,
        computing: dict[str, Any] | None = None,
    ) -> Suite:
        """A study of a named benchmark or, without a name, of the domains in the folder `data`."""
        settings = dict(settings)
        place = take_place(settings)
        given = dict(settings) | ({} if place.threads is None else {"threads": place.threads})
        settings = with_setting({"guard": False, **settings})
        counts, classes = (bool(settings.pop(flag, False)) for flag in ("allow_counts", "allow_classes"))
        source = take_source(settings)
        setting = str(settings.setdefault("setting", "closed"))
        found = find_domains(name, settings.pop("data", None), allow_counts=counts, allow_classes=classes)
        benchmark = found.benchmark
        usual = PAPER if benchmark.recipe else own_methods(source)
        methods = take_methods(settings, usual)
        seeds = tuple(take_seeds(settings, benchmark.recipe.seeds if benchmark.recipe else OWN_SEEDS))
        pairs = chosen_pairs(found, settings.pop("pairs", None))
        check_settings(methods, settings)
        if name is None:
            found = fitting(found, pairs, setting, classes)
        for pair in pairs:
            found.class_split(setting, *pair)
        study = cls(benchmark, found, out, runtime, methods, seeds, pairs, settings, source, setting)
        study.place, study.given = place, given
        study.computing = dataclasses.asdict(RuntimeConfig()) | (computing or {})
        return study

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
        """The benchmark's; None for own domains."""
        return self.benchmark.name if self.benchmark.recipe else None

    def run(self, run_cells: Callable[[Suite, Show], None] | None = None) -> Table:
        """All cells that are missing, then the tables. `run_cells` runs them elsewhere than in this process."""
        self.check_folder()
        given = {k: str(v) if isinstance(v, Path) else v for k, v in self.given.items()}
        own = {"command": "study"} if self.name is None else {"command": "reproduce", "benchmark": self.name}
        config = {**own, **given}
        write_yaml(self.out / "config.yaml", config)
        with Folder(self.out) as folder:
            mend_log(folder)
        with LiveTable(self) as live:

            def show(row: dict[str, Any], fresh: bool) -> None:
                if fresh:
                    self.log_cell(row)
                live.show(row, fresh)

            (run_cells or Suite.run_here)(self, show)
        return self.finish()

    def run_here(self, show: Show) -> None:
        """Cell by cell, in this process."""
        self.hardware.add(self.device_name())
        with limited_threads(self.place.threads):
            for cell in self.cells():
                done = self.is_done(cell)
                if not done and self.ensure_model(cell[1], cell[0]):
                    self.keep_description()
                show(self.read_cell(cell) if done else self.run_cell(*cell), not done)

    def check_folder(self) -> None:
        """A folder holds one study: its cells are used again, so the settings must be the same."""
        path, own = self.out / "study.json", self.describe()
        before = read_mapping(path) if path.is_file() else own
        changed = [k for k in ("benchmark", "setting", "adapt", "source", "recipes") if before.get(k) != own[k]]
        self.earlier = before.get("rows", {})
        changed += [k for k, row in own["rows"].items() if self.earlier.get(k, row) != row]
        domains = before.get("domains", {})
        changed += [f"images or classes of {k}" for k, d in own["domains"].items() if domains.get(k, d) != d]
        if changed:
            raise ConfigError(f"{self.out} holds a study with other settings ({', '.join(changed)}): another --out?")

    def cells(self) -> Iterator[Cell]:
        """Source by source, so that a model is loaded once and its targets follow each other."""
        for seed in self.seeds:
            for source in dict.fromkeys(s for s, _ in self.pairs):
                for target in (t for s, t in self.pairs if s == source):
                    for method in self.methods:
                        yield seed, source, target, method

    def cell_path(self, seed: int, source: str, target: str, method: str) -> Path:
        return self.out / "cells" / f"{method}_{source}-{target}_{seed}.json"

    def tensors_path(self, seed: int, source: str, target: str, method: str) -> Path:
        return self.cell_path(seed, source, target, method).with_suffix(".safetensors")

    def is_done(self, cell: Cell) -> bool:
        return self.cell_path(*cell).is_file()

    def read_cell(self, cell: Cell) -> dict[str, Any]:
        return read_mapping(self.cell_path(*cell))

    def run_cell(self, seed: int, source: str, target: str, method: str) -> dict[str, Any]:
        """Adapt, score, and write the row and the predictions; a cell that is done is only read."""
        cell = seed, source, target, method
        if self.is_done(cell):
            return self.read_cell(cell)
        recipe = self.benchmark.recipe_for(source)
        usual = {k: v for k, v in recipe.adapt.items() if k not in METHODS[method].stage}
        settings = {**own_settings(method, {**usual, **self.settings}), "seed": seed}
        model = self.source_model(source, seed)
        store = self.target_store(source, target, self.benchmark.train_split, model)
        adapted = adapt(model, store, method, runtime=self.engine, **settings)
        row = {"method": method, "task": f"{source}→{target}", "seed": seed, "seconds": adapted.history["seconds"]}
        row |= self.score(adapted, source, target, store)
        row |= self.curves(adapted, store)
        row |= {"settings": adapted.history["settings"], "commit": commit()}
        kept = {PREDICTED: predicted_classes(adapted)}
        if self.setting == "closed" and store.labels is not None:
            entropies = entropies_of(adapted, store.labels)
            row["auroc_correct"] = correct_areas(entropies)
            kept |= entropies if method in ENTROPY_METHODS else {}
        write_tensors(self.tensors_path(*cell), kept)
        write_json(self.cell_path(*cell), row)
        return row

    def log_cell(self, row: dict[str, Any]) -> None:
        event = {"event": "cell", "time": round(time.time(), 3), **{k: row[k] for k in LOGGED}}
        append_line(self.out / "log.jsonl", json.dumps(event, ensure_ascii=False))

    def score(self, model: AdaptedModel, source: str, target: str, store: PixelStore) -> dict[str, Any]:
        """On the target's test split if there is one, else on the images adapted to."""
        assert model.passes is not None
        outputs: Outputs = model.passes.after
        if self.benchmark.test_split != self.benchmark.train_split:
            store = self.target_store(source, target, self.benchmark.test_split, model)
            outputs = model.outputs_of(*forward_store(model.classifier, store, model.spec, self.runtime))
        assert store.labels is not None
        scores = score_outputs(outputs, store.labels, model, open_set=self.rejects)
        names = SHOWN_METRICS + (OPEN_METRICS if self.rejects else ())
        more = ("detection", "by_score", "unknown_rule") if self.rejects else ()
        return {name: scores[name] for name in (*names, *more, "count")}

    def curves(self, model: AdaptedModel, store: PixelStore) -> dict[str, Any]:
        """Per epoch, the source model first: accuracy on the images adapted to, and the label-free validators."""
        assert model.passes is not None
        assert store.labels is not None
        labels = store.labels.to(model.passes.path[0].device)
        known = labels < len(model.classes)
        right = [100 * float((path == labels)[known].double().mean()) for path in model.passes.path]
        names = model.history["records"][0]["validators"]
        found = {name: [round(r["validators"][name], 5) for r in model.history["records"]] for name in names}
        return {"path": {"accuracy": [round(r, 3) for r in right], **found}}

    def source_model(self, source: str, seed: int) -> SourceModel:
        folder = self.model_folder(source, seed)
        if getattr(self, "_loaded", (None, None))[0] != folder:
            self.ensure_model(source, seed)
            self._loaded = (folder, SourceModel.load(folder).to(self.runtime.device))
        return self._loaded[1]

    def model_folder(self, source: str, seed: int) -> Path:
        return self.out / "models" / f"{source}_{seed}"

    def ensure_model(self, source: str, seed: int) -> bool:
        """Train the source model, unless it is there; whether it was trained now."""
        folder = self.model_folder(source, seed)
        if (folder / "config.json").is_file():
            return False
        self.train(source, seed, folder)
        return True

    def train(self, source: str, seed: int, folder: Path) -> None:
        settings = {**self.benchmark.recipe_for(source).train, **self.source_settings, "seed": seed}
        spec = create_backbone(settings["backbone"], "none").spec
        started = time.perf_counter()
        pair = next(pair for pair in self.pairs if pair[0] == source)
        classes = self.found.class_split(self.setting, *pair).source
        store = self.load_store(source, self.benchmark.train_split, spec.resize, spec.channels, classes)
        model = train_source(store, runtime=self.engine, **settings)
        model.summary["seconds"] = round(time.perf_counter() - started, 2)
        model.save(folder)

    def target_store(self, source: str, target: str, split: str, model: SourceModel) -> PixelStore:
        """The images of a target, labelled by the classes of the source model."""
        classes = self.found.class_split(self.setting, source, target)
        known = None if self.setting == "closed" else classes.source
        return self.load_store(target, split, model.spec.resize, model.spec.channels, classes.target, known)

    def load_store(
        self,
        domain: str,
        split: str,
        size: int,
        channels: int,
        classes: tuple[str, ...],
        known: tuple[str, ...] | None = None,
    ) -> PixelStore:
        """The images of these classes, decoded once; labels index `known`, if it is given."""
        key = (domain, split, size, channels, classes, known)
        if key not in self.stores:
            data = load_domain(self.benchmark, self.found.root, domain, split, classes=classes)
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
            self.stores[key] = dataclasses.replace(store, key=store.key or blake2b(images.encode()).hexdigest())
        return self.stores[key]

    @property
    def engine(self) -> Runtime:
        """The runtime that keeps features in the study's folder, unless there is a cache: cells whose backbone does not
        move share them, on Ray too."""
        return dataclasses.replace(self.runtime, cache=self.runtime.cache or str(self.out / FEATURES))

    def drop_features(self) -> None:
        """No cell needs them any more."""
        if (self.out / FEATURES).is_dir():
            with Folder(self.out) as folder, folder.inner(FEATURES) as kept:
                for name in kept.names():
                    kept.remove(name)
            (self.out / FEATURES).rmdir()

    def rows(self) -> list[dict[str, Any]]:
        paths = [self.cell_path(*cell) for cell in self.cells()]
        return [read_json(p) for p in paths if p.is_file()]

    def finish(self) -> Table:
        """results.json (the rows), and the table as Markdown, LaTeX and JSON."""
        rows = self.rows()
        metric = self.metric
        title = f"{self.benchmark.title}, {self.setting} set"
        table = Table.build(rows, title=title, benchmark=self.name, setting=self.setting, metric=metric)
        self.keep_description()
        write_json(self.out / "results.json", {**self.describe(), "rows": rows})
        write_text(self.out / "table.md", table.to_markdown() + "\n")
        write_text(self.out / "table.tex", table.to_latex() + "\n")
        write_text(self.out / "table.json", table.to_json() + "\n")
        write_text(self.out / "metrics.json", table.to_json() + "\n")
        table_figure(table, self.out / "table.png")
        self.entropy_figures()
        print("\n".join(filter(None, (table.to_markdown(), write_agreement(self)))))
        self.drop_features()
        say(f"{write_report([self.out])}: the tables and figures on one page")
        return table

    def entropy_figures(self) -> None:
        """The paper's entropy densities of each task at the first seed, if both methods were run in closed set."""
        for source, target in self.pairs if len(self.pairs) <= MOST_FIGURES and self.setting == "closed" else ():
            files = [self.tensors_path(self.seeds[0], source, target, method) for method in ENTROPY_METHODS]
            if all(file.is_file() for file in files):
                point, posterior = (read_tensors(file) for file in files)
                path = self.out / f"entropy_{source}-{target}.png"
                entropy_figure(point, posterior, len(self.found.classes), path)

    def device_name(self) -> str:
        return torch.cuda.get_device_name(0) if self.runtime.device.type == "cuda" else "CPU"

    def keep_description(self) -> None:
        """study.json, by which a later call knows the study. Written once a model is trained: until then the settings
        may be a mistake."""
        write_json(self.out / "study.json", self.describe())

    def describe(self) -> dict[str, Any]:
        return {
            "benchmark": self.benchmark.name,
            "setting": self.setting,
            "methods": list(self.methods),
            "seeds": list(self.seeds),
            "pairs": [f"{s}→{t}" for s, t in self.pairs],
            "adapt": self.settings,
            "rows": {**self.earlier, **{name: METHODS[name].settings() for name in self.methods}},
            "source": {**(self.benchmark.recipe or DEFAULTS).train, **self.source_settings},
            "domains": {
                name: {"images": self.found.counts[name], "classes": list(classes)}
                for name, classes in self.found.held.items()
            },
            "recipes": {
                domain.short: {"source": recipe.train, "adapt": recipe.adapt}
                for domain in (self.benchmark.domains if self.benchmark.recipe else ())
                if (recipe := self.benchmark.recipe_for(domain.short))
            },
            "notes": list(self.found.notes),
            "hardware": ", ".join(sorted(self.hardware)) or self.device_name(),
            "torch": torch.__version__,
            "commit": commit(),
        }
