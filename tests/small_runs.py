"""Small data sets of coloured squares, and the command line called in this process."""

import multiprocessing
import multiprocessing.context
import multiprocessing.process
from collections.abc import Callable
from pathlib import Path

from PIL import Image

from lookalikes import picture
from usfan.cli.main import main

TINY = ("--device", "cpu", "--workers", "0")
"""Flags of every run here: no decoding processes, which take longer to start than the run itself."""
LONGEST = 200
"""Seconds that processes which wait for each other may take, on a machine with much else to do."""


def class_folder(
    root: Path, *, classes: int = 3, images: int = 8, domain: int = 0, first: int = 0
) -> Path:
    """class-0/000.png …; the domain changes the brightness. Class k looks the same whatever `first` is."""
    for label in range(first, first + classes):
        folder = root / f"class-{label}"
        folder.mkdir(parents=True)
        for number in range(images):
            Image.fromarray(picture(label, domain, number)).save(folder / f"{number:03}.png")
    return root


def usfan(*arguments: object) -> int:
    """The exit code of `usfan ARGUMENTS`."""
    try:
        return main([str(a) for a in arguments])
    except SystemExit as stopped:
        return int(stopped.code or 0)


def train_tiny(data: Path, out: Path, *more: object) -> Path:
    code = usfan(
        "train",
        data,
        "--out",
        out,
        "--backbone",
        "digits-cnn",
        "--epochs",
        2,
        "--batch-size",
        8,
        *TINY,
        *more,
    )
    assert code == 0
    return out


def adapt_tiny(source: Path, data: Path, out: Path, *more: object) -> Path:
    code = usfan(
        "adapt", source, data, "--out", out, "--epochs", 2, "--batch-size", 8, *TINY, *more
    )
    assert code == 0
    return out


def child_main(arguments: list[str], threads: int = 1) -> None:
    """What a process started by `in_child` does."""
    import torch

    torch.set_num_threads(threads)
    raise SystemExit(main(arguments))


def forkserver() -> multiprocessing.context.ForkServerContext:
    """Starts processes from one that has everything imported."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        [
            "usfan.cli.commands",
            "usfan.api",
            "sklearn.cluster",
            "torch.utils.tensorboard",
            "torch._dynamo",
            "usfan.report.page",
        ]
    )
    return context


def in_child(*arguments: object) -> multiprocessing.process.BaseProcess:
    """`usfan ARGUMENTS` in a process of its own, forked from one that has everything imported: it starts at once."""
    process = forkserver().Process(target=child_main, args=([str(a) for a in arguments],))
    process.start()
    return process


def together(target: Callable[..., object], calls: list[tuple]) -> None:
    """`target(*call)` for every call at the same time, each in a process that has everything imported; all end well."""
    running = [forkserver().Process(target=target, args=call) for call in calls]
    for process in running:
        process.start()
    for process in running:
        process.join(LONGEST)
        process.kill()
        process.join()
    assert [process.exitcode for process in running] == [0] * len(running)
