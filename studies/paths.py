"""The path of a run: accuracy and label-free validators after every epoch. Labels are used only to measure accuracy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch import Tensor

from usfan.store.model import AdaptedModel


def path_of(model: AdaptedModel, labels: Tensor) -> dict[str, list[float]]:
    assert model.passes is not None
    labels = labels.to(model.passes.path[0].device)
    path = {
        "accuracy": [
            round(100 * float((p == labels).double().mean()), 2) for p in model.passes.path
        ]
    }
    for name in model.history["records"][0]["validators"]:
        path[name] = [
            round(record["validators"][name], 4) for record in model.history["records"]
        ]
    return path


def write_rows(path: Path, command: str, rows: list[dict[str, Any]]) -> None:
    lines = ",\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    path.write_text(
        f'{{"command": {json.dumps(command)}, "rows": [\n{lines}\n]}}\n', encoding="utf-8"
    )
