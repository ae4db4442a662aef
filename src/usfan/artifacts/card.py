"""The model card of a folder, in Markdown."""

from __future__ import annotations

from typing import Any

from usfan.errors import shown


def model_card(config: dict[str, Any]) -> str:
    architecture, spec, posterior = config["architecture"], config["input"], config["posterior"]
    network = architecture.get("backbone") or architecture.get("timm")
    loading = "Load it with `usfan.SourceModel.load(folder)`."
    if network is None:
        network = f"{architecture['module']} (a module of its own)"
        loading = "Load it with `usfan.SourceModel.load(folder, module=…)`: only the module's tensors are stored."
    prior = f"{posterior['prior_precision']:.4g} ({posterior['prior']}, {posterior['damping']} damping)"
    names = config["classes"]
    listed = ", ".join(names[:20]) + (f", … ({len(names)} in all)" if len(names) > 20 else "")
    kind = "source model" if config["kind"] == "source" else adapted(config)
    lines = [
        f"# An image classifier with a posterior: {kind}",
        "",
        f"Made by usfan. {loading}",
        "",
        "| what | value |",
        "|---|---|",
        f"| network | {_cell(network)} |",
        f"| input | {spec['channels']}×{spec['size']}×{spec['size']}, mean {spec['mean']}, std {spec['std']} |",
        f"| classes | {_cell(listed)} |",
        f"| last layer | {posterior['features']} features{', bias' if posterior['bias'] else ''} |",
        f"| prior precision | {prior} |",
        f"| fitted on | {posterior['count']} samples |",
    ]
    other = config["uncertainty"]
    if other["kind"] != "kronecker":
        told = ", ".join(f"{name} {value}" for name, value in other.items() if name != "kind")
        lines.append(f"| certainty from | {other['kind']}{f' ({told})' if told else ''}, not from the posterior |")
    for name, value in config.get("summary", {}).items():
        if isinstance(value, (int, float, str)):
            lines.append(f"| {_cell(name)} | {_cell(value)} |")
    lines += [
        "",
        "It holds weights and second moments of features, no image.",
        "What these reveal: see the project's docs, artifact page.",
    ]
    return "\n".join(lines) + "\n"


def adapted(config: dict[str, Any]) -> str:
    """What came of an adaptation: epoch 0 is the source model itself."""
    if config["method"] == "source-only":
        return "source model"
    if config.get("summary", {}).get("kept_epoch") == 0:
        return f"the source model, kept after {_cell(config['method'])} was tried"
    return f"model adapted by {_cell(config['method'])}"


def mixture_card(config: dict[str, Any]) -> str:
    names = config["classes"]
    listed = ", ".join(names[:20]) + (f", … ({len(names)} in all)" if len(names) > 20 else "")
    shares = ", ".join(f"{share:.3f}" for share in config["shares"])
    return "\n".join(
        [
            f"# A mixture of {len(config['shares'])} image classifiers, adapted by {_cell(config['method'])}",
            "",
            "Made by usfan. Load it with `usfan.SourceModel.load(folder)`; each member is a model folder of its own.",
            "",
            "| what | value |",
            "|---|---|",
            f"| classes | {_cell(listed)} |",
            f"| mixing | {_cell(config['mixing'])} |",
            f"| shares of the members | {shares} |",
            "",
        ]
    )


MEANING = {"\\": "&#92;", "|": "\\|", "<": "&lt;", "&": "&amp;", ":": "&#58;", "@": "&#64;"}
MEANING |= {c: f"&#{ord(c)};" for c in "`[]"}
"""Characters that make links, images, code or HTML, and their replacements."""


def _cell(value: object) -> str:
    """A stranger's text in Markdown: no link, no image, one line."""
    return "".join(MEANING.get(c, c) for c in shown(value, 1_000)).replace("www.", "www&#46;")
