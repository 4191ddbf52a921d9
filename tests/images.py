"""Images from files, with what such files say beside pixels."""

from __future__ import annotations

import io
from typing import Any

from PIL import Image


def photo(orientation: int, **options: Any) -> Image.Image:
    """An image of 4 by 2 pixels whose EXIF says how it lies; 6 for a quarter of a turn, 1 for none."""
    image = Image.new("RGB", (4, 2))
    image.getexif()[274] = orientation
    file = io.BytesIO()
    image.save(file, exif=image.getexif(), **options)
    return Image.open(io.BytesIO(file.getvalue()))


def flat(kind: str, **options: Any) -> Image.Image:
    """A black image of 8 by 8 pixels, as its file has it."""
    file = io.BytesIO()
    Image.new("RGB", (8, 8)).save(file, kind, **options)
    return Image.open(io.BytesIO(file.getvalue()))


def animation(last: str) -> Image.Image:
    """An image of two frames, of which the last has that colour."""
    frames = [Image.new("RGB", (2, 2), colour) for colour in ("green", last)]
    file = io.BytesIO()
    frames[0].save(file, "GIF", save_all=True, append_images=frames[1:])
    return Image.open(io.BytesIO(file.getvalue()))
