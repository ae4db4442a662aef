"""The wheel alone, in an environment that has the dependencies and not this checkout: nothing is missing in it."""

from __future__ import annotations

import os
import shutil
import site
import subprocess
import sys
from pathlib import Path

import pytest

import usfan

ROOT = Path(__file__).parent.parent
UV = Path(sys.executable).with_name("uv")
COMMANDS = (
    "train photos/studio --out runs/studio --backbone dtn --epochs 1 --workers 0",
    "check runs/studio photos/street --out check.json --workers 0",
    "adapt runs/studio photos/street --out runs/street --epochs 1 --batch-size 8 --workers 0",
)
"""As in the README, with a small network."""


def run(*words: object, folder: Path) -> str:
    environment = {
        k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")
    }
    done = subprocess.run(
        [str(word) for word in words],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.skipif(not UV.is_file(), reason="needs uv beside Python, as make installs it")
def test_the_wheel_checks_and_adapts(tmp_path):
    tree = tmp_path / "tree"
    shutil.copytree(ROOT / "src", tree / "src", ignore=shutil.ignore_patterns("*.egg-info"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    offline = ("--offline", "--python", sys.executable)
    run(
        UV,
        "build",
        "--wheel",
        "--no-build-isolation",
        *offline,
        "--out-dir",
        tmp_path / "dist",
        folder=tree,
    )
    (wheel,) = (tmp_path / "dist").glob("*.whl")

    run(UV, "venv", "--quiet", *offline, tmp_path / "empty", folder=tmp_path)
    python = tmp_path / "empty" / "bin" / "python"
    run(
        UV,
        "pip",
        "install",
        "--offline",
        "--no-deps",
        "--python",
        python,
        wheel,
        folder=tmp_path,
    )
    (packages,) = (tmp_path / "empty").glob("lib/python*/site-packages")
    (packages / "dependencies.pth").write_text("\n".join(site.getsitepackages()))

    version = run(tmp_path / "empty" / "bin" / "usfan", "--version", folder=tmp_path)
    assert usfan.__version__ in version
    run(
        python,
        ROOT / "docs" / "examples" / "make_photos.py",
        "photos",
        "--images",
        4,
        folder=tmp_path,
    )
    walk = (
        "import usfan; from usfan.cli.main import main\n"
        f"assert usfan.__file__.startswith({str(packages)!r}), usfan.__file__\n"
        f"for line in {COMMANDS!r}:\n"
        "    assert not main(line.split()), line"
    )
    run(python, "-c", walk, folder=tmp_path)
    assert (tmp_path / "check.json").is_file()
    assert (tmp_path / "runs" / "street" / "model.safetensors").is_file()
