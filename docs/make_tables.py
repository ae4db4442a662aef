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


def office_cases() -> dict[str, list[dict]]:
    """Rows of Office-31 by method, all from the same source models."""
    return by_case(load("field-methods.json")["rows"], "method")


def peers_table() -> str:
    """Averages over the six tasks of Office-31, beside what the authors report with ResNet-50."""
    from usfan.adaptation.methods import METHODS

    cases = office_cases()
    order = sorted(cases, key=lambda m: statistics.fmean(r["accuracy"] for r in cases[m]))
    lines = []
    for method in order:
        here = over_seeds(by_seed(cases[method], lambda r: r["accuracy"]))
        published = METHODS[method].published.split("/")[0] or "–"
        lines.append([marked(method, cases[method]), here, published])
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
    """Averages over the tasks, and differences to SHOT-IM in the same cells: frozen, and the whole network trained."""
    halves = [by_case(paper_rows(table)) for table in ("closed", "tuned")]
    lines = []
    for name in halves[0]:
        line = [marked(name, [row for half in halves for row in half.get(name, [])])]
        for half in halves:
            if name not in half:
                line += ["–", "–"]
                continue
            tasks = {row["task"] for rows in half.values() for row in rows}
            whole = by_seed(whole_seeds(half[name], tasks), lambda r: r["accuracy"])
            line.append(over_seeds(whole) if whole else "–")
            line.append(
                "" if name == "shot-im" else difference(half[name], half["shot-im"], "accuracy")
            )
        lines.append(line)
    return markdown(["case", "frozen", "over SHOT-IM", "whole network", "over SHOT-IM"], lines)


def paper_open_table() -> str:
    """Open-set figures."""
    cases = by_case(paper_rows("open"))
    figures = {name: label for name, label in OPEN_FIGURES.items() if name != "aupr_unknown"}
    lines = []
    tasks = {row["task"] for rows in cases.values() for row in rows}
    for name, rows in cases.items():
        whole = whole_seeds(rows, tasks)
        cells = [over_seeds(by_seed(whole, lambda r, f=f: r[f])) for f in figures]
        lines.append([marked(name, rows), *cells])
    return markdown(["case", *figures.values()], lines)


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


def cost_table() -> str:
    """Hours and bytes for so many images, from the rates of one core and one GPU."""
    rates = load("growth-rates.json")
    decoding = 1 / rates["decode_core"]
    lines = []
    for power in (6, 9):
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


def uncertainties_table(setting: str) -> str:
    """U-SFAN with its certainty from each kind of uncertainty."""
    rows = [r for r in load("uncertainty.json")["rows"] if r["setting"] == setting]
    columns = {"accuracy": "accuracy", "ece": "ECE"}
    if setting == "open":
        columns = {"os_star": "OS*", "hos": "HOS", "auroc_posterior-entropy": "AUROC"}
    lines = []
    for case, members in by_case(rows).items():
        cells = [over_seeds(by_seed(members, lambda r, c=column: r[c])) for column in columns]
        lines.append([case, *cells])
    return markdown(["certainty from", *columns.values()], lines)


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


def label_lines(family: str) -> tuple[int, list[list[str]]]:
    """Accuracy by the number of labels, for one family: the number of runs, and means over the tasks and seeds that
    all rows have."""
    rows = [r for r in load("labels.json")["rows"] if r["family"] == family]
    cases = collections.defaultdict(dict)
    for row in rows:
        if row["method"] != "u-sfan++ 0.2" and "noisy" not in row["labels"]:
            cases[row["method"], row["labels"]][row["task"], row["seed"]] = row["accuracy"]
    shared = set.intersection(*(set(values) for values in cases.values()))
    lines = []
    for method, kind, name in (
        ("labels alone", "random", "labels alone"),
        ("source head", "random", "source head"),
        ("u-sfan++", "random", "u-sfan++"),
        ("u-sfan++", "asked", "u-sfan++, asked"),
        ("u-sfan", "random", "u-sfan"),
        ("u-sfan", "asked", "u-sfan, asked"),
    ):
        if (method, f"{kind}:1xK") not in cases:
            continue
        cells = []
        for budget in ("none", *(f"{kind}:{count}xK" for count in (1, 2, 5, 10))):
            values = cases.get((method, budget), {})
            complete = shared <= values.keys()
            mean = statistics.fmean(values[key] for key in shared) if complete else None
            cells.append("–" if mean is None else f"{mean:.1f}")
        lines.append([name, *cells])
    return len(shared), lines


LABEL_BUDGETS = ["0", "K", "2K", "5K", "10K"]


def labels_table(family: str) -> str:
    count, lines = label_lines(family)
    return markdown([f"{count} runs", *LABEL_BUDGETS], lines)


def all_labels_table() -> str:
    """The same for every family that was run."""
    lines = []
    for family in dict.fromkeys(row["family"] for row in load("labels.json")["rows"]):
        count, rows = label_lines(family)
        title = f"{FAMILIES[family].split(' (')[0]} ({count})"
        for number, row in enumerate(rows):
            lines.append(["" if number else title, *row])
    return markdown(["runs", "labels of random images", *LABEL_BUDGETS], lines)


def replays_table() -> str:
    """Decisions by the true difference of runs."""
    rows = [row for row in load("replays.json")["rows"] if row["kind"] == "runs"]
    bounds = {"20 points and more": 20.0, "10 to 20": 10.0, "3 to 10": 3.0, "under 3": 0.0}
    groups = collections.defaultdict(list)
    for row in rows:
        size = abs(row["difference"])
        groups[next(name for name, least in bounds.items() if size >= least)].append(row)
    lines = []
    for name in bounds:
        members = groups[name]
        lines.append(
            [
                name,
                str(len(members)),
                f"{sum(r['replays'] for r in members):,}",
                f"{statistics.median(r['answers'] for r in members):.0f}",
                f"{100 * statistics.fmean(r['decided'] for r in members):.0f} %",
                f"{100 * statistics.fmean(r['wrong'] for r in members):.1f} %",
            ]
        )
    header = ["true difference", "runs", "replays", "answers, median", "decided", "wrong"]
    return markdown(header, lines)


TABLES = {
    "replays": replays_table,
    "families": families_table,
    "families-short": functools.partial(
        families_table, "shot-im", "shot", "aad", "u-sfan", "u-sfan++"
    ),
    "labels-leaf": functools.partial(labels_table, "leaf"),
    "labels": all_labels_table,
    "estimates-coverage": functools.partial(estimates_table, "estimates-coverage"),
    "estimates-confidence": functools.partial(estimates_table, "estimates-confidence"),
    "class-sets": class_sets_table,
    "growth": growth_table,
    "against": against_table,
    "growth-cost": cost_table,
    "peers": peers_table,
    "inference": functools.partial(
        suite_summary,
        "inference",
        "4000x3000",
        "lite0: o",
        "resnet50: o",
    ),
    "guard-summary": guard_summary_table,
    "uncertainties-closed": functools.partial(uncertainties_table, "closed"),
    "uncertainties-open": functools.partial(uncertainties_table, "open"),
    "paper-closed": paper_closed_table,
    "paper-open": paper_open_table,
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
    """Differences between the field's methods on Office-31, each in the cells of the same source models."""
    cases = office_cases()
    names = {
        "U-SFAN++": "u-sfan++",
        "AaD": "aad",
        "U-SFAN+": "u-sfan+",
        "U-SFAN": "u-sfan",
        "UPA": "upa",
        "NRC": "nrc",
        "LSC": "lsc",
        "CoWA": "cowa",
    }
    over = lambda one, rows: difference(cases[one], rows, "accuracy")  # noqa: E731
    best = statistics.fmean(r["accuracy"] for r in cases["u-sfan++"])
    return [
        f"highest average ({best:.1f})",
        *(f"{name} {over(method, cases['shot'])}" for name, method in names.items()),
        f"U-SFAN++ over AaD {over('u-sfan++', cases['aad'])}",
    ]


def class_sets_claims() -> list[str]:
    """What `auto` finds, and what a wrong setting costs."""
    rows = load("class-sets.json")["rows"]

    def score(situation: str, flag: str) -> float:
        return statistics.fmean(
            row["score"] for row in rows if (row["situation"], row["flag"]) == (situation, flag)
        )

    found = [
        row["setting"]
        for row in rows
        if (row["situation"], row["flag"]) == ("universal", "auto")
    ]
    missing = score("partial", "partial") - score("partial", "closed")
    none_new = score("all", "closed") - score("all", "open")
    new = score("open", "open") - score("open", "closed")
    return [
        f"it finds both in {found.count('universal')} of {len(found)} runs",
        f"H-score is then {score('universal', 'auto'):.1f}, that of the source model "
        f"{score('universal', 'source-only'):.1f}, that of the right setting {score('universal', 'universal'):.1f}",
        f"`closed` costs {missing:.0f} points if classes are missing",
        f"{new:.0f} points of H-score if there are new ones",
        f"`open` costs {none_new:.0f} if there are none",
    ]


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


def guard_claims() -> list[str]:
    """The guard on the runs of the study of estimates, which are of today's methods."""
    text = (HERE / "results" / "estimates-runs.jsonl").read_text(encoding="utf-8")
    rows = [json.loads(line) for line in text.splitlines()]
    rows = [row for row in rows if row["family"] != "same"]

    def loss(figure: str) -> float:
        return statistics.fmean(
            max(row["before"], row["accuracy"]) - row[figure] for row in rows
        )

    return [
        f"{len(rows)} of the [study of estimates]",
        f"is {loss('kept_accuracy'):.2f} points below the better one",
        f"always adapting is {loss('accuracy'):.2f} below, never adapting {loss('before'):.2f}",
    ]


def exchanged_claims() -> list[str]:
    """Pairs of exchanged class names that were named first, and the answers that it took."""
    rows = [row for row in load("exchanged.json")["rows"] if row["pair"]]
    named = [row for row in rows if row["right"]]
    answers = {
        family: statistics.median(row["answers"] for row in members)
        for family, members in by_case(named, "family").items()
    }
    return [
        f"of {len(rows)} pairs exchanged at random, {len(named)} were named",
        f"after {answers['pacs']:g} (PACS) and {answers['office31']:g} (Office-31) answers",
    ]


def performance_claims() -> list[str]:
    """The largest posterior."""
    largest = load("growth-classes.json")["rows"][-1]
    return [
        f"of {largest['classes']:,} classes takes {largest['fit_s']:.0f} s and "
        f"{largest['peak_mib'] / 1024:.1f} GiB",
    ]


def claims() -> dict[str, list[str]]:
    """Figures that pages state in their sentences, by page."""
    guard = load("guard-judge.json")
    loss = guard["all"]["loss"]
    always = guard["all"]["loss_always_adapting"]
    photographs = load("onnx-photographs.json")
    cases = by_case(paper_rows("closed", "field"))
    opened_cases = by_case(paper_rows("open"))
    tuned = by_case(paper_rows("tuned"))
    separated, separated_hos = (
        difference(opened_cases["u-sfan, separation 1"], opened_cases["u-sfan"], figure)
        for figure in ("os", "hos")
    )
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
        "docs/results.md": [*families_claims(), *method_claims()],
        "docs/studies/toy.md": toy_claims(),
        "docs/studies/estimates.md": exchanged_claims(),
        "docs/studies/uncertainty.md": [
            *uncertainty_claims()["docs/studies/uncertainty.md"],
            f"OS changes by {separated}",
            f"H-score by {separated_hos}",
        ],
        "docs/studies/class-sets.md": class_sets_claims(),
        "docs/studies/guard.md": [
            f"{loss:.2f} points",
            f"{always:.2f} away",
            f"{guard['all']['below_by_3']} of {guard['all']['runs']} runs",
            guard_gain(guard["rows"], lambda row: (row["source"], row["target"])),
            *poisoned_claims(),
            *guard_claims(),
        ],
        "docs/paper.md": [
            *uncertainty_claims()["docs/paper.md"],
            f"OS {difference(opened_cases['u-sfan'], opened_cases['shot-im'], 'os')}",
            f"H-score {difference(opened_cases['u-sfan'], opened_cases['shot-im'], 'hos')}",
            f"as printed {difference(cases['u-sfan (paper)'], cases['shot-im'], 'accuracy')}",
            f"posterior {difference(cases['u-sfan (authors)'], cases['shot-im'], 'accuracy')}",
            f"default {difference(cases['u-sfan (default)'], cases['shot-im'], 'accuracy')}",
            *(
                f"{name} {difference(tuned[case], tuned['shot-im'], 'accuracy')}"
                for name, case in {
                    "as printed": "u-sfan (paper)",
                    "posterior": "u-sfan (authors)",
                    "default": "u-sfan (default)",
                }.items()
            ),
        ],
        "docs/performance.md": [
            f"the same label for {photographs['labels_that_agree']}",
            *performance_claims(),
        ],
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
