"""Small models, and their folders, for the tests of what is saved and loaded."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tiny_models import tiny_model
from usfan.errors import ArtifactError
from usfan.store.model import SourceModel


@pytest.fixture(scope="session")
def model() -> SourceModel:
    return tiny_model()


@pytest.fixture
def folder(model: SourceModel, tmp_path: Path) -> Path:
    return model.save(tmp_path / "model")


@pytest.fixture
def edit_config(folder: Path) -> Callable[[str, Any], None]:
    """Sets a field of the saved config, `posterior.count` for one inside a table; `...` takes it out."""

    def edit(place: str, value: Any) -> None:
        config = json.loads((folder / "config.json").read_text())
        *tables, name = place.split(".")
        table = config
        for key in tables:
            table = table[key]
        if value is ...:
            del table[name]
        else:
            table[name] = value
        (folder / "config.json").write_text(json.dumps(config))

    return edit


@pytest.fixture
def edit_tensors(folder: Path) -> Callable[..., None]:
    """Rewrites a file of tensors after a change of their table."""

    def edit(file: str, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
        tensors = load_file(folder / f"{file}.safetensors")
        change(tensors)
        save_file(
            {name: t.contiguous() for name, t in tensors.items()},
            folder / f"{file}.safetensors",
        )

    return edit


@pytest.fixture
def refuse() -> Callable[..., None]:
    """Checks that a folder is refused in one short message that says all of this."""

    def check(folder: Path, *said: str) -> None:
        with pytest.raises(ArtifactError) as caught:
            SourceModel.load(folder)
        message = str(caught.value)
        assert all(part in message for part in said), message
        assert len(message) < 1000

    return check
