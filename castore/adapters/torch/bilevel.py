"""BiLevelCachedDataset: keeps the samples of any map-style dataset in shared memory and on the local disk.

The wrapper searches memory first, then the disk. The wrapper reads a missing sample from the dataset, packs
it, and offers the record to the levels. The class and its arguments are BiLevelCache's (Jay Rothenberger).
`TwoLevels` decides where records lie, `Policy` which of them stay. Assumes that the dataset returns the same
sample for the same index every time: random transforms belong behind this wrapper. Must never remove the
folder it was given.
"""

from __future__ import annotations

import os
from typing import Any, NamedTuple

from blake3 import blake3

from castore.adapters.torch.dataset_identity import ADVICE, RANDOM_ADVICE, key_and_doubts
from castore.adapters.torch.level_sizes import Size, is_off
from castore.adapters.torch.levels import DiskLevel, LevelStats, MemoryLevel
from castore.adapters.torch.ranks import job_id, read_ranks
from castore.adapters.torch.samples import MISSING, pack, tell_no_sample, unpack
from castore.adapters.torch.tiers import TwoLevels, fixed_bytes
from castore.adapters.torch.unshared_sizes import RankSizes, divide_sizes
from castore.adapters.torch.wrapper import DatasetWrapper
from castore.errors import CorruptError, InvalidValueError, SerializationError, UnhashableError, warn
from castore.keys.doubts import Doubts
from castore.keys.encoder import RefusedError


class BiLevelStats(NamedTuple):
    """The counters and contents of a dataset's levels, over all workers and ranks of the node.

    Attributes:
        memory, disk: None where the level is off.
        reads: samples that had to be read from the dataset.
    """

    memory: LevelStats | None
    disk: LevelStats | None
    reads: int


class BiLevelCachedDataset(DatasetWrapper):
    """A dataset whose samples stay in RAM and on the local disk, shared by all workers and ranks of a node.

    A full level keeps the samples it has as long as all samples are used alike (as in epochs, shuffled or
    not). Where some samples are used more, the level keeps the most used ones.

    Args:
        data: a map-style dataset. Its samples are what `torch.utils.data.default_collate` takes: tensors,
            arrays, numbers, strings, bytes, and tuples, lists and dicts of them; PIL images, dataclasses, and
            the other types that docs/torch.md lists, or that `castore.register_type` explains.
        memory_cache_size: bytes of shared memory, as an int or a text ("100GB"), or as a float in (0, 1] the
            fraction of the free memory; 0 for no memory level. The size is a limit: the level takes memory as
            it fills. A size beyond the free memory is no error.
        disk_cache_size: the same for the disk. The limit holds for the whole folder: samples of earlier
            versions of the data, or of other data, make room.
        disk_cache_path: a folder on a local disk. It becomes a store (`castore stat`, `castore mount`).
        write_through: write each sample to disk when it is first read; by default only samples that the
            memory level does not take or evicts. `flush` writes the rest.
        keep: whether samples on disk serve later runs. If False, `close` removes them. After a killed run,
            the next run that uses the folder removes them.
        name: share the levels with all processes of this user on this machine that give the same name. By
            default, the ranks that torchrun starts on a node share them, and otherwise a process and its
            workers.
        key: what identifies the data: a name, or a config for `castore.key`. By default the fingerprint of
            ``data``: its class's code, its parameters, its files. Data without a fingerprint is cached for
            this run only, with a warning that names the part; each rank then keeps its own samples, in an
            equal part of the sizes.
        codec: how samples are compressed on disk: "auto", "zstd", "lz4", "gzip" or "none".
        remote: name of a remote of the folder's store (see `castore.Store.add_remote`): a sample that another
            node has read comes from there, and samples that are read here are offered, so each is written to
            disk as well. "" for none; default ``$CASTORE_REMOTE``, then none.

    Raises:
        InvalidValueError: a size makes no sense, or both levels are off.
        FullError: ``/dev/shm`` or the disk is full.
        StoreError: the folder cannot be used: read-only, on a network file system, of another format.
        SegmentError: other processes share under that name with other parameters.
        NotFoundError: the folder's store does not know ``remote``.

    >>> import tempfile, torch
    >>> squares = torch.utils.data.TensorDataset(torch.arange(10.) ** 2)
    >>> with BiLevelCachedDataset(squares, "1MB", "10MB", tempfile.mkdtemp()) as cached:
    ...     first, again = cached[3], cached[3]
    ...     stats = cached.stats()
    >>> again, stats.memory.hits, stats.reads
    ((tensor(9.),), 1, 1)
    """

    def __init__(
        self,
        data: Any,
        memory_cache_size: Size,
        disk_cache_size: Size = 0,
        disk_cache_path: str | os.PathLike[str] | None = None,
        *,
        write_through: bool = False,
        keep: bool = True,
        name: str | None = None,
        key: object = None,
        codec: str = "auto",
        remote: str | None = None,
    ) -> None:
        super().__init__(data, key)
        on_disk = not is_off(disk_cache_size, "disk_cache_size")
        if not on_disk and is_off(memory_cache_size, "memory_cache_size"):
            raise InvalidValueError(
                "memory_cache_size and disk_cache_size are both 0: there is nowhere to keep samples"
            )
        if on_disk and disk_cache_path is None:
            raise InvalidValueError("disk_cache_size needs a disk_cache_path: a folder on a local disk")
        job = None if name else job_id()
        # Without a disk level, a name or a job, no other process can meet the samples: they need no key.
        self.key, doubts = self._find_key(data, key, name) if on_disk or name or job else ("", None)
        self._rank_sizes: RankSizes | None = None
        if job and not self.key:
            rank_sizes = divide_sizes(len(self), memory_cache_size, disk_cache_size, disk_cache_path)
            self._rank_sizes, job = rank_sizes, None
            memory_cache_size, disk_cache_size = rank_sizes.memory, rank_sizes.disk
        self._levels = TwoLevels(
            len(self),
            memory_cache_size,
            disk_cache_size,
            disk_cache_path,
            name=name or (f"{job}.{blake3(self.key.encode()).hexdigest()[:16]}" if job else None),
            key=self.key,
            write_through=write_through,
            keep=keep and bool(self.key),
            codec=codec,
            remote=remote,
            sharers=self._rank_sizes.sharers if self._rank_sizes else 1,
        )

        if doubts is not None and self._levels.store is not None:
            doubts.compare(self._levels.store, "dataset", RANDOM_ADVICE)

    def _find_key(self, data: Any, key: object, name: str | None) -> tuple[str, Doubts | None]:
        """The key and the doubts about it; "" without a key, with a warning from the node's first rank."""
        try:
            return key_and_doubts(data, key)
        except RefusedError:  # its samples change places
            raise
        except UnhashableError as error:
            problem = str(error).removesuffix(ADVICE)
        ranks = read_ranks()
        if ranks.local_rank == 0:
            each = f", and each of the {ranks.local_world_size} ranks of this node keeps its own"
            warn(
                "samples are cached for this run "
                f"only{each if ranks.local_world_size > 1 and not name else ''}: {problem}; for later runs, "
                "say what identifies the data with key=...",
                RuntimeWarning,
            )
        return "", None

    @property
    def _capacity(self) -> int:
        """Bytes that the levels of the whole node may take; the same number in all its ranks."""
        if self._rank_sizes is not None:
            tables = fixed_bytes(len(self)) if self.memory_cache is not None else 0
            return self._rank_sizes.sharers * max(0, self._rank_sizes.memory - tables) + self._rank_sizes.disk
        return sum(level.limit for level in (self.memory_cache, self.disk_cache) if level is not None)

    # Samples

    def _one(self, index: int) -> Any:
        self._changes.glance()
        sample = self._found(index)
        # Unpack the record even of a sample just read: the first epoch gets exactly what later epochs get.
        return unpack(self._fetch([index], missed=True)[0]) if sample is MISSING else sample

    def _many(self, indices: list[int]) -> list[Any]:
        self._changes.glance()
        found = list(map(self._found, indices))
        # An index that is requested twice and is not cached is read once.
        missing = list(
            dict.fromkeys(i for i, sample in zip(indices, found, strict=True) if sample is MISSING)
        )
        read = dict(zip(missing, self._fetch(missing, missed=True), strict=True))
        return [
            unpack(read[index]) if sample is MISSING else sample
            for index, sample in zip(indices, found, strict=True)
        ]

    def _found(self, index: int) -> Any:
        """The sample that a level has, or MISSING."""
        record = self._levels.get(index)
        if record is not None:
            try:
                return unpack(record)
            except (CorruptError, SerializationError) as error:
                tell_no_sample(self._levels.name_of(index), error)
                self._levels.reject(index, record)
        return MISSING

    def _fetch(self, indices: list[int], *, missed: bool) -> list[bytes]:
        """Records that no level has: from other nodes that share them, or from the dataset."""
        come = self._levels.bring(indices, self._is_sample, missed=missed)
        left = [index for index in indices if index not in come]
        come |= dict(zip(left, self._read(left), strict=True))
        return [come[index] for index in indices]

    def _is_sample(self, index: int, record: bytes) -> bool:
        try:
            unpack(record)
        except (CorruptError, SerializationError) as error:
            tell_no_sample(self._levels.name_of(index), error)
            return False
        return True

    def _read(self, indices: list[int]) -> list[bytes]:
        """Records from the dataset, offered to the levels, and to other nodes, where they are kept."""
        records = [pack(sample) for sample in self._source(indices)] if indices else []
        if not self._changes.keeps:
            return records
        for index, record in zip(indices, records, strict=True):
            self._levels.put(index, record)
        self._levels.share(indices)
        return records

    # Filling

    def _held(self, index: int) -> bool:
        return index in self._levels

    def _cache(self, indices: list[int]) -> int:
        self._fetch(indices, missed=False)
        return sum(index in self._levels for index in indices)

    def flush(self) -> None:
        """Write samples that are only in memory to disk, as far as there is room, for later runs."""
        self._levels.flush()

    # Counters

    @property
    def memory_cache(self) -> MemoryLevel | None:
        """The memory level with its counters: ``memory_cache.hits.value``. None if there is none."""
        return self._levels.memory

    @property
    def disk_cache(self) -> DiskLevel | None:
        """The disk level with its counters. None if there is none."""
        return self._levels.disk

    @property
    def hits(self) -> int:
        """Samples found in one of the levels."""
        return sum(level.hits.value for level in (self.memory_cache, self.disk_cache) if level is not None)

    @property
    def misses(self) -> int:
        """Samples that had to be read from the dataset."""
        return self._levels.reads.value

    def stats(self) -> BiLevelStats:
        """Hits, misses, bytes and rates of both levels, over all workers and ranks."""
        memory, disk = self.memory_cache, self.disk_cache
        return BiLevelStats(memory.stats() if memory else None, disk.stats() if disk else None, self.misses)

    def close(self) -> None:
        """Leave the levels; shared memory goes with the last process that uses it."""
        self._levels.close()
        if self._rank_sizes is not None:
            self._rank_sizes.agreed.close()
