"""The poison of `studies.poisoned`: it stays within its bounds, and does what it is for."""

import pytest
import torch
from studies.poisoned import EPSILON, attacked, logits_of

from tiny_models import tiny_model


def mean_probability(model, rows, labels):
    with torch.no_grad():
        probs = logits_of(model, rows.float()).softmax(dim=1)
    return float(probs.gather(1, labels[:, None]).mean())


@pytest.mark.parametrize("attack", ["away", "next"])
@pytest.mark.parametrize("is_image", [True, False])
def test_poison_is_bounded_and_moves_the_predictions(attack, is_image):
    model = tiny_model()
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(256, (24, 1, 28, 28), dtype=torch.uint8, generator=generator)
    rows = images
    unit = torch.tensor(255.0)
    if not is_image:
        model.classifier.eval()
        with torch.no_grad():
            rows = model.classifier.backbone(images.float() / 255)
        unit = rows.std(dim=0)
    moved = attacked(model, rows, unit, attack)
    assert moved.dtype == rows.dtype
    assert bool(((moved.float() - rows.float()).abs() <= EPSILON * unit + 1e-4).all())
    with torch.no_grad():
        labels = logits_of(model, rows.float()).argmax(dim=1)
    before = mean_probability(model, rows, labels)
    after = mean_probability(model, moved, labels)
    assert after < before
    if attack == "next":
        following = (labels + 1) % len(model.classes)
        gain = mean_probability(model, moved, following)
        assert gain > mean_probability(model, rows, following)
