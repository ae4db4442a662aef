"""Stage 2 through its one door: what it may see, that seeds repeat, what moves, and that a run can go on later."""

import inspect
import shutil
import weakref

import pytest
import torch
from spying import CLASSES, Trace, spied_method, squares, witness_of

import usfan
from usfan.adaptation.methods import METHODS
from usfan.adaptation.terms.term import Context
from usfan.config import AdaptConfig
from usfan.data.few_labels import few_labels
from usfan.data.store import Store
from usfan.engine.passes import engine_store
from usfan.engine.runtime import start_runtime
from usfan.engine.stepper import no_collection
from usfan.errors import ConfigError, DataError
from usfan.store.run_folder import RunFolder
from usfan.workflow import adapt_model as adapt

TINY = {"epochs": 2, "batch_size": 8}


def state(model) -> dict[str, torch.Tensor]:
    return model.classifier.state_dict()


def same(a, b) -> bool:
    return all(torch.equal(state(a)[k], state(b)[k]) for k in state(a))


@pytest.mark.parametrize("method", usfan.METHODS)
def test_same_seed_same_bits(source, method):
    given = {"seed": 5, "guard": False, **TINY, **witness_of(method, squares())}
    runs = [usfan.adapt(source, squares(), method, **given) for _ in range(2)]
    assert same(*runs)
    assert torch.equal(runs[0].passes.after.probs, runs[1].passes.after.probs)


def test_another_seed_gives_another_model_and_the_source_is_left_alone(source):
    before = {k: v.clone() for k, v in state(source).items()}
    one, other = (
        usfan.adapt(source, squares(), seed=seed, guard=False, **TINY) for seed in (0, 1)
    )
    assert not same(one, other)
    assert not same(one, source)
    assert all(torch.equal(before[k], v) for k, v in state(source).items())
    weight, bias = one.classifier.head_tensors()
    assert torch.equal(weight, source.classifier.head_tensors()[0])  # the head stays
    assert torch.equal(bias, source.classifier.head_tensors()[1])


def test_source_only_is_the_source(source):
    model = usfan.adapt(source, squares(), "source-only", **TINY)
    assert same(model, source)
    assert (model.history["epochs"], model.history["kept_epoch"]) == (0, 0)
    assert torch.equal(model.passes.before.probs, model.passes.after.probs)


class Untouchable:
    """Labels that nobody may look at."""

    def __getattribute__(self, name):
        raise AssertionError(f"labels were touched: {name}")

    def __getitem__(self, key):
        raise AssertionError("labels were read")


def test_labels_are_never_touched(source):
    data = squares()
    data.labels = Untouchable()
    plain = usfan.adapt(source, squares().without_labels(), "u-sfan+", **TINY)
    assert same(usfan.adapt(source, data, "u-sfan+", **TINY), plain)
    store = engine_store(squares().without_labels(), source.spec, start_runtime(None))
    labelled = Store(store.values, store.positions, Untouchable(), CLASSES)
    assert same(usfan.adapt(source, labelled, "u-sfan+", **TINY), plain)


def test_there_is_no_way_in_for_source_data():
    names = list(inspect.signature(adapt).parameters)
    assert names == [
        *("source", "data", "method", "runtime", "run", "progress", "labels", "witness"),
        "settings",
    ]
    few = list(inspect.signature(few_labels).parameters)
    assert few == ["labels", "data", "classes", "open_set"]  # of the target's images
    public = set(inspect.signature(usfan.adapt).parameters)  # nothing else brings data
    more = {"module", "device", "resume", "log", "options"}
    assert public <= {*names, *more, *AdaptConfig.__dataclass_fields__}
    assert not [name for name in AdaptConfig.__dataclass_fields__ if "source" in name]


def test_terms_see_no_labels_but_given_ones_and_no_source_data():
    fields = {
        "count",
        "classes",
        "runtime",
        "epochs",
        "seed",
        "guidance",
        "source",
        "witness",
        "naming",
        "uncertainty",
        "user_labels",
    }
    assert set(Context.__dataclass_fields__) == fields
    assert (
        Context.__annotations__["source"] == "Outputs"
    )  # what the source model says of the target


@pytest.mark.parametrize(
    "settings",
    [
        {"partial_set": True},
        {"tune": "new"},
        {"tune": "norm"},
        {"refresh": "step"},
        {"preset": "paper"},
    ],
)
def test_other_settings_run(source, settings):
    model = usfan.adapt(source, squares(), "u-sfan+", **TINY, **settings)
    assert bool(torch.isfinite(model.passes.after.probs).all())


def moved(model, source) -> set[str]:
    return {
        name
        for name, tensor in state(model).items()
        if not torch.equal(tensor, state(source)[name])
    }


BOTTLENECK = {f"bottleneck.{name}" for name in ("0.weight", "0.bias", "1.weight", "1.bias")}
STATISTICS = {
    f"bottleneck.1.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")
}


@pytest.mark.parametrize("given", [{}, {"open_set": True}], ids=["closed", "open"])
def test_what_is_frozen_really_is(source, given):
    """new: the bottleneck alone. norm: the backbone's BatchNorms too. The rest keeps its bits, statistics included."""
    runs = {
        tune: moved(
            usfan.adapt(source, squares(), tune=tune, guard=False, **TINY, **given), source
        )
        for tune in ("new", "norm", "all")
    }
    norms = {
        f"backbone.{i}"
        for i, layer in enumerate(source.classifier.backbone)
        if "BatchNorm" in str(type(layer))
    }
    backbone = {name for name in state(source) if name.startswith("backbone.")}
    assert runs["new"] == BOTTLENECK | STATISTICS
    assert runs["norm"] == runs["new"] | {
        name for name in backbone if name.rpartition(".")[0] in norms
    }
    assert runs["all"] == runs["new"] | backbone


def test_a_network_in_which_nothing_may_move_is_refused():
    plain = usfan.train_source(
        squares(domain=0), backbone="lenet", bottleneck=0, epochs=1, batch_size=8
    )
    with pytest.raises(ConfigError, match="tune"):
        usfan.adapt(plain, squares(), tune="new", **TINY)
    assert same(usfan.adapt(plain, squares(), "source-only", tune="new", **TINY), plain)


def test_views_while_adapting_are_the_sources_or_those_asked_for(source):
    own = usfan.adapt(source, squares(), guard=False, **TINY)
    same = usfan.adapt(source, squares(), guard=False, augment=source.spec.augment, **TINY)
    other = "none" if source.spec.augment != "none" else "resized-crop"
    changed = usfan.adapt(source, squares(), guard=False, augment=other, **TINY)
    assert all(torch.equal(state(own)[k], state(same)[k]) for k in state(own))
    assert any(not torch.equal(state(own)[k], state(changed)[k]) for k in state(own))
    assert changed.spec == source.spec


def test_a_run_that_diverges_falls_back(source):
    model = usfan.adapt(source, squares(), **{**TINY, "lr": 1e6, "epochs": 3})
    assert bool(torch.isfinite(model.passes.after.probs).all())
    assert model.history["kept_epoch"] < 3


def test_two_classes():
    pair = squares(classes=2)
    model = usfan.train_source(
        pair, backbone="digits-cnn", epochs=1, batch_size=8, bottleneck=8
    )
    for settings in ({}, {"open_set": True}, {"partial_set": True}):
        assert usfan.adapt(
            model, pair, "u-sfan+", **TINY, **settings
        ).passes.after.probs.shape == (
            24,
            2,
        )


@pytest.mark.parametrize("settings", [{}, {"open_set": True}])
def test_the_seed_alone_decides_with_dropout_too(settings):
    source = usfan.train_source(
        squares(), backbone="lenet", epochs=1, batch_size=8, bottleneck=8
    )
    models = []
    for noise in (1, 2):
        torch.manual_seed(noise)
        models.append(usfan.adapt(source, squares(), guard=False, **TINY, **settings))
    assert same(*models)


@pytest.mark.parametrize(
    "settings", [{"open_set": True}, {"open_set": True, "method": "shot-im"}, {}]
)
def test_a_run_that_diverges_falls_back_in_open_set_too(source, settings):
    model = usfan.adapt(source, squares(), **{**TINY, "lr": 1e12, "epochs": 3, **settings})
    assert bool(torch.isfinite(model.passes.after.probs).all())
    assert model.history["kept_epoch"] < 3


def test_a_run_that_ended_is_freed_at_once(source):
    """Its tables, gradients and kept states would stay on the GPU until Python collects garbage."""
    held = []

    def look(context):
        held.append(weakref.ref(context.guidance))

    trace = Trace(look)
    with spied_method("u-sfan+", trace) as name, no_collection():
        model = usfan.adapt(source, squares(), name, **TINY)
        trace.context = None
        trace.epochs.clear()
        assert held
        assert [ref() for ref in held] == [None] * len(held)
        assert model.passes is not None


class Stopped(Exception):
    pass


@pytest.mark.parametrize(
    ("method", "given", "last"),
    [
        *((name, {}, 9) for name, row in METHODS.items() if row.terms),
        ("u-sfan+", {"open_set": True}, 5),
        ("u-sfan+", {"preset": "paper"}, 14),
        ("u-sfan", {"tune": "norm", "partial_set": True}, 6),
        ("u-sfan++", {"setting": "universal"}, 9),
    ],
)
def test_a_resumed_run_is_the_same_run(source, tmp_path, method, given, last):
    """Stopped after `last` of 16 steps, in the second epoch or later: the same bits and the same figures come out."""

    steps = []

    def stop(done, total, figures):
        steps.append(done)
        if len(set(steps)) == last:
            raise Stopped

    def begin(progress=None):
        settings = {"epochs": 4, "batch_size": 9, **witness_of(method, squares())}
        settings |= {"pseudo_label_warmup": 2} if method == "u-sfan+" else {}
        with RunFolder(tmp_path / "run", {}, command="adapt", resume=True) as run:
            return adapt(
                source, squares(), method, run=run, progress=progress, **settings, **given
            )

    with pytest.raises(Stopped):
        begin(stop)
    resumed = begin()
    shutil.rmtree(tmp_path / "run")
    whole = begin()
    assert same(resumed, whole)
    figures = [
        [{k: v for k, v in r.items() if k != "seconds"} for r in m.history["records"]]
        for m in (resumed, whole)
    ]
    assert figures[0] == figures[1]
    assert resumed.history["kept_epoch"] == whole.history["kept_epoch"]
    assert resumed.history["guard"] == whole.history["guard"]


def test_one_image_is_too_few(source):
    with pytest.raises(DataError, match="one image is too few"):
        usfan.adapt(source, squares().subset([0]), **TINY)
    assert len(usfan.adapt(source, squares().subset([0]), "source-only").passes.after) == 1


def test_too_few_images_to_estimate_which_classes_occur(source):
    found = usfan.adapt(source, squares().subset([0, 1, 2]), **TINY).history
    assert found["classes"]["setting"] == found["settings"]["setting"] == "closed"
    assert "3 images are too few" in found["classes"]["reason"]


def test_auto_says_what_it_found_and_a_flag_overrules_it(source):
    found = usfan.adapt(source, squares(domain=1), method="u-sfan", epochs=1, batch_size=8)
    assert found.history["settings"]["setting"] == found.history["classes"]["setting"]
    assert found.history["classes"]["reason"]
    assert sum(found.history["classes"]["shares"]) == pytest.approx(1, abs=1e-3)
    told = usfan.adapt(
        source, squares(domain=1), method="u-sfan", epochs=1, batch_size=8, setting="universal"
    )
    assert told.history["settings"]["setting"] == "universal"
    assert told.history["classes"] is None
    assert told.unknown_rule is not None
