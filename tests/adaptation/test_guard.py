"""The guard: a pure decision from the history of a run, and runs in which it has to decide."""

import dataclasses

import numpy as np
import pytest
import torch

import usfan
from lookalikes import picture
from usfan.adaptation.estimate import estimate_accuracy
from usfan.adaptation.guard import (
    EpochScore,
    Guard,
    GuardDecision,
    choose_epoch,
    cluster_fits,
    first_rows,
    guard_rows,
    neighbourhoods,
)
from usfan.adaptation.witness import Witness, thumbnails
from usfan.config import RuntimeConfig
from usfan.data.store import Store
from usfan.engine.runtime import start_runtime
from usfan.errors import UsfanError
from usfan.maths.agreement import Interval
from usfan.maths.neighbours import nearest_neighbours
from usfan.maths.outputs import Outputs
from usfan.models.backbones import create_backbone, weights_hash
from usfan.store.run_folder import RunFolder

CLASSES = ("a", "b", "c", "d")
TINY = {"epochs": 3, "batch_size": 8, "progress": False}


def look(
    gain=0.2, *, epoch=2, changed=0.3, names=0.8, collapse=None, structure=None, accuracy=None
) -> EpochScore:
    interval = Interval(gain, gain - 0.05, gain + 0.05)
    after = (0.4, 0.4 + gain)
    return EpochScore(
        epoch,
        changed,
        interval,
        names,
        structure or after,
        (0.5, 0.7),
        accuracy or after,
        collapse,
    )


START = look(0, epoch=0, changed=0.0)


def decide(*looks: EpochScore):
    return choose_epoch([START, *looks])


def test_a_certain_gain_is_kept():
    kept = decide(look())
    assert (kept.kept, kept.epoch, kept.candidate) == ("adapted", 2, 2)
    assert "40% before, 60% after" in kept.reason
    assert "fit to their clusters 50% before, 70% after" in kept.reason


def test_a_loss_of_structure_keeps_the_source_model():
    kept = decide(look(-0.1))
    assert (kept.kept, kept.epoch, kept.candidate) == ("source", 0, 2)
    nothing = dataclasses.replace(look(-0.1), structure=(0.0, -0.004))
    assert "0% before, 0% after" in decide(nothing).reason


def test_a_gain_that_is_not_certain_is_undecided():
    kept = decide(look(0.03))
    assert (kept.kept, kept.epoch) == ("undecided", 0)
    assert "cannot tell" in kept.reason


def test_structure_that_rises_while_names_are_doubted_keeps_the_source_model():
    kept = decide(look(-0.05, names=0.1, structure=(0.9, 0.95)))
    assert kept.kept == "source"
    assert "95% after (corrected for chance)" in kept.reason
    assert "; the source posterior finds 10% of the new predictions" in kept.reason


def test_nothing_changed():
    kept = decide(look(0, changed=0.0))
    assert (kept.kept, kept.reason) == ("adapted", "adapted model kept: no prediction changed")


def test_a_collapse_falls_back_to_the_last_good_epoch():
    kept = decide(look(epoch=1), look(epoch=2, collapse="one class swallowed the target"))
    assert (kept.kept, kept.epoch) == ("adapted", 1)
    assert (
        "collapsed at epoch 2 (one class swallowed the target); the model of epoch 1 is kept"
        in kept.reason
    )
    assert "adapted model kept" not in kept.reason
    kept = decide(look(epoch=1, collapse="the loss is not finite"))
    assert (kept.kept, kept.candidate) == ("source", 1)  # the verdict is of the collapsed model


def test_a_collapse_before_anything_changed_keeps_the_source_model():
    kept = decide(look(epoch=1, changed=0.0), look(epoch=2, collapse="the loss is not finite"))
    assert (kept.kept, kept.epoch) == ("source", 0)
    assert (
        kept.reason
        == "adaptation collapsed at epoch 2 (the loss is not finite); source model kept"
    )


def test_a_look_survives_json():
    import json

    assert EpochScore.from_dict(json.loads(json.dumps(dataclasses.asdict(look())))) == look()


def estimate(score: EpochScore, count: int = 10**6, *, doubt=0.0, **more) -> dict:
    settings = {"pretrained": True, **more}
    return estimate_accuracy(score, count=count, doubt=doubt, **settings).to_dict()


def test_estimated_accuracy_is_an_interval_in_percent():
    figures = estimate(look(structure=(0.8, 0.9), accuracy=(0.4, 0.95)))
    assert figures["before"]["value"] == pytest.approx(40)
    assert figures["after"]["value"] == pytest.approx(95)
    for when in ("before", "after"):
        share = figures[when]
        assert 0 <= share["low"] <= share["value"] <= share["high"] <= 100


FIRM = dataclasses.replace(START, structure=(0.95, 0.95), accuracy=(0.5, 0.5))


def ends(**more) -> tuple[float, float]:
    figures = estimate(more.pop("score", FIRM), **more)["before"]
    return figures["low"], figures["high"]


def width(**more) -> float:
    low, high = ends(**more)
    return high - low


def test_the_interval_is_wider_the_less_structure_the_model_follows_and_the_fewer_images():
    loose = dataclasses.replace(FIRM, structure=(0.5, 0.95))
    assert width(score=loose) > 2 * width()
    assert width(count=50) > 2 * width()


def test_doubt_about_names_lowers_only_the_lower_end():
    low, high = ends()
    doubtful_low, doubtful_high = ends(doubt=0.1)
    assert doubtful_high == high
    assert low - 10 < doubtful_low < low - 5


@pytest.mark.parametrize(
    ("figures", "why"),
    [
        ({"structure": 0.2}, "follow only 20 %"),
        ({"structure": 0.5, "pretrained": False}, "follow only 50 %"),
        ({"doubt": 0.3}, "30 % of the images are in doubt"),
        ({"doubt": None}, "too few images"),
        ({"count": 20}, "too few images"),
    ],
)
def test_accuracy_that_cannot_be_told(figures, why):
    structure = figures.pop("structure", 0.95)
    score = dataclasses.replace(FIRM, structure=(structure, 0.95))
    result = estimate(score, **figures)
    assert result["before"] is None
    assert result["after"] is None
    assert why in result["reason"]


def test_accuracy_that_cannot_be_told_has_bounds():
    possible = estimate(FIRM, doubt=0.4)["possible"]
    assert possible["before"] == pytest.approx({"low": 10, "high": 51.3}, abs=0.2)
    assert estimate(FIRM)["possible"] is None


def test_a_model_may_know_its_training_images_by_heart():
    assert ends(shift=1.0)[1] == 100
    assert ends(shift=1.2)[1] < 100


def test_the_estimate_says_what_new_classes_mean_for_it():
    assert estimate(START)["counts"] == "if no image is of a new class"
    assert "unknown as a class" in estimate(START, rejects=True)["counts"]


@pytest.mark.parametrize(
    ("setting", "counts"), [("open", "unknown as a class"), ("closed", "if no image is")]
)
def test_a_run_says_what_its_estimate_counts(source, setting, counts):
    history = usfan.adapt(source, squares(range(4), domain=3), setting=setting, **TINY).history
    assert counts in history["estimated_accuracy"]["counts"]


def opened(before: torch.Tensor, classes: int = 2) -> tuple[Guard, Outputs]:
    """A guard that looks at two clusters of 30 images; all drawn heads say what the source model does."""
    probs = torch.eye(2).repeat(30, 1)
    outputs = Outputs(probs, probs, probs, probs, probs[:, 0])
    guard = Guard(enabled=True)
    guard.open(outputs, before, before[:, None].expand(-1, 8), None, classes)
    return guard, outputs


def test_unknown_is_no_name():
    """In open set an image that is now judged unknown does not count against the names."""
    before = torch.arange(60) % 2
    guard, outputs = opened(before, 3)
    after = torch.where(torch.arange(60) < 20, 2, before)
    assert guard.consider(1, outputs, after, {}).names == 1
    assert guard.consider(2, outputs, 1 - before, {}).names == 0


def test_swapped_classes_are_as_neat_and_a_quarter_as_good():
    """Every prediction changed, no head drawn from the posterior gives one of them, and none fits its cluster."""
    before = torch.arange(60) % 2
    guard, outputs = opened(before)
    swapped = guard.consider(1, outputs, 1 - before, {})
    assert swapped.structure == (1, 1)
    assert swapped.fit == pytest.approx((1, 0), abs=1e-3)
    assert swapped.accuracy == pytest.approx((1, 0.25), abs=1e-3)
    assert swapped.gain.value == pytest.approx(-0.75, abs=1e-3)
    assert swapped.gain.high == pytest.approx(-0.75, abs=1e-3)


def test_fits_are_probabilities_and_unknown_has_the_clusters_without_a_name():
    """Four clusters in the plane; the source model names two, and is uncertain of the others."""
    generator = torch.Generator().manual_seed(0)
    cluster = torch.arange(200) % 4
    corners = torch.tensor([[4.0, 0, 0], [0, 4, 0], [-4, 0, 4], [0, -4, 4]])
    features = corners[cluster] + 0.3 * torch.randn(200, 3, generator=generator)
    probs = torch.tensor([[0.95, 0.05], [0.05, 0.95], [0.55, 0.45], [0.5, 0.5]])[cluster]
    near = nearest_neighbours(features, 10)[0]
    closed, opened_up = (cluster_fits(features, probs, near, classes) for classes in (2, 3))
    for fits in (closed, opened_up):
        assert torch.allclose(fits.sum(1), torch.ones(200), atol=1e-5)
        assert bool((fits >= 0).all())
    assert float((opened_up.argmax(1) == cluster.clamp_max(2)).double().mean()) > 0.95


def test_a_prediction_that_joins_its_cluster_is_a_gain_if_a_head_gives_it():
    right = torch.arange(60) % 2
    before = right.clone()
    before[:20] = 0
    guard, outputs = opened(before)
    doubted = guard.consider(1, outputs, right, {})
    guard.draws = right[:, None].expand(-1, 8)
    plain = guard.consider(2, outputs, right, {})
    assert plain.gain.low > 0
    assert plain.gain.value > doubted.gain.value
    assert (doubted.names, plain.names) == (0, 1)


@pytest.mark.parametrize("shape", [(1, 3), (5, 1)])
@pytest.mark.parametrize("more", [0, 1])
def test_one_image_or_one_class_has_no_clusters(shape, more):
    probs = torch.rand(shape).softmax(1)
    near = torch.zeros(shape[0], 1, dtype=torch.long)
    fits = cluster_fits(torch.rand(shape[0], 4), probs, near, shape[1] + more)
    assert torch.equal(fits[:, : shape[1]], probs)
    assert fits.shape[1] == shape[1] + more
    assert not fits[:, shape[1] :].any()


@pytest.mark.parametrize("classes", [2, 3])
def test_a_judge_that_is_not_finite_is_named(classes):
    guard, outputs = opened(torch.arange(60) % 2)
    images = torch.rand(60, 4)
    images[3, 1] = torch.nan
    with pytest.raises(UsfanError, match="the guard judges by are not finite"):
        guard.open(outputs, torch.arange(60) % 2, guard.draws, images, classes)


def test_the_posterior_is_named_if_its_doubts_decide():
    both = {"structure": (0.80, 0.79), "names": 0.2}
    doubted = dataclasses.replace(look(-0.05, **both), fit=(0.70, 0.76))
    assert (
        "the source posterior finds 20% of the new predictions plausible"
        in decide(doubted).reason
    )
    worse = dataclasses.replace(look(-0.05, structure=(0.0, 0.08), names=1.0), fit=(0.37, 0.2))
    assert "posterior" not in decide(worse).reason


def test_the_class_that_swallowed_the_target_is_named():
    probs = torch.eye(2).repeat(30, 1)
    outputs, all_one = (
        Outputs(p, p, p, p, p[:, 0]) for p in (probs, torch.eye(2)[:1].expand(60, 2))
    )
    guard = Guard(enabled=True)
    before = torch.arange(60) % 2
    guard.open(outputs, before, before[:, None].expand(-1, 8), None, 2, ("cat", "dog"))
    assert "cat" in guard.consider(1, all_one, torch.zeros(60, dtype=torch.long), {}).collapse


def squares(present: range, images: int = 30, domain: int = 0) -> usfan.ImageData:
    labels = np.tile(np.array(present), images)
    pixels = np.stack(
        [picture(int(label), domain, i, 28, grey=True) for i, label in enumerate(labels)]
    )
    return usfan.ImageData(pixels, labels=labels, classes=CLASSES, name="squares")


@pytest.fixture(scope="module")
def source() -> usfan.SourceModel:
    settings = {
        "backbone": "digits-cnn",
        "epochs": 12,
        "batch_size": 8,
        "bottleneck": 16,
        "progress": False,
    }
    return usfan.train_source(squares(range(4)), **settings)


def judged_run(source, monkeypatch, first: int, clear: float) -> dict:
    """History of a run in which another network judges by 120 images, `first` of them at the first look."""
    torch.manual_seed(1)
    backbone = create_backbone("test_resnet", "none")
    judge = Witness("another", backbone.module, backbone.spec, weights_hash(backbone.module))
    monkeypatch.setattr("usfan.adaptation.inputs.choose_judge", lambda *_: judge)
    monkeypatch.setattr("usfan.adaptation.guard.GUARD_FIRST_PER_CLASS", 1)
    monkeypatch.setattr("usfan.adaptation.guard.GUARD_FIRST_IMAGES", first)
    monkeypatch.setattr("usfan.adaptation.guard.GUARD_CLEAR", clear)
    return usfan.adapt(source, squares(range(4), domain=3), **TINY).history


def test_the_judge_looks_at_all_images_only_if_the_first_leave_it_open(source, monkeypatch):
    at_once = judged_run(source, monkeypatch, 120, 3.0)
    decided = judged_run(source, monkeypatch, 40, 0.0)
    left_open = judged_run(source, monkeypatch, 40, torch.inf)
    images = [history["guard"]["images"] for history in (at_once, decided, left_open)]
    assert images == [120, 40, 120]
    assert left_open["guard"] == at_once["guard"]
    assert left_open["estimated_accuracy"] == at_once["estimated_accuracy"]
    assert left_open["verdict"] == at_once["verdict"]


def test_many_classes_need_more_images_at_the_first_look():
    assert [len(first_rows(5_000, classes)) for classes in (2, 65, 345)] == [500, 650, 1_000]
    assert torch.isin(first_rows(5_000, 2), guard_rows(5_000)).all()


def test_images_judge_a_network_from_scratch():
    """Their pixels, at most 32 × 32, whatever the brightness: bright and dark squares of a kind are neighbours."""
    dark = torch.zeros(6, 1, 64, 64, dtype=torch.uint8)
    dark[:3, :, :32] = 100
    dark[3:, :, 32:] = 100
    store = Store(dark, torch.arange(6))
    images = thumbnails(
        store, torch.tensor([0, 2, 3, 5]), start_runtime(RuntimeConfig(device="cpu"))
    )
    assert images.shape == (4, 32 * 32)
    assert nearest_neighbours(images, 1)[0].flatten().tolist() == [1, 0, 3, 2]


def state(model) -> dict[str, torch.Tensor]:
    return model.classifier.state_dict()


def same(a, b) -> bool:
    return all(torch.equal(state(a)[k], state(b)[k]) for k in state(a))


@pytest.mark.parametrize("value", [0, 255], ids=["black", "white"])
def test_images_without_structure_do_not_move_the_model(source, value):
    blank = np.full((64, 28, 28), value, dtype=np.uint8)
    model = usfan.adapt(source, blank, **TINY)
    changed = model.passes.after.logits.argmax(1) != model.passes.before.logits.argmax(1)
    assert same(model, source) or float(changed.double().mean()) < 0.01


def test_noise_does_not_move_the_model(source):
    noise = np.random.default_rng(0).integers(0, 255, (64, 28, 28), dtype=np.uint8)
    model = usfan.adapt(source, noise, "shot", lr=0.1, **TINY)
    assert model.history["guard"]["kept"] != "adapted" or same(model, source)


def test_one_class_alone_is_not_torn_apart(source):
    data = squares(range(1), images=80)
    model = usfan.adapt(source, data, "shot", lr=0.05, **{**TINY, "epochs": 6})
    right = float((model.passes.after.logits.argmax(1) == 0).double().mean())
    before = float((model.passes.before.logits.argmax(1) == 0).double().mean())
    assert right >= before - 0.02


def test_what_metrics_say(source):
    history = usfan.adapt(source, squares(range(4), domain=3), **TINY).history
    assert history["guard"]["kept"] in ("adapted", "source", "undecided")
    assert history["guard"]["reason"]
    assert history["guard"]["judge"] == "the images themselves"
    names = {"before", "after", "counts", "reason", "possible"}
    assert set(history["estimated_accuracy"]) == names
    off = usfan.adapt(source, squares(range(4), domain=3), guard=False, **TINY).history
    assert (off["guard"]["kept"], off["kept_epoch"]) == ("adapted", 3)


def test_undecided_saves_both(source, tmp_path, monkeypatch):
    monkeypatch.setattr(
        "usfan.adaptation.guard.choose_epoch",
        lambda history: GuardDecision("undecided", 0, "?", 3),
    )
    run = tmp_path / "run"
    model = usfan.adapt(source, squares(range(4), domain=3), run=run, **TINY)
    assert same(model, source)
    kept = usfan.SourceModel.load(run)
    other = usfan.SourceModel.load(run / "adapted")
    assert same(kept, source)
    assert not same(other, source)


def test_a_run_interrupted_after_a_collapse_resumes_with_the_last_good_weights(
    source, tmp_path, monkeypatch
):
    """The checkpoint of the iterate that collapsed must not stand in for the one before it."""
    real = Guard.consider
    log = RunFolder.log

    def collapse_at_two(self, epoch, *given):
        reason = "it did" if epoch == 2 else None
        monkeypatch.setattr("usfan.adaptation.guard.collapse", lambda *_: reason)
        return real(self, epoch, *given)

    def stop(self, event, **values):
        log(self, event, **values)
        if event == "kept":
            raise KeyboardInterrupt

    monkeypatch.setattr(Guard, "consider", collapse_at_two)
    settings = {**TINY, "epochs": 4}
    keep = "usfan.adaptation.guard.choose_epoch"
    monkeypatch.setattr(
        keep, lambda history: GuardDecision("adapted", history[-2].epoch, "the last good one")
    )
    data = squares(range(4), domain=3)
    whole = usfan.adapt(source, data, run=tmp_path / "whole", **settings)
    assert whole.history["kept_epoch"] == 1
    monkeypatch.setattr(RunFolder, "log", stop)
    with pytest.raises(KeyboardInterrupt):
        usfan.adapt(source, data, run=tmp_path / "again", **settings)
    monkeypatch.setattr(RunFolder, "log", log)
    assert same(
        usfan.adapt(source, data, run=tmp_path / "again", resume=True, **settings), whole
    )


def test_neighbourhoods_fit_into_a_class():
    assert neighbourhoods(1000, 10) == (5, 31)  # √N
    assert neighbourhoods(498, 31) == (5, 16)  # a class
    assert neighbourhoods(60, 10) == (3, 6)
    assert neighbourhoods(8, 10) == (1, 1)
