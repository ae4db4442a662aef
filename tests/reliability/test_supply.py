"""What comes along and what goes out: the bill of materials, the bounds, no network, no pickle at run time."""

import ast
import json
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from sbom import bill

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def made():
    return bill()


def test_the_bill_holds_every_dependency_at_its_installed_version(made):
    listed = {c["name"]: c["version"] for c in made["components"]}
    asked = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    for line in asked:
        name = canonicalize_name(Requirement(line).name)
        assert listed[name] == metadata.version(name)
    assert {"markupsafe", "filelock"} <= set(listed)  # needed by what we need
    assert "pytest" not in listed
    assert "pytest" in {c["name"] for c in bill(extras=("test",))["components"]}


def test_the_bill_is_whole(made):
    assert (made["bomFormat"], made["specVersion"]) == ("CycloneDX", "1.6")
    references = {c["bom-ref"] for c in made["components"]} | {
        made["metadata"]["component"]["bom-ref"]
    }
    assert len(references) == len(made["components"]) + 1
    assert {d["ref"] for d in made["dependencies"]} == references
    assert {r for d in made["dependencies"] for r in d["dependsOn"]} <= references


def test_every_licence_is_known():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"].keys() - {"test", "peers", "lint", "docs"}
    for part in bill(extras=tuple(extras))["components"]:
        names = str(part.get("licenses", ""))
        assert names, part["name"]
        assert "unknown" not in names.lower(), part["name"]


def test_every_dependency_has_a_lower_bound():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    groups = [project["dependencies"], *project["optional-dependencies"].values()]
    for line in (line for group in groups for line in group):
        if Requirement(line).name == "usfan":  # other extras of this package
            continue
        assert {s.operator for s in Requirement(line).specifier} & {">=", "=="}, line


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """What `no_network.py` found, in a process of its own."""
    script = Path(__file__).with_name("no_network.py")
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path_factory.mktemp("alone"))],
        capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_the_demo_and_the_commands_need_no_network(alone):
    assert alone["codes"] == [0, 0, 0, 0]
    assert alone["tried"] == []


def test_only_a_hub_id_asks_for_it(alone):
    assert "socket.getaddrinfo" in alone["hub"]  # so that the hook is seen to work
    assert "the Hugging Face Hub does not provide it" in alone["refused"]


def test_nothing_is_unpickled_at_run_time(alone):
    assert alone["unpickled"] == []


def test_three_modules_of_the_package_open_a_socket():
    """`models/hub.py`, for a model, weights or a cluster that the user named: does the Hub, or the address, answer?
    `engine/processes.py` asks for a free port of this machine, where the processes of a run meet. `labelling/server.py`
    listens on the loopback address, for `usfan label`."""
    package = ROOT / "src" / "usfan"
    for path in {*package.rglob("*.py")} - {
        package / "models/hub.py",
        package / "engine/processes.py",
        package / "labelling/server.py",
    }:
        names = {
            a.name.split(".")[0]
            for n in ast.walk(ast.parse(path.read_text()))
            if isinstance(n, ast.Import)
            for a in n.names
        }
        names |= {
            (n.module or "").split(".")[0]
            for n in ast.walk(ast.parse(path.read_text()))
            if isinstance(n, ast.ImportFrom) and n.module != "urllib.parse"
        }
        assert not names & {
            "socket",
            "urllib",
            "http",
            "requests",
            "httpx",
            "ftplib",
            "smtplib",
        }, path
