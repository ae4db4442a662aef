"""Networks of `transformers` (extra `usfan[transformers]`): image classifiers with their head, classes and input, and
vision models of any kind as backbones.

A folder of `save_pretrained` holds config.json, the weights, and preprocessor_config.json if its image processor was
saved too. It may be a stranger's: usfan reads these files itself, weights from safetensors only, and hands transformers
what they hold. So no code beside them runs, nothing is downloaded, and no network is larger than its file.
"""

from __future__ import annotations

import contextlib
import logging
import math
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from PIL.Image import Resampling
from torch import Tensor, nn

from usfan.data.labels import canonical
from usfan.data.views import InputSpec
from usfan.errors import ArtifactError, ConfigError, first_line, printable
from usfan.files import Folder, parse_json, read_in, read_named, write_json
from usfan.models.backbones import Backbone, as_head, probe_features, weights_hash
from usfan.models.classifier import example_of, wrap_module
from usfan.models.hub import cache_only
from usfan.tensor_file import check_values, open_tensors_in, read_tensors

PROCESSOR = "preprocessor_config.json"
PROCESSORS = (PROCESSOR, "processor_config.json")
"""Files of an image processor: alone, or together with a tokenizer."""
COUNTS = ("layer", "depth", "block", "stage")
"""Parts of the names of settings that count layers."""
NAMES = ("id2label", "label2id", "num_labels")
REMOTE = (
    "auto_map",
    "quantization_config",
    "_name_or_path",
    "_attn_implementation",
    "attn_implementation",
)
"""Settings of config.json that name code, another format or a place."""
CONFIG = "config.json"
WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors")
MOST_MISSING = 1 << 20
"""Values that a network may have and its file may lack: `refuse_misfits` names the first tensor that is missing."""
MOST_PROCESSOR = 1 << 20
"""Bytes of the file of an image processor."""
PROBLEMS = ("missing_keys", "mismatched_keys", "unexpected_keys")
JsonTable = dict[str, Any]


class LogitsOf(nn.Module):
    """A classifier of transformers as a plain module: images B×C×S×S → logits B×K."""

    def __init__(self, network: Any) -> None:
        super().__init__()
        self.network = network

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.network(pixel_values=images).logits
        return logits


class PooledFeatures(nn.Module):
    """A vision model of transformers as a backbone: images B×C×S×S → features B×F."""

    def __init__(self, network: Any) -> None:
        super().__init__()
        self.network = network

    def forward(self, images: Tensor) -> Tensor:
        output = self.network(pixel_values=images)
        pooled = getattr(output, "pooler_output", None)
        if isinstance(pooled, Tensor):
            return pooled.flatten(1)
        last: Tensor = output.last_hidden_state
        return last.mean(dim=(2, 3)) if last.ndim == 4 else last[:, 0]  # the class token


def library() -> Any:
    """The package, imported only if it is needed."""
    try:
        return import_module("transformers")
    except ImportError:
        raise ConfigError(
            "this is a model of transformers: pip install 'usfan[transformers]'"
        ) from None


def is_network(module: object) -> bool:
    """Whether a module comes from transformers, which is imported then."""
    package = sys.modules.get("transformers")
    return package is not None and isinstance(module, package.PreTrainedModel)


def head_of(network: Any) -> str:
    """Name of the last layer inside `LogitsOf`: the one Linear outside the base model that gives the logits."""
    names = []
    body = f"{network.base_model_prefix}."
    for name, layer in network.named_modules():
        if isinstance(layer, nn.Linear) and layer.out_features == network.config.num_labels:
            names.append(name)
    outside = [name for name in names if not name.startswith(body)] or names[-1:]
    kind = type(network).__name__
    if len(outside) > 1:
        raise ConfigError(
            f"{kind} averages {len(outside)} heads ({', '.join(outside)}), and a posterior is of one: load the weights "
            "as the architecture with one head, such as DeiTForImageClassification"
        )
    if not outside:
        raise ConfigError(
            f"{kind} has no Linear layer with {network.config.num_labels} outputs: it is no image classifier; load it "
            "with AutoModelForImageClassification"
        )
    return f"network.{outside[0]}"


def class_names(network: Any) -> tuple[str, ...] | None:
    """`id2label` in its order; None if nobody named the classes. A second class of the same name gets its number."""
    table = {int(number): str(name) for number, name in network.config.id2label.items()}
    names: list[str] = []
    for number, name in sorted(table.items()):
        is_new = canonical(name) not in map(canonical, names)
        names.append(name if is_new else f"{name} ({number})")
    is_numbered = names == [f"LABEL_{number}" for number in range(len(names))]
    return None if is_numbered else tuple(names)


def input_of(network: Any) -> InputSpec | None:
    """The input that the image processor beside the model gives: in the folder that it was loaded from, or in the
    Hub's cache. None if there is none."""
    from huggingface_hub import try_to_load_from_cache

    place = str(network.name_or_path)
    if not place or Path(place).is_dir():
        return processor_in(Path(place)) if place else None
    with contextlib.suppress(ValueError):  # no Hub id
        for name in PROCESSORS:
            file = try_to_load_from_cache(place, name)
            if isinstance(file, str):
                return processor_in(Path(file).parent)
    return None


def processor_in(folder: Path) -> InputSpec | None:
    """The input that the image processor in a folder prepares; None if there is none."""
    file = next((folder / name for name in PROCESSORS if (folder / name).is_file()), None)
    if file is None:
        return None
    try:
        return spec_of(read_processor(file))
    except ConfigError:
        raise
    except Exception as error:  # of transformers: the file is a stranger's
        reason = printable(first_line(error) or type(error).__name__, 200)
        raise ConfigError(f"{file}: {reason}") from error


def read_processor(file: Path) -> Any:
    """The image processor that a stranger's file describes, without code of its own."""
    values = parse_json(read_named(file, MOST_PROCESSOR))
    if not isinstance(values, dict):
        raise ConfigError(f"{file}: expected a table")
    with tempfile.TemporaryDirectory() as folder, quiet(), cache_only():
        write_json(Path(folder, file.name), without_remote(values))
        return library().AutoImageProcessor.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )


def spec_of(processor: Any) -> InputSpec:
    """The input that an image processor of transformers prepares. Sizes that are not square are refused."""
    values = processor.to_dict()
    size = dict(values["size"])
    kernel = Resampling(int(values.get("resample", Resampling.BILINEAR))).name.lower()
    keeps_proportions = "shortest_edge" in size
    resize = int(size.get("shortest_edge") or size.get("height") or 0)
    cut = dict(values.get("crop_size") or {}).get("height", resize)
    cut = cut if values.get("do_center_crop") else resize
    if values.get("crop_pct") and keeps_proportions:
        keeps_proportions = resize < 384  # ConvNeXt's processor squashes larger images
        resize = int(resize / values["crop_pct"]) if keeps_proportions else resize
    if size.get("width") != size.get("height") or not 0 < cut <= resize:
        raise ConfigError(
            f"the image processor prepares images of {size}, and usfan takes square ones: pass spec=usfan.InputSpec(…)"
        )
    mean = tuple(values.get("image_mean") or (0.0, 0.0, 0.0))
    std = tuple(values.get("image_std") or (1.0, 1.0, 1.0))
    if not values.get("do_normalize", True):
        mean = (0.0,) * len(mean)
        std = (1.0,) * len(std)
    scale = 255 * float(values.get("rescale_factor", 1 / 255))
    if not values.get("do_rescale", True) or abs(scale - 1) > 1e-6:
        raise ConfigError(
            "the image processor does not scale pixels to 0…1: pass spec=usfan.InputSpec(…)"
        )
    return InputSpec(
        len(mean),
        int(cut),
        resize,
        mean,
        std,
        resampling=f"{kernel}-crop" if keeps_proportions else kernel,
    )


def processor_of(spec: InputSpec) -> dict[str, Any]:
    """preprocessor_config.json for an input."""
    kernel = Resampling[spec.resampling.removesuffix("-crop").upper()]
    size = {"height": spec.resize, "width": spec.resize}
    if spec.resampling.endswith("-crop"):
        size = {"shortest_edge": spec.resize}
    return {
        "image_processor_type": "DeiTImageProcessor",  # it resizes and crops, and nothing else
        "do_resize": True,
        "size": size,
        "resample": int(kernel),
        "do_center_crop": True,
        "crop_size": {"height": spec.size, "width": spec.size},
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": list(spec.mean),
        "image_std": list(spec.std),
    }


def config_of(network: Any) -> dict[str, Any]:
    """config.json of a network, as `save_pretrained` writes it, without the names of its classes."""
    values: dict[str, Any] = network.config.to_diff_dict()
    values["architectures"] = [type(network).__name__]
    values["dtype"] = "float32"
    return {name: value for name, value in values.items() if name not in (*REMOTE, *NAMES)}


def is_saved_network(folder: Folder) -> bool:
    """Whether a folder is one of `save_pretrained`, and no model folder of ours."""
    if folder.kind(CONFIG) == "missing" or folder.holds("posterior.safetensors"):
        return False
    config = read_in(folder, CONFIG)
    return isinstance(config, dict) and "model_type" in config


def checked_sketch(values: Mapping[str, Any], tensors: Mapping[str, Sequence[int]]) -> LogitsOf:
    """The network that a stranger's config.json describes, without memory; its file holds tensors of these shapes."""
    check_layers(values, len(tensors))
    classifier = library().AutoModelForImageClassification
    return LogitsOf(sketch_of(classifier, network_config(values), tensors))


def check_layers(values: Mapping[str, Any], tensors: int) -> None:
    """A network cannot have more layers than its file has tensors."""
    for name, value in values.items():
        counts = value if isinstance(value, list) else [value]
        is_count = any(part in str(name) for part in COUNTS)
        if is_count and any(isinstance(count, int) and count > tensors for count in counts):
            raise ArtifactError(
                f"{printable(str(name), 80)}: more layers than the file has tensors"
            )
        if isinstance(value, dict):
            check_layers(value, tensors)


def sketch_of(kind: Any, config: Any, tensors: Mapping[str, Sequence[int]]) -> Any:
    """A network without memory, which is hardly larger than the tensors of its file."""
    try:
        with quiet(), cache_only(), torch.device("meta"):
            sketch = kind.from_config(config, trust_remote_code=False)
    except Exception as error:  # of transformers: the config is a stranger's
        raise ArtifactError(
            f"transformers cannot make this network: {printable(first_line(error), 200)}"
        ) from error
    stored = sum(map(math.prod, tensors.values()))
    needed = sum(tensor.numel() for tensor in sketch.state_dict().values())
    if needed > stored + MOST_MISSING:
        raise ArtifactError(f"it holds {stored} values, and the network has {needed}")
    return sketch


def fill_network(sketch: LogitsOf, state: dict[str, Tensor]) -> LogitsOf:
    """The network of a sketch with these weights, whose names are those in the file."""
    network, problems = with_weights(sketch.network, state)
    refuse_misfits("the weights", network, problems, PROBLEMS)
    return LogitsOf(network)


def load_network(folder: Folder) -> Any:
    """The classifier in a folder of `save_pretrained`."""
    values = read_in(folder, CONFIG)
    with open_weights(folder) as tensors:
        sketch = checked_sketch(values, shapes_of(tensors))
        network = fill_network(sketch, read_all(folder, tensors)).network
    network.name_or_path = str(folder.path)
    return network


@contextlib.contextmanager
def open_weights(folder: Folder) -> Iterator[dict[str, Any]]:
    """The open file that holds each tensor of a folder of `save_pretrained`."""
    files = [name for name in folder.names() if WEIGHTS.fullmatch(name)]
    if not files:
        raise ConfigError(f"{folder.path}: no model.safetensors; usfan reads no other weights")
    with contextlib.ExitStack() as stack:
        parts = [stack.enter_context(open_tensors_in(folder, name)) for name in files]
        yield {name: part for part in parts for name in part.keys()}  # noqa: SIM118


def shapes_of(tensors: Mapping[str, Any]) -> dict[str, Sequence[int]]:
    return {name: part.get_slice(name).get_shape() for name, part in tensors.items()}


def read_all(folder: Folder, tensors: Mapping[str, Any]) -> dict[str, Tensor]:
    """All tensors, which must be finite numbers."""
    state = {name: part.get_tensor(name) for name, part in tensors.items()}
    check_values(folder.path, state)
    return state


def local_config(folder: Folder) -> Any:
    """The config in a folder of `save_pretrained`."""
    values = read_in(folder, CONFIG)
    if not isinstance(values, dict) or "model_type" not in values:
        raise ConfigError(
            f"{folder.path}: {CONFIG} names no model_type: this is no folder of transformers"
        )
    return network_config(values)


def network_config(values: Mapping[str, Any]) -> Any:
    """The config that a stranger's config.json describes, without what names code, another format or a place."""
    try:
        with quiet(), cache_only():
            return library().AutoConfig.for_model(**without_remote(values))
    except Exception as error:  # of transformers: the config is a stranger's
        raise ArtifactError(
            f"transformers cannot make this network: {printable(first_line(error), 200)}"
        ) from error


def without_remote(values: Mapping[str, Any]) -> JsonTable:
    fields = {}
    for name, value in values.items():
        if name not in REMOTE:
            fields[name] = without_remote(value) if isinstance(value, dict) else value
    return fields


def load_backbone(folder: Folder) -> Backbone:
    """A vision model in a folder of `save_pretrained`, with the classifier that it was pretrained with if there is one.
    Of a model of images and texts, the part for images."""
    config = local_config(folder)
    spec = processor_in(folder.path)
    if spec is None:
        raise ConfigError(
            f"{folder.path}: no {PROCESSOR} in it says how images are prepared: save the image processor there too"
        )
    head = None
    module: nn.Module
    if str((config.architectures or [""])[0]).endswith("ForImageClassification"):
        network = load_network(folder)
        wrapped = wrap_module(LogitsOf(network), head_of(network), example_of(spec))
        module = wrapped.backbone
        head = as_head(list(wrapped.head.state_dict().values()), wrapped.head.in_features)
    else:
        module = PooledFeatures(load_body(folder, config))
    weights = {"from": "transformers", "hash": weights_hash(module)}
    return Backbone(module, probe_features(module, spec), spec, weights, classifier=head)


def load_body(folder: Folder, config: Any) -> Any:
    """The network without a classifier. The files of DINO, and of classifiers, have no weights for a pooler: the class
    token is the feature then."""
    config = getattr(config, "vision_config", config)
    with open_weights(folder) as tensors:
        check_layers(config.to_dict(), len(tensors))
        sketch = sketch_of(library().AutoModel, config, shapes_of(tensors))
        network, problems = with_weights(sketch, read_all(folder, tensors))
    missing = problems["missing_keys"]
    if missing and all(str(name).startswith("pooler.") for name in missing):
        network.pooler = None
        problems["missing_keys"] = set()
    refuse_misfits(str(folder.path), network, problems, ("missing_keys", "mismatched_keys"))
    return network


def with_weights(sketch: Any, state: dict[str, Tensor]) -> tuple[Any, JsonTable]:
    """The network of a sketch in test mode, and the names of the tensors that do not fit, by the kind of the problem;
    transformers would draw missing ones at random."""
    try:
        with quiet():
            network, problems = type(sketch).from_pretrained(
                None,
                config=sketch.config,
                state_dict=state,
                dtype=torch.float32,
                output_loading_info=True,
            )
    except Exception as error:  # of transformers: the weights are a stranger's
        raise ConfigError(
            f"transformers cannot make a network of these weights: {printable(first_line(error), 300)}"
        ) from error
    return network.eval(), problems


def refuse_misfits(what: str, network: Any, problems: JsonTable, kinds: Sequence[str]) -> None:
    for kind in kinds:
        names = sorted(map(str, problems[kind]))
        if names:
            raise ConfigError(
                f"{what}: {kind.replace('_keys', '')} tensor {printable(names[0], 200)}: this is no trained "
                f"{type(network).__name__}"
            )


def stored_tensors(network: LogitsOf, head_name: str, head: nn.Module) -> dict[str, Tensor]:
    """The tensors of a network whose head was taken out, under the names that `save_pretrained` gives them."""
    prefix = head_name.removeprefix("network.")
    state = network.network.state_dict()
    state |= {f"{prefix}.{name}": tensor for name, tensor in head.state_dict().items()}
    with tempfile.TemporaryDirectory() as folder, quiet():
        network.network.save_pretrained(folder, state_dict=state, max_shard_size="1TB")
        return read_tensors(Path(folder, "model.safetensors"))


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """No progress bars and no advice of transformers inside."""
    transformers = library()
    logging_module = transformers.utils.logging
    level = logging_module.get_verbosity()
    shows_bars = logging_module.is_progress_bar_enabled()
    logging_module.set_verbosity(logging.ERROR)
    logging_module.disable_progress_bar()
    try:
        yield
    finally:
        logging_module.set_verbosity(level)
        if shows_bars:
            logging_module.enable_progress_bar()
