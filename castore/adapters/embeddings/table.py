"""A table of embeddings as one process sees it: its shards mapped side by side, and the row of each key.

Mapped files stay mapped, and a row number keeps its meaning, whatever gc does to the store. Every file is
checked before it is mapped (mapped_check.py). A shard of which a file is gone or damaged is *missing*: its
keys are not known. Must never write to the store, except for notes of checked files.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from castore.adapters.embeddings.encoder_outputs import dtype_of
from castore.adapters.embeddings.key_table import EMPTY_INDEX, NO_KEY, Digests, KeyIndex, RowNumbers
from castore.adapters.embeddings.mapped_region import PAGE, Region
from castore.adapters.embeddings.table_layout import (
    SORTED_KEYS,
    Manifest,
    Shard,
    TableColumn,
    alignments,
    columns_of,
)
from castore.adapters.mapped_check import check_now, find_unchecked
from castore.errors import CacheWarning, CorruptError, NotFoundError, warn
from castore.records import LOOSE, LOST, Blob, Found
from castore.store import Store
from castore.system.temporary import open_regular

# A table above this part of the machine's memory is read without read-ahead; a smaller one is soon read
# whole.
_RANDOM_PART = 0.5
# Factor by which more addresses are reserved than are needed, because a table grows; and the least number.
_SPARE = 16
_MIN_BYTES = 1 << 30
_NEVER = torch.iinfo(torch.int64).max


class TableView(NamedTuple):
    """The state that look-ups use; replaced as a whole when the table grows.

    Attributes:
        columns: one tensor a column, over all its rows.
        starts, ends: of the runs of mapped rows, int64; ``starts`` has one more, beyond all.
        is_whole: whether that is one run from row 0 on.
    """

    columns: tuple[torch.Tensor, ...]
    starts: torch.Tensor
    ends: torch.Tensor
    is_whole: bool

    def has(self, rows: torch.Tensor) -> torch.Tensor:
        """Which rows are there."""
        return rows >= self.starts[torch.bucketize(rows, self.ends, right=True)]


class Table:
    """The mapped table.

    Args:
        store: the store that holds it.
        prefix: the name under which its entries lie.
        manifest: its first manifest.
        resident: read the rows into memory in the background; else rows are read when they are touched.
    """

    manifest: Manifest

    def __init__(self, store: Store, prefix: str, manifest: Manifest, *, resident: bool) -> None:
        self._store = store
        self._prefix = prefix
        self._resident = resident
        self.columns = columns_of(manifest.schema)
        self.alignments = alignments(self.columns)
        #: The leaves, and for each the column that rows index, and the column of its elements if it is
        #: ragged, or -1.
        self.places = (manifest.schema.leaves, _leaf_places(self.columns, len(manifest.schema.leaves)))
        self._regions: list[Region | None] = [None] * len(self.columns)
        self._mapped: dict[tuple[int, int], Shard] = {}
        self._missing: set[Shard] = set()
        self._sorted = self._recent = EMPTY_INDEX
        self._sorted_digest = ""
        self._sorted_until = 0
        self.view = self._make_view(manifest.ends)
        self.update(manifest)

    # Rows

    def update(self, manifest: Manifest) -> None:
        """Map new shards, and find out which are missing."""
        self.manifest = manifest
        fresh = [
            shard
            for shard in manifest.shards
            if self._mapped.get(shard.extents[0]) != shard and shard not in self._missing
        ]
        names = [self._file_name(shard, column) for shard in fresh for column in self.columns]
        found = self._store.find_many([*names, self._entry_name(SORTED_KEYS)])
        good = self._find_sound_files(fresh, found)
        self._reserve(manifest.ends)
        self._missing.update(
            shard for shard in fresh if not (good.issuperset(shard.digests) and self._map(shard, found))
        )
        fresh = [shard for shard in fresh if shard not in self._missing]
        for shard in fresh:
            start, end = shard.extents[0]
            for old in [key for key in self._mapped if start <= key[0] and key[1] <= end]:
                del self._mapped[old]
            self._mapped[start, end] = shard
        # Rows of absorbed shards are still mapped, and still true, also if the absorbing shard is missing.
        before, self.view = self.view, self._make_view(manifest.ends)
        self._update_keys(found.get(self._entry_name(SORTED_KEYS)), fresh, before)
        for name in found:
            self._store.count_use(name)
        if self._resident:
            self._populate(fresh)

    @property
    def is_complete(self) -> bool:
        """Whether all shards of the manifest can be read."""
        return self._missing.isdisjoint(self.manifest.shards)

    def is_here(self, shard: Shard) -> bool:
        """Whether the rows of a shard can be read."""
        return shard not in self._missing

    def rows_of(self, number: int, start: int, end: int) -> torch.Tensor:
        """Some rows of a column, as they are mapped."""
        return self.view.columns[number][start:end]

    def __len__(self) -> int:
        return sum(shard.keys for shard in self._mapped.values())

    def _file_name(self, shard: Shard, column: TableColumn) -> str:
        return self._entry_name(shard.file(column))

    def _entry_name(self, name: str) -> str:
        return f"{self._prefix}/{name}"

    def _find_sound_files(self, shards: list[Shard], found: dict[str, Found]) -> set[str]:
        """The digests, in hex, of the files of some shards that are there and sound."""
        wanted: dict[str, Blob] = {}
        now = time.time()
        for shard in shards:
            for column, digest in zip(self.columns, shard.digests, strict=True):
                entry = found.get(self._file_name(shard, column))
                if entry is None or (entry.expires is not None and entry.expires <= now):
                    continue
                start, end = shard.extents[column.space]
                if (
                    entry.blob.digest.hex() == digest
                    and entry.blob.size == PAGE + (end - start) * column.row_bytes
                ):
                    wanted[digest] = entry.blob
        return self._check_blobs(wanted)

    def _check_blobs(self, wanted: dict[str, Blob]) -> set[str]:
        """The digests, in hex, of the blobs whose bytes are right."""
        good = set(wanted)
        # Packed and compressed blobs are copied, and checked when they are read.
        for blob in find_unchecked(self._store, [blob for blob in wanted.values() if _can_be_mapped(blob)]):
            try:
                check_now(self._store, blob)
            except NotFoundError:  # gc was faster
                good.discard(blob.digest.hex())
            except CorruptError as error:
                _warn(f"{self._prefix}: {error}; its rows will be computed again")
                good.discard(blob.digest.hex())
        return good

    def _reserve(self, ends: Sequence[int]) -> None:
        """Reserve addresses for all rows of every column."""
        size = sum(ends[column.space] * column.row_bytes for column in self.columns)
        memory = os.sysconf("SC_PHYS_PAGES") * PAGE
        random = not self._resident and size > _RANDOM_PART * memory
        for number, column in enumerate(self.columns):
            need, region = ends[column.space] * column.row_bytes + PAGE, self._regions[number]
            if region is not None and region.size >= need:
                continue
            grown = self._regions[number] = Region(max(_MIN_BYTES, _SPARE * need), random=random)
            if region is not None:
                self._move(number, region, grown)

    def _move(self, number: int, old: Region, new: Region) -> None:
        column = self.columns[number]
        for shard in self._mapped.values():
            start, end = (row * column.row_bytes for row in shard.extents[column.space])
            new.take_over(old, start, end)

    def _map(self, shard: Shard, found: dict[str, Found]) -> bool:
        """Map a shard's files; False if one is gone meanwhile."""
        for number, column in enumerate(self.columns):
            start, end = shard.extents[column.space]
            if start == end:
                continue
            region, blob = self._regions[number], found[self._file_name(shard, column)].blob
            assert region is not None
            try:
                blob = self._store.bring(blob)
                if _can_be_mapped(blob):
                    self._map_file(region, start * column.row_bytes, blob)
                    continue
            except (FileNotFoundError, NotFoundError):
                return False
            data = self._store.get_blob(blob)
            if data is None:
                now = self._store.blob(blob.digest)
                if now is not None and now.pack == LOST:  # otherwise gc was faster
                    name = self._file_name(shard, column)
                    _warn(f"{self._prefix}: {name} is damaged; its rows will be computed again")
                return False
            region.copy(start * column.row_bytes, memoryview(data)[PAGE:])
        return True

    def _map_file(self, region: Region, at: int, blob: Blob) -> None:
        fd = open_regular(self._store.path_of(blob))
        try:
            if os.fstat(fd).st_size != blob.size:  # touching a page beyond the end would end the process
                raise FileNotFoundError
            region.map(at, fd, PAGE, blob.size - PAGE)
        finally:
            os.close(fd)

    def _make_view(self, ends: Sequence[int]) -> TableView:
        runs: list[list[int]] = []
        for start, end in sorted(self._mapped):
            if runs and start <= runs[-1][1]:
                runs[-1][1] = max(runs[-1][1], end)
            else:
                runs.append([start, end])
        tensors = []
        for column, region in zip(self.columns, self._regions, strict=True):
            dtype, shape = dtype_of(column.dtype), (ends[column.space], *column.shape)
            tensors.append(
                torch.empty((0, *column.shape), dtype=dtype, device="cpu")
                if region is None
                else region.tensor(dtype, shape)
            )
        starts = torch.tensor([*(run[0] for run in runs), _NEVER], device="cpu")
        stops = torch.tensor([run[1] for run in runs], dtype=torch.int64, device="cpu")
        whole = len(runs) == 1 and runs[0] == [0, ends[0]]
        return TableView(tuple(tensors), starts, stops, whole)

    def _populate(self, shards: list[Shard]) -> None:
        places = [
            (region, *(row * column.row_bytes for row in shard.extents[column.space]))
            for column, region in zip(self.columns, self._regions, strict=True)
            for shard in shards
            if column.leaf >= 0 and region is not None
        ]
        if places:
            threading.Thread(
                target=_populate_regions, args=(places,), name="castore-populate", daemon=True
            ).start()

    # Keys

    def find(self, keys: Digests) -> RowNumbers:
        """The row of each key that is here, or -1."""
        found = self._recent.find(keys)
        missing = np.flatnonzero(found < 0)
        if len(missing):
            rows = self._sorted.find(keys[missing])
            if not self.view.is_whole and len(rows):
                rows[~self.view.has(torch.from_numpy(rows)).numpy()] = -1
            found[missing] = rows
        return found

    def live_keys(self) -> KeyIndex:
        """All keys that are here, sorted."""
        rows = [np.arange(*shard.extents[0]) for shard in self._in_order()]
        keys = [self._keys_at(*shard.extents[0]) for shard in self._in_order()]
        if not rows:
            return EMPTY_INDEX
        all_rows, all_keys = np.concatenate(rows), np.concatenate(keys)
        real = (all_keys != NO_KEY).any(1)
        return KeyIndex.of(all_keys[real], all_rows[real])

    @property
    def unsorted(self) -> int:
        """Number of keys that came since the file of sorted keys was made."""
        return len(self._recent.rows)

    def _in_order(self) -> list[Shard]:
        return [self._mapped[extent] for extent in sorted(self._mapped)]

    def _keys_at(self, start: int, end: int) -> Digests:
        return self.view.columns[0][start:end].numpy().view(np.uint64)

    def _update_keys(self, found: Found | None, fresh: list[Shard], before: TableView | None) -> None:
        """Add the keys of rows that were not here before."""
        kept = self.manifest.sorted_keys
        if kept is not None and kept.digest != self._sorted_digest:
            table = self._load_sorted(kept.digest, found)
            if table is not None:
                self._sorted, self._sorted_digest, self._sorted_until = table, kept.digest, kept.until
                self._recent, fresh, before = EMPTY_INDEX, self._in_order(), None
        rows = [
            np.arange(max(start, self._sorted_until), end)
            for (start, end), *_ in (shard.extents for shard in fresh)
        ]
        new = np.concatenate([np.empty(0, np.int64), *rows])
        if before is not None:  # a shard that absorbed others has rows that were here before
            new = new[~before.has(torch.from_numpy(new)).numpy()]
        keys = self.view.columns[0].numpy().view(np.uint64)[new]
        real = (keys != NO_KEY).any(1)
        if real.any():
            self._recent = self._recent.with_more(keys[real], new[real])

    def _load_sorted(self, digest: str, found: Found | None) -> KeyIndex | None:
        """The file of sorted keys, mapped. None if it is gone; the keys are then sorted here."""
        if (
            found is None
            or found.blob.digest.hex() != digest
            or digest not in self._check_blobs({digest: found.blob})
        ):
            return None
        size = found.blob.size - PAGE
        if _can_be_mapped(found.blob):
            region = Region(size)
            try:
                self._map_file(region, 0, found.blob)
            except FileNotFoundError:
                return None
            data = region.tensor(torch.int64, (3, size // 24))
        else:
            read = self._store.get_blob(found.blob)
            if read is None:
                return None
            data = torch.frombuffer(bytearray(read), dtype=torch.int64, offset=PAGE).view(3, -1)
        first, second, rows = data.numpy()
        return KeyIndex(first.view(np.uint64), second.view(np.uint64), rows)


def _populate_regions(places: list[tuple[Region, int, int]]) -> None:
    for region, start, end in places:
        region.populate(start, end)


def _leaf_places(columns: list[TableColumn], leaves: int) -> list[tuple[int, int]]:
    places = [(-1, -1)] * leaves
    for number, column in enumerate(columns):
        if column.space > 0:
            places[column.leaf] = places[column.leaf][0], number
        elif column.leaf >= 0:
            places[column.leaf] = number, -1
    return places


def _can_be_mapped(blob: Blob) -> bool:
    return blob.pack == LOOSE and blob.codec == "none"


def _warn(message: str) -> None:
    warn(message, CacheWarning)
