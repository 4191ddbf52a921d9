"""PyTorch datasets over the store: samples in shared memory, on disk, and shards by rank.

`wrapper` is the base of datasets that stand in front of another one. `cached` and `cached_iterable` keep
samples in the store, `bilevel` in shared memory and in the store, `lazy` by rank, `shared` in shared
memory alone. `dataset_identity` makes the key of a dataset, `samples` the bytes of a sample.
`window_sampler` is the order in which an epoch reads samples that a remote has, and `shared_batches` how
workers hand batches to the loader's process.

May import: torch, and the store and all below it, with `shm`.
Must never: give a sample that the wrapped dataset would not give, or keep samples of a dataset without a key.
"""

from __future__ import annotations

from castore.errors import MissingDependencyError

try:
    from castore.adapters.torch.batch_collate import collate
    from castore.adapters.torch.bilevel import BiLevelCachedDataset, BiLevelStats
    from castore.adapters.torch.cached import CachedDataset
    from castore.adapters.torch.cached_iterable import CachedIterableDataset
    from castore.adapters.torch.dataset_identity import ADVICE as ADVICE
    from castore.adapters.torch.dataset_identity import dataset_key
    from castore.adapters.torch.dataset_identity import key_and_doubts as key_and_doubts
    from castore.adapters.torch.lazy import Balance, LazyShardDataset, Mode
    from castore.adapters.torch.level_sizes import Size
    from castore.adapters.torch.levels import DiskLevel, LevelStats, MemoryLevel
    from castore.adapters.torch.shard_plan import Indices
    from castore.adapters.torch.shared import SharedCache, get_shm_size
    from castore.adapters.torch.shared_batches import SharedBatches
    from castore.adapters.torch.window_sampler import WindowSampler
except ModuleNotFoundError as error:
    if error.name not in ("torch", "numpy", "tqdm"):
        raise
    raise MissingDependencyError.of(error.name, "torch") from error

__all__ = [
    "Balance",
    "BiLevelCachedDataset",
    "BiLevelStats",
    "CachedDataset",
    "CachedIterableDataset",
    "DiskLevel",
    "Indices",
    "LazyShardDataset",
    "LevelStats",
    "MemoryLevel",
    "Mode",
    "SharedBatches",
    "SharedCache",
    "Size",
    "WindowSampler",
    "collate",
    "dataset_key",
    "get_shm_size",
]
