"""The parts of a PIL image beside the pixels of its present frame, `info`, and the name of its file.

Must never: import PIL. Only an image has such parts, and then PIL is imported.
"""

from __future__ import annotations

from typing import Any

from blake3 import blake3

from castore.system.exif import changed_tags


def further_frames(image: Any) -> tuple[int, str] | None:
    """The place of the present one of an image's frames, and a digest of the file of all; None for one frame.

    Raises:
        ValueError: there are several, and their file is closed.
    """
    if getattr(image, "n_frames", 1) == 1:
        return None
    file = image.fp or getattr(image, "_fp", None)  # a present frame that was read leaves the second one
    if file is None or file.closed:
        raise ValueError("the file of an image of several frames is closed")
    at = file.tell()
    try:
        file.seek(0)
        digest = blake3(file.read()).hexdigest()
    finally:
        file.seek(at)
    return image.tell(), digest


def further_facts(image: Any) -> dict[str, Any]:
    """Tags of a TIFF file, quantization tables and sampling of a JPEG file, and EXIF tags that `info` has
    otherwise.
    """
    facts: dict[str, Any] = {}
    for name in ("tag_v2", "quantization"):
        if found := getattr(image, name, None):
            facts[name] = dict(found)
    if found := getattr(image, "layer", None):  # PIL reads the sampling from it
        facts["layer"] = [*found]
    return facts | changed_tags(image)
