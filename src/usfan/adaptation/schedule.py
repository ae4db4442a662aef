"""The stages of a run, one after another: which terms train in which epoch, and how many steps that takes."""

from __future__ import annotations

from dataclasses import dataclass

from usfan.adaptation.methods import NextStage
from usfan.adaptation.plan import Plan
from usfan.adaptation.terms.term import Term
from usfan.adaptation.terms.user_labels import UserLabelsTerm
from usfan.engine.loop import Progress
from usfan.engine.passes import count_batches
from usfan.engine.stage import Stage


@dataclass(frozen=True)
class Schedule:
    """Stages with their terms, for `images` images."""

    images: int
    stages: tuple[Stage, ...]
    terms: tuple[tuple[Term, ...], ...]
    """The terms of each stage."""

    @classmethod
    def of(cls, plan: Plan, images: int, *, labelled: bool) -> Schedule:
        """`labelled`: the user gave labels, which every stage learns from."""
        weight = plan.config.given_label_weight or 0.0
        label_terms = (UserLabelsTerm(weight),) if labelled else ()
        stages = tuple(make_stage(plan, row) for row in plan.method.stages)
        return cls(
            images, stages, tuple((*row.terms, *label_terms) for row in plan.method.stages)
        )

    @property
    def epochs(self) -> int:
        return self.epochs_before(len(self.stages))

    @property
    def steps(self) -> int:
        return sum(count_batches(self.images, s.batch_size) * s.epochs for s in self.stages)

    def epochs_before(self, number: int) -> int:
        """Epochs of the stages before this one."""
        return sum(stage.epochs for stage in self.stages[:number])

    def stage_at(self, epoch: int) -> tuple[int, int]:
        """The stage that trains after this many epochs, and the epoch within it."""
        for number, stage in enumerate(self.stages):
            within = epoch - self.epochs_before(number)
            if within < stage.epochs:
                return number, within
        return 0, epoch  # no stage has epochs

    def run_progress(self, progress: Progress, number: int) -> Progress:
        """The progress of a stage as that of the whole run."""
        epochs_before = self.epochs_before(number)

        def show(done: int, _: int, figures: dict[str, float]) -> None:
            if "epoch" in figures:
                epoch = figures["epoch"] + epochs_before
                figures = {**figures, "epoch": epoch, "epochs": self.epochs}
            progress(epochs_before * self.images + done, self.epochs * self.images, figures)

        return show


def make_stage(plan: Plan, row: NextStage) -> Stage:
    """The stage as the loop runs it. A method without terms trains nothing; settling BatchNorm takes an epoch."""
    epochs = plan.config.epochs if plan.method.terms else int(plan.method.settles)
    return Stage.of(plan.config, **{"epochs": round(row.length * epochs), **row.stage})
