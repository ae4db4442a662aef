"""Stage 2: adapt the extractor to unlabelled images; the head stays frozen.

    settings → data → model → [pass over the target → refresh terms → epoch of steps] × E → judge → model

It receives a model, its posterior and images. It cannot receive source data, and removes labels at once, except those
that the user gives for a few images of the target (`labels`).
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import logging
import math
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from usfan.adaptation.given import Given
from usfan.adaptation.guard import DRAWS, Guard, Kept, estimated_accuracy, looked_at
from usfan.adaptation.guidance import REJECTING, Guidance
from usfan.adaptation.ladder import Rung, choose_rung
from usfan.adaptation.methods import Later, Method
from usfan.adaptation.settings import choose_posterior, recorded_settings, resolve, with_rung
from usfan.adaptation.terms.given_labels import GivenLabels
from usfan.adaptation.terms.separation import Separation
from usfan.adaptation.terms.term import Context, Term
from usfan.adaptation.witness import Witness, choose_judge, choose_witness, has_witness, testimony, thumbnails
from usfan.adaptation.worth import describe, left_out
from usfan.artifacts.model import AdaptedModel, Passes, SourceModel, as_images
from usfan.artifacts.schema import check_draws
from usfan.compute.accelerate.layers import accelerated, settle_layout
from usfan.compute.features import FeatureStore, features_of, on_features
from usfan.compute.loop import Loop, Progress
from usfan.compute.passes import (
    Feeder,
    count_batches,
    engine_store,
    forward_store,
    prepare,
    replayed_pass,
    worth_compiling,
)
from usfan.compute.runtime import Runtime, start_runtime
from usfan.compute.stage import Stage
from usfan.compute.step_memory import check_step_memory
from usfan.compute.stepper import Stepper
from usfan.config import AdaptConfig, RuntimeConfig
from usfan.data.cache import PixelStore
from usfan.data.few_labels import few_labels
from usfan.errors import ConfigError, DataError
from usfan.models.backbones import weights_hash
from usfan.models.classifier import Classifier
from usfan.runs.folder import Checkpoint, RunFolder, checked_records, load_checkpoint, must_fit
from usfan.scoring.outputs import Outputs, check_finite
from usfan.scoring.situation import assess
from usfan.scoring.validators import validate
from usfan.threads import threads_for

log = logging.getLogger(__name__)

IMAGES = "the images themselves"
"""The judge of a network from scratch."""
SETTLED = 50
"""Batches after which BatchNorm, which moves by a tenth at each, has forgotten the source's statistics."""


def adapt(
    source: SourceModel,
    data: Any,
    method: str = "auto",
    *,
    runtime: RuntimeConfig | Runtime | None = None,
    run: RunFolder | None = None,
    progress: Progress | None = None,
    labels: Any = None,
    **settings: Any,
) -> AdaptedModel:
    """Adapt to images (an `ImageData`, a folder, an array…). `settings` are fields of `usfan.config.AdaptConfig`, or
    settings of the method (`usfan methods NAME` lists them). `labels`: of a few of these images, whatever
    `usfan.data.few_labels` takes."""
    witness = settings.pop("witness", None)
    given = {"method": method, **settings, **({"witness": witness} if isinstance(witness, str) else {})}
    available = isinstance(witness, Tensor) or has_witness(source.architecture, source.summary)
    config, row = resolve(given, pretrained=source.pretrained, classes=len(source.classes), witness=available)
    check_draws(config.samples, len(source.classes))
    engine = runtime if isinstance(runtime, Runtime) else start_runtime(runtime)
    if labels is not None and not row.terms:
        raise ConfigError(f"{config.method} trains nothing, so labels cannot help it: choose another method")
    data = data if isinstance(data, PixelStore) else as_images(data)
    table = None if labels is None else few_labels(labels, data, source.classes)
    if isinstance(data, PixelStore):
        images = dataclasses.replace(data, labels=None, classes=None)
    else:
        images = engine_store(data.without_labels(), source.spec, engine)
        table = None if table is None else table[images.kept]
    few = None if table is None else Given.of_table(table, engine.device)
    if len(images) < 2 and row.adapts:
        raise DataError(f"one image is too few to adapt to: {config.method} compares images with each other")
    pixels = any(term.needs_pixels for term in row.all_terms)
    if isinstance(images, FeatureStore) and pixels:
        raise ConfigError(f"{config.method} changes the images themselves, and features are given: give it images")
    store, reason = images, ""
    if config.tune == "auto":
        rung, features = choose_rung(source, images, engine) if row.adapts else (Rung("new", "nothing moves"), None)
        config, reason = with_rung(config, rung, pretrained=source.pretrained), rung.reason
        log.info("tune %s: %s", rung.tune, rung.reason)
        store = features if features is not None and rung.tune == "new" and not pixels else images
    seen, used = witnessed(witness, config, source, row, images, engine)
    judge = None
    if config.guard and row.adapts and images.pixels.ndim == 4:
        used |= {weights_hash(source.classifier.backbone)} if config.tune == "new" else set()
        judge = choose_judge(source, used)
    if config.tune != "new" and row.terms and not isinstance(store, FeatureStore):
        check_step_memory(source.classifier, source.spec, config.batch_size, engine)
    own = (source, store, config, row, engine, run, progress, seen, judge, images, reason)

    def decide(setting: str) -> Method:
        own = {**given, "setting": setting}
        return resolve(own, pretrained=source.pretrained, classes=len(source.classes), witness=available)[1]

    first = Adaptation(*own, few, decide)
    return first.run() if few is None else with_worth(first, first.run())


def with_worth(first: Adaptation, model: AdaptedModel) -> AdaptedModel:
    """The model of a run with given labels, and what they are worth in its history."""
    given, passes, config = first.given, model.passes, dataclasses.replace(first.config, guard=False)
    assert given is not None
    assert passes is not None
    figures, without = describe(given, passes.before.logits.argmax(dim=1)), None

    def again(labels: Given | None) -> Tensor:
        own = (first.source, first.store, config, first.method, first.runtime, None, None, first.witness)
        found = Adaptation(*own, None, first.images, first.tune_reason, labels).run().passes
        assert found is not None
        return found.after.logits.argmax(dim=1)

    if config.label_folds:
        more, without = left_out(given, again, config.label_folds, config.seed)
        figures |= more
    model.history["labels"] = figures
    for one in (model, model.alternative):
        if one is not None:
            one.summary = {**one.summary, "labels": figures}
    model.passes = dataclasses.replace(passes, given=given.rows.cpu(), without=without)
    return model


def witnessed(
    given: Any,
    config: AdaptConfig,
    source: SourceModel,
    method: Method,
    images: PixelStore,
    runtime: Runtime,
) -> tuple[Tensor | None, set[str]]:
    """What the witness says about the target, N × (F + C), and the hash of its weights."""
    if isinstance(given, Tensor):
        return given, set()
    own = find_witness(config.witness, source, method)
    if own is None:
        return None, set()
    if not isinstance(images, FeatureStore):
        return own.testimony(images, runtime), {own.hash}
    if not own.own:
        raise ConfigError("features are given, no images: give the witness's features too, witness=TENSOR")
    return testimony(images.pixels, own.classifier), {own.hash}


def find_witness(asked: str, source: SourceModel, method: Method) -> Witness | None:
    """The witness, if the method needs one."""
    if not method.needs_witness:
        return None
    witness = choose_witness(asked, source)
    if witness is None:
        why = "--witness none" if asked == "none" else "no pretrained network is available for it"
        raise ConfigError(f"{method.name} needs a witness ({why}): name one with --witness, or choose --method u-sfan+")
    own = " (the model's own backbone)" if witness.own else ""
    classes = "" if witness.classifier is None else f", with its own {len(witness.classifier.bias):,} classes"
    log.info("witness: %s%s%s", witness.name, own, classes)
    return witness


class Adaptation:
    """The state of one run of stage 2."""

    def __init__(
        self,
        source: SourceModel,
        store: PixelStore,
        config: AdaptConfig,
        method: Method,
        runtime: Runtime,
        run: RunFolder | None = None,
        progress: Progress | None = None,
        witness: Tensor | None = None,
        judge: Witness | None = None,
        images: PixelStore | None = None,
        tune_reason: str = "",
        given: Given | None = None,
        decide: Callable[[str], Method] | None = None,
    ) -> None:
        self.judge_network, self.images = judge, store if images is None else images
        plain = self.images.pixels.ndim == 4 and not source.pretrained
        self.judged_by = judge.name if judge is not None else IMAGES if plain else "source model"
        self.tune_reason, self.given, self.decide = tune_reason, given, decide
        self.found: dict[str, object] | None = None
        self.witness = None if witness is None else witness.to(runtime.device)
        self.source, self.store, self.config, self.method = source, store, config, method
        self.runtime, self.folder, self.progress = runtime, run, progress
        self.stages = self.made_stages()
        self.ends = list(itertools.accumulate(stage.epochs for _, stage in self.stages))
        self.epochs, self.number = self.ends[-1], -1
        if not method.terms and config.epochs != self.epochs:
            log.warning("%s trains nothing: --epochs %d is not used", method.name, config.epochs)
        self.steps = sum(self.steps_of(stage) for _, stage in self.stages)
        self.compiled = worth_compiling(runtime, self.steps)
        self.posterior = choose_posterior(source.posterior, config).to(runtime.device)
        chosen = source.with_uncertainty(config.uncertainty, config.dropout_rate).rival
        self.rival = None if chosen is None else chosen.to(runtime.device)
        self.uncertainty = self.posterior if self.rival is None else self.rival
        self.settles, self.guide = self.guided()
        self.guard = Guard(enabled=config.guard)
        self.classifier: Classifier = source.classifier
        self.first: dict[str, Tensor] = {}
        self.replay: Stepper | None = None
        self.loop: Loop
        self.terms: list[Term] = []
        self.records: list[dict[str, Any]] = []
        self.pending: dict[str, float] = {}
        self.path: list[Tensor] = []

    def made_stages(self) -> list[tuple[tuple[Term, ...], Stage]]:
        more = () if self.given is None else (GivenLabels(self.config.given_label_weight or 0.0),)
        return [((*s.terms, *more), stage_of(self.config, self.method, s)) for s in self.method.stages]

    def guided(self) -> tuple[bool, Guidance]:
        """Whether BatchNorm settles before the first epoch, and the tables that guide it."""
        method, config = self.method, self.config
        separation = sum(term.separation for term in method.terms if isinstance(term, Separation))
        separates = config.setting in REJECTING and separation > 0
        settles = (separates and not method.needs_witness) or (method.settles and bool(method.terms))
        guide = Guidance(
            len(self.store),
            len(self.source.classes),
            method.certainty,
            method.split,
            config.setting,
            self.runtime,
            self.uncertainty,
            config.samples,
            separates=separates,
        )
        return settles, guide

    def look(self, before: Outputs) -> None:
        """Decide the setting from what the source model and the witness see of the target."""
        count, classes, setting = len(self.store), len(self.source.classes), "closed"
        if not self.method.adapts or self.decide is None:
            self.found = {"setting": setting, "reason": f"{self.method.name} trains nothing; classes not estimated"}
        elif count <= classes:
            reason = f"{count} images are too few to tell which of {classes} classes occur"
            self.found = {"setting": setting, "reason": reason}
        else:
            seen = before.features if self.witness is None else self.witness
            names = self.uncertainty.predictive(before.features, 1.0)
            if self.given is not None:
                self.given.pin(names)
            log_names, second = names.clamp_min(1e-12).log(), self.second_view(before)
            self.found = assess(seen, log_names, second, witnessed=self.witness is not None).to_dict()
            setting = str(self.found["setting"])
            self.method = self.decide(setting)
        log.info("setting %s: %s", setting, self.found["reason"])
        self.config = dataclasses.replace(self.config, setting=setting)
        self.stages = self.made_stages()
        self.settles, self.guide = self.guided()

    def second_view(self, before: Outputs) -> Callable[[Tensor], Tensor] | None:
        """For the search for new classes: other features of the images at given positions; None if there are none."""
        if self.witness is not None:
            return lambda rows: before.features[rows]
        if self.judged_by == IMAGES:
            return lambda rows: thumbnails(self.images, rows.cpu(), self.runtime, most=16)
        if isinstance(self.store, FeatureStore):
            return lambda rows: self.store.pixels[rows.to(self.store.pixels.device)].to(rows.device)
        return None

    def run(self) -> AdaptedModel:
        started = time.perf_counter()
        whole = prepare(copy.deepcopy(self.source.classifier), self.source.spec, self.runtime, steps=self.method.adapts)
        given = isinstance(self.store, FeatureStore)
        frozen = given or (
            all(stage.tune == "new" for _, stage in self.stages)
            and not any(term.needs_pixels for term in self.method.all_terms)
        )
        if frozen and not given:
            self.store = features_of(whole, self.store, self.source.spec, self.runtime)
        classifier = on_features(whole) if frozen else whole
        work = len(self.store) * len(self.source.classes) * self.config.samples if frozen else math.inf
        with threads_for(work), accelerated(classifier, self.runtime, self.steps):
            before = self.open(classifier)
            try:
                outputs = self.train(before, self.resume())
                kept = self.guard.finish()
                if kept.epoch != self.guard.latest:
                    self.classifier.load_state_dict(self.guard.state if kept.epoch else self.first)
                    outputs = self.outputs()
            finally:
                self.loop.release()
                if self.replay is not None:
                    self.replay.release()
        settle_layout(whole, self.runtime)
        self.classifier = whole
        model = self.finished(kept, before, outputs, time.perf_counter() - started)
        if kept.kept == "undecided":
            other = copy.deepcopy(whole)
            other.load_state_dict({**other.state_dict(), **self.guard.state})
            summary = {**model.summary, "kept_epoch": kept.candidate}
            model.alternative = dataclasses.replace(model, classifier=other, summary=summary, passes=None)
        return model

    def open(self, classifier: Classifier) -> Outputs:
        """Everything that a run needs, made around the classifier; what the source model says of the target."""
        self.classifier, runtime = classifier, self.runtime
        self.first = {name: value.clone() for name, value in classifier.state_dict().items()}
        self.replay = replayed_pass(classifier, self.store, self.source.spec, runtime, self.steps)
        before = self.outputs()
        check_finite(before.logits, before.posterior_probs)
        if self.config.setting == "auto":
            self.look(before)
        rows, seen = looked_at(len(self.store)), None
        if self.judge_network is not None:
            key = None if self.images.key is None else f"{self.images.key}, {len(rows)} of {len(self.store)}"
            some = dataclasses.replace(self.images, pixels=self.images.pixels[rows], kept=rows, key=key)
            seen = self.judge_network.features(some, runtime)
        elif self.judged_by == IMAGES:
            seen = thumbnails(self.images, rows, runtime)
        draws = self.posterior.draws(before.features[rows.to(before.features.device)], DRAWS).argmax(dim=2)
        classes = len(self.source.classes) + self.guide.rejects
        self.guard.open(before, self.labels(before), draws, seen, classes, self.source.classes)
        self.context = Context(
            len(self.store),
            len(self.source.classes),
            runtime,
            self.epochs,
            self.config.seed,
            self.guide,
            before,
            self.witness,
            self.uncertainty,
            self.given,
        )
        self.enter(0)
        return before

    def enter(self, number: int) -> None:
        """Begin a stage: its terms, and a loop with an optimiser of its own."""
        if self.number == number:
            return
        if self.number >= 0:
            self.loop.release()
        self.number = number
        terms, stage = self.stages[number]
        context = dataclasses.replace(self.context, epochs=stage.epochs)
        self.terms = [term.started(context) for term in terms]
        views = dataclasses.replace(self.source.spec, augment=self.config.augment or self.source.spec.augment)
        feeder = Feeder(self.store, views, self.config.seed, self.runtime)
        before = (sum(self.steps_of(stage) for _, stage in self.stages[:number]), self.begins(number))
        progress = (
            None if self.progress is None else of_run(self.progress, before, (self.steps, self.epochs), len(self.store))
        )
        beside = None if self.given is None else self.given.rows
        self.loop = Loop(self.classifier, feeder, stage, self.terms, self.runtime, beside=beside, progress=progress)

    def stage_at(self, epoch: int) -> tuple[int, int]:
        """The stage that trains after this many epochs, and the epoch within it."""
        number = next((n for n, end in enumerate(self.ends) if epoch < end), 0)
        return number, epoch - self.begins(number)

    def begins(self, number: int) -> int:
        """The epoch after which a stage begins."""
        return self.ends[number] - self.stages[number][1].epochs

    def steps_of(self, stage: Stage) -> int:
        return count_batches(len(self.store), stage.batch_size) * stage.epochs

    def train(self, before: Outputs, first: int) -> Outputs:
        """Epoch by epoch, until the end or a collapse; the last look at the target."""
        for epoch in range(first, self.epochs + 1):
            outputs = before if epoch == 0 else self.outputs()
            if bool(torch.isfinite(outputs.logits).all() & torch.isfinite(outputs.posterior_probs).all()):
                self.guide.refresh(self.told(outputs), min(epoch, self.epochs - 1) / max(1, self.epochs))
            self.judge(epoch, outputs, before)
            if self.guard.collapsed or (epoch == self.epochs and not (epoch == 0 and self.settles)):
                break
            if epoch == 0 and self.settles:
                self.loop.settle()
                outputs = self.outputs()
                self.guide.refresh(self.told(outputs))
            if epoch < self.epochs:
                self.train_epoch(epoch, outputs)
        return outputs

    def train_epoch(self, epoch: int, outputs: Outputs) -> None:
        number, own = self.stage_at(epoch)
        self.enter(number)
        told = self.told(outputs)
        for term in self.terms:
            term.refresh(told)
            term.begin_epoch(own)
        if self.terms:
            self.pending = self.loop.train_epoch(own)
        else:
            self.loop.settle(SETTLED)
        for term in self.terms:
            term.end_epoch(own, self.classifier)

    def told(self, outputs: Outputs) -> Outputs:
        """The outputs of a pass for guidance and terms, with the user's labels in place of predictions."""
        return outputs if self.given is None else self.given.told(outputs)

    def outputs(self) -> Outputs:
        """One pass over the target, test views, BatchNorm in test mode; terms and guard share it."""
        features, logits = forward_store(
            self.classifier, self.store, self.source.spec, self.runtime, compiled=self.compiled, replay=self.replay
        )
        probs, information = self.uncertainty.moments(features, self.method.certainty.temperature, self.config.samples)
        return Outputs(features, logits, logits.softmax(dim=1), probs, information)

    def labels(self, outputs: Outputs) -> Tensor:
        """N predicted classes; in open set K stands for unknown."""
        return self.method.split.labels(outputs) if self.guide.rejects else outputs.logits.argmax(dim=1)

    def judge(self, epoch: int, outputs: Outputs, before: Outputs) -> None:
        """Show this iterate to the guard, and record it."""
        figures = validate(outputs.probs, source_probs=before.probs, posterior_probs=outputs.posterior_probs)
        if self.guide.separates:
            figures["information_maximization"] = self.guide.known_information(outputs.probs)
        self.path.append(outputs.logits.argmax(dim=1).to(torch.int16))
        self.guard.loss_finite = all(abs(value) < float("inf") for value in self.pending.values())
        finite = bool(torch.isfinite(outputs.logits).all() & torch.isfinite(outputs.posterior_probs).all())
        labels = self.labels(outputs) if finite else outputs.logits.argmax(dim=1)
        look = self.guard.consider(epoch, outputs, labels, self.classifier.state_dict())
        figures |= {"structure": look.structure[1], "fit": look.fit[1], "gain": look.gain.value, "names": look.names}
        self.record(epoch, figures)

    def record(self, epoch: int, validators: dict[str, float]) -> None:
        figures: dict[str, Any] = {"epoch": epoch, **self.pending, "weight_mean": float(self.guide.weights.mean())}
        figures["validators"] = validators
        self.records.append(figures)
        if epoch > 0:
            self.loop.tell(epoch - self.begins(self.number), figures)
        if self.folder is None or self.runtime.rank:
            return
        self.folder.log("epoch", **figures)
        self.folder.scalars({f"adapt/{k}": v for k, v in figures.items() if isinstance(v, float)}, epoch)
        self.folder.scalars({f"validators/{k}": v for k, v in validators.items()}, epoch)
        self.folder.histogram("adapt/weights", self.guide.weights, epoch)
        if 0 < epoch < self.epochs and not self.guard.collapsed:  # a run goes on from weights that may be kept
            tensors = self.loop.tensors()
            for number, term in enumerate(self.terms):
                tensors |= {f"term.{number}.{k}": v for k, v in term.tensors().items()}
            self.folder.save_checkpoint(epoch, tensors, {"guard": self.guard.to_dict(), "records": self.records})

    def resume(self) -> int:
        """Continue from the newest checkpoint of the run folder; returns the epoch to start with."""
        found: Checkpoint | None = load_checkpoint(self.folder, self.runtime)
        if found is None:
            return 0
        assert self.folder is not None
        with self.folder.restoring():
            return self.restore(*found)

    def restore(self, epoch: int, tensors: dict[str, Tensor], state: dict[str, Any]) -> int:
        self.guard.restore(state["guard"], {k[6:]: v for k, v in tensors.items() if k.startswith("model.")})
        must_fit(self.guard.state, self.classifier)
        number, own = self.stage_at(epoch)
        self.enter(number)
        if own == 0:  # a new stage has no momentum, and terms of its own
            tensors = {k: v for k, v in tensors.items() if k.startswith("model.")}
        self.loop.restore(tensors)
        for place, term in enumerate(self.terms if own else ()):
            mark = f"term.{place}."
            term.restore({k.removeprefix(mark): v for k, v in tensors.items() if k.startswith(mark)})
        *self.records, last = checked_records(state["records"])
        pending = {k: v for k, v in last.items() if k not in ("epoch", "validators", "weight_mean")}
        self.pending = {str(k): float(v) for k, v in pending.items()}
        return epoch

    def finished(self, kept: Kept, before: Outputs, after: Outputs, seconds: float) -> AdaptedModel:
        history = {
            "method": self.config.method,
            "epochs": self.epochs,
            "kept_epoch": kept.epoch,
            "tune": {"tune": self.config.tune, "reason": self.tune_reason},
            "classes": self.found,
            "guard": {"on": self.config.guard, **dataclasses.asdict(kept), "judge": self.judged_by},
            "estimated_accuracy": estimated_accuracy(
                self.guard.history, kept=kept.epoch, count=len(self.guard.rows), rejects=self.guide.rejects
            ),
            "validators": next((r["validators"] for r in self.records if r["epoch"] == kept.epoch), {}),
            "prior_precision": self.posterior.prior_precision,
            "uncertainty": self.uncertainty.kind,
            "settings": recorded_settings(self.config, self.method),
            "seconds": round(seconds, 3),
            "records": self.records,
        }
        if self.folder is not None and self.runtime.rank == 0:
            self.folder.log("kept", epoch=kept.epoch, of=self.epochs, reason=kept.reason)
        rule = None
        if self.guide.rejects:
            rule = self.method.split.rule(after, self.method.split.decision)
        return AdaptedModel(
            self.classifier,
            self.posterior,
            self.source.classes,
            self.source.spec,
            self.source.architecture,
            {k: v for k, v in history.items() if k not in ("records", "validators", "guard", "estimated_accuracy")},
            self.method.certainty.temperature,
            self.config.samples,
            self.rival,
            self.config.method,
            rule,
            history,
            Passes(before, after, self.store.kept, tuple(self.store.skipped), tuple(self.path)),
        )


def of_run(progress: Progress, before: tuple[int, int], total: tuple[int, int], images: int) -> Progress:
    """The progress of a stage as that of the run: (steps, epochs) before it, and in all."""

    def shown(done: int, _: int, figures: dict[str, float]) -> None:
        seen = before[1] * images + figures["images"]
        figures = {**figures, "images": seen, "images_in_all": total[1] * images}
        if "epoch" in figures:
            figures = {**figures, "epoch": before[1] + figures["epoch"], "epochs": total[1]}
        progress(before[0] + done, total[0], figures)

    return shown


def stage_of(config: AdaptConfig, method: Method, stage: Later) -> Stage:
    """The stage as the loop runs it. A method without terms trains nothing; settling BatchNorm takes an epoch."""
    return Stage.of(config, **{"epochs": config.epochs if method.terms else int(method.settles), **stage.stage})
