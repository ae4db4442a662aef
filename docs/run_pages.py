"""Run the code on the pages of the site: every ```python and ```sh block, top to bottom, as a reader would.

    .venv/bin/python docs/run_pages.py docs/tutorial.md --work FOLDER --write

runs one page in FOLDER and writes what it prints into its output blocks (```text title="Output"). A block whose title
starts with "Needs" (`title="Needs Office-31"`) is not run: it needs data or time that is not here. Its commands must
still be valid. Tests run every page with small data and one epoch.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
FENCE = re.compile(r"^( *)```(\w*)([^\n]*)\n(.*?)^\1```$", flags=re.M | re.S)
PROGRESS = re.compile(
    r"^(features|model|source model|model and witness|witness|judge|training|adapting|decoding|fitting|predicting|"
    r"evaluating): .*\n",
    flags=re.M,
)


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    language: str
    title: str
    text: str
    start: int
    end: int

    @property
    def needs(self) -> bool:
        """Whether it needs what is not here."""
        return self.title.startswith("Needs")

    def commands(self) -> list[list[str]]:
        """The words of each command of a shell block; lines that end in a backslash go on."""
        lines = self.text.replace("\\\n", " ").splitlines()
        return [words for line in lines if (words := shlex.split(line, comments=True))]


def blocks(text: str) -> list[Block]:
    result = []
    for match in FENCE.finditer(text):
        indent, language, attributes, body = match.groups()
        title = re.search(r'title="([^"]*)"', attributes)
        body = re.sub(rf"^{indent}", "", body, flags=re.M)
        result.append(
            Block(language, title[1] if title else "", body, match.start(4), match.end(4))
        )
    return result


def quick(text: str, backbone: str | None = None) -> str:
    """The same code with one epoch and, if one is named, another network."""
    text = re.sub(r"\b(epochs[= ])\d+", r"\g<1>1", text)
    return text if backbone is None else text.replace("tf_efficientnet_lite0", backbone)


class Page:
    """Runs the blocks of one page in the current folder. All Python blocks share their names."""

    def __init__(self, path: Path, *, small: bool, backbone: str | None = None) -> None:
        self.path = path
        self.small = small
        self.backbone = backbone
        self.names: dict[str, object] = {"__name__": "__main__"}

    def run(self, block: Block) -> str:
        """What the block prints."""
        told = io.StringIO()
        if block.language == "python":
            text = quick(block.text, self.backbone) if self.small else block.text
            line = self.path.read_text(encoding="utf-8")[: block.start].count("\n")
            code = compile("\n" * line + text, str(self.path), "exec")
            with contextlib.redirect_stdout(told):
                exec(code, self.names)
        else:
            for words in block.commands():
                told.write(self.command(words))
        return told.getvalue()

    def command(self, words: list[str]) -> str:
        if words[0] == "make":
            return dry_make(words[1:])
        if words[0] == "python":
            with contextlib.redirect_stdout(io.StringIO()) as told:
                run_script(
                    [
                        *words[1:],
                        *(
                            ["--images", "4"]
                            if self.small and "make_photos" in words[1]
                            else []
                        ),
                    ]
                )
            return told.getvalue()
        if words[0] != "usfan":
            raise ValueError(f"{self.path}: cannot run {shlex.join(words)}")
        if words[1] in ("train", "adapt") and "--resume" not in words:
            shutil.rmtree(words[words.index("--out") + 1], ignore_errors=True)
        if self.small:
            return run_here(small_command(words[1:], self.backbone))
        done = subprocess.run(
            [sys.executable, "-m", *words], capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise RuntimeError(
                f"{shlex.join(words)}: exit code {done.returncode}\n{done.stderr}"
            )
        return done.stdout + PROGRESS.sub("", done.stderr)


def dry_make(targets: list[str]) -> str:
    """Installing, testing and the demo take minutes: their targets must exist."""
    done = subprocess.run(
        ["make", "-n", "-C", str(HERE.parent), *targets],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(done.stderr)
    return ""


def run_script(words: list[str]) -> None:
    before = sys.argv
    sys.argv = words
    try:
        runpy.run_path(words[0], run_name="__main__")
    finally:
        sys.argv = before


def small_command(words: list[str], backbone: str | None = None) -> list[str]:
    """One epoch, no decoding processes."""
    words = shlex.split(quick(shlex.join(words), backbone))
    if words[0] in ("train", "adapt") and "--resume" not in words:
        words += [] if "--epochs" in words else ["--epochs", "1"]
        words += ["--batch-size", "8"] if "--batch-size" not in words else []
    if words[0] in ("train", "adapt", "evaluate", "predict", "posterior"):
        words += ["--device", "cpu", "--workers", "0"]
    return words


def run_here(words: list[str]) -> str:
    """`usfan WORDS` in this process."""
    from usfan.cli.main import main

    with (
        contextlib.redirect_stdout(io.StringIO()) as told,
        contextlib.redirect_stderr(io.StringIO()) as said,
    ):
        try:
            code = main(words)
        except SystemExit as stopped:
            code = int(stopped.code or 0)
    if code:
        raise RuntimeError(f"usfan {shlex.join(words)}: exit code {code}\n{said.getvalue()}")
    return told.getvalue()


def write_outputs(path: Path) -> None:
    """Run the page here, and put what it prints into its output blocks."""
    text = path.read_text(encoding="utf-8")
    page = Page(path, small=False)
    printed = ""
    pieces = []
    place = 0
    for block in blocks(text):
        if block.language in ("python", "sh") and not block.needs:
            print(f"{path.name}: line {text[: block.start].count(chr(10))}", file=sys.stderr)
            printed = page.run(block).replace(f"{Path.cwd()}/", "")
        elif block.title == "Output":
            pieces += [
                text[place : block.start],
                "\n".join(line.rstrip() for line in printed.splitlines()).strip("\n"),
            ]
            pieces += ["\n"]
            place = block.end
    path.write_text("".join(pieces) + text[place:], encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pages", type=Path, nargs="+")
    parser.add_argument("--work", type=Path, required=True, help="folder to run in")
    parser.add_argument(
        "--write", action="store_true", help="write what is printed into the page"
    )
    options = parser.parse_args()
    paths = [page.resolve() for page in options.pages]
    options.work.mkdir(parents=True, exist_ok=True)
    if not (options.work / "docs").exists():
        (options.work / "docs").symlink_to(HERE)
    os.chdir(options.work)
    os.environ["COLUMNS"] = "100"
    for path in paths:
        if options.write:
            write_outputs(path)
        else:
            page = Page(path, small=False)
            for block in blocks(path.read_text(encoding="utf-8")):
                if block.language in ("python", "sh") and not block.needs:
                    print(page.run(block))


if __name__ == "__main__":
    main()
