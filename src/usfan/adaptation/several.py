"""Several sources: each model is adapted to the target on its own, then they are mixed.

    source model 1 … S, trained apart → adapt each → weights from what they say of the target → one mixture

Source data never meet, and labels are not used. The mixture says of the target what `scoring.mixing` makes of what its
members say before and after.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from usfan.adaptation.guard import DRAWS, Guard, estimated_accuracy, looked_at
from usfan.adaptation.guidance import REJECTING, UNEVEN
from usfan.adaptation.methods import Method
from usfan.artifacts.model import AdaptedModel, MixtureModel, Passes, SourceModel
from usfan.compute.passes import forward_store
from usfan.compute.runtime import Runtime
from usfan.config import AdaptConfig
from usfan.data.cache import PixelStore
from usfan.errors import DataError
from usfan.scoring.mixing import choose_shares, reordered
from usfan.scoring.outputs import Outputs
from usfan.scoring.validators import validate


def with_passes(source: SourceModel, model: AdaptedModel, store: PixelStore, runtime: Runtime) -> AdaptedModel:
    """A member that was adapted earlier and loaded from its folder, with what it says of the target."""
    before, after = (
        one.to(runtime.device).outputs_of(*forward_store(one.classifier, store, one.spec, runtime))
        for one in (source, model)
    )
    return dataclasses.replace(model, passes=Passes(before, after, store.kept, tuple(store.skipped)))


def mix_adapted(
    members: Sequence[AdaptedModel], config: AdaptConfig, method: Method, sources: Sequence[str] = ()
) -> MixtureModel:
    """The mixture of models that were adapted to the same images. `sources` are their names for the record."""
    passes = [model.passes for model in members if model.passes is not None]
    if len(passes) < len(members) or any(not torch.equal(one.kept, passes[0].kept) for one in passes):
        raise DataError("the models of a mixture must have seen the same images")
    mixture = MixtureModel.of(members, "mean", [1 / len(members)] * len(members), method=config.method)
    befores, afters = ([ordered(mixture, i, o) for i, o in enumerate(group)] for group in sides(passes))
    shares = choose_shares(config.mixing, befores, afters).tolist()
    mixture.mixing, mixture.shares = config.mixing, tuple(shares)
    before, after = (mixture.mix(group) for group in sides(passes))
    rejects = any(model.unknown_rule is not None for model in members)
    mixture.unknown_rule = method.split.rule(after, method.split.decision) if rejects else None
    path = (before.logits.argmax(dim=1), after.logits.argmax(dim=1))
    mixture.passes = dataclasses.replace(passes[0], before=before, after=after, path=path, given=None, without=None)
    labels = method.split.labels if rejects else lambda outputs: outputs.logits.argmax(dim=1)
    mixture.history = history_of(mixture, members, config, sources, (labels(before), labels(after)))
    mixture.summary = {k: mixture.history[k] for k in ("method", "epochs", "seconds")}  # no path: folders are shared
    return mixture


def sides(passes: Sequence[Passes]) -> tuple[list[Outputs], list[Outputs]]:
    return [one.before for one in passes], [one.after for one in passes]


def ordered(mixture: MixtureModel, number: int, outputs: Outputs) -> Outputs:
    """The outputs of a member in the mixture's order of the classes."""
    return reordered(outputs, mixture.order(number).to(outputs.logits.device))


def history_of(
    mixture: MixtureModel,
    members: Sequence[AdaptedModel],
    config: AdaptConfig,
    sources: Sequence[str],
    labels: tuple[Tensor, Tensor],
) -> dict[str, Any]:
    """What metrics.json says: of the members what was kept and why, of the mixture what any run says. `labels`: N each,
    before and after; K stands for unknown."""
    assert mixture.passes is not None
    before, after = mixture.passes.before, mixture.passes.after
    told = [
        {"source": name, "share": round(share, 4), **{k: (model.history.get("guard") or {}).get(k) for k in GUARD}}
        for name, share, model in zip(sources or numbers(members), mixture.shares, members, strict=True)
    ]
    guard = Guard(enabled=False)
    rows = looked_at(len(labels[0])).to(labels[0].device)
    draws = [
        class_numbers(model, mixture, model.posterior.draws(own.before.features[rows], DRAWS).argmax(dim=2))
        for model, own in ((m, m.passes) for m in members)
        if own is not None
    ]
    names, rejects = mixture.classes, mixture.unknown_rule is not None
    guard.open(before, labels[0], torch.cat(draws, dim=1), None, len(names) + rejects, names)
    guard.consider(1, after, labels[1], {})
    records = [
        {"epoch": epoch, "validators": validate(o.probs, source_probs=before.probs, posterior_probs=o.posterior_probs)}
        for epoch, o in enumerate((before, after))
    ]
    adapted = [model for model in members if model.history.get("kept_epoch", 1)]
    classes = joint_setting(sources or numbers(members), members)
    reason = "; ".join(f"{one['source']}: {one['reason'] or 'adapted before'}" for one in told)
    return {
        "method": config.method,
        "epochs": config.epochs,
        "kept_epoch": int(bool(adapted)),
        "sources": told,
        "mixing": config.mixing,
        "classes": classes,
        "guard": {"on": config.guard, "kept": "adapted" if adapted else "source", "reason": reason},
        "estimated_accuracy": estimated_accuracy(
            guard.history, kept=int(bool(adapted)), count=len(guard.rows), rejects=rejects
        ),
        "validators": records[1]["validators"],
        "settings": {**dataclasses.asdict(config), **({"setting": classes["setting"]} if classes else {})},
        "seconds": round(sum(float(model.history.get("seconds", 0.0)) for model in members), 3),
        "records": records,
    }


GUARD = ("kept", "reason")


def joint_setting(names: Sequence[str], members: Sequence[AdaptedModel]) -> dict[str, str] | None:
    """What the members found out about the target's classes, if they looked: the mixture expects whatever one of them
    does."""
    found = [model.history.get("classes") or model.summary.get("classes") for model in members]
    if not all(isinstance(one, dict) for one in found):
        return None
    settings = [str(one["setting"]) for one in found if one]
    uneven, rejects = (any(one in kind for one in settings) for kind in (UNEVEN, REJECTING))
    joint = {(0, 0): "closed", (1, 0): "partial", (0, 1): "open", (1, 1): "universal"}[int(uneven), int(rejects)]
    told = (f"{name}: {one['setting']}, {one['reason']}" for name, one in zip(names, found, strict=True) if one)
    return {"setting": joint, "reason": "; ".join(told)}


def numbers(members: Sequence[AdaptedModel]) -> list[str]:
    return [f"source {number}" for number in range(1, len(members) + 1)]


def class_numbers(model: SourceModel, mixture: MixtureModel, labels: torch.Tensor) -> torch.Tensor:
    """Numbers of a member's classes as those of the mixture."""
    place = {name: number for number, name in enumerate(mixture.classes)}
    return torch.tensor([place[name] for name in model.classes], device=labels.device)[labels]
