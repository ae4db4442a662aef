"""Predictions, a row for every image, as a CSV table or JSON lines; with a coverage, the least certain abstain."""

from __future__ import annotations

import csv
import json
import math
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TextIO

from usfan.config_checks import is_number
from usfan.data.row_cache import digest
from usfan.data.sources import ImageData
from usfan.engine.inference import engines
from usfan.engine.runtime import Runtime
from usfan.errors import DataError, printable
from usfan.files import whole_file
from usfan.maths.outputs import Outputs
from usfan.metrics.partial_table import BATCH, Record, partial_table
from usfan.models.backbones import weights_hash
from usfan.store.model import SourceModel

COLUMNS = ("path", "label", "confidence", "entropy", "weight", "unknown", "error")
FORMULA = ("=", "+", "-", "@")
"""Characters that begin a formula in a spreadsheet."""


def prediction_records(
    model: SourceModel,
    data: ImageData,
    *,
    runtime: Runtime | None = None,
    total: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> Iterator[Record]:
    """One record per image, in their order: the fields of `COLUMNS`. `total` is the number of images in all if these
    are only some of them; then it is no error if none of these can be read.

    An image of no known class has no label. An image that cannot be read has the reason in `error` and None in all
    fields between.
    """
    position = 0
    try:
        for index, outputs in model.predict_batches(
            data, BATCH, runtime=runtime, total=total, progress=progress
        ):
            names = [data.where(i) for i in index.tolist()]
            records = batch_records(model, outputs, names)
            for i, record in zip(index.tolist(), records, strict=True):
                yield from (unreadable_record(data, j) for j in range(position, i))
                yield record
                position = i + 1
    except DataError:
        if data.strict or total is None or position:
            raise
    yield from (unreadable_record(data, j) for j in range(position, len(data)))


def batch_records(
    model: SourceModel, outputs: Outputs, paths: Iterable[str]
) -> Iterator[Record]:
    """The records of a batch of images that could be read."""
    prediction = model.to_prediction(outputs)
    columns = (
        prediction.names,
        prediction.probs.amax(dim=1).tolist(),
        prediction.entropy.tolist(),
        prediction.weight.tolist(),
        prediction.unknown.tolist(),
    )
    for path, *values in zip(paths, *columns, strict=True):
        record = dict(zip(COLUMNS, (path, *values, None), strict=True))
        if record["unknown"]:
            record["label"] = None
        yield record


def unreadable_record(data: ImageData, position: int) -> Record:
    path = data.where(position)
    error = data.unreadable.get(path, "cannot be read")
    return dict.fromkeys(COLUMNS) | {"path": path, "error": error}


def write_predictions(
    out: Path,
    model: SourceModel,
    data: ImageData,
    coverage: float | None = None,
    runtime: Runtime | None = None,
    progress: Callable[[int], None] | None = None,
    *,
    json_lines: bool = False,
    resume: bool = False,
    records_of: Callable[..., Iterable[Record]] = prediction_records,
) -> int:
    """One row per image; an unreadable one has an `error` in place of figures. Gives the number of predictions.

    Records wait in OUT.part until all are there. `resume` goes on after those that an interrupted run left there.
    `json_lines` writes one JSON object per line in place of CSV. `records_of` gives the records.
    """

    def fits(position: int, record: object) -> bool:
        return position < len(data) and is_record_of(data.where(position), record)

    with partial_table(out, job_of(model, data, runtime), fits, resume=resume) as part:
        rest = data
        if part.count:
            rest = data.subset(range(part.count, len(data)))
            if progress is not None:
                progress(part.count)
        if len(rest):
            for record in records_of(
                model,
                rest,
                runtime=runtime,
                total=len(data) if part.count else None,
                progress=progress,
            ):
                part.append(record)
        data.unreadable.update(rest.unreadable)
        with whole_file(out, follow=True) as table, open_table(table) as file:
            return write_records(part.records(), file, coverage, json_lines=json_lines)


def is_record_of(path: str, value: object) -> bool:
    """Whether a value that was read from a file is a record of this image."""
    if not isinstance(value, dict) or value.keys() != set(COLUMNS) or value["path"] != path:
        return False
    label, *figures, unknown = (value[name] for name in COLUMNS[1:-1])
    if value["error"] is not None:
        is_empty = all(field is None for field in (label, *figures, unknown))
        return is_empty and isinstance(value["error"], str)
    is_label = isinstance(label, str) if unknown is False else label is None and unknown is True
    return is_label and all(isinstance(x, float) and math.isfinite(x) for x in figures)


def job_of(model: SourceModel, data: ImageData, runtime: Runtime | None) -> str:
    """Names the model, the images and the engine."""
    names = [data.where(0), data.where(len(data) - 1)]
    tried = [] if runtime is None else engines(model.spec, runtime, len(data))
    network = weights_hash(model.classifier)
    return digest([repr(model), network, data.fingerprint(), names, tried])


def write_records(
    records: Iterable[Record],
    file: TextIO,
    coverage: float | None = None,
    *,
    json_lines: bool = False,
) -> int:
    """The rows of a table, each as soon as its record is there. Gives the number of predictions."""
    columns: tuple[str, ...] = COLUMNS
    if coverage is not None:
        records = with_abstentions(records, coverage)
        columns = (*COLUMNS, "abstained")
    count = 0
    writer = csv.writer(file)
    if not json_lines:
        writer.writerow(columns)
    for record in records:
        count += record["error"] is None
        if json_lines:
            file.write(as_json(record) + "\n")
        else:
            writer.writerow(cell(record[name]) for name in columns)
        if file is sys.stdout:
            file.flush()
    return count


def with_abstentions(records: Iterable[Record], coverage: float) -> Iterator[Record]:
    """The same records with `abstained`. Those of least weight lose their label, so that a share `coverage` keeps it.

    All weights must be known before the first record goes on: meanwhile the records wait in a temporary file.
    Records with an error have no weight, and count neither way.
    """
    weights = []
    with tempfile.TemporaryFile("w+") as file:
        for record in records:
            weights.append(record["weight"])
            file.write(json.dumps(record) + "\n")
        order = [i for i, weight in enumerate(weights) if weight is not None]
        order.sort(key=weights.__getitem__)
        abstaining = set(order[: len(order) - round(coverage * len(order))])
        file.seek(0)
        for i, line in enumerate(file):
            record = json.loads(line)
            record["abstained"] = i in abstaining
            if i in abstaining:
                record["label"] = None
            yield record


def open_table(path: Path) -> TextIO:
    return open(path, "w", newline="", encoding="utf-8")


def as_json(record: Record) -> str:
    """One line. An unreadable image has no figures, and only it has an `error`."""
    empty = COLUMNS if record["error"] is not None else ("error",)
    return json_line({k: v for k, v in record.items() if v is not None or k not in empty})


def json_line(value: Any) -> str:
    """JSON in which letters of all scripts stay, and what a terminal would act on is written as \\uNNNN."""
    text = json.dumps(value, ensure_ascii=False)
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else json.dumps(c)[1:-1] for c in text)


def cell(value: str | float | None, digits: int = 6) -> str:
    """A value in a table. A stranger's text holds no formula for a spreadsheet (an apostrophe goes before it), no
    control character, and \\xNN for bytes of a file name that are not UTF-8."""
    if value is None:
        return ""
    if isinstance(value, int):
        return str(int(value))
    if isinstance(value, float):
        return f"{value:.{digits}f}"
    text = printable(value, 10_000)
    if text.lstrip()[:1] in FORMULA and not is_number(text):
        return f"'{text}"
    return text
