"""A safetensors file from a stranger: its header is compared with what is expected before a tensor is read."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from usfan.errors import ArtifactError, printable
from usfan.files import Folder

MAX_HEADER_BYTES = 8 << 20
"""A network of 10,000 tensors has a header of about 1 MB."""
MAX_SPARSE_BYTES = 16 << 20
MOST_SPARSE = 64
"""A larger file must be stored to 1/64 at least: file systems that compress come to 1/32, holes to nothing."""

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


def read_tensors(path: Path) -> dict[str, Tensor]:
    with Folder(path.parent) as folder, open_tensors_in(folder, path.name) as tensors:
        return {name: tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118


@contextlib.contextmanager
def open_tensors_in(folder: Folder, name: str) -> Iterator[Any]:
    """The file as safetensors opens it, by its descriptor: no link, no hole, a header of bounded length."""
    from safetensors import SafetensorError, safe_open

    path = folder.path / name
    problem = f"{path}: not readable as safetensors"
    try:
        with folder.open(name) as file:
            length = int.from_bytes(file.read(8), "little")
            if length > MAX_HEADER_BYTES:
                raise ArtifactError(f"{problem}: its header would have {length} bytes")
            status = os.fstat(file.fileno())
            size = status.st_size
            stored = status.st_blocks * 512
            if size > MAX_SPARSE_BYTES and 0 < stored * MOST_SPARSE < size:
                raise ArtifactError(
                    f"{path}: {size} bytes of which {stored} are stored: a file of holes is not read"
                )
            by_descriptor = Path(f"/dev/fd/{file.fileno()}")
            with safe_open(by_descriptor if by_descriptor.exists() else path, "pt") as tensors:
                yield tensors
    except (SafetensorError, OSError) as error:
        raise ArtifactError(f"{problem}: {printable(error, 300)}") from None


def check_header(file: Path, tensors: Any, expected: Mapping[str, Tensor]) -> None:
    """Names, shapes and dtypes, from the header alone. `expected` may be on torch's meta device."""
    names = set(tensors.keys())
    for name, sketch in expected.items():
        if name not in names:
            raise ArtifactError(f"{file}: tensor {name!r} is missing")
        part = tensors.get_slice(name)
        stored = tuple(part.get_shape())
        if stored != sketch.shape:
            words = f"shape {stored}" if len(stored) <= 8 else f"{len(stored)} dimensions"
            raise ArtifactError(f"{file}: {name!r} has {words}, expected {tuple(sketch.shape)}")
        if DTYPES.get(part.get_dtype()) != sketch.dtype:
            raise ArtifactError(
                f"{file}: {name!r} has type {part.get_dtype()}, expected {sketch.dtype}"
            )
    extra = sorted(names - set(expected))
    if extra:
        raise ArtifactError(f"{file}: unexpected tensor {extra[0][:200]!r}")


def check_values(file: Path, state: dict[str, Tensor]) -> None:
    for name, tensor in state.items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise ArtifactError(f"{file}: {name!r} holds NaN or infinity")
        if name.endswith("running_var") and bool((tensor < 0).any()):
            raise ArtifactError(f"{file}: {name!r} holds a negative variance")
