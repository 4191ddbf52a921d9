"""Garbage collection: `select`, a function of records, chooses what to remove; `run` removes it.

The order: expired entries; when over the budget, orphaned blobs and then the least recently used entries;
blobs orphaned for longer than the grace period; packs that are mostly dead; files that dead writers left.
Pinned entries are kept, and so are entries under the prefix of a live pinned mount.

A run removes what its plan lists, or less. The transaction that removes an entry checks it again, and keeps
it if it was touched, pinned or re-pointed since. Files are unlinked under the write lock, after a check that
no row refers to them. So a writer that is just putting the same bytes loses nothing. gc does not ask readers:
an open descriptor keeps its bytes. gc does ask mounts (mount_barrier.py): they open the blobs that the kernel
may still read.

Accepted race: last accesses reach the index in batches (usage.py). So gc may choose an entry that another
process read in the last few seconds. Such an entry is then a miss, never wrong.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Container, Iterable, Iterator
from contextlib import closing
from itertools import islice
from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from castore.errors import FullError
from castore.gc import GRACE_SECONDS, compaction, leftovers
from castore.gc.mount_barrier import MountBarrier
from castore.index import deferred_refs, eviction, mounts, places
from castore.index.database import CLOCK_SLACK, Index
from castore.index.eviction import Candidate, Orphan
from castore.index.lock_yield import LockYield
from castore.records import LOOSE, Blob
from castore.system.ballast import free_bytes, is_short
from castore.units import format_size
from castore.write.writer import budget_error

if TYPE_CHECKING:
    from castore.parts import Parts

_T = TypeVar("_T")

#: A put that passes the budget evicts down to this part of it, so that the next puts do not evict again at
#: once.
EVICTION_TARGET = 0.9
#: Entries or blobs of one transaction; the second number holds while the disk is nearly full.
_BATCH, _SMALL_BATCH = 500, 50
#: Entries removed before their blobs are: enough for several on each page of ten million blobs.
_PART_ENTRIES = 250_000
#: Rounds of making room, in each of which everything that was chosen had been used meanwhile.
_FRUITLESS = 100
#: Approximate bytes of the WAL while a pack is rewritten.
_WAL_ROOM = 512 * 1024


class Selection(NamedTuple):
    """The choice of `select`, in the order of removal.

    Attributes:
        expired, evicted: entries.
        blobs: digest, stored bytes and pack of each blob that no entry names once those entries are removed.
        away: the same of each blob whose names stay without its bytes, since a remote has them.
        away_names: the names of these blobs by digest, and their last accesses.
        waiting: bytes of orphaned blobs that the grace period keeps.
    """

    expired: list[Candidate]
    evicted: list[Candidate]
    blobs: list[tuple[bytes, int, int]]
    away: list[tuple[bytes, int, int]]
    away_names: dict[bytes, dict[str, float]]
    waiting: int


class Plan(NamedTuple):
    """The outcome that a gc would have; sizes in stored bytes.

    Attributes:
        expired, evicted: names of the entries to remove.
        away: the number of blobs whose names stay without the bytes, since a remote has these.
        blobs: the number of blobs to remove.
        freed: bytes of those blobs, and of those that go away.
        packs: ids of packs to compact: their live records move to another pack, and the rest is dropped.
        leftovers: files that dead processes left.
        waiting: bytes of orphaned blobs that the grace period still keeps.
        stored: bytes in the store now.
        pinned: bytes that pins (of entries, and of mounts) keep although they alone pass the budget; else 0.
    """

    expired: list[str]
    evicted: list[str]
    blobs: int
    freed: int
    packs: list[int]
    leftovers: list[str]
    waiting: int
    stored: int
    pinned: int = 0
    away: int = 0

    @property
    def remaining(self) -> int:
        """Bytes that would stay in the store."""
        return self.stored - self.freed


class Collected(NamedTuple):
    """The outcome of a gc: its plan, less entries and blobs that were used, pinned or put again meanwhile.

    Sizes are stored bytes.

    Attributes:
        expired, evicted: names of the removed entries.
        away: the number of blobs whose names stay without the bytes, since a remote has these.
        blobs: the number of removed blobs.
        freed: bytes of those blobs, and of those that went away.
        packs: ids of the compacted packs: their live records moved to another pack, and the rest was dropped.
        leftovers: the removed files that dead processes had left.
        waiting: bytes of orphaned blobs that the grace period still keeps.
        stored: bytes in the store before.
        pinned: bytes that pins (of entries, and of mounts) keep although they alone pass the budget; else 0.
    """

    expired: list[str]
    evicted: list[str]
    blobs: int
    freed: int
    packs: list[int]
    leftovers: list[str]
    waiting: int
    stored: int
    pinned: int = 0
    away: int = 0

    @property
    def remaining(self) -> int:
        """Bytes in the store before, less those that were freed."""
        return self.stored - self.freed


class _Removed:
    """Names of removed entries, numbers of blobs that were removed or went away, and their stored bytes."""

    def __init__(self) -> None:
        self.names: set[str] = set()
        self.blobs = 0
        self.away = 0
        self.freed = 0

    def add(self, blobs: list[Blob]) -> None:
        """Count removed blobs. A damaged row may have anything for a size."""
        self.blobs += len(blobs)
        self.freed += sum(blob.stored for blob in blobs if type(blob.stored) is int)


def select(
    expired: Iterable[Candidate],
    orphans: Iterable[Orphan],
    by_last_use: Iterable[Candidate],
    *,
    stored: int,
    budget: int | None,
    orphaned_before: float,
) -> Selection:
    """Choose what to remove. Reads neither the disk nor the clock.

    Args:
        expired: entries that have expired.
        orphans: blobs that no entry names.
        by_last_use: the other free entries, least recently used first; consumed only as far as needed.
        stored: bytes in the store.
        budget: the bytes that may stay, or None for no limit.
        orphaned_before: orphans from before this time are removed in any case.
    """
    choice = _Choice()
    gone = list(expired)
    remaining = stored - sum(map(choice.remove, gone))
    waiting = []
    for orphan in orphans:
        if orphan.since <= orphaned_before:
            choice.blobs.append(orphan[:3])
            remaining -= orphan.stored
        else:
            waiting.append(orphan)
    evicted: list[Candidate] = []
    if budget is not None and remaining > budget:
        choice.blobs += [orphan[:3] for orphan in waiting]
        remaining -= sum(orphan.stored for orphan in waiting)
        waiting = []
        seen = {entry.name for entry in gone}
        for entry in by_last_use:
            if remaining <= budget:
                break
            if entry.name in seen:
                continue
            if entry.is_in_remote:
                remaining -= choice.send_away(entry)
            else:
                evicted.append(entry)
                remaining -= choice.remove(entry)
    names = {digest: choice.names[digest] for digest, _, _ in choice.away}
    return Selection(
        gone, evicted, choice.blobs, choice.away, names, sum(orphan.stored for orphan in waiting)
    )


class _Choice:
    """The blobs that go with the entries chosen so far. Methods return the stored bytes that this frees."""

    def __init__(self) -> None:
        self.blobs: list[tuple[bytes, int, int]] = []
        self.away: list[tuple[bytes, int, int]] = []
        self.names: dict[bytes, dict[str, float]] = {}
        self._left: dict[bytes, int] = {}  # only blobs with several names: there may be millions of others

    def remove(self, entry: Candidate) -> int:
        """Remove an entry, and its blob with the last of them."""
        if entry.refs > 1:
            left = self._left[entry.digest] = self._left.get(entry.digest, entry.refs) - 1
            if left > 0:
                return 0
        self.blobs.append((entry.digest, entry.stored, entry.pack))
        return entry.stored

    def send_away(self, entry: Candidate) -> int:
        """Keep an entry without its bytes, once all entries of its blob are chosen."""
        names = self.names.setdefault(entry.digest, {})
        names[entry.name] = entry.accessed
        if len(names) < entry.refs:
            return 0
        self.away.append((entry.digest, entry.stored, entry.pack))
        return entry.stored


def _choose(index: Index, budget: int | None, grace: float, now: float) -> Selection:
    # Times in the future came from a clock that has been set back since. Such an orphan counts as old enough.
    # Such an entry has not been read since the clock was set back, which would have changed its time, so it
    # goes first.
    ahead = now + CLOCK_SLACK
    aged = (
        orphan if orphan.since <= ahead else orphan._replace(since=0.0) for orphan in eviction.orphans(index)
    )
    with closing(eviction.by_last_use(index, ahead)) as by_last_use:
        return select(
            eviction.expired(index, now),
            aged,
            by_last_use,
            stored=index.totals().stored,
            budget=budget,
            orphaned_before=now - grace,
        )


def plan(parts: Parts, budget: int | None, grace: float) -> Plan:
    """The plan that `run` would carry out now."""
    return _plan(parts, budget, grace, time.time())[0]


def _plan(
    parts: Parts, budget: int | None, grace: float, now: float
) -> tuple[Plan, Selection, dict[int, int], list[leftovers.Leftover]]:
    index = parts.index
    index.beacon.require_in_place()
    parts.usage.flush()
    mounts.remove_dead(index)
    stored = index.totals().stored
    chosen = _choose(index, budget, grace, now)
    packs = compaction.choose(index, parts.objects, chosen.blobs + chosen.away)
    found_leftovers = list(leftovers.find(index, parts.objects))
    freed = sum(blob[1] for blob in chosen.blobs + chosen.away)
    # Here everything that may go has been chosen, so any bytes above the budget are pinned.
    pinned = stored - freed if budget is not None and stored - freed > budget else 0
    planned = Plan(
        [entry.name for entry in chosen.expired],
        [entry.name for entry in chosen.evicted],
        len(chosen.blobs),
        freed,
        list(packs),
        [str(leftover.path) for leftover in found_leftovers],
        chosen.waiting,
        stored,
        pinned,
        len(chosen.away),
    )
    return planned, chosen, packs, found_leftovers


def run(parts: Parts, budget: int | None, grace: float) -> Collected:
    """Collect. See `Store.gc`."""
    index = parts.index
    _uncount(parts, (), _Removed())  # what a killed gc left
    now = time.time()
    planned, chosen, packs, found_leftovers = _plan(parts, budget, grace, now)
    removed = _remove(parts, chosen, now)
    gone = leftovers.remove(index, parts.objects, found_leftovers)
    leftovers.rotate_journal(index)
    lock_yield, compacted = LockYield(), []
    for pack, live in packs.items():
        _require_room_for(parts, pack, live)
        if compaction.compact(parts, pack):
            compacted.append(pack)
        lock_yield.pause_if_due()
    return Collected(
        [name for name in planned.expired if name in removed.names],
        [name for name in planned.evicted if name in removed.names],
        removed.blobs,
        removed.freed,
        compacted,
        [str(leftover.path) for leftover in gone],
        planned.waiting,
        planned.stored,
        planned.pinned,
        removed.away,
    )


def _require_room_for(parts: Parts, pack: int, live: int) -> None:
    # A pack copied by half when the disk gets full would take room and free none.
    if live + _WAL_ROOM > (left := free_bytes(parts.path)):
        raise FullError(
            f"the disk of {parts.path} has {format_size(left)} left,"
            f" and rewriting pack {pack} without its dead bytes takes"
            f" {format_size(live)} for a moment; all else is done:"
            " free that much, or collect to a lower --max-size"
        )


def _remove(parts: Parts, chosen: Selection, now: float) -> _Removed:
    removed = _Removed()
    # Blobs that are already orphaned go first, since they free room: on a full disk, the WAL of all removed
    # entries would not fit before the first object is unlinked.
    chosen_digests = {digest for digest, _, _ in chosen.blobs}
    named = {entry.digest for entry in (*chosen.expired, *chosen.evicted)}
    for digests in _batches(parts, sorted(chosen_digests - named)):
        removed.add(remove_blobs(parts, digests))
    _send_away(parts, chosen.away_names, removed)
    evicted = 0
    entries: list[tuple[str, bytes, float | None]] = [
        (entry.name, entry.digest, None) for entry in chosen.expired
    ]
    entries += [entry[:3] for entry in chosen.evicted]
    # Entries with neighbouring digests go together, so that a part has many digests on each page of the
    # B-tree of blobs.
    entries.sort(key=itemgetter(1))
    for part in _batches(parts, entries, _PART_ENTRIES):
        for batch in _batches(parts, sorted(part, key=lambda entry: str(entry[0]))):  # bytes in a damaged row
            with parts.index.write() as txn:
                evicted_rows = txn.evict_entries(batch, now)
                deferred_refs.add(txn, [digest for _, digest in evicted_rows])
            evicted += len(evicted_rows)
            removed.names.update(name for name, _ in evicted_rows)
        deferred_refs.sort(parts.index)
        _uncount(parts, chosen_digests, removed)
    with parts.index.write() as txn:
        txn.count({"evictions": evicted})
        places.drop_unused(txn)
    return removed


def _send_away(parts: Parts, names: dict[bytes, dict[str, float]], removed: _Removed) -> None:
    """Remove the bytes of blobs whose names stay. No mount loses them: it fetches them as any reader does."""
    for digests in _batches(parts, sorted(names)):
        with parts.index.write() as txn:
            gone = places.send_away(txn, {digest: names[digest] for digest in digests})
        _unlink(parts, gone)
        removed.away += len(gone)
        removed.freed += sum(blob.stored for blob in gone)


def _uncount(parts: Parts, chosen_digests: Container[bytes], removed: _Removed) -> None:
    """Uncount the removed entries, and remove the blobs of ``chosen_digests`` whose count reaches 0."""
    lock_yield = LockYield()
    while deferred_refs.exist(parts.index):
        with parts.index.write() as txn:
            digests = deferred_refs.pop_first(txn)
            # A mount adds itself to the list, under this lock, before it answers requests. An empty list
            # means that no mount knew these names.
            alone = not mounts.any_listed(txn)
            gone = txn.uncount(Counter(digests), chosen_digests if alone else ())
        _unlink(parts, gone)
        removed.add(gone)
        if not alone and (unnamed := [digest for digest in digests if digest in chosen_digests]):
            removed.add(remove_blobs(parts, unnamed))
        lock_yield.pause_if_due()


def remove_blobs(parts: Parts, digests: list[bytes]) -> list[Blob]:
    """Delete the rows of blobs that no entry names, then unlink the objects without a row.

    Two transactions. The first deletes rows, so that no row ever refers to a missing file. The second holds
    the write lock while it checks again and unlinks, so that a writer that has just placed the same bytes
    keeps them. Before both, mounts open the blobs that they need.

    Returns:
        The blobs whose rows were deleted.

    Raises:
        StoreError: a live mount does not answer.
    """
    gone = []
    with closing(MountBarrier(parts.index, digests)) as barrier, parts.index.write() as txn:
        for digest in barrier.still_unnamed():
            blob = txn.blob(digest)
            if blob is not None and txn.drop_blob(blob):
                gone.append(blob)
    _unlink(parts, gone)
    return gone


def _unlink(parts: Parts, gone: list[Blob]) -> None:
    loose = [blob for blob in gone if blob.pack == LOOSE]
    if loose:
        with parts.index.write() as txn:
            for blob in loose:
                known = txn.blob(blob.digest)
                if known is None or not known.is_here:
                    parts.objects.remove_loose(blob.digest, blob.codec)


def make_room(parts: Parts, need: int) -> None:
    """Evict until ``need`` more bytes fit under the store's budget.

    Raises:
        FullError: pinned entries leave no room for them.
    """
    max_size = parts.settings.max_size
    assert max_size is not None
    mounts.remove_dead(parts.index)
    parts.usage.flush()
    # Other writers may fill the room while it is made. The put fails only once nothing is left to remove.
    fruitless = 0
    while (before := parts.index.totals()).stored + need > max_size:
        _uncount(parts, (), _Removed())  # entries of another gc, running or killed
        now = time.time()
        chosen = _choose(
            parts.index, min(max_size - need, int(max_size * EVICTION_TARGET)), GRACE_SECONDS, now
        )
        if chosen.expired or chosen.evicted or chosen.blobs or chosen.away:
            removed = _remove(parts, chosen, now)
            fruitless = 0 if removed.names or removed.freed else fruitless + 1
        elif parts.index.totals() == before:
            raise budget_error(need, max_size)
        if fruitless == _FRUITLESS:  # readers and writers were faster each time, or counts of names are wrong
            raise budget_error(need, max_size)


def _batches(parts: Parts, items: list[_T], size: int = _BATCH) -> Iterator[list[_T]]:
    """The items in lists of ``size``, or of few while the disk has no room for a large WAL."""
    rest, lock_yield = iter(items), LockYield()
    while batch := list(islice(rest, _SMALL_BATCH if (short := is_short(parts.path)) else size)):
        yield batch
        if short:
            parts.index.truncate_wal()
        lock_yield.pause_if_due()
