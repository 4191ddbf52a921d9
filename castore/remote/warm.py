"""Fetches ahead: the bytes of many names come into the store before anybody reads them.

Everything goes through the fetcher, in requests of some megabytes of which few are under way, so a reader who
waits meanwhile is not kept waiting.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any

from castore.errors import CorruptError, RemoteMissingError
from castore.remote.fetcher_client import FetcherClient
from castore.remote.kept_bytes import WHOLE_LIMIT, Division
from castore.remote.pages import Row

# Stored bytes and rows of a request, parts of one, and requests under way.
_BYTES, _ROWS, _PARTS, _REQUESTS = 8 << 20, 1000, 8, 3


def rows_of_shard(rows: Iterable[Row], shard: int, shards: int) -> list[Row]:
    """The rows that one of several nodes is to fetch: neighbours, about as many stored bytes for each node.

    Names with the same bytes go to one node. All nodes come to the same parts by themselves.
    """
    every = list(rows)
    total = sum({row.digest: row.place.stored for row in every}.values())
    seen, parts = 0, dict[bytes, int]()
    for row in every:
        if row.digest not in parts:
            parts[row.digest] = min((2 * seen + row.place.stored) * shards // (2 * max(total, 1)), shards - 1)
            seen += row.place.stored
    return [row for row in every if parts[row.digest] == shard]


def fetch_ahead(
    fetcher: FetcherClient,
    remote: str,
    rows: Iterable[Row],
    progress: Callable[[int], object] = lambda done: None,
    ended: threading.Event | None = None,
) -> None:
    """Have the bytes of rows in the store. All others come if some are damaged or gone.

    Args:
        fetcher: of the store.
        remote: name of the remote.
        rows: neighbours in a pack should be neighbours here.
        progress: called with the stored bytes that have come since the last call.
        ended: if it is set, no other request begins.

    Raises:
        RemoteError: the remote cannot be used.
        CorruptError: some of its bytes are damaged.
        RemoteMissingError: some of its bytes are gone.
        FullError: the bytes fit neither the disk nor the budget.
    """
    pending: dict[Future[Any], int] = {}
    losses: list[CorruptError | RemoteMissingError] = []
    with ThreadPoolExecutor(_REQUESTS) as pool:
        try:
            for size, call, fields in _requests(rows):
                if ended is not None and ended.is_set():
                    break
                if len(pending) == _REQUESTS:
                    _finish(pending, wait(pending, return_when=FIRST_COMPLETED).done, progress, losses)
                pending[pool.submit(fetcher.call, call, remote=remote, **fields)] = size
            _finish(pending, wait(pending).done, progress, losses)
        except KeyboardInterrupt:
            fetcher.abandon()
            raise
    if losses:
        first, others = losses[0], f" and in {len(losses) - 1} more places" * (len(losses) > 1)
        text = f"all bytes have come but some that are damaged or gone, here{others}: {first}"
        if isinstance(first, CorruptError):
            raise CorruptError(text, digest=first.digest, where=first.where) from first
        raise RemoteMissingError(text) from first


def _finish(
    pending: dict[Future[Any], int],
    done: Iterable[Future[Any]],
    progress: Callable[[int], object],
    losses: list[CorruptError | RemoteMissingError],
) -> None:
    for future in done:
        size = pending.pop(future)
        try:
            future.result()
        except (CorruptError, RemoteMissingError) as error:
            losses.append(error)
        else:
            progress(size)


def _requests(rows: Iterable[Row]) -> Iterator[tuple[int, str, dict[str, Any]]]:
    """Stored bytes, call and fields of each request."""
    batch: list[Row] = []
    size = 0
    for row in rows:
        if row.place.stored > WHOLE_LIMIT:
            parts = Division(row.place).parts
            for start in range(0, len(parts), _PARTS):
                some = parts[start : start + _PARTS]
                fields = {"digest": row.place.object, "parts": list(some), "first": len(some)}
                yield some[-1].end - some[0].start, "parts", fields
            continue
        batch.append(row)
        size += row.place.stored
        if size >= _BYTES or len(batch) == _ROWS:
            yield size, "blobs", {"rows": batch, "first": len(batch)}
            batch, size = [], 0
    if batch:
        yield size, "blobs", {"rows": batch, "first": len(batch)}
