"""One of the processes that `usfan.reproduce.jobs` starts: runs the groups it is told, in its own study."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from usfan.compute.runtime import start_runtime
from usfan.config import RuntimeConfig
from usfan.errors import UsfanError
from usfan.reproduce.suite import Suite


def main() -> None:
    answers, sys.stdout = sys.stdout, sys.stderr  # whatever else prints does not get between the lines

    def answer(**what: Any) -> None:
        answers.write(json.dumps(what) + "\n")
        answers.flush()

    told = json.loads(sys.stdin.readline())
    try:
        runtime = start_runtime(RuntimeConfig(**told["runtime"]))
        study = Suite.open(told["name"], told["given"], Path(told["out"]), runtime)
        for line in sys.stdin:
            group = json.loads(line)
            study.run_group(group["seed"], group["source"], lambda row, fresh: answer(row=row, fresh=fresh))
            answer(done=True)
    except UsfanError as error:
        answer(error=str(error), mistake=True)
    except OSError as error:
        answer(error=str(error), mistake=False)


if __name__ == "__main__":
    main()
