"""One fill: which items have to be encoded, in what batches, and when they are put.

A fill goes once through keys and items, a window at a time: it skips known items, claims and encodes free
ones, and defers those that another process has claimed. A shard is put when it is large enough, or so old
that a kill would lose too much work. Must never hold claims while it waits for others, so that no two fillers
wait for each other.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
import torch

from castore.adapters.embeddings.claims import Claims
from castore.adapters.embeddings.encoder_outputs import Schema, check_alike, split_outputs
from castore.adapters.embeddings.key_table import Digests, RowNumbers, key_digests
from castore.adapters.embeddings.shard_commit import (
    SHARD_BYTES,
    NewRows,
    Publisher,
    join_rows,
    select_rows,
)
from castore.errors import InvalidValueError, SerializationError

log = logging.getLogger("castore")

#: Batches that are looked up and claimed together.
WINDOW = 8
#: Seconds after which a shard is put, full or not: a kill loses no more work than that.
PUT_SECONDS = 30.0
# Seconds between checks of the keys that others have claimed: the first pause, and the longest.
_WAIT, _LONGEST_WAIT = 0.01, 0.5

EncodeItems = Callable[[list[Any]], Any]


class KnownKeys(NamedTuple):
    """The part of the cache that a fill uses.

    Attributes:
        refresh: reads the rows that others appended.
        find: the row of each key, or -1.
        export: the rows of some numbers, as they are stored, with their keys.
        schema: the structure of the outputs; None while the cache is empty.
    """

    refresh: Callable[[], object]
    find: Callable[[Digests], RowNumbers]
    export: Callable[[RowNumbers], NewRows]
    schema: Schema | None


class Filling:
    """A fill of an `EmbeddingCache`, made by `EmbeddingCache.filling`.

    Attributes:
        count: the number of items that were encoded here.
    """

    def __init__(
        self,
        known: KnownKeys,
        publisher: Publisher,
        claims: Claims,
        encode: EncodeItems,
        *,
        batch_size: int,
        dtype: torch.dtype | None,
        where: str,
    ) -> None:
        """Begin the fill.

        Args:
            known: the known keys.
            publisher: puts the shards.
            claims: of this fill.
            encode: turns a list of items into their outputs.
            batch_size: items to encode at a time.
            dtype: the dtype that floating outputs are stored as, or None.
            where: the table's name, for messages.
        """
        self._known = known
        self._publisher = publisher
        self._claims = claims
        self._encode = encode
        self._batch_size = batch_size
        self._dtype = dtype
        self._where = where
        self._schema = known.schema
        self._queue: list[tuple[bytes, Any]] = []
        self._deferred: dict[bytes, Any] = {}
        self._encoded: list[NewRows] = []
        # The keys of those.
        self._pending: set[bytes] = set()
        self._claimed: set[bytes] = set()
        self._last_put = time.monotonic()
        self.count = 0

    def run(self, keys: Iterable[Any], items: Iterable[Any]) -> None:
        """Fill with all of these.

        Raises:
            InvalidValueError: there are more keys than items, or fewer.
            SerializationError: outputs differ in structure from those before, or cannot be kept.
        """
        for some, theirs in self._windows(keys, items, WINDOW * self._batch_size):
            self.add(some, theirs)

    def _windows(
        self, keys: Iterable[Any], items: Iterable[Any], size: int
    ) -> Iterator[tuple[list[Any], list[Any]]]:
        """Keys and items, some at a time.

        Raises:
            InvalidValueError: there are more keys than items, or fewer.
        """
        keys, items = iter(keys), iter(items)
        while some := list(islice(keys, size)):
            theirs = list(islice(items, len(some)))
            if len(some) != len(theirs):
                break
            yield some, theirs
        if some or next(items, self) is not self:
            raise InvalidValueError(f"{self._where}: there must be as many items as keys")

    def add(self, keys: Sequence[Any], items: Sequence[Any]) -> None:
        """Add items to the fill. Whole batches are encoded at once, the rest together with later items."""
        self._queue_window(key_digests(keys), items)
        self._encode_queue(self._batch_size)

    def _encode_all(self) -> None:
        """Encode what was added, but for items that another process of this node is encoding."""
        self._encode_queue(1)

    def __enter__(self) -> Filling:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self._encode_queue(1)
                self.put()
                self._wait_for_others()
        finally:
            self.put()  # encoded items are right, even if a later one failed

    def _queue_window(self, keys: Digests, items: Sequence[Any]) -> None:
        """Queue the items that are neither known nor claimed; defer those that others have claimed."""
        wanted: dict[bytes, Any] = dict(self._deferred)
        for number in np.flatnonzero(self._known.find(keys) < 0).tolist():
            key = keys[number].tobytes()
            if key not in self._claimed and key not in self._pending:
                wanted.setdefault(key, items[number])
        self._deferred = {}
        if not wanted:
            return
        asked = np.frombuffer(b"".join(wanted), np.uint64).reshape(-1, 2)
        free = self._claims.claim(asked)
        # Keys released before `claim` were put before that, so after this refresh they are known.
        self._known.refresh()
        known = self._known.find(asked) >= 0
        for (key, item), is_free, is_known in zip(wanted.items(), free, known, strict=True):
            if is_known:
                continue
            if is_free:
                self._claimed.add(key)
                self._queue.append((key, item))
            else:
                self._deferred[key] = item

    def _encode_queue(self, at_least: int) -> None:
        while len(self._queue) >= at_least:
            batch, self._queue = self._queue[: self._batch_size], self._queue[self._batch_size :]
            outputs = self._encode([item for _, item in batch])
            schema, parts = split_outputs(outputs, len(batch), self._dtype)
            if self._schema is None:
                self._schema = schema
            check_alike(self._schema, schema, self._where)
            keys = np.frombuffer(b"".join(key for key, _ in batch), np.uint64).reshape(-1, 2)
            self.count += len(batch)
            self._collect(NewRows(keys, self._schema, parts))

    def _collect(self, rows: NewRows) -> None:
        self._encoded.append(rows)
        self._pending.update(key.tobytes() for key in rows.keys)
        full = sum(rows.size for rows in self._encoded) >= SHARD_BYTES
        if full or time.monotonic() - self._last_put > PUT_SECONDS:
            self.put()

    # Rows that travel between nodes

    def _receive(self, rows: NewRows) -> bool:
        """Put rows that another node has encoded with those of this fill, but for keys that are there.

        Returns:
            False if the rows differ in structure from those that are here.

        Raises:
            FullError: they do not fit into the store.
        """
        if self._schema is None:
            self._schema = rows.schema
        try:
            check_alike(self._schema, rows.schema, self._where)
        except SerializationError as error:
            log.warning("embeddings of another node are encoded again: %s", error)
            return False
        unknown = ~self._has(rows.keys)
        if unknown.any():
            self._collect(select_rows(rows, unknown))
        return True

    def _has(self, keys: Digests) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """Which keys have a row, put or not: bool (n,)."""
        found = self._known.find(keys) >= 0
        for number in np.flatnonzero(~found).tolist():
            found[number] = keys[number].tobytes() in self._pending
        return found

    def _export(self, keys: Digests) -> NewRows:
        """The rows of some keys, put or not, for `_receive` on another node.

        Args:
            keys: each of which has a row.
        """
        numbers = self._known.find(keys)
        pieces = [] if (numbers < 0).all() else [self._known.export(numbers[numbers >= 0])]
        wanted = {key.tobytes() for key in keys[numbers < 0]}
        for rows in self._encoded if wanted else ():
            mask = np.array([key.tobytes() in wanted for key in rows.keys])
            if mask.any():
                pieces.append(select_rows(rows, mask))
        return join_rows(pieces)

    def put(self) -> None:
        """Put the encoded items, and release their keys; items still in the queue stay claimed."""
        encoded, self._encoded, self._pending = self._encoded, [], set()
        if not encoded:
            return
        rows = join_rows(encoded)
        self._publisher.publish(rows)
        self._known.refresh()
        self._last_put = time.monotonic()
        self._claims.release(keep=[key for key, _ in self._queue])
        self._claimed = {key for key, _ in self._queue}

    def _wait_for_others(self) -> None:
        pause = _WAIT
        while self._deferred:
            before = len(self._deferred)
            self._queue_window(np.empty((0, 2), np.uint64), [])
            self._encode_queue(1)
            self.put()
            if len(self._deferred) == before:
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST_WAIT)
            else:
                pause = _WAIT
