"""Emoji of seven sets: data that no rule of usfan was chosen on when they were first run.

    python -m studies.emoji OUT.json --packages PACKAGES [--work WORK] [--part choose aside] [--runs auto]

PACKAGES holds the unpacked npm packages emoji-datasource 16.0.0, emoji-datasource-google 16.0.0,
emoji-datasource-twitter 16.0.0, openmoji 17.0.0 and fluentui-emoji 1.3.0, each in a folder of its name. Drawings are
rendered with `rsvg-convert`, 128 pixels on white. Classes are Unicode's subgroups, at most 60 images of each; the three
sets of fluentui lack some. Classes, tasks and splits were written down before the first run.

Frozen EfficientNet-Lite0, model after the last epoch, one seed. For each task and each true situation: the source
model, `--setting auto`, every flag, and (without new classes) other methods; and what the guard keeps, with
EfficientNet-Lite2 as its judge. Labels only score the runs.
"""

from __future__ import annotations

import argparse
import io
import json
import multiprocessing
import re
import statistics
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from studies.class_sets import classes_of, figures
from studies.guard_study import kept_by_the_guard
from torch import Tensor

import usfan
from usfan.adaptation.guard import guard_rows
from usfan.adaptation.thresholds import GUARD_DRAWS
from usfan.adaptation.witness import testimony, whole
from usfan.config import RuntimeConfig
from usfan.data.store import Store
from usfan.engine.features import BackboneAlone, features_of
from usfan.engine.passes import engine_store
from usfan.engine.runtime import start_runtime
from usfan.models.backbones import create_backbone
from usfan.store.model import SourceModel
from usfan.training.source import train_source
from usfan.workflow import adapt_model as adapt

NETWORK = "tf_efficientnet_lite0"
JUDGE = "tf_efficientnet_lite2"
TASKS = {
    "choose": "noto-twemoji twemoji-noto noto-openmoji openmoji-noto openmoji-twemoji noto-line openmoji-line",
    "aside": "noto-flat flat-noto twemoji-gradient gradient-openmoji noto-contrast contrast-line flat-contrast",
}
DOMAINS = ("noto", "twemoji", "openmoji", "line", "flat", "gradient", "contrast")
LISTED = """animal-mammal animal-bird animal-bug animal-marine plant food-fruit food-vegetable food-prepared food-sweet
drink clothing tool office household book-paper sport game event building time transport-ground person person-role
person-sport person-activity family face hand heart country-flag alphanum arrow av-symbol geometric body-parts computer
sky-weather light-video"""
GROUPS = sorted(LISTED.split())
MERGED = {"plant-flower": "plant", "plant-other": "plant", "place-building": "building"}
MOST = 60
LEAST = 8
SEED = 2021
KNOWN = ("all", "third", "few", "partial")
"""Situations without new classes: all classes, a third of them in source and target, five, a third in the target."""
NEW = ("open", "universal", "few-open")
FLAGS = ("auto", "closed", "partial", "open", "universal")
OTHERS: dict[str, dict[str, Any]] = {
    "shot-im": {"method": "shot-im"},
    "shot": {"method": "shot"},
    "u-sfan+, lr × 10": {"method": "u-sfan+", "lr": 0.1},
}


def drawings(packages: Path) -> Iterator[tuple[str, str, str, Path]]:
    """Domain, class, name and file of every image."""
    flat = {path.stem for path in (packages / "fluentui-emoji/icons/flat").iterdir()}
    open_set = {
        path.stem.replace("-FE0F", ""): path.stem
        for path in (packages / "openmoji/color/svg").iterdir()
    }
    taken: dict[str, int] = {}
    listed = json.loads((packages / "emoji-datasource/emoji.json").read_text())
    for emoji in sorted(listed, key=lambda e: e["sort_order"]):
        group = emoji["subcategory"].replace(" & ", "-")
        group = next(
            (whole for whole in ("face", "hand") if group.startswith(whole)),
            MERGED.get(group, group),
        )
        code = open_set.get(emoji["unified"].replace("-FE0F", ""))
        drawn = emoji["has_img_google"] and emoji["has_img_twitter"] and code is not None
        if group not in GROUPS or not drawn or taken.get(group, 0) >= MOST:
            continue
        taken[group] = taken.get(group, 0) + 1
        name = emoji["image"]
        yield "noto", group, name, packages / "emoji-datasource-google/img/google/64" / name
        yield (
            "twemoji",
            group,
            name,
            packages / "emoji-datasource-twitter/img/twitter/64" / name,
        )
        yield "openmoji", group, name, packages / f"openmoji/color/svg/{code}.svg"
        yield "line", group, name, packages / f"openmoji/black/svg/{code}.svg"
        slugs = [
            re.sub(r"[^a-z0-9]+", "-", n.lower()).strip("-")
            for n in (emoji["name"], *emoji["short_names"])
        ]
        result = next(
            (s for slug in slugs for s in (slug, f"{slug}-default") if s in flat), None
        )
        for domain, folder in (
            ("flat", "flat"),
            ("contrast", "high-contrast"),
            ("gradient", "modern"),
        ):
            if result is not None:
                yield (
                    domain,
                    group,
                    name,
                    packages / f"fluentui-emoji/icons/{folder}/{result}.svg",
                )


def draw(job: tuple[str, str, str, Path], out: Path) -> None:
    domain, group, name, path = job
    file = out / domain / group / name
    if file.exists():
        return
    drawn: Any = path
    if path.suffix == ".svg":
        command = ["rsvg-convert", "-w", "128", "-h", "128", str(path)]
        drawn = io.BytesIO(subprocess.run(command, capture_output=True, check=True).stdout)
    image = Image.open(drawn).convert("RGBA").resize((128, 128), Image.Resampling.BICUBIC)
    white = Image.new("RGB", image.size, "white")
    white.paste(image, mask=image.getchannel("A"))
    file.parent.mkdir(parents=True, exist_ok=True)
    white.save(file)


def features(
    work: Path, network: str, *, wholes: bool = False
) -> dict[str, tuple[Tensor, Tensor]]:
    """Features and class numbers of each domain, of crops or of whole images; computed once, kept in WORK."""
    runtime = start_runtime(RuntimeConfig(device="cpu"))
    result = {}
    backbone = create_backbone(network, "offline")
    spec = whole(backbone.spec, backbone.module) if wholes else backbone.spec
    for domain in DOMAINS:
        file = work / f"{domain}-{network}{'-whole' if wholes else ''}.npz"
        if not file.exists():
            store = engine_store(usfan.ImageData(work / "images" / domain), spec, runtime)
            seen = features_of(BackboneAlone(backbone.module), store, spec, runtime).values
            assert store.classes is not None
            members = np.array([GROUPS.index(name) for name in store.classes])
            np.savez(file, x=seen.half().cpu().numpy(), y=members[np.asarray(store.labels)])
        with np.load(file) as stored:
            result[domain] = (
                torch.from_numpy(stored["x"]).float(),
                torch.from_numpy(stored["y"]).long(),
            )
    return result


def split_of(situation: str, labels: tuple[Tensor, Tensor]) -> tuple[list[int], list[int]]:
    """Classes of source and target: a random third is shared, one is only in the source, one is new."""
    both = [
        c
        for c in range(len(GROUPS))
        if all(int((members == c).sum()) >= LEAST for members in labels)
    ]
    order = [
        both[i]
        for i in torch.randperm(
            len(both), generator=torch.Generator().manual_seed(501)
        ).tolist()
    ]
    third = len(order) // 3
    shared = order[:third]
    private = order[third : 2 * third]
    new = order[2 * third :]
    return {
        "all": (order, order),
        "third": (shared, shared),
        "few": (order[:5], order[:5]),
        "partial": (order, shared),
        "open": (shared, shared + new),
        "universal": (shared + private, shared + new),
        "few-open": (order[:5], order[:5] + order[10:15]),
    }[situation]


def store_of(
    features: tuple[Tensor, Tensor], classes: list[int], known: list[int]
) -> tuple[Store, Tensor]:
    """The images of these classes, labelled by their place in `known` (others come after the last); their positions."""
    x, y = features
    table = torch.full((len(GROUPS),), len(known))
    table[known] = torch.arange(len(known))
    rows = torch.isin(y, torch.tensor(classes)).nonzero().flatten()
    names = tuple(GROUPS[c] for c in known)
    return Store(x[rows].clone(), torch.arange(len(rows)), table[y[rows]], names), rows


def one_case(job: tuple[Any, ...]) -> list[dict[str, Any]]:
    part, task, situation, seen, wholes, judged, chosen = job
    torch.set_num_threads(1)
    runtime = RuntimeConfig(device="cpu")
    source, target = task.split("-")
    known, shown = split_of(situation, (seen[source][1], seen[target][1]))
    settings: dict[str, Any] = {
        "backbone": NETWORK,
        "pretrained": "offline",
        "seed": SEED,
        "epochs": 40,
    }
    model = train_source(store_of(seen[source], known, known)[0], runtime=runtime, **settings)
    store, rows = store_of(seen[target], shown, known)
    assert store.labels is not None
    true = torch.bincount(store.labels, minlength=len(known) + 1)[: len(known)]
    runs: dict[str, dict[str, Any]] = {
        "source-only": {"method": "source-only", "setting": "closed"}
    }
    told = testimony(wholes[target][0][rows], classes_of(NETWORK))
    runs |= {flag: {"method": "u-sfan++", "setting": flag, "witness": told} for flag in FLAGS}
    if situation in KNOWN:
        runs |= {name: {**members, "setting": "closed"} for name, members in OTHERS.items()}
    result = []
    for name, members in runs.items():
        if chosen and name not in chosen:
            continue
        adapted = adapt(
            model, store, runtime=runtime, guard=False, seed=SEED, tune="new", **members
        )
        row = {
            "part": part,
            "task": task,
            "situation": situation,
            "run": name,
            **figures(adapted, store, true),
        }
        if judged and situation in KNOWN and name not in ("source-only", "open", "universal"):
            row |= guarded(model, adapted, store, judged[target][0][rows])
        result.append(row)
    return result


def guarded(model: SourceModel, adapted: Any, store: Store, seen: Tensor) -> dict[str, Any]:
    """What the guard keeps of a run, if this network judges it."""
    before = adapted.passes.before
    path = torch.stack([members.long() for members in adapted.passes.path])
    rows = guard_rows(len(store))
    draws = model.posterior.draws(before.features[rows], GUARD_DRAWS).argmax(dim=2)
    kept, estimate = kept_by_the_guard(before, path, draws, seen[rows], {})
    right = [
        round(100 * float((members == store.labels).double().mean()), 2) for members in path
    ]
    accuracies = {"before": right[0], "after": right[-1], "with_guard": right[kept.epoch]}
    return {**accuracies, "kept": kept.kept, "estimate": estimate}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--packages", type=Path, required=True)
    parser.add_argument("--work", type=Path, default=Path("emoji"))
    parser.add_argument("--part", nargs="+", default=["choose", "aside"])
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--runs", nargs="+", help="only these, without the guard")
    options = parser.parse_args()
    with ThreadPoolExecutor(options.jobs) as pool:
        list(
            pool.map(lambda job: draw(job, options.work / "images"), drawings(options.packages))
        )
    seen = features(options.work, NETWORK)
    judged = None if options.runs else features(options.work, JUDGE)
    wholes = features(options.work, NETWORK, wholes=True)
    jobs = [
        (part, task, situation, seen, wholes, judged, options.runs)
        for part in options.part
        for task in TASKS[part].split()
        for situation in KNOWN + NEW
    ]
    rows: list[dict[str, Any]] = []
    with multiprocessing.get_context("fork").Pool(options.jobs) as pool:
        for result in pool.imap(one_case, jobs):
            rows += result
            print(
                *result[0]["task"].split("-"),
                result[0]["situation"],
                *(f"{r['run']} {r['score']:.1f}" for r in result),
            )
            lines = ",\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
            options.out.write_text(f'{{"rows": [\n{lines}\n]}}\n')
    for part in options.part:
        for situation in KNOWN + NEW:
            members = [
                row for row in rows if (row["part"], row["situation"]) == (part, situation)
            ]
            names = dict.fromkeys(row["run"] for row in members)
            scores = {
                n: round(statistics.fmean(r["score"] for r in members if r["run"] == n), 1)
                for n in names
            }
            print(part, situation, scores)


if __name__ == "__main__":
    main()
