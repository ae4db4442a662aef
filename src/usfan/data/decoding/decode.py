"""Decode image files into upright 8-bit pictures, RGB or grey.

What is done with each kind of file:

- EXIF orientation is applied; an EXIF block that cannot be parsed is ignored.
- Transparency (RGBA, LA, palettes and colour keys) is laid over white, as a viewer shows it.
- 16-bit grey keeps its high byte, as Pillow does for 16-bit RGB. Other 32-bit integers are stretched from their
  smallest to their largest value. Floats in [0, 1] or [0, 255] keep that scale, others are stretched.
- Of an animation, the first frame.
- A JPEG that is much larger than needed is decoded at 1/2, 1/4 or 1/8 of its size (`reduce`).
- Whatever cannot be decoded raises `UnreadableImage`, which names the file and the reason. A picture over `MAX_PIXELS`
  counts as unreadable: a file of a few kilobytes can ask for gigabytes. A larger baseline JPEG (telephones
  take 108 million pixels) is decoded at half its size, for which the decoder needs no more memory.

The decoding processes import this module, so it loads neither torch nor numpy before they are needed.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import re
import stat
import struct
import threading
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from PIL import Image, UnidentifiedImageError
from PIL import TiffImagePlugin as _TiffImagePlugin  # noqa: F401 (registers its format)
from PIL import WebPImagePlugin as _WebPImagePlugin  # noqa: F401 (registers its format)
from PIL.JpegImagePlugin import JpegImageFile

from usfan.errors import DataError, printable

if TYPE_CHECKING:
    from torch import Tensor

_JPEG = (".jpg", ".jpeg", ".jpe", ".jfif")
_NETPBM = (".ppm", ".pgm", ".pbm", ".pnm")
SUFFIXES = frozenset(
    (*_JPEG, ".png", ".bmp", ".dib", ".gif", ".webp", ".tif", ".tiff", *_NETPBM)
)
"""File names that count as images when a folder is searched. A list may name any file: its content decides."""

MAX_PIXELS = 2**26
"""67 million: above any common camera; one copy in memory is 256 MiB."""
MAX_SIDE = 65_535
"""JPEG's own limit. Resizing a longer strip would need gigabytes of filter coefficients."""
MAX_BYTES = 2**29
"""512 MiB: the largest file that is read."""

MAX_RATIO = 16
"""A strip that is longer than this is cut before it is enlarged."""
ROOM = 4
"""A JPEG may be decoded at a part of its size that leaves so many pixels for one, each way. With 2, three labels of
2,000 photographs changed, and probabilities moved by up to 0.06; with 4, none of 192, and by up to 0.004."""
MAX_SCANS = 200
MAX_SCANNED = 2**31
"""Scans of a JPEG, and scans × pixels: 32 over the largest picture. Encoders make 10 to 20."""
MAX_TEXT_HEADER = 4096
_NETPBM_HEADER = re.compile(rb"P(4|[56]%s)(%s){2}\s" % ((rb"(?:\s|#[^\r\n]*[\r\n])+\d+",) * 2))

# Pillow loads the first five on its own; importing their plugins, as above, registers the other two.
FORMATS = ("JPEG", "PNG", "BMP", "GIF", "PPM", "WEBP", "TIFF")

_LOCK = threading.Lock()
_ORIENTATION_TAG = 0x0112
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


class UnreadableImage(DataError):
    """One image cannot be decoded; `path` says which, `reason` why, in a few words."""

    def __init__(self, path: str, reason: str):
        super().__init__(f"cannot read {one_line(path)}: {reason}")
        self.path = path
        self.reason = reason


class FilePart(NamedTuple):
    """A picture inside of a file: so many bytes from an offset on."""

    path: str
    offset: int
    size: int
    name: str

    @property
    def label(self) -> str:
        """What messages and tables call it."""
        return f"{self.path}:{self.name}"

    def read(self) -> bytes:
        """The bytes; fewer if the file has become shorter."""
        with open(self.path, "rb") as file:
            file.seek(self.offset)
            return file.read(self.size)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """No warnings inside: Pillow's are of odd metadata and large sizes, and we judge both ourselves. The filters are
    one for all threads, so one thread at a time is inside."""
    with _LOCK, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def is_image_name(path: str) -> bool:
    return path.lower().endswith(tuple(SUFFIXES))


def one_line(text: str) -> str:
    """The text as it is; in quotes and escaped if it holds line breaks or other characters a terminal would act on."""
    return printable(text) if text.isprintable() else f"'{printable(text)}'"


def decode_file(path: str, channels: int = 3, side: int | None = None) -> Image.Image:
    """The file's picture, upright, in mode RGB (`channels=3`) or L (`channels=1`). If it is wanted at `side`×`side`
    pixels, a JPEG may come smaller than it is: see `reduce`."""
    try:
        status = os.stat(path)
        if not stat.S_ISREG(status.st_mode):
            raise UnreadableImage(path, "not a regular file")
        if status.st_size > MAX_BYTES:
            raise UnreadableImage(
                path, f"{status.st_size} bytes is over the limit of {MAX_BYTES}"
            )
        with open(path, "rb") as file:
            content = file.read(MAX_BYTES)
    except FileNotFoundError:
        raise UnreadableImage(path, "file is missing") from None
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):  # this process is short of handles
            raise
        raise UnreadableImage(path, _reason(error)) from error
    return decode_bytes(content, path, channels, side=side)


def decode_part(part: FilePart, channels: int = 3, side: int | None = None) -> Image.Image:
    """As `decode_file`, for a part of a file."""
    if part.size > MAX_BYTES:
        raise UnreadableImage(part.label, f"{part.size} bytes is over the limit of {MAX_BYTES}")
    try:
        content = part.read()
    except FileNotFoundError:
        raise UnreadableImage(part.label, "file is missing") from None
    except OSError as error:
        raise UnreadableImage(part.label, _reason(error)) from error
    return decode_bytes(content, part.label, channels, side=side)


def decode_bytes(
    content: bytes,
    path: str,
    channels: int = 3,
    formats: tuple[str, ...] = FORMATS,
    side: int | None = None,
) -> Image.Image:
    """As `decode_file`, for the content of a file; `path` is named in errors."""
    if not content:
        raise UnreadableImage(path, "empty file")
    with _quiet():
        try:
            _check_header(content, path)
            with Image.open(io.BytesIO(content), formats=formats) as image:
                _check_scans(image, content, path)
                return convert(image, path, channels, side)
        except UnreadableImage:
            raise
        except Exception as error:  # broken files make Pillow raise nearly every type there is
            raise UnreadableImage(path, _reason(error)) from error


def _check_header(content: bytes, path: str) -> None:
    """Pillow reads the text of a netpbm file in Python, byte by byte: 20 s for 20 MB. Pixels as text are refused."""
    is_netpbm = content[:1] == b"P" and content[1:2] in b"123456"
    if is_netpbm and _NETPBM_HEADER.match(content[:MAX_TEXT_HEADER]) is None:
        limit = f"in the first {MAX_TEXT_HEADER} bytes"
        raise UnreadableImage(path, f"no header of a binary netpbm file {limit}")


def _check_scans(
    image: Image.Image,
    content: bytes,
    path: str,
) -> None:
    """A progressive JPEG may go over the picture as often as it likes, with next to no data."""
    if image.format != "JPEG":
        return
    scans = content.count(b"\xff\xda")
    if scans > MAX_SCANS or scans * image.width * image.height > MAX_SCANNED:
        raise UnreadableImage(
            path, f"too costly: {scans} scans of {image.width}x{image.height} pixels"
        )


def reduce(image: Image.Image, side: int | None, factor: int) -> None:
    """Have a JPEG decoded at 1/2, 1/4 or 1/8 of its size: the smallest that is still `ROOM` × `side` each way, which
    takes a fraction of the time; at 1/`factor` at least."""
    if side is not None:
        factor = max(factor, min(image.width, image.height) // (ROOM * side))
    if factor > 1:
        image.draft(None, (image.width // factor, image.height // factor))


def convert(
    image: Image.Image,
    path: str,
    channels: int = 3,
    side: int | None = None,
) -> Image.Image:
    """Load a Pillow image, turn it upright and bring it to mode RGB or L; `side` is that of `decode_file`."""
    if channels not in (1, 3):
        raise DataError(f"channels must be 1 or 3, not {channels}")
    is_jpeg = isinstance(image, JpegImageFile)
    is_baseline = is_jpeg and not image.info.get("progressive")
    factor = 2 if is_baseline and image.width * image.height > MAX_PIXELS else 1
    width = -(-image.width // factor)
    height = -(-image.height // factor)
    if width * height > MAX_PIXELS or max(width, height) > MAX_SIDE:
        limit = f"{MAX_PIXELS} pixels, {MAX_SIDE} a side"
        raise UnreadableImage(path, f"too large: {width}x{height} is over the limit of {limit}")
    if width * height == 0:
        raise UnreadableImage(path, "no pixels")
    if is_jpeg:
        reduce(image, side, factor)
    image.load()
    turn = _UPRIGHT.get(orientation(image))
    if turn is not None:
        image = image.transpose(turn)
    if image.mode in ("I", "F") or image.mode.startswith("I;"):
        image = _eight_bit(image, path)
    elif image.has_transparency_data:
        image = _over_white(image)
    if image.mode not in ("1", "L", "RGB"):
        # Straight to L, a palette or CMYK picture would skip its colours.
        image = image.convert("RGB")
    mode = "RGB" if channels == 3 else "L"
    return image if image.mode == mode else image.convert(mode)


def squared(image: Image.Image, size: int, resampling: str = "bilinear") -> Image.Image:
    """Squash to `size`×`size`, exactly Pillow's `resize` (antialiased when it shrinks). With `-crop` the shorter side
    becomes `size`, and the middle stays."""
    kernel = Image.Resampling[resampling.removesuffix("-crop").upper()]
    wide, tall = size, size
    if resampling.endswith("-crop"):
        short = min(image.size)
        image = middle(image, MAX_RATIO * short)
        wide, tall = (size * side // short for side in image.size)
    if image.size != (wide, tall):
        image = image.resize((wide, tall), kernel)
    return middle(image, size)


def middle(image: Image.Image, most: int) -> Image.Image:
    """The middle of a picture, at most so many pixels wide and tall."""
    left, top = (max(0, (side - most) // 2) for side in image.size)
    width, height = (min(side, most) for side in image.size)
    if (width, height) == image.size:
        return image
    return image.crop((left, top, left + width, top + height))


def planes(image: Image.Image) -> bytes:
    """The pixels of an RGB or L picture, channel by channel (four times as fast as a transposing copy)."""
    return b"".join(band.tobytes() for band in image.split())


def to_tensor(image: Image.Image) -> Tensor:
    """uint8 C×H×W of an RGB or L picture."""
    import torch

    pixels = torch.frombuffer(bytearray(planes(image)), dtype=torch.uint8)
    return pixels.view(-1, image.height, image.width)


def orientation(image: Image.Image) -> int:
    try:
        return int(image.getexif().get(_ORIENTATION_TAG, 1))
    except Exception:  # a damaged EXIF block is no reason to lose the picture
        return 1


def _over_white(image: Image.Image) -> Image.Image:
    if image.mode == "La":
        image = image.convert("LA")
    rgba = image.convert("RGBA")
    page = Image.new("RGB", rgba.size, "white")
    page.paste(rgba, mask=rgba)
    return page


def _eight_bit(image: Image.Image, path: str) -> Image.Image:
    """Mode L from 16-bit, 32-bit and float grey."""
    import numpy as np

    values = np.asarray(image)
    if not np.isfinite(values).all():
        raise UnreadableImage(path, "NaN or infinite pixels")
    low = float(values.min())
    high = float(values.max())
    if image.mode != "F" and low >= 0 and high <= 65_535:
        return Image.fromarray((values >> 8).astype(np.uint8))
    if low >= 0 and high <= 255:
        low = 0.0
        high = 1.0 if high <= 1 else 255.0
    scaled = (values.astype(np.float64) - low) * (255 / max(high - low, 1e-300))
    return Image.fromarray(scaled.round().astype(np.uint8))


def _reason(error: Exception) -> str:
    """A few words for the user. Pillow's own words are kept if they help."""
    if isinstance(error, UnidentifiedImageError):
        return "not an image of a known format"
    if isinstance(error, Image.DecompressionBombError):
        return f"too large: over the limit of {MAX_PIXELS} pixels"
    if isinstance(error, MemoryError):
        return "not enough memory"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror.lower()
    text = one_line(" ".join(str(error).split()))[:120]
    if "truncated" in text.lower():
        return "truncated"
    if isinstance(error, (struct.error, IndexError, KeyError, EOFError)) or not text:
        return "damaged"
    return text
