"""The samples that the tests of the two levels keep in them: records that contain their index."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from castore.adapters.torch.level_sizes import Size
from castore.adapters.torch.tiers import TwoLevels, fixed_bytes
from tests.helpers import noise

ITEMS = 100
LENGTH = 1000
SPACE = 1024  # what a record of LENGTH takes in memory


def record(index: int) -> bytes:
    return noise(LENGTH, index)


def open_levels(
    memory: int, disk: Size, folder: Path | None, *, items: int = ITEMS, **options: Any
) -> TwoLevels:
    """Levels that hold ``memory`` records in RAM."""
    size = fixed_bytes(items) + memory * SPACE if memory else 0
    defaults = {"name": None, "key": "data", "write_through": False, "keep": True, "codec": "auto"}
    return TwoLevels(items, size, disk, folder, **{**defaults, **options})


def visit(levels: TwoLevels, indices: list[int]) -> int:
    """Use these records as a dataset would; how many had to be read."""
    reads = 0
    for index in indices:
        found = levels.get(index)
        if found is None:
            reads += 1
            levels.put(index, record(index))
        else:
            assert bytes(found) == record(index)
    return reads


def shuffled(seed: int, items: int = ITEMS) -> list[int]:
    return random.Random(seed).sample(range(items), items)
