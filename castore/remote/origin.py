"""The origin of blobs whose bytes are only in remotes: the store's fetcher brings them when they are read.

A small blob comes whole, with some that lie near it in its pack, and a large one in parts, as through a
mounted remote. Nothing here uses names: the index has the place of a blob (index/places.py).
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from castore.errors import (
    CorruptError,
    NotFoundError,
    RemoteError,
    RemoteMissingError,
    StoreError,
)
from castore.index import places
from castore.index.places import RemotePlace
from castore.parts import Parts
from castore.records import Blob
from castore.remote.background_work import BackgroundWork
from castore.remote.fetcher_client import FetcherClient
from castore.remote.kept_bytes import PARTS, WHOLE_LIMIT, bytes_here, drop_parts
from castore.remote.lazy_reader import LazyReader
from castore.remote.nearby import row_of
from castore.remote.unkept_frames import NOT_KEPT, RoomState
from castore.system.ram_cache import MemoryLRU

log = logging.getLogger("castore")

# Blobs asked for at once, and those named in one request that nobody waits for.
_BATCH, _PREFETCHED = 500, 100_000


class RemoteOrigin:
    """See `castore.read.origin.Origin`.

    Args:
        parts: of the store. They read no blob of their own through this origin.
    """

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._fetcher = FetcherClient(parts.path)
        self._background = BackgroundWork()
        self._room = RoomState()

    def bring(self, digests: Sequence[bytes], *, large: bool = True) -> None:
        """See `Origin`."""
        if not large:
            self._room.require()
        for start in range(0, len(digests), _BATCH):
            by_remote: dict[str, list[RemotePlace]] = defaultdict(list)
            for place in places.of_blobs(self._parts.index, digests[start : start + _BATCH]).values():
                if large or place.stored <= WHOLE_LIMIT:
                    by_remote[place.remote].append(place)
            for remote, wanted in by_remote.items():
                self._fetch(remote, [place.digest for place in wanted])
                drop_parts(self._parts.index, [row_of(place).place for place in wanted])

    def prefetch(self, digests: Sequence[bytes]) -> None:
        """See `Origin`."""
        self._require_writable("a remote")
        for start in range(0, len(digests), _PREFETCHED):
            self._fetcher.call("prefetch", digests=digests[start : start + _PREFETCHED])

    def describe(self, digest: bytes) -> dict[str, str]:
        """See `Origin`."""
        place = places.of_blobs(self._parts.index, [digest]).get(digest)
        if place is None:
            return {}
        here = bytes_here(self._parts.index, row_of(place).place)
        return {"stored": str(place.stored), "remote": place.remote, "here": str(here)}

    def partly_here(self) -> set[bytes]:
        """See `Origin`."""
        return places.with_folder(self._parts.index, PARTS)

    def open(self, blob: Blob, cache: MemoryLRU[bytes] | None) -> LazyReader | None:
        """See `Origin`."""
        place = self._place(blob.digest)
        if place.stored <= WHOLE_LIMIT:
            with suppress(*NOT_KEPT):
                self.bring([blob.digest], large=False)
                return None
        self._require_writable(f"remote {place.remote!r}")
        ahead = self._background.submit
        return LazyReader(self._parts, self._fetcher, ahead, place.remote, row_of(place), cache, self._room)

    def _place(self, digest: bytes) -> RemotePlace:
        place = places.of_blobs(self._parts.index, [digest]).get(digest)
        if place is None:
            raise FileNotFoundError(f"the index does not say where the bytes of blob {digest.hex()} are")
        return place

    def _fetch(self, remote: str, digests: list[bytes]) -> None:
        self._require_writable(f"remote {remote!r}")
        try:
            with _misses(remote):
                self._fetcher.call("near_blobs", remote=remote, digests=digests)
        except NOT_KEPT as error:
            self._room.note(error)
            raise

    def _require_writable(self, where: str) -> None:
        try:
            self._parts.index.require_writable()
        except StoreError as error:
            raise RemoteError(
                f"bytes that are only in {where} cannot be kept: {error};"
                " a user who may write to the store can read them"
            ) from error


@contextmanager
def _misses(remote: str) -> Iterator[None]:
    """Bytes that the remote has no more, or has damaged, are a miss, as damaged ones of the store are."""
    try:
        yield
    except (RemoteMissingError, CorruptError) as error:
        # The store knows one place of each blob. Another ref may have the same bytes in another object.
        advice = (
            "`castore pull REF --lazy` finds them again if a ref still has them, and with --replace takes"
            " what the ref has now"
        )
        log.warning("bytes that are only in remote %r cannot be had: %s; %s", remote, error, advice)
        raise FileNotFoundError(f"remote {remote!r} has lost bytes: {error}; {advice}") from error
    except NotFoundError as error:
        raise RemoteError(f"bytes are only in remote {remote!r}, and {error}") from error
