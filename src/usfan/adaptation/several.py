"""Several sources: each model is adapted to the target on its own, then they are mixed.

    source model 1 … S, trained apart → adapt each → weights from what they say of the target → one mixture

Source data never meet. Labels that only compare models judge the mixture. `maths.source_mixture` mixes the
outputs of the members on the target, before and after.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from usfan.adaptation.estimate import (
    AccuracyEstimate,
    believed_accuracy,
    estimate_accuracy,
    with_labels,
)
from usfan.adaptation.guard import Guard, guard_rows
from usfan.adaptation.guidance import REJECTING, UNEVEN
from usfan.adaptation.label_evidence import LabelEvidence
from usfan.adaptation.methods import Method
from usfan.adaptation.naming import name_target
from usfan.adaptation.target_classes import setting_of
from usfan.adaptation.thresholds import GUARD_DRAWS
from usfan.adaptation.verdict import verdict_of
from usfan.config import AdaptConfig
from usfan.data.store import Store
from usfan.engine.passes import forward_store
from usfan.engine.runtime import Runtime
from usfan.errors import DataError
from usfan.maths.calibration import matching_temperature
from usfan.maths.names import TargetNaming
from usfan.maths.outputs import Outputs
from usfan.maths.source_mixture import evidence_shares
from usfan.maths.validators import validate
from usfan.store.model import AdaptedModel, MixtureModel, Passes, SourceModel


def passes_of(model: AdaptedModel) -> Passes:
    assert model.passes is not None
    return model.passes


def with_passes(
    source: SourceModel, model: AdaptedModel, store: Store, runtime: Runtime
) -> AdaptedModel:
    """A member that was adapted earlier and loaded from its folder, with its outputs for the target."""
    outputs = []
    for member in (source, model):
        forward = forward_store(
            member.to(runtime.device).classifier, store, member.spec, runtime
        )
        outputs.append(member.outputs_of(*forward))
    before, after = outputs
    passes = Passes(before, after, store.positions, store.unreadable)
    return dataclasses.replace(model, passes=passes)


def mix_adapted(
    members: Sequence[AdaptedModel],
    config: AdaptConfig,
    method: Method,
    sources: Sequence[str] = (),
    comparison_labels: Tensor | None = None,
) -> MixtureModel:
    """The mixture of models that were adapted to the same images. `sources` are their names for the record,
    `comparison_labels` N labels that only compare models."""
    passes = [passes_of(model) for model in members]
    first = passes[0]
    if any(not torch.equal(one.positions, first.positions) for one in passes):
        raise DataError("the models of a mixture must have seen the same images")
    befores = [one.before for one in passes]
    shares = evidence_shares(befores).tolist()
    mixture = MixtureModel.of(members, shares, method=config.method)
    before = mixture.mix(befores)
    after = mixture.mix([one.after for one in passes])
    if any(model.unknown_rule is not None for model in members):
        mixture.unknown_rule = method.split.rule(after, method.split.decision)
    path = (before.logits.argmax(dim=1), after.logits.argmax(dim=1))
    decisions = path
    if mixture.unknown_rule is not None:
        decisions = (method.split.labels(before), method.split.labels(after))
    mixture.passes = dataclasses.replace(
        first,
        before=before,
        after=after,
        path=path,
        labelled=None,
        naming=joint_naming(mixture, members, before),
        decisions=decisions,
    )
    guard = guard_mixture(mixture, members, decisions)
    evidence = LabelEvidence.of(*decisions, comparison_labels, None)
    names = sources or [f"source {number}" for number in range(1, len(members) + 1)]
    naming = mixture.passes.naming
    doubt = None if naming is None else naming.clusters.share_in_doubt
    score = guard.history[-1]
    estimate = estimate_accuracy(
        score,
        count=len(guard.rows),
        doubt=doubt,
        pretrained=all(model.pretrained for model in members),
        rejects=mixture.unknown_rule is not None,
    )
    mixture.history = history_of(
        mixture, members, config, names, guard, estimate, doubt, evidence
    )
    believed = believed_accuracy(estimate)
    if method.adapts and config.guard and believed is not None:
        if evidence.comparison is not None:
            believed = with_labels(believed, evidence.comparison.adapted)
        mixture.confidence_temperature = matching_temperature(after.logits, believed)
        after = dataclasses.replace(after, probs=mixture.rescale(after.logits))
        mixture.passes = dataclasses.replace(mixture.passes, after=after)
    # no path: folders are shared
    mixture.summary = {name: mixture.history[name] for name in ("method", "epochs", "seconds")}
    mixture.summary["verdict"] = mixture.history["verdict"]["sentence"]
    return mixture


def joint_naming(
    mixture: MixtureModel, members: Sequence[AdaptedModel], before: Outputs
) -> TargetNaming | None:
    """Clusters of the target in the view of the first member that has one, named by the mixture."""
    namings = [naming for model in members if (naming := passes_of(model).naming)]
    if not namings:
        return None
    first = namings[0]
    return name_target(first.view, before.posterior_probs, first.setting)


def guard_mixture(
    mixture: MixtureModel, members: Sequence[AdaptedModel], labels: tuple[Tensor, Tensor]
) -> Guard:
    """The guard's figures of the mixture, by its N predictions before and after: it scores, and decides nothing."""
    passes = passes_of(mixture)
    rejects = mixture.unknown_rule is not None
    rows = guard_rows(len(labels[0])).to(labels[0].device)
    draws = []
    for number, model in enumerate(members):
        heads = model.posterior.draws(passes_of(model).before.features[rows], GUARD_DRAWS)
        draws.append(heads[..., mixture.order(number).to(heads.device)].argmax(dim=2))
    classes = mixture.classes
    guard = Guard(enabled=False)
    guard.open(
        passes.before, labels[0], torch.cat(draws, dim=1), None, len(classes) + rejects, classes
    )
    guard.consider(1, passes.after, labels[1], {})
    return guard


def history_of(
    mixture: MixtureModel,
    members: Sequence[AdaptedModel],
    config: AdaptConfig,
    names: Sequence[str],
    guard: Guard,
    estimate: AccuracyEstimate,
    doubt: float | None,
    evidence: LabelEvidence,
) -> dict[str, Any]:
    """The figures for metrics.json: the guard's decision for each member, and the figures of any run for the
    mixture."""
    passes = passes_of(mixture)
    source_probs = passes.before.probs
    records = []
    for epoch, outputs in enumerate((passes.before, passes.after)):
        validators = validate(outputs.probs, source_probs, outputs.posterior_probs)
        records.append({"epoch": epoch, "validators": validators})
    sources = []
    reasons = []
    for name, share, model in zip(names, mixture.shares, members, strict=True):
        decision = model.history.get("guard") or {}
        reason = decision.get("reason")
        reasons.append(f"{name}: {reason or 'adapted before'}")
        sources.append(
            {
                "source": name,
                "share": round(share, 4),
                "kept": decision.get("kept"),
                "reason": reason,
            }
        )
    adapted = any(model.summary.get("kept_epoch", 1) for model in members)
    choice = "adapted" if adapted else "source"
    classes = joint_setting(names, members)
    settings = dataclasses.asdict(config)
    if classes:
        settings["setting"] = classes["setting"]
    count = len(mixture.classes)
    verdict = verdict_of(
        guard.history[-1], estimate, evidence.comparison, classes=count, in_use=choice
    )
    return {
        "method": config.method,
        "epochs": config.epochs,
        "kept_epoch": int(adapted),
        "sources": sources,
        "classes": classes,
        "setting": naming_setting(mixture, config),
        "guard": {"on": config.guard, "kept": choice, "reason": "; ".join(reasons)},
        "doubt": None if doubt is None else round(doubt, 4),
        "verdict": verdict.to_dict(),
        "labelled": evidence.to_dict(),
        "estimated_accuracy": estimate.to_dict(),
        "validators": validators,
        "settings": settings,
        "seconds": round(sum(float(model.history.get("seconds", 0.0)) for model in members), 3),
        "records": records,
    }


def naming_setting(mixture: MixtureModel, config: AdaptConfig) -> str:
    """The setting by which clusters were named."""
    naming = passes_of(mixture).naming
    return config.setting if naming is None else naming.setting


def joint_setting(
    names: Sequence[str], members: Sequence[AdaptedModel]
) -> dict[str, str] | None:
    """The setting of the mixture if the members estimated theirs: classes may be missing, or new, if one of them says
    so."""
    settings = []
    reasons = []
    for name, model in zip(names, members, strict=True):
        estimate = model.history.get("classes") or model.summary.get("classes")
        if not isinstance(estimate, dict):
            return None
        setting = str(estimate["setting"])
        settings.append(setting)
        reasons.append(f"{name}: {setting}, {estimate['reason']}")
    uneven = not set(settings).isdisjoint(UNEVEN)
    rejects = not set(settings).isdisjoint(REJECTING)
    return {"setting": setting_of(uneven, rejects), "reason": "; ".join(reasons)}
