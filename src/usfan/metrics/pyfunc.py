"""A model folder as a pyfunc of MLflow. MLflow imports this module by its name: no code is stored, and no pickle."""

from __future__ import annotations

from typing import TYPE_CHECKING

from usfan.data.sources import ImageData, ImageSource
from usfan.metrics.predictions import prediction_records
from usfan.store.model import SourceModel

if TYPE_CHECKING:
    import pandas


class PredictionTable:
    """Predicts as `usfan predict` does."""

    def __init__(self, model: SourceModel) -> None:
        self.model = model

    def predict(self, images: ImageSource) -> pandas.DataFrame:
        """One row per image: its label with confidence, and entropy and weight of the posterior predictive; `error` if
        it cannot be read. `images` is whatever `ImageData` takes, such as a table with the column path."""
        import pandas

        data = ImageData(images).without_labels()
        return pandas.DataFrame(list(prediction_records(self.model, data)))


def _load_pyfunc(path: str) -> PredictionTable:
    """Called by MLflow."""
    return PredictionTable(SourceModel.load(path))
