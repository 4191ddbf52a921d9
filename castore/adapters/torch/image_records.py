"""PIL images in a sample's record: the pixels as a tensor of rows.

`castore.serialize.kinds.images` lists what an image keeps.
"""

from __future__ import annotations

from typing import Any

from castore.adapters.torch.leaf_codecs import Build, Leaf, Mark, Payloads
from castore.serialize.kinds.images import PIXELS, pixels_of

#: Codes of pixels that are not bytes, by mode.
_CODES = {"I": "I32", "F": "F32", "I;16": "U16"}


def take_pixels(image: Any, payloads: Payloads) -> Mark:
    """The pixels; mode 1 packs eight into a byte."""
    payloads.append(pixels_of(image))
    return "pixels", f"{image.mode} {image.width}", *_written(image.mode, *image.size)


def _written(mode: str, width: int, height: int) -> tuple[str, tuple[int, ...]]:
    """Code and shape of an image's pixels."""
    if mode in _CODES:
        return _CODES[mode], (height, width)
    if mode == "1":
        return "U8", (height, (width + 7) // 8)
    values = PIXELS[mode]
    return "U8", (height, width, values)[: 2 + (values > 1)]


def build_pixels(leaf: Leaf, start: int, stop: int) -> Build:
    """The function that reads an image out of a record."""
    from PIL import Image

    mode, _, text = (leaf.detail or "").partition(" ")
    width = int(text)
    size = width, leaf.shape[0]
    # The payload determines the size, so PIL allocates no memory that the record does not back.
    if (mode != "1" and mode not in PIXELS) or _written(mode, *size) != (leaf.code, leaf.shape) or width < 0:
        raise ValueError(f"an image of {leaf.detail!r} is written as {leaf.code} of shape {leaf.shape}")
    if start == stop:
        return lambda _: Image.new(mode, size)
    return lambda record: Image.frombytes(mode, size, bytes(memoryview(record)[start:stop]))
