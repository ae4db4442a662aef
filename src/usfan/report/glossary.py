"""Explanations of the words of the report: under each validator's curve, and in the glossary at its end."""

from __future__ import annotations

from usfan.report.blocks import Table
from usfan.report.run import Run

VALIDATOR_MEANINGS = {
    "entropy": "Mean entropy of the predictions: 0 if the model is sure of every image.",
    "information_maximization": "Entropy of the mean prediction minus the mean entropy: high if each image gets one "
    "class surely and all classes are used. The adaptation maximises it.",
    "diversity": "How evenly the classes are used: 1 if all are used alike.",
    "coverage": "Share of the classes that are predicted for at least one image.",
    "largest_class": "Share of the images in the class that is predicted most often.",
    "drift": "Share of images whose prediction differs from the source model's.",
    "certain": "Share of the images to whose class the posterior gives a probability above (1 + 1/K)/2 (K classes).",
    "structure": "How often similar images get the same prediction, corrected for chance: 1 means always, 0 no more "
    "often than chance. Similar means near each other in features that the training did not use, if there are any.",
    "fit": "How well the predictions fit the clusters of similar images, which the source model named: their mean "
    "probability.",
    "gain": "Mean of structure (after doubts of the source posterior) and fit, minus the source model's mean. The "
    "guard uses it.",
    "names": "Share of the changed predictions that the source model's posterior finds plausible.",
}
"""Figures that judge a model without labels."""

GLOSSARY = {
    "source model": "The model before adaptation, as it was trained on other images.",
    "point estimate": "The ordinary prediction of the network. It decides the class.",
    "posterior": "The prediction averaged over all last layers that fit the training images. It is less certain for "
    "images unlike them.",
    "certainty, or weight": "exp(−entropy of the posterior's prediction): 1 is certain, 1/K (K classes) is a guess. It "
    "weighs each image in the adaptation.",
    "certain": "The posterior gives the class a probability above (1 + 1/K)/2, half-way from a guess to certainty.",
    "ECE": "Expected calibration error: how far the confidence is from the share of right predictions, on average. "
    "Below 5 % is good, above 15 % is bad.",
    "NLL and Brier": "Scores of the probabilities against the labels; lower is better.",
    "validator": "A figure that judges the model without labels.",
    "guard": "Compares the adapted model with the source model without labels, and keeps the source model if the "
    "adaptation seems to have done harm.",
    "HOS": "Open set: harmonic mean of the accuracy on known classes and on unknown images.",
}


def glossary_table(prefix: str, run: Run) -> list[Table]:
    """The words that the page of an adaptation uses."""
    if run.kind != "adapt":
        return []
    columns = {"word": list(GLOSSARY), "meaning": list(GLOSSARY.values())}
    return [Table(f"{prefix}-glossary", "Words of this page", columns)]
