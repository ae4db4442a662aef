"""Image files of every kind become upright 8-bit pictures, or a named refusal."""

import io
import subprocess
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from PIL import Image, PngImagePlugin

from lookalikes import to_square
from usfan.data.decoding import decode
from usfan.data.decoding.decode import (
    UnreadableImage,
    decode_bytes,
    decode_file,
    planes,
    to_tensor,
)


def encoded(image: Image.Image, format: str = "PNG", **options) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format, **options)
    return buffer.getvalue()


def pixels(content: bytes, channels: int = 3) -> np.ndarray:
    return np.asarray(decode_bytes(content, "test.img", channels))


@pytest.mark.parametrize(
    ("format", "options"),
    [
        ("PNG", {}),
        ("BMP", {}),
        ("PPM", {}),
        ("TIFF", {}),
        ("TIFF", {"compression": "tiff_lzw"}),
        ("WEBP", {"lossless": True}),
    ],
)
def test_lossless_formats_come_back_as_they_were(make_picture, format, options):
    image = make_picture(0)
    assert (pixels(encoded(Image.fromarray(image), format, **options)) == image).all()


@pytest.mark.parametrize("format", ["JPEG", "GIF"])
def test_lossy_formats_come_close(make_picture, format):
    image = make_picture(0)
    assert abs(pixels(encoded(Image.fromarray(image), format)).astype(int) - image).mean() < 12


@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP", "TIFF"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_applied(format, orientation):
    upright = np.zeros((24, 16, 3), np.uint8)
    upright[:8, :8] = 255  # a bright corner, top left
    undo = {
        1: lambda a: a,
        2: lambda a: a[:, ::-1],
        3: lambda a: a[::-1, ::-1],
        4: lambda a: a[::-1],
        5: lambda a: a.transpose(1, 0, 2),
        6: lambda a: np.rot90(a, 1),
        7: lambda a: a[::-1, ::-1].transpose(1, 0, 2),
        8: lambda a: np.rot90(a, -1),
    }[orientation]
    exif = Image.Exif()
    exif[0x0112] = orientation
    stored = Image.fromarray(np.ascontiguousarray(undo(upright)))
    found = pixels(encoded(stored, format, exif=exif))
    assert found.shape == upright.shape
    assert abs(found.astype(int) - upright).mean() < 8


def test_damaged_exif_is_ignored(make_picture):
    image = make_picture(1)
    content = encoded(
        Image.fromarray(image), "PNG", exif=b"Exif\0\0MM\0*\xff\xff\xff\xff\xff\xff"
    )
    assert (pixels(content) == image).all()


def test_grey_cmyk_and_bilevel(make_picture):
    grey = make_picture(2)[..., 0]
    assert (pixels(encoded(Image.fromarray(grey))) == grey[..., None]).all()
    assert (pixels(encoded(Image.fromarray(grey)), channels=1) == grey).all()
    cmyk = Image.fromarray(make_picture(2)).convert("CMYK")
    found = pixels(encoded(cmyk, "JPEG", quality=95)).astype(int)
    assert abs(found - make_picture(2)).mean() < 6
    dots = np.indices((6, 6)).sum(0) % 2 == 0
    assert (pixels(encoded(Image.fromarray(dots)), channels=1) == dots * 255).all()


def test_transparency_lies_over_white():
    rgba = np.zeros((4, 4, 4), np.uint8)
    rgba[:2] = (200, 100, 50, 255)
    rgba[2:] = (9, 9, 9, 0)  # what lies under a transparent pixel is not to be seen
    image = Image.fromarray(rgba)
    for content in (encoded(image), encoded(image, "WEBP", lossless=True)):
        found = pixels(content)
        assert (found[:2] == (200, 100, 50)).all()
        assert (found[2:] == 255).all()
    grey = Image.fromarray(
        np.stack([np.full((4, 4), 40, np.uint8), rgba[..., 3]], axis=-1), "LA"
    )
    assert pixels(encoded(grey), channels=1)[:, 0].tolist() == [40, 40, 255, 255]


@pytest.mark.parametrize("transparency", [None, 1, bytes([255, 0])])
def test_palette(transparency):
    image = Image.new("P", (2, 1))
    image.putpalette([10, 20, 30, 200, 100, 0])
    image.putpixel((1, 0), 1)
    options = {} if transparency is None else {"transparency": transparency}
    second = [200, 100, 0] if transparency is None else [255, 255, 255]
    assert pixels(encoded(image, **options)).tolist() == [[[10, 20, 30], second]]


@pytest.mark.parametrize("format", ["PNG", "TIFF", "PPM"])
def test_16_bit_grey_keeps_its_high_byte(format):
    deep = np.array([[0, 255, 256, 32768, 65535]], np.uint16)
    assert pixels(encoded(Image.fromarray(deep), format), channels=1).tolist() == [
        [0, 0, 1, 128, 255]
    ]


def test_big_endian_tiff():
    deep = Image.fromarray(np.array([[0, 32768, 65535]], ">u2"))
    assert np.asarray(decode.convert(deep, "x", 1)).tolist() == [[0, 128, 255]]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([[-100, 0, 155]], [[0, 100, 255]]),  # stretched
        ([[0, 65536 * 2, 65536 * 4]], [[0, 128, 255]]),
        ([[7, 7, 7]], [[0, 0, 0]]),
    ],
)
def test_32_bit_integers(values, expected):
    assert (
        pixels(
            encoded(Image.fromarray(np.array(values, np.int32)), "TIFF"), channels=1
        ).tolist()
        == expected
    )


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([[0, 0.5, 1]], [[0, 128, 255]]),
        ([[0, 3, 255]], [[0, 3, 255]]),
        ([[-2, 0, 2]], [[0, 128, 255]]),
    ],
)
def test_floats(values, expected):
    content = encoded(Image.fromarray(np.array(values, np.float32)), "TIFF")
    assert pixels(content, channels=1).tolist() == expected


def test_nan_pixels_are_refused():
    content = encoded(Image.fromarray(np.array([[0, np.nan]], np.float32)), "TIFF")
    with pytest.raises(UnreadableImage, match="NaN"):
        pixels(content)


@pytest.mark.parametrize("format", ["JPEG", "PNG", "BMP", "GIF", "WEBP", "TIFF"])
def test_truncated_files_are_refused_by_name(tmp_path, make_picture, format):
    file = tmp_path / "half.img"
    content = encoded(Image.fromarray(make_picture(3, 200, 150)), format)
    file.write_bytes(content[: len(content) // 2])
    with pytest.raises(UnreadableImage, match=r"half\.img: .+") as caught:
        decode_file(str(file))
    assert caught.value.path == str(file)
    assert "\n" not in str(caught.value)
    if format in ("JPEG", "PNG"):
        assert caught.value.reason == "truncated"


def test_what_is_no_image_is_refused(tmp_path):
    text = tmp_path / "a.jpg"
    text.write_text("hello")
    with pytest.raises(UnreadableImage, match="not an image of a known format"):
        decode_file(str(text))
    (tmp_path / "b.jpg").touch()
    with pytest.raises(UnreadableImage, match="empty file"):
        decode_file(str(tmp_path / "b.jpg"))
    with pytest.raises(UnreadableImage, match="file is missing"):
        decode_file(str(tmp_path / "c.jpg"))
    with pytest.raises(UnreadableImage, match="not a regular file"):
        decode_file(str(tmp_path))


def test_formats_outside_the_list_are_refused(make_picture):
    assert pixels(encoded(Image.fromarray(make_picture(0)), "PNG")).shape == (14, 20, 3)
    for format in ("ICO", "TGA", "PCX", "EPS"):
        with pytest.raises(UnreadableImage, match="known format"):
            pixels(encoded(Image.fromarray(make_picture(0)), format))


def test_a_fifo_does_not_block(tmp_path):
    import os

    os.mkfifo(tmp_path / "pipe.jpg")
    with pytest.raises(UnreadableImage, match="not a regular file"):
        decode_file(str(tmp_path / "pipe.jpg"))


@pytest.mark.parametrize("size", [(9000, 9000), (70_000, 2), (40_000, 40_000)])
def test_decompression_bombs_are_refused_before_memory_is_taken(size, monkeypatch):
    monkeypatch.setattr(Image.Image, "load", lambda self: pytest.fail("was decoded"))
    header = (
        b"\x89PNG\r\n\x1a\n"
        + _chunk(b"IHDR", _be(size[0]) + _be(size[1]) + b"\x08\x02\0\0\0")
        + _chunk(b"IDAT", b"")
    )
    with pytest.raises(UnreadableImage, match="too large"):
        decode_bytes(header, "bomb.png")


def _be(number: int) -> bytes:
    return number.to_bytes(4, "big")


def _chunk(kind: bytes, body: bytes) -> bytes:
    return _be(len(body)) + kind + body + _be(PngImagePlugin._crc32(kind + body))


def test_pillow_warnings_stay_inside(make_picture):
    corrupt = encoded(Image.fromarray(make_picture(0)), "TIFF").replace(
        b"\x03\x00\x01\x00", b"\x03\x00\x00\x00", 3
    )
    palette = Image.new("P", (2, 1))
    palette.putpalette([10, 20, 30, 200, 100, 0])
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for content in (corrupt, encoded(palette, transparency=bytes([255, 0]))):
            try:
                pixels(content)
            except UnreadableImage:
                continue
    assert seen == []


def test_warning_filters_survive_threads(make_picture):
    content = encoded(Image.fromarray(make_picture(0, 200, 200)), "JPEG")
    with warnings.catch_warnings():
        warnings.simplefilter("error", ResourceWarning)
        before = list(warnings.filters)
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(pixels, [content] * 60))
        assert warnings.filters == before


@pytest.mark.parametrize("size", [8, 33, 64])
def test_to_square_is_pillows_bilinear_resize(make_picture, size):
    image = Image.fromarray(make_picture(5, 50, 30))
    expected = np.asarray(image.resize((size, size), Image.Resampling.BILINEAR)).transpose(
        2, 0, 1
    )
    found = to_square(image, size)
    assert found.dtype == torch.uint8
    assert (found.numpy() == expected).all()
    grey = to_square(image, size, channels=1)
    assert (
        grey.numpy()[0]
        == np.asarray(image.convert("L").resize((size, size), Image.Resampling.BILINEAR))
    ).all()


def test_to_tensor_and_planes(make_picture):
    image = make_picture(6)
    assert (to_tensor(Image.fromarray(image)).numpy() == image.transpose(2, 0, 1)).all()
    assert (
        planes(Image.fromarray(image))
        == np.ascontiguousarray(image.transpose(2, 0, 1)).tobytes()
    )


def test_names_with_line_breaks_stay_on_one_line(tmp_path):
    with pytest.raises(UnreadableImage) as caught:
        decode_file(str(tmp_path / "a\n\x1b[31mb.jpg"))
    assert str(caught.value).isprintable()


def test_decoding_does_without_torch_and_numpy():
    code = "import sys, usfan.data.decoding.process; print(sorted({'torch', 'numpy'} & set(sys.modules)))"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"
