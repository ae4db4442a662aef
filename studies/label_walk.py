"""From an unlabelled folder to a decision in three commands, with a user who knows every answer: seconds and keys.

    python -m studies.label_walk MODEL DATA WORK

The commands are those of the README: `usfan adapt MODEL DATA`, `usfan label`, and `usfan adapt` again with the labels.
DATA is a folder of class folders; the program ignores the labels (`--unlabelled`), and the user answers by them. The
answers go through the page's own addresses, as a browser sends them, until the page says that it is done. A key is the
number of a candidate, or the letters and Enter that single out another class in the search. Prints JSON.
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

WINDOW = {"window": "label-walk"}
MOST_ANSWERS = 500


class PageOfRun:
    """The page of `usfan label RUN`, as a browser talks to it."""

    def __init__(self, run: Path) -> None:
        self.process = subprocess.Popen(
            [*usfan(), "label", str(run), "--no-browser"], stderr=subprocess.PIPE, text=True
        )
        assert self.process.stderr is not None
        lines = iter(self.process.stderr.readline, "")
        self.address = next(line.split()[-1] for line in lines if "http://127.0.0.1" in line)

    def ask(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json", "Origin": self.address.rsplit("/", 2)[0]}
        request = urllib.request.Request(self.address + path, data, headers)
        with urllib.request.urlopen(request, timeout=120) as reply:
            answer: dict[str, Any] = json.load(reply)
        return answer

    def close(self) -> None:
        self.process.send_signal(signal.SIGINT)
        self.process.wait(60)


def usfan() -> list[str]:
    return [sys.executable, "-m", "usfan"]


def timed(*words: object) -> float:
    """Seconds of a command."""
    started = time.perf_counter()
    subprocess.run([*usfan(), *map(str, words)], check=True, stderr=subprocess.PIPE)
    return time.perf_counter() - started


def keys_of(label: str, candidates: list[str], classes: list[str]) -> int:
    """Keys for an answer on the page."""
    if label in candidates:
        return 1
    for length in range(1, len(label)):
        if sum(name.casefold().startswith(label[:length].casefold()) for name in classes) == 1:
            return length + 2  # the search is opened, and Enter ends it
    return len(label) + 2


def answer_all(run: Path, truth: list[str]) -> dict[str, Any]:
    """Answer until the page says that it is done. `truth` has the class of each image of the run."""
    page = PageOfRun(run)
    try:
        classes = page.ask("classes")["classes"]
        state = page.ask(f"state?window={WINDOW['window']}")
        keys = 0
        while not state["done"] and state["questions"] and state["answers"] < MOST_ANSWERS:
            question = state["questions"][0]
            label = truth[question["row"]]
            keys += keys_of(label, question["candidates"], classes)
            body = {"row": question["row"], "label": label, "kind": question["kind"], **WINDOW}
            state = page.ask("answer", body)
    finally:
        page.close()
    names = ("answers", "named", "judged", "verdict", "sentence")
    return {"keys": keys, **{name: state[name] for name in names}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("work", type=Path)
    options = parser.parse_args()
    first, second = options.work / "first", options.work / "second"
    for folder in (first, second):
        shutil.rmtree(folder, ignore_errors=True)
    seconds = {
        "adapt": timed("adapt", options.model, options.data, "--unlabelled", "--out", first)
    }
    from usfan.labelling.target import LabelTarget

    truth = [Path(image).parent.name for image in LabelTarget.of_run(first).images]
    started = time.perf_counter()
    answers = answer_all(first, truth)
    seconds["label"] = time.perf_counter() - started
    again = ("--unlabelled", "--labels", first / "labels.csv", "--out", second)
    seconds["adapt again"] = timed("adapt", options.model, options.data, *again)
    accuracy = {}
    for name, model in {"source": options.model, "first": first, "second": second}.items():
        command = [*usfan(), "evaluate", str(model), str(options.data)]
        output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        accuracy[name] = json.loads(output)["accuracy"]
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    row = {"images": len(truth), **answers, "accuracy": accuracy}
    row |= {"seconds": {name: round(value, 1) for name, value in seconds.items()}}
    row |= {"cpu_seconds_of_all": round(used.ru_utime + used.ru_stime, 1)}
    print(json.dumps(row, ensure_ascii=False, indent=1))


if __name__ == "__main__":
    main()
