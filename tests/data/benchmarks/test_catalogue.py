"""The catalogue: its facts, and the check of a copy on disk against it."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import lookalikes
from usfan.config import AdaptConfig, TrainConfig, make_config
from usfan.data.benchmarks.catalogue import BENCHMARKS, benchmark
from usfan.data.benchmarks.layouts import check, load_domain
from usfan.errors import ConfigError, DataError
from usfan.models.small_backbones import SMALL_BACKBONES

SHARED = Path(__file__).resolve().parents[3].parent / "shared" / "data"
FOLDERS = ("office31", "office-home", "visda-c", "domainnet")


def load(name, root, *domain, **options):
    return load_domain(check(benchmark(name), root, allow_counts=True), *domain, **options)


@pytest.fixture(scope="module")
def copies(tmp_path_factory):
    """Look-alikes of the folder benchmarks, written once; tests that change one copy it first."""
    made: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in made:
            made[name] = lookalikes.make(name, tmp_path_factory.mktemp(name))
        return made[name]

    return get


@pytest.fixture
def own_copy(tmp_path):
    """A look-alike that the test may change; few classes, so that it is written quickly."""
    return lambda name, **options: lookalikes.make(name, tmp_path / name, **options)


@pytest.mark.parametrize(
    ("name", "classes", "pairs", "images"),
    [
        ("office31", 31, 6, 4_110),
        ("office-home", 65, 12, 15_588),
        ("visda-c", 12, 1, 207_785),
        ("domainnet", 345, 30, 586_575),
        ("cifar-stl", 9, 1, 65_700),
        ("digits", 10, 3, 178_587),
    ],
)
def test_published_sizes(name, classes, pairs, images):
    entry = benchmark(name)
    assert len(entry.classes) == len(set(entry.classes)) == classes
    assert len(entry.pairs) == pairs
    assert sum(sum(domain.counts.values()) for domain in entry.domains) == images
    assert all(
        {source, target} <= {d.short for d in entry.domains} for source, target in entry.pairs
    )


def test_class_order_is_the_published_one():
    home = benchmark("office-home").classes
    assert list(home) == sorted(home, key=str.lower)
    assert (home[0], home[24], home[-1]) == ("Alarm_Clock", "Fork", "Webcam")
    # Labels 300 and 327 of DomainNet's lists are known for their gaps in painting.
    assert benchmark("domainnet").classes[300] == "syringe"
    assert benchmark("domainnet").classes[327] == "t-shirt"


def test_class_splits():
    home = benchmark("office-home").class_split("open")
    assert (len(home.source), len(home.target)) == (25, 65)
    partial = benchmark("office-home").class_split("partial")
    assert (len(partial.source), partial.target) == (65, home.source)
    office = benchmark("office31").class_split("open")
    unknown = [name for name in office.target if name not in office.source]
    assert (len(office.source), len(unknown), len(office.target)) == (10, 11, 21)
    assert (unknown[0], unknown[-1]) == ("pen", "trash_can")
    assert "bike_helmet" not in office.target
    with pytest.raises(ConfigError, match="VisDA-C has no open-set split"):
        benchmark("visda-c").class_split("open")


def test_a_preset_replaces_what_all_benchmarks_share_and_nothing_else():
    """The paper's weight decay is its own; CIFAR9→STL9 keeps the rates of its program."""
    from usfan.config import read_preset

    office = benchmark("office31").recipe
    cifar = benchmark("cifar-stl").recipe
    paper = read_preset("paper", "train")
    assert "weight_decay" not in office.under(paper, office.train)
    assert office.under(paper, office.train)["epochs"] == 100
    rates = read_preset("authors", "nrc")
    assert "lr" not in office.under(rates, office.adapt)
    assert cifar.under(rates, cifar.adapt)["lr"] == 1e-3


def test_cifar_stl_is_as_the_authors_have_it():
    """A plain linear head without bias, no dropout, all images trained on. The source stage has one rate; the program
    adapts with --lr 1e-3 (its README), of which the feature extractor gets a tenth."""
    recipe = benchmark("cifar-stl").recipe
    train = {"bottleneck": 0, "head_bias": False, "head_norm": False, "validation_share": 0.0}
    train |= {"backbone_lr_scale": 1.0, "lr": 0.01, "epochs": 20, "tune": "all"}
    assert {name: recipe.train[name] for name in train} == train
    adapt = {"lr": 1e-3, "backbone_lr_scale": 0.1, "epochs": 20, "tune": "all"}
    assert {name: recipe.adapt[name] for name in adapt} == adapt
    network = SMALL_BACKBONES["cnn13"]()
    assert not any(isinstance(layer, torch.nn.Dropout) for layer in network.modules())


def test_recipes_follow_the_protocol():
    epochs = {
        name: (b.recipe.train["epochs"], b.recipe.adapt["epochs"])
        for name, b in BENCHMARKS.items()
    }
    assert epochs["office31"] == (100, 15)
    assert epochs["office-home"] == (50, 15)
    assert epochs["visda-c"] == (10, 15)
    assert epochs["digits"] == (30, 30)
    assert epochs["cifar-stl"] == (20, 20)
    visda = benchmark("visda-c").recipe
    assert visda.train["lr"] == visda.adapt["lr"] == 1e-3
    assert visda.adapt["pseudo_label_warmup"] == 1
    assert "pseudo_label_warmup" not in benchmark("office31").recipe.adapt  # left to the method
    assert benchmark("digits").recipe_for("svhn").train["backbone"] == "dtn"
    assert benchmark("digits").recipe_for("M").train["backbone"] == "lenet"
    views = {
        domain: benchmark("digits").recipe_for(domain).train["augment"] for domain in "MUS"
    }
    assert views == {"M": "none", "U": "shift-turn", "S": "none"}
    for entry in BENCHMARKS.values():  # every name is a setting
        make_config(TrainConfig, dict(entry.recipe.train))
        own = {k: v for k, v in entry.recipe.adapt.items() if not k.startswith("pseudo_label")}
        make_config(AdaptConfig, own)


@pytest.mark.parametrize("name", FOLDERS)
def test_a_copy_with_other_counts_passes_only_when_allowed(name, copies):
    entry = benchmark(name)
    found = check(benchmark(name), copies(name), allow_counts=True)
    assert set(found.places) == {domain.short for domain in entry.domains}
    assert found.pairs == entry.pairs
    assert found.classes == entry.classes
    assert found.notes
    first = entry.domains[0]
    with pytest.raises(
        DataError,
        match=rf"{first.name}.* holds \d+ images, {next(iter(first.counts.values()))} expected",
    ):
        check(benchmark(name), copies(name))


@pytest.mark.parametrize("name", FOLDERS)
def test_labels_are_the_catalogue_s(name, copies):
    data = load(name, copies(name), benchmark(name).domains[-1].short)
    assert data.classes == benchmark(name).classes
    assert len(data) == (2 if name == "domainnet" else 3) * len(data.classes)
    for i in (0, len(data) // 2, len(data) - 1):
        assert Path(data.paths[i]).parent.name == data.classes[data.labels[i]]
    assert data.load(0).shape == (3, lookalikes.SIDE, lookalikes.SIDE)


def test_exact_counts_pass(copies):
    """A benchmark whose published counts are those of the copy passes, without notes."""
    entry = benchmark("office31")
    entry = replace(
        entry, domains=tuple(replace(domain, counts={"all": 93}) for domain in entry.domains)
    )
    found = check(entry, copies("office31"))
    assert found.notes == ()
    assert found.counts == {"A": 93, "D": 93, "W": 93}


def test_missing_domain_is_named_with_where_to_get_it(own_copy):
    root = own_copy("office31", images=1)
    shutil.rmtree(root / "webcam")
    with pytest.raises(DataError) as caught:
        check(benchmark("office31"), root, allow_counts=True)
    message = str(caught.value)
    assert "Office-31 at" in message
    assert "domain 'webcam' is missing (looked for webcam, webcam/images)" in message
    assert "published at https://" in message
    assert "\n" not in message


def test_renamed_class_names_both(own_copy):
    root = own_copy("office31", images=1)
    (root / "dslr" / "back_pack").rename(root / "dslr" / "rucksack")
    with pytest.raises(
        DataError,
        match=r"dslr has 1 class \(rucksack\) .* lacks 1 class \(back_pack\) \(renamed\?\)",
    ):
        check(benchmark("office31"), root, allow_classes=True)


def test_class_that_is_gone(own_copy):
    root = own_copy("office31", images=1)
    shutil.rmtree(root / "amazon" / "pen")
    with pytest.raises(DataError, match=r"amazon lacks 1 class \(pen\)"):
        check(benchmark("office31"), root, allow_counts=True)
    found = check(benchmark("office31"), root, allow_classes=True)
    assert len(found.classes) == 30
    assert "pen" not in found.classes
    assert "pen" not in found.class_split("open").target


def test_one_image_too_few(copies, tmp_path):
    root = tmp_path / "office31"
    shutil.copytree(copies("office31"), root)
    entry = benchmark("office31")
    entry = replace(
        entry, domains=tuple(replace(domain, counts={"all": 93}) for domain in entry.domains)
    )
    next((root / "amazon" / "mug").iterdir()).unlink()
    with pytest.raises(DataError, match="amazon holds 92 images, 93 expected"):
        check(entry, root)
    assert check(entry, root, allow_counts=True).notes == (
        "amazon holds 92 images, 93 expected",
    )


def test_all_problems_stand_in_one_error(own_copy):
    root = own_copy("visda-c", images=1)
    shutil.rmtree(root / "validation")
    (root / "train" / "truck").rename(root / "train" / "lorry")
    with pytest.raises(
        DataError,
        match=r"train has 1 class \(lorry\) .*12 images, 152397 expected.*'validation' is missing",
    ):
        check(benchmark("visda-c"), root)


def test_other_folder_names(own_copy):
    """The published archives nest the images, and spell Real World in several ways."""
    root = own_copy("office31", images=1)
    (root / "amazon").rename(root / "images")
    (root / "amazon").mkdir()
    (root / "images").rename(root / "amazon" / "images")
    assert (
        check(benchmark("office31"), root, allow_counts=True).places["A"]
        == root / "amazon" / "images"
    )
    assert check(benchmark("office31"), root.parent, allow_counts=True).root == root
    home = own_copy("office-home", images=1)
    (home / "Real World").rename(home / "RealWorld")
    assert len(load("office-home", home, "R")) == 65


def test_classes_can_be_chosen(copies):
    split = benchmark("office-home").class_split("open")
    source = load("office-home", copies("office-home"), "A", classes=split.source)
    assert source.classes == split.source
    assert len(source) == 75
    assert int(source.labels.max()) == 24
    target = load("office-home", copies("office-home"), "C", classes=split.target)
    matched = target.match_classes(source.classes, open_set=True)
    assert int((matched.labels == 25).sum()) == 120
    with pytest.raises(DataError, match="no images of Art were chosen"):
        load("office-home", copies("office-home"), "A", classes=["Spaceship"])


def test_domainnet_splits_come_from_the_lists(copies):
    root = copies("domainnet")
    train = load("domainnet", root, "painting", "train")
    test = load("domainnet", root, "P", "test")
    assert (len(train), len(test)) == (2 * 344, 344)
    assert not set(train.paths) & set(test.paths)
    labels = {data.classes[i] for data in (train, test) for i in data.labels.tolist()}
    assert len(labels) == 345
    with pytest.raises(DataError, match=r"the list painting_val\.txt is missing"):
        load("domainnet", root, "P", "val")


def test_domainnet_lists_are_checked(own_copy):
    root = own_copy("domainnet", images=2, classes_limit=4)
    (root / "clipart" / "angel").mkdir(exist_ok=True)
    lines = (root / "clipart_train.txt").read_text().splitlines()
    (root / "clipart_train.txt").write_text(
        "\n".join([lines[0].replace(" 0", " 7"), *lines[1:]])
    )
    (root / "real" / "airplane" / "real_001_000000.jpg").unlink()
    (root / "sketch_test.txt").unlink()
    with pytest.raises(DataError) as caught:
        check(benchmark("domainnet"), root, allow_classes=True)
    message = str(caught.value)
    assert (
        "aircraft_carrier/clipart_000_000000.jpg has the number 7, and aircraft_carrier"
        in message
    )
    assert "real/airplane/real_001_000000.jpg (1 of 4 files are missing)" in message
    assert "the list sketch_test.txt is missing" in message


def test_unknown_names():
    with pytest.raises(
        ConfigError, match="no benchmark 'office' in the catalogue; it has office31"
    ):
        benchmark("office")
    with pytest.raises(
        ConfigError, match=r"Office-31 has no domain 'X'; its domains are amazon \(A\)"
    ):
        benchmark("office31").domain("X")
    with pytest.raises(
        DataError, match=r"no such folder: nowhere.* a copy of Office-31, published at"
    ):
        check(benchmark("office31"), Path("nowhere/at/all"))


@pytest.mark.shared_data
@pytest.mark.skipif(
    not (SHARED / "office31").is_dir(), reason="needs Office-31 beside the checkout"
)
def test_real_office31():
    found = check(benchmark("office31"), SHARED)
    assert found.counts == {"A": 2817, "D": 498, "W": 795}
    assert found.notes == ()
    assert len(load("office31", SHARED, "webcam")) == 795


@pytest.mark.shared_data
@pytest.mark.skipif(
    not (SHARED / "mnist.npz").is_file(), reason="needs MNIST and USPS beside the checkout"
)
def test_real_digits_without_svhn():
    found = check(benchmark("digits"), SHARED)
    assert found.pairs == (("M", "U"), ("U", "M"))
    assert "domain 'svhn' is missing" in found.notes[0]
    data = load("digits", SHARED, "usps", "test")
    assert len(data) == 2007
    assert data.load(0, channels=1).shape == (1, 16, 16)
