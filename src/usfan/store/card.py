"""The model card of a folder, in Markdown."""

from __future__ import annotations

from usfan.errors import printable
from usfan.store.schema import JsonTable
from usfan.uncertainty.kronecker import KroneckerPosterior


def model_card(config: JsonTable) -> str:
    """README.md of a folder, from its config."""
    names = config["classes"]
    listed = ", ".join(names[:20])
    if len(names) > 20:
        listed += f", … ({len(names)} in all)"
    if config["kind"] == "mixture":
        title = f"A mixture of {len(config['shares'])} image classifiers, adapted by {_cell(config['method'])}"
        loading = "(folder)`; each member is a model folder of its own."
        rows = {
            "classes": _cell(listed),
            "shares of the members": ", ".join(f"{share:.3f}" for share in config["shares"]),
        }
        end = []
    else:
        title = f"An image classifier with a posterior: {history(config)}"
        loading = "(folder)`."
        if "backbone" not in config["architecture"] and "timm" not in config["architecture"]:
            loading = "(folder, module=…)`: only the module's tensors are stored."
        rows = model_rows(config, listed)
        end = [
            "",
            "It holds weights and second moments of features, no image.",
            "What these reveal: see the project's docs, artifact page.",
        ]
    table = [f"| {name} | {value} |" for name, value in rows.items()]
    lines = [
        f"# {title}",
        "",
        f"Made by usfan. Load it with `usfan.SourceModel.load{loading}",
        "",
        "| what | value |",
        "|---|---|",
    ]
    return "\n".join([*lines, *table, *end, ""])


def model_rows(config: JsonTable, classes: str) -> JsonTable:
    architecture = config["architecture"]
    spec = config["input"]
    posterior = config["posterior"]
    network = architecture.get("backbone") or architecture.get("timm")
    bias = ", bias" if posterior["bias"] else ""
    rows = {
        "network": _cell(network or f"{architecture['module']} (a module of its own)"),
        "input": f"{spec['channels']}×{spec['size']}×{spec['size']}, mean {spec['mean']}, std {spec['std']}",
        "classes": _cell(classes),
        "last layer": f"{posterior['features']} features{bias}",
        "prior precision": f"{posterior['prior_precision']:.4g} ({posterior['prior']}, {posterior['damping']} damping)",
        "fitted on": f"{posterior['count']} samples",
    }
    uncertainty = dict(config["uncertainty"])
    kind = uncertainty.pop("kind")
    if kind != KroneckerPosterior.kind:
        settings = ", ".join(f"{name} {value}" for name, value in uncertainty.items())
        rows["certainty from"] = (
            f"{kind}{f' ({settings})' if settings else ''}, not from the posterior"
        )
    for name, value in config.get("summary", {}).items():
        if isinstance(value, (int, float, str)):
            rows[_cell(name)] = _cell(value)
    return rows


def history(config: JsonTable) -> str:
    """How the model came about: epoch 0 of an adaptation is the source model itself."""
    method = config.get("method", "source-only")
    if method == "source-only":
        return "source model"
    if config.get("summary", {}).get("kept_epoch") == 0:
        return f"the source model, kept after {_cell(method)} was tried"
    return f"model adapted by {_cell(method)}"


MEANING = {"\\": "&#92;", "|": "\\|", "<": "&lt;", "&": "&amp;", ":": "&#58;", "@": "&#64;"}
MEANING |= {c: f"&#{ord(c)};" for c in "`[]"}
"""Characters that make links, images, code or HTML, and their replacements."""


def _cell(value: object) -> str:
    """A stranger's text in Markdown: no link, no image, one line."""
    return "".join(MEANING.get(c, c) for c in printable(value, 1_000)).replace(
        "www.", "www&#46;"
    )
