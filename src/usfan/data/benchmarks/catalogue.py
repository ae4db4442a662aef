"""The named benchmarks: what the paper and SHOT's recipe fix of each, as data.

Class lists lie in `catalogue_classes.json`, in the order of the published labels. DomainNet's counts are those of its
cleaned version, and its lists leave `t-shirt` out of painting's training split and `syringe` out of its test split.
"""

import json
from importlib import resources
from itertools import permutations
from typing import Any

from usfan.data.benchmarks.benchmark import WHOLE, Benchmark, ClassSplit, Domain, Recipe
from usfan.errors import ConfigError

_CLASSES: dict[str, list[str]] = json.loads(
    resources.files("usfan.data.benchmarks").joinpath("catalogue_classes.json").read_text(encoding="utf-8")
)


BOTH = {"lr": 1e-2, "batch_size": 64, "backbone_lr_scale": 0.1, "weight_decay": 1e-3, "augment": "crop-flip"}
TRAIN = {**BOTH, "label_smoothing": 0.1, "validation_share": 0.1, "patience": 0}
TRAIN |= {"bottleneck": 256, "dropout": 0.0, "head_bias": True}
ADAPT = {**BOTH, "epochs": 15, "pseudo_label_weight": 0.3}
"""SHOT's recipe; a benchmark says what it has otherwise."""


def _recipe(backbone: str, train: dict[str, Any], adapt: dict[str, Any] | None = None, note: str = "") -> Recipe:
    return Recipe({**TRAIN, **train, "backbone": backbone}, {**ADAPT, **(adapt or {})}, note=note)


def _folder(short: str, name: str, count: int, *aliases: str) -> Domain:
    """A domain that is one folder of class folders, under its own name or an alias, perhaps inside `images`."""
    names = dict.fromkeys((name, *aliases))
    return Domain(short, name, (*names, *(f"{alias}/images" for alias in names)), {WHOLE: count})


def _files(folder: str, *names: str) -> tuple[str, ...]:
    """Files that lie in the root, or in a folder of their own."""
    return (*names, *(f"{folder}/{name}" for name in names))


def _every_pair(domains: tuple[Domain, ...]) -> tuple[tuple[str, str], ...]:
    return tuple(permutations([domain.short for domain in domains], 2))


def _office31() -> Benchmark:
    domains = (_folder("A", "amazon", 2817), _folder("D", "dslr", 498), _folder("W", "webcam", 795))
    classes = tuple(_CLASSES["office31"])
    # The ten classes that Caltech-256 has too; of the others by name the last eleven are the target's unknowns.
    shared = "back_pack bike calculator headphones keyboard laptop_computer monitor mouse mug projector"
    known = tuple(shared.split())
    rest = tuple(name for name in classes if name not in known)
    private, unknown = rest[:10], rest[-11:]
    return Benchmark(
        name="office31",
        title="Office-31",
        layout="folders",
        domains=domains,
        classes=classes,
        pairs=_every_pair(domains),
        metric="accuracy",
        recipe=_recipe("resnet50", {"epochs": 100}),
        homepage="https://faculty.cc.gatech.edu/~judy/domainadapt/",
        folders=("office31", "office", "Office-31", "Office31"),
        open_set=ClassSplit(known, known + unknown),
        partial_set=ClassSplit(classes, known),
        universal_set=ClassSplit(known + private, known + unknown),
    )


def _office_home() -> Benchmark:
    domains = (
        _folder("A", "Art", 2427, "art"),
        _folder("C", "Clipart", 4365, "clipart"),
        _folder("P", "Product", 4439, "product"),
        _folder("R", "Real World", 4357, "RealWorld", "Real_World", "Real", "real_world"),
    )
    classes = tuple(_CLASSES["office-home"])
    return Benchmark(
        name="office-home",
        title="Office-Home",
        layout="folders",
        domains=domains,
        classes=classes,
        pairs=_every_pair(domains),
        metric="accuracy",
        recipe=_recipe("resnet50", {"epochs": 50}),
        homepage="https://www.hemanthdv.org/officeHomeDataset.html",
        folders=("OfficeHomeDataset_10072016", "office-home", "office_home", "OfficeHome", "Office-Home"),
        open_set=ClassSplit(classes[:25], classes),
        partial_set=ClassSplit(classes, classes[:25]),
        universal_set=ClassSplit(classes[:15], classes[:10] + classes[15:]),
    )


def _visda_c() -> Benchmark:
    classes = tuple(_CLASSES["visda-c"])
    return Benchmark(
        name="visda-c",
        title="VisDA-C",
        layout="folders",
        domains=(_folder("S", "train", 152_397), _folder("R", "validation", 55_388, "val")),
        classes=classes,
        pairs=(("S", "R"),),
        metric="mean_class_accuracy",
        recipe=_recipe("resnet101", {"epochs": 10, "lr": 1e-3}, {"lr": 1e-3, "pseudo_label_warmup": 1}),
        homepage="https://ai.bu.edu/visda-2017/",
        folders=("visda-c", "VISDA-C", "visda", "visda2017", "VisDA2017"),
        universal_set=ClassSplit(classes[:9], classes[:6] + classes[9:]),
    )


def _domainnet() -> Benchmark:
    sizes = {
        "clipart": (33_525, 14_604),
        "infograph": (36_023, 15_582),
        "painting": (50_416, 21_850),
        "quickdraw": (120_750, 51_750),
        "real": (120_906, 52_041),
        "sketch": (48_212, 20_916),
    }
    absent = {"painting": {"train": ("t-shirt",), "test": ("syringe",)}}
    domains = tuple(
        Domain(name[0].upper(), name, (name,), {"train": train, "test": test}, absent=absent.get(name, {}))
        for name, (train, test) in sizes.items()
    )
    note = "The paper gives neither epochs nor split: we take the published train and test lists, and 20 source epochs."
    return Benchmark(
        name="domainnet",
        title="DomainNet",
        layout="lists",
        domains=domains,
        classes=tuple(_CLASSES["domainnet"]),
        pairs=_every_pair(domains),
        metric="accuracy",
        recipe=_recipe("resnet50", {"epochs": 20}, note=note),
        homepage="https://ai.bu.edu/M3SDA/ (the cleaned version)",
        folders=("domainnet", "DomainNet", "domain_net"),
    )


def _cifar_stl() -> Benchmark:
    cifar = "https://www.cs.toronto.edu/~kriz/cifar.html (the binary version)"
    stl = "https://cs.stanford.edu/~acoates/stl10/ (the binary files)"
    views = {"epochs": 20, "augment": "resized-crop-flip"}
    return Benchmark(
        name="cifar-stl",
        title="CIFAR9→STL9",
        layout="arrays",
        domains=(
            Domain("CIFAR9", "cifar", ("cifar-10-batches-bin",), {"train": 45_000, "test": 9_000}, homepage=cifar),
            Domain("STL9", "stl", ("stl10_binary",), {"train": 4_500, "test": 7_200}, homepage=stl),
        ),
        classes=tuple(_CLASSES["cifar-stl"]),
        pairs=(("CIFAR9", "STL9"),),
        metric="accuracy",
        recipe=_recipe("cnn13", {**views, "bottleneck": 0, "head_bias": False}, {**views, "lr": 1e-3}),
        homepage=f"{cifar} and {stl}",
        folders=("cifar-stl",),
    )


def _digits() -> Benchmark:
    mnist = "http://yann.lecun.com/exdb/mnist/"
    usps = "https://www.csie.ntu.edu.tw/~cjlin/libsvmtools/datasets/multiclass.html#usps"
    svhn = "http://ufldl.stanford.edu/housenumbers/ (format 2, train_32x32.mat and test_32x32.mat)"
    idx = ("MNIST/raw/train-images-idx3-ubyte", "mnist/train-images-idx3-ubyte", "train-images-idx3-ubyte")
    mats = _files("svhn", "svhn.npz", "train_32x32.mat")
    note = "SHOT splits USPS into 7,438 and 1,860 images; here it is the published split, 7,291 and 2,007."
    both = {"epochs": 30, "augment": "none", "backbone_lr_scale": 1.0}
    train, adapt = {**both, "dropout": 0.5}, {**both, "pseudo_label_weight": 0.1}
    return Benchmark(
        name="digits",
        title="Digits",
        layout="arrays",
        domains=(
            Domain("M", "mnist", ("mnist.npz", *idx), {"train": 60_000, "test": 10_000}, homepage=mnist),
            Domain("U", "usps", _files("usps", "usps.npz", "usps.bz2"), {"train": 7_291, "test": 2_007}, homepage=usps),
            Domain("S", "svhn", mats, {"train": 73_257, "test": 26_032}, homepage=svhn, optional=True),
        ),
        classes=tuple(_CLASSES["digits"]),
        pairs=(("M", "U"), ("U", "M"), ("S", "M")),
        metric="accuracy",
        recipe=_recipe("lenet", train, adapt, note),
        homepage=f"{mnist}, {usps} and {svhn}",
        folders=("digits",),
        recipes={
            "S": _recipe("dtn", train, adapt, note),
            "U": _recipe("lenet", {**train, "augment": "shift-turn"}, adapt, note),
        },
    )


BENCHMARKS: dict[str, Benchmark] = {
    benchmark.name: benchmark
    for benchmark in (_office31(), _office_home(), _visda_c(), _domainnet(), _cifar_stl(), _digits())
}


def benchmark(name: str) -> Benchmark:
    """The benchmark with this name."""
    if name not in BENCHMARKS:
        raise ConfigError(f"no benchmark {name!r} in the catalogue; it has {', '.join(BENCHMARKS)}")
    return BENCHMARKS[name]
