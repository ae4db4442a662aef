"""How many pseudo-labels are right before adaptation: the head's, nearest centroids, Gaussians. Office-31.

    python studies/label_quality.py --data ROOT --models FOLDER/models [--seed 2021] [--tasks AD AW] [--out FILE.json]

FOLDER is the run folder of a closed-set study (`usfan reproduce office31`). True labels are used only to count.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

from studies.labels import nearest_gaussian  # noqa: E402
from studies.paths import write_rows  # noqa: E402

from usfan.adaptation.centroids import nearest_centroid  # noqa: E402
from usfan.artifacts.model import SourceModel  # noqa: E402
from usfan.compute.passes import forward_store  # noqa: E402
from usfan.compute.runtime import start_runtime  # noqa: E402
from usfan.data.cache import open_store  # noqa: E402
from usfan.data.sources import ImageData  # noqa: E402

DOMAINS = {"A": "amazon", "D": "dslr", "W": "webcam"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", required=True)
    parser.add_argument("--models", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=2021)
    parser.add_argument("--tasks", nargs="+", default=["AD", "AW", "DA", "WA"])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    runtime = start_runtime(None)
    rows: list[dict] = []
    for source, target in options.tasks:
        model = SourceModel.load(options.models / f"{source}_{options.seed}").to(runtime.device)
        data = ImageData(f"{options.data}/{DOMAINS[target]}")
        store = open_store(data, size=model.spec.resize, device=runtime.device)
        assert store.labels is not None
        features, logits = forward_store(model.classifier, store, model.spec, runtime)
        centroid = nearest_centroid(features, logits.softmax(dim=1))
        gaussian = nearest_gaussian(features, centroid, logits.shape[1])
        row = {"task": f"{source}→{target}", "seed": options.seed}
        for name, found in (("head", logits.argmax(dim=1)), ("centroid", centroid), ("gaussian", gaussian)):
            row[name] = round(100 * float((found.cpu() == store.labels.cpu()).double().mean()), 2)
        rows.append(row)
        print(row, flush=True)
        if options.out:
            write_rows(options.out, "python studies/label_quality.py --data ROOT --models FOLDER/models", rows)


if __name__ == "__main__":
    main()
