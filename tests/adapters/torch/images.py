"""The samples that the tests of SharedCache keep in it."""

from __future__ import annotations

import torch

DIMS = (3, 8, 8)


def image(number: int, dims: tuple[int, ...] = DIMS) -> torch.Tensor:
    return torch.randint(0, 255, dims, dtype=torch.uint8, generator=torch.Generator().manual_seed(number))
