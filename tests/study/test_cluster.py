"""A study on a local Ray with two workers: the rows of one process, also if a worker is killed in the middle.

Ray takes seconds to start: it is started once, for these tests alone.
"""

import json
import os
import signal
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

from small_runs import TINY, class_folder, usfan
from usfan.config import RuntimeConfig
from usfan.engine.runtime import start_runtime
from usfan.errors import UsfanError
from usfan.study.cluster import cells_on_ray, connected
from usfan.study.suite import Cell, Suite

if not find_spec("ray"):  # imported later, as the command does: it reads its environment then
    pytest.skip("Ray is not installed", allow_module_level=True)
GIVEN = {
    "backbone": "digits-cnn",
    "source_epochs": 1,
    "epochs": 3,
    "batch_size": 8,
    "threads": 1,
}


@pytest.fixture(scope="module")
def ray():
    os.environ["RAY_AUTH_MODE"] = ""
    with connected("local") as started:
        yield started
    assert os.environ.pop("RAY_AUTH_MODE") == ""


@pytest.fixture(scope="module")
def sites(tmp_path_factory):
    root = tmp_path_factory.mktemp("data") / "sites"
    for number, name in enumerate(("garden", "roof", "yard")):
        class_folder(root / name, images=4, domain=number)
    return root


def suite(root: Path, out: Path, **arguments) -> Suite:
    out.mkdir(exist_ok=True)
    settings = {
        **GIVEN,
        "data": str(root),
        "methods": ["source-only", "u-sfan"],
        "seeds": [0],
        **arguments,
    }
    runtime = start_runtime(RuntimeConfig(device="cpu", workers=0))
    return Suite.open(None, settings, out, runtime, {"device": "cpu", "workers": 0})


@pytest.fixture(scope="module")
def in_one_process(sites, tmp_path_factory):
    study = suite(sites, tmp_path_factory.mktemp("one"))
    study.run()
    return study


def rows_of(study: Suite) -> list[dict]:
    return [{k: v for k, v in row.items() if k != "seconds"} for row in study.rows()]


def running_workers() -> list[int]:
    """Processes of our own Ray that run a task now: Ray gives them the name of its function."""
    result = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            title = (folder / "cmdline").read_bytes()
            raylet = (folder / "stat").read_text().rsplit(")", 1)[1].split()[1]
            driver = Path("/proc", raylet, "stat").read_text().rsplit(")", 1)[1].split()[1]
        except (OSError, IndexError):
            continue
        if title.startswith(b"ray::work") and int(driver) == os.getpid():
            result.append(int(folder.name))
    return result


def kill_one() -> tuple[int, float]:
    end = time.monotonic() + 20
    while not (workers := running_workers()):
        assert time.monotonic() < end, "no worker runs a task"
        time.sleep(0.002)
    os.kill(workers[0], signal.SIGKILL)
    return workers[0], time.time()


def files_done(study: Path) -> list[Path]:
    """Those of whole cells and models. A cell's row comes after its tensors: one that was killed between the two is not
    done, and is made again."""
    cells = [
        p
        for row in (study / "cells").glob("*.json")
        for p in (row, row.with_suffix(".safetensors"))
    ]
    return cells + [
        p
        for config in (study / "models").glob("*/config.json")
        for p in config.parent.iterdir()
    ]


def test_the_local_ray_is_reached_by_its_user_alone(ray):
    """With an empty RAY_AUTH_MODE and ports on all interfaces, anybody near could run code here."""
    psutil = pytest.importorskip("psutil")

    processes = psutil.Process().children(recursive=True)
    sockets = [socket for process in processes for socket in process.net_connections("inet")]
    listening = {socket.laddr.ip for socket in sockets if socket.status == "LISTEN"}
    assert listening <= {"127.0.0.1", "::ffff:127.0.0.1", "::1"}
    assert listening
    assert os.environ["RAY_AUTH_MODE"] == "token"
    folder = Path(ray._private.worker._global_node.get_session_dir_path()).parents[1]
    assert folder.stat().st_mode & 0o077 == 0


def test_a_worker_is_killed_and_the_rows_are_those_of_one_process(
    ray, sites, in_one_process, tmp_path, capfd
):
    study = suite(sites, tmp_path / "study", ray="local")
    killed = []
    before = {}

    def cells_and_a_kill(study):
        for row in cells_on_ray(study):
            if not killed:
                killed.append(kill_one())
                for p in files_done(tmp_path / "study"):
                    before[p] = (p.stat().st_ino, p.stat().st_mtime_ns)
            yield row

    study.run(cells_and_a_kill)
    assert killed
    assert not Path("/proc", str(killed[0][0])).exists()
    assert rows_of(study) == rows_of(in_one_process)
    assert len(rows_of(study)) == 12
    tables = [(s.out / "table.md").read_text() for s in (study, in_one_process)]
    assert tables[0] == tables[1]
    events = [json.loads(line) for line in (study.out / "log.jsonl").read_text().splitlines()]
    assert len({(e["method"], e["task"], e["seed"]) for e in events}) == len(events) == 12
    assert {
        p: (p.stat().st_ino, p.stat().st_mtime_ns) for p in before
    } == before  # what was done is not done again
    assert len(before) > 3
    described = [
        json.loads((s.out / "study.json").read_text()) for s in (study, in_one_process)
    ]
    assert described[0] == described[1]


def test_only_what_is_missing_is_sent(ray, sites, in_one_process, monkeypatch, capsys):
    sent = []
    whole = ray.remote

    def remote(**options):
        def wrap(function):
            made = whole(**options)(function)
            plain = made.remote
            made.remote = lambda *arguments: sent.append(arguments[1]) or plain(*arguments)
            return made

        return wrap

    monkeypatch.setattr(ray, "remote", remote)
    gone = in_one_process.cell_path(Cell(0, "roof", "yard", "u-sfan"))
    row = json.loads(gone.read_text())
    gone.unlink()
    again = suite(sites, in_one_process.out, ray="local")
    again.run(cells_on_ray)
    assert sent == [(0, "roof"), (0, "roof", "yard", "u-sfan")]
    new = json.loads(gone.read_text())
    assert {**new, "seconds": 0} == {**row, "seconds": 0}


def test_a_cell_that_fails_is_named_and_the_others_are_done(ray, sites, tmp_path):
    study = suite(
        sites,
        tmp_path / "study",
        ray="local",
        pairs=["garden-roof", "roof-yard"],
        methods=["source-only"],
    )
    (tmp_path / "study" / "models").mkdir()
    (tmp_path / "study" / "models" / "garden_0").write_text("a file where a folder should be")
    with pytest.raises(
        OSError,
        match="1 of 2 cells failed, and what is done stays; the first: source-only garden→roof",
    ):
        study.run(cells_on_ray)
    assert [p.name for p in (tmp_path / "study" / "cells").glob("*.json")] == [
        "source-only_roof-yard_0.json"
    ]


def test_mistakes(ray, sites, tmp_path, refused):
    command = (
        "study",
        sites,
        "--out",
        tmp_path / "study",
        "--backbone",
        "digits-cnn",
        "--ray",
        "local",
        *TINY,
    )
    line = refused(*command, "--threads", 4096)
    assert "--threads 4096: no machine of the Ray cluster has more than" in line
    line = refused(
        *command,
        "--methods",
        "u-sfan++",
        "--seeds",
        0,
        "--pairs",
        "roof-yard",
        "--source-epochs",
        1,
    )
    assert "needs a witness" in line
    assert "share must be above 0" in refused(*command, "--share", 2)
    study = suite(sites, tmp_path / "other", ray="local")
    study.runtime_settings["device"] = "cuda"
    with pytest.raises(UsfanError, match="no machine of the Ray cluster has more than 0 GPUs"):
        study.run(cells_on_ray)


def test_the_command_runs_on_ray(ray, sites, tmp_path, capsys):
    arguments = (
        "--backbone",
        "digits-cnn",
        "--source-epochs",
        1,
        "--methods",
        "source-only",
        "--seeds",
        0,
        "--threads",
        1,
    )
    assert (
        usfan("study", sites, "--out", tmp_path / "study", *arguments, "--ray", "local", *TINY)
        == 0
    )
    assert "| source-only |" in capsys.readouterr().out
