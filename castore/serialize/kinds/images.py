"""The kind of PIL images: pixels, palette and `info`.

A loaded image is a plain `PIL.Image.Image` of the same mode, size, pixels, palette and `info`: transparency,
EXIF, colour profile, resolution and texts. The image's file, its format and other frames are not kept, nor
are values of `info` other than numbers, texts and bytes, alone or in lists, tuples and dicts. PIL is imported
only to load an image.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from math import prod
from typing import Any

from castore.errors import SerializationError
from castore.serialize.kinds.forms import MisfitError, expect, listed
from castore.serialize.number_types import SIZES
from castore.system.exif import with_changed_tags

KIND = "image"
#: Elements of a pixel by mode. Each is a byte but in the modes of `_WIDE`. Mode 1, which is not listed, has
#: eight pixels per byte.
_VALUES = {
    "L": 1, "P": 1, "LA": 2, "La": 2, "PA": 2, "RGB": 3, "YCbCr": 3, "LAB": 3, "HSV": 3,
    "RGBA": 4, "RGBa": 4, "RGBX": 4, "CMYK": 4, "I": 1, "F": 1, "I;16": 1,
}  # fmt: skip
#: Codes in a safetensors file of elements that are not bytes.
_WIDE = {"I": "I32", "F": "F32", "I;16": "U16"}
# Values of `info` are nested so deep at most.
_DEEPEST = 8


def is_image(value: object) -> bool:
    """Whether `value` is a PIL image. It can be one only in a process that has imported PIL already."""
    module = sys.modules.get("PIL.Image")
    return module is not None and isinstance(value, module.Image)


def pixels_of(image: Any) -> bytes:
    """Return the pixels, row by row.

    Raises:
        MisfitError: castore does not know the image's mode.
    """
    width, height = image.size
    if image.mode != "1" and image.mode not in _VALUES:
        raise MisfitError(f"is an image of mode {image.mode!r}; convert it with convert('RGB')")
    return image.tobytes() if width and height else b""


def pixel_shape(mode: str, width: int, height: int) -> tuple[str, tuple[int, ...]]:
    """Code and shape of an image's pixels as a tensor of rows.

    Raises:
        ValueError: castore does not know the mode, or a side is negative.
    """
    if min(width, height) < 0 or (mode != "1" and mode not in _VALUES):
        raise ValueError(f"there is no image of mode {mode!r} and size {[width, height]}")
    if mode == "1":
        return "U8", (height, (width + 7) // 8)
    values = _VALUES[mode]
    return _WIDE.get(mode, "U8"), (height, width, values)[: 2 + (values > 1)]


def image_maker(mode: str, width: int, height: int, count: int) -> Callable[[bytes], Any]:
    """Return the function that makes an image of ``count`` bytes of pixels.

    Raises:
        ValueError: so many bytes do not fit mode and size.
        SerializationError: Pillow is not installed.
    """
    code, shape = pixel_shape(mode, width, height)
    # The size must match the pixels, so that PIL allocates no more memory than the bytes fill.
    if count != prod(shape) * SIZES[code]:
        raise ValueError(f"an image of mode {mode!r} and size {[width, height]} has {count} bytes")
    try:
        image = importlib.import_module("PIL.Image")
    except ImportError:
        raise SerializationError(
            "the value is an image, and this Python has no Pillow; pip install pillow"
        ) from None
    if not count:
        return lambda _: image.new(mode, (width, height))
    return lambda pixels: image.frombytes(mode, (width, height), pixels)


def extras_of(image: Any) -> tuple[tuple[str, bytes] | None, Any]:
    """Return the palette (raw mode and bytes), None if the image has none; and its transparency, None if it
    has none, or all of its `info` if there is more.
    """
    palette = None
    if image.mode in ("P", "PA") and image.palette is not None:
        rawmode = image.palette.mode
        palette = rawmode, bytes(image.getpalette(rawmode))
    given = with_changed_tags(image)
    info = {name: _plain(item) for name, item in given.items() if type(name) is str and _is_plain(item)}
    return palette, info if info.keys() - {"transparency"} else info.get("transparency")


def _is_plain(value: Any, depth: int = 0) -> bool:
    """Whether bytes have all of a value of `info`."""
    if type(value) is dict:
        return depth < _DEEPEST and all(
            _is_plain(name, depth + 1) and _is_plain(item, depth + 1) for name, item in value.items()
        )
    if type(value) in (list, tuple):
        return depth < _DEEPEST and all(_is_plain(item, depth + 1) for item in value)
    return value is None or isinstance(value, str) or type(value) in (int, float, bool, bytes)


def _plain(value: Any) -> Any:
    """The value with plain texts: those of a PNG have a language besides."""
    if type(value) is dict:
        return {_plain(name): _plain(item) for name, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_plain, value))
    return str(value) if isinstance(value, str) else value


def with_extras(image: Any, palette: Any, info: Any) -> Any:
    """Give an image a palette, and a transparency or `info`, as `extras_of` has them; returns the image."""
    if not is_image(image):
        raise ValueError("an image has no pixels")
    if palette is not None:
        rawmode, data = palette
        if rawmode not in ("RGB", "RGBA", "L") or len(data) > 4 * 256:
            raise ValueError(f"a palette of {rawmode!r} has {len(data)} bytes")
        image.putpalette(data, rawmode)
    if info is not None:
        image.info.update(info if type(info) is dict else {"transparency": info})
    return image


def take(image: Any) -> Any:
    """Return mode, size, pixels, palette, and transparency or `info`."""
    return [image.mode, list(image.size), pixels_of(image), *extras_of(image)]


def make(parts: Any) -> Any:
    """Return the image made of these parts."""
    mode, size, pixels, palette, info = listed(5, parts)
    width, height = (expect(int, side) for side in listed(2, size))
    make_plain = image_maker(expect(str, mode), width, height, len(expect(bytes, pixels)))
    return with_extras(make_plain(pixels), palette, info)
