"""The walk of `usfan adapt` as the pages draw it is the walk that the code takes: the same steps in the same order."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import FrameType

import numpy as np
import pytest
import torch

import usfan
from lookalikes import picture
from usfan.models import backbones

ROOT = Path(__file__).parent.parent
NETWORK = "test_resnet"
STEPS = {
    "every setting gets a value": "make_plan",
    "witness: chosen": "find_witness",
    "images: decoded once": "look_once",
    "tune: which layers move": "choose_store",
    "judge: chosen for the guard": "choose_judge",
    "your labels, if there are any": "of_table",
    "the source model looks": "begin",
    "setting: which classes": "decide_setting",
    "names of clusters": "name_images",
    "the guard's judge looks": "open_guard",
    "epochs of training": "train_epoch",
    "guard: which model is kept": "finish",
    "estimated accuracy, verdict": "make_model",
    "the model, metrics.json": "save_adaptation",
    "changes.csv": "write_changes",
    "label_first.csv": "save_questions",
}
"""What the drawing says, and the function that does it."""


@pytest.fixture(scope="module")
def calls(tmp_path_factory) -> list[str]:
    """The functions of usfan in the order in which an adaptation with every part first enters them."""
    root = tmp_path_factory.mktemp("walk")
    torch.manual_seed(0)
    weights = root / "net.pth"
    torch.save(backbones.timm_model(NETWORK, num_classes=12).state_dict(), weights)
    labels = np.tile(np.arange(3), 12)
    pixels = np.stack([picture(int(label), 2, i, 64) for i, label in enumerate(labels)])
    images = usfan.ImageData(pixels, labels=labels, classes=("a", "b", "c"))
    options = {"epochs": 1, "batch_size": 8, "progress": False, "device": "cpu"}
    source = usfan.train_source(
        images, backbone=NETWORK, pretrained=str(weights), bottleneck=8, **options
    )
    package = str(Path(usfan.__file__).parent)
    names: dict[str, None] = {}

    def record(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(package):
            names.setdefault(frame.f_code.co_name)

    before = sys.getprofile()
    sys.setprofile(record)
    try:
        usfan.adapt(
            source,
            images,
            "u-sfan++",
            witness=f"{NETWORK}:{weights}",
            labels={0: "a", 1: "b"},
            run=root / "run",
            **options,
        )
    finally:
        sys.setprofile(before)
    return list(names)


def test_the_drawing_of_the_concepts(calls):
    text = (ROOT / "docs" / "concepts.md").read_text(encoding="utf-8")
    drawing = " ".join(re.search(r"```text\n(.*?)```", text, flags=re.S)[1].split())
    places = [drawing.index(phrase) for phrase in STEPS]
    assert places == sorted(places)
    assert sorted(STEPS.values(), key=calls.index) == list(STEPS.values())


def test_the_walk_of_the_contributors(calls):
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    walk = text.partition("## The walk of `usfan adapt`")[2].partition("`python -m")[0]
    names = re.findall(r"^ {6,}(\w+(?:, \w+)*) {2,}", walk, flags=re.M)
    steps = [name for line in names for name in line.split(", ")]
    assert len(steps) > 8
    assert sorted(steps, key=calls.index) == steps
