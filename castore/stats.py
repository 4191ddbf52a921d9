"""Figures about a store, for `castore stat`: cheap at any size, since the index keeps the totals."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple

from castore.errors import CorruptError
from castore.index import figures, mounts, places
from castore.index.figures import PrefixSize
from castore.index.places import AwayBlobs
from castore.names import LINKS
from castore.read.usage import REMOTE_COUNTERS

if TYPE_CHECKING:
    from castore.parts import Parts

#: Largest number of entries for which `stat` sums up prefixes: with more, that scan would be slow.
PREFIX_ENTRIES = 200_000


class PrefixDictionary(NamedTuple):
    """A dictionary that new small blobs below a prefix are compressed with.

    Attributes:
        prefix: "" for all names.
        id: its number, 8 hexadecimal digits.
        size: its bytes; 0 if no copy of it is whole, so that puts do not use it.
    """

    prefix: str
    id: str
    size: int


class RemoteUse(NamedTuple):
    """Requests to remotes so far, of all processes of a store.

    Attributes:
        reads: of objects, ranges and sizes.
        writes: of objects, those in several parts counted once.
        lists: pages of listings.
        deletes: requests to delete up to a thousand objects.
        received, sent: bytes.
        errors: requests that failed in the end, after all retries.
        retries: further tries of requests that the storage did not answer, or refused for a while. Those of
            parts of an upload are not counted.
        found: results of computations that came from a remote, so that they were not computed here.
        offered: results that were computed here and offered to other stores.
        left_alone: times that a process asked a remote for results no more for a minute, for want of an
            answer.
        seconds: that all requests took, added up.
    """

    reads: int
    writes: int
    lists: int
    deletes: int
    received: int
    sent: int
    errors: int
    retries: int
    found: int
    offered: int
    left_alone: int
    seconds: float

    @property
    def requests(self) -> int:
        """Requests of all kinds."""
        return self.reads + self.writes + self.lists + self.deletes

    @property
    def dollars(self) -> float:
        """The price of the requests as S3 has it: 0.40 dollars a million reads, 5 a million writes and lists.

        Bytes that leave a region are not in it.

        >>> RemoteUse(1_000_000, 100_000, 0, 50_000, 0, 0, 0, 0, 0, 0, 0, 0.0).dollars
        0.9
        """
        return (0.4 * self.reads + 5.0 * (self.writes + self.lists)) / 1e6


class Stat(NamedTuple):
    """Figures about a store; sizes in bytes, times in seconds since the epoch.

    Attributes:
        path: the store's folder.
        entries, blobs: their numbers.
        logical: sum of the sizes of all entries: their size as plain files.
        unique: sum of the sizes of all blobs.
        stored: sum of the compressed sizes of all blobs.
        max_size: the budget on ``stored``, or None.
        memory_hits, disk_hits, misses: reads so far, over all processes and runs.
        corrupt: blobs that were found damaged or missing.
        evictions: entries that gc removed.
        expired: entries that have expired and that gc has not removed yet.
        next_expiries: names and times of the entries that expire next.
        prefixes: the largest first parts of names; None above PREFIX_ENTRIES entries.
        memory_bytes, memory_max: the RAM tier of this process.
        mounts: mountpoints of live mounts.
        dictionaries: the dictionaries of prefixes.
        remotes: requests to remotes so far.
        away: blobs whose bytes are only in remotes.
    """

    path: str
    entries: int
    blobs: int
    logical: int
    unique: int
    stored: int
    max_size: int | None
    memory_hits: int
    disk_hits: int
    misses: int
    corrupt: int
    evictions: int
    expired: int
    next_expiries: list[tuple[str, float]]
    prefixes: list[PrefixSize] | None
    memory_bytes: int
    memory_max: int
    mounts: list[str]
    dictionaries: list[PrefixDictionary]
    remotes: RemoteUse
    away: AwayBlobs

    @property
    def dedupe_ratio(self) -> float:
        """``logical`` divided by ``unique``: how many times the same bytes were put, on average."""
        return self.logical / self.unique if self.unique else 1.0

    @property
    def compression_ratio(self) -> float:
        """Bytes of the blobs that are here, divided by ``stored``."""
        return (self.unique - self.away.size) / self.stored if self.stored else 1.0

    @property
    def hit_rate(self) -> float:
        """The part of all reads that were hits, from 0 to 1."""
        hits = self.memory_hits + self.disk_hits
        return hits / (hits + self.misses) if hits + self.misses else 0.0


def measure(parts: Parts) -> Stat:
    """Read the figures. See `Store.stat`."""
    index = parts.index
    now = time.time()
    totals = index.totals()
    counters = index.counters()
    return Stat(
        path=str(parts.path),
        entries=totals.entries - index.count_kept(),
        blobs=totals.blobs,
        logical=totals.logical - index.size_below(LINKS),  # a file behind a link has two entries
        unique=totals.unique,
        stored=totals.stored,
        max_size=parts.settings.max_size,
        memory_hits=counters.get("memory_hits", 0),
        disk_hits=counters.get("disk_hits", 0),
        misses=counters.get("misses", 0),
        corrupt=counters.get("corrupt", 0),
        evictions=counters.get("evictions", 0),
        expired=figures.expired_count(index, now),
        next_expiries=figures.next_expiries(index, now),
        prefixes=figures.largest_prefixes(index) if totals.entries <= PREFIX_ENTRIES else None,
        memory_bytes=parts.source.memory.bytes,
        memory_max=parts.source.memory.max_bytes,
        mounts=[mount.mountpoint for mount in mounts.list_live(index)],
        dictionaries=_dictionaries(parts),
        remotes=_remotes(counters),
        away=places.count_away(index),
    )


def _remotes(counters: dict[str, int]) -> RemoteUse:
    *counts, microseconds = (counters.get(name, 0) for name in REMOTE_COUNTERS)
    return RemoteUse(*counts, seconds=microseconds / 1e6)  # type: ignore[misc]  # as many as there are fields


def _dictionaries(parts: Parts) -> list[PrefixDictionary]:
    found = []
    for prefix, number in parts.prefixes.read()[0].items():
        try:
            size = parts.objects.dictionaries.load(number).size
        except CorruptError:
            size = 0
        found.append(PrefixDictionary(prefix, f"{number:08x}", size))
    return found
