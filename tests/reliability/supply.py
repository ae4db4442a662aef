"""Save what the suites at the lower bounds and on the newest Python said, from their logs.

make test-lowest 2>&1 | tee lowest.log; make test-newest 2>&1 | tee newest.log
python tests/reliability/supply.py lowest=lowest.log newest=newest.log

`NAME=LOG` is of the environment .venv-NAME; suites that are not named keep their figures.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import measuring
from sbom import bill

PACKAGES = ("torch", "torchvision", "timm", "numpy", "pillow", "safetensors")
ASK = """
import json, platform
from importlib.metadata import version
print(json.dumps([platform.python_version()] + [version(name) for name in {!r}]))
"""


def suite(name: str, log: Path) -> dict[str, Any]:
    python = measuring.TESTS.parent / f".venv-{name}" / "bin" / "python"
    asked = subprocess.run(
        [python, "-c", ASK.format(PACKAGES)], capture_output=True, text=True, check=True
    )
    version, *versions = json.loads(asked.stdout)
    last = log.read_text(encoding="utf-8").strip().splitlines()[-1]
    counts = {
        word: int(found[1]) if (found := re.search(rf"(\d+) {word}", last)) else 0
        for word in ("passed", "failed", "skipped")
    }
    return {"python": version, "versions": dict(zip(PACKAGES, versions, strict=True)), **counts}


def main() -> None:
    file = measuring.RESULTS / "reliability-supply.json"
    suites = json.loads(file.read_text())["suites"] if file.is_file() else {}
    for name, log in (word.split("=") for word in sys.argv[1:]):
        suites[name] = suite(name, Path(log))
    measuring.save(
        "supply", {"suites": suites, "packages_in_the_bill": len(bill()["components"])}
    )


if __name__ == "__main__":
    main()
