"""The EXIF tags of a PIL image that somebody has changed since it was opened: PIL keeps them beside `info`.

Must never: import PIL. Only an image has tags, and then PIL is imported.
"""

from __future__ import annotations

import sys
from typing import Any

# Names in `info` of EXIF as bytes: of most formats, and of old PNG files.
IN_INFO = ("exif", "Raw profile type exif")
# Directories inside EXIF: the camera's, GPS, interoperability.
_DIRECTORIES = (0x8769, 0x8825, 0xA005)


def changed_tags(image: Any) -> dict[str, Any]:
    """The changed tags: ``exif``, the tags of the image, and ``exif_ifds``, those of directories inside, such
    as the one of GPS. Empty if `info` has all of them.
    """
    exif = getattr(image, "_exif", None)  # there once somebody has looked
    if exif is None or getattr(image, "tag_v2", None):  # a TIFF file has them elsewhere
        return {}
    as_opened = sys.modules["PIL.Image"].Image()
    as_opened.info = image.info
    before = as_opened.getexif()
    inside, inside_before = _directories(exif), _directories(before)
    found: dict[str, Any] = {} if dict(exif) == dict(before) else {"exif": dict(exif)}
    return found if inside == inside_before else {**found, "exif_ifds": inside}


def _directories(exif: Any) -> dict[int, dict[int, Any]]:
    """The directories that are there. To ask for another one would make it."""
    there = [tag for tag in _DIRECTORIES if tag in exif or tag in exif._ifds]
    return {tag: found for tag in there if (found := dict(exif.get_ifd(tag)))}


def with_changed_tags(image: Any) -> dict[Any, Any]:
    """The image's `info`, with the changed tags in the place of those that it has."""
    if not changed_tags(image):
        return image.info  # type: ignore[no-any-return]
    exif = image._exif
    info = {name: item for name, item in image.info.items() if name not in IN_INFO}
    if len(exif) or _directories(exif):
        info["exif"] = exif.tobytes()
    return info
