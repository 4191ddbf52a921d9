"""Put a shard: number its rows, and put its files and the manifest with one commit.

A shard is planned from a manifest. If the transaction finds another manifest, another process was faster, and
the shard is planned again. A lock saves most of those repetitions; nothing relies on it.

Small shards do not pile up: a new one absorbs the shards before it that are no larger than itself, like
carries in a binary counter. So the number of small shards is the logarithm of their rows. Rows keep their
numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from blake3 import blake3

from castore.adapters.embeddings.claims import embedding_locks
from castore.adapters.embeddings.encoder_outputs import LeafRows, Schema, check_alike
from castore.adapters.embeddings.key_table import Digests
from castore.adapters.embeddings.table import Table
from castore.adapters.embeddings.table_layout import (
    MANIFEST,
    SORTED_KEYS,
    Manifest,
    Shard,
    SortedKeys,
    TableColumn,
    alignments,
    columns_of,
    npy_file,
    numpy_name,
    numpy_view,
)  # fmt: skip
from castore.adapters.mapped_check import file_time, forget_notes, note_new
from castore.errors import FullError, StoreError
from castore.records import Buffer
from castore.store import Store
from castore.units import format_size

#: Bytes at which a shard is put: large enough for few files, small enough to lose little.
SHARD_BYTES = 32 * 1024 * 1024
# The next shard absorbs shards up to this size, whatever its own size: each costs a gap of rows.
_SMALL_SHARD_BYTES = 256 * 1024
#: The sorted keys are written anew when this many keys, and this part of all keys, are missing from the file.
_UNSORTED, _UNSORTED_PART = 4096, 8
_ATTEMPTS = 100


class TableState(NamedTuple):
    """The state from which a shard is planned.

    Attributes:
        digest: of the manifest's entry, in hex, or None if there is none.
        is_there: whether the manifest could be read.
        table: as this process has it; it outlives the manifest.
    """

    digest: str | None
    is_there: bool
    table: Table | None


class NewRows(NamedTuple):
    """Items to be put: keys (n, 2), and the rows of each leaf."""

    keys: Digests
    schema: Schema
    parts: list[LeafRows]

    @property
    def size(self) -> int:
        """Bytes of the values."""
        return sum(part.values.nbytes for part in self.parts)


def join_rows(batches: Sequence[NewRows]) -> NewRows:
    """Several batches as one."""
    parts = []
    for pieces in zip(*(batch.parts for batch in batches), strict=True):
        lengths = [piece.lengths for piece in pieces if piece.lengths is not None]
        parts.append(
            LeafRows(torch.cat([piece.values for piece in pieces]), torch.cat(lengths) if lengths else None)
        )
    return NewRows(np.concatenate([batch.keys for batch in batches]), batches[0].schema, parts)


def select_rows(rows: NewRows, wanted: np.ndarray[Any, np.dtype[np.bool_]]) -> NewRows:
    """Some of the rows.

    Args:
        rows: all of them.
        wanted: bool (n,).
    """
    mask = torch.from_numpy(wanted)
    parts = [
        LeafRows(part.values[mask], None)
        if part.lengths is None
        else LeafRows(part.values[mask.repeat_interleave(part.lengths)], part.lengths[mask])
        for part in rows.parts
    ]
    return NewRows(rows.keys[wanted], rows.schema, parts)


class Publisher:
    """Puts rows into the table under ``prefix``.

    Args:
        store, prefix: the table's place.
        current: reads the table's present state.
    """

    def __init__(self, store: Store, prefix: str, current: Callable[[], TableState]) -> None:
        self._store = store
        self._prefix = prefix
        self._current = current

    def publish(self, rows: NewRows) -> None:
        """Put a shard.

        Raises:
            FullError, TooLargeError: it does not fit into the budget, or onto the disk.
        """
        with embedding_locks(self._store).hold(f"shards of {self._prefix}"):
            self._publish(rows)

    def _publish(self, rows: NewRows) -> None:
        for _ in range(_ATTEMPTS):
            expected, is_there, table = self._current()
            manifest = Manifest.new(rows.schema) if table is None else table.manifest
            check_alike(manifest.schema, rows.schema, self._prefix)
            shard, files, absorbed = _plan_shard(rows, manifest, table)
            gone = set(absorbed) | {old for old in manifest.shards if table is None or not table.is_here(old)}
            kept = tuple(old for old in manifest.shards if old not in gone)
            self._check_room(shard, kept, manifest.schema)
            new = manifest._replace(shards=(*kept, shard), ends=tuple(end for _, end in shard.extents))
            if not is_there:  # an earlier table's files do not belong to this one
                new = new._replace(shards=(shard,), sorted_keys=None)
                drop = [entry.name for entry in self._store.entries(self._prefix)]
            else:
                columns = [] if table is None else table.columns
                # Shards without elements of a ragged leaf may share the name of their empty file.
                stays = {old.file(column) for old in kept for column in columns}
                names = {old.file(column) for old in gone for column in columns} - stays
                drop = [f"{self._prefix}/{name}" for name in names]
            if self._put(expected, new, files, drop):
                return
        raise StoreError(
            f"other processes changed {self._prefix} during each of {_ATTEMPTS} attempts to add a shard; "
            f"check that the file system of {self._store.path} grants a lock to one process at a time"
        )

    def _check_room(self, shard: Shard, kept: tuple[Shard, ...], schema: Schema) -> None:
        """Check the budget.

        A put over it evicts least recently used entries, perhaps this table's own rows.
        """
        budget, columns = self._store.settings.max_size, columns_of(schema)
        need = sum(_shard_bytes(each, columns) for each in (*kept, shard))
        if budget is not None and need > budget:
            raise FullError(
                f"{self._prefix} needs {format_size(need)}, more than its store may hold "
                f"({format_size(budget)}); raise the limit with `castore init --max-size`, or store a "
                "narrower dtype"
            )

    def sort_keys(self) -> None:
        """Write the file of sorted keys anew, if many keys came since."""
        expected, is_there, table = self._current()
        if table is None or not is_there or table.unsorted < max(_UNSORTED, len(table) // _UNSORTED_PART):
            return
        known = table.live_keys()
        words = known.first.view(np.int64), known.second.view(np.int64), known.rows
        file = npy_file(np.stack(words))
        manifest = table.manifest
        sorted_keys = SortedKeys(blake3(file).hexdigest(), manifest.ends[0])
        # If another process was faster, the next fill sorts.
        self._put(expected, manifest._replace(sorted_keys=sorted_keys), [(SORTED_KEYS, file, None)], [])

    def _put(
        self,
        expected: str | None,
        manifest: Manifest,
        files: list[tuple[str, bytearray, dict[str, Any] | None]],
        drop: list[str],
    ) -> bool:
        started, store = file_time(), self._store
        named = [(f"{self._prefix}/{name}", data, about) for name, data, about in files]
        place = f"{self._prefix}/{MANIFEST}"
        items: list[tuple[str, Buffer, dict[str, Any] | None]] = [*named, (place, manifest.dump(), None)]
        before = store.find_many([*drop, *(name for name, _, _ in items)])
        entries = store.put_if((place, expected), items, drop=drop, codec="none")
        if entries is None:
            return False
        after = {found.blob for found in store.find_many([entry.name for entry in entries]).values()}
        note_new(store, after, started)
        # Removed at once and not by the next gc: a table filled in small steps would leave many times its
        # size.
        gone = {found.blob for found in before.values()} - after
        forget_notes(store, gone)
        store.remove_blobs([blob.digest for blob in gone])
        return True


def _plan_shard(
    rows: NewRows, manifest: Manifest, table: Table | None
) -> tuple[Shard, list[tuple[str, bytearray, dict[str, Any] | None]], list[Shard]]:
    """The shard, its files with their metadata, and the shards that it absorbs."""
    if table is None:
        columns = columns_of(manifest.schema)
        steps = alignments(columns)
        absorbed: list[Shard] = []
    else:
        columns, steps, absorbed = table.columns, table.alignments, _find_absorbable(rows, table)
    if absorbed:
        starts, firsts = [start for start, _ in absorbed[0].extents], list(manifest.ends)
    else:
        starts = firsts = [-(-end // step) * step for end, step in zip(manifest.ends, steps, strict=True)]
    data = _new_column_rows(rows, columns, firsts)
    extents, written = _extents(columns, data, starts, firsts), []
    files: list[tuple[str, bytearray, dict[str, Any] | None]] = []
    shard = Shard(extents, (), len(rows.keys) + sum(old.keys for old in absorbed))
    for number, column in enumerate(columns):
        new = data[number]
        if absorbed:
            assert table is not None
            old = table.rows_of(number, starts[column.space], firsts[column.space])
            new = torch.cat([old, new])
        array = numpy_view(new)
        file = npy_file(array.view(np.uint64) if column.leaf < 0 else array)
        files.append((shard.file(column), file, _file_metadata(column, rows.schema, extents)))
        written.append(file)
    return shard._replace(digests=tuple(blake3(file).hexdigest() for file in written)), files, absorbed


def _find_absorbable(rows: NewRows, table: Table) -> list[Shard]:
    """The last shards to absorb: each small, or no larger than the rows after it; at most one full shard."""
    shards, taken = table.manifest.shards, len(table.manifest.shards)
    after, count, room = table.manifest.ends, len(rows.keys), SHARD_BYTES - rows.size
    while taken:
        last = shards[taken - 1]
        size = _shard_bytes(last, table.columns)
        # Row numbers of a lost shard in between must not become those of rows that are here.
        gaps = [start - end for start, (_, end) in zip(after, last.extents, strict=True)]
        adjacent = all(gap < step for gap, step in zip(gaps, table.alignments, strict=True))
        if (
            not adjacent
            or not table.is_here(last)
            or size > room
            or (last.keys > count and size > _SMALL_SHARD_BYTES)
        ):
            break
        after = tuple(start for start, _ in last.extents)
        count, room, taken = count + last.keys, room - size, taken - 1
    return list(shards[taken:])


def _shard_bytes(shard: Shard, columns: list[TableColumn]) -> int:
    return sum(
        (shard.extents[column.space][1] - shard.extents[column.space][0]) * column.row_bytes
        for column in columns
    )


def _new_column_rows(rows: NewRows, columns: list[TableColumn], firsts: list[int]) -> list[torch.Tensor]:
    """The new rows of each column; a row of a ragged leaf is the place and the number of its elements."""
    data = []
    for column in columns:
        if column.leaf < 0:
            data.append(torch.from_numpy(rows.keys.view(np.int64)))
            continue
        part = rows.parts[column.leaf]
        if part.lengths is None or column.space > 0:
            data.append(part.values)
        else:
            space = next(other.space for other in columns if other.leaf == column.leaf and other.space > 0)
            begins = firsts[space] + part.lengths.cumsum(0) - part.lengths
            data.append(torch.stack([begins, part.lengths], 1))
    return data


def _extents(
    columns: list[TableColumn], data: list[torch.Tensor], starts: list[int], firsts: list[int]
) -> tuple[tuple[int, int], ...]:
    counts = {column.space: len(rows) for column, rows in zip(columns, data, strict=True)}
    return tuple(
        (start, first + counts[space])
        for space, (start, first) in enumerate(zip(starts, firsts, strict=True))
    )


def _file_metadata(
    column: TableColumn, schema: Schema, extents: tuple[tuple[int, int], ...]
) -> dict[str, Any]:
    """A file's metadata, which `castore stat` shows."""
    start, end = extents[column.space]
    about: dict[str, Any] = {"rows": f"{start}-{end}"}
    if column.leaf < 0:
        return about | {"holds": "keys: BLAKE3, 128 bits"}
    leaf = schema.leaves[column.leaf]
    if leaf.is_ragged and column.space == 0:
        return about | {"holds": "first element and number of elements of each row"}
    return about | {
        "holds": leaf.kind,
        "dtype": leaf.dtype,
        "stored": column.dtype,
        "npy": numpy_name(column.dtype),
    }
