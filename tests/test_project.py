"""The files around the package agree with each other: version, citation, hooks, changelog."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import yaml

import usfan

ROOT = Path(__file__).parent.parent


def project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def test_one_version_everywhere():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert usfan.__version__ == project()["project"]["version"] == str(citation["version"])


def test_hooks_run_the_installed_tools_and_need_no_network():
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))
    assert [repo["repo"] for repo in config["repos"]] == ["local"]
    programs = {hook["entry"].split()[0] for hook in config["repos"][0]["hooks"]}
    assert programs == {".venv/bin/ruff", ".venv/bin/mypy"}


def test_types_are_checked_in_strict_mode():
    settings = project()["tool"]["mypy"]
    assert settings["strict"] is True
    assert "overrides" not in settings


def test_every_tool_of_the_extras_is_pinned():
    pins = {
        re.sub(r"[-_.]+", "-", line.split("==")[0]).lower()
        for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    }
    for extra, needs in project()["project"]["optional-dependencies"].items():
        for need in needs:
            name = re.match(r"[\w.-]+", need)[0].lower()
            if name == "usfan":  # other extras of this package
                continue
            assert re.sub(r"[-_.]+", "-", name) in pins, (
                f"{name} of the extra {extra} is not in constraints.txt"
            )


def test_the_changelog_has_the_version_and_a_place_for_the_next():
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert text.index("## [Unreleased]") < text.index(f"## [{usfan.__version__}] - 20")
