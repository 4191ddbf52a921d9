"""How a `DataLoader` takes a batch that its dataset has already put together. Knows nothing of where it is from."""

from __future__ import annotations

from typing import Any

from torch.utils.data import default_collate


def collate(samples: Any) -> Any:
    """A batch: from a list of samples by `default_collate`; what is no list is one already, such as `SharedCache.get_batch` returns.

    A loader hands over what the dataset's ``__getitems__`` returned, and copies each sample to its place in the batch, which is
    most of its time where the samples come from memory.

    Args:
        samples: a list of samples, or a batch: a tensor, a tuple or a dict.

    >>> import torch
    >>> collate([torch.zeros(3), torch.ones(3)]).shape
    torch.Size([2, 3])
    >>> collate(torch.zeros(2, 3)).shape
    torch.Size([2, 3])
    """
    return default_collate(samples) if isinstance(samples, list) else samples
