"""One run's part of the page: its overview and its sections."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from usfan.report.blocks import Block, Note, Section
from usfan.report.charts import (
    map_blocks,
    reliability_charts,
    training_charts,
    uncertainty_charts,
    validator_charts,
)
from usfan.report.gallery import galleries
from usfan.report.glossary import glossary_table
from usfan.report.image_table import ImageTable
from usfan.report.overview import Overview, kept_epoch, overview, settings_table
from usfan.report.run import Run
from usfan.report.tables import before_after_table, class_table, confusion_table, metrics_tables

KEPT_EPOCH = "The dashed line marks the epoch that was kept."
VALIDATORS = "Judgements of each iterate without labels; epoch 0 is the source model."
ENTROPIES = "Entropy of each prediction: filled, of the posterior predictive; dashed, of the point estimate."
CALIBRATION = "Does a confidence of 80 % mean right in 80 of 100 cases?"
MAPS = "Both on the two main axes of the adapted features, each at its own scale; the colour is the predicted class."
NO_LABELS = "The images have no labels, so accuracy, calibration and confusions are left out."


@dataclass(frozen=True)
class RunPart:
    """One run on the page."""

    id: str
    run: Run
    overview: Overview
    sections: list[Section]


def run_part(
    id: str,
    run: Run,
    points: int,
    thumbnails: int,
) -> RunPart:
    """At most `points` images on a map, and `thumbnails` images in a gallery."""
    sections = training_sections(id, run)
    if run.images is not None:
        sections += image_sections(id, run, run.images, points, thumbnails)
    sections.append(section(id, "settings", "Settings", settings_table(id, run)))
    sections.append(section(id, "glossary", "Glossary", glossary_table(id, run)))
    return RunPart(id, run, overview(run), [section for section in sections if section.blocks])


def section(
    id: str,
    key: str,
    title: str,
    blocks: Sequence[Block],
    intro: str = "",
    columns: int = 3,
) -> Section:
    return Section(f"{id}-part-{key}", title, intro, list(blocks), columns)


def training_sections(id: str, run: Run) -> list[Section]:
    epoch = kept_epoch(run)
    intro = "" if epoch is None else KEPT_EPOCH
    curves = training_charts(id, run.epochs, epoch)
    validators = validator_charts(id, run.epochs, epoch)
    sections = [
        section(id, "training", "Training", curves, intro),
        section(id, "validators", "Validators", validators, VALIDATORS),
    ]
    if run.kind != "adapt":
        sections.insert(0, section(id, "figures", "Figures", metrics_tables(id, run.metrics)))
    elif run.images is not None and run.images.labels is None:
        sections.insert(0, section(id, "labels", "Without labels", [Note(NO_LABELS)]))
    return sections


def image_sections(
    id: str,
    run: Run,
    images: ImageTable,
    points: int,
    thumbnails: int,
) -> list[Section]:
    uncertainty = uncertainty_charts(id, images)
    calibration: list[Block] = [*reliability_charts(id, images), *before_after_table(id, run)]
    maps = map_blocks(id, images, points)
    classes = [class_table(id, run, images), *confusion_table(id, images)]
    pictures = galleries(id, images, thumbnails)
    return [
        section(id, "uncertainty", "Uncertainty", uncertainty, ENTROPIES),
        section(
            id,
            "calibration",
            "Accuracy and calibration",
            calibration,
            CALIBRATION,
            2,
        ),
        section(
            id,
            "map",
            "Map of the features",
            maps,
            MAPS,
            2,
        ),
        section(id, "classes", "Classes", classes, columns=2),
        section(id, "images", "Images", pictures, columns=2),
    ]
