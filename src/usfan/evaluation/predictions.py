"""Predictions as a CSV table; with a coverage, the least certain share of them abstains."""

from __future__ import annotations

import contextlib
import csv
import itertools
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from usfan.compute.runtime import Runtime, start_runtime
from usfan.compute.share import gather_json, one_fails_all_fail, own_share
from usfan.config_checks import is_number
from usfan.data.stream import NothingReadable
from usfan.errors import ConfigError, shown
from usfan.files import whole_file

COLUMNS = ("path", "label", "confidence", "entropy", "weight", "unknown")
BATCH = 64
FORMULA = ("=", "+", "-", "@")
"""What a spreadsheet takes for the beginning of a formula."""


def write_predictions(
    out: Path,
    model: Any,
    data: Any,
    coverage: float | None = None,
    runtime: Runtime | None = None,
    progress: Any = None,
) -> int:
    """One row per readable image, written batch by batch; how many. Several processes each write their share first."""
    engine = runtime or start_runtime()
    with contextlib.ExitStack() as stack:
        with one_fails_all_fail(engine):
            table = stack.enter_context(
                whole_file(out, follow=True) if engine.rank == 0 else own_part(part_of(out, engine.rank))
            )
            count = write_rows(table, model, data, engine, progress)
        for path, reason in itertools.chain(*gather_json(list(data.unreadable.items()), engine)):
            data.unreadable[path] = reason
        count = sum(gather_json(count, engine))
        if count == 0:
            raise NothingReadable(f"none of the {len(data)} images of {data.name} can be read")
        if engine.rank == 0:
            for rank in range(1, engine.world):
                append_rows(table, part_of(out, rank))
            if coverage is not None:
                abstain(table, coverage)
    return count


def write_rows(table: Path, model: Any, data: Any, runtime: Runtime, progress: Any) -> int:
    """The rows of this process's share, without the names of the columns but for the first process."""
    options = {"indices": own_share(len(data), BATCH, runtime), "workers": runtime.workers, "progress": progress}
    count = 0
    with open(table, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        if runtime.rank == 0:
            writer.writerow(COLUMNS)
        try:
            for index, outputs in model.predict_batches(data, BATCH, **options):
                writer.writerows(prediction_rows(data, index, model.to_prediction(outputs)))
                count += len(index)
        except NothingReadable:
            if runtime.world == 1:  # else another process may have some
                raise
    return count


def part_of(out: Path, rank: int) -> Path:
    """Where a process that is not the first writes its rows."""
    return out.with_name(f".{out.name}.{rank}.part")


def append_rows(table: Path, part: Path) -> None:
    if not part.is_file():
        raise ConfigError(f"{part}: not there; the folder of --out must be one that all nodes can write and read")
    with open(table, "ab") as whole, open(part, "rb") as rows:
        shutil.copyfileobj(rows, whole)
    part.unlink()


@contextlib.contextmanager
def own_part(path: Path) -> Iterator[Path]:
    """A file that the first process takes away; it goes when something fails."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)  # of a run that was killed, or a link that someone laid there
    try:
        yield path
    except BaseException:
        path.unlink(missing_ok=True)
        raise


def prediction_rows(data: Any, index: Any, prediction: Any) -> list[list[Any]]:
    confidence = prediction.probs.max(dim=1).values.tolist()
    figures = zip(confidence, prediction.entropy.tolist(), prediction.weight.tolist(), strict=True)
    rows = zip(index.tolist(), prediction.names, figures, prediction.unknown.tolist(), strict=True)
    return [
        [cell(data.where(i)), cell(name), *(f"{x:.6f}" for x in numbers), int(unknown)]
        for i, name, numbers, unknown in rows
    ]


def cell(text: str) -> str:
    """A stranger's text in a table: no formula for a spreadsheet (an apostrophe goes before it), no control character,
    and \\xNN for bytes of a file name that are not UTF-8."""
    plain = shown(text, 10_000)
    if plain.lstrip()[:1] in FORMULA and not is_number(plain):
        return f"'{plain}"
    return plain


def abstain(table: Path, coverage: float) -> None:
    """Empty the label of the rows of least weight, so that a share `coverage` keeps its label; adds `abstained`."""
    with open(table, newline="", encoding="utf-8") as file:
        weights = [float(row["weight"]) for row in csv.DictReader(file)]
    order = sorted(range(len(weights)), key=lambda i: (weights[i], i))
    left_out = set(order[: len(weights) - round(coverage * len(weights))])
    with (
        whole_file(table) as after,
        open(table, newline="", encoding="utf-8") as old,
        open(after, "w", newline="", encoding="utf-8") as new,
    ):
        rows, writer = csv.reader(old), csv.writer(new)
        writer.writerow([*next(rows), "abstained"])
        for i, row in enumerate(rows):
            out = i in left_out
            writer.writerow([row[0], "" if out else row[1], *row[2:], int(out)])
