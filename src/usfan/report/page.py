"""`usfan report`: one HTML file with everything inside, which opens without a network."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

import jinja2
from markupsafe import Markup, escape

from usfan.errors import ConfigError, option
from usfan.files import write_text
from usfan.progress import bar
from usfan.report.blocks import Section
from usfan.report.collection import expand
from usfan.report.formatting import number
from usfan.report.inline_svg import report_style
from usfan.report.run import Run, read_runs
from usfan.report.sections import RunPart, run_part
from usfan.report.tables import comparison_table

MOST_POINTS = 12_000
MOST_THUMBNAILS = 36
"""Points on a map, and images in a gallery, of all runs together. One run gets a third. The page stays below 5 MB."""


def write_report(
    runs: list[Path],
    out: Path | None = None,
    *,
    root: Path | None = None,
) -> Path:
    """Write the report of these run folders to `out`, or to report.html in the first; returns the file.

    The page shows images of runs made here; of other runs, with `root`, the images that lie below it.
    """
    page = Path(runs[0]) / "report.html" if out is None else out
    if page.is_dir():
        raise ConfigError(f"{page} is a folder: {option('out')} names the HTML file to write")
    paths, sections = expand([Path(run) for run in runs])
    title = Path(runs[0]).resolve().name if sections and len(runs) == 1 else ""
    records = read_runs(paths, root) if paths or not sections else []
    return write_page(records, page, sections, title, follow=out is not None)


def write_page(
    runs: list[Run],
    out: Path,
    sections: Sequence[Section] = (),
    title: str = "",
    *,
    follow: bool = False,
) -> Path:
    """Write the page of these runs. `sections` are about the folders that hold them.

    `follow`: the user named `out`, so a link there is followed.
    """
    share = max(3, len(runs))
    parts = []
    with report_style(), bar("report", len(runs), unit="runs") as progress:
        for i, run in enumerate(runs, 1):
            parts.append(run_part(f"r{i}", run, MOST_POINTS // share, MOST_THUMBNAILS // share))
            progress.advance()
    shared = list(sections)
    if len(runs) > 1:
        shared.append(Section("compare", "Side by side", [comparison_table(runs)]))
    if not title:
        title = runs[0].name if len(runs) == 1 else f"{len(runs)} runs"
    html = render(title, parts, shared)
    text = html.encode("utf-8", "replace").decode()  # file names may hold what UTF-8 cannot
    write_text(out, text, follow=follow)
    return out


def render(
    title: str,
    parts: list[RunPart],
    shared: list[Section],
) -> str:
    from usfan import __version__

    folder = files("usfan.report")
    style = (folder / "style.css").read_text(encoding="utf-8")
    script = (folder / "script.js").read_text(encoding="utf-8")
    digest = hashlib.sha256(script.encode()).digest()
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    environment.filters |= {"breakable": breakable, "number": number}
    template = environment.from_string((folder / "template.html").read_text(encoding="utf-8"))
    return template.render(
        title=title,
        parts=parts,
        shared=shared,
        style=Markup(style),
        script=Markup(script),
        script_hash=f"sha256-{base64.b64encode(digest).decode()}",
        version=__version__,
    )


def breakable(text: str) -> Markup:
    """A name that may be broken after an underscore or a slash, and so need not be broken within a word."""
    return Markup(str(escape(text)).replace("_", "_<wbr>").replace("/", "/<wbr>"))
