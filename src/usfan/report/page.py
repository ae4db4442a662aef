"""`usfan report`: one HTML file with everything inside, which opens without a network."""

from __future__ import annotations

import base64
import hashlib
from importlib.resources import files
from pathlib import Path

import jinja2
from markupsafe import Markup, escape

from usfan.errors import ConfigError
from usfan.files import write_text
from usfan.progress import bar
from usfan.report.blocks import Section
from usfan.report.collection import expand
from usfan.report.compare import comparison
from usfan.report.read_run import Run, read_runs
from usfan.report.sections import Detail, RunPart, run_part

LIMIT = 5_000_000
"""Bytes of a page."""
DETAILS = (Detail(), Detail(points=1000, thumbnails=4), Detail(points=0, thumbnails=0))
"""Tried in turn until the page is below the limit: with many runs on one page, each gets less."""


def write_report(runs: list[Path], out: Path | None = None, *, root: Path | None = None) -> Path:
    """Write the report of these run folders to `out`, or to report.html in the first; returns it.

    Images are shown of runs made here; of others, with `root`, those that lie below it.
    """
    named, out = out is not None, Path(runs[0]) / "report.html" if out is None else out
    if out.is_dir():
        raise ConfigError(f"{out} is a folder: --out names the HTML file to write")
    paths, shared = expand([Path(run) for run in runs])
    title = Path(runs[0]).resolve().name if shared and len(runs) == 1 else None
    return write_page(read_runs(paths, root) if paths or not shared else [], out, shared, title, follow=named)


def write_page(
    found: list[Run], out: Path, shared: list[Section] | None = None, name: str | None = None, *, follow: bool = False
) -> Path:
    """The page of runs that were read. `shared` are sections about the folders that hold them, `name` is the title.

    `follow`: the user named `out`, so a link there is followed.
    """
    compared = comparison(found) if len(found) > 1 else None
    with bar("report", len(found), unit="runs") as shown:
        for detail in DETAILS:
            shown.set(0)
            parts = []
            for i, run in enumerate(found, 1):
                parts.append(run_part(f"r{i}", run, detail))
                shown.advance()
            html = render(found, parts, compared, shared or [], name)
            if len(html.encode("utf-8", "replace")) < LIMIT:
                break
    text = html.encode("utf-8", "replace").decode("utf-8")  # file names may hold what UTF-8 cannot
    write_text(out, text, follow=follow)
    return out


def render(
    runs: list[Run], parts: list[RunPart], compared: Section | None, shared: list[Section], name: str | None
) -> str:
    from usfan import __version__

    folder = files("usfan.report")
    style, script = ((folder / name).read_text(encoding="utf-8") for name in ("style.css", "script.js"))
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    environment.filters["breakable"] = breakable
    template = environment.from_string((folder / "template.html").read_text(encoding="utf-8"))
    title = name or (runs[0].name if len(runs) == 1 else f"{len(runs)} runs")
    return template.render(
        title=title,
        parts=parts,
        compared=compared,
        shared=shared,
        style=Markup(style),
        script=Markup(script),
        script_hash=f"sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}",
        version=__version__,
    )


def breakable(text: object) -> Markup:
    """A name that may be broken after an underscore or a slash, and so need not be broken within a word."""
    return Markup(str(escape(str(text))).replace("_", "_<wbr>").replace("/", "/<wbr>"))
