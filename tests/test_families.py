"""The harness of all families: its cache, its tasks, its labels and its table."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parent.parent))

from studies.families import load_task
from studies.families import task as family_tasks
from studies.families.domains import (
    FAMILIES,
    Domain,
    domain_file,
    load_domain,
    pairs,
    per_class,
    save_domain,
)
from studies.families.runs import Job, LabelBudget, Runs, key_of, run_job, table
from studies.families.task import only, shared_classes


def digit_domain(count: int, seed: int) -> Domain:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % 10
    images = torch.randint(60, (count, 8, 8), generator=generator, dtype=torch.uint8)
    images[torch.arange(count), labels % 8, labels // 8] = 255
    files = tuple(f"{label}/{i}" for i, label in enumerate(labels.tolist()))
    return Domain(labels, tuple("0123456789"), files, images=images)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """Two small domains of digits, one epoch of each stage."""
    for seed, name in enumerate(("mnist", "uci")):
        save_domain(domain_file(tmp_path, "digits", name), digit_domain(80, seed))
        monkeypatch.setitem(family_tasks.DIGIT_SOURCE_EPOCHS, name, 1)
        monkeypatch.setitem(family_tasks.DIGIT_TARGET_EPOCHS, name, 1)
    family_tasks.read_domain.cache_clear()
    return tmp_path


def test_a_domain_comes_back_as_it_was(tmp_path):
    features = torch.randn(6, 4).half().float()
    domain = Domain(
        torch.tensor([0, 1, 0, 1, 1, 0]),
        ("cat", "dog"),
        tuple("abcdef"),
        features,
        features + 1,
    )
    save_domain(domain_file(tmp_path, "pacs", "photo"), domain)
    stored = load_domain(tmp_path, "pacs40", "photo")
    assert stored.classes == domain.classes
    assert stored.files == domain.files
    assert torch.equal(stored.labels, domain.labels)
    assert torch.equal(stored.crop, features)
    torch.testing.assert_close(stored.whole, features + 1, atol=2e-3, rtol=2e-3)
    part = stored.rows(torch.tensor([4, 0]))
    assert part.files == ("e", "a")
    assert torch.equal(part.crop, features[[4, 0]])


def test_every_family_has_tasks_between_different_domains():
    counts = {family: len(pairs(family)) for family in FAMILIES}
    assert counts == {
        "office31": 6,
        "shifts": 30,
        "pacs": 6,
        "pacs40": 6,
        "lines": 6,
        "leaf": 1,
        "emoji": 14,
        "digits": 4,
        "inverted": 3,
        "same": 4,
    }
    for family in FAMILIES:
        same = [source == target for source, target in pairs(family)]
        assert all(same) if family == "same" else not any(same)


def test_classes_of_both_domains():
    """Class b is only in the source; of emoji, c has too few images in the target."""
    source = Domain(torch.tensor([0] * 9 + [1] * 9 + [2] * 9), ("a", "b", "c"), ("",) * 27)
    target = Domain(torch.tensor([1] * 9 + [0] * 3), ("c", "a"), ("",) * 12)
    assert shared_classes("leaf", source, target) == ("a", "c")
    assert shared_classes("emoji", source, target) == ("a",)
    part, labels = only(target, ("a", "c"))
    assert labels.tolist() == [0] * 9 + [1] * 3
    assert len(part.labels) == 12
    assert per_class(["x", "y", "x", "x"], 2)[-1] == 1
    assert len(per_class(["x", "y", "x", "x"], 2)) == 3


def test_labels_of_a_run_are_true_nested_and_not_judged(cache):
    task = load_task(cache, "digits", "mnist", "uci", 3)
    assert task.classes == tuple("0123456789")
    assert task.target.labels is not None
    runs = Runs(task, {})
    one = runs.labels("u-sfan", LabelBudget.parse("random:1xK"))
    two = runs.labels("u-sfan", LabelBudget.parse("random:2xK"))
    assert int((one >= 0).sum()) == 10
    assert int((two >= 0).sum()) == 20
    assert torch.equal(two[one >= 0], one[one >= 0])
    assert torch.equal(two[two >= 0], task.labels[two >= 0])
    row = runs.row("u-sfan", LabelBudget.parse("random:1xK"))
    assert row["labelled"] == 10
    model, _, _ = runs.run("u-sfan", LabelBudget.parse("random:1xK"))
    right = model.passes.after.logits.argmax(dim=1) == task.labels
    assert row["accuracy"] == round(100 * float(right[one < 0].double().mean()), 2)


def test_the_program_asks_in_rounds(cache):
    """Two labels per class: one round without labels, one with the answers of the first."""
    runs = Runs(load_task(cache, "digits", "uci", "mnist", 3), {})
    budget = LabelBudget.parse("asked:2xK")
    row = runs.row("u-sfan", budget)
    assert row["labelled"] == 20
    first = runs.models["u-sfan", LabelBudget("asked", 1)][1]
    second = runs.models["u-sfan", budget][1]
    assert int((first >= 0).sum()) == 10
    assert torch.equal(second[first >= 0], first[first >= 0])


def test_rows_that_exist_are_not_run_again(cache):
    methods = ("source-only", "shot-im", "u-sfan++")
    budgets = (LabelBudget("none"),)
    job = Job(cache, "digits", "mnist", "uci", 3, methods, budgets, {}, frozenset())
    rows = run_job(job)
    assert [row["method"] for row in rows] == ["source-only", "shot-im"]  # digits: no witness
    assert rows[0]["accuracy"] == rows[0]["before"] == rows[1]["before"]
    done = frozenset([key_of(rows[1])])
    again = run_job(Job(cache, "digits", "mnist", "uci", 3, methods, budgets, {}, done))
    assert [row["method"] for row in again] == ["source-only"]
    assert again[0]["accuracy"] == rows[0]["accuracy"]
    wanted = Job(cache, "digits", "mnist", "uci", 3, methods, budgets, {"guard": True}, done)
    guarded = run_job(wanted)
    assert "kept_accuracy" in guarded[1]


def test_the_table_pairs_tasks():
    rows = []
    for method, accuracies in (("shot", (50.0, 70.0)), ("aad", (53.0, 77.0))):
        for task, accuracy in zip(("a→b", "b→a"), accuracies, strict=True):
            row = {"family": "lines", "task": task, "method": method, "labels": "none"}
            rows.append({**row, "commit": "abc", "accuracy": accuracy})
    assert "| lines | 2 | 60.0 ± 10.0 | 65.0 ± 12.0 |" in table(rows)
    assert "| lines | 2 | 60.0 ± 10.0 | +5.0 ± 2.0 |" in table(rows, against="shot")


def test_labels_are_spelled_in_one_way():
    assert str(LabelBudget.parse("asked:5xK")) == "asked:5xK"
    with pytest.raises(ValueError, match="expected none, random:, noisy: or asked:COUNTxK"):
        LabelBudget.parse("random:7")
