"""Files that are whole or absent: written beside, brought to the disk, then renamed."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from usfan.errors import ConfigError

if TYPE_CHECKING:  # settings are read before anything heavy is imported
    from torch import Tensor


def must_be_writable(folder: Path, flag: str = "--out") -> None:
    """Before the work: a folder that a user named is there to be written to, or can be made. Nothing is made here."""
    folder = folder.absolute()
    there = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
    if not there.is_dir():
        raise ConfigError(f"{flag}: {there} is not a folder, so nothing can be written below it")
    if not os.access(there, os.W_OK | os.X_OK):
        raise ConfigError(f"{flag}: no permission to write to {there}")


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Write to the yielded path; it becomes `path` in one step, on disk, or not at all."""
    path = Path(os.path.realpath(path)) if path.is_symlink() else path  # what a link names is written, the link stays
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".part", dir=path.parent)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    os.close(handle)
    part = Path(name)
    try:
        yield part
        with open(part, "rb") as file:
            os.fsync(file.fileno())
        part.chmod(0o644)
        os.replace(part, path)
        with contextlib.suppress(OSError):
            folder = os.open(path.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
    except OSError as error:
        if error.filename not in (None, name):
            raise
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error
    finally:
        part.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    with whole_file(path) as part:
        part.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any) -> None:
    write_text(path, json.dumps(value, indent=2, allow_nan=True, default=str) + "\n")


def write_tensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    ready = {name: t.detach().cpu().contiguous().clone() for name, t in tensors.items()}
    with whole_file(path) as part:
        try:
            save_file(ready, part, metadata)
        except SafetensorError as error:  # it hides the system's number in its text
            found = re.search(r"os error (\d+)", str(error))
            number = int(found[1]) if found else errno.EIO
            raise OSError(number, os.strerror(number), str(path)) from error


def read_yaml(path: Path) -> Any:
    """A YAML file, which may be a stranger's. ValueError for what cannot be read, and for aliases, by which a few lines
    name millions of values."""
    import yaml

    class Loader(yaml.SafeLoader):
        def compose_node(self, parent: Any, index: Any) -> Any:
            if self.check_event(yaml.AliasEvent):
                raise yaml.YAMLError("aliases (*name) are not allowed")
            return super().compose_node(parent, index)

    try:
        return Loader(path.read_text(encoding="utf-8")).get_single_data()
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(" ".join(str(error).split())) from None
