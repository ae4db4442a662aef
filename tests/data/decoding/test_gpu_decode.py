"""What goes to the GPU's decoder and what does not. Here torchvision's decoder for the CPU stands in for the GPU's:
the way there is the same. How close the GPU's own pixels are is tested in `test_gpu`."""

import numpy as np
import pytest
import torch
from PIL import Image

from usfan.data.cache import open_store
from usfan.data.decoding import gpu as gpu_decode
from usfan.data.decoding.gpu import decode_batch, plain_jpeg, resized
from usfan.data.sources import ImageData

CPU = torch.device("cpu")
SIZE = 32


@pytest.fixture
def kinds(tmp_path, make_picture):
    """Plain JPEGs of several sizes, and one file of each kind that must go to the other decoder."""
    folder = tmp_path / "kinds"
    folder.mkdir()
    picture = Image.fromarray(make_picture(1, 80, 60))
    for i, (width, height) in enumerate([(80, 60), (33, 200), (32, 32), (8, 9)]):
        Image.fromarray(make_picture(i, width, height)).save(folder / f"plain-{i}.jpg", quality=95)
    picture.save(folder / "plain-progressive.jpg", progressive=True, subsampling=2)
    turned = Image.Exif()
    turned[0x0112] = 6
    picture.save(folder / "turned.jpg", exif=turned)
    picture.convert("CMYK").save(folder / "cmyk.jpg")
    picture.convert("L").save(folder / "grey.jpg")
    picture.save(folder / "rgb.jpg", keep_rgb=True)
    picture.save(folder / "really-a-png.jpg", format="PNG")
    content = (folder / "plain-0.jpg").read_bytes()
    (folder / "cut.jpg").write_bytes(content[: len(content) // 2])
    (folder / "longer.jpg").write_bytes(content + b"more")
    (folder / "text.jpg").write_text("hello")
    (folder / "empty.jpg").write_bytes(b"")
    return folder


def test_only_plain_files_go_to_the_gpu(kinds):
    chosen = {path.name for path in kinds.iterdir() if plain_jpeg(str(path)) is not None}
    assert chosen == {"plain-0.jpg", "plain-1.jpg", "plain-2.jpg", "plain-3.jpg", "plain-progressive.jpg"}
    assert plain_jpeg(str(kinds / "missing.jpg")) is None
    assert plain_jpeg(str(kinds)) is None


def test_the_store_is_that_of_the_cpu(kinds):
    """Other files give the very same pixels; plain ones up to the rounding of the resize; broken ones are named."""
    data, other = ImageData(kinds), ImageData(kinds)
    expected, found = open_store(data, size=SIZE), open_store(other, size=SIZE, decode="gpu")
    assert data.unreadable == other.unreadable
    assert len(other.unreadable) == 3
    assert torch.equal(found.kept, expected.kept)
    difference = (found.pixels.int() - expected.pixels.int()).abs().amax(dim=(1, 2, 3))
    for path, most in zip(found.paths, difference.tolist(), strict=True):
        assert most <= (2 if "plain" in path else 0), path
    assert len(open_store(ImageData(kinds), size=SIZE, channels=1, decode="gpu")) == len(expected)


def test_a_batch_that_the_gpu_refuses_is_decoded_as_ever(kinds, monkeypatch):
    def refuse(*_, **__):
        raise RuntimeError("nvjpegDecode failed")

    monkeypatch.setattr("torchvision.io.decode_jpeg", refuse)
    found = open_store(ImageData(kinds), size=SIZE, decode="gpu")
    assert torch.equal(found.pixels, open_store(ImageData(kinds), size=SIZE).pixels)


@pytest.mark.parametrize(("width", "height"), [(300, 200), (33, 500), (20, 20), (64, 64)])
def test_the_resize_is_pillows_up_to_rounding(width, height):
    pixels = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    expected = np.asarray(Image.fromarray(pixels).resize((64, 64), Image.Resampling.BILINEAR)).transpose(2, 0, 1)
    found = resized(torch.from_numpy(pixels).permute(2, 0, 1), 64).numpy()
    assert np.abs(found.astype(int) - expected).max() <= 1


def test_each_decoder_has_its_own_cache(kinds, tmp_path, decoded):
    for decode in ("cpu", "gpu", "cpu", "gpu"):
        open_store(ImageData(kinds), size=SIZE, cache_dir=tmp_path / "cache", decode=decode)
    assert len(decoded) == 2
    assert len(list((tmp_path / "cache").glob("*.pixels"))) == 2


def test_more_files_than_a_batch(kinds, monkeypatch):
    monkeypatch.setattr(gpu_decode, "BATCH", 4)
    data = ImageData(kinds)
    found = open_store(data, size=SIZE, decode="gpu")
    reasons, whole = decode_batch(data.paths, SIZE, CPU)
    assert torch.equal(found.pixels, whole[[reason is None for reason in reasons]])
