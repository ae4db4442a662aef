"""Properties that hold for whatever is given: settings, config files, lists, model configs, metrics."""

import dataclasses
import json
import math
import os

import pytest
import torch
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from planning import resolve
from tiny_models import tiny_model
from usfan.cli.commands import COMMANDS
from usfan.cli.flags import describe
from usfan.cli.main import parse_settings
from usfan.cli.settings import read_settings as read_settings_of
from usfan.config import AdaptConfig, RuntimeConfig, TrainConfig, make_config
from usfan.data.lists import inside, parse
from usfan.errors import ArtifactError, ConfigError
from usfan.metrics.metrics import classification_metrics, confusion
from usfan.store.schema import ModelConfig, parse_config

KINDS = (TrainConfig, AdaptConfig, RuntimeConfig)
scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=12)
anything = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3)
    ),
)


def read_settings(name, values):
    return read_settings_of(describe(COMMANDS[name]), values)


def result_or_refusal(call, refusal: type[Exception]):
    """What the call gives and None, or None and what the refusal says."""
    try:
        return call(), None
    except refusal as error:
        return None, str(error)


def field_names(kind: type) -> list[str]:
    return [f.name for f in dataclasses.fields(kind)]


def settings_of(kind: type) -> st.SearchStrategy:
    """Settings with the names of this config, and now and then another; values of any type."""
    likely = st.sampled_from(
        [0, 1, 2, 0.5, 1e-3, "evidence", "auto", "none", "exact", "3", "0.1", "on", True, None]
    )
    return st.dictionaries(
        st.sampled_from(field_names(kind)) | st.text(max_size=8), likely | anything, max_size=6
    )


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_settings_make_a_config_or_a_clear_error(kind, data):
    values = data.draw(settings_of(kind))
    config, refused = result_or_refusal(lambda: make_config(kind, values), ConfigError)
    if refused is not None:
        assert 0 < len(refused) < 2000
        return
    again = make_config(kind, dataclasses.asdict(config))
    assert again == config
    assert (
        make_config(kind, yaml.safe_load(yaml.safe_dump(dataclasses.asdict(config)))) == config
    )
    for value in vars(config).values():
        assert not isinstance(value, float) or math.isfinite(value), config
    json.dumps(dataclasses.asdict(config), allow_nan=False)


@settings(max_examples=150, deadline=None)
@given(
    st.fixed_dictionaries(
        {
            "epochs": st.integers(0, 10**6),
            "lr": st.floats(0, 10),
            "samples": st.integers(1, 99),
            "guard": st.booleans(),
        }
    )
)
def test_a_flag_is_text_and_means_the_same(values):
    texts = {k: str(v) for k, v in values.items()} | {
        "guard": "on" if values["guard"] else "off"
    }
    assert make_config(AdaptConfig, texts) == make_config(AdaptConfig, values)
    words = [
        word
        for name, text in texts.items()
        if name != "samples"
        for word in (f"--{name}", text)
    ]
    words += ["--set", f"samples={texts['samples']}"]
    parsed = parse_settings("adapt", ["a", "b", "--out", "run", *words])
    assert {name: parsed[name] for name in values} == values


@settings(max_examples=200, deadline=None)
@given(
    st.binary(max_size=200)
    | st.text(alphabet="[]{}:,-&*!|>'\"\n ab01", max_size=120).map(str.encode)
)
def test_any_config_file_is_settings_or_a_clear_error(tmp_path_factory, content):
    path = tmp_path_factory.getbasetemp() / "any.yaml"
    path.write_bytes(content)
    found, refused = result_or_refusal(
        lambda: read_settings(
            "adapt", {"config": str(path), "source": ["a"], "data": "b", "out": "run"}
        ),
        ConfigError,
    )
    if refused is not None:
        assert len(refused) < 2000
        assert refused.isprintable()
        return
    assert (found["source"], found["data"], found["out"]) == (["a"], "b", "run")
    assert all(isinstance(name, str) for name in found)


@pytest.mark.parametrize(
    "content",
    [
        "[" * 100_000,
        "{a: " * 50_000,
        "a: " + "9" * 10_000,
        "a: 2001-99-99",
        "a: !!python/name:os.system",
        "\0",
    ],
)
def test_config_files_made_to_hurt(content, tmp_path):
    path = tmp_path / "bomb.yaml"
    path.write_text(content)
    with pytest.raises(ConfigError, match=r"bomb\.yaml"):
        read_settings("methods", {"config": str(path)})


def as_a_command_does(command: str, given: dict) -> None:
    settings = read_settings(command, given)
    resolve(
        {k: v for k, v in settings.items() if k not in ("source", "data", "out")},
        pretrained=True,
        classes=2,
    )


@pytest.mark.parametrize("command", ["methods", "adapt"])
@pytest.mark.parametrize(
    "key",
    ["\x1b[31mred", "x" * 100_000, "line\nbreak", "\u202egnp"],
    ids=["colour", "long", "lines", "backwards"],
)
def test_a_strangers_names_are_shown_escaped_and_cut(tmp_path, command, key):
    path = tmp_path / "names.yaml"
    path.write_text(yaml.safe_dump({key: 1}))
    given = {
        "config": str(path),
        **({} if command == "methods" else {"source": ["a"], "data": "b", "out": "run"}),
    }
    with pytest.raises(ConfigError) as caught:
        as_a_command_does(command, given)
    assert len(str(caught.value)) < 500
    assert str(caught.value).isprintable()


def test_a_config_file_of_aliases_is_refused_without_growing(tmp_path):
    """The billion laughs: ten lists of nine of the one before. Loaded it is small; shown it would be 10 GB."""
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 10)]
    (tmp_path / "laughs.yaml").write_text("\n".join([*lines, "epochs: *a9"]))
    with pytest.raises(ConfigError, match=r"laughs\.yaml: it holds an alias"):
        read_settings("methods", {"config": str(tmp_path / "laughs.yaml")})
    (tmp_path / "nested.yaml").write_text("epochs: [[1], {a: 2}]")
    with pytest.raises(ConfigError, match="epochs must be a whole number"):
        read_settings("train", {"config": str(tmp_path / "nested.yaml")})
    bomb = yaml.safe_load((tmp_path / "laughs.yaml").read_text())["epochs"]
    for name in ("epochs", "method", "guard", "prior", "lr"):
        with pytest.raises(ConfigError, match=f"{name} must be") as caught:
            make_config(AdaptConfig, {name: bomb})
        assert len(str(caught.value)) < 1000


@pytest.fixture(scope="module")
def config_text(tmp_path_factory):
    return (tiny_model().save(tmp_path_factory.mktemp("model")) / "config.json").read_text()


@settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_any_model_config_is_one_or_a_clear_error(config_text, tmp_path_factory, data):
    config = json.loads(config_text)
    for _ in range(data.draw(st.integers(1, 3))):
        table = config
        name = data.draw(st.sampled_from(sorted(table)))
        if isinstance(table[name], dict) and table[name] and data.draw(st.booleans()):
            table = table[name]
            name = data.draw(st.sampled_from(sorted(table)))
        table[name] = data.draw(anything)
    path = tmp_path_factory.getbasetemp() / "config.json"
    parsed, refused = result_or_refusal(lambda: parse_config(config, path), ArtifactError)
    if refused is None:
        assert isinstance(parsed, ModelConfig)
    else:
        assert str(path) in refused
        assert len(refused) < 500


words = (
    st.text("abcdé-_. ", min_size=1, max_size=6)
    .map(str.strip)
    .filter(lambda w: w.strip(".") and w == w.strip())
)
lines = st.lists(
    st.tuples(words.map(lambda w: f"{w}.jpg"), st.integers(0, 5)), min_size=1, max_size=8
)


@given(lines, st.randoms(use_true_random=False))
def test_the_order_of_a_list_is_only_an_order(entries, rng):
    shuffled = list(entries)
    rng.shuffle(shuffled)
    first, second = (
        sorted((e.path, e.label) for e in parse("\n".join(f"{p} {k}" for p, k in each)))
        for each in (entries, shuffled)
    )
    assert first == second


@pytest.mark.parametrize("path", ["0 ..jpg", "a .JPG", "a ...png"])
def test_a_last_word_that_is_only_a_suffix_belongs_to_the_path(path):
    (entry,) = parse(path)
    assert (entry.path, entry.label) == (path, None)
    (entry,) = parse(f"{path} 3")
    assert (entry.path, entry.label) == (path, "3")


@given(st.lists(st.sampled_from(["a", "b", "..", ".", "c d", "..."]), min_size=1, max_size=8))
def test_inside_is_what_counting_folders_says(tmp_path_factory, parts):
    root = str(tmp_path_factory.getbasetemp() / "root")
    depth = least = 0
    for part in parts:
        depth += {"..": -1, ".": 0}.get(part, 1)
        least = min(least, depth)
    path = os.path.join(root, *parts)
    if least >= 0:
        assert inside(path, root)
    if depth < 0:
        assert not inside(path, root)


cases = st.tuples(st.integers(1, 60), st.integers(2, 6), st.integers(0, 10_000))


@settings(max_examples=60, deadline=None)
@given(cases)
def test_metrics_know_neither_order_nor_names(case):
    N, K, seed = case
    generator = torch.Generator().manual_seed(seed)
    probs = (3 * torch.randn(N, K, generator=generator)).softmax(dim=1)
    labels = torch.randint(0, K, (N,), generator=generator)
    names = [f"c{k}" for k in range(K)]
    figures = classification_metrics(probs, labels, names)
    rows = torch.randperm(N, generator=generator)
    columns = torch.randperm(K, generator=generator)
    other = classification_metrics(
        probs[rows][:, columns], columns.argsort()[labels[rows]], [names[c] for c in columns]
    )
    for name in ("accuracy", "mean_class_accuracy", "nll", "brier", "ece", "entropy"):
        assert figures[name] == pytest.approx(other[name], abs=1e-4), name
    assert figures["per_class_accuracy"] == pytest.approx(other["per_class_accuracy"])
    assert 0 <= figures["ece"] <= 100
    assert 0 <= figures["brier"] <= 200
    assert figures["nll"] >= 0
    assert confusion(labels, probs.argmax(1), K).sum() == N
    twice = classification_metrics(probs.repeat(2, 1), labels.repeat(2), names)
    assert twice["ece"] == pytest.approx(figures["ece"], abs=1e-4)
