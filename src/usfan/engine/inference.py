"""Features of images without a gradient: f = backbone((x / 255 − mean) / std), x the middle of a picture.

torch computes them; on a CPU OpenVINO does if it is installed (`usfan[fast]`), if the pass is long enough to pay for
the conversion, if its features g agree with torch's on the first images, ‖g − f‖ ≤ ε ‖f‖, with the same labels and
nearly the same probabilities, and, unless the user asks for it, if it is not slower.

Shapes: B pictures of C×R×R bytes, F features.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import math
import queue
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor, nn

from usfan.data.views import InputSpec
from usfan.engine.passes import PASS_BATCH, SMALL_PICTURES, faster_laid_out, pass_images
from usfan.engine.runtime import Runtime, give_memory_back
from usfan.errors import ConfigError, option
from usfan.models.classifier import Classifier, is_layout_free, plain_layout
from usfan.progress import say
from usfan.threads import use

log = logging.getLogger(__name__)

PIECE = 16
"""Images that one thread of a CPU takes at a time: a quarter of the memory of a batch, and the same bits. In pieces of
8 a convolution adds up in another order."""
COMPARED = 16
"""Images on which OpenVINO is compared with torch."""
COMPARED_AT_ONCE = 8
"""Of these: torch takes 20 to 30 MiB for a picture, and little else takes so much."""
WORTH_CONVERTING = 500
"""Images from which OpenVINO is tried: to convert a network takes about two seconds."""
MOST_TIME = 1.25
"""Times the time of torch on the compared images: OpenVINO may take so long, because the clock is not exact."""


BOUNDS = {"bf16": (0.06, 0.02), "32": (1e-3, 1e-3)}
"""ε, and how far a probability may move, by precision. bfloat16 has three digits: on Office-31 the features differ by
0.04, and probabilities by 0.001 on average."""

FeaturePass = Callable[[Tensor], Tensor]
"""Gives B×F features of pictures."""


class BackboneAlone(nn.Module):
    """Gives the features of the backbone instead of those of the bottleneck."""

    def __init__(self, backbone: nn.Module, *, channels_last: bool = True) -> None:
        super().__init__()
        self.backbone = backbone
        self.channels_last = channels_last

    @classmethod
    def of(cls, network: Classifier | BackboneAlone) -> BackboneAlone:
        """In test mode."""
        return cls(network.backbone, channels_last=network.channels_last).eval()

    def extract(self, images: Tensor) -> Tensor:
        features: Tensor = self.backbone(images)
        return features


def on_features(classifier: Classifier) -> Classifier:
    """The layers after the backbone as a classifier of its features. They are the same layers: training one trains the
    other."""
    light = Classifier.__new__(Classifier)
    nn.Module.__init__(light)
    light.backbone = nn.Identity()
    light.bottleneck = classifier.bottleneck
    light.head = classifier.head
    return light


def engines(spec: InputSpec, runtime: Runtime, count: int) -> tuple[str, ...]:
    """The engines to try for so many images, the best one first: `torch`, or OpenVINO and its precision."""
    if runtime.engine not in ("auto", "openvino"):
        return (runtime.engine,)
    from usfan.engine.openvino_pass import is_installed, precisions

    forced = runtime.engine == "openvino"
    if forced and not is_installed():
        raise ConfigError(
            f"{option('engine', 'openvino')}: OpenVINO is not installed; install usfan[fast]"
        )
    worth = forced or (count >= WORTH_CONVERTING and spec.size > SMALL_PICTURES)
    if not worth or runtime.device.type != "cpu" or runtime.world > 1 or not is_installed():
        return ("torch",)
    tried = [f"openvino-{p}" for p in runtime.engine_precisions if p in precisions()]
    return (*tried, "torch")


@contextlib.contextmanager
def feature_pass(
    network: Classifier | BackboneAlone,
    spec: InputSpec,
    runtime: Runtime,
    sample: Tensor,
    count: int,
) -> Iterator[tuple[FeaturePass, str]]:
    """The pass for `count` pictures, and the name of its engine. `sample` are some of the pictures. The labels of a
    `Classifier` are compared too, so it must be trained."""
    alone = BackboneAlone.of(network)
    with torch_pass(alone, spec, runtime) as plain:
        through = plain
        name = "torch"
        most_time = MOST_TIME if runtime.engine == "auto" else math.inf
        try:
            for candidate in engines(spec, runtime, count):
                if candidate == "torch":
                    break
                fast = openvino_pass(
                    network, alone, spec, candidate, plain, sample[:COMPARED], most_time
                )
                if fast is not None:
                    through = fast
                    name = candidate
                    break
        except CannotConvert as error:
            say(f"torch computes the features: OpenVINO {error}")
        give_memory_back()
        yield through, name
    give_memory_back()


class CannotConvert(Exception):
    """OpenVINO does not know the network's operations."""


@torch.no_grad()
def openvino_pass(
    network: Classifier | BackboneAlone,
    alone: BackboneAlone,
    spec: InputSpec,
    name: str,
    plain: FeaturePass,
    sample: Tensor,
    most_time: float,
) -> FeaturePass | None:
    """The pass by OpenVINO, or None, with a line that says why."""
    from usfan.engine.openvino_pass import converted

    precision = name.removeprefix("openvino-")
    try:
        fast, is_new = converted(alone.backbone, spec, precision, torch.get_num_threads())
    except Exception as error:  # an operation that it does not know raises whatever it likes
        reason = " ".join(str(error).split())
        raise CannotConvert(f"cannot convert the network ({reason:.200})") from error
    features, seconds = timed(plain, sample)
    other, fast_seconds = timed(fast, sample)
    reason = difference(network, features, other, precision)
    if not reason and fast_seconds > most_time * seconds:
        reason = f"{fast_seconds / seconds:.1f} times the time of torch"
    if reason:
        say(f"{name} is not used: {reason}")
    elif is_new:
        speed = f"{seconds / fast_seconds:.1f} times as fast"
        say(f"{name} computes the features: as torch's on {len(sample)} images, {speed}")
    return None if reason else fast


def timed(through: FeaturePass, sample: Tensor) -> tuple[Tensor, float]:
    """Features, and the seconds of a second pass: the first one sets up."""
    parts = sample.split(COMPARED_AT_ONCE)
    through(parts[0])
    started = time.perf_counter()
    features = torch.cat([through(part) for part in parts])
    return features, time.perf_counter() - started


@torch.no_grad()
def difference(
    network: Classifier | BackboneAlone, features: Tensor, other: Tensor, precision: str
) -> str:
    """The figure that is too far from torch; empty if all are within the bounds."""
    most_error, most_change = BOUNDS[precision]
    error = float((other - features).norm() / features.norm().clamp(min=1e-12))
    if not error <= most_error:
        return f"its features differ by {error:.1%}"
    if isinstance(network, BackboneAlone):
        return ""
    head = on_features(network).eval()
    probs, others = (head(values)[1].softmax(dim=1) for values in (features, other))
    change = float((probs - others).abs().max())
    if not change <= most_change:
        return f"its probabilities differ by {change:.3f}"
    labels = int((probs.argmax(dim=1) != others.argmax(dim=1)).sum())
    return f"it changes the labels of {labels} of {len(probs)} images" if labels else ""


@contextlib.contextmanager
def laid_out(backbone: nn.Module, spec: InputSpec, runtime: Runtime) -> Iterator[None]:
    """Channels last on a CPU if that is faster for this network; its own layout afterwards."""
    free = runtime.device.type == "cpu" and is_layout_free(backbone)
    if not free or not faster_laid_out(backbone, spec):
        yield
        return
    backbone.to(memory_format=torch.channels_last)
    try:
        yield
    finally:
        plain_layout(backbone)


@contextlib.contextmanager
def torch_pass(
    alone: BackboneAlone, spec: InputSpec, runtime: Runtime
) -> Iterator[FeaturePass]:
    """The pass of a batch by torch. On a CPU it is cut into pieces, and each thread takes a piece of its own
    through all layers: within a layer threads would wait for each other, at the end of every one. Each thread has a
    copy of the network; one that cannot be copied takes one piece after another."""
    if runtime.device.type != "cpu" or spec.size <= SMALL_PICTURES:
        with laid_out(alone.backbone, spec, runtime):
            yield functools.partial(pass_images, alone, spec=spec, runtime=runtime)
        return
    threads = torch.get_num_threads()
    networks: queue.SimpleQueue[BackboneAlone] = queue.SimpleQueue()

    @torch.no_grad()  # each thread has its own mode
    def pass_piece(pictures: Tensor) -> Tensor:
        network = networks.get()
        try:
            return pass_images(network, pictures, spec, runtime)
        finally:
            networks.put(network)

    def pass_pieces(pictures: Tensor) -> Tensor:
        pieces = pictures.tensor_split(max(1, len(pictures) // PIECE))
        before = torch.get_num_threads()
        use(max(1, threads // count))
        try:
            return torch.cat(list(pool.map(pass_piece, pieces)))
        finally:
            use(before)

    with laid_out(alone.backbone, spec, runtime):
        several = copies(alone, min(threads, PASS_BATCH // PIECE))
        count = len(several)
        for network in several:
            networks.put(network)
        with ThreadPoolExecutor(count) as pool:
            yield pass_pieces


def copies(alone: BackboneAlone, count: int) -> list[BackboneAlone]:
    """The network and copies of it with the same tensors: a layer may note something in itself. The network alone if it
    has hooks, which all copies would share together with what they write to, or cannot be copied."""
    if any(part._forward_hooks or part._forward_pre_hooks for part in alone.modules()):
        return [alone]
    tensors = [*alone.parameters(), *alone.buffers()]
    try:
        others = [copy.deepcopy(alone, {id(t): t for t in tensors}) for _ in range(1, count)]
    except Exception as error:  # a user's network may hold anything, such as a lock
        log.debug(
            "the backbone cannot be copied, so threads do not share the images: %s", error
        )
        return [alone]
    return [alone, *others]
