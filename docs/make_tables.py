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


def open_set_table() -> str:
    rows = load("office31-open.json")["rows"]
    lines = []
    for method in dict.fromkeys(r["method"] for r in rows):
        members = [r for r in rows if r["method"] == method]
        lines.append(
            [
                method,
                *(
                    over_seeds(by_seed(members, lambda r, f=figure: r[f]))
                    for figure in OPEN_FIGURES
                ),
            ]
        )
    return markdown(["method", *OPEN_FIGURES.values()], lines)


def open_set_scores_table() -> str:
    rows = load("office31-open.json")["rows"]
    methods = ("source-only", "shot-im", "u-sfan")
    lines = []
    for score in rows[0]["detection"]:
        line = [score]
        for method in methods:
            members = [r for r in rows if r["method"] == method]
            area = over_seeds(by_seed(members, lambda r, s=score: r["detection"][s]["auroc"]))
            os = over_seeds(by_seed(members, lambda r, s=score: r["by_score"][s]["os"]))
            hos = over_seeds(by_seed(members, lambda r, s=score: r["by_score"][s]["hos"]))
            line += [area, os, hos]
        lines.append(line)
    return markdown(
        ["score", *(f"{m} {f}" for m in methods for f in ("AUROC", "OS", "HOS"))], lines
    )


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


def mnist_usps_table() -> str:
    """Means over seeds; the last columns with the source's images moved and turned, the seeds that every method has."""
    saved = load("digits-mnist-usps.json")
    rows = saved["rows"]
    published = saved["published"]
    moved = [r for r in rows if r["source_views"] == "shift-turn"]
    methods = list(dict.fromkeys(r["method"] for r in rows))
    seeds = set.intersection(*({r["seed"] for r in moved if r["method"] == m} for m in methods))
    lines = []
    for method in methods:
        line = [method]
        for task in ("M→U", "U→M"):
            members = [
                r
                for r in rows
                if (r["method"], r["task"], r["source_views"]) == (method, task, "none")
            ]
            line += [
                over_seeds(by_seed(members, lambda r: r["accuracy"])),
                str(published.get(method, {}).get(task, "–")),
            ]
        members = [r for r in moved if r["method"] == method and r["seed"] in seeds]
        lines.append([*line, over_seeds(by_seed(members, lambda r: r["accuracy"]))])
    header = [f"{task}{what}" for task in ("M→U", "U→M") for what in ("", ", published")]
    return markdown(
        ["method", *header, f"U→M, source moved and turned, {len(seeds)} seed"], lines
    )


def shift_table(name: str = "office31-shift.json") -> str:
    """The blocks of domain and shift that every variant has run on."""
    rows = load(name)["rows"]
    variants = list(dict.fromkeys(r["variant"] for r in rows))
    blocks = list(dict.fromkeys((r["domain"], r["shift"]) for r in rows))
    result = {(r["domain"], r["shift"], r["variant"]): r for r in rows}
    blocks = [b for b in blocks if all((*b, v) in result for v in variants)]
    source = [result[(*b, variants[0])]["source_accuracy"] for b in blocks]
    lines = [["source model", *(f"{s:.1f}" for s in source), f"{statistics.fmean(source):.1f}"]]
    for variant in variants:
        each = [result[(*b, variant)]["accuracy"] for b in blocks]
        lines.append([variant, *(f"{a:.1f}" for a in each), f"{statistics.fmean(each):.1f}"])
    return markdown(
        ["variant", *(f"{domain}, {shift}" for domain, shift in blocks), "mean"], lines
    )


def shift_seeds_table() -> str:
    """Means over domains and shifts, by seed; the last column over the seeds that every variant has."""
    rows = load("digits-shift-seeds.json")["rows"]
    variants = list(dict.fromkeys(r["variant"] for r in rows))
    result = {
        v: by_seed([r for r in rows if r["variant"] == v], lambda r: r["accuracy"])
        for v in variants
    }
    seeds = sorted({r["seed"] for r in rows})
    common = [seed for seed in seeds if all(seed in result[v] for v in variants)]
    lines = []
    for variant in variants:
        each = {seed: statistics.fmean(values) for seed, values in result[variant].items()}
        cells = [f"{each[seed]:.1f}" if seed in each else "–" for seed in seeds]
        lines.append(
            [variant, *cells, f"{statistics.fmean(each[seed] for seed in common):.1f}"]
        )
    return markdown(
        ["variant", *map(str, seeds), f"mean of {common[0]} to {common[-1]}"], lines
    )


def plain_table() -> str:
    rows = load("office31-plain.json")["rows"]
    lines = []
    for task, commit in dict.fromkeys((r["task"], r["commit"]) for r in rows):
        line = [f"{task[0]}→{task[1]}", commit]
        for path in ("fast", "plain"):
            each = [
                r["accuracy"]
                for r in rows
                if (r["task"], r["commit"], r["path"]) == (task, commit, path)
            ]
            line += (
                [" ".join(f"{a:.1f}" for a in each), f"{statistics.fmean(each):.1f}"]
                if each
                else ["–", "–"]
            )
        lines.append(line)
    return markdown(
        ["task", "commit", "fast, by seed", "mean", "plain, by seed", "mean"], lines
    )


def closed_set_table(rows: list[dict] | None = None, key: str = "method") -> str:
    rows = load("office31.json")["rows"] if rows is None else rows
    tasks = list(dict.fromkeys(r["task"] for r in rows))
    lines = []
    for name in dict.fromkeys(r[key] for r in rows):
        members = [r for r in rows if r[key] == name]
        cells = [
            f"{statistics.fmean(r['accuracy'] for r in members if r['task'] == t):.1f}"
            for t in tasks
        ]
        lines.append([name, *cells, over_seeds(by_seed(members, lambda r: r["accuracy"]))])
    return markdown([key, *tasks, "average"], lines)


def fine_tuned_table() -> str:
    """Averages of the fine-tuned study."""
    rows = load("office31.json")["rows"]
    names = dict.fromkeys(r["method"] for r in rows)
    means = [
        over_seeds(by_seed([r for r in rows if r["method"] == name], lambda r: r["accuracy"]))
        for name in names
    ]
    return markdown(["fine-tuned", *names], [["average", *means]])


def variant_rows() -> list[dict]:
    """The fine-tuned study, and other settings from the same source models."""
    rows = [{**row, "variant": row["method"]} for row in load("office31.json")["rows"]]
    return [*rows, *load("office31-variants.json")["rows"]]


def variants_table() -> str:
    """Other settings beside the methods that they are of, from the same source models."""
    study = load("office31.json")["rows"]
    rows = []
    for method in ("shot-im", "u-sfan", "shot", "u-sfan+"):
        rows += [{**row, "variant": method} for row in study if row["method"] == method]
    return closed_set_table([*rows, *load("office31-variants.json")["rows"]], "variant")


def agreement_office31_table() -> str:
    """Agreement by case and task beside the mean accuracy, and the rank correlation of both over the cases."""
    accuracy = variant_rows()
    rows = load("agreement-office31.json")["rows"]
    tasks = list(dict.fromkeys(r["task"] for r in rows))
    lines = []
    means = []
    for case in dict.fromkeys(r["case"] for r in rows):
        agreed = {r["task"]: r["agreement"] for r in rows if r["case"] == case}
        seeds = by_seed([r for r in accuracy if r["variant"] == case], lambda r: r["accuracy"])
        right = statistics.fmean(statistics.fmean(values) for values in seeds.values())
        mean = statistics.fmean(agreed.values())
        if case != "source-only":
            means.append((mean, right))
        cells = [*(agreed[task] for task in tasks), mean, right]
        lines.append([case, *(f"{cell:.1f}" for cell in cells)])
    both = statistics.correlation(*(ranks(list(column)) for column in zip(*means, strict=True)))
    lines.append(
        ["rank correlation, source-only left out", *[""] * len(tasks), f"{both:+.2f}", ""]
    )
    return markdown(["case", *tasks, "average", "accuracy (not used)"], lines)


def peers_table() -> str:
    """For the README: averages over the six tasks of Office-31, beside what the authors report with ResNet-50."""
    from usfan.adaptation.methods import METHODS

    rows = load("field-methods.json")["rows"]
    means = {
        method: by_seed([r for r in rows if r["method"] == method], lambda r: r["accuracy"])
        for method in dict.fromkeys(r["method"] for r in rows)
        if method in METHODS and not method.endswith("entropy")
    }
    order = sorted(
        means,
        key=lambda method: statistics.fmean(v for each in means[method].values() for v in each),
    )
    lines = [
        [m, over_seeds(means[m]), METHODS[m].published.split("/")[0] or "–"] for m in order
    ]
    return markdown(["method", "here", "published"], lines)


def own_domains_table() -> str:
    """For the README: `usfan study` on Office-31 under other names."""
    from usfan.study.results import Table

    return (
        Table.build(load("own-domains.json")["rows"], title="")
        .to_markdown()
        .strip()
        .split("\n\n", 1)[1]
    )


def correctness_table() -> str:
    """AUROC of certainty, right against wrong predictions, of the point estimate and of the posterior predictive."""
    rows = [r for r in load("office31.json")["rows"] if r["method"] != "source-only"]
    lines = []
    for method in ("source model", *dict.fromkeys(r["method"] for r in rows)):
        when = "before" if method == "source model" else "after"
        members = [
            r for r in rows if r["method"] == ("shot-im" if when == "before" else method)
        ]
        cells = []
        for some in ([r for r in members if r["task"] == "A→W"], members):
            for kind in ("point", "posterior"):
                cells.append(
                    over_seeds(
                        by_seed(some, lambda r, k=f"{kind}_{when}": r["auroc_correct"][k])
                    )
                )
        lines.append([method, *cells])
    header = [
        f"{what} {kind}" for what in ("A→W", "six tasks:") for kind in ("point", "posterior")
    ]
    return markdown(["model", *header], lines)


def separation_table() -> str:
    """On the tasks that every case has."""
    rows = load("office31-separation.json")["rows"]
    cases = dict.fromkeys((r["method"], r["separation"]) for r in rows)
    tasks = {
        case: {r["task"] for r in rows if (r["method"], r["separation"]) == case}
        for case in cases
    }
    common = set.intersection(*tasks.values())
    lines = []
    for method, separation in cases:
        members = [
            r
            for r in rows
            if (r["method"], r["separation"]) == (method, separation) and r["task"] in common
        ]
        figures = [
            f"{statistics.fmean(r[figure] for r in members):.1f}" for figure in OPEN_FIGURES
        ]
        lines.append([marked(method, members), f"{separation:g}", *figures])
    return markdown(["method", "separation", *OPEN_FIGURES.values()], lines)


def closed_set_calibration_table() -> str:
    rows = load("office31.json")["rows"]
    figures = {
        "ece": "ECE",
        "posterior_ece": "posterior ECE",
        "nll": "NLL",
        "posterior_nll": "posterior NLL",
    }
    lines = []
    for method in dict.fromkeys(r["method"] for r in rows):
        members = [r for r in rows if r["method"] == method]
        cells = [statistics.fmean(r[name] for r in members) for name in figures]
        lines.append(
            [
                method,
                *(
                    f"{c:.2f}" if "nll" in n else f"{c:.1f}"
                    for c, n in zip(cells, figures, strict=True)
                ),
            ]
        )
    return markdown(["method", *figures.values()], lines)


def ranks(values: list[float]) -> list[float]:
    return [
        sum(v < value for v in values) + sum(v == value for v in values) / 2 for value in values
    ]


def guard_table() -> str:
    """What the guard kept, on the shifts that its rule was chosen on and on those set aside."""
    lines = []
    for part, title in (("choose", "chosen on"), ("judge", "set aside")):
        result = load(f"guard-{part}.json")
        for kind, members in {"all": result["all"], **result["kinds"]}.items():
            old = members["old"]
            figures = [
                members["loss"],
                old["loss"],
                members["loss_always_adapting"],
                members["loss_never_adapting"],
            ]
            counts = [
                f"{members[name]}/{old[name]}" for name in ("below_by_3", "thrown_away_5")
            ]
            worst = f"{members['worst']:+.1f}/{old['worst']:+.1f}"
            most = f"{members['most_thrown_away']:.1f}/{old['most_thrown_away']:.1f}"
            lines.append(
                [
                    f"{title}: {kind}",
                    str(members["runs"]),
                    *(f"{v:.2f}" for v in figures),
                    *counts,
                    worst,
                    most,
                ]
            )
    header = [
        "shift",
        "runs",
        "loss",
        "old guard",
        "always adapting",
        "never adapting",
        "3 below source",
    ]
    return markdown([*header, "gains of 5 lost", "worst", "most lost"], lines)


def estimate_table() -> str:
    """Estimated accuracy against the truth."""
    lines = []
    for part, title in (("choose", "chosen on"), ("judge", "set aside")):
        for name, members in load(f"guard-{part}.json")["estimated_accuracy"].items():
            when, kind = name.split("_")
            error = members["mean_absolute_error"]
            covered = 100 * members["covered"]
            lines.append(
                [
                    f"{title}: {when}, {kind} settings",
                    str(members["runs"]),
                    f"{error:.1f}",
                    f"{covered:.0f} %",
                ]
            )
    return markdown(["runs", "number", "mean absolute error", "inside the interval"], lines)


def frozen_table() -> str:
    """The methods of the results page, from the run that has all of them."""
    rows = load("field-methods.json")["rows"]
    methods = ["source-only", "shot-im", "shot", "u-sfan", "u-sfan+", "aad", "u-sfan++"]
    return task_table(rows, methods, sorted({r["task"] for r in rows}))


def agreement_table(name: str = "agreement-digits.json") -> str:
    """Agreement between seeds beside accuracy, mean over seeds, and the rank correlation of both over the cases."""
    rows = load(name)["rows"]
    tasks, cases = (list(dict.fromkeys(r[key] for r in rows)) for key in ("task", "case"))
    figures = {
        (task, case, name): statistics.fmean(
            r[name] for r in rows if (r["task"], r["case"]) == (task, case)
        )
        for task in tasks
        for case in cases
        for name in ("agreement", "accuracy")
    }
    lines = [
        [c, *(f"{figures[t, c, f]:.1f}" for t in tasks for f in ("agreement", "accuracy"))]
        for c in cases
    ]
    line = ["rank correlation"]
    for task in tasks:
        each = [
            ranks([figures[task, case, name] for case in cases])
            for name in ("agreement", "accuracy")
        ]
        line += [f"{statistics.correlation(*each):+.2f}", ""]
    header = [f"{t}: {f}" for t in tasks for f in ("agreement", "accuracy (not used)")]
    return markdown(["case", *header], [*lines, line])


def times_table() -> str:
    rows = [
        r
        for r in load("times.json")["rows"]
        if r["what"].startswith(
            ("six tasks, 40 source epochs", "six tasks, frozen", "closed-set")
        )
    ]
    return markdown(["what", "seconds"], [[r["what"], f"{r['seconds']:.1f}"] for r in rows])


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
    cell = lambda row: (row["table"].split()[-1], row["task"], row["seed"])  # noqa: E731
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


def by_case(rows: list[dict]) -> dict[str, list[dict]]:
    cases: dict[str, list[dict]] = {}
    for row in rows:
        cases.setdefault(row["case"], []).append(row)
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


def digits_open_table() -> str:
    rows = load("digits-open.json")["rows"]
    figures = {
        "hos": "HOS",
        "os": "OS",
        "os_star": "OS*",
        "unknown_accuracy": "UNK",
        "auroc_unknown": "AUROC",
    }
    lines = []
    for method, separation in dict.fromkeys((r["method"], r["separation"]) for r in rows):
        members = [r for r in rows if (r["method"], r["separation"]) == (method, separation)]
        cells = [over_seeds(by_seed(members, lambda r, f=figure: r[f])) for figure in figures]
        lines.append(
            [
                marked(method, members)
                if method == "source-only"
                else f"{marked(method, members)}, separation {separation:g}",
                *cells,
            ]
        )
    return markdown(["method", *figures.values()], lines)


THROUGHPUT = (
    "plain recipe: PIL, DataLoader, TF32, eager",
    "ceiling: the compiled, captured step alone",
    "u-sfan",
    "shot-im",
    "u-sfan, weights every step",
    "u-sfan without compile",
    "u-sfan without compile and capture",
)
"""Cases that the page shows; the rest is in the JSON."""


def throughput_table() -> str:
    saved = load("throughput.json")
    lines = []
    for row in saved["suites"]["throughput"]:
        if row["case"] not in THROUGHPUT:
            continue
        value = f"{row['value']:,.0f} {row['unit']}"
        ratio = "" if row["ratio"] is None else f"{row['ratio']:.1f}"
        lines.append([f"{row['group']}: {row['case']}", value, ratio, row["note"]])
    return markdown(["case", "value", "× plain", "note"], lines)


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


def guard_summary_table() -> str:
    """The guard over all runs of each half."""
    lines = []
    for part, title in (("choose", "chosen on"), ("judge", "set aside")):
        members = load(f"guard-{part}.json")["all"]
        losses = [
            members["loss"],
            members["old"]["loss"],
            members["loss_always_adapting"],
            members["loss_never_adapting"],
        ]
        counts = [str(members["below_by_3"]), str(members["thrown_away_5"])]
        lines.append([title, str(members["runs"]), *(f"{v:.2f}" for v in losses), *counts])
    header = [
        "shifts",
        "runs",
        "loss",
        "old guard",
        "always adapting",
        "never adapting",
        "kept 3 below source",
    ]
    return markdown([*header, "gains of 5 lost"], lines)


def uncertainty_table() -> str:
    """Right against wrong, and calibration, of the point estimate and the posterior, over the closed-set runs."""
    rows = load("office31.json")["rows"]
    lines = []
    for method in dict.fromkeys(r["method"] for r in rows):
        members = [r for r in rows if r["method"] == method]
        if method == "source-only":
            result = [r for r in rows if r["method"] == "shot-im"]
            areas = [
                statistics.fmean(r["auroc_correct"][f"{k}_before"] for r in result)
                for k in ("point", "posterior")
            ]
        else:
            areas = [
                statistics.fmean(r["auroc_correct"][f"{k}_after"] for r in members)
                for k in ("point", "posterior")
            ]
        errors = [
            statistics.fmean(r[name] for r in members) for name in ("ece", "posterior_ece")
        ]
        lines.append([method, *(f"{v:.1f}" for v in (*areas, *errors))])
    return markdown(
        ["method", "AUROC, point", "AUROC, posterior", "ECE, point", "ECE, posterior"], lines
    )


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


def field_table(full: bool = False) -> str:
    """Every method, by task."""
    saved = load("field-methods.json")
    rows = saved["full"]["rows"] if full else saved["rows"]
    methods = [
        m
        for m in dict.fromkeys(r["method"] for r in rows)
        if not m.startswith("u-sfan++ ") or "Lite2" in m
    ]
    tasks = {r["task"] for r in rows}
    return task_table(rows, methods, sorted(tasks), CORRECTED)


CORRECTED = ("upa", "lsc", "tent")
"""Methods whose terms were corrected after these rows were measured."""


def ablation_table() -> str:
    rows = load("field-methods.json")["rows"]
    methods = [m for m in dict.fromkeys(r["method"] for r in rows) if m.startswith("u-sfan++")]
    return task_table(rows, methods, sorted({r["task"] for r in rows}))


def task_table(
    rows: list[dict], methods: list[str], tasks: list[str], daggers: tuple[str, ...] = ()
) -> str:
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
                f"{method} †" if method in daggers else method,
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


def ladder_table() -> str:
    """What each rung reaches; the one that auto chooses is bold."""
    lines = []
    for row in load("ladder.json")["rows"]:
        rungs = [
            f"**{row[r]:.1f}**" if r == row["auto"] else f"{row[r]:.1f}"
            for r in ("new", "norm", "all")
        ]
        told = "set aside" if row["set_aside"] else "chosen on"
        lines.append(
            [f"{told}: {row['kind']}", row["task"], f"{row['source_only']:.1f}", *rungs]
        )
    return markdown(["shift", "task", "source-only", "new", "norm", "all"], lines)


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


def emoji_guard(part: str) -> dict[str, float]:
    """What the guard kept, and what it estimated. Without `closed`, which `auto` mostly chooses: one run, not two."""
    rows = [
        r
        for r in load("emoji.json")["rows"]
        if r["part"] == part and "kept" in r and r["run"] != "closed"
    ]
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
    today = [values.keys() for (method, _), values in cases.items() if method != "u-sfan++ 0.2"]
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


TABLES = {
    "replays": replays_table,
    "families": families_table,
    "families-short": functools.partial(
        families_table, "shot-im", "shot", "aad", "u-sfan", "u-sfan++"
    ),
    "labels-leaf": functools.partial(labels_table, "leaf"),
    "labels-lines": functools.partial(labels_table, "lines"),
    "labels-pacs": functools.partial(labels_table, "pacs"),
    "labels-office31": functools.partial(labels_table, "office31"),
    "estimates-coverage": functools.partial(estimates_table, "estimates-coverage"),
    "estimates-moments": functools.partial(estimates_table, "estimates-moments"),
    "estimates-monitors": functools.partial(estimates_table, "estimates-monitors"),
    "estimates-confidence": functools.partial(estimates_table, "estimates-confidence"),
    "class-sets": class_sets_table,
    "class-sets-found": class_sets_found_table,
    "field-methods": field_table,
    "field-methods-full": functools.partial(field_table, full=True),
    "ablation": ablation_table,
    "growth": growth_table,
    "office31-fine-tuned": fine_tuned_table,
    "office31-variants": variants_table,
    "times": times_table,
    "agreement-office31": agreement_office31_table,
    "agreement-usps": functools.partial(agreement_table, "agreement-usps.json"),
    "office31-correctness": correctness_table,
    "office31-separation": separation_table,
    "office31-calibration": closed_set_calibration_table,
    "throughput": throughput_table,
    "guard": guard_table,
    "ladder": ladder_table,
    "emoji": emoji_table,
    "emoji-guard": emoji_guard_table,
    "estimate": estimate_table,
    "office31-frozen": frozen_table,
    "peers": peers_table,
    "own-domains": own_domains_table,
    "startup-summary": functools.partial(
        suite_summary, "startup", "to the first", "first step itself"
    ),
    "memory-summary": functools.partial(suite_summary, "memory", "peak memory"),
    "cpu-summary": functools.partial(
        suite_summary, "cpu", "lite0: pass, ", "lite0: steps, ", "digits-cnn: steps, "
    ),
    "inference": functools.partial(suite_table, "inference"),
    "guard-summary": guard_summary_table,
    "uncertainty": uncertainty_table,
    "uncertainties-closed": functools.partial(uncertainties_table, "closed"),
    "uncertainties-open": functools.partial(uncertainties_table, "open"),
    "several-office31": functools.partial(several_sources_table, "office31", "u-sfan++"),
    "several-office31-u-sfan": functools.partial(several_sources_table, "office31", "u-sfan"),
    "several-digits": functools.partial(several_sources_table, "digits", "u-sfan"),
    "digits-open": digits_open_table,
    "paper-closed": paper_closed_table,
    "paper-open": paper_open_table,
    "separation-choice": separation_choice_table,
    "agreement-digits": agreement_table,
    "office31-open": open_set_table,
    "office31-open-scores": open_set_scores_table,
    "digits-mnist-usps": mnist_usps_table,
    "office31-shift": shift_table,
    "digits-shift-seeds": shift_seeds_table,
    "office31-plain": plain_table,
    "digits": digits_table,
    "toy": toy_table,
}


def method_means(name: str, figure: str = "accuracy") -> dict[str, float]:
    """Mean over tasks and seeds of each method of a study."""
    rows = load(name)["rows"]
    return {
        method: statistics.fmean(r[figure] for r in rows if r["method"] == method)
        for method in dict.fromkeys(r["method"] for r in rows)
    }


def claims() -> dict[str, list[str]]:
    """Figures that pages state in their sentences, by page."""
    frozen = method_means("field-methods.json")
    tuned = method_means("office31.json")
    by_command = method_means("office31-frozen.json")
    apart = max(
        abs(frozen[method] - mean)
        for method, mean in by_command.items()
        if method != "u-sfan++"
    )
    opened = {figure: method_means("office31-open.json", figure) for figure in ("os", "hos")}
    gain = {figure: means["u-sfan"] - means["shot-im"] for figure, means in opened.items()}
    guard = load("guard-judge.json")
    loss = guard["all"]["loss"]
    always = guard["all"]["loss_always_adapting"]
    estimate = guard["estimated_accuracy"]["after_good"]
    speed = {
        r["case"]: r
        for r in load("throughput.json")["suites"]["throughput"]
        if r["group"] == "resnet50"
    }
    photographs = load("onnx-photographs.json")
    below = [
        max(r[n] for n in ("new", "norm", "all")) - r[r["auto"]]
        for r in load("ladder.json")["rows"]
    ]
    sets = [r for r in load("class-sets.json")["rows"] if r["situation"] == "universal"]
    cases = by_case(paper_rows("closed", "field"))
    opened_cases = by_case(paper_rows("open"))
    separated = difference(opened_cases["u-sfan, separation 1"], opened_cases["u-sfan"], "os")
    names = ("shot-im", "shot", "u-sfan (default)", "u-sfan+ (default)", "aad")
    today = [f"{statistics.fmean(r['accuracy'] for r in cases[name]):.1f}" for name in names]
    universal = lambda flag: statistics.fmean(r["score"] for r in sets if r["flag"] == flag)  # noqa: E731
    return {
        "README.md": [
            f"tested on {guard['all']['runs']} runs",
            f"was {loss:.1f} points below the better",
            f"always adapting was {always:.1f} below",
        ],
        "docs/results.md": [
            f"+{frozen['u-sfan'] - frozen['shot-im']:.1f} frozen, +{tuned['u-sfan'] - tuned['shot-im']:.1f} fine-tuned",
            f"+{frozen['u-sfan+'] - frozen['shot']:.1f} frozen, +{tuned['u-sfan+'] - tuned['shot']:.1f} fine-tuned",
            f"by at most {apart:.1f} points",
            f"OS +{gain['os']:.1f}, HOS +{gain['hos']:.1f}",
            f"off by {estimate['mean_absolute_error']:.1f} points",
            f"covers {100 * estimate['covered']:.0f} %",
            f"{speed['u-sfan']['value']:,.0f} images per second",
            f"{speed['u-sfan']['ratio']:.1f} times the plain recipe",
            f"{100 - 100 * speed['u-sfan, weights every step']['value'] / speed['shot-im']['value']:.1f} % more",
        ],
        "docs/studies/field-methods.md": [
            f"U-SFAN++ is best ({frozen['u-sfan++']:.1f})",
            f"{frozen['u-sfan++'] - frozen['shot']:.1f} points above SHOT",
            f"{frozen['u-sfan++ Lite2']:.1f} with Lite2",
            f"average {', '.join(today[:-1])} and {today[-1]}",
        ],
        "docs/studies/class-sets.md": [
            f"H-score is then {universal('auto'):.1f}, that of the source model {universal('source-only'):.1f}",
            f"that of the right flag {universal('universal'):.1f}",
        ],
        "docs/studies/ladder.md": [
            f"auto is {statistics.fmean(below):.1f} points below the best rung",
            f"({sorted(below)[-2]:.1f}) and as line",
            f"drawings ({max(below):.1f})",
        ],
        "docs/studies/guard.md": [
            f"{loss:.2f} points",
            f"{always:.2f} away",
            f"{guard['all']['below_by_3']} of {guard['all']['runs']} runs",
        ],
        "docs/paper.md": [
            f"as printed {difference(cases['u-sfan (paper)'], cases['shot-im'], 'accuracy')}",
            f"posterior {difference(cases['u-sfan (authors)'], cases['shot-im'], 'accuracy')}",
            f"default {difference(cases['u-sfan (default)'], cases['shot-im'], 'accuracy')}",
        ],
        "docs/studies/separation.md": [
            f"split of the literature by {separated}",
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
