"""A pass over images that several processes share. Each takes whole batches that follow one another, so that what the
processes found, one after the other, is what one process finds: each image once, in order, in the same batches.

What passes between processes is sums of tensors and JSON; no pickle.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

import torch

from usfan.compute.runtime import Runtime
from usfan.errors import DataError, UsfanError


def own_share(count: int, batch_size: int, runtime: Runtime) -> range:
    """The positions that this process looks at."""
    batches = -(-count // batch_size)
    first, last = (batches * rank // runtime.world for rank in (runtime.rank, runtime.rank + 1))
    return range(first * batch_size, min(last * batch_size, count))


def gather_json(value: Any, runtime: Runtime) -> list[Any]:
    """What each process holds, in the order of the processes."""
    if runtime.world == 1:
        return [value]
    content = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    lengths = torch.zeros(runtime.world, dtype=torch.long, device=runtime.device)
    lengths[runtime.rank] = len(content)
    lengths = runtime.total(lengths)
    table = torch.zeros(runtime.world, int(lengths.max()), dtype=torch.uint8, device=runtime.device)
    table[runtime.rank, : len(content)] = content.to(runtime.device)
    rows = runtime.total(table).cpu().numpy()
    return [json.loads(row[:length].tobytes()) for row, length in zip(rows, lengths.tolist(), strict=True)]


@contextlib.contextmanager
def one_fails_all_fail(runtime: Runtime) -> Iterator[None]:
    """An error in one process ends all of them, so that none waits for a dead one."""
    trouble: Exception | None = None
    try:
        yield
    except (UsfanError, OSError) as error:
        if runtime.world == 1:
            raise
        trouble = error
    texts = gather_json(None if trouble is None else str(trouble), runtime)
    first = next((text for text in texts if text is not None), None)
    if first is not None:
        raise trouble if trouble is not None and first == str(trouble) else DataError(first)


@contextlib.contextmanager
def first_speaks(runtime: Runtime) -> Iterator[None]:
    """An error is the same in all processes, so only the first one reports it."""
    try:
        yield
    except (UsfanError, OSError):
        if runtime.rank == 0:
            raise
        raise SystemExit(0) from None
