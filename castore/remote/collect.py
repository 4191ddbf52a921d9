"""Collects the garbage of a bucket: objects that no kept commit of any ref needs, and no shared result. See
collection_state.py.

One run ends an epoch whose keys have been condemned for a grace period, by deleting those that are still
garbage, and begins the next epoch by condemning what is garbage now. So a run a day removes objects that have
not been needed for two days. All that is needed is found by reading all trees: if any page cannot be read,
nothing is condemned and nothing is deleted. A record of a result that is damaged, has expired or
has not been used for long enough is garbage.
Dictionaries stay: a few small objects that no tree lists.
"""

from __future__ import annotations

import re
import time
import uuid
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import islice

from castore.errors import (
    CorruptError,
    RemoteDeniedError,
    RemoteError,
    RemoteMissingError,
    RemoteUnreachableError,
)
from castore.records import has_expired
from castore.remote import commits, marker
from castore.remote.bucket import Bucket, Listed
from castore.remote.collection_state import (
    CONDEMNED,
    CUTS,
    DELETING,
    FOLDER,
    FRESH_SECONDS,
    IDLE,
    LISTS,
    STATE,
    State,
    cut_key,
    list_key,
    read_list,
    read_state,
    write_list,
    write_state,
)
from castore.remote.commits import Commit
from castore.remote.keys import (
    CLAIMS,
    COMMITS,
    HINTS,
    RESULTS,
    TREES,
    commit_key,
    hint_key,
    is_own,
    object_key,
    page_key,
)
from castore.remote.outcomes import RemoteCollected
from castore.remote.page_cache import PageCache
from castore.remote.pages import Child
from castore.remote.result_records import RENEW_SECONDS, read_records
from castore.remote.tree import Tree

#: Seconds of the shortest grace period: longer than any push acts upon a state that it has read.
SHORTEST_GRACE = 10 * FRESH_SECONDS
#: Seconds of the shortest time without a use: longer than a use may go without being noted.
SHORTEST_UNUSED = 2 * RENEW_SECONDS
#: Seconds without a sign of life, by the storage's clock, after which another collector goes on.
ABANDONED_SECONDS = 900.0
# Seconds between two signs of life. The oldest one that allows a deletion is much younger than the above.
_BEAT_SECONDS = 30.0
# Pages that are fetched ahead, at least.
_PAGES_AHEAD = 128
# An object that shows the storage's time.
_CLOCK = f"{FOLDER}clock-"
# Keys deleted between two readings of the clock.
_BATCH = 1000
_DIGITS = re.compile("[0-9a-f]{64}")
# In an order in which nothing names what is before it.
_SWEPT = ("objects/", "packs/", TREES, COMMITS, HINTS, RESULTS)


def collect(
    bucket: Bucket,
    pages: PageCache,
    *,
    keep_commits: int | None,
    grace: float,
    unused: float | None = None,
    dry_run: bool,
    progress: Callable[[int, int], object] = lambda done, total: None,
    clock: Callable[[], float] = time.monotonic,
) -> RemoteCollected:
    """Delete what was condemned a grace period ago, and condemn what is garbage now.

    Args:
        bucket: of the remote.
        pages: reads pages.
        keep_commits: number of each ref's newest commits that are kept; None for all. Commits that were a
            ref's newest within the grace period are kept in any case.
        grace: seconds.
        unused: seconds without a use after which a shared result is garbage; None for never.
        dry_run: write nothing, and list what a first run would condemn. Ages go by this machine's clock:
            only a write tells the storage's.
        progress: called with bytes that were deleted, and those of all that are.
        clock: a monotonic clock, in seconds.

    Raises:
        CorruptError: a page is damaged. Nothing was deleted.
        RemoteError: something is missing, or another collector is at work.
    """
    marker.check(bucket)
    run = _Run(bucket, pages, keep_commits, grace, unused, progress, clock)
    if dry_run:
        garbage = run.find(time.time())
        return RemoteCollected(0, 0, len(garbage), _size(garbage.values()), None)
    deleted, freed = run.end_epoch()
    condemned, size, until = run.begin_epoch()
    return RemoteCollected(deleted, freed, condemned, size, until)


class _Run:
    """One run of one collector."""

    def __init__(
        self,
        bucket: Bucket,
        pages: PageCache,
        keep_commits: int | None,
        grace: float,
        unused: float | None,
        progress: Callable[[int, int], object],
        clock: Callable[[], float],
    ) -> None:
        self._bucket = bucket
        self._pages = pages
        self._keep_commits = keep_commits
        self._grace = grace
        self._unused = unused
        self._progress = progress
        self._clock = clock
        self._id = uuid.uuid4().hex
        # By the commit before the oldest kept one of each ref: that oldest one.
        self._cut: dict[bytes, bytes] = {}
        # Commits that `find` has read side by side.
        self._known: Mapping[bytes, Commit] = {}

    # Finding

    def find(self, now: float) -> dict[str, Listed]:
        """The keys that are older than the grace period and that no kept commit needs.

        Args:
            now: the time, by the storage's clock.
        """
        self._cut.clear()
        # Listed before the refs are read: what a push adds and names meanwhile is not even in the list.
        # Files of others, of another remote, say, are no garbage.
        every = [one for folder in _SWEPT for one in self._bucket.listing(folder) if is_own(one.key)]
        listed = {one.key: one for one in every if one.modified <= now - self._grace}
        self._known = self._pages.whole_commits(one.key for one in every if one.key.startswith(COMMITS))
        for key in self._needed(now):
            listed.pop(key, None)
        return listed

    def _now(self) -> float:
        """The time by the storage's clock."""
        key = _CLOCK + self._id
        for _ in range(2):  # another collector removes it if this one is held up for long
            try:
                self._bucket.put(key, b"")
                times = [one.modified for one in self._bucket.listing(FOLDER) if one.key == key]
            finally:
                self._bucket.delete([key])
            if times:
                return times[0]
        raise RemoteError(f"a listing of {self._bucket.url} lacks what was just written")

    def _needed(self, now: float) -> Iterator[str]:
        """The keys that kept commits and shared results need."""
        for listed, record in read_records(self._bucket):
            is_old = self._unused is not None and listed.modified <= now - self._unused
            if record is None or is_old:
                continue
            if not has_expired(record.row.expires, now):
                yield listed.key
                if record.object_key is not None:
                    yield record.object_key
        kept: dict[bytes, Commit] = {}
        for ref in commits.list_refs(self._bucket):
            found = commits.read_ref(self._bucket, ref)
            if found is not None:
                yield hint_key(ref)
                kept.update(self._kept_history(ref, found.commit, now))
        yield from map(commit_key, kept)
        yield from self._needed_by(commit.tree for commit in kept.values())

    def _kept_history(self, ref: str, newest: bytes, now: float) -> Iterator[tuple[bytes, Commit]]:
        """The commits of a ref that are kept, newest first.

        Raises:
            RemoteMissingError, CorruptError: one is lost, or damaged. All that is older would be taken for
                garbage.
        """
        kept = 0
        try:
            for digest, commit in commits.history(self._bucket, newest, self._known):
                yield digest, commit
                kept += 1
                # The commit before this one was the newest until then.
                is_recent = commit.time >= now - self._grace
                if not (is_recent or self._keep_commits is None or kept < self._keep_commits):
                    break
        except (CorruptError, RemoteMissingError) as error:
            if not kept:
                raise
            raise type(error)(
                f"{error}; or end the history of ref {ref!r} before it with --keep-commits {kept}, once the"
                " commits that are left are older than the grace period"
            ) from error
        if commit.parent is not None:
            self._cut[commit.parent] = digest

    def _needed_by(self, roots: Iterator[bytes]) -> Iterator[str]:
        """The keys of all pages of some trees, and of the objects that they name."""
        seen: set[bytes] = set()
        # Pages of many trees are on their way at a time: two commits often differ by one page of each level.
        coming: deque[tuple[Tree, Child | None]] = deque()
        while True:
            for root in islice(roots, max(0, _PAGES_AHEAD - len(coming))):
                if root not in seen:
                    seen.add(root)
                    self._pages.expect([root])
                    coming.append((Tree(root, self._pages.read, self._pages.expect), None))
            if not coming:
                return
            tree, child = coming.popleft()
            page = tree.page(child)
            yield page_key(tree.root if child is None else child.page)
            for row in page.rows:
                if row.place.object not in seen:
                    seen.add(row.place.object)
                    yield object_key(row.place.object, packed=row.place.is_packed)
            new = [(tree, below) for below in page.children if below.page not in seen]
            seen.update(below.page for _, below in new)
            self._pages.expect(below.page for _, below in new)
            # Level by level where the trees are small. Of a large one, a page's children come before its
            # siblings: its leaves would need much memory.
            if len(coming) < _PAGES_AHEAD:
                coming.extend(new)
            else:
                coming.extendleft(reversed(new))

    # Ending an epoch

    def end_epoch(self) -> tuple[int, int]:
        """Delete what has been condemned for long enough; returns the number and the bytes."""
        state = read_state(self._bucket)
        now = self._now()
        if state.phase == CONDEMNED:
            # From the moment on at which pushes could know the list. To find the keys may have taken days.
            if now - self._changed() < self._grace:
                return 0, 0
        elif state.phase == DELETING:
            if now - self._changed() < ABANDONED_SECONDS:
                raise RemoteError(f"another collector deletes objects of {self._bucket.url} right now")
        else:
            return 0, 0
        state = self._move(state, phase=DELETING, beat=state.beat + 1)
        try:
            condemned = self._read_list(state)
            # All refs and all listings are read once more, after the state has changed.
            garbage = {
                key: one
                for key, one in self.find(self._now()).items()
                if key in condemned and one.modified <= state.before
            }
            ends, numbers = self._find_ends(garbage)
            self._note(ends)
        except BaseException:  # this run deletes nothing, so no push has to wait for it
            with suppress(RemoteError):
                self._move(state, phase=CONDEMNED)
            raise
        state = self._delete(state, garbage, numbers)
        self._remove_notes(ends)
        self._move(state, phase=IDLE, lists=0)
        self._bucket.delete([list_key(state, number) for number in range(state.lists)])
        self._remove_left(now - ABANDONED_SECONDS)
        return len(garbage), _size(garbage.values())

    def _remove_left(self, before: float) -> None:
        """Remove lists and clocks that killed collectors have left.

        Call when this run has changed the state after ``before``: a list that is older was made by a
        collector that has read an older state, so that collector cannot publish the list any more.
        """
        self._bucket.delete(
            one.key
            for one in list(self._bucket.listing(FOLDER))
            if one.modified < before and one.key.startswith((LISTS, _CLOCK))
        )

    def _find_ends(self, doomed: Collection[str]) -> tuple[dict[bytes, bytes], dict[str, int]]:
        """Where histories end once keys are deleted.

        Returns:
            By the first commit of each history that is gone then: the commit after it. And numbers of keys of
            commits that are not kept, from the newest of a history to the oldest.
        """
        ends: dict[bytes, bytes] = {}
        numbers: dict[str, int] = {}
        for first, kept in self._cut.items():
            at, after, has_end = first, kept, False
            while True:
                key = commit_key(at)
                numbers[key] = len(numbers)
                try:
                    found = self._known.get(at) or commits.read_commit(self._bucket, at)
                    parent = found.parent
                    is_gone = key in doomed
                except (RemoteDeniedError, RemoteUnreachableError):
                    raise
                except (CorruptError, RemoteError) as error:
                    parent, is_gone = None, key in doomed or isinstance(error, RemoteMissingError)
                if is_gone and not has_end:
                    ends[at], has_end = after, True
                if parent is None:
                    break
                at, after = parent, at
        return ends, numbers

    def _note(self, ends: dict[bytes, bytes]) -> None:
        """Note where histories end, before anything of them is deleted."""
        there = {one.key for one in self._bucket.listing(CUTS)}
        for commit, after in ends.items():
            if cut_key(commit) not in there:
                self._bucket.put(cut_key(commit), after.hex().encode())

    def _remove_notes(self, ends: dict[bytes, bytes]) -> None:
        """Remove the notes of former ends of histories, once the commits after them are gone as well."""
        in_use = {cut_key(commit) for commit in ends}
        for key in [one.key for one in self._bucket.listing(CUTS) if one.key not in in_use]:
            after = self._bucket.get(key).data.decode(errors="replace")
            if _DIGITS.fullmatch(after) and self._bucket.size(COMMITS + after) is None:
                self._bucket.delete([key])

    def _changed(self) -> float:
        """When the state was last written, by the storage's clock."""
        return max(
            (one.modified for one in self._bucket.listing(FOLDER) if one.key.startswith(STATE)),
            default=0.0,
        )

    def _read_list(self, state: State) -> set[str]:
        try:
            return set(read_list(self._bucket, state))
        except RemoteMissingError as error:
            if read_state(self._bucket).moment == state.moment:
                raise
            raise self._overtaken() from error

    def _overtaken(self) -> RemoteError:
        return RemoteError(f"another collector has gone on with {self._bucket.url}; this one stops")

    def _delete(self, state: State, garbage: dict[str, Listed], numbers: dict[str, int]) -> State:
        # Commits go before their pages, so that a run that is killed leaves no commit without pages. Of a
        # history the newest goes first: the others can be found only through it.
        keys = iter(sorted(garbage, key=lambda key: (_rank(key), numbers.get(key, len(numbers)), key)))
        done, total = 0, _size(garbage.values())
        while batch := list(islice(keys, _BATCH)):
            if self._clock() - self._beaten > _BEAT_SECONDS:
                state = self._move(state, beat=state.beat + 1)
            self._bucket.delete(batch)
            done += _size(map(garbage.__getitem__, batch))
            self._progress(done, total)
        return state

    def _move(self, seen: State, **changes: object) -> State:
        self._beaten = self._clock()
        new = seen._replace(collector=self._id, **changes)  # type: ignore[arg-type]
        if not write_state(self._bucket, new, seen):
            raise self._overtaken()
        return read_state(self._bucket)

    # Beginning an epoch

    def begin_epoch(self) -> tuple[int, int, float | None]:
        """Condemn what is garbage; returns the number, the bytes, and when a run may delete it."""
        state = read_state(self._bucket)
        if state.phase != IDLE:
            keys = self._read_list(state)
            listed = (one for folder in _SWEPT for one in self._bucket.listing(folder))
            return len(keys), _size(one for one in listed if one.key in keys), self._changed() + self._grace
        now = self._now()
        garbage = self.find(now)
        # Somebody was told to end a history before a commit that is lost.
        self._note(
            {
                commit: kept
                for commit, kept in self._cut.items()
                if self._bucket.size(commit_key(commit)) is None
            }
        )
        self._bucket.remove_unfinished(now - max(self._grace, ABANDONED_SECONDS))
        claims = [one for one in self._bucket.listing(CLAIMS) if is_own(one.key)]
        left = [one.key for one in claims if one.modified < now - ABANDONED_SECONDS]
        self._bucket.delete(left)  # those of nodes that were killed
        if not garbage:
            return 0, 0, None
        new = State(state.epoch + 1, CONDEMNED, self._id, self._id, 0, now, now - self._grace, state.beat)
        new = write_list(self._bucket, new, sorted(garbage))
        if not write_state(self._bucket, new, state):
            self._bucket.delete([list_key(new, number) for number in range(new.lists)])
            raise self._overtaken()
        return len(garbage), _size(garbage.values()), self._changed() + self._grace


def _rank(key: str) -> int:
    return -next(number for number, folder in enumerate(_SWEPT) if key.startswith(folder))


def _size(listed: Iterable[Listed]) -> int:
    return sum(one.size for one in listed)
