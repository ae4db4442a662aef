"""A software bill of materials, CycloneDX 1.6 JSON: usfan and everything it needs, as installed here.

    make sbom                                        # build/sbom.json
    python tests/reliability/sbom.py FILE [EXTRA …]  # with these extras' packages

Names, versions, licences and who needs whom come from the metadata of the installed packages.
"""

from __future__ import annotations

import json
import re
import sys
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.parse import quote

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name


def needs(name: str, extras: frozenset[str]) -> dict[str, frozenset[str]]:
    """The installed packages that a package asks for on this machine, each with the extras asked for."""
    found: dict[str, frozenset[str]] = {}
    for line in metadata.requires(name) or []:
        wanted = Requirement(line)
        if wanted.marker is None or any(
            wanted.marker.evaluate({"extra": extra}) for extra in (*extras, "")
        ):
            try:
                metadata.version(wanted.name)
            except metadata.PackageNotFoundError:
                continue
            key = canonicalize_name(wanted.name)
            found[key] = found.get(key, frozenset()) | wanted.extras
    return found


def closure(root: str, extras: tuple[str, ...]) -> dict[str, list[str]]:
    """Every package that the root needs, directly or not, with its own needs."""
    graph: dict[str, set[str]] = {}
    seen: set[tuple[str, frozenset[str]]] = set()
    waiting = [(root, frozenset(extras))]
    while waiting:
        name, asked = waiting.pop()
        if (name, asked) not in seen:
            seen.add((name, asked))
            own = needs(name, asked)
            graph.setdefault(name, set()).update(own)
            waiting += own.items()
    return {name: sorted(own) for name, own in graph.items()}


STATED = {"cuda-toolkit": "as the nvidia packages that it names; it has no files"}
"""Licences of packages whose metadata name none."""


def licence_file(name: str) -> str:
    """The first words of a licence that comes with a package; "" if there is none."""
    for file in metadata.files(name) or ():
        if re.fullmatch(r"(LICEN[CS]E|COPYING)(\.\w+)?", file.name, re.IGNORECASE):
            lines = file.read_text().split("\n")
            return " ".join(line.strip() for line in lines if line.strip())[:80]
    return ""


def reference(name: str) -> str:
    return f"pkg:pypi/{name}@{quote(metadata.version(name), safe='')}"


def component(name: str) -> dict[str, Any]:
    facts = metadata.metadata(name)
    expression = facts.get("License-Expression")
    licence = (facts.get("License") or "").strip()
    if licence in ("", "UNKNOWN"):
        licence = STATED.get(name) or licence_file(name)
    entry: dict[str, Any] = {
        "type": "library",
        "bom-ref": reference(name),
        "name": name,
        "version": metadata.version(name),
        "purl": reference(name),
    }
    trove = [
        c.rsplit(" :: ", 1)[1]
        for c in facts.get_all("Classifier") or []
        if c.startswith("License :: ")
    ]
    if expression:
        entry["licenses"] = [{"expression": expression}]
    elif trove or licence:
        entry["licenses"] = [
            {"license": {"name": text}} for text in trove or [re.split(r"\n", licence)[0][:80]]
        ]
    return entry


def bill(root: str = "usfan", extras: tuple[str, ...] = ()) -> dict[str, Any]:
    graph = closure(root, extras)
    return {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": {**component(root), "type": "application"}},
        "components": [component(name) for name in sorted(graph) if name != root],
        "dependencies": [
            {"ref": reference(name), "dependsOn": [reference(n) for n in graph[name]]}
            for name in sorted(graph)
        ],
    }


def main() -> None:
    out = Path(sys.argv[1])
    out.parent.mkdir(parents=True, exist_ok=True)
    made = bill(extras=tuple(sys.argv[2:]))
    out.write_text(json.dumps(made, indent=2) + "\n", encoding="utf-8")
    print(f"{out}: {len(made['components'])} packages")


if __name__ == "__main__":
    main()
