"""Load: many adaptations in one process, and many images through `usfan predict`, without growth.

python tests/reliability/soak.py --adaptations 1000 --images 200000
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import measuring
from faults import finish, start

from small_runs import class_folder, train_tiny
from tiny_models import tiny_model, witness_for

WARM = 0.1
"""The share at the start in which caches may still fill, beside one run of every method."""
FLAT_MIB = 16
"""Growth that counts as none: the allocator's own rounding."""


def adapt_often(count: int) -> dict[str, Any]:
    """Each adaptation takes another method and seed; memory, handles and threads are read after each, once every method
    has run in closed and in open set."""
    import torch

    import usfan
    from usfan.adaptation.methods import METHODS

    methods = list(METHODS)

    torch.set_num_threads(1)
    source = tiny_model()
    images = torch.randint(256, (24, 1, 28, 28), dtype=torch.uint8)
    memory = []
    handles = []
    threads = []
    began = time.perf_counter()
    warm_up = 2 * len(methods)
    for number in range(-warm_up, count):
        method = methods[number % len(methods)]
        open_set = number < -len(methods) or number % 4 == 3
        given = {"epochs": 1, "batch_size": 8, "seed": abs(number), "open_set": open_set}
        adapted = usfan.adapt(source, images, method, **given, **witness_for(method, images))
        assert bool(adapted.predict(images[:2]).probs.isfinite().all())
        del adapted
        if number < 0:
            continue
        if number == 0:
            gc.freeze()  # what the libraries hold is not looked through after each
        gc.collect()
        memory.append(measuring.status_mib("VmRSS"))
        handles.append(measuring.open_handles())
        threads.append(measuring.threads())
    gc.unfreeze()
    return {
        "adaptations": count,
        **growth(memory),
        "handles_after_warm_up": handles[int(WARM * count)],
        "handles_at_the_end": handles[-1],
        "threads_after_warm_up": threads[int(WARM * count)],
        "threads_at_the_end": threads[-1],
        "seconds": round(time.perf_counter() - began, 1),
    }


def growth(memory: list[float]) -> dict[str, float]:
    """The median of the last tenth against that of the tenth after the warm-up."""
    tenth = max(1, len(memory) // 10)
    first = statistics.median(memory[tenth : 2 * tenth])
    last = statistics.median(memory[-tenth:])
    return {
        "rss_mib_after_warm_up": round(first, 1),
        "rss_mib_at_the_end": round(last, 1),
        "peak_mib": round(max(memory), 1),
    }


def predict_many(count: int, workers: int = 1) -> dict[str, Any]:
    """One call of `usfan predict` on a list of so many lines; its memory is read from outside, all the way."""
    with tempfile.TemporaryDirectory() as place:
        root = Path(place)
        data = class_folder(root / "data", images=200)
        source = train_tiny(class_folder(root / "few"), root / "model")
        files = [str(f) for f in sorted(data.rglob("*.png"))]
        (root / "list.txt").write_text(
            "".join(f"{files[i % len(files)]}\n" for i in range(count))
        )
        words = (
            "predict",
            source,
            root / "list.txt",
            "--out",
            root / "out.csv",
            "--device",
            "cpu",
            "--workers",
            workers,
        )
        began = time.perf_counter()
        process, reader = start(*words)
        memory = watch(process.pid, root)
        done = finish(process, reader)
        rows = (root / "out.csv").read_bytes().count(b"\n") - 1 if done.code == 0 else 0
    return {
        "images": count,
        "exit": done.code,
        "rows": rows,
        **growth(memory),
        "seconds": round(time.perf_counter() - began, 1),
    }


def watch(pid: int, root: Path) -> list[float]:
    """Memory of the process and its decoders at even steps, from the first rows on."""
    memory: list[float] = []
    while True:
        try:
            words = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
            total = sum(measuring.status_mib("VmRSS", p) for p in (pid, *words))
            if not measuring.status_mib("VmRSS", pid):  # a zombie: it has ended
                return memory
        except OSError:
            return memory
        if any(part.stat().st_size > 1000 for part in root.glob("out.csv.part")):
            memory.append(total)
        time.sleep(0.1)


def passed(figures: dict[str, Any]) -> bool:
    flat = figures["rss_mib_at_the_end"] - figures["rss_mib_after_warm_up"] <= FLAT_MIB
    if "rows" in figures:
        return flat and figures["rows"] == figures["images"]
    handles = figures["handles_at_the_end"] <= figures["handles_after_warm_up"]
    return (
        flat and handles and figures["threads_at_the_end"] <= figures["threads_after_warm_up"]
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--adaptations", type=int, default=1_000)
    parser.add_argument("--images", type=int, default=200_000)
    given = parser.parse_args()
    figures = {"adapt": adapt_often(given.adaptations), "predict": predict_many(given.images)}
    good = all(map(passed, figures.values()))
    measuring.save("soak", {"passed": good, **figures})
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
