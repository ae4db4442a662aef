"""Model folders of version 0.1 (format 1) still load, and say what they said then.

`tests/data_files/format-1` was written by usfan 0.1.0: a source model, and one adapted to an open set; `expected` is
what both said of 24 points.
"""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import usfan
from usfan.store.model_folder import load_config

FOLDER = Path(__file__).parent.parent / "data_files" / "format-1"
KINDS = {"source": usfan.SourceModel, "adapted": usfan.AdaptedModel}


@pytest.mark.parametrize("name", KINDS)
def test_an_old_folder_loads_and_predicts_the_same(name):
    model = usfan.SourceModel.load(FOLDER / name)
    expected = load_file(FOLDER / "expected.safetensors")
    assert type(model) is KINDS[name]
    model.classifier.eval()
    with torch.no_grad():
        outputs = model.outputs_of(*model.classifier(expected["points"]))
    found = model.to_prediction(outputs)
    unknown = expected[f"{name}.unknown"]  # version 0.1 gave these the nearest class
    expected[f"{name}.label"].masked_fill_(unknown, len(model.classes))
    for field in ("probs", "label", "entropy", "weight", "unknown"):
        torch.testing.assert_close(
            getattr(found, field), expected[f"{name}.{field}"], rtol=1e-5, atol=1e-6
        )
    torch.testing.assert_close(
        outputs.posterior_probs, expected[f"{name}.posterior_probs"], rtol=1e-5, atol=1e-6
    )
    assert bool(found.unknown.any()) == (name == "adapted")


def test_it_says_what_it_does_not_know():
    """Version 0.1 did not store whether the backbone was pretrained: ours start from random weights."""
    assert "pretrained" not in load_config(FOLDER / "source").architecture
    assert not usfan.SourceModel.load(FOLDER / "source").pretrained


def test_saved_again_it_is_the_same_model(tmp_path):
    again = usfan.SourceModel.load(
        usfan.SourceModel.load(FOLDER / "adapted").save(tmp_path / "again")
    )
    old = usfan.SourceModel.load(FOLDER / "adapted")
    assert all(
        torch.equal(v, again.classifier.state_dict()[k])
        for k, v in old.classifier.state_dict().items()
    )
    assert (again.method, again.unknown_rule, again.classes) == (
        "u-sfan+",
        old.unknown_rule,
        old.classes,
    )
