"""One run's part of the page: its sections, each with what could be drawn."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from usfan.errors import UsfanError
from usfan.report.blocks import Block, Note, Section
from usfan.report.curves import training_figures, validator_figures
from usfan.report.feature_map import map_blocks
from usfan.report.gallery import galleries
from usfan.report.overview import Tile, facts, guard_reason, headline, kept_epoch, settings_table, status, tiles
from usfan.report.plots import entropy_figures, reliability_figures, weight_figure
from usfan.report.read_run import Run
from usfan.report.read_samples import Samples
from usfan.report.tables import calibration_table, class_table, confusion_tables, metrics_tables
from usfan.report.terms import terms_table

PAIRED = ("calibration", "map", "classes", "images")
"""Sections that show things in pairs."""

VALIDATORS = "What one pass over the target says of each iterate, without labels; epoch 0 is the source model."


@dataclass(frozen=True)
class Detail:
    """How much goes on the page: points on a map, images in a gallery."""

    points: int = 4000
    thumbnails: int = 12


@dataclass(frozen=True)
class RunPart:
    """What the template shows of one run."""

    id: str
    name: str
    headline: str
    status: tuple[str, str]
    reason: str
    tiles: list[Tile]
    facts: list[tuple[str, str]]
    problems: list[str]
    sections: list[Section]


def run_part(id: str, run: Run, detail: Detail) -> RunPart:
    sections = [s for s in run_sections(id, run, detail) if s.blocks]
    reason = guard_reason(run)
    return RunPart(id, run.name, headline(run), status(run), reason, tiles(run), facts(run), run.problems, sections)


def run_sections(id: str, run: Run, detail: Detail) -> list[Section]:
    kept, samples = kept_epoch(run), run.samples
    found: list[Section] = []

    def section(key: str, title: str, intro: str, *makers: Callable[[], list[Block]]) -> None:
        blocks: list[Block] = []
        for make in makers:
            try:
                blocks += make()
            except UsfanError as error:  # the samples are there, but cannot be scored
                blocks.append(Note(f"{title}: a part is left out, because {error}."))
        found.append(Section(f"{id}-part-{key}", title, intro, blocks, 2 if key in PAIRED else 3))

    if run.kind != "adapt":
        section("figures", "Figures", "", lambda: list(metrics_tables(id, run.metrics)))
    if run.kind == "adapt" and samples is not None and samples.labels is None:
        text = "The images have no labels, so accuracy, calibration and confusions are left out."
        section("labels", "Without labels", "", lambda: [Note(text)])
    curves = "The dashed line marks the epoch that was kept."
    section("training", "Training", curves if kept else "", lambda: list(training_figures(id, run.epochs, kept)))
    section("validators", "Validators", VALIDATORS, lambda: list(validator_figures(id, run.epochs, kept)))
    if samples is not None:
        sample_sections(section, id, run, samples, detail)
    section("settings", "Settings", "", lambda: present(settings_table(id, run)))
    section("terms", "Terms", "", lambda: present(terms_table(id, run)))
    return found


def sample_sections(section: Callable[..., None], id: str, run: Run, samples: Samples, detail: Detail) -> None:
    section(
        "uncertainty", "Uncertainty",
        "Entropy of each prediction: filled, of the posterior predictive; dashed, of the point estimate.",
        lambda: list(entropy_figures(id, samples)), lambda: present(weight_figure(id, samples)),
    )  # fmt: skip
    section(
        "calibration", "Calibration", "Does a confidence of 80 % mean right in 80 of 100 cases?",
        lambda: list(reliability_figures(id, samples)), lambda: present(calibration_table(id, run)),
    )  # fmt: skip
    section(
        "map", "Map of the features",
        "Both on the two main axes of the adapted features, each at its own scale; the colour is the predicted class.",
        lambda: list(map_blocks(id, samples, detail.points)),
    )  # fmt: skip
    section(
        "classes", "Classes", "", lambda: [class_table(id, run, samples)], lambda: list(confusion_tables(id, samples))
    )
    section("images", "Images", "", lambda: list(galleries(id, samples, detail.thumbnails)))


def present(block: Block | None) -> list[Block]:
    return [] if block is None else [block]
