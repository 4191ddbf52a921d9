"""A dataset that is slow to read: JPEG photographs, decoded and made smaller at each read of a sample.

All are crops of the photograph that matplotlib ships, 500 x 375 as the median of ImageNet. Never fetches
anything.
"""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch.utils.data import Dataset

SIDE = 224
_WIDTH, _HEIGHT = 500, 375
_SEED = 20_26


class Photos(Dataset[torch.Tensor]):
    """The JPEG files of a folder as tensors of 3 x 224 x 224 bytes."""

    def __init__(self, folder: Path) -> None:
        self.paths = sorted(folder.glob("*.jpg"))

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> torch.Tensor:
        with Image.open(self.paths[index]) as image:
            small = image.convert("RGB").resize((SIDE, SIDE), Image.Resampling.BILINEAR)
        return torch.from_numpy(np.array(small)).permute(2, 0, 1).contiguous()


def make(folder: Path, count: int) -> Photos:
    """Write the files; returns the dataset of them."""
    import matplotlib as mpl  # type: ignore[import-not-found]

    rng = random.Random(_SEED)
    folder.mkdir(parents=True)
    with Image.open(Path(mpl.get_data_path(), "sample_data", "grace_hopper.jpg")) as file:
        picture = file.convert("RGB")
    turned = picture.rotate(90, expand=True)
    for number in range(count):
        # Rotated or not, larger or not: no two files have the same bytes, and all pictures have one size.
        whole = rng.choice([picture, turned])
        scale = rng.uniform(1.0, 1.6)
        width, height = _WIDTH / scale, _HEIGHT / scale
        left, top = rng.uniform(0, whole.width - width), rng.uniform(0, whole.height - height)
        crop = whole.resize((_WIDTH, _HEIGHT), box=(left, top, left + width, top + height))
        crop.save(folder / f"{number:05}.jpg", quality=90)
    return Photos(folder)
