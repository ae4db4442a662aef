"""The paper's toy experiment: a mild and a strong shift in the plane, one run per method and seed.

    usfan reproduce toy        → runs/toy/: the table (table.md, table.json), results.json, toy.png

The network is `toy-mlp`. Training and adaptation are those of `usfan train` and `usfan adapt` with their default
settings, except for those below. The prior precision is the weight decay, not times N: so the paper sets it for the
toy. "u-sfan (evidence)" takes the prior that the evidence prefers, "u-sfan (paper)" the settings of `--preset paper`.
docs/studies/toy.md shows the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from usfan.adaptation.methods import METHODS
from usfan.config import RuntimeConfig
from usfan.engine.runtime import start_runtime
from usfan.files import write_json, write_text, write_yaml
from usfan.progress import bar, say
from usfan.study.choices import PAPER, torch_threads
from usfan.study.results import Row, Table, aggregate, markdown_table
from usfan.study.toy_figure import DRAWN_METHODS, toy_figure
from usfan.study.toy_points import FLIPPED, SHIFTS, ToyRuns, accuracy, make_points, point_store
from usfan.training.source import train_source
from usfan.workflow import adapt_model

SEEDS = tuple(range(20))
WEIGHT_DECAY = 3e-3
SOURCE_EPOCHS = 50
TARGET_EPOCHS = 15
SOURCE_SETTINGS: dict[str, Any] = {
    "backbone": "toy-mlp",
    "bottleneck": 0,
    "head_bias": False,
    "head_norm": False,
    "label_smoothing": 0.0,
    "validation_share": 0.0,
    "weight_decay": WEIGHT_DECAY,
}
TARGET_SETTINGS: dict[str, Any] = {
    "setting": "closed",
    "tune": "all",
    "guard": False,
    "weight_decay": WEIGHT_DECAY,
    "prior": WEIGHT_DECAY,
}
VARIANTS = {
    "u-sfan (evidence)": {"prior": "evidence"},
    "u-sfan (paper)": {"preset": "paper"},
}
"""Further lines of the table: U-SFAN with other settings."""


def table_lines(methods: Sequence[str]) -> dict[str, dict[str, Any]]:
    """The name of each line of the table → its method and settings."""
    lines = {method: {"method": method, **TARGET_SETTINGS} for method in methods}
    if "u-sfan" in methods:
        for name, settings in VARIANTS.items():
            lines[name] = lines["u-sfan"] | settings
    return lines


def run_toy(
    seeds: Sequence[int] = SEEDS,
    *,
    out: Path,
    methods: Sequence[str] = PAPER,
    source_epochs: int = SOURCE_EPOCHS,
    epochs: int = TARGET_EPOCHS,
) -> list[ToyRuns]:
    """The command: writes the table and the picture to `out` and prints the table. It runs on the CPU."""
    runtime = start_runtime(RuntimeConfig(device="cpu"))
    lines = table_lines(methods)
    rows: list[Row] = []
    runs = []
    total = len(seeds) * len(SHIFTS) * len(lines)
    with bar("toy", total, "models") as progress, torch_threads(1):
        for seed in seeds:
            points, labels, targets = make_points(seed)
            training = {**SOURCE_SETTINGS, "epochs": source_epochs, "seed": seed}
            source = train_source(point_store(points, labels), runtime=runtime, **training)
            toy = ToyRuns(seed, labels, targets)
            runs.append(toy)
            for task, target in targets.items():
                for line, settings in lines.items():
                    if METHODS[settings["method"]].adapts:
                        settings = {**settings, "epochs": epochs}
                    store = point_store(target)
                    model = adapt_model(source, store, runtime=runtime, seed=seed, **settings)
                    toy.adapted[line, task] = model
                    seconds = model.history["seconds"]
                    row = {"method": line, "task": task, "seed": seed, "seconds": seconds}
                    rows.append({**row, "accuracy": accuracy(model, labels)})
                    progress.advance()
    config = {"command": "reproduce", "benchmark": "toy"}
    write_yaml(out / "config.yaml", config | {"seeds": list(seeds), "methods": list(methods)})
    write_json(out / "results.json", {"lines": lines, "source": SOURCE_SETTINGS, "rows": rows})
    Table.build(rows, title="Toy").write(out)
    write_text(out / "table.md", f"{toy_table(rows)}\n")
    if set(methods) >= DRAWN_METHODS:
        toy_figure(runs, out / "toy.png")
    print(toy_table(rows))
    say(f"{out}: table and picture; flipped: runs that end under {FLIPPED:.0f} %")
    return runs


def toy_table(rows: Sequence[Row]) -> str:
    """Mean ± standard deviation over seeds, and how many runs flipped, for each shift."""
    lines = []
    for method, averages in aggregate(rows).items():
        line = [method]
        for task in SHIFTS:
            accuracies = [
                r["accuracy"] for r in rows if (r["method"], r["task"]) == (method, task)
            ]
            flipped = sum(value < FLIPPED for value in accuracies)
            line += [averages[task].text(), str(flipped)]
        lines.append(line)
    return markdown_table(["method", "mild", "flipped", "strong", "flipped"], lines)
