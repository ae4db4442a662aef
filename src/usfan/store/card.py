"""The model card of a folder, in Markdown."""

from __future__ import annotations

from usfan.data.labels import some
from usfan.errors import printable
from usfan.store.schema import JsonTable

NAMED = 20
"""So many classes are named."""
TABLES = ("architecture", "input", "posterior", "uncertainty", "summary")
MEANING = {"\\": "&#92;", "|": "\\|", "<": "&lt;", "&": "&amp;", ":": "&#58;", "@": "&#64;"}
MEANING |= {c: f"&#{ord(c)};" for c in "`[]"}
"""Characters that make links, images, code or HTML, and their replacements."""


def model_card(config: JsonTable) -> str:
    """README.md of a folder, from its config."""
    architecture = config.get("architecture", {})
    needs_module = "module" in architecture and "timm" not in architecture
    lines = [
        f"# {escaped(title(config))}",
        "",
        f"Made by usfan. Load it with `usfan.SourceModel.load(folder{', module=…' * needs_module})`.",
        "It holds weights and second moments of features, no image.",
        "What these reveal: see the project's docs, artifact page.",
        "",
        "| what | value |",
        "|---|---|",
        f"| classes | {len(config['classes'])}: {escaped(some(config['classes'], NAMED))} |",
    ]
    if "shares" in config:
        lines.append(f"| shares of the members | {escaped(config['shares'])} |")
    for table in TABLES:
        for name, value in config.get(table, {}).items():
            if value is not None and not isinstance(value, dict):
                lines.append(f"| {table} {escaped(name)} | {escaped(value)} |")
    return "\n".join([*lines, ""])


def title(config: JsonTable) -> str:
    """How the model came about: epoch 0 of an adaptation is the source model itself."""
    method = config.get("method", "source-only")
    if "shares" in config:
        return f"A mixture of {len(config['shares'])} image classifiers, adapted by {method}"
    history = f"model adapted by {method}"
    if method == "source-only":
        history = "source model"
    elif config["summary"].get("kept_epoch") == 0:
        history = f"the source model, kept after {method} was tried"
    return f"An image classifier with a posterior, {history}"


def escaped(value: object) -> str:
    """A stranger's text in Markdown: no link, no image, one line."""
    text = "".join(MEANING.get(c, c) for c in printable(value, 1_000))
    return text.replace("www.", "www&#46;")
