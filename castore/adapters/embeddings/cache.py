"""EmbeddingCache: an encoder's outputs by key, computed once, kept in a store and mapped by all processes.

This module is the interface of the storage: `table` reads, `table_fill` and `shard_commit` write. Knows no
models, no datasets and no device but the CPU.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from castore.adapters.embeddings.claims import Claims
from castore.adapters.embeddings.encoder_outputs import LeafRows, Schema, check_rows, restore_leaf
from castore.adapters.embeddings.key_table import Digests, RowNumbers, key_digests
from castore.adapters.embeddings.shard_commit import NewRows, Publisher, TableState
from castore.adapters.embeddings.shared_blocks import SharedBlocks, block_items, block_name
from castore.adapters.embeddings.table import Table, TableView
from castore.adapters.embeddings.table_fill import Filling, KnownKeys
from castore.adapters.embeddings.table_layout import MANIFEST, PREFIX, Manifest
from castore.errors import (
    InvalidValueError,
    NotFoundError,
    OutOfRangeError,
    StoreError,
)
from castore.names import check_name
from castore.records import Blob
from castore.store import Store
from castore.system.forks import reset_after_fork


@dataclass(frozen=True, eq=False)
class _Block:
    """Items of a fill, their keys, and the different digests of the keys."""

    keys: list[Any]
    items: list[Any]
    digests: Digests


class EmbeddingCache:
    """Embeddings by key, in a store: appended, never computed twice, mapped by all processes of a node.

    Args:
        name: of the table; its entries lie below ``embeddings/<name>``.
        store: a Store, or the path of one; the default store if None.
        dtype: the dtype that floating outputs are stored as (``torch.float16``, ``torch.bfloat16``); None
            keeps theirs. Look-ups return them in their own dtype.
        resident: read all rows into memory in the background; else rows are read when they are touched.

    Raises:
        InvalidValueError: the table exists, and its floats are stored as another dtype; or there is none, and
            its name lies above or below that of another table, as ``bert`` and ``bert/large``.

    >>> import tempfile, torch
    >>> cache = EmbeddingCache("squares", tempfile.mkdtemp() + "/store")
    >>> cache.fill(["two", "three"], [2, 3], lambda items: torch.tensor(items) ** 2)
    2
    >>> cache.fill(["three", "four"], [3, 4], lambda items: torch.tensor(items) ** 2)
    1
    >>> cache.get(["four", "two"])
    tensor([16,  4])
    """

    def __init__(
        self,
        name: str,
        store: Store | str | os.PathLike[str] | None = None,
        *,
        dtype: torch.dtype | None = None,
        resident: bool = False,
    ) -> None:
        self.name = name
        self._prefix = check_name(f"{PREFIX}/{name}")
        self._manifest = f"{self._prefix}/{MANIFEST}"
        self._owns_store = not isinstance(store, Store)
        self.store = store if isinstance(store, Store) else Store(store)
        if dtype is not None and not dtype.is_floating_point:
            raise InvalidValueError(f"dtype must be a floating-point dtype, not {dtype}")
        self.dtype = dtype
        self.resident = resident
        self._table: Table | None = None
        self._digest: str | None = None
        self._is_there = False
        self._after_fork()
        reset_after_fork(self)
        self.refresh()
        if self._table is None:
            self._require_own_folder()

    def _require_own_folder(self) -> None:
        """Check that no other table lies above or below: one that is made anew removes all in its folder."""
        parts = self.name.split("/")
        above = ("/".join(parts[:count]) for count in range(1, len(parts)))
        other = next((name for name in above if f"{PREFIX}/{name}/{MANIFEST}" in self.store), None)
        if other is None:
            below = (entry.name for entry in self.store.entries(self._prefix))
            tables = (name for name in below if name.endswith(f"/{MANIFEST}") and name != self._manifest)
            found = next(tables, None)
            other = found and found[len(PREFIX) + 1 : -len(MANIFEST) - 1]
        if other is not None:
            raise InvalidValueError(
                f"the embedding cache {self.name!r} would share a folder with {other!r}, which exists;"
                " choose a name beside it"
            )

    def _after_fork(self) -> None:
        self._lock = threading.RLock()

    def __reduce__(self) -> tuple[Any, ...]:
        generation = None if self._table is None else self._table.manifest.generation
        return _reopen, (self.name, self.store, self.dtype, self.resident, generation)

    def __repr__(self) -> str:
        return f"EmbeddingCache({self.name!r}, {str(self.store.path)!r})"

    def close(self) -> None:
        """Release the table, and close the store if it was opened here."""
        self._table = None
        if self._owns_store:
            self.store.close()

    # Contents

    def __len__(self) -> int:
        """Number of known keys, as of the last `refresh`."""
        return 0 if self._table is None else len(self._table)

    def __contains__(self, key: object) -> bool:
        return bool(self.find([key])[0] >= 0)

    @property
    def schema(self) -> Schema | None:
        """The structure of the outputs; None while the cache is empty."""
        return None if self._table is None else self._table.manifest.schema

    def refresh(self) -> int:
        """Read the rows that others appended; returns how many keys are known then.

        Raises:
            CorruptError: the table was written by a newer castore.
            StoreError: the table was lost and made anew: rows that were given out here mean nothing there.
        """
        with self._lock:
            # A missing shard may have been absorbed by another after the manifest was read; then the manifest
            # is read again.
            while self._read_manifest() and self._table is not None and not self._table.is_complete:
                if self._find_manifest()[1] == self._digest:
                    break
            return len(self)

    def _find_manifest(self) -> tuple[Blob | None, str | None]:
        """The manifest's blob and its digest in hex; None for both if the entry is missing or expired."""
        found = self.store.find(self._manifest)
        if found is None or (found.expires is not None and found.expires <= time.time()):
            return None, None
        return found.blob, found.blob.digest.hex()

    def _read_manifest(self) -> bool:
        """Bring the table up to date; False if it was so already."""
        blob, digest = self._find_manifest()
        if digest == self._digest and self._is_there == (blob is not None):
            return False
        self._digest, self._is_there = digest, False
        data = None if blob is None else self.store.get_blob(blob)
        if data is not None:
            self._adopt(Manifest.load(data, self._manifest))
            self._is_there = True
            self.store.count_use(self._manifest)
        return True

    def _adopt(self, manifest: Manifest) -> None:
        if self._table is None:
            self._check_dtype(manifest.schema)
            self._table = Table(self.store, self._prefix, manifest, resident=self.resident)
        elif self._table.manifest.generation == manifest.generation:
            self._table.update(manifest)
        else:
            raise _recreated_error(self.name)

    def _check_dtype(self, schema: Schema) -> None:
        for leaf in schema.leaves:
            kept = leaf.kind in ("tensor", "array", "ragged") and leaf.dtype.startswith(("float", "bfloat"))
            wanted = leaf.dtype if self.dtype is None else str(self.dtype).removeprefix("torch.")
            if kept and leaf.stored != wanted:
                raise InvalidValueError(
                    f"the embedding cache {self.name!r} stores {leaf.name} as {leaf.stored}, not as "
                    f"{wanted}; open it with that dtype, or choose another name"
                )

    # Filling

    def fill(
        self,
        keys: Iterable[Any],
        items: Iterable[Any],
        encode: Callable[[list[Any]], Any],
        *,
        batch_size: int = 32,
    ) -> int:
        """Encode the items whose key is not known, each once, and keep the outputs.

        Processes that fill one table at the same time share the work. If one is killed, the shards that it
        put stay, and the next fill continues from there.

        Args:
            keys: int, str, bytes, or tuples of those.
            items: one for each key, consumed along with the keys: the input of ``encode``, or something small
                that leads to it, such as an index.
            encode: takes a list of items. Returns a tensor with a row for each, a list with a tensor for each
                (which may differ in their first dimension), a list of text, bytes or numbers, or a tuple or
                dict of such.
            batch_size: most items that ``encode`` gets at once.

        Returns:
            The number of items that were encoded here.

        Raises:
            UnhashableError: a key is of another kind.
            SerializationError: outputs cannot be kept, or differ in structure from those before.
            FullError: they do not fit into the store.
        """
        with self.filling(encode, batch_size=batch_size) as filling:
            if self.store.is_shared:
                total = len(keys) if isinstance(keys, Sized) else None
                self._fill_shared(filling, keys, items, block_items(total, batch_size))
            else:
                filling.run(keys, items)
        return filling.count

    def _fill_shared(self, filling: Filling, keys: Iterable[Any], items: Iterable[Any], size: int) -> None:
        """Fill block by block, with those that other nodes have encoded."""

        def name(block: _Block) -> str:
            return block_name([self.name], str(self.dtype), block.digests.tobytes())

        def add(block: _Block, tables: list[NewRows]) -> bool:
            return (
                len(tables) == 1 and filling._receive(tables[0]) and bool(filling._has(block.digests).all())
            )

        blocks = SharedBlocks(self.store, name, add)
        with closing(blocks):
            for mine in blocks.rounds(_unknown_blocks(filling, filling._windows(keys, items, size))):
                for block in mine:
                    filling.add(block.keys, block.items)
                    filling._encode_all()
                    is_whole = bool(filling._has(block.digests).all())
                    blocks.finish(block, [filling._export(block.digests)] if is_whole else None)

    @contextmanager
    def filling(self, encode: Callable[[list[Any]], Any], *, batch_size: int = 32) -> Iterator[Filling]:
        """A fill that the caller feeds, for one pass over data that fills several caches.

        Within the block, `Filling.add` takes keys and items. The end of the block encodes the rest, and waits
        for the items that other processes are encoding. Arguments and errors are those of `fill`.
        """
        if batch_size < 1:
            raise InvalidValueError(f"batch_size must be at least 1, not {batch_size}")
        claims = Claims(self.store, self._prefix)
        try:
            publisher = Publisher(self.store, self._prefix, self._current_state)
            known = KnownKeys(self.refresh, self._find_digests, self._export_rows, self.schema)
            with Filling(
                known, publisher, claims, encode, batch_size=batch_size, dtype=self.dtype, where=self.name
            ) as filling:
                yield filling
        finally:
            claims.close()
        publisher.sort_keys()
        self.refresh()

    def _export_rows(self, rows: RowNumbers) -> NewRows:
        """Some rows as they are stored, with their keys, for `Filling._receive` on another node.

        Args:
            rows: int64 (n,), of this table.
        """
        table = self._table
        assert table is not None, "a table with rows is there"
        wanted, columns = torch.from_numpy(np.unique(rows)), table.view.columns
        keys = columns[0].index_select(0, wanted).numpy().view(np.uint64)
        parts = [LeafRows(*_gather(columns, wanted, place)) for place in table.places[1]]
        return NewRows(keys, table.manifest.schema, parts)

    def _current_state(self) -> TableState:
        self.refresh()
        return TableState(self._digest, self._is_there, self._table)

    # Looking up

    def _find_digests(self, keys: Digests) -> RowNumbers:
        """The row of each key, given as its 128 bits, or -1."""
        return np.full(len(keys), -1, np.int64) if self._table is None else self._table.find(keys)

    def find(self, keys: Iterable[Any]) -> torch.Tensor:
        """The row of each key, int64 (n,); -1 for unknown keys.

        Raises:
            UnhashableError: a key is no int, str, bytes, or tuple of those.
        """
        return torch.from_numpy(self._find_digests(key_digests(keys)))

    def rows(self, keys: Iterable[Any]) -> torch.Tensor:
        """The row of each key, int64 (n,). A row keeps its meaning as long as the table lives.

        Raises:
            NotFoundError: a key is not known; the message names the first.
        """
        asked = keys if isinstance(keys, Sequence | torch.Tensor | np.ndarray) else list(keys)
        found = self.find(asked)
        missing = (found < 0).nonzero()
        if len(missing):
            key = asked[int(missing[0])]
            raise NotFoundError(
                f"the embedding cache {self.name!r} has no embedding for the key {key!r}; call fill to "
                "encode missing items"
            )
        return found

    def take(self, rows: torch.Tensor) -> Any:
        """The outputs for some rows, as the encoder returned them, in memory of their own.

        Args:
            rows: int64 (n,), on the CPU, from `rows` or `find`; in any order, repeated or not.

        Raises:
            OutOfRangeError: a row does not belong to this table, or its shard is gone.
        """
        check_rows(rows)
        table = self._table
        if table is None:
            raise NotFoundError(f"the embedding cache {self.name!r} is empty")
        view = table.view
        if not view.is_whole and not bool(view.has(rows).all()):
            raise self._missing_row_error(view, rows)
        gather = partial(_gather, view.columns, rows)
        try:
            found = [restore_leaf(leaf, *gather(place)) for leaf, place in zip(*table.places, strict=True)]
        except (IndexError, RuntimeError) as error:
            if bool(view.has(rows).all()):
                raise
            raise self._missing_row_error(view, rows) from error
        return table.manifest.schema.rebuild(found)

    def get(self, keys: Iterable[Any]) -> Any:
        """The outputs for some keys.

        Raises:
            NotFoundError: as for `rows`.
        """
        return self.take(self.rows(keys))

    def _missing_row_error(self, view: TableView, rows: torch.Tensor) -> OutOfRangeError:
        row = int(rows[~view.has(rows)][0])
        return OutOfRangeError(
            f"row {row} of the embedding cache {self.name!r} does not exist: it was never assigned, or its "
            "shard is gone; call fill to encode missing items again"
        )

    # Whole arrays

    @property
    def nbytes(self) -> int:
        """Bytes of `arrays`, with gaps."""
        return 0 if self._table is None else sum(column.nbytes for column in self._table.view.columns[1:])

    def arrays(self) -> list[torch.Tensor]:
        """All rows (n, ...) of each leaf as stored, to be copied to a device: row r lies at r.

        The arrays are mapped read-only: writing to one ends the process. `assemble` makes outputs from rows
        selected from them.

        Raises:
            NotFoundError: the cache is empty.
            InvalidValueError: the outputs differ in length, so no row is an item.
        """
        if self._table is None:
            raise NotFoundError(f"the embedding cache {self.name!r} is empty")
        columns = self._table.view.columns
        leaves, places = self._table.places
        ragged = next((leaf for leaf in leaves if leaf.is_ragged), None)
        if ragged is not None:
            raise InvalidValueError(
                f"{ragged.name} of the embedding cache {self.name!r} differs in "
                "length from item to item; look it up on the CPU"
            )
        return [columns[place] for place, _ in places]

    def assemble(self, leaves: Sequence[torch.Tensor]) -> Any:
        """Outputs in the encoder's dtypes, on any device, from rows selected from each of `arrays`."""
        assert self._table is not None, "there is nothing to assemble"
        schema = self._table.manifest.schema
        pairs = zip(schema.leaves, leaves, strict=True)
        return schema.rebuild([restore_leaf(leaf, values, None) for leaf, values in pairs])


def _unknown_blocks(filling: Filling, windows: Iterable[tuple[list[Any], list[Any]]]) -> Iterator[_Block]:
    for keys, items in windows:
        block = _Block(keys, items, np.unique(key_digests(keys), axis=0))
        if not filling._has(block.digests).all():
            yield block


def _gather(
    columns: tuple[torch.Tensor, ...], rows: torch.Tensor, place: tuple[int, int]
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The rows of one leaf.

    A ragged leaf gives its elements in one tensor, and the number of elements of each row.
    """
    first, elements = place
    found = columns[first].index_select(0, rows)
    if elements < 0:
        return found, None
    begins, lengths = found.unbind(1)
    shifted = begins - (lengths.cumsum(0) - lengths)
    # By NumPy: torch would start threads for it, which costs more than the work.
    numbers = np.repeat(shifted.numpy(), lengths.numpy())
    numbers += np.arange(len(numbers))
    return columns[elements].index_select(0, torch.from_numpy(numbers)), lengths


def _reopen(
    name: str, store: Store, dtype: torch.dtype | None, resident: bool, generation: str | None
) -> EmbeddingCache:
    cache = EmbeddingCache(name, store, dtype=dtype, resident=resident)
    if generation is not None and (cache._table is None or cache._table.manifest.generation != generation):
        raise _recreated_error(name)
    return cache


def _recreated_error(name: str) -> StoreError:
    return StoreError(
        f"the embedding cache {name!r} was lost and created again while it was in use, so earlier row "
        "numbers are invalid; look its keys up again"
    )
