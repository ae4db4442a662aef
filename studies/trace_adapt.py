"""Every hop of one `usfan adapt`, in order, and how often each costly thing is done.

    python -m studies.trace_adapt SOURCE DATA --out DIR [flags of `usfan adapt`] [--depth 4]

A line is a call of a function of the package, indented by its depth below the command, with its milliseconds; calls
of the same function in a row are one line. Small functions are left out. The table at the end counts what a run should
do once: settings resolved, weights hashed, images decoded, networks run over the target, labels matched.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from pathlib import Path
from types import FrameType

import usfan
from usfan.cli.main import main

PACKAGE = str(Path(usfan.__file__).parent)
LEAST_SECONDS = 0.001
"""A call that took less is not shown, unless it is one of ONCE."""
ONCE = {
    "settings resolved": ("adaptation/plan.py", "plan_adaptation"),
    "preset read": ("config.py", "read_preset"),
    "weights hashed": ("models/backbones.py", "weights_hash"),
    "network built": ("models/backbones.py", "create_backbone"),
    "images decoded": ("engine/passes.py", "engine_store"),
    "features computed": ("engine/features.py", "features_of"),
    "witness's description": ("adaptation/witness.py", "testimony"),
    "heads run over the target": ("engine/passes.py", "forward_store"),
    "draws of the predictive": ("uncertainty/base.py", "Uncertainty.predictive"),
    "clusters fitted": ("maths/cluster_mixture.py", "fit_mixture"),
    "names of classes compared": ("data/sources.py", "ImageData.unknown_names"),
    "labels of the data matched": ("data/sources.py", "ImageData.match_classes"),
    "labels of the user matched": ("data/few_labels.py", "few_labels"),
    "guard decides": ("adaptation/guard.py", "Guard.finish"),
    "model saved": ("store/model.py", "SourceModel.save"),
}


class Trace:
    """Calls inside the package, as a profiler of `sys.setprofile` sees them."""

    def __init__(self) -> None:
        self.stack: list[tuple[FrameType, float, int]] = []
        self.lines: list[tuple[int, str, float]] = []
        self.counts: Counter[tuple[str, str]] = Counter()

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        file = frame.f_code.co_filename
        if event not in ("call", "return") or not file.startswith(PACKAGE):
            return
        if event == "call":
            self.enter(frame, file)
        elif self.stack and self.stack[-1][0] is frame:
            _, began, line = self.stack.pop()
            depth, name, _ = self.lines[line]
            self.lines[line] = (depth, name, time.perf_counter() - began)

    def enter(self, frame: FrameType, file: str) -> None:
        name = frame.f_code.co_name
        if name.startswith("<") or frame.f_code.co_flags & 0x20:  # a comprehension, a generator
            return
        place = file.removeprefix(PACKAGE).lstrip("/")
        self.counts[place, frame.f_code.co_qualname] += 1
        self.stack.append((frame, time.perf_counter(), len(self.lines)))
        self.lines.append((len(self.stack) - 1, f"{place}:{frame.f_code.co_qualname}", 0.0))

    def hops(self, depth: int) -> list[str]:
        """One line for each call down to `depth`; the same call again and again is one line with its number."""
        marked = {f"{place}:{name}" for place, name in ONCE.values()}
        rows: list[tuple[int, str, float, int]] = []
        for level, name, seconds in self.lines:
            if name not in marked and (level > depth or seconds < LEAST_SECONDS):
                continue
            if rows and rows[-1][:2] == (level, name):
                seconds += rows[-1][2]
                rows[-1] = (level, name, seconds, rows[-1][3] + 1)
            else:
                rows.append((level, name, seconds, 1))
        return [
            f"{1000 * seconds:8.0f} ms  {'  ' * level}{name}{f' × {count}' if count > 1 else ''}"
            for level, name, seconds, count in rows
        ]


def trace(words: list[str], depth: int) -> int:
    record = Trace()
    sys.setprofile(record)
    try:
        code = main(["adapt", *words])
    finally:
        sys.setprofile(None)
    print("\n".join(record.hops(depth)))
    for title, (place, name) in ONCE.items():
        print(f"{record.counts[place, name]:8} × {title} ({place}: {name})")
    return code


if __name__ == "__main__":
    words = sys.argv[1:]
    depth = 4
    if "--depth" in words:
        at = words.index("--depth")
        depth = int(words[at + 1])
        del words[at : at + 2]
    sys.exit(trace(words, depth))
