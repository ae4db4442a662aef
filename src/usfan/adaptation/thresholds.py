"""Every number of adaptation that decides something: its meaning, and the study in docs/studies that set it.

Weights of losses and numbers of neighbours are settings of a method (`usfan methods NAME` lists them). Thresholds of
the known-unknown split and of a collapse are in `maths.unknown` and `maths.validators`.
"""

from __future__ import annotations

# Which classes the target has (`target_classes`): class-sets.md.

EVEN_SHARES = 8 / 9
"""Effective share of the classes from which they count as evenly present."""
CLEARLY_UNEVEN_SHARES = 5 / 6
"""The same if the names follow less than half of the structure."""
NEW_CLASS_UNEXPLAINED = 3 / 4
"""Part of the structure of one class. If named clusters leave more unexplained, there are new classes."""
FOLLOWED_STRUCTURE = 0.5
"""κ from which the names say something about the structure, with a witness and eight classes or more."""
FOLLOWED_STRUCTURE_STRICT = 0.6
"""The same without a witness, or with fewer classes."""
RARE_CLASS = 0.05
"""Part of an equal share; a class with fewer images is taken for an error of the names."""
RARE_CLASS_BESIDE_NEW = 0.5
"""The same beside new classes: some of their images land in clusters of missing ones."""
NAME_SHARPNESS = 3.0
"""Exponent of the names in label shift; fitted values of λ are near it."""
STRUCTURE_IMAGES_PER_CLASS = 20
"""Images per class that the estimate looks at, if they are more than `SEARCH_IMAGES` or `agreement.MOST_IMAGES`."""
SEARCH_IMAGES = 1_000
"""Images that the search for new classes looks at."""
SEARCH_LEAST_IMAGES_PER_CLASS = 8
"""Images per class from which new classes are searched."""
SEARCH_LEAST_CLASSES = 5
"""Classes that occur from which new ones are searched."""
SEARCH_MANY_CLASSES = 8
"""Classes that occur from which `FOLLOWED_STRUCTURE` suffices."""
SEARCH_LEAST_DIMENSIONS = 4
SEARCH_MOST_DIMENSIONS = 10
"""Range of the dimensions of the search: half as many as classes occur."""
SEARCH_FOLDS = 5
"""Parts of the images that are held out in turn."""
SEARCH_ROUNDS = 12
"""Rounds of EM."""
SMOOTHING_NEIGHBOURS = 10
"""Neighbours that the score of an image is averaged over."""

# The guard (`guard`): guard.md; the estimated accuracy: estimates.md.

GUARD_IMAGES = 1_000
"""Images that the guard judges by. More make the interval narrower, and cost time."""
GUARD_FIRST_IMAGES = 500
"""Images that a pretrained judge looks at first."""
GUARD_FIRST_PER_CLASS = 10
"""The same for each class: with fewer, neighbours are rarely of one class."""
GUARD_CLEAR = 3.0
"""Standard errors of the gain beyond which these suffice (Haybittle and Peto: the second look keeps its level)."""
GUARD_DRAWS = 8
"""Heads drawn from the source posterior."""
ACCURACY_ERROR = 0.25
"""Error of the estimated accuracy in nine of ten cases, with many images and κ = 0."""
WIDEST_ESTIMATE = 0.3
"""Width of the interval from which accuracy cannot be told. Without a pretrained network, nor below
`FOLLOWED_STRUCTURE_STRICT`."""
TRAINING_IMAGES = 1.05
"""Relative distance below which images may be the training images themselves, which a model can know by heart."""

# How much of the network is trained (`tune`): on earlier code, 24 shifts; at worst 8 points below the best choice.

FITTING_BACKBONE = 0.5
"""κ of the source model's predictions from which the backbone stays as it is."""
MOVING_BACKBONE_IMAGES = 100
"""Images per class that are needed to train the backbone."""
MOVING_BACKBONE_LR = 0.01
"""Learning rate of a pretrained backbone that moves, relative to the new layers."""

# Settings that depend on the run, chosen on earlier code.

SHORT_RUN = 4
"""A run of fewer epochs has no schedule of weights, and does not wait for its pseudo-labels."""
DIVERSE_BATCH = 4
"""Samples of each class in a batch, on average, that are enough to compute L_div over the batch alone."""
DIVERSITY_MEMORY = 0.9
"""Part of the mean prediction in L_div that comes from the whole target if a batch holds fewer."""
CENTROID_LEAST = 10
"""A class with at most this many samples gets no centroid if classes may be missing (SHOT's recipe)."""
WITNESS_LATER_ROUNDS = 6
"""Rounds of EM when the network has named the clusters again."""
WITNESS_SOFTNESS = 2.0
"""Divides the logits of the witness's classifier."""
SETTLED_BATCHES = 50
"""Batches after which BatchNorm, which moves by a tenth at each, has forgotten the source's statistics."""
MOVING_LABEL_WEIGHT = 0.15
"""Weight of user labels if the whole network is trained. With 10 labels of digits, 1 cost two points (labels seen)."""
