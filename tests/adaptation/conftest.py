"""A small source model, trained once."""

import pytest
from spying import squares

import usfan


@pytest.fixture(scope="session")
def source() -> usfan.SourceModel:
    settings = {"backbone": "digits-cnn", "epochs": 3, "batch_size": 8, "bottleneck": 16}
    return usfan.train_source(squares(domain=0), **settings)
