"""Galleries: the images the model is surest of, least sure of, and takes for unknown, as small JPEGs in the page."""

from __future__ import annotations

import base64
import io
import os
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor

from usfan.data.decoding.decode import decode_bytes
from usfan.data.decoding.pool import Answer, thumbnails
from usfan.errors import DataError, shown
from usfan.files import Folder
from usfan.report.blocks import Gallery, Note, Picture, Thumbnail
from usfan.report.read_samples import Samples
from usfan.scoring.validators import is_certain

BELOW = "Below each image: the predicted class, its probability, and the weight."
SIDE = 112
"""Pixels of a thumbnail's longer side."""
MOST_PICTURE = 32 << 20
"""Bytes of a run's own picture."""
WIDEST = 1800
"""Pixels: a run's own picture is made smaller above this width."""


def galleries(prefix: str, samples: Samples, most: int) -> list[Gallery | Note]:
    """At most `most` images in each. What cannot be shown is said."""
    if samples.paths is None:
        return [Note(f"The galleries are left out: {samples.why_no_paths}.")]
    weight = samples.get("weight")
    if weight is None or "after" not in samples.predicted:
        return [Note("The galleries are left out: samples.safetensors holds no weights or no predictions.")]
    if most < 1:
        return [Note("The galleries are left out: this page holds many runs; make one report for each to see them.")]
    flagged = samples.unknown
    nothing = torch.zeros(len(samples), dtype=torch.bool)
    known = ~flagged if flagged is not None else ~nothing
    plans = [
        ("certain", "Most certain", f"The largest weights. {BELOW}", ranked(weight, known, most, largest=True)),
        ("uncertain", "Most uncertain", f"The smallest weights. {BELOW}", ranked(weight, known, most, largest=False)),
    ]
    if flagged is not None:
        text = "Flagged as a class that the model does not know; the least certain first."
        plans.append(("unknown", "Suspected unknown", text, ranked(weight, flagged, most, largest=False)))
    changed = changed_rows(samples)
    if changed is not None and bool(changed.any()):
        text = "The prediction before adaptation → after it; the surest first. "
        text += f"{int(changed.sum()):,} of {len(samples):,} predictions changed."
        plans.append(("changed", "Changed predictions", text, ranked(weight, changed & known, most, largest=True)))
    wrong = samples.groups("after").get("incorrect", nothing)
    sure = certain_rows(samples)
    if samples.labels is not None:
        text = "Certain, and wrong by the labels: hard images, or wrong labels."
        plans.append(("mistakes", "Certain and wrong", text, ranked(weight, wrong & known & sure, most, largest=True)))
    blocks: list[Gallery | Note] = [
        gallery(f"{prefix}-gallery-{key}", title, text, samples, chosen, moved=key == "changed")
        for key, title, text, chosen in plans
        if chosen
    ]
    if samples.labels is not None and not bool((wrong & known & sure).any()):
        count = int((wrong & known).sum())
        rest = f": the model is in doubt about all {count:,} that are wrong" if count else ""
        blocks.append(Note(f"No image is certain and wrong{rest}."))
    if changed is not None and not bool(changed.any()):
        blocks.append(Note("No prediction changed."))
    if flagged is None:
        blocks.append(Note("No gallery of suspected unknown images: the run was not open-set."))
    elif not bool(flagged.any()):
        blocks.append(Note("No image was flagged as unknown."))
    return blocks


def ranked(weight: Tensor, among: Tensor, most: int, *, largest: bool) -> list[int]:
    """Positions of the `most` largest or smallest weights among the marked samples."""
    positions = among.nonzero().flatten()
    _, order = weight[positions].float().topk(min(most, len(positions)), largest=largest)
    return positions[order].tolist()


def certain_rows(samples: Samples) -> Tensor:
    """Which images the model is certain of: past half-way from a guess to certainty, by the posterior."""
    posterior, weight = samples.get("posterior_after"), samples.get("weight")
    if posterior is not None:
        return is_certain(posterior.float())
    assert weight is not None
    return weight > 0.5


def changed_rows(samples: Samples) -> Tensor | None:
    """Which predictions the adaptation changed; None if those before are not known."""
    if not {"before", "after"} <= samples.predicted.keys():
        return None
    return samples.predicted["before"] != samples.predicted["after"]


def gallery(id: str, title: str, caption: str, samples: Samples, chosen: list[int], *, moved: bool = False) -> Gallery:
    items = thumbnails_of(samples, chosen, moved=moved)
    broken = sum(not item.uri for item in items)
    if broken:
        caption += f" {broken} of {len(items)} files cannot be shown: the reason stands in their place."
    return Gallery(id, title, caption, items)


def thumbnails_of(samples: Samples, chosen: list[int], *, moved: bool) -> list[Thumbnail]:
    """Decoded by another process, within its limits on time and memory."""
    assert samples.paths is not None
    paths = [samples.paths[i] for i in chosen]
    usable = [path for path in paths if path and "\0" not in path]
    answers = dict(zip(usable, thumbnails(usable, SIDE) if usable else [], strict=True))
    return [
        thumbnail(samples, i, path, answers.get(path, "not shown"), moved=moved)
        for i, path in zip(chosen, paths, strict=True)
    ]


def thumbnail(samples: Samples, i: int, path: str, answer: Answer, *, moved: bool) -> Thumbnail:
    """One image with its prediction; `moved`: with the one before, too."""
    k = int(samples.predicted["after"][i])
    flagged = samples.unknown is not None and bool(samples.unknown[i])
    probs, weight = samples.get("probs_after"), samples.get("weight")
    assert probs is not None
    assert weight is not None
    label = "unknown" if flagged else samples.classes[k]
    if moved:
        label = f"{samples.classes[int(samples.predicted['before'][i])]} → {label}"
    detail = f"{100 * float(probs[i, k]):.0f} % · {float(weight[i]):.2f}"
    mark = truth = ""
    if samples.labels is not None:
        true = int(samples.labels[i])
        right = flagged if true == len(samples.classes) else not flagged and true == k
        mark = "right" if right else "wrong"
        truth = "" if right else f"is {[*samples.classes, 'unknown'][true]}"
    name = shown(os.path.join(*path.split(os.sep)[-2:]) if os.sep in path else path, 200)  # class and file
    if isinstance(answer, dict):
        return Thumbnail(label, truth, detail, name, uri=f"data:image/jpeg;base64,{answer['jpeg']}", mark=mark)
    return Thumbnail(label, truth, detail, name, problem=f"{os.path.basename(name)}: {answer}", mark=mark)


def data_uri(image: Image.Image, kind: str, **options: object) -> str:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return f"data:image/{kind.lower()};base64,{base64.b64encode(buffer.getvalue()).decode('ascii')}"


def run_picture(id: str, path: Path, title: str, caption: str, alt: str) -> Picture | Note:
    """A picture that the run drew itself, no wider than the page needs."""
    try:
        with Folder(path.parent) as folder:
            content = folder.read(path.name, MOST_PICTURE)
        image = decode_bytes(content, path.name, formats=("PNG",))
    except (DataError, OSError, ValueError) as error:
        return Note(f"{path.name} cannot be shown: {getattr(error, 'reason', '') or 'it cannot be read'}.")
    image.thumbnail((WIDEST, WIDEST), Image.Resampling.LANCZOS)
    uri = data_uri(image, "PNG", optimize=True)
    if len(uri) > 600_000:
        uri = data_uri(image, "JPEG", quality=85)
    return Picture(id, title, uri, image.size, caption, alt)
