"""A short form of `fuzz.py`: the full one has 20,000 folders and 5,000 images."""

import os

import pytest
from artifact_mutations import KINDS, mutated
from fuzz import artifact_cases, base_folders, fuzz, passed

from tiny_models import tiny_model
from usfan.errors import ArtifactError
from usfan.store.model import SourceModel


@pytest.mark.parametrize(("what", "count"), [("artifacts", 60), ("images", 40)])
def test_strangers_files(what, count):
    figures = fuzz(what, count)
    assert figures["cases"] == count
    assert passed(figures), figures
    refused = sum(
        n
        for outcome, n in figures["outcomes"].items()
        if outcome in ("refused", "skipped by name")
    )
    assert count / 20 < refused < count  # the damage is neither harmless nor all there is


def test_the_cases_would_notice(tmp_path, monkeypatch):
    """An exception of another kind is a failure: the check is not blind."""
    case = artifact_cases(tmp_path)
    monkeypatch.setattr("usfan.store.model.load_parts", lambda *_, **__: [][1])
    with pytest.raises(IndexError):
        case(0)[1]()
    monkeypatch.setattr("usfan.store.model.load_parts", refuse_without_a_name)
    assert case(0)[1]().startswith("BAD: message")


def refuse_without_a_name(*_, **__):
    raise ArtifactError("something is wrong")


def test_every_kind_of_damage_changes_the_folder():
    bases = base_folders()
    changed = set()
    for number in range(5 * len(KINDS)):
        kind, folder = mutated(bases[0], bases[:1], number)
        if folder != bases[0]:
            changed.add(kind)
    assert changed == set(KINDS)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "posterior.safetensors"])
@pytest.mark.parametrize("kind", ["pipe", "endless", "folder", "loop"])
def test_things_that_are_no_files(name, kind, tmp_path):
    """A named pipe would wait for ever, /dev/zero never ends."""
    folder = tiny_model().save(tmp_path / "model")
    (folder / name).unlink()
    if kind == "pipe":
        os.mkfifo(folder / name)
    elif kind == "folder":
        (folder / name).mkdir()
    else:
        (folder / name).symlink_to("/dev/zero" if kind == "endless" else folder / name)
    with pytest.raises(ArtifactError, match=f"{name}: .*not a regular file"):
        SourceModel.load(folder)
