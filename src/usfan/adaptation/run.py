"""Stage 2: adapt the extractor to unlabelled images; the head stays frozen.

    prepared inputs → [pass over the target → refresh terms → epoch of steps] × E → the guard decides → model

It receives a model, its posterior and images. It cannot receive source data, nor labels, except those that the user
gives for a few images of the target.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
import math
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from usfan.adaptation.estimate import (
    AccuracyEstimate,
    believed_accuracy,
    estimate_accuracy,
    with_labels,
)
from usfan.adaptation.guard import Guard, GuardDecision, first_rows, guard_rows
from usfan.adaptation.guidance import REJECTING, Guidance
from usfan.adaptation.inputs import Inputs
from usfan.adaptation.label_evidence import LabelEvidence
from usfan.adaptation.naming import name_target
from usfan.adaptation.plan import Plan
from usfan.adaptation.schedule import Schedule
from usfan.adaptation.target_classes import estimate_target_classes
from usfan.adaptation.terms.separation import Separation
from usfan.adaptation.terms.term import Context, Term
from usfan.adaptation.thresholds import GUARD_DRAWS, SETTLED_BATCHES
from usfan.adaptation.user_labels import record_user_labels
from usfan.adaptation.verdict import verdict_of
from usfan.adaptation.witness import thumbnails
from usfan.config import AdaptConfig
from usfan.engine.features import on_features
from usfan.engine.loop import Loop, Progress
from usfan.engine.passes import Feeder, forward_store, replayed_pass
from usfan.engine.runtime import Runtime
from usfan.engine.stepper import Stepper
from usfan.engine.stream import StreamOutputs
from usfan.errors import option
from usfan.maths.calibration import matching_temperature
from usfan.maths.names import TargetNaming, View
from usfan.maths.outputs import Outputs, check_finite
from usfan.maths.unknown import UnknownRule
from usfan.maths.user_labels import UserLabels
from usfan.maths.validators import validate
from usfan.models.classifier import Classifier, settle_layout
from usfan.progress import network_name
from usfan.store.model import AdaptedModel, Passes
from usfan.store.run_folder import RunFolder, checked_records, load_checkpoint, must_fit
from usfan.threads import threads_for
from usfan.uncertainty.base import Uncertainty
from usfan.uncertainty.kronecker import KroneckerPosterior

log = logging.getLogger(__name__)

IMAGES = "the images themselves"
"""The judge of a network from scratch."""
NOT_IN_SUMMARY = ("records", "validators", "guard", "verdict", "labelled")


def run(
    inputs: Inputs,
    runtime: Runtime,
    folder: RunFolder | None = None,
    progress: Progress | None = None,
) -> AdaptedModel:
    """Adapt. A run folder records every epoch; if it holds a checkpoint, the run continues from there."""
    return Adaptation(inputs, runtime, folder, progress).run()


class Adaptation:
    """The state of one run of stage 2."""

    classifier: Classifier
    guidance: Guidance
    loop: Loop
    shift: float
    """Distance of the images from the training images, relative to the spread of these."""
    replay: Stepper | None
    evidence: LabelEvidence
    judge_view: Tensor | None
    """n × F: the images that the guard judges by, as the judge sees them."""
    source_doubt: float | None
    """Share of the images whose cluster the source model may name wrongly; None if there are no clusters."""
    decisions: tuple[Tensor, Tensor]
    """N predictions of the source model and of the adapted one, whichever is kept."""

    def __init__(
        self,
        inputs: Inputs,
        runtime: Runtime,
        folder: RunFolder | None = None,
        progress: Progress | None = None,
    ) -> None:
        self.inputs = inputs
        self.source = inputs.source
        self.store = inputs.store
        self.plan = inputs.plan
        self.runtime = runtime
        self.folder = folder
        self.progress = progress
        self.set_plan(inputs.plan)
        config = self.plan.config
        if not self.plan.method.terms and config.epochs != self.schedule.epochs:
            name = self.plan.method.name
            log.warning(
                "%s trains nothing: %s is not used", name, option("epochs", config.epochs)
            )
        model = self.source.with_posterior(choose_posterior(self.source.posterior, config))
        model = model.with_uncertainty(config.uncertainty, config.dropout_rate)
        self.posterior, self.uncertainty = model.uncertainties_on(runtime.device)
        self.guard = Guard(enabled=config.guard)
        self.judge_name = name_of_judge(inputs)
        self.judge_runtime = runtime
        self.target_classes: dict[str, object] | None = None
        self.stage_number = -1
        self.terms: list[Term] = []
        self.stream: StreamOutputs | None = None
        self.records: list[dict[str, Any]] = []
        self.epoch_figures: dict[str, float] = {}
        self.path: list[Tensor] = []

    def set_plan(self, plan: Plan) -> None:
        self.plan = plan
        labelled = bool(self.inputs.user_labels)
        self.schedule = Schedule.of(plan, len(self.store), labelled=labelled)

    def run(self) -> AdaptedModel:
        started = time.perf_counter()
        network = self.inputs.network
        self.classifier = on_features(network) if self.store.is_features else network
        with threads_for(self.work):
            before = self.begin()
            try:
                after, decision = self.train_and_decide(before)
            finally:
                self.release()
        settle_layout(network, self.runtime.device)
        seconds = time.perf_counter() - started
        model = self.make_model(network, decision, before, after, seconds)
        if decision.kept == "undecided":
            model.alternative = self.alternative(model, decision)
        if self.inputs.user_labels is not None:
            record_user_labels(model, self.inputs.user_labels)
        return model

    @property
    def work(self) -> float:
        """Size of a pass: small ones run faster on few threads."""
        if not self.store.is_features:
            return math.inf
        return len(self.store) * len(self.source.classes) * self.plan.config.samples

    def begin(self) -> Outputs:
        """Set up training. Returns the source model's outputs on the target."""
        state = self.classifier.state_dict()
        self.source_state = {name: value.clone() for name, value in state.items()}
        spec = self.source.spec
        self.replay = replayed_pass(
            self.classifier, self.store, spec, self.runtime, self.schedule.steps
        )
        before = self.outputs(self.inputs.first_pass)
        check_finite(before)
        class_probs = self.uncertainty.predictive(before.features, 1.0)
        self.shift = float(self.posterior.distances(before.features).mean())
        if self.plan.config.setting == "auto":
            self.decide_setting(before, class_probs)
        self.guidance = make_guidance(self.plan, self.inputs, self.runtime, self.uncertainty)
        labels = self.inputs.user_labels
        view = self.cluster_view(before)
        self.naming = self.name_images(view, class_probs, labels)
        # The user's labels settle names, so the source model's doubt is measured without them.
        source_naming = self.naming
        if labels is not None:
            source_naming = self.name_images(view, class_probs, None)
        self.source_doubt = share_in_doubt(source_naming)
        self.open_guard(before)
        self.context = self.make_context(before)
        if self.plan.method.online:
            self.stream = StreamOutputs(before.features, before.logits, self.runtime)
        self.enter_stage(0)
        return before

    def release(self) -> None:
        """Free what was captured on a GPU."""
        self.loop.release()
        if self.replay is not None:
            self.replay.release()

    def train_and_decide(self, before: Outputs) -> tuple[Outputs, GuardDecision]:
        """Train; the outputs of the model that is kept, and the guard's decision."""
        after = self.train(before, self.resume())
        self.evidence = LabelEvidence()
        collapsed = self.guard.collapsed
        if collapsed:
            self.classifier.load_state_dict(self.guard.state)
            self.stream = None  # it holds predictions of the model that collapsed
            after = self.outputs()
        self.look_again(before, after)
        decision = self.guard.finish()
        self.decisions = (self.predictions(before), self.predictions(after))
        self.adapted_outputs = after
        epoch = self.guard.judged.epoch if self.guard.enabled else self.guard.latest
        if epoch > 0:
            self.evidence = LabelEvidence.of(
                *self.decisions, self.inputs.comparison_labels, self.naming
            )
            if self.guard.enabled:
                decision = self.evidence.follow(decision, epoch)
        if decision.epoch == 0:
            self.classifier.load_state_dict(self.source_state)
            after = before
        return after, decision

    def decide_setting(self, before: Outputs, class_probs: Tensor) -> None:
        """Decide which classes the target has, by the N × K predictive of the source model and the witness."""
        count = len(self.store)
        classes = len(self.source.classes)
        reason = ""
        if not self.plan.method.adapts:
            reason = f"{self.plan.method.name} trains nothing; classes not estimated"
        elif count <= classes:
            reason = f"{count} images are too few to tell which of {classes} classes occur"
        self.target_classes = {"setting": "closed", "reason": reason}
        if not reason:
            witness = self.inputs.witness
            labels = self.inputs.user_labels
            if labels is not None:
                class_probs = labels.pinned(class_probs)
            self.target_classes = estimate_target_classes(
                before.features if witness is None else witness,
                class_probs.clamp_min(1e-12).log(),
                self.second_view(before),
                witnessed=witness is not None,
            ).to_dict()
            if labels is not None and len(labels.new_rows):
                self.target_classes = with_new_classes(self.target_classes, labels)
        setting = str(self.target_classes["setting"])
        log.info("setting %s: %s", setting, self.target_classes["reason"])
        self.set_plan(self.plan.with_setting(setting))

    def cluster_view(self, before: Outputs) -> View | None:
        """The view in which the target is clustered; None if there is nothing to cluster."""
        if min(before.logits.shape) < 2:
            return None
        witness = self.inputs.witness
        return View.of(before.features if witness is None else witness)

    def name_images(
        self, view: View | None, class_probs: Tensor, labels: UserLabels | None
    ) -> TargetNaming | None:
        """Clusters of the target, named by the source model's N × K predictive and the user."""
        if view is None:
            return None
        return name_target(view, class_probs, self.plan.config.setting, labels)

    def second_view(self, before: Outputs) -> Callable[[Tensor], Tensor] | None:
        """Other features of the images at some positions, for the search for new classes; None if there are none."""
        if self.inputs.witness is not None:
            return lambda rows: before.features[rows]
        if self.judge_name == IMAGES:
            images = self.inputs.images
            return lambda rows: thumbnails(images, rows.cpu(), self.runtime, most=16)
        if self.store.is_features:
            features = self.store.values
            return lambda rows: features[rows.to(features.device)].to(rows.device)
        return None

    def open_guard(self, before: Outputs) -> None:
        """Show the guard the source model's predictions, and the features that it judges by."""
        rows = guard_rows(len(self.store))
        if self.inputs.judge is not None:
            rows = first_rows(len(self.store), len(self.source.classes))
        self.show_guard(before, rows, self.judge_features(rows))

    def judge_features(self, rows: Tensor) -> Tensor | None:
        """n × F: images as the judge sees them; None if it has no view of its own."""
        images = self.inputs.images
        judge = self.inputs.judge
        if judge is None:
            is_pixels = self.judge_name == IMAGES
            return thumbnails(images, rows, self.runtime) if is_pixels else None
        pictures = self.inputs.pictures(rows, self.runtime)
        with network_name("judge"):
            features = judge.features_at(judge.spec, pictures, self.judge_runtime)
        # Images of a second look go through the same engine.
        self.judge_runtime = dataclasses.replace(self.runtime, engine=features.engine)
        return features.values

    def show_guard(self, before: Outputs, rows: Tensor, features: Tensor | None) -> None:
        self.judge_view = features
        draws = self.posterior.draws(
            before.features[rows.to(before.features.device)], GUARD_DRAWS
        )
        names = self.source.classes
        classes = len(names) + self.guidance.rejects
        labels = self.predictions(before)
        labels_of_draws = draws.argmax(dim=2)
        self.guard.open(before, labels, labels_of_draws, features, classes, names, rows)

    def look_again(self, before: Outputs, after: Outputs) -> None:
        """If the first images leave the decision open, the judge looks at the others too. `after` are the outputs of
        the model that is judged."""
        first = self.guard.rows.cpu()
        rows = guard_rows(len(self.store))
        if not self.guard.enabled or len(first) == len(rows) or not self.guard.is_open:
            return
        is_new = ~torch.isin(rows, first)
        others = self.judge_features(rows[is_new])
        assert others is not None
        assert self.judge_view is not None
        features = others.new_empty(len(rows), others.shape[1])
        features[is_new] = others
        features[~is_new] = self.judge_view
        epoch = self.guard.judged.epoch
        collapses = [score for score in self.guard.history if score.collapse]
        self.guard = Guard(enabled=True)
        self.show_guard(before, rows, features)
        self.guard.consider(0, before, self.predictions(before), {})
        state = self.classifier.state_dict()
        self.guard.consider(epoch, after, self.predictions(after), state)
        self.guard.history += collapses

    def make_context(self, before: Outputs) -> Context:
        return Context(
            len(self.store),
            len(self.source.classes),
            self.runtime,
            self.schedule.epochs,
            self.plan.config.seed,
            self.guidance,
            before,
            self.inputs.witness,
            self.naming,
            self.uncertainty,
            self.inputs.user_labels,
        )

    def enter_stage(self, number: int) -> None:
        """Begin a stage: its terms, and a loop with an optimiser of its own."""
        if self.stage_number == number:
            return
        if self.stage_number >= 0:
            self.loop.release()
        self.stage_number = number
        stage = self.schedule.stages[number]
        context = dataclasses.replace(self.context, epochs=stage.epochs)
        self.terms = [term.started(context) for term in self.schedule.terms[number]]
        spec = self.source.spec
        config = self.plan.config
        views = dataclasses.replace(spec, augment=config.augment or spec.augment)
        feeder = Feeder(self.store, views, config.seed, self.runtime)
        progress = None
        if self.progress is not None:
            progress = self.schedule.run_progress(self.progress, number)
        labels = self.inputs.user_labels
        self.loop = Loop(
            self.classifier,
            feeder,
            stage,
            self.terms,
            self.runtime,
            beside=labels.rows if labels else None,
            progress=progress,
            stream=self.stream,
        )

    def train(self, before: Outputs, first: int) -> Outputs:
        """Epoch by epoch, until the end or a collapse. Epoch 0 is the source model: its figures are recorded before any
        step. Returns the last pass over the target."""
        epochs = self.schedule.epochs
        for epoch in range(first, epochs + 1):
            outputs = before if epoch == 0 else self.outputs()
            if outputs.is_finite:
                self.guidance.refresh(self.with_user_labels(outputs), epoch, epochs)
            self.score_epoch(epoch, outputs, before)
            settles_now = epoch == 0 and settles_first(self.plan)
            if self.guard.collapsed or (epoch == epochs and not settles_now):
                break
            if settles_now:
                self.loop.settle()
                outputs = self.outputs()
                self.guidance.refresh(self.with_user_labels(outputs))
            if epoch < epochs:
                self.train_epoch(epoch, outputs)
        return outputs

    def train_epoch(self, epoch: int, outputs: Outputs) -> None:
        number, stage_epoch = self.schedule.stage_at(epoch)
        self.enter_stage(number)
        outputs = self.with_user_labels(outputs)
        for term in self.terms:
            term.refresh(outputs)
            term.begin_epoch(stage_epoch)
        if self.terms:
            self.epoch_figures = self.loop.train_epoch(stage_epoch)
        else:
            self.loop.settle(SETTLED_BATCHES if self.stream is None else 1)
        for term in self.terms:
            term.end_epoch(stage_epoch, self.classifier)

    def with_user_labels(self, outputs: Outputs) -> Outputs:
        """The outputs of a pass with the user's labels in place of predictions."""
        labels = self.inputs.user_labels
        return outputs if labels is None else labels.replace_predictions(outputs)

    def outputs(self, first_pass: tuple[Tensor, Tensor] | None = None) -> Outputs:
        """One pass over the target, test views, BatchNorm in test mode; of a stream, the training pass. Terms and guard
        share it. `first_pass` are its features and logits, if they are there already."""
        if self.stream is not None:
            features, logits = self.stream.outputs()
        else:
            features, logits = first_pass or forward_store(
                self.classifier,
                self.store,
                self.source.spec,
                self.runtime,
                replay=self.replay,
            )
        temperature = self.plan.method.certainty.temperature
        draws = self.plan.config.samples
        probs, information = self.uncertainty.moments(features, temperature, draws)
        return Outputs(features, logits, logits.softmax(dim=1), probs, information)

    def predictions(self, outputs: Outputs) -> Tensor:
        """N predicted classes; in open set K stands for unknown."""
        if self.guidance.rejects:
            return self.plan.method.split.labels(outputs)
        return outputs.logits.argmax(dim=1)

    def score_epoch(self, epoch: int, outputs: Outputs, before: Outputs) -> None:
        """Show this iterate to the guard, and record it."""
        validators = validate(outputs.probs, before.probs, outputs.posterior_probs)
        if self.guidance.separates:
            validators["information_maximization"] = self.guidance.known_information(
                outputs.probs
            )
        predictions = outputs.logits.argmax(dim=1)
        self.path.append(predictions.to(torch.int32))
        self.guard.loss_finite = all(map(math.isfinite, self.epoch_figures.values()))
        labels = self.predictions(outputs) if outputs.is_finite else predictions
        score = self.guard.consider(epoch, outputs, labels, self.classifier.state_dict())
        validators |= {
            "structure": score.structure[1],
            "fit": score.fit[1],
            "gain": score.gain.value,
            "names": score.names,
            "accuracy": score.accuracy[1],
        }
        self.record(epoch, validators)

    def record(self, epoch: int, validators: dict[str, float]) -> None:
        """Write the figures of an epoch to the log and the curves, and save a checkpoint."""
        figures: dict[str, Any] = {
            "epoch": epoch,
            **self.epoch_figures,
            "weight_mean": float(self.guidance.weights.mean()),
            "validators": validators,
        }
        self.records.append(figures)
        if epoch > 0:
            self.loop.tell(epoch - self.schedule.epochs_before(self.stage_number), figures)
        if self.folder is None or self.runtime.rank:
            return
        self.folder.log("epoch", **figures)
        numbers = {f"adapt/{k}": v for k, v in figures.items() if isinstance(v, float)}
        self.folder.scalars(numbers, epoch)
        self.folder.scalars({f"validators/{k}": v for k, v in validators.items()}, epoch)
        self.folder.histogram("adapt/weights", self.guidance.weights, epoch)
        if 0 < epoch < self.schedule.epochs and not self.guard.collapsed:
            self.save_checkpoint(epoch)

    def save_checkpoint(self, epoch: int) -> None:
        assert self.folder is not None
        tensors = {**self.loop.tensors(), "guidance.weights": self.guidance.weights}
        for number, term in enumerate(self.terms):
            for name, value in term.tensors().items():
                tensors[f"term.{number}.{name}"] = value
        state = {"guard": self.guard.to_dict(), "records": self.records}
        self.folder.save_checkpoint(epoch, tensors, state)

    def resume(self) -> int:
        """Continue from the newest checkpoint of the run folder; returns the epoch to start with."""
        checkpoint = load_checkpoint(self.folder, self.runtime)
        if checkpoint is None:
            return 0
        assert self.folder is not None
        with self.folder.restoring():
            return self.restore(*checkpoint)

    def restore(self, epoch: int, tensors: dict[str, Tensor], state: dict[str, Any]) -> int:
        self.guard.restore(state["guard"], with_prefix(tensors, "model."))
        must_fit(self.guard.state, self.classifier)
        number, stage_epoch = self.schedule.stage_at(epoch)
        self.enter_stage(number)
        weights = tensors["guidance.weights"]
        if stage_epoch == 0:  # a new stage has no momentum, and terms of its own
            parts = ("model.", "stream.")
            tensors = {k: v for k, v in tensors.items() if k.startswith(parts)}
        self.guidance.weights.copy_(weights)
        self.loop.restore(tensors)
        if stage_epoch:
            for index, term in enumerate(self.terms):
                term.restore(with_prefix(tensors, f"term.{index}."))
        *self.records, last = checked_records(state["records"])
        ignored = ("epoch", "validators", "weight_mean")
        self.epoch_figures = {str(k): float(v) for k, v in last.items() if k not in ignored}
        return epoch

    def make_model(
        self,
        network: Classifier,
        decision: GuardDecision,
        before: Outputs,
        after: Outputs,
        seconds: float,
    ) -> AdaptedModel:
        estimate = self.estimate(decision.epoch)
        history = self.history(decision, seconds, estimate)
        temperature = self.confidence_temperature(decision, after, estimate)
        after = dataclasses.replace(after, probs=(after.logits / temperature).softmax(dim=1))
        if self.folder is not None and self.runtime.rank == 0:
            epochs = self.schedule.epochs
            self.folder.log("kept", epoch=decision.epoch, of=epochs, reason=decision.reason)
        unreadable = self.store.unreadable
        passes = Passes(
            before,
            after,
            self.store.positions,
            unreadable,
            tuple(self.path),
            naming=self.naming,
            decisions=self.decisions,
        )
        return AdaptedModel(
            network,
            self.posterior,
            self.source.classes,
            self.source.spec,
            self.source.architecture,
            summary_of(history),
            self.plan.method.certainty.temperature,
            self.plan.config.samples,
            temperature,
            self.uncertainty,
            self.plan.method.name,
            self.unknown_rule(after),
            history,
            passes,
        )

    def unknown_rule(self, outputs: Outputs) -> UnknownRule | None:
        """The rule of a model with these outputs; None in closed set."""
        split = self.plan.method.split
        return split.rule(outputs, split.decision) if self.guidance.rejects else None

    def estimate(self, epoch: int) -> AccuracyEstimate:
        """Accuracy of the source model and of the one after an epoch."""
        return estimate_accuracy(
            self.guard.score_of(epoch),
            count=len(self.guard.rows),
            doubt=self.source_doubt,
            pretrained=self.source.pretrained,
            shift=self.shift,
            rejects=self.guidance.rejects,
        )

    def confidence_temperature(
        self,
        decision: GuardDecision,
        after: Outputs,
        estimate: AccuracyEstimate,
    ) -> float:
        """T of the model that is kept: its mean confidence is its accuracy, estimated and measured. Without the guard,
        the last iterate stays as it is."""
        accuracy = believed_accuracy(estimate)
        if not self.plan.method.adapts or not self.plan.config.guard or accuracy is None:
            return 1.0
        comparison = self.evidence.comparison
        if comparison is not None:
            measured = comparison.adapted if decision.epoch else comparison.source
            accuracy = with_labels(accuracy, measured)
        return matching_temperature(after.logits, accuracy)

    def history(
        self,
        decision: GuardDecision,
        seconds: float,
        estimate: AccuracyEstimate,
    ) -> dict[str, Any]:
        """Entries of metrics.json that need no labels."""
        config = self.plan.config
        validators = {r["epoch"]: r["validators"] for r in self.records}
        doubt = share_in_doubt(self.naming)
        verdict = verdict_of(
            self.guard.score_of(decision.candidate),
            self.estimate(decision.candidate),
            self.evidence.comparison,
            classes=len(self.source.classes),
            in_use="adapted" if decision.epoch else "source",
        )
        return {
            "method": config.method,
            "epochs": self.schedule.epochs,
            "kept_epoch": decision.epoch,
            "tune": {"tune": config.tune, "reason": self.plan.tune_reason},
            "classes": self.target_classes,
            "setting": config.setting,
            "witness": self.inputs.witness_record,
            "doubt": None if doubt is None else round(doubt, 4),
            "shift": round(self.shift, 3),
            "verdict": verdict.to_dict(),
            "labelled": self.evidence.to_dict(),
            "guard": {
                "on": config.guard,
                **dataclasses.asdict(decision),
                "judge": self.judge_name,
                "images": len(self.guard.rows),
            },
            "estimated_accuracy": estimate.to_dict(),
            "validators": validators.get(decision.epoch, {}),
            "prior_precision": self.posterior.prior_precision,
            "uncertainty": self.uncertainty.kind,
            "settings": self.plan.settings(),
            "seconds": round(seconds, 3),
            "records": self.records,
        }

    def alternative(self, model: AdaptedModel, decision: GuardDecision) -> AdaptedModel:
        """The adapted model, beside the source model that stays in use because the guard cannot tell."""
        network = copy.deepcopy(model.classifier)
        network.load_state_dict({**network.state_dict(), **self.guard.state})
        trial = dataclasses.replace(decision, epoch=decision.candidate)
        estimate = self.estimate(trial.epoch)
        outputs = self.adapted_outputs
        temperature = self.confidence_temperature(trial, outputs, estimate)
        probs = (outputs.logits / temperature).softmax(dim=1)
        figures = {"kept_epoch": trial.epoch, "estimated_accuracy": estimate.to_dict()}
        return dataclasses.replace(
            model,
            classifier=network,
            summary={**model.summary, **figures},
            confidence_temperature=temperature,
            unknown_rule=self.unknown_rule(dataclasses.replace(outputs, probs=probs)),
            passes=None,
        )


def summary_of(history: dict[str, Any]) -> dict[str, Any]:
    """Record of the run in the model folder."""
    summary = {name: value for name, value in history.items() if name not in NOT_IN_SUMMARY}
    return {**summary, "verdict": history["verdict"]["sentence"]}


def share_in_doubt(naming: TargetNaming | None) -> float | None:
    """Share of the images whose cluster may have a wrong name; None if there are no clusters."""
    return None if naming is None else naming.clusters.share_in_doubt


def name_of_judge(inputs: Inputs) -> str:
    """The features that the guard judges by, in words."""
    if inputs.judge is not None:
        return inputs.judge.name
    from_scratch = not inputs.source.pretrained and not inputs.images.is_features
    return IMAGES if from_scratch else "source model"


def separation_weight(plan: Plan) -> float:
    """Weight of the term that drives known and unknown images apart; 0 if no class can be new."""
    if plan.config.setting not in REJECTING:
        return 0.0
    terms = [term for term in plan.method.terms if isinstance(term, Separation)]
    return sum(term.separation or 0.0 for term in terms)


def settles_first(plan: Plan) -> bool:
    """Whether BatchNorm takes the target's statistics before the first epoch."""
    method = plan.method
    separates = separation_weight(plan) > 0 and not method.needs_witness
    return separates or (method.settles and bool(method.terms))


def with_new_classes(estimate: dict[str, object], labels: UserLabels) -> dict[str, object]:
    """The estimate of the classes, when the user says that some images are of none of the model's."""
    settings = {"closed": "open", "partial": "universal"}
    setting = str(estimate["setting"])
    new = f"you say that {len(labels.new_rows)} images are of none of the classes"
    return {
        **estimate,
        "setting": settings.get(setting, setting),
        "reason": f"{estimate['reason']}; {new}",
    }


def make_guidance(
    plan: Plan, inputs: Inputs, runtime: Runtime, uncertainty: Uncertainty
) -> Guidance:
    """The tables that guide an epoch."""
    return Guidance(
        len(inputs.store),
        plan.method.certainty,
        plan.method.split,
        plan.config.setting,
        runtime,
        uncertainty,
        plan.config.samples,
        separates=separation_weight(plan) > 0,
        new_rows=None if inputs.user_labels is None else inputs.user_labels.new_rows,
    )


def choose_posterior(posterior: KroneckerPosterior, config: AdaptConfig) -> KroneckerPosterior:
    """The stored posterior, or the same factors under another prior, damping or curvature."""
    changes = (config.prior, config.damping, config.curvature)
    if changes == (None, None, None):
        return posterior
    return posterior.with_prior(
        posterior.prior_precision if config.prior is None else config.prior,
        damping=config.damping,
        curvature=config.curvature,
        weight_decay=config.weight_decay,
    )


def with_prefix(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Tensors whose name starts with `prefix`, by the rest of their name."""
    return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
