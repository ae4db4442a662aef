"""Predictions, a row for every image, as a CSV table or JSON lines; with a coverage, the least certain abstain."""

from __future__ import annotations

import contextlib
import csv
import itertools
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from usfan.compute.runtime import Runtime, start_runtime
from usfan.compute.share import gather_json, one_fails_all_fail, own_share
from usfan.config_checks import is_number
from usfan.data.decoding.decode import one_line
from usfan.data.stream import NothingReadable
from usfan.errors import ConfigError, shown
from usfan.files import whole_file

COLUMNS = ("path", "label", "confidence", "entropy", "weight", "unknown", "error")
BATCH = 64
FORMULA = ("=", "+", "-", "@")
"""What a spreadsheet takes for the beginning of a formula."""


def prediction_records(
    model: Any, data: Any, *, runtime: Runtime | None = None, progress: Any = None
) -> Iterator[dict[str, Any]]:
    """One record per image of this process's share, in their order: the fields of `COLUMNS`, or a path and an error.

    An image that cannot be read has the reason in `error` and None in all fields between.
    """
    engine = runtime or start_runtime()
    share = own_share(len(data), BATCH, engine)
    waiting = iter(share)
    options = {"indices": share, "workers": engine.workers, "progress": progress}
    with contextlib.suppress(NothingReadable):
        for index, outputs in model.predict_batches(data, BATCH, **options):
            for i, found in zip(index.tolist(), found_records(data, index, model.to_prediction(outputs)), strict=True):
                for lost in itertools.takewhile(lambda position, i=i: position != i, waiting):  # type: ignore[misc]
                    yield lost_record(data, lost)
                yield found
    for lost in waiting:
        yield lost_record(data, lost)


def found_records(data: Any, index: Any, prediction: Any) -> list[dict[str, Any]]:
    confidence = prediction.probs.max(dim=1).values.tolist()
    figures = zip(confidence, prediction.entropy.tolist(), prediction.weight.tolist(), strict=True)
    rows = zip(index.tolist(), prediction.names, figures, prediction.unknown.tolist(), strict=True)
    return [
        dict(zip(COLUMNS, (data.where(i), name, *numbers, unknown, None), strict=True))
        for i, name, numbers, unknown in rows
    ]


def lost_record(data: Any, position: int) -> dict[str, Any]:
    where = data.where(position)
    return dict.fromkeys(COLUMNS) | {"path": where, "error": data.unreadable.get(where, "cannot be read")}


def write_predictions(
    out: Path,
    model: Any,
    data: Any,
    coverage: float | None = None,
    runtime: Runtime | None = None,
    progress: Any = None,
    *,
    json_lines: bool = False,
) -> int:
    """One row per image, written batch by batch; an unreadable one has an `error` in place of figures.

    Gives the number of predictions. Several processes each write their share first. `json_lines` writes one JSON
    object per line in place of CSV.
    """
    engine = runtime or start_runtime()
    with contextlib.ExitStack() as stack:
        with one_fails_all_fail(engine):
            table = stack.enter_context(
                whole_file(out, follow=True) if engine.rank == 0 else own_part(part_of(out, engine.rank))
            )
            count = write_rows(table, model, data, engine, progress, json_lines)
        for path, reason in itertools.chain(*gather_json(list(data.unreadable.items()), engine)):
            data.unreadable[path] = reason
        count = sum(gather_json(count, engine))
        if count == 0:
            path, reason = next(iter(data.unreadable.items()), ("", "no images"))
            raise NothingReadable(
                f"none of the {len(data)} images of {data.name} can be read: {one_line(path)} ({reason})"
            )
        if engine.rank == 0:
            for rank in range(1, engine.world):
                append_rows(table, part_of(out, rank))
            if coverage is not None:
                abstain(table, coverage, json_lines)
    return count


def write_rows(table: Path, model: Any, data: Any, runtime: Runtime, progress: Any, json_lines: bool) -> int:
    """The rows of this process's share, without the names of the columns but for the first process."""
    count = 0
    with open_table(table, "w") as file:
        writer = csv.writer(file)
        if runtime.rank == 0 and not json_lines:
            writer.writerow(COLUMNS)
        for record in prediction_records(model, data, runtime=runtime, progress=progress):
            count += record["error"] is None
            if json_lines:
                file.write(as_json(record) + "\n")
            else:
                writer.writerow(as_cells(record))
    return count


def open_table(path: Path, mode: str) -> Any:
    return open(path, mode, newline="", encoding="utf-8")


def as_json(record: dict[str, Any]) -> str:
    """One line. `error` stands in it only if there is one."""
    return json_line({k: v for k, v in record.items() if v is not None})


def json_line(value: Any) -> str:
    """JSON in which letters of all scripts stay, and what a terminal would act on is written as \\uNNNN."""
    text = json.dumps(value, ensure_ascii=False)
    return text if text.isprintable() else "".join(c if c.isprintable() else json.dumps(c)[1:-1] for c in text)


def as_cells(record: dict[str, Any]) -> list[Any]:
    if record["error"] is not None:
        return [cell(record["path"]), *[""] * (len(COLUMNS) - 2), cell(record["error"])]
    figures = (f"{record[name]:.6f}" for name in ("confidence", "entropy", "weight"))
    return [cell(record["path"]), cell(record["label"]), *figures, int(record["unknown"]), ""]


def cell(text: str) -> str:
    """A stranger's text in a table: no formula for a spreadsheet (an apostrophe goes before it), no control character,
    and \\xNN for bytes of a file name that are not UTF-8."""
    plain = shown(text, 10_000)
    if plain.lstrip()[:1] in FORMULA and not is_number(plain):
        return f"'{plain}"
    return plain


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
    """A file that the first process removes, also if something fails."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)  # of a run that was killed, or a link that someone laid there
    try:
        yield path
    except BaseException:
        path.unlink(missing_ok=True)
        raise


def abstain(table: Path, coverage: float, json_lines: bool = False) -> None:
    """Empty the label of the rows of least weight, so that a share `coverage` keeps its label; adds `abstained`.

    Rows with an error have no weight: they count neither way.
    """
    with open_table(table, "r") as file:
        weights = [row.get("weight") for row in read_rows(file, json_lines)]
    known = [i for i, weight in enumerate(weights) if weight not in ("", None)]
    order = sorted(known, key=lambda i: (float(weights[i]), i))  # type: ignore[arg-type]
    left_out = set(order[: len(known) - round(coverage * len(known))])
    with whole_file(table) as after, open_table(table, "r") as old, open_table(after, "w") as new:
        writer = csv.DictWriter(new, [*COLUMNS, "abstained"])
        if not json_lines:
            writer.writeheader()
        for i, row in enumerate(read_rows(old, json_lines)):
            out = i in left_out
            row |= ({"label": None if json_lines else ""} if out else {}) | {
                "abstained": out if json_lines else int(out)
            }
            if json_lines:
                new.write(json_line(row) + "\n")
            else:
                writer.writerow(row)


def read_rows(file: Any, json_lines: bool) -> Iterator[dict[str, Any]]:
    return map(json.loads, file) if json_lines else csv.DictReader(file)
