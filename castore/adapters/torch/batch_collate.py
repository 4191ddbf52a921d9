"""The collate function for a `DataLoader` whose dataset may return whole batches. Knows no dataset."""

from __future__ import annotations

from typing import Any

from torch.utils.data import default_collate


def collate(samples: Any) -> Any:
    """Collate a list of samples with `default_collate`; return anything else unchanged, as a finished batch.

    `SharedCache.get_batch` returns such finished batches. A `DataLoader` passes on what the dataset's
    ``__getitems__`` returned. To copy each sample to its place in the batch takes most of a loader's time
    where the samples come from memory.

    Args:
        samples: a list of samples, or a batch: a tensor, a tuple or a dict.

    >>> import torch
    >>> collate([torch.zeros(3), torch.ones(3)]).shape
    torch.Size([2, 3])
    >>> collate(torch.zeros(2, 3)).shape
    torch.Size([2, 3])
    """
    return default_collate(samples) if isinstance(samples, list) else samples
