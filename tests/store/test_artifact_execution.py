"""Loading a model executes nothing that lies in its folder, and the package never unpickles."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import usfan
from usfan.store.model import SourceModel

SOURCES = sorted(Path(usfan.__file__).parent.rglob("*.py"))
FORBIDDEN = {
    "pickle",
    "cPickle",
    "_pickle",
    "dill",
    "cloudpickle",
    "joblib",
    "shelve",
    "marshal",
    "torch.load",
}

WATCHER = """
import os
import sys
from pathlib import Path

import usfan

folder = Path(sys.argv[1]).resolve()
seen, quiet = [], True
FILES = ("config.json", "model.safetensors", "posterior.safetensors")
HARM = ("pickle.", "marshal.", "exec", "compile", "os.system", "os.exec", "os.posix_spawn", "subprocess.", "socket.",
        "ctypes.", "import")

def hook(event, arguments):
    if event == "open" and (str(arguments[0]).startswith(str(folder)) or str(arguments[0]) in FILES):
        write = arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        seen.append(("open", Path(arguments[0]).name, "w" if write else "r"))
    elif not quiet and event.startswith(HARM):
        seen.append((event, str(arguments)[:200]))
    elif event == "pickle.find_class":
        seen.append((event, str(arguments)[:200]))

sys.addaudithook(hook)
usfan.SourceModel.load(folder)  # imports what it needs: code of the installation
quiet = False
usfan.SourceModel.load(folder)
print(sorted(set(seen), key=str))
"""


def imported(tree: ast.Module) -> set[str]:
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.split(".")[0])
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_no_pickle_in_the_source(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    assert not imported(tree) & FORBIDDEN
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        name = ast.unparse(call.func)
        given = {k.arg: ast.unparse(k.value) for k in call.keywords}
        if name == "torch.load":
            assert given.get("weights_only") == "True", f"line {call.lineno}"
        assert name not in ("eval", "exec", "torch.save", "yaml.load", "yaml.unsafe_load"), (
            f"line {call.lineno}"
        )
        assert given.get("allow_pickle", "False") == "False", f"line {call.lineno}"


def test_loading_executes_nothing(folder):
    done = subprocess.run(
        [sys.executable, "-c", WATCHER, str(folder)], capture_output=True, text=True, check=True
    )
    events = ast.literal_eval(done.stdout)
    assert {event[0] for event in events} == {"open"}, events
    # The folder by its name, and each file by its own, relative to it.
    assert {event[1] for event in events} == {
        folder.name,
        "config.json",
        "model.safetensors",
        "posterior.safetensors",
    }
    assert {event[2] for event in events} == {"r"}


def test_code_beside_the_model_is_not_touched(folder):
    harm = folder / "harm"
    code = f"open({str(harm)!r}, 'w')\n"
    for name in (
        "__init__.py",
        "modeling.py",
        "sitecustomize.py",
        "conftest.py",
        "model.py",
        "torch.py",
    ):
        (folder / name).write_text(code)
    SourceModel.load(folder)
    assert not harm.exists()
