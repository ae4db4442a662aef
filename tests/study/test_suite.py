"""`usfan reproduce` end to end on look-alikes of every data set: all pairs, the table, resuming, and clear refusals."""

import contextlib
import io
import itertools
import json
import re
import shutil

import pytest
import yaml
from safetensors.torch import load_file

from lookalikes import make
from small_runs import TINY, usfan
from usfan.config import TrainConfig, make_config
from usfan.data.benchmarks.catalogue import BENCHMARKS
from usfan.engine.runtime import start_runtime
from usfan.store.model import SourceModel
from usfan.study.suite import Suite

QUICK = ("--backbone", "lenet", "--source-epochs", 1, "--epochs", 1, *TINY)
FAST = ("--seeds", 0, *QUICK)
CLASSES = {
    "office31": None,
    "office-home": 27,
    "visda-c": None,
    "domainnet": 6,
    "digits": None,
    "cifar-stl": None,
}
"""How many classes of each are copied; None is all."""


def reproduce(name, data, out, *more) -> int:
    fast = QUICK if "--seeds" in more else FAST
    return usfan(
        "reproduce", name, "--data", data, "--out", out, "--allow-classes", *fast, *more
    )


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    return make("digits", tmp_path_factory.mktemp("data") / "digits")


@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_pair_and_the_table(name, tmp_path, capsys):
    root = make(name, tmp_path / "data", images=3, classes_limit=CLASSES[name])
    out = tmp_path / "study"
    small = name in ("digits", "cifar-stl")  # the others have up to thirty pairs
    methods = ("source-only", "shot-im", "u-sfan") if small else ("u-sfan",)
    assert reproduce(name, root, out, "--methods", *methods) == 0
    benchmark = BENCHMARKS[name]
    results = json.loads((out / "results.json").read_text())
    assert [(r["task"], r["method"]) for r in results["rows"]] == [
        (task, method)
        for source in dict.fromkeys(s for s, _ in benchmark.pairs)
        for task in benchmark.tasks
        if task.startswith(f"{source}→")
        for method in methods
    ]
    assert all(0 <= r[benchmark.metric] <= 100 for r in results["rows"])
    sources = {s for s, _ in benchmark.pairs}
    assert {p.name for p in (out / "models").iterdir()} == {f"{s}_0" for s in sources}
    markdown = (out / "table.md").read_text()
    for method in methods:
        assert f"| {method} |" in markdown
    assert markdown.strip() in capsys.readouterr().out
    for file in ("table.json", "study.json"):
        assert (out / file).stat().st_size > 100
    assert any(
        "images" in note for note in json.loads((out / "study.json").read_text())["notes"]
    )  # other counts
    assert ("paper" in markdown) == (name == "cifar-stl")  # not beside a random network
    if name == "cifar-stl":  # it stands beside the numbers of the paper's text
        assert "| shot-im, paper | 75.69 |" in markdown.splitlines()
        assert "| u-sfan, paper | 77.04 |" in markdown.splitlines()


def test_a_preset_reaches_both_stages(tmp_path):
    root = make("office31", tmp_path / "data", images=1)
    settings = {"data": root, "allow_counts": True, "preset": "paper", "methods": ["aad"]}
    settings |= {"backbone": "tf_efficientnet_lite0", "pretrained": "none"}
    suite = Suite.open("office31", settings, tmp_path / "study", start_runtime(None))
    train = make_config(TrainConfig, suite.train_settings("A"))
    assert (train.preset, train.tune, train.epochs) == ("paper", "all", 100)
    assert (train.weight_decay, train.prior) == (5e-4, 5e-4)
    assert not suite.comparable


@pytest.mark.parametrize(
    ("name", "setting"),
    [("office31", "open"), ("office-home", "open"), ("office-home", "partial")],
)
def test_open_and_partial_set(name, setting, tmp_path):
    root = make(name, tmp_path / "data", images=2, classes_limit=CLASSES[name])
    pair = {"office31": "D-W", "office-home": "A-C"}[name]
    more = (
        "--methods",
        "source-only",
        "u-sfan",
        "--pairs",
        pair,
        f"--{setting}-set",
        "--seeds",
        0,
        1,
    )
    assert reproduce(name, root, tmp_path / "study", *more) == 0
    results = json.loads((tmp_path / "study" / "results.json").read_text())
    assert (results["setting"], len(results["rows"])) == (setting, 4)
    predicted = load_file(tmp_path / "study" / "cells" / f"u-sfan_{pair}_0.safetensors")[
        "predicted"
    ]
    known = len(SourceModel.load(tmp_path / "study" / "models" / f"{pair[0]}_0").classes)
    unknown = [row for row in results["rows"] if (row["method"], row["seed"]) == ("u-sfan", 0)]
    assert (known in predicted.tolist()) == (
        setting == "open" and unknown[0]["unknown_accuracy"] > 0
    )
    assert (tmp_path / "study" / "agreement.md").is_file()
    assert ("hos" in results["rows"][0]) == (setting == "open")
    source = SourceModel.load(tmp_path / "study" / "models" / f"{pair[0]}_0")
    assert (
        len(source.classes)
        == {"office31open": 10, "office-homeopen": 25, "office-homepartial": 27}[name + setting]
    )


def test_a_finished_cell_is_never_run_twice(digits, tmp_path, capsys):
    out = tmp_path / "study"
    methods = ("--methods", "source-only", "u-sfan")
    assert reproduce("digits", digits, out, *methods) == 0
    files = [*(out / "cells").iterdir(), *(out / "models").rglob("*.safetensors")]
    times = {file: file.stat().st_mtime_ns for file in files}
    table = (out / "table.md").read_bytes()
    cells = len((out / "log.jsonl").read_text().splitlines())
    assert cells == len(list((out / "cells").glob("*.json")))
    (out / "cells" / "u-sfan_U-M_0.json").unlink()
    with open(out / "log.jsonl", "a") as log:
        log.write('{"event": "ce')  # a machine that stopped in the middle
    capsys.readouterr()
    assert reproduce("digits", digits, out, *methods) == 0
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("[")]
    assert len(lines) == 1
    assert "u-sfan U→M" in lines[0]
    changed = {file.name for file in files if file.stat().st_mtime_ns != times[file]}
    assert changed == {"u-sfan_U-M_0.json", "u-sfan_U-M_0.safetensors"}
    assert (out / "table.md").read_bytes() == table
    events = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    assert len(events) == cells + 1
    assert (events[-1]["method"], events[-1]["task"]) == ("u-sfan", "U→M")
    assert (out / "metrics.json").read_bytes() == (out / "table.json").read_bytes()
    assert (
        reproduce("digits", digits, out, "--methods", "source-only", "shot", "u-sfan") == 0
    )  # one more method
    settings = yaml.safe_load((out / "config.yaml").read_text())
    assert (settings["benchmark"], settings["methods"]) == (
        "digits",
        ["source-only", "shot", "u-sfan"],
    )
    assert (
        usfan("reproduce", "digits", "--config", out / "config.yaml", "--out", out, *TINY) == 0
    )
    assert "| shot |" in (out / "table.md").read_text()


def test_how_far_seeds_agree(digits, tmp_path, capsys):
    out = tmp_path / "study"
    options = ("--methods", "source-only", "shot", "--pairs", "M-U", "U-M", "--seeds")
    assert reproduce("digits", digits, out, *options, 0) == 0
    assert not (out / "agreement.json").exists()  # with whom?
    capsys.readouterr()
    assert reproduce("digits", digits, out, *options, 0, 1, 2) == 0
    result = agreements(out)
    assert list(result) == ["source-only", "shot"]
    runs = [
        load_file(out / "cells" / f"shot_M-U_{seed}.safetensors")["predicted"].tolist()
        for seed in range(3)
    ]
    same = [
        sum(x == y for x, y in zip(a, b, strict=True))
        for a, b in itertools.combinations(runs, 2)
    ]
    assert result["shot"]["M→U"]["mean"] == pytest.approx(100 * sum(same) / (3 * len(runs[0])))
    assert result["shot"]["avg"]["mean"] == pytest.approx(
        (result["shot"]["M→U"]["mean"] + result["shot"]["U→M"]["mean"]) / 2
    )
    text = (out / "agreement.md").read_text()
    assert text in capsys.readouterr().out
    assert f"| shot | {result['shot']['M→U']['mean']:.1f} ± " in text
    (out / "cells" / "shot_M-U_2.safetensors").unlink()
    assert reproduce("digits", digits, out, *options, 0, 1, 2) == 0
    again = agreements(out)
    assert again["source-only"] == result["source-only"]
    assert again["shot"]["M→U"]["mean"] == pytest.approx(100 * same[0] / len(runs[0]))
    assert (again["source-only"]["avg"]["seeds"], again["shot"]["avg"]["seeds"]) == (3, 2)


def agreements(study):
    return json.loads((study / "agreement.json").read_text())["results"]


def test_a_study_that_is_interrupted_has_its_table(digits, tmp_path, monkeypatch):
    out = tmp_path / "study"
    compute = Suite.run_cell

    def stopped(study, cell):
        if cell.method == "shot" and not study.is_done(cell):
            raise KeyboardInterrupt
        return compute(study, cell)

    monkeypatch.setattr(Suite, "run_cell", stopped)
    more = ("--methods", "source-only", "shot", "--pairs", "M-U")
    with contextlib.suppress(KeyboardInterrupt, SystemExit):
        reproduce("digits", digits, out, *more)
    assert "| source-only |" in (out / "table.md").read_text()
    assert usfan("report", out) == 0
    assert "source-only" in (out / "report.html").read_text()


def test_the_time_left_is_shown(digits, tmp_path, monkeypatch):
    """On a terminal as a bar, else as lines. Cells that were done before do not count as fast ones."""
    from rich.console import Console

    from usfan import progress

    monkeypatch.setattr(progress, "PATIENCE", -1.0)
    monkeypatch.setattr(progress.Lines, "wait", 0.0)
    monkeypatch.setattr(progress.Terminal, "wait", 0.0)
    command = ("--methods", "source-only", "shot-im", "--pairs", "M-U", "U-M")
    for name, is_terminal, expected in (
        ("bar", True, r"study: \d of 4 cells"),
        ("lines", False, r"study: 3 of 4 cells, .* cells/s, .* left"),
    ):
        screen = io.StringIO()
        console = Console(file=screen, force_terminal=is_terminal, width=200)
        monkeypatch.setattr(progress, "console", console)
        assert reproduce("digits", digits, tmp_path / name, *command) == 0
        assert re.search(expected, screen.getvalue())


def refused(capsys, *arguments) -> str:
    capsys.readouterr()
    assert usfan(*arguments) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1, lines
    return lines[0]


def test_a_study_is_not_mixed_with_another(digits, tmp_path, capsys):
    out = tmp_path / "study"
    assert reproduce("digits", digits, out, "--methods", "source-only") == 0
    line = refused(
        capsys,
        "reproduce",
        "digits",
        "--data",
        digits,
        "--out",
        out,
        "--allow-counts",
        *FAST,
        "--lr",
        0.5,
    )
    assert "other settings (adapt: lr none, not 0.5)" in line


def test_cells_of_other_defaults_are_not_mixed_with_new_ones(digits, tmp_path, capsys):
    """A later version may give a method other settings: its old cells are not used then, and other methods' are."""
    out = tmp_path / "study"
    once = ("--methods", "shot", "u-sfan+", "--pairs", "M-U", "--epochs", 4)
    assert reproduce("digits", digits, out, *once) == 0
    row = json.loads((out / "cells" / "u-sfan+_M-U_0.json").read_text())
    assert (row["settings"]["pseudo_label_warmup"], row["settings"]["epochs"]) == (1, 4)
    assert (
        None
        not in {
            k: v
            for k, v in row["settings"].items()
            if k not in ("prior", "damping", "curvature", "weight_decay", "dropout_rate")
        }.values()
    )
    study = json.loads((out / "study.json").read_text())
    study["rows"]["u-sfan+"]["gamma"] = 0.3  # as an earlier version had it
    (out / "study.json").write_text(json.dumps(study))
    again = (
        "reproduce",
        "digits",
        "--data",
        digits,
        "--out",
        out,
        "--allow-counts",
        *FAST,
        *once,
    )
    assert "other settings (u-sfan+: " in refused(capsys, *again)
    assert (
        reproduce("digits", digits, out, "--methods", "shot", "--pairs", "M-U", "--epochs", 4)
        == 0
    )
    assert "other settings (u-sfan+: " in refused(
        capsys, *again
    )  # a run of the other method does not hide it
    (out / "study.json").write_text("[]")
    assert "a mapping was expected" in refused(capsys, *again)


@pytest.mark.parametrize("damage", ["domain", "class", "count"])
def test_what_is_wrong_with_the_data_is_named(tmp_path, capsys, damage):
    root = make("office31", tmp_path / "data", images=2)
    allow: tuple = ("--allow-counts",)
    if damage == "domain":
        shutil.rmtree(root / "webcam")
        words = "webcam"
    elif damage == "class":
        (root / "dslr" / "mug").rename(root / "dslr" / "cup")
        words = "cup"
    else:
        allow = ()
        words = "dslr holds 62 images, 498 expected"
    line = refused(
        capsys,
        "reproduce",
        "office31",
        "--data",
        root,
        "--out",
        tmp_path / "study",
        *allow,
        *FAST,
    )
    assert words in line
    assert "published at" in line
    assert not (tmp_path / "study").exists()


def test_other_mistakes(digits, tmp_path, capsys):
    command = (
        "reproduce",
        "digits",
        "--data",
        digits,
        "--out",
        tmp_path / "study",
        "--allow-counts",
        *FAST,
    )
    assert "U-M" in refused(capsys, *command, "--pairs", "M-X")
    assert "u-sfan+" in refused(capsys, *command, "--methods", "dann")
    assert "open-set split" in refused(capsys, *command, "--open-set")
    assert "did you mean" in refused(capsys, *command, "--backbone", "lenett")
    assert not (tmp_path / "study" / "cells").exists()
