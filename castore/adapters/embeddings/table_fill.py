"""One fill: which items have to be encoded, in what batches, and when they are put.

Goes through keys and items once, a window at a time: what is known is passed over, what is free is claimed and encoded, what
another process has claimed is put off. Shards are put when they are large enough, or old enough that a kill would cost too
much. Must never hold claims while it waits for others, so that no two fillers wait for each other.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from types import TracebackType
from typing import Any, Protocol

import numpy as np
import torch

from castore.adapters.embeddings.claims import Claims
from castore.adapters.embeddings.encoder_outputs import Schema, check_alike, split
from castore.adapters.embeddings.key_table import Digests, digests
from castore.adapters.embeddings.key_table import Rows as RowNumbers
from castore.adapters.embeddings.shard_commit import SHARD_BYTES, Publisher, Rows, joined
from castore.errors import InvalidValueError

#: Batches that are looked up and claimed together.
WINDOW = 8
#: A shard is put after so many seconds, full or not: a kill loses no more.
PUT_SECONDS = 30.0
# Looks at what others have claimed begin with so many seconds in between, and grow rarer.
_WAIT, _LONGEST_WAIT = 0.01, 0.5

Encode = Callable[[list[Any]], Any]


class Known(Protocol):
    """What a fill asks of the cache."""

    def refresh(self) -> int:
        """See what others appended."""
        ...

    def find_digests(self, keys: Digests) -> RowNumbers:
        """The row of each key, or -1."""
        ...

    @property
    def schema(self) -> Schema | None:
        """What the outputs look like, once there are some."""
        ...


class Filling:
    """One fill.

    Args:
        cache: what is known.
        publisher: where shards go.
        claims: of this fill.
        encode: a list of items to their outputs.
        batch_size: items to encode at a time.
        dtype: what floating outputs are stored as, or None.
        where: the table's name, for messages.
    """

    def __init__(
        self,
        cache: Known,
        publisher: Publisher,
        claims: Claims,
        encode: Encode,
        *,
        batch_size: int,
        dtype: torch.dtype | None,
        where: str,
    ) -> None:
        self._cache = cache
        self._publisher = publisher
        self._claims = claims
        self._encode = encode
        self._batch_size = batch_size
        self._dtype = dtype
        self._where = where
        self._schema = cache.schema
        self._queue: list[tuple[bytes, Any]] = []
        self._put_off: dict[bytes, Any] = {}
        self._encoded: list[Rows] = []
        self._ours: set[bytes] = set()
        self._last_put = time.monotonic()
        self.count = 0

    def run(self, keys: Iterable[Any], items: Iterable[Any]) -> None:
        """Take all of these into the fill.

        Raises:
            InvalidValueError: there are more keys than items, or fewer.
            SerializationError: outputs differ from those before, or cannot be kept.
        """
        keys, items = iter(keys), iter(items)
        while some := list(islice(keys, WINDOW * self._batch_size)):
            theirs = list(islice(items, len(some)))
            if len(some) != len(theirs):
                break
            self.add(some, theirs)
        if some or next(items, self) is not self:
            raise InvalidValueError(f"{self._where}: there must be as many items as keys")

    def add(self, keys: Sequence[Any], items: Sequence[Any]) -> None:
        """Take these into the fill; whole batches are encoded at once, the rest with what comes later."""
        self._window(digests(keys), items)
        self._encode_queue(self._batch_size)

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
            self.put()  # what is encoded is right, whatever went wrong with the next

    def _window(self, keys: Digests, items: Sequence[Any]) -> None:
        """Queue those items that are neither known nor claimed; put off what others have claimed."""
        wanted: dict[bytes, Any] = dict(self._put_off)
        for number in np.flatnonzero(self._cache.find_digests(keys) < 0).tolist():
            key = keys[number].tobytes()
            if key not in self._ours:
                wanted.setdefault(key, items[number])
        self._put_off = {}
        if not wanted:
            return
        asked = np.frombuffer(b"".join(wanted), np.uint64).reshape(-1, 2)
        free = self._claims.take(asked)
        # What was let go before we looked has been put before: so it is known now.
        self._cache.refresh()
        known = self._cache.find_digests(asked) >= 0
        for (key, item), is_free, is_known in zip(wanted.items(), free, known, strict=True):
            if is_known:
                continue
            if is_free:
                self._ours.add(key)
                self._queue.append((key, item))
            else:
                self._put_off[key] = item

    def _encode_queue(self, at_least: int) -> None:
        while len(self._queue) >= at_least:
            batch, self._queue = self._queue[: self._batch_size], self._queue[self._batch_size :]
            outputs = self._encode([item for _, item in batch])
            schema, parts = split(outputs, len(batch), self._dtype)
            if self._schema is None:
                self._schema = schema
            check_alike(self._schema, schema, self._where)
            keys = np.frombuffer(b"".join(key for key, _ in batch), np.uint64).reshape(-1, 2)
            self._encoded.append(Rows(keys, self._schema, parts))
            self.count += len(batch)
            full = sum(rows.size for rows in self._encoded) >= SHARD_BYTES
            if full or time.monotonic() - self._last_put > PUT_SECONDS:
                self.put()

    def put(self) -> None:
        """Put what was encoded, and let go of its keys; those still in the queue are claimed again."""
        encoded, self._encoded = self._encoded, []
        if not encoded:
            return
        rows = joined(encoded)
        self._publisher.publish(rows)
        self._cache.refresh()
        self._last_put = time.monotonic()
        self._claims.release(keep=[key for key, _ in self._queue])
        self._ours = {key for key, _ in self._queue}

    def _wait_for_others(self) -> None:
        pause = _WAIT
        while self._put_off:
            before = len(self._put_off)
            self._window(np.empty((0, 2), np.uint64), [])
            self._encode_queue(1)
            self.put()
            if len(self._put_off) == before:
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST_WAIT)
            else:
                pause = _WAIT
