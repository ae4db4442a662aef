"""Fuzz what strangers hand over, model folders and image files: no crash, no hang, no flood of memory, a named refusal.

    python tests/reliability/fuzz.py --artifacts 20000 --images 5000

The cases run in a process of their own, which says what came of each before it begins the next: when it dies, the case
that killed it is known, and a new process goes on after it. Case n is the same on every machine. The 2 seconds of a
case are of CPU time, so that a busy machine does not count; a case that waits instead is ended after 30.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import measuring
from artifact_mutations import Folder, mutated

MOST_SECONDS = 2.0
MOST_MIB = 500
GIVE_UP = 30
"""Seconds after which a hanging process is ended from inside, with its stack on stderr."""
Case = Callable[[int], tuple[str, Callable[[], str]]]
"""Case number → kind of damage, and what to call for the outcome; one that begins with "BAD" is a failure."""


def base_folders() -> list[Folder]:
    """Folders of different networks, with and without a bias, and an adapted model with its rule."""
    from tiny_models import tiny_model
    from usfan.maths.unknown import UnknownRule
    from usfan.store.model import AdaptedModel

    models = [
        tiny_model(),
        tiny_model("lenet", head_bias=False, bottleneck=0),
        tiny_model("lenet", head_norm=False),
    ]
    shared = {
        name: getattr(models[0], name)
        for name in ("classifier", "posterior", "classes", "spec", "architecture")
    }
    models.append(
        AdaptedModel(**shared, method="u-sfan", unknown_rule=UnknownRule("entropy", 0.5))
    )
    folders = []
    for model in models:
        with tempfile.TemporaryDirectory() as place:
            saved = model.save(Path(place))
            folders.append({p.name: p.read_bytes() for p in saved.iterdir()})
    return folders


def artifact_cases(place: Path) -> Case:
    bases = base_folders()
    target = place / "model"
    target.mkdir()

    def case(number: int) -> tuple[str, Callable[[], str]]:
        kind, folder = mutated(bases[(number // 10) % len(bases)], bases, number)
        for name, content in folder.items():
            (target / name).write_bytes(content)
        return kind, lambda: load_and_predict(target)

    return case


def load_and_predict(target: Path) -> str:
    import torch

    from usfan.errors import ArtifactError
    from usfan.store.model import SourceModel

    try:
        model = SourceModel.load(target)
    except ArtifactError as error:
        return named(str(error), str(target)) or "refused"
    spec = model.spec
    try:
        prediction = model.predict(
            torch.zeros(2, spec.channels, spec.resize, spec.resize, dtype=torch.uint8)
        )
    except ArtifactError:
        return "refused to predict"
    finite = all(
        bool(getattr(prediction, n).isfinite().all()) for n in ("probs", "entropy", "weight")
    )
    return "loaded, predicts" if finite else "BAD: a prediction that is not finite"


def named(message: str, path: str) -> str | None:
    """What is wrong with a message, if anything: it must name the file, in one short printable line."""
    line = " ".join(message.split())
    if path not in line or not line.isprintable() or len(line) > 1500:
        return f"BAD: message {line[:200]!a}"
    return None


def image_cases(place: Path) -> Case:
    from image_mutations import base_images, mutated_image

    contents = base_images()
    target = place / "image.bin"

    def case(number: int) -> tuple[str, Callable[[], str]]:
        kind, content = mutated_image(contents, number)
        target.write_bytes(content)
        return kind, lambda: decode(target, 1 + 2 * (number % 2))

    return case


def decode(target: Path, channels: int) -> str:
    from usfan.data.decoding.decode import UnreadableImage, decode_file, squared

    try:
        picture = squared(decode_file(str(target), channels), 32)
    except UnreadableImage as error:
        return named(str(error), str(target)) or "skipped by name"
    return "read" if picture.size == (32, 32) else "BAD: size"


def work(what: str, start: int, stop: int, out: Path) -> None:
    """The process of the cases: one line of JSON for each."""
    import torch

    from tiny_models import tiny_model
    from usfan.store.model import SourceModel

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as place:  # a good model first: some imports wait for it
        SourceModel.load(tiny_model().save(Path(place))).predict(
            torch.zeros(1, 28, 28, dtype=torch.uint8)
        )
    imports = measuring.status_mib("VmRSS")
    with tempfile.TemporaryDirectory() as place, open(out, "a", encoding="utf-8") as lines:
        case = (artifact_cases if what == "artifacts" else image_cases)(Path(place))
        for number in range(start, stop):
            faulthandler.dump_traceback_later(GIVE_UP, exit=True)
            kind, call = case(number)
            began = time.perf_counter()
            worked = time.process_time()
            try:
                outcome = call()
            except BaseException as error:
                outcome = f"BAD: {type(error).__name__}: {str(error)[:200]}"
            seconds = [
                round(time.process_time() - worked, 4),
                round(time.perf_counter() - began, 4),
            ]
            grown = round(measuring.status_mib("VmHWM") - imports, 1)
            lines.write(json.dumps([number, kind, outcome, grown, *seconds]) + "\n")
            lines.flush()
        faulthandler.cancel_dump_traceback_later()


def run_cases(what: str, count: int, chunk: int = 2500) -> Iterator[list[Any]]:
    """All cases, over as many processes as it takes, one at a time."""
    place = Path(tempfile.mkdtemp())
    done = 0
    while done < count:
        out = place / f"{done}.jsonl"
        stop = min(count, done + chunk)
        ended = subprocess.run(
            [sys.executable, __file__, "--work", what, str(done), str(stop), str(out)],
            check=False,
        )
        lines = (
            [json.loads(line) for line in out.read_text().splitlines()] if out.is_file() else []
        )
        yield from lines
        done += len(lines)
        if ended.returncode != 0:
            yield [done, "?", f"BAD: the process ended with {ended.returncode}", 0.0, 0.0, 0.0]
            done += 1
    shutil.rmtree(place)


def fuzz(what: str, count: int) -> dict[str, Any]:
    began = time.perf_counter()
    rows = list(run_cases(what, count))
    return figures_of(rows) | {"seconds": round(time.perf_counter() - began, 1)}


def figures_of(rows: list[list[Any]]) -> dict[str, Any]:
    bad = [row for row in rows if row[2].startswith("BAD")]
    slow = [row for row in rows if row[4] > MOST_SECONDS]
    kinds = {
        kind: dict(Counter(r[2] for r in rows if r[1] == kind))
        for kind in sorted({r[1] for r in rows})
    }
    return {
        "cases": len(rows),
        "failures": len(bad),
        "over_2_seconds": len(slow),
        "over_2_seconds_wall": sum(row[5] > MOST_SECONDS for row in rows),
        "slowest_cpu_seconds": max(r[4] for r in rows),
        "slowest_wall_seconds": max(r[5] for r in rows),
        "most_mib_above_imports": max(r[3] for r in rows),
        "outcomes": dict(Counter(r[2] for r in rows if r not in bad)),
        "by_kind": kinds,
        "examples_of_failures": [*bad[:10], *slow[:10]],
    }


def passed(figures: dict[str, Any]) -> bool:
    return (
        not figures["failures"]
        and not figures["over_2_seconds"]
        and figures["most_mib_above_imports"] <= MOST_MIB
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--artifacts", type=int, default=20_000)
    parser.add_argument("--images", type=int, default=5_000)
    parser.add_argument(
        "--work", nargs=4, metavar=("WHAT", "START", "STOP", "OUT"), help=argparse.SUPPRESS
    )
    given = parser.parse_args()
    if given.work:
        work(given.work[0], int(given.work[1]), int(given.work[2]), Path(given.work[3]))
        return 0
    figures = {
        "artifacts": fuzz("artifacts", given.artifacts),
        "images": fuzz("images", given.images),
    }
    measuring.save("fuzz", figures)
    return 0 if all(map(passed, figures.values())) else 1


if __name__ == "__main__":
    sys.exit(main())
