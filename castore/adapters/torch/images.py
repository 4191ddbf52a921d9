"""PIL images as parts of a sample: pixels as a tensor of rows, and what else decides how they convert.

An image that comes back is a plain `PIL.Image.Image` of the same mode, size, pixels, palette and transparency; what
the file around it said (its format, EXIF, a colour profile, the other frames) is not kept. Imports PIL only where there is an image.
"""

from __future__ import annotations

import sys
from typing import Any

from castore.adapters.torch.leaves import Build, Leaf, Mark, MisfitError, Payloads

#: Code and values a pixel, by mode.
_MODES = {
    "L": ("U8", 1), "P": ("U8", 1), "LA": ("U8", 2), "La": ("U8", 2), "PA": ("U8", 2),
    "RGB": ("U8", 3), "YCbCr": ("U8", 3), "LAB": ("U8", 3), "HSV": ("U8", 3),
    "RGBA": ("U8", 4), "RGBa": ("U8", 4), "RGBX": ("U8", 4), "CMYK": ("U8", 4),
    "I": ("I32", 1), "F": ("F32", 1), "I;16": ("U16", 1),
}  # fmt: skip


def is_image(value: object) -> bool:
    """Whether `value` is a PIL image; it can only be one where somebody has imported PIL already."""
    module = sys.modules.get("PIL.Image")
    return module is not None and isinstance(value, module.Image)


def take_pixels(image: Any, payloads: Payloads) -> Mark:
    """The pixels; mode 1 has eight to a byte."""
    width, height = image.size
    mode = image.mode
    if mode != "1" and mode not in _MODES:
        raise MisfitError(f"is an image of mode {mode!r}; convert it with convert('RGB')")
    payloads.append(image.tobytes() if width and height else b"")
    code, values = _MODES.get(mode, ("U8", 1))
    shape = (height, (width + 7) // 8) if mode == "1" else (height, width, values)[: 2 + (values > 1)]
    return "pixels", f"{mode} {width}", code, shape


def parts_of(image: Any) -> tuple[tuple[str, bytes] | None, Any]:
    """The palette (its raw mode and bytes) and the transparency, where the image has them."""
    palette = None
    if image.mode in ("P", "PA") and image.palette is not None:
        rawmode = image.palette.mode
        palette = rawmode, bytes(image.getpalette(rawmode))
    return palette, image.info.get("transparency")


def put_together(image: Any, palette: Any, transparency: Any) -> Any:
    """The image with the parts that `parts_of` named."""
    if not is_image(image):
        raise ValueError("an image has no pixels")
    if palette is not None:
        rawmode, data = palette
        if rawmode not in ("RGB", "RGBA", "L") or len(data) > 4 * 256:
            raise ValueError(f"a palette of {rawmode!r} has {len(data)} bytes")
        image.putpalette(data, rawmode)
    if transparency is not None:
        image.info["transparency"] = transparency
    return image


def build_pixels(leaf: Leaf, start: int, stop: int) -> Build:
    """The function that reads an image out of a record."""
    from PIL import Image

    mode, _, text = (leaf.detail or "").partition(" ")
    width, height = int(text), leaf.shape[0]
    code, values = _MODES.get(mode, ("U8", 1))
    shape = (height, (width + 7) // 8) if mode == "1" else (height, width, values)[: 2 + (values > 1)]
    # The size follows from the payload, so PIL takes no memory that the record does not back.
    if (mode != "1" and mode not in _MODES) or (code, shape) != (leaf.code, leaf.shape) or width < 0:
        raise ValueError(f"an image of {leaf.detail!r} is written as {leaf.code} of shape {leaf.shape}")
    size = width, height
    if start == stop:
        return lambda _: Image.new(mode, size)
    return lambda record: Image.frombytes(mode, size, bytes(memoryview(record)[start:stop]))
