"""The tables of the README and of every page under docs/, from the rows saved in docs/results/.

A page marks the place of a table by two comments, `<!-- table NAME -->` and `<!-- end -->`. A test checks that the text
between them is what this file computes.

.venv/bin/python docs/make_tables.py            # print the tables
.venv/bin/python docs/make_tables.py --write    # put them into their pages
"""

from __future__ import annotations

import collections
import functools
import json
import re
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).parent
sys.path.append(str(HERE.parent))  # studies
OPEN_FIGURES = {
    "os": "OS",
    "os_star": "OS*",
    "unknown_accuracy": "UNK",
    "hos": "HOS",
    "auroc_unknown": "AUROC",
    "aupr_unknown": "AUPR",
}


def load(name: str) -> dict:
    return json.loads((HERE / "results" / name).read_text(encoding="utf-8"))


def over_seeds(values: dict[int, list[float]]) -> str:
    """Mean over tasks within each seed, then mean ± std over seeds."""
    means = [statistics.fmean(v) for v in values.values()]
    spread = f" ± {statistics.stdev(means):.1f}" if len(means) > 1 else ""
    return f"{statistics.fmean(means):.1f}{spread}"


def by_seed(rows: list[dict], read) -> dict[int, list[float]]:
    seeds: dict[int, list[float]] = {}
    for row in rows:
        seeds.setdefault(row["seed"], []).append(read(row))
    return seeds


def markdown(header: list[str], lines: list[list[str]]) -> str:
    rule = ["---", *["---:"] * (len(header) - 1)]
    return "\n".join("| " + " | ".join(line) + " |" for line in (header, rule, *lines))


def digits_table() -> str:
    metrics = load("digits.json")["metrics"]
    pairs = list(metrics)
    lines = []
    for method in metrics[pairs[0]]:
        cells = [metrics[pair][method] for pair in pairs]
        lines.append(
            [
                method,
                *(text for c in cells for text in (f"{c['accuracy']:.1f}", f"{c['ece']:.1f}")),
            ]
        )
    return markdown(
        [
            "method",
            *(f"{pair.replace('-', '→')} {f}" for pair in pairs for f in ("accuracy", "ECE")),
        ],
        lines,
    )


def peers_table() -> str:
    """Averages over the six tasks of Office-31, beside what the authors report with ResNet-50."""
    from usfan.adaptation.methods import METHODS

    cases = {
        method: rows
        for method, rows in by_case(load("field-methods.json")["rows"], "method").items()
        if method in METHODS and not method.endswith("entropy")
    }
    order = sorted(cases, key=lambda m: statistics.fmean(r["accuracy"] for r in cases[m]))
    lines = []
    for method in order:
        here = over_seeds(by_seed(cases[method], lambda r: r["accuracy"]))
        published = METHODS[method].published.split("/")[0] or "–"
        lines.append([dagger(method, cases[method]), here, published])
    return markdown(["method", "here", "published"], lines)


def paper_rows(*tables: str) -> list[dict]:
    return [row for row in load("paper.json")["rows"] if row["table"] in tables]


def marked(name: str, rows: list[dict]) -> str:
    """The name with a dagger if its rows were measured with another code of the method, or with one that nobody
    recorded."""
    from studies.code import code_of

    codes = {row.get("code") == code_of(row.get("settings", row)["method"]) for row in rows}
    return name if codes == {True} else f"{name} †"


def difference(rows: list[dict], base: list[dict], figure: str) -> str:
    """The mean difference of cells paired by table, task and seed, ± its standard error over tasks (each is the mean
    of its seeds), and the number of cells that are higher."""

    def cell(row: dict) -> tuple:
        return row.get("table", "-").split()[-1], row["task"], row["seed"]

    before = {cell(row): row[figure] for row in base}
    pairs = [
        (cell(row), row[figure] - before[cell(row)]) for row in rows if cell(row) in before
    ]
    by_task: dict[tuple, list[float]] = collections.defaultdict(list)
    for (table, task, _), change in pairs:
        by_task[table, task].append(change)
    means = [statistics.fmean(changes) for changes in by_task.values()]
    error = statistics.stdev(means) / len(means) ** 0.5 if len(means) > 1 else 0.0
    wins = sum(change > 0 for _, change in pairs)
    return f"{statistics.fmean(means):+.1f} ± {error:.1f} ({wins} of {len(pairs)})"


def whole_seeds(rows: list[dict], tasks: set[str]) -> list[dict]:
    """The rows of the seeds that have every task."""
    tasks_of = collections.defaultdict(set)
    for row in rows:
        tasks_of[row["seed"]].add(row["task"])
    return [row for row in rows if tasks_of[row["seed"]] >= tasks]


def by_case(rows: list[dict], name: str = "case") -> dict[str, list[dict]]:
    cases: dict[str, list[dict]] = {}
    for row in rows:
        cases.setdefault(row[name], []).append(row)
    return cases


def paper_closed_table() -> str:
    """Accuracy by task; differences to SHOT-IM in the same cells."""
    cases = closed = by_case(paper_rows("closed"))
    tasks = sorted({row["task"] for rows in cases.values() for row in rows})
    lines = []
    for name, rows in cases.items():
        line = [marked(name, rows)]
        for task in tasks:
            values = [row["accuracy"] for row in rows if row["task"] == task]
            line.append(f"{statistics.fmean(values):.1f}" if values else "–")
        whole = by_seed(whole_seeds(rows, set(tasks)), lambda r: r["accuracy"])
        line.append(over_seeds(whole) if whole else "–")
        line.append(
            "" if name == "shot-im" else difference(rows, closed["shot-im"], "accuracy")
        )
        lines.append(line)
    header = ["→".join(name[0].upper() for name in task.split("→")) for task in tasks]
    return markdown(["case", *header, "average", "over SHOT-IM"], lines)


def paper_open_table() -> str:
    """Open-set figures, and differences to SHOT-IM in the same cells."""
    cases = first = by_case(paper_rows("open"))
    figures = {name: label for name, label in OPEN_FIGURES.items() if name != "aupr_unknown"}
    lines = []
    tasks = {row["task"] for rows in cases.values() for row in rows}
    for name, rows in cases.items():
        line = [marked(name, rows)]
        whole = whole_seeds(rows, tasks)
        line += [over_seeds(by_seed(whole, lambda r, f=f: r[f])) for f in figures]
        for figure in ("os", "hos"):
            line.append("" if name == "shot-im" else difference(rows, first["shot-im"], figure))
        lines.append(line)
    header = ["case", *figures.values(), "OS over SHOT-IM", "HOS over SHOT-IM"]
    return markdown(header, lines)


def separation_choice_table() -> str:
    """The weight of separation on the classes that it was chosen on."""
    cases = by_case([row for row in load("paper.json")["rows"] if "choose" in row["table"]])
    lines = []
    for name, rows in cases.items():
        means = [statistics.fmean(row[f] for row in rows) for f in OPEN_FIGURES if f in rows[0]]
        lines.append([name, str(len(rows)), *(f"{mean:.1f}" for mean in means)])
    shown = [label for f, label in OPEN_FIGURES.items() if f != "aupr_unknown"]
    return markdown(["case", "runs", *shown], lines)


def suite_table(name: str) -> str:
    """Every row of a benchmark's suite."""
    rows = load(f"{name}.json")["suites"][name]
    digits = {"images/s": 0, "MiB": 0, "bytes": 0}
    lines = []
    for row in rows:
        ratio = (
            f"{row['ratio']:.1f} ×"
            if row["ratio"] is not None and row["wanted"] is None
            else row["note"]
        )
        lines.append(
            [
                f"{row['group']}: {row['case']}",
                f"{row['value']:,.{digits.get(row['unit'], 1)}f} {row['unit']}",
                ratio,
            ]
        )
    return markdown(["case", "value", "note"], lines)


def toy_table() -> str:
    from usfan.study.toy import toy_table

    return toy_table(load("toy.json")["rows"])


def guard_gain(rows: list[dict], task: Callable[[dict], object], base: str = "after") -> str:
    """Mean of the kept model's accuracy minus that of always adapting ("before": of never adapting), ± its standard
    error, runs of one task taken together."""
    changes = [(task(row), row["with_guard"] - row[base]) for row in rows]
    mean = statistics.fmean(change for _, change in changes)
    sums: dict[object, float] = collections.defaultdict(float)
    for name, change in changes:
        sums[name] += change - mean
    count = len(sums)
    error = (sum(s * s for s in sums.values()) * count / (count - 1)) ** 0.5 / len(changes)
    return f"{mean:+.2f} ± {error:.2f}"


def guard_summary_table() -> str:
    """The guard over all runs of each half."""
    lines = []
    for part, title in (("choose", "chosen on"), ("judge", "set aside")):
        study = load(f"guard-{part}.json")
        members = study["all"]
        gain = guard_gain(study["rows"], lambda row: (row["source"], row["target"]))
        losses = [
            members["loss"],
            members["old"]["loss"],
            members["loss_always_adapting"],
            members["loss_never_adapting"],
        ]
        counts = [str(members["below_by_3"]), str(members["thrown_away_5"])]
        losses = [f"{loss:.2f}" for loss in losses]
        lines.append([title, str(members["runs"]), *losses, gain, *counts])
    header = [
        "shifts",
        "runs",
        "loss",
        "old guard",
        "always adapting",
        "never adapting",
        "over always adapting",
        "kept 3 below source",
    ]
    return markdown([*header, "gains of 5 lost"], lines)


HARM = 1.0
"""Points below the source model that count as harm on poisoned targets."""


def below_source(rows: list[dict], *, clean: bool) -> list[dict]:
    """Runs whose kept model is worse than its source, on the poisoned images or on the same ones without poison."""
    before, kept = ("clean_before", "clean_kept") if clean else ("before", "kept")
    return [row for row in rows if row[before] - row[kept] > HARM]


def poisoned_table() -> str:
    """Means over tasks and attacks, and counts of runs."""
    groups = collections.defaultdict(list)
    for row in load("poisoned.json")["rows"]:
        groups[row["family"], row["method"]].append(row)
    lines = []
    for (family, method), rows in groups.items():
        figures = ("before", "after", "kept", "clean_before", "clean_kept")
        means = [f"{statistics.fmean(row[name] for row in rows):.1f}" for name in figures]
        better = sum(row["verdict"] == "better" for row in rows)
        worse = [len(below_source(rows, clean=clean)) for clean in (False, True)]
        lines.append([family, method, str(len(rows)), *means, *map(str, (*worse, better))])
    header = ["target", "method", "runs", "source", "last", "kept", "source, clean"]
    return markdown(
        [*header, "kept, clean", "below", "below, clean", "said better"],
        lines,
    )


def poisoned_claims() -> list[str]:
    rows = load("poisoned.json")["rows"]
    poisoned, clean = (below_source(rows, clean=clean) for clean in (False, True))
    better = sum(row["verdict"] == "better" for row in clean)
    return [
        f"on the poisoned target in {len(poisoned)} of {len(rows)} runs",
        f"on the same images without poison in {len(clean)}",
        f"the verdict says `better` in {better} of these",
    ]


SITUATIONS = {
    "all": "all 31 classes",
    "partial": "10 of 31",
    "open": "10 known, 11 new (H-score)",
    "universal": "10 shared, 10 missing, 11 new (H-score)",
    "tail": "long tail, 50:1",
}


def class_sets_table() -> str:
    """Accuracy, or H-score if there are new classes, by true situation and flag."""
    rows = load("class-sets.json")["rows"]
    flags = list(dict.fromkeys(r["flag"] for r in rows))
    lines = []
    for situation, title in SITUATIONS.items():
        members = [
            [r["score"] for r in rows if (r["situation"], r["flag"]) == (situation, f)]
            for f in flags
        ]
        lines.append([title, *(f"{statistics.fmean(values):.1f}" for values in members)])
    return markdown(["classes of the target", *flags], lines)


FOUND = ("precision", "recall", "tv")


def class_sets_found_table() -> str:
    """What `auto` found: the setting, the classes that occur, the shares."""
    rows = [r for r in load("class-sets.json")["rows"] if r["flag"] == "auto"]
    lines = []
    for situation, title in SITUATIONS.items():
        members = [r for r in rows if r["situation"] == situation]
        counts = {
            s: sum(r["setting"] == s for r in members)
            for s in ("closed", "partial", "open", "universal")
        }
        shown = ", ".join(f"{name} {count}" for name, count in counts.items() if count)
        mean = {
            f"{n}_{w}": statistics.fmean(r[f"{n}_{w}"] for r in members)
            for n in FOUND
            for w in ("before", "after")
        }
        lines.append(
            [
                title,
                shown,
                *(f"{mean[f'{n}_before']:.2f} / {mean[f'{n}_after']:.2f}" for n in FOUND),
            ]
        )
    return markdown(["classes of the target", "found", "precision", "recall", "TV"], lines)


def field_table() -> str:
    """Every method, by task."""
    rows = load("field-methods.json")["rows"]
    methods = [
        m
        for m in dict.fromkeys(r["method"] for r in rows)
        if not m.startswith("u-sfan++ ") or "Lite2" in m
    ]
    tasks = {r["task"] for r in rows}
    return task_table(rows, methods, sorted(tasks))


CORRECTED = ("upa", "lsc", "tent", "cowa")
"""Methods whose terms were corrected after the rows without a digest were measured."""


def dagger(method: str, rows: list[dict]) -> str:
    """The method, marked if its rows are older than a change of its code, as far as that is known."""
    if all("code" in row for row in rows):
        return marked(method, rows)
    return f"{method} †" if method in CORRECTED else method


def ablation_table() -> str:
    rows = load("field-methods.json")["rows"]
    methods = [m for m in dict.fromkeys(r["method"] for r in rows) if m.startswith("u-sfan++")]
    return task_table(rows, methods, sorted({r["task"] for r in rows}))


def task_table(rows: list[dict], methods: list[str], tasks: list[str]) -> str:
    lines = []
    for method in methods:
        members = [r for r in rows if r["method"] == method]
        seeds = collections.Counter(r["seed"] for r in members)
        members = [
            r for r in members if seeds[r["seed"]] == len(tasks)
        ]  # seeds with every task
        cells = [
            statistics.fmean(r["accuracy"] for r in members if r["task"] == task)
            for task in tasks
        ]
        lines.append(
            [
                dagger(method, members),
                *(f"{c:.1f}" for c in cells),
                over_seeds(by_seed(members, lambda r: r["accuracy"])),
            ]
        )
    short = ["→".join(part[0].upper() for part in task.split("-")) for task in tasks]
    return markdown(["method", *short, "average"], lines)


def growth_table() -> str:
    rows = load("growth.json")["rows"]
    names = {
        "neighbours": "neighbours",
        "clustering": "clustering",
        "per_epoch": "epoch",
        "adaptation": "adaptation",
    }
    lines = []
    for r in rows:
        place = "H200" if r["device"] == "cuda" else f"CPU, {r['threads']} threads"
        lines.append(
            [f"{r['images']:,}", place, *(f"{r[n]:.2f}" for n in names), f"{r['peak_gib']:.1f}"]
        )
    return markdown(
        ["images", "device", *(f"{n}, s" for n in names.values()), "peak, GiB"], lines
    )


def against_table() -> str:
    """CPU seconds and peak memory of commands, beside those of an older commit."""
    text = (HERE / "results" / "against.jsonl").read_text(encoding="utf-8")
    lines = []
    older: dict[tuple, dict] = {}
    rows = [json.loads(line) for line in text.splitlines()]
    for row in rows:
        if row["side"] == "other":
            older[row["case"], row["images"]] = row
    for row in rows:
        other = older.get((row["case"], row["images"]))
        if row["side"] == "other":
            continue
        cells = [f"{row['cpu']:.0f} s", f"{row['peak_mib']:,} MiB"]
        if other is None:
            cells += ["", "", ""]
        else:
            cells += [f"{other['cpu']:.0f} s", f"{other['peak_mib']:,} MiB"]
            cells.append(f"{row['cpu'] / other['cpu']:.2f}")
        name = f"{row['case']}, {row['images']:,} images, {row['engine']}"
        lines.append([name, *cells])
    older_names = ["89cd3c6: CPU", "89cd3c6: peak", "ratio of CPU"]
    return markdown(["command", "CPU", "peak", *older_names], lines)


def classes_table() -> str:
    """Seconds and memory of the posterior by the number of classes."""
    figures = {
        "fit_s": "fit, s",
        "set_up_s": "first batch, s",
        "predictive_s": "a batch, s",
        "stored_mib": "stored, MiB",
        "peak_mib": "peak, MiB",
    }
    lines = []
    for row in load("growth-classes.json")["rows"]:
        lines.append([f"{row['classes']:,}", *(f"{row[name]:,.4g}" for name in figures)])
    return markdown(["classes", *figures.values()], lines)


def cost_table() -> str:
    """Hours and bytes for so many images, from the rates of one core and one GPU."""
    rates = load("growth-rates.json")
    decoding = 1 / rates["decode_core"]
    lines = []
    for power in (6, 8, 9):
        for name, passes in {"predict": ("model",), "adapt": ("model", "witness")}.items():
            core = sum(2 / rates[f"{one}_two_cores"] for one in passes)
            gpu = sum(1 / rates[f"{one}_gpu"] for one in passes)
            seconds = (decoding, decoding + core, gpu)
            hours = []
            for each in seconds:
                count = 10**power * each / 3600
                hours.append(f"{count:,.0f}" if count >= 10 else f"{count:.2g}")
            read = f"{10**power * rates['bytes'] / 1e9:,.0f}"
            lines.append([f"10^{power} images, {name}", *hours, read])
    names = ["core hours: decoding", "decoding and passes", "GPU hours: passes", "GB read"]
    return markdown(["", *names], lines)


EMOJI = {
    "all": "all classes",
    "third": "a third of the classes",
    "few": "five classes",
    "partial": "a third, source has all",
    "open": "a third known, a third new (H-score)",
    "universal": "a third shared, one missing, one new (H-score)",
    "few-open": "five known, five new (H-score)",
}
HALVES = {"choose": "chosen on", "aside": "set aside"}


def emoji_table() -> str:
    """Accuracy, or H-score if there are new classes, by true situation and flag."""
    rows = load("emoji.json")["rows"]
    lines = []
    flags = ("source-only", "auto", "closed", "partial", "open", "universal")
    for part, half in HALVES.items():
        for situation, title in EMOJI.items():
            members = [r for r in rows if (r["part"], r["situation"]) == (part, situation)]
            scores = [
                statistics.fmean(r["score"] for r in members if r["run"] == flag)
                for flag in flags
            ]
            lines.append([f"{half}: {title}", *(f"{score:.1f}" for score in scores)])
    return markdown(["classes of the target", *flags], lines)


def guarded_emoji_runs() -> list[dict]:
    """Without `closed`, which `auto` mostly chooses: one run, not two."""
    rows = load("emoji.json")["rows"]
    return [row for row in rows if "kept" in row and row["run"] != "closed"]


def emoji_guard(part: str) -> dict[str, float]:
    """What the guard kept, and what it estimated."""
    rows = [row for row in guarded_emoji_runs() if row["part"] == part]
    best = [max(r["before"], r["after"]) for r in rows]
    loss = lambda name: statistics.fmean(b - r[name] for b, r in zip(best, rows, strict=True))  # noqa: E731
    figures = {
        "runs": len(rows),
        "loss": loss("with_guard"),
        "always": loss("after"),
        "never": loss("before"),
    }
    figures["below"] = sum(r["with_guard"] < r["before"] - 3 for r in rows)
    figures["below_always"] = sum(r["after"] < r["before"] - 3 for r in rows)
    figures["lost"] = sum(r["after"] - r["with_guard"] > 5 for r in rows)
    for when in ("before", "after"):
        guesses = [(r["estimate"][when], r[when]) for r in rows]
        figures[f"error_{when}"] = statistics.fmean(
            abs(g["value"] - true) for g, true in guesses
        )
        figures[f"covered_{when}"] = statistics.fmean(
            g["low"] <= true <= g["high"] for g, true in guesses
        )
    return figures


def emoji_guard_table() -> str:
    header = [
        "runs",
        "number",
        "loss",
        "always adapting",
        "never adapting",
        "3 below source",
        "gains of 5 lost",
    ]
    header += ["estimate off by, before / after", "inside the interval"]
    lines = []
    for part, half in HALVES.items():
        f = emoji_guard(part)
        cells = [f"{f['runs']}", *(f"{f[name]:.2f}" for name in ("loss", "always", "never"))]
        cells += [f"{f['below']} (always adapting: {f['below_always']})", f"{f['lost']}"]
        cells += [f"{f['error_before']:.1f} / {f['error_after']:.1f}"]
        lines.append(
            [
                half,
                *cells,
                f"{100 * f['covered_before']:.0f} % / {100 * f['covered_after']:.0f} %",
            ]
        )
    return markdown(header, lines)


def uncertainties_table(setting: str) -> str:
    """U-SFAN with its certainty from each kind of uncertainty."""
    rows = [r for r in load("uncertainty.json")["rows"] if r["setting"] == setting]
    columns = {"accuracy": "accuracy", "ece": "ECE", "before_ece": "ECE, source model"}
    if setting == "open":
        columns = {"os_star": "OS*", "hos": "HOS", "ece": "ECE"} | {
            f"{when}auroc_{score}": f"AUROC, {name}{told}"
            for score, name in (
                ("posterior-entropy", "entropy"),
                ("mutual-information", "information"),
            )
            for when, told in (("", ""), ("before_", ", source model"))
        }
    lines = []
    for case in dict.fromkeys(r["case"] for r in rows):
        members = [r for r in rows if r["case"] == case]
        cells = [over_seeds(by_seed(members, lambda r, c=column: r[c])) for column in columns]
        seconds = (
            statistics.fmean(r["seconds"] for r in members),
            statistics.fmean(r["source_seconds"] for r in members),
        )
        lines.append(
            [case, *cells, f"{seconds[0]:.1f}" + (f" + {seconds[1]:.1f}" if seconds[1] else "")]
        )
    return markdown(["certainty from", *columns.values(), "seconds"], lines)


MIXINGS = {
    "best": "best single source, by hindsight",
    "worst": "other single source",
    "evidence": "mixed by evidence",
    "certainty": "mixed by certainty, per sample",
    "mean": "mean of the models",
    "learned": "DECISION's weights, after adaptation",
    "joint": "DECISION, trained together",
}


def several_sources_table(data: str, method: str) -> str:
    """Accuracy of two sources mixed in each way, task by task."""
    rows = [
        r
        for r in load(f"several-sources-{data}.json")["rows"]
        if r["method"] in (method, "decision")
    ]
    for row in rows:
        if "single" in row:
            row |= {"best": max(row["single"]), "worst": min(row["single"])}
    tasks = list(dict.fromkeys(r["task"] for r in rows))
    lines = []
    for name, title in MIXINGS.items():
        members = [r for r in rows if name in r]
        if members:
            groups = [[r for r in members if r["task"] == task] for task in tasks]
            lines.append(
                [
                    title,
                    *(
                        over_seeds(by_seed(group, lambda r, n=name: r[n]))
                        for group in (*groups, members)
                    ),
                ]
            )
    return markdown(["", *tasks, "average"], lines)


def suite_summary(name: str, *wanted: str) -> str:
    """The rows of a benchmark's suite whose case contains one of these words."""
    rows = suite_table(name).splitlines()
    return "\n".join(
        [*rows[:2], *(row for row in rows[2:] if any(word in row for word in wanted))]
    )


def estimates_table(name: str) -> str:
    sys.path.append(str(HERE.parent))
    from studies.estimates import tables

    check, runs = (HERE / "results" / f"estimates-{part}.jsonl" for part in ("check", "runs"))
    return tables(check, runs)[name]


FAMILIES = {
    "office31": "Office-31 (6 tasks)",
    "shifts": "its made shifts",
    "pacs": "PACS (6)",
    "pacs40": "PACS, 40 images per class (6)",
    "lines": "PACS line drawings (6)",
    "emoji": "emoji (14)",
    "leaf": "leaf photographs (1)",
    "digits": "digits, from scratch (4)",
}
"""Families of tasks, in the order of the tables."""


def task_values(rows: list[dict]) -> list[float]:
    """The mean over seeds of each task."""
    by_task: dict[str, list[float]] = {}
    for row in rows:
        by_task.setdefault(row["task"], []).append(row["accuracy"])
    return [statistics.fmean(values) for values in by_task.values()]


def mean_and_error(values: list[float], sign: str = "") -> str:
    """Mean ± standard error over tasks."""
    if not values:
        return "–"
    mean = f"{statistics.fmean(values):{sign}.1f}"
    if len(values) < 2:
        return mean
    return f"{mean} ± {statistics.stdev(values) / len(values) ** 0.5:.1f}"


def families_table(*methods: str) -> str:
    """Every family and method; the last column is U-SFAN++ minus SHOT, task by task."""
    rows = load("families.json")["rows"]
    methods = methods or (
        "shot-im",
        "shot",
        "u-sfan",
        "u-sfan+",
        "aad",
        "u-sfan++ 0.2",
        "u-sfan++",
    )
    lines = []
    for family, title in FAMILIES.items():
        members = [r for r in rows if r["family"] == family]
        if not members:
            continue
        cells = []
        for method in ("source-only", *methods):
            values = task_values([r for r in members if r["method"] == method])
            cells.append(f"{statistics.fmean(values):.1f}" if values else "–")
        ours = [r for r in members if r["method"] == "u-sfan++"]
        keys = {(r["task"], r["seed"]): r["accuracy"] for r in members if r["method"] == "shot"}
        pairs = [
            {**r, "accuracy": r["accuracy"] - keys[r["task"], r["seed"]]}
            for r in ours
            if (r["task"], r["seed"]) in keys
        ]
        lines.append([title, *cells, mean_and_error(task_values(pairs), "+")])
    return markdown(["family", "source-only", *methods, "u-sfan++ − shot"], lines)


def labels_table(family: str) -> str:
    """Accuracy by the number of labels, for one family: means over the tasks and seeds that all rows of today have."""
    rows = [r for r in load("labels.json")["rows"] if r["family"] == family]
    cases = collections.defaultdict(dict)
    for row in rows:
        cases[row["method"], row["labels"]][row["task"], row["seed"]] = row["accuracy"]
    today = [
        values.keys()
        for (method, labels), values in cases.items()
        if method != "u-sfan++ 0.2" and "noisy" not in labels
    ]
    shared = set.intersection(*map(set, today))
    lines = []
    for method, kind in (
        ("labels alone", "random"),
        ("source head", "random"),
        ("u-sfan++ 0.2", "random"),
        ("u-sfan++", "random"),
        ("u-sfan++", "asked"),
    ):
        cells = []
        for budget in ("none", *(f"{kind}:{count}xK" for count in (1, 2, 5, 10))):
            values = cases.get((method, budget), {})
            complete = shared <= values.keys()
            mean = statistics.fmean(values[key] for key in shared) if complete else None
            cells.append("–" if mean is None else f"{mean:.1f}")
        if set(cells) == {"–"}:
            continue
        lines.append([f"{method}, {kind} images", *cells])
    return markdown([f"{len(shared)} runs", "0", "K", "2K", "5K", "10K"], lines)


def replays_table() -> str:
    """Decisions by the true difference: of runs, and of made populations."""
    rows = load("replays.json")["rows"]
    bounds = {"20 points and more": 20.0, "10 to 20": 10.0, "3 to 10": 3.0, "under 3": 0.0}
    groups = collections.defaultdict(list)
    for row in rows:
        size = abs(row["difference"])
        name = next(name for name, least in bounds.items() if size >= least)
        groups[row["kind"], name].append(row)
    lines = []
    for kind in ("runs", "made"):
        for name in bounds:
            members = groups[kind, name]
            if not members:
                continue
            lines.append(
                [
                    f"{kind}, {name}",
                    str(len(members)),
                    f"{sum(r['replays'] for r in members):,}",
                    f"{statistics.median(r['answers'] for r in members):.0f}",
                    f"{100 * statistics.fmean(r['decided'] for r in members):.0f} %",
                    f"{100 * statistics.fmean(r['wrong'] for r in members):.1f} %",
                ]
            )
    header = ["true difference", "cases", "replays", "answers, median", "decided", "wrong"]
    return markdown(header, lines)


def intervals_table() -> str:
    """Coverage of the 95 % interval of the accuracy and its width against Wilson's, by data set and answers."""
    names = {"office31": "Office-31", "pacs": "PACS", "lines": "line drawings", "leaf": "leaf"}
    counts = ("24", "48", "96")
    lines = []
    for family, name in names.items():
        rows = [
            row
            for row in load("replays.json")["rows"]
            if row["population"].startswith(f"{family} ") and "coverage 24" in row
        ]
        cells = [name, str(len(rows))]
        for count in counts:
            covered = statistics.fmean(row[f"coverage {count}"] for row in rows)
            cells.append(f"{100 * covered:.1f} %")
        for count in counts:
            width = sum(row[f"width {count}"] for row in rows)
            cells.append(f"{width / sum(row[f'Wilson {count}'] for row in rows):.2f}")
        lines.append(cells)
    header = ["", "runs", *(f"holds, {n}" for n in counts), *(f"width, {n}" for n in counts)]
    return markdown(header, lines)


def exchanged_table() -> str:
    """Answers until a pair of class names is said to be exchanged, by family; notes where none is."""
    rows = load("exchanged.json")["rows"]
    lines = []
    for family, members in by_case(rows, "family").items():
        pairs = [row for row in members if row["pair"]]
        plain = [row for row in members if not row["pair"]]
        answers = sorted(row["answers"] for row in pairs if row["right"])
        others = sum(bool(row["answers"]) and not row["right"] for row in pairs)
        lines.append(
            [
                FAMILIES[family].split(" (")[0],
                str(len(pairs)),
                str(len(answers)),
                f"{statistics.median(answers):g} ({answers[0]} to {answers[-1]})",
                str(others),
                f"{sum(bool(row['answers']) for row in plain)} of {len(plain)}",
            ]
        )
    header = ["", "pairs", "named", "answers", "another first", "unexchanged: named"]
    return markdown(header, lines)


TABLES = {
    "replays": replays_table,
    "exchanged": exchanged_table,
    "replays-intervals": intervals_table,
    "families": families_table,
    "families-short": functools.partial(
        families_table, "shot-im", "shot", "aad", "u-sfan", "u-sfan++"
    ),
    "labels-leaf": functools.partial(labels_table, "leaf"),
    "labels-lines": functools.partial(labels_table, "lines"),
    "labels-office31": functools.partial(labels_table, "office31"),
    "estimates-coverage": functools.partial(estimates_table, "estimates-coverage"),
    "estimates-moments": functools.partial(estimates_table, "estimates-moments"),
    "estimates-monitors": functools.partial(estimates_table, "estimates-monitors"),
    "estimates-confidence": functools.partial(estimates_table, "estimates-confidence"),
    "class-sets": class_sets_table,
    "class-sets-found": class_sets_found_table,
    "field-methods": field_table,
    "ablation": ablation_table,
    "growth": growth_table,
    "growth-classes": classes_table,
    "against": against_table,
    "growth-cost": cost_table,
    "emoji": emoji_table,
    "emoji-guard": emoji_guard_table,
    "peers": peers_table,
    "startup-summary": functools.partial(
        suite_summary, "startup", "to the first", "first step itself"
    ),
    "memory-summary": functools.partial(suite_summary, "memory", "peak memory"),
    "cpu-summary": functools.partial(
        suite_summary, "cpu", "lite0: pass, ", "lite0: steps, ", "digits-cnn: steps, "
    ),
    "inference": functools.partial(suite_table, "inference"),
    "guard-summary": guard_summary_table,
    "poisoned": poisoned_table,
    "uncertainties-closed": functools.partial(uncertainties_table, "closed"),
    "uncertainties-open": functools.partial(uncertainties_table, "open"),
    "several-office31": functools.partial(several_sources_table, "office31", "u-sfan++"),
    "paper-closed": paper_closed_table,
    "paper-open": paper_open_table,
    "separation-choice": separation_choice_table,
    "digits": digits_table,
    "toy": toy_table,
}


def uncertainty_claims() -> dict[str, list[str]]:
    """Differences between certainties, in closed and in open set."""
    rows = load("uncertainty.json")["rows"]
    closed = by_case([row for row in rows if row["setting"] == "closed"])
    opened = by_case([row for row in rows if row["setting"] == "open"])
    point = difference(closed["posterior"], closed["point"], "accuracy")
    other = difference(closed["point, τ = 1"], closed["posterior"], "accuracy")
    weights = difference(closed["posterior"], closed["none (shot-im)"], "accuracy")
    hos = {
        (name, tau): difference(opened[f"posterior{tau}"], opened[f"{name}{tau}"], "hos")
        for name in ("ensemble", "point")
        for tau in ("", ", τ = 1")
    }
    return {
        "docs/paper.md": [
            f"the point estimate's minus the posterior's is {other}",
            f"the posterior's weights minus none {weights}",
            f"over the point estimate {hos['point', ', τ = 1']}",
        ],
        "docs/studies/uncertainty.md": [
            f"over the point estimate is {point}",
            f"over the ensemble {hos['ensemble', '']}",
            f"over the point estimate {hos['point', '']}",
            f"over the ensemble is then {hos['ensemble', ', τ = 1']}",
            f"over the point estimate {hos['point', ', τ = 1']}",
        ],
    }


def method_claims() -> list[str]:
    """Differences between the field's methods, and between the parts of U-SFAN++."""
    cases = by_case(load("field-methods.json")["rows"], "method")
    over = lambda one, other: difference(cases[one], cases[other], "accuracy")  # noqa: E731
    whole = "u-sfan++"
    return [
        f"highest average ({statistics.fmean(r['accuracy'] for r in cases[whole]):.1f})",
        *(f"{name} {over(method, 'shot')}" for name, method in PEERS.items()),
        f"U-SFAN++ over AaD {over(whole, 'aad')}",
        f"Labels from the witness's clusters: {over(whole, f'{whole} no labels')}",
        f"attraction to neighbours: {over(whole, f'{whole} no attraction')}",
        f"information maximisation: {over(whole, f'{whole} no IM')}",
        f"class probabilities: {over(whole, f'{whole} features only')}",
        f"the posterior in place of the point estimate: {over(whole, f'{whole} point')}",
        f"Lite2 as witness: {over(f'{whole} Lite2', whole)}",
    ]


PEERS = {
    "U-SFAN++": "u-sfan++",
    "AaD": "aad",
    "U-SFAN+": "u-sfan+",
    "UPA": "upa",
    "NRC": "nrc",
    "LSC": "lsc",
    "CoWA": "cowa",
}


def toy_claims() -> list[str]:
    """Differences of the mean accuracy under the strong shift, ± the standard error over paired seeds."""
    table: dict[str, dict[int, float]] = collections.defaultdict(dict)
    for row in load("toy.json")["rows"]:
        if row["task"] == "strong":
            table[row["method"]][row["seed"]] = row["accuracy"]

    def over(one: str, other: str) -> str:
        changes = [value - table[other][seed] for seed, value in table[one].items()]
        error = statistics.stdev(changes) / len(changes) ** 0.5
        wins = sum(change > 0 for change in changes)
        return f"{statistics.fmean(changes):+.1f} ± {error:.1f} ({wins} of {len(changes)})"

    return [
        f"over SHOT-IM by {over('u-sfan', 'shot-im')}",
        f"over U-SFAN by {over('shot', 'u-sfan')}",
        f"over SHOT-IM: {over('u-sfan (paper)', 'shot-im')}",
        f"the point estimate: {over('shot-im-entropy', 'shot-im')}",
        f"with the evidence prior: {over('u-sfan (evidence)', 'u-sfan')}",
    ]


def families_claims() -> list[str]:
    rows = [row for row in load("families.json")["rows"] if row["labels"] == "none"]
    lines = by_case([row for row in rows if row["family"] == "lines"], "method")
    emoji = by_case([row for row in rows if row["family"] == "emoji"], "method")
    on_lines = difference(lines["aad"], lines["u-sfan++"], "accuracy")
    on_emoji = difference(emoji["aad"], emoji["u-sfan++"], "accuracy")
    return [
        f"AaD over U-SFAN++ on line drawings {on_lines}",
        f"and on emoji {on_emoji}",
    ]


def emoji_claims() -> list[str]:
    claims = []
    for part in HALVES:
        rows = [r for r in guarded_emoji_runs() if r["part"] == part]
        claims += [
            guard_gain(rows, lambda row: row["task"], base) for base in ("after", "before")
        ]
    return claims


def claims() -> dict[str, list[str]]:
    """Figures that pages state in their sentences, by page."""
    guard = load("guard-judge.json")
    loss = guard["all"]["loss"]
    always = guard["all"]["loss_always_adapting"]
    photographs = load("onnx-photographs.json")
    sets = [r for r in load("class-sets.json")["rows"] if r["situation"] == "universal"]
    cases = by_case(paper_rows("closed", "field"))
    opened_cases = by_case(paper_rows("open"))
    separated, separated_hos = (
        difference(opened_cases["u-sfan, separation 1"], opened_cases["u-sfan"], figure)
        for figure in ("os", "hos")
    )
    names = ("shot-im", "shot", "u-sfan (default)", "u-sfan+ (default)", "aad")
    today = [f"{statistics.fmean(r['accuracy'] for r in cases[name]):.1f}" for name in names]
    universal = lambda flag: statistics.fmean(r["score"] for r in sets if r["flag"] == flag)  # noqa: E731
    leaves = {
        (method, budget): statistics.fmean(
            row["accuracy"]
            for name in ("families.json", "labels.json")
            for row in load(name)["rows"]
            if (row["family"], row["method"], row["labels"]) == ("leaf", method, budget)
        )
        for method, budget in (
            ("source-only", "none"),
            ("u-sfan++", "none"),
            ("u-sfan++", "random:2xK"),
            ("u-sfan++", "asked:2xK"),
            ("u-sfan++", "random:10xK"),
            ("u-sfan++", "asked:10xK"),
        )
    }
    before, after, random, asked, many, many_asked = leaves.values()
    return {
        "docs/tutorials/leaf.md": [
            f"right on {before:.1f} %, the adapted model on {after:.1f} %",
            f"from {after:.1f} % to {asked:.1f} %; 24 random ones to {random:.1f} %",
            f"lift it to {many:.1f} % if they are drawn at random, and to {many_asked:.1f} %",
        ],
        "README.md": [
            f"tested on {guard['all']['runs']} runs",
            f"was {loss:.1f} points below the better",
            f"always adapting was {always:.1f} below",
        ],
        "docs/results.md": families_claims(),
        "docs/studies/emoji.md": emoji_claims(),
        "docs/studies/toy.md": toy_claims(),
        "docs/studies/uncertainty.md": uncertainty_claims()["docs/studies/uncertainty.md"],
        "docs/studies/field-methods.md": [
            *method_claims(),
            f"average {', '.join(today[:-1])} and {today[-1]}",
        ],
        "docs/studies/class-sets.md": [
            f"H-score is then {universal('auto'):.1f}, that of the source model {universal('source-only'):.1f}",
            f"that of the right flag {universal('universal'):.1f}",
        ],
        "docs/studies/guard.md": [
            f"{loss:.2f} points",
            f"{always:.2f} away",
            f"{guard['all']['below_by_3']} of {guard['all']['runs']} runs",
            guard_gain(guard["rows"], lambda row: (row["source"], row["target"])),
            *poisoned_claims(),
        ],
        "docs/paper.md": [
            *uncertainty_claims()["docs/paper.md"],
            f"OS {difference(opened_cases['u-sfan'], opened_cases['shot-im'], 'os')}",
            f"H-score {difference(opened_cases['u-sfan'], opened_cases['shot-im'], 'hos')}",
            f"as printed {difference(cases['u-sfan (paper)'], cases['shot-im'], 'accuracy')}",
            f"posterior {difference(cases['u-sfan (authors)'], cases['shot-im'], 'accuracy')}",
            f"default {difference(cases['u-sfan (default)'], cases['shot-im'], 'accuracy')}",
        ],
        "docs/studies/separation.md": [
            f"split of the literature by {separated} and {separated_hos};",
        ],
        "docs/performance.md": [f"the same label for {photographs['labels_that_agree']}"],
    }


def pages() -> list[Path]:
    """The README and all pages of the site."""
    return [HERE.parent / "README.md", *sorted(HERE.rglob("*.md"))]


def main() -> None:
    for name, make in TABLES.items():
        print(f"{name}\n{make()}\n")
    if "--write" in sys.argv:
        for page in pages():
            before = page.read_text(encoding="utf-8")
            after = before
            for name, make in TABLES.items():
                if f"<!-- table {name} -->" in after:
                    marked = rf"(<!-- table {name} -->\n).*?(<!-- end -->)"
                    table = make()
                    after = re.sub(
                        marked, lambda m, t=table: m[1] + t + "\n" + m[2], after, flags=re.S
                    )
            if after != before:
                page.write_text(after, encoding="utf-8")


if __name__ == "__main__":
    main()
