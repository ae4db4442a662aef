"""A corpus of good and bad runs on the shifts of `studies.shifts`. The guard, the ladder and the estimate of accuracy
are chosen on one half (CHOOSE) and tested on the other (JUDGE).

    python -m studies.corpus OUT --images PACKED --seconds 500

Runs with a frozen backbone use the CPU's cores, runs that train it use the GPU. For each run it keeps the outputs of
the source model and of every epoch's model for every image, never the images; true labels are kept to score rules
later. Files: OUT/{choose,judge}.npz and .jsonl. PACKED is a folder with images.bin and images.json, made by
`studies.pack`.
"""

from __future__ import annotations

import argparse
import functools
import json
import multiprocessing
import os
import queue
import time
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from studies.image_shifts import decode
from studies.shifts import CHOOSE

import usfan
from usfan.config import RuntimeConfig
from usfan.data.store import Store
from usfan.engine.features import BackboneAlone, features_of, on_features
from usfan.engine.passes import engine_store, forward_store
from usfan.engine.runtime import start_runtime
from usfan.maths.neighbours import nearest_neighbours
from usfan.models.backbones import create_backbone
from usfan.store.model import SourceModel

SEEDS = (2019, 2020, 2021)
DRAWS = 8
OFFICE = ("amazon", "dslr", "webcam")


class Data:
    """Pixels on the disk, by domain and shift."""

    def __init__(self, packed: Path, folder: Path, processes: int) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.index = json.loads((packed / "images.json").read_text())
        self.file = str(packed / "images.bin")
        self.processes = processes

    @functools.cached_property
    def pool(self) -> Any:
        return multiprocessing.get_context("spawn").Pool(self.processes)

    def labels(self, domain: str) -> tuple[torch.Tensor, tuple[str, ...]]:
        names = [name for group, name, *_ in self.index if group == domain]
        classes = tuple(sorted(set(names)))
        return torch.tensor([classes.index(name) for name in names]), classes

    def pixels(self, domain: str, shift: str | None = None) -> torch.Tensor:
        path = self.folder / f"{domain.replace('/', '-')}-{shift}.npy"
        if not path.is_file():
            jobs = [
                (self.file, start, length, shift)
                for group, _, start, length in self.index
                if group == domain
            ]
            part = path.with_suffix(".part")
            written = None
            for row, image in enumerate(
                self.pool.imap(decode, jobs, chunksize=32)
            ):  # never held twice
                if written is None:
                    shape = (len(jobs), *image.shape)
                    written = np.lib.format.open_memmap(
                        part, mode="w+", dtype=image.dtype, shape=shape
                    )
                written[row] = image
            part.replace(path)
        return torch.from_numpy(np.load(path, mmap_mode="c"))

    def store(self, domain: str, shift: str | None = None) -> Store:
        labels, classes = self.labels(domain)
        pixels = self.pixels(domain, shift)
        return Store(pixels, torch.arange(len(pixels)), labels, classes)


def subset(store: Any, classes: int | None) -> Any:
    """The images of the first classes only."""
    if classes is None:
        return store
    import dataclasses

    rows = (store.labels < classes).nonzero().flatten()
    return dataclasses.replace(
        store,
        values=store.values[rows],
        positions=torch.arange(len(rows)),
        labels=store.labels[rows],
    )


def tasks() -> list[dict[str, Any]]:
    """Every (kind of shift, source, target, image shift, classes in the target)."""
    pairs = [(s, t) for s in OFFICE for t in OFFICE if s != t]
    result = []
    for kind, shift, classes in (
        ("office31", None, None),
        ("office31-10", None, 10),
        ("office31-20", None, 20),
        ("office31-blur", "blur", None),
        ("office31-dark", "dark", None),
        ("office31-lines", "lines", None),
        ("office31-inverted", "inverted", None),
        ("office31-posterised", "posterised", None),
    ):
        for s, t in pairs:
            result.append(
                {
                    "kind": kind,
                    "source": f"office31/{s}",
                    "target": f"office31/{t}",
                    "shift": shift,
                    "classes": classes,
                }
            )
    for kind, s, t in (
        ("photo-cartoon", "photo", "cartoon"),
        ("cartoon-photo", "cartoon", "photo"),
    ):
        result.append(
            {
                "kind": kind,
                "source": f"pacs/{s}",
                "target": f"pacs/{t}",
                "shift": None,
                "classes": None,
            }
        )
    return result


class Kept:
    """Arrays and rows of the runs, in two files that are written from time to time."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.arrays: dict[str, dict[str, np.ndarray]] = {"choose": {}, "judge": {}}
        self.rows: dict[str, list[dict[str, Any]]] = {"choose": [], "judge": []}

    def add(self, row: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
        part = "choose" if row["kind"] in CHOOSE else "judge"
        self.rows[part].append(row)
        for name, value in arrays.items():
            self.arrays[part].setdefault(name, value)

    def write(self) -> None:
        for part, rows in self.rows.items():
            np.savez_compressed(self.out / f"{part}.npz", **self.arrays[part])
            (self.out / f"{part}.jsonl").write_text(
                "".join(json.dumps(row) + "\n" for row in rows)
            )


def describe(
    model: SourceModel, store: Any, runtime: Any, target: str, source: str
) -> dict[str, np.ndarray]:
    """Outputs of a source model on a target, computed once for all runs of that pair."""
    classifier = on_features(model.classifier) if store.is_features else model.classifier
    features, logits = forward_store(classifier, store, model.spec, runtime)
    draws = model.posterior.draws(features, DRAWS)
    predictive = model.posterior.predictive(features, 0.4, 128)
    key = f"{source}|{target}"
    return {
        f"{key}|probs": logits.softmax(1).half().cpu().numpy(),
        f"{key}|posterior": predictive.half().cpu().numpy(),
        f"{key}|draws": draws.argmax(2).to(torch.int8).cpu().numpy(),
        f"{key}|near-source": nearest_neighbours(features, 5)[0].to(torch.int16).cpu().numpy(),
    }


def one_run(
    model: SourceModel, store: Any, runtime: Any, settings: dict[str, Any], **extra: Any
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    began = time.time()
    adapted = usfan.adapt(
        model, store, runtime=runtime, guard=False, progress=False, **settings, **extra
    )
    assert adapted.passes is not None
    labels = store.labels
    before = adapted.passes.before
    after = adapted.passes.after
    right = [
        100 * float((o.logits.argmax(1).cpu() == labels).double().mean())
        for o in (before, after)
    ]
    history = adapted.history
    figures = [record["validators"] for record in history["records"]]
    arrays = {
        "path": torch.stack(adapted.passes.path).to(torch.int8).cpu().numpy(),
        "validators": np.array(
            [[f["entropy"], f["information_maximization"], f["diversity"]] for f in figures]
        ),
    }
    row = {
        "before": right[0],
        "after": right[1],
        "setting": (history["classes"] or {}).get("setting", "closed"),
    }
    return {**row, "seconds": round(time.time() - began, 2)}, arrays


GOOD = [
    {"method": m} for m in ("shot-im", "u-sfan", "shot", "u-sfan+", "u-sfan++", "aad", "nrc")
]
BAD = [{"method": m, "lr": 0.1} for m in ("shot-im", "u-sfan+", "u-sfan++")] + [
    {"method": "u-sfan", "preset": "paper"}
]


def frozen_worker(jobs: Any, results: Any, folder: str, weights: str) -> None:
    torch.set_num_threads(1)
    runtime = start_runtime(RuntimeConfig(device="cpu"))
    while True:
        job = jobs.get()
        if job is None:
            return
        try:
            results.put(frozen_job(job, runtime, Path(folder), weights))
        except Exception:
            results.put(({"kind": job["kind"], "error": traceback.format_exc()[-800:]}, {}))


def load_features(folder: Path, domain: str, shift: str | None, net: str) -> torch.Tensor:
    return torch.from_numpy(np.load(folder / f"f-{domain.replace('/', '-')}-{shift}-{net}.npy"))


def frozen_source(job: dict[str, Any], runtime: Any, folder: Path, weights: str) -> SourceModel:
    path = folder / "sources" / f"frozen-{job['source'].replace('/', '-')}-{job['seed']}"
    if not (path / "config.json").is_file():
        labels, classes = job["source_labels"]
        features = load_features(folder, job["source"], None, "lite0")
        store = Store(features, torch.arange(len(features)), labels, classes)
        model = usfan.train_source(
            store,
            backbone="tf_efficientnet_lite0",
            pretrained=weights,
            epochs=40,
            patience=0,
            seed=job["seed"],
            tune="new",
            runtime=runtime,
            progress=False,
        )
        model.save(path)
    return SourceModel.load(path)


def digits_job(job: dict[str, Any], runtime: Any, folder: Path) -> Any:
    sets = digits(Path(job["file"]))
    path = folder / "sources" / f"scratch-{job['source']}-{job['seed']}"
    if not (path / "config.json").is_file():
        images, labels = sets[job["source"]]
        data = usfan.ImageData(images, labels=labels, classes=[str(i) for i in range(10)])
        usfan.train_source(
            data,
            backbone="digits-cnn",
            epochs=8,
            seed=job["seed"],
            runtime=runtime,
            progress=False,
        ).save(path)
    model = SourceModel.load(path)
    images, labels = sets[job["target"]]
    if job["classes"] is not None:
        images = images[labels < job["classes"]]
        labels = labels[labels < job["classes"]]
    store = engine_store(usfan.ImageData(images), model.spec, runtime)
    store = Store(store.values, store.positions, torch.from_numpy(labels).long(), None)
    target = f"{job['target']}/None/{job['classes']}"
    source = f"scratch/{job['source']}/{job['seed']}"
    figures, arrays = one_run(model, store, runtime, {**job["settings"], "seed": job["seed"]})
    shared = describe(model, store, runtime, target, source)
    name = f"{source}|{target}|{json.dumps(job['settings'], sort_keys=True)}"
    row = {
        "kind": job["kind"],
        "source": source,
        "target": target,
        "tune": "all",
        "seed": job["seed"],
    }
    row |= {
        **job["settings"],
        **figures,
        "run": name,
    }  # the default of a network from scratch is all
    shared |= {f"{name}|{k}": v for k, v in arrays.items()}
    shared[f"{target}|labels"] = store.labels.to(torch.int8).numpy()
    return row, shared


def digits(file: Path) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    from sklearn.datasets import load_digits

    result = np.load(file)
    uci = load_digits()

    def side(images, size):
        return np.stack([np.asarray(Image.fromarray(i).resize((size, size))) for i in images])

    return {
        "mnist": (result["mx"], result["my"].astype(np.int64)),
        "usps": (side(result["ux"], 28), result["uy"].astype(np.int64)),
        "uci": (
            side((uci.images * 255 / 16).astype(np.uint8), 28),
            uci.target.astype(np.int64),
        ),
    }


def frozen_job(job: dict[str, Any], runtime: Any, folder: Path, weights: str) -> Any:
    if "file" in job:
        return digits_job(job, runtime, folder)
    model = frozen_source(job, runtime, folder, weights)
    if job.get("only_source"):
        return None
    features = load_features(folder, job["target"], job["shift"], "lite0")
    labels, classes = job["target_labels"]
    store = subset(
        Store(features, torch.arange(len(features)), labels, classes), job["classes"]
    )
    target = f"{job['target']}/{job['shift']}/{job['classes']}"
    source = f"frozen/{job['source']}/{job['seed']}"
    extra = {}
    if job["settings"]["method"] == "u-sfan++":
        extra["witness"] = store.values
    figures, arrays = one_run(
        model, store, runtime, {**job["settings"], "tune": "new", "seed": job["seed"]}, **extra
    )
    shared = describe(model, store, runtime, target, source)
    name = f"{source}|{target}|{json.dumps(job['settings'], sort_keys=True)}"
    row = {
        "kind": job["kind"],
        "source": source,
        "target": target,
        "tune": "new",
        "seed": job["seed"],
        **job["settings"],
        **figures,
        "run": name,
    }
    shared |= {f"{name}|{k}": v for k, v in arrays.items()}
    shared[f"{target}|labels"] = store.labels.to(torch.int8).numpy()
    return row, shared


def moving_worker(jobs: Any, results: Any, folder: str, packed: str, weights: str) -> None:
    torch.set_num_threads(2)
    runtime = start_runtime(RuntimeConfig(device="auto", compile="graph"))
    data = Data(Path(packed), Path(folder), 4)
    stores: dict[Any, Any] = {}
    while True:
        job = jobs.get()
        try:
            key = (job["target"], job["shift"])
            if key not in stores:
                store = data.store(*key)
                stores = {
                    key: Store(
                        store.values.to(runtime.device),
                        store.positions,
                        store.labels,
                        store.classes,
                    )
                }
            store = (
                subset(stores[key], job["classes"])
                if job["classes"] is None
                else subset(data.store(*key), job["classes"])
            )
            if job["classes"] is not None:
                store = Store(
                    store.values.to(runtime.device),
                    store.positions,
                    store.labels,
                    store.classes,
                )
            path = (
                Path(folder)
                / "sources"
                / f"{job['start']}-{job['source'].replace('/', '-')}-{job['seed']}"
            )
            model = SourceModel.load(path).to(runtime.device)
            target = f"{job['target']}/{job['shift']}/{job['classes']}"
            source = f"{job['start']}/{job['source']}/{job['seed']}"
            extra = {}
            if job["settings"]["method"] == "u-sfan++":
                witness = load_features(Path(folder), job["target"], job["shift"], "lite0")
                if job["classes"] is not None:
                    witness = witness[data.labels(job["target"])[0] < job["classes"]]
                extra["witness"] = witness.to(runtime.device)
            figures, arrays = one_run(
                model, store, runtime, {**job["settings"], "seed": job["seed"]}, **extra
            )
            shared = describe(model, store, runtime, target, source)
            name = f"{source}|{target}|{json.dumps(job['settings'], sort_keys=True)}"
            row = {
                "kind": job["kind"],
                "source": source,
                "target": target,
                "seed": job["seed"],
                **job["settings"],
                **figures,
                "run": name,
            }
            shared |= {f"{name}|{k}": v for k, v in arrays.items()}
            shared[f"{target}|labels"] = store.labels.to(torch.int8).cpu().numpy()
            results.put((row, shared))
        except Exception:
            results.put(({"kind": job["kind"], "error": traceback.format_exc()[-1500:]}, {}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--images", type=Path, required=True)
    parser.add_argument("--work", type=Path, default=Path("/tmp/corpus"))
    parser.add_argument("--seconds", type=float, default=500)
    parser.add_argument("--cores", type=int, default=os.cpu_count() or 2)
    parser.add_argument("--gpu-workers", type=int, default=3)
    parser.add_argument("--kinds", nargs="*")
    parser.add_argument("--targets", nargs="*", help="such as office31/dslr; all by default")
    parser.add_argument(
        "--methods", nargs="+", default=list(usfan.METHODS), help="of the frozen runs"
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[2019])
    parser.add_argument("--tuned-epochs", type=int, default=20)
    options = parser.parse_args()
    began = time.time()
    options.out.mkdir(parents=True, exist_ok=True)
    cuda = torch.cuda.is_available() and options.gpu_workers > 0
    context = multiprocessing.get_context("spawn")
    data = Data(options.images, options.work, options.cores)
    weights = str(options.images / "lite0.safetensors")
    todo = [t for t in tasks() if options.kinds is None or t["kind"] in options.kinds]
    todo = [t for t in todo if options.targets is None or t["target"] in options.targets]
    runtime = start_runtime(RuntimeConfig(device="auto"))

    wanted = {(t["target"], t["shift"]) for t in todo} | {(t["source"], None) for t in todo}
    for domain, shift in sorted(wanted, key=str):
        np.save(
            options.work / f"labels-{domain.replace('/', '-')}.npy",
            data.labels(domain)[0].numpy(),
        )
        for net in [
            n for n in ("lite0", "lite2") if (options.images / f"{n}.safetensors").is_file()
        ]:
            path = options.work / f"f-{domain.replace('/', '-')}-{shift}-{net}.npy"
            if not path.is_file():
                store = data.store(domain, shift)
                made = create_backbone(
                    f"tf_efficientnet_{net}", str(options.images / f"{net}.safetensors")
                )
                alone = BackboneAlone(made.module.to(runtime.device), channels_last=False)
                moved = Store(store.values.to(runtime.device), store.positions)
                images = moved.resized(made.spec.channels, made.spec.resize)
                np.save(
                    path, features_of(alone, images, made.spec, runtime).values.cpu().numpy()
                )
    print(f"features {time.time() - began:.0f} s", flush=True)

    kept = Kept(options.out)
    jobs = context.Queue()
    results = context.Queue()
    labels = {
        d: data.labels(d) for d in {t["source"] for t in todo} | {t["target"] for t in todo}
    }
    sources = sorted({t["source"] for t in todo})
    first = [
        {
            "kind": "-",
            "source": s,
            "seed": seed,
            "source_labels": labels[s],
            "only_source": True,
        }
        for s in sources
        for seed in options.seeds
    ]
    runs = []
    for seed in options.seeds:
        for settings in GOOD + BAD:
            for t in todo:
                if settings["method"] in options.methods:
                    runs.append(
                        {
                            **t,
                            "settings": settings,
                            "seed": seed,
                            "source_labels": labels[t["source"]],
                            "target_labels": labels[t["target"]],
                        }
                    )
    for job in first:
        jobs.put(job)
    cores = max(1, options.cores - (2 * options.gpu_workers if cuda else 0))
    pool = [
        context.Process(target=frozen_worker, args=(jobs, results, str(options.work), weights))
        for _ in range(cores)
    ]
    for process in pool:
        process.start()

    if cuda:  # fine-tuned sources, while the cores train the frozen ones
        for seed in options.seeds[:1]:
            for s in sources:
                path = options.work / "sources" / f"tuned-{s.replace('/', '-')}-{seed}"
                store = data.store(s)
                moved = Store(
                    store.values.to(runtime.device),
                    store.positions,
                    store.labels,
                    store.classes,
                )
                model = usfan.train_source(
                    moved,
                    backbone="tf_efficientnet_lite0",
                    pretrained=weights,
                    epochs=options.tuned_epochs,
                    patience=0,
                    seed=seed,
                    tune="all",
                    runtime=RuntimeConfig(compile="graph"),
                    progress=False,
                )
                model.save(path)
        torch.cuda.empty_cache()
        print(f"tuned sources {time.time() - began:.0f} s", flush=True)
    for _ in first:
        results.get(timeout=300)
    print(f"sources {time.time() - began:.0f} s, {len(runs)} frozen runs", flush=True)
    file = options.images / "digits" / "digits.npz"
    pairs = (("mnist", "uci"), ("uci", "mnist"), ("mnist", "usps"), ("usps", "mnist"))
    if file.is_file():
        for a, b in [
            pair for pair in pairs if options.kinds is None or "-".join(pair) in options.kinds
        ]:
            for classes in (None, 6):
                for settings in (
                    {"method": "shot-im"},
                    {"method": "u-sfan"},
                    {"method": "shot"},
                    {"method": "u-sfan+"},
                    {"method": "shot", "lr": 0.1},
                    {"method": "u-sfan", "preset": "paper"},
                    *({"method": "u-sfan", "tune": tune} for tune in ("new", "norm")),
                ):
                    made = {
                        "kind": f"{a}-{b}",
                        "source": a,
                        "target": b,
                        "classes": classes,
                        "shift": None,
                    }
                    runs.insert(
                        0,
                        {
                            **made,
                            "settings": settings,
                            "seed": options.seeds[0],
                            "file": str(file),
                        },
                    )
    for job in runs:
        jobs.put(job)
    moving = []
    if cuda:
        ladder = [
            {"start": "frozen", "settings": {"method": "u-sfan++", **move}}
            for move in ({"tune": "norm"}, {"tune": "all", "backbone_lr_scale": 0.01})
        ]
        tuned = [
            {"start": "tuned", "settings": {"method": m, "tune": "all", **more}}
            for m, more in (
                ("u-sfan++", {}),
                ("shot", {}),
                ("u-sfan", {"lr": 0.1}),
                ("shot-im", {}),
            )
        ]
        seed = options.seeds[0]
        pacs = ("photo-cartoon", "cartoon-photo")
        few = {("amazon", "webcam"), ("webcam", "amazon"), ("dslr", "webcam")}
        short = lambda t: (t["source"].split("/")[1], t["target"].split("/")[1])  # noqa: E731
        some = [
            t for t in todo if t["kind"] in pacs or (t["classes"] is None and short(t) in few)
        ]
        for way in ladder:
            moving += [{**t, **way, "seed": seed} for t in some]
        moving.sort(
            key=lambda job: (job["target"], job["shift"] or "")
        )  # one target's pixels at a time
        for way in tuned:
            moving += [{**t, **way, "seed": seed} for t in todo if t["shift"] is None]
    moves = context.Queue()
    for job in moving:
        moves.put(job)
    gpu = [
        context.Process(
            target=moving_worker,
            args=(moves, results, str(options.work), str(options.images), weights),
        )
        for _ in range(options.gpu_workers if cuda else 0)
    ]
    for process in gpu:
        process.start()
    left = len(runs) + len(moving)
    written = time.time()
    failures = 0
    while left and time.time() - began < options.seconds:
        try:
            result = results.get(timeout=5)
        except queue.Empty:
            continue
        left -= 1
        if result is None:
            continue
        row, arrays = result
        if "error" in row:
            failures += 1
            if failures < 4:
                print(row["error"], flush=True)
            continue
        kept.add(row, arrays)
        if time.time() - written > 60:
            kept.write()
            written = time.time()
            print(
                f"{time.time() - began:.0f} s:",
                *(len(rows) for rows in kept.rows.values()),
                f"runs, {left} left",
                flush=True,
            )
    kept.write()
    print(
        f"done {time.time() - began:.0f} s:",
        *(len(rows) for rows in kept.rows.values()),
        f"runs, {failures} failed, {left} left",
        flush=True,
    )
    for process in (*pool, *gpu):
        process.kill()


if __name__ == "__main__":
    main()
