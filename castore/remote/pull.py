"""A pull: the names of a commit come into the store, and the bytes that it lacks are fetched and checked.

A name points only at bytes that were checked (fetch.py). A pull that is interrupted has committed some names;
the next one goes on behind them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import ExitStack, closing
from itertools import chain, islice
from operator import itemgetter
from pathlib import PurePosixPath
from typing import Any

from castore.errors import (
    ConflictError,
    CorruptError,
    FullError,
    NameConflictError,
    RemoteError,
    RemoteMissingError,
)
from castore.index import places
from castore.index.lock_yield import LockYield
from castore.index.places import RemotePlace
from castore.index.transaction import Write
from castore.names import FilesAbove, check_name
from castore.parts import Parts
from castore.records import AWAY, LOOSE, Blob, EntrySpec, has_expired
from castore.remote import commits, marker
from castore.remote.base import Base
from castore.remote.bucket import Bucket
from castore.remote.compare import Compared, Content, Difference, agree, compare, content_of, list_names
from castore.remote.fetch import REQUEST_BYTES, BlobFetcher, refuse_pickle
from castore.remote.kept_bytes import drop_parts
from castore.remote.keys import check_commit
from castore.remote.outcomes import Progress, Pulled
from castore.remote.page_cache import PageCache
from castore.remote.pages import Row
from castore.remote.tree import Tree
from castore.units import format_size
from castore.write.open_pack import Vanished
from castore.write.staging import KnownBlob, Staged

# Names that are planned together: few at first, since somebody may wait for these, and then twice as many
# each time. Without bytes they are committed together, too.
_FIRST_PLANNED, _PLANNED = 1000, 8000
# Names committed together with bytes. In a large index each digest of a commit is on a page of its own, so
# fewer and larger commits write far fewer pages. A pull that would wait for bytes commits fewer meanwhile.
_COMMIT, _COMMIT_MEANWHILE = 1000, 250
# Digests looked up together.
_DIGESTS = 500
# Seconds after which what has come is committed in any case.
_COMMIT_SECONDS = 1.0
# Bytes between two reports of progress.
_REPORT_BYTES = 256 << 10


class _Plan:
    """The names that a pull changes in the store, in order, and those that are equal already.

    A store that has nothing at that place cannot have changed a name. Its plan is made while bytes come:
    `take` reads the next pages of the tree. Any other plan is whole before the first name comes, since a
    conflict must leave all names as they are.

    Args:
        is_all: see below.

    Attributes:
        rows: those that were taken, each with its name in the store.
        before: what the store has under the names that change; none for new ones.
        agreed: rows of names that are equal.
        new_agreed: of these, the names that the base has otherwise or not.
        dropped: names of the store that the ref has lost, and that its files or folders take the place of.
        left_out: names that would have been replaced, and that were put since the pull began.
        is_all: whether the next base is the commit's tree: nothing of the one before it has to be kept.
        has_rows: whether anything is to be taken.
    """

    def __init__(self, is_all: bool) -> None:
        self.rows: list[tuple[str, Row]] = []
        self.before: dict[str, Content] = {}
        self.agreed: list[Row] = []
        self.new_agreed: list[str] = []
        self.dropped: dict[str, Content] = {}
        self.left_out: set[str] = set()
        self.is_all, self.has_rows = is_all, False
        self.added = self.changed = self.unchanged = self.expired = 0
        self._coming: Iterator[tuple[str, Row]] = iter(())
        self._size = _FIRST_PLANNED
        self._left = 0, 0

    def give(self, coming: Iterator[tuple[str, Row]], names: int, stored: int) -> None:
        """Have these rows taken, in their order: at most so many names, and stored bytes."""
        first = next(coming, None)
        if first is not None:
            self.has_rows, self._coming, self._left = True, chain((first,), coming), (names, stored)

    def take(self, *, all_others: bool = False) -> list[tuple[str, Row]]:
        """The next rows, more each time; none after the last ones."""
        rows = list(self._coming if all_others else islice(self._coming, self._size))
        self._size = min(2 * self._size, _PLANNED)
        self.rows += rows
        names, stored = self._left
        self._left = names - len(rows), stored - sum(row.place.stored for _, row in rows)
        if not rows:
            self._left = 0, 0
        return rows

    @property
    def left(self) -> tuple[int, int]:
        """At most so many names, and stored bytes, are left to take."""
        return max(0, self._left[0]), max(0, self._left[1])


def find_commit(bucket: Bucket, ref: str, start: str | None, pages: PageCache) -> bytes:
    """The commit that ``REF`` or ``REF@COMMIT`` means.

    Args:
        bucket: has the history.
        ref: the ref.
        pages: receives what the ref carries of its newest commit.
        start: at least six of the first digits of a commit in its history, or None for the newest.

    Raises:
        RemoteMissingError: there is no such ref, or no such commit in its history.
        InvalidValueError: ``start`` cannot be digits of a commit.
        RemoteError: several commits begin so.
    """
    seen = commits.read_ref(bucket, ref)
    if seen is None:
        refs = commits.list_refs(bucket)
        seen = commits.read_ref(bucket, ref) if ref in refs else None  # pushed a moment ago
        if seen is None:
            others = ", ".join(refs[:10]) or "none"
            raise RemoteMissingError(f"{bucket.url} has no ref {ref!r}; its refs: {others}")
    pages.take(seen)
    if start is None:
        return seen.commit
    check_commit(start)
    found = []
    try:
        for digest, _ in commits.history(bucket, seen.commit):
            found += [digest] if digest.hex().startswith(start) else []
    except (CorruptError, RemoteMissingError):  # a lost commit hides older ones alone
        if not found:
            raise
    if len(found) != 1:
        problem = "no commit" if not found else "several commits"
        raise RemoteMissingError(
            f"the history of ref {ref!r} has {problem} {start}; `castore log {ref}` lists it"
        )
    return found[0]


def pull(
    parts: Parts,
    bucket: Bucket,
    pages: PageCache,
    pool: Executor,
    *,
    ref: str,
    start: str | None,
    hint: Callable[[], bytes | None] | None,
    prefix: str,
    below: str,
    replace: bool,
    began: float,
    lazy: str | None,
    base: Base,
    require_remote: Callable[[], object],
    progress: Progress,
) -> Pulled:
    """Bring the names of a commit at and below ``prefix`` into the store.

    Args:
        pool: fetches.
        ref: whose commit.
        start: first digits of the commit; None for the newest.
        hint: gives the hint beside the ref, or None where there is none; None if the store knows the ref, so
            that pages which have changed are few.
        below: a folder that the names come below, "" for none.
        replace: take the commit's bytes for names that changed here, too.
        began: when the caller asked for the pull. Names that were put since stay, with ``replace`` too.
        lazy: the remote's name in this store, to bring names alone, whose bytes come when they are read. None
            brings the bytes, too.
        base: of the ref; the next one is kept there.
        require_remote: raises what shows that the place is no remote. The ref is read first, since the answer
            to that may still be on its way.

    Raises:
        ConflictError: names have changed both here and in the commit since ``base``.
        NameConflictError: a name would be a file and a folder.
        CorruptError: bytes of the remote are not what they should be. All other names have come.
        RemoteMissingError: there is no such ref, commit or name; or bytes are gone, and all other names have
            come.
        RemoteError: the remote cannot be used.
        FullError: they do not fit into the budget.
    """
    parts.index.require_writable()
    try:
        commit = find_commit(bucket, ref, start, pages)
        if hint is not None and (found := hint()) is not None:
            pages.take_hint(found)
    finally:
        require_remote()
    tree = Tree(pages.commit(commit).tree, pages.read, pages.expect)
    newest = commit if start is None else find_commit(bucket, ref, None, pages)
    before = base.tree(bucket, newest, parts, pages)
    if lazy is None:
        _check_budget(parts, tree, prefix, ref)
    plan = _plan(parts, bucket, tree, before, prefix, below, began if replace else None, ref)
    if prefix and not (plan.has_rows or plan.unchanged):
        living = " that has not expired" if plan.expired else ""
        raise RemoteMissingError(f"ref {ref!r} has no name at or below {prefix!r}{living}")
    if plan.has_rows or plan.new_agreed:
        base.begin_pull(tree.root, prefix, plan.new_agreed)
    naming = _Naming(parts, base, plan.before)
    naming.left_out |= plan.left_out
    removed = naming.drop(plan.dropped)
    fetched, lost = 0, _Lost()
    if lazy is None:
        fetched = _Fetch(parts, bucket, pool, naming, lost, progress).fetch(plan)
    else:
        _name(parts, bucket, lazy, plan, naming, progress)
    left = naming.left_out | {name for name, row in plan.rows if row.digest in lost.errors}
    agreed = sorted([*plan.agreed, *(row for name, row in plan.rows if name not in left)])
    named: list[tuple[str, Row | None]] = [(row.name, row) for row in agreed]
    named += [(name[len(below) + 1 if below else 0 :], None) for name in plan.dropped]
    named.sort(key=itemgetter(0))
    is_all = plan.is_all and not left
    base.keep(tree.root if is_all else agree(before, named, pages.read, pages.keep))
    lost.require_none(bucket, ref, [*plan.agreed, *(row for _, row in plan.rows)])
    if left:
        raise ConflictError(
            f"changed here while ref {ref!r} was pulled, by somebody or by another pull, and left as it is:"
            f" {list_names(sorted(left))}; the others have come; pull again with --replace to take the ref's"
            " bytes, or --as another folder",
            names=tuple(sorted(left)),
        )
    return Pulled(ref, commit.hex(), plan.added, plan.changed, plan.unchanged, fetched, plan.expired, removed)


def _check_budget(parts: Parts, tree: Tree, prefix: str, ref: str) -> None:
    """Refuse names that do not fit together: the first would be evicted for the last."""
    budget = parts.settings.max_size
    if budget is None or tree.totals()[2] <= budget:
        return
    need = sum({row.digest: row.place.stored for row in tree.rows(prefix)}.values())
    if need > budget:
        raise FullError(
            f"ref {ref!r} takes {format_size(need)}, and the budget of {parts.path} is {format_size(budget)};"
            " pull a part of it, or raise the budget with `castore init --max-size`"
        )


# Choosing


def _plan(
    parts: Parts,
    bucket: Bucket,
    tree: Tree,
    base: Tree | None,
    prefix: str,
    below: str,
    replaces: float | None,
    ref: str,
) -> _Plan:
    """The names that the commit has changed since ``base``, and that the store has not.

    Args:
        replaces: names that the store has changed before that time are replaced as well; None for no names.
    """
    start, now, plan = f"{below}/" if below else "", time.time(), _Plan(not prefix)
    ours = parts.index.entries(start + prefix if prefix else below, now, damaged=False)
    first = next(ours, None)
    if first is None and (base is None or base.root == tree.root):
        leaves = list(tree.leaves(prefix))
        plan.give(
            _new_rows(plan, bucket, tree, prefix, below, now),
            sum(leaf.entries for leaf in leaves),
            sum(leaf.stored for leaf in leaves),
        )
        return plan
    ours = ours if first is None else chain((first,), ours)
    rows, nested = _changed_rows(
        plan, compare(ours, tree, base, prefix, below), now, bool(below), replaces, ref
    )
    for _, row in rows:
        refuse_pickle(row, bucket)
    plan.give(iter(rows), len(rows), sum(row.place.stored for _, row in rows))
    plan.dropped = _make_way(parts, nested, tree, base, len(start), replaces, ref)
    return plan


def _new_rows(
    plan: _Plan, bucket: Bucket, tree: Tree, prefix: str, below: str, now: float
) -> Iterator[tuple[str, Row]]:
    """The rows for a store that has nothing at that place, with the names that they get."""
    for row in tree.rows(prefix):
        if not has_expired(row.expires, now):
            refuse_pickle(row, bucket)
            plan.added += 1
            yield (check_name(f"{below}/{row.name}") if below else row.name), row
        else:
            plan.expired += 1


def _changed_rows(
    plan: _Plan, sides: Iterable[Compared], now: float, is_below: bool, replaces: float | None, ref: str
) -> tuple[list[tuple[str, Row]], list[tuple[str, str]]]:
    """The rows for a store that has some names, and the pairs for `_make_way`.

    Raises:
        ConflictError: names have changed on both sides.
    """
    rows: list[tuple[str, Row]] = []
    above, nested = FilesAbove(), list[tuple[str, str]]()
    conflicts: list[str] = []
    for compared in sides:
        name, entry, row, _ = compared
        lives = row is not None and not has_expired(row.expires, now)
        if (lives or entry is not None) and (file := above.find(name)) is not None:
            nested.append((file, name))
        if row is not None and not lives:
            plan.expired += 1
            continue
        if row is None:
            # The ref has lost the name: if it comes back, the store must know the old one.
            plan.is_all = plan.is_all and (entry is None or compared.base is None)
            continue
        if entry is None:
            rows.append((check_name(name) if is_below else name, row))
            plan.added += 1
            continue
        difference = compared.difference
        is_own = difference not in (Difference.THEIRS, Difference.NONE)
        if is_own and replaces is not None and entry.created >= replaces:
            plan.left_out.add(name)
        elif difference is Difference.THEIRS or (is_own and replaces is not None):
            rows.append((name, row))
            plan.before[name] = content_of(entry)
            plan.changed += 1
        elif difference is Difference.BOTH:
            conflicts.append(name)
        else:
            plan.unchanged += 1
            if difference is Difference.NONE:
                plan.agreed.append(row)
                if compared.base != row:
                    plan.new_agreed.append(row.name)
    if conflicts:
        raise ConflictError(
            f"{list_names(conflicts)} changed both here and in ref {ref!r}; pull with --replace to take the"
            " ref's bytes, or --as another folder",
            names=tuple(conflicts),
        )
    return rows, nested


def _make_way(
    parts: Parts,
    nested: list[tuple[str, str]],
    tree: Tree,
    base: Tree | None,
    skip: int,
    replaces: float | None,
    ref: str,
) -> dict[str, Content]:
    """The names of the store that go, because the ref has files in the place of their folders, or folders in
    the place of these files. They go if the ref has lost them and the store has not changed them.

    Args:
        nested: a file, and a name inside it, of the store or of the ref.
        skip: characters of the store's names before those of the trees.

    Raises:
        NameConflictError: some are the store's own.
    """
    dropped: dict[str, Content] = {}
    own: list[str] = []
    for name in dict.fromkeys(name for pair in nested for name in pair):
        entry, row = parts.index.entry(name), tree.find(name[skip:])
        if entry is None or (row is not None and not has_expired(row.expires, time.time())):
            continue
        before = None if base is None else base.find(name[skip:])
        is_older = replaces is not None and entry.created < replaces
        if is_older or Compared(name, entry, None, before).difference is Difference.THEIRS:
            dropped[name] = content_of(entry)
        else:
            own.append(name)
    if own:
        file, name = next(pair for pair in nested if not set(own).isdisjoint(pair))
        raise NameConflictError(
            f"with the names of ref {ref!r}, {name!r} would lie inside {file!r}, and a name is a file or a"
            f" folder: remove or rename {list_names(own)} here, give --replace (replace=True) to drop what"
            " is in the way, or pull --as another folder"
        )
    return dropped


# Naming


class _Naming:
    """Guards names that somebody changes here while they are pulled, and notes those that have come.

    Args:
        parts: of the store.
        base: of the ref.
        before: what the store had under the names that are pulled, when the pull began.

    Attributes:
        left_out: names that were changed here meanwhile.
    """

    def __init__(self, parts: Parts, base: Base, before: dict[str, Content]) -> None:
        self._index = parts.index
        self._base = base
        self._before = before
        self.left_out: set[str] = set()

    def leave_out(self, rows: list[tuple[str, Row]]) -> set[str]:
        """The names whose entries are others than when the pull began. Call it within the transaction.

        Names that are gone do not count: a cache evicts.
        """
        found = self._index.contents_of([name for name, _ in rows], time.time())
        changed = set()
        for name, row in rows:
            there, before = found.get(name), self._before.get(name)
            if there is None or there == before:
                continue
            entry = self._index.entry(name)  # the same metadata may be another text
            is_other = entry is not None and content_of(entry) != before
            if is_other and Compared(name, entry, row, None).difference is not Difference.NONE:
                changed.add(name)
        self.left_out |= changed
        return changed

    def leave_in_way(self, rows: Sequence[tuple[str, Row]]) -> set[str]:
        """Leave out the names that cannot be: somebody has made them folders here meanwhile, or made a file
        of a folder above them. Returns these.
        """
        now = time.time()
        folders = {name: list(map(str, PurePosixPath(name).parents))[:-1] for name, _ in rows}
        files = self._index.contents_of(list({folder for some in folders.values() for folder in some}), now)
        found = {
            name
            for name, above in folders.items()
            if not files.keys().isdisjoint(above)
            or any(entry.name != name for entry in islice(self._index.entries(name, now, damaged=False), 2))
        }
        self.left_out |= found
        return found

    def drop(self, names: dict[str, Content]) -> int:
        """Drop names that are in the way, if the store has them still as the plan has seen them.

        Returns:
            The number of names that were dropped.
        """
        if not names:
            return 0
        dropped = 0
        with self._index.write() as txn:
            for name, content in names.items():
                entry = self._index.entry(name)
                if entry is not None and content_of(entry) == content:
                    txn.delete_entry(name)
                    dropped += 1
        return dropped

    def coming(self, rows: Iterable[tuple[str, Row]]) -> None:
        """Note rows that are about to be named."""
        self._base.note_names((row.name for _, row in rows), came=False)

    def came(self, rows: Iterable[tuple[str, Row]]) -> None:
        """Note rows that were named."""
        self._base.note_names((row.name for name, row in rows if name not in self.left_out), came=True)


def _name(
    parts: Parts, bucket: Bucket, remote: str, plan: _Plan, naming: _Naming, progress: Progress
) -> None:
    """Have all rows' names in the store, and where their blobs are."""
    done = 0
    lock_yield = LockYield()
    while some := plan.take():
        naming.coming(some)
        try:
            named = _name_some(parts, remote, some, naming)
        except NameConflictError:
            if not (in_way := naming.leave_in_way(some)):
                raise
            others = [(name, row) for name, row in some if name not in in_way]
            named = _name_some(parts, remote, others, naming)
        naming.came(named)
        done += len(some)
        progress(done, done + plan.left[0])
        lock_yield.pause_if_due()
    # The remote may have other places for bytes that it had lost, or that were pushed again.
    for start in range(0, len(plan.agreed), _COMMIT):
        agreed = {row.digest: _remote_place(remote, row) for row in plan.agreed[start : start + _COMMIT]}
        known = places.of_blobs(parts.index, list(agreed))
        moved = [
            place
            for digest, place in agreed.items()
            if digest not in known or known[digest]._replace(fetched=0.0) != place
        ]
        if moved:
            with parts.index.write() as txn:
                places.refresh(txn, moved)
            lock_yield.pause_if_due()


def _name_some(
    parts: Parts, remote: str, rows: list[tuple[str, Row]], naming: _Naming
) -> list[tuple[str, Row]]:
    """Commit names, and where their blobs are; returns those that were not left out."""
    with parts.index.write() as txn:
        changed = naming.leave_out(rows)
        named = [(name, row) for name, row in rows if name not in changed]
        specs = [EntrySpec(name, row.serializer, row.metadata, row.expires, False) for name, row in named]
        if specs:
            placed = places.record(txn, [_remote_place(remote, row) for _, row in named])
            txn.set_entries(specs, placed, time.time())
    return named


def _remote_place(remote: str, row: Row) -> RemotePlace:
    place = row.place
    return RemotePlace(
        row.digest, remote, place.object, place.offset, place.stored, place.codec, place.frames, row.size
    )


# Fetching


class _Lost:
    """Bytes that the remote does not have: they are damaged, or gone. The others come all the same.

    Attributes:
        errors: by the blob's digest.
        lacks_dictionary: whether a dictionary is gone that some of them need.
    """

    def __init__(self) -> None:
        self.errors: dict[bytes, CorruptError | RemoteMissingError] = {}
        self.lacks_dictionary = False

    def add(self, row: Row, error: CorruptError | RemoteMissingError) -> None:
        """Note the blob of a row."""
        self.errors[row.digest] = error

    def require_none(self, bucket: Bucket, ref: str, rows: Iterable[Row]) -> None:
        """Check that nothing was lost of the rows of a ref.

        Raises:
            CorruptError: something was damaged.
            RemoteMissingError: something was gone, or all is: the place is no remote any more.
        """
        if not self.errors:
            return
        marker.check(bucket)  # a file system may have been unmounted meanwhile
        errors = sorted(self.errors.values(), key=lambda error: isinstance(error, RemoteMissingError))
        names = list_names(sorted(row.name for row in rows if row.digest in self.errors))
        text = f"{names} did not come, and all other names of ref {ref!r} did: {errors[0]}"
        if isinstance(errors[0], CorruptError):
            raise CorruptError(text, digest=errors[0].digest, where=errors[0].where) from errors[0]
        # The listings that a plain check reads do not say which dictionaries are needed.
        deep = " --deep" if self.lacks_dictionary else ""
        raise RemoteMissingError(
            f"{text}; `castore remote check{deep}` says which names need it, and with --repair uploads it"
            " again from a store that has their bytes"
        ) from errors[0]


class _Fetch:
    """Fetches the blobs of rows, and commits their names as they come."""

    def __init__(
        self, parts: Parts, bucket: Bucket, pool: Executor, naming: _Naming, lost: _Lost, progress: Progress
    ) -> None:
        self._parts = parts
        self._naming = naming
        self._lost = lost
        self._progress = progress
        self._blobs = BlobFetcher(parts, bucket, pool, lost.add)
        self._committed = time.monotonic()
        self._under_way: dict[bytes, list[tuple[str, Row]]] = {}
        self._came: dict[bytes, Row] = {}
        self._sound: set[bytes] = set()
        self._staged: list[tuple[tuple[str, Row], Staged]] = []
        self._again: list[tuple[str, Row]] = []
        self._asked = self._done = 0

    def fetch(self, plan: _Plan) -> int:
        """Have all rows' blobs and names in the store; returns the bytes that came."""
        self._fetch(plan)
        while self._again:
            self._fetch(plan)
        self._restore([row for row in plan.agreed if row.digest not in self._under_way])
        self._lost.lacks_dictionary = self._blobs.lacks_dictionary
        drop_parts(self._parts.index, self._blobs.in_parts)
        return self._blobs.fetched

    def _fetch(self, plan: _Plan) -> None:
        uncommitted = reported = 0
        blobs = self._blobs.staged(
            self._wanted(plan), left_to_readers=self._sound, on_wait=self._commit_meanwhile
        )
        with ExitStack() as undo, closing(blobs) as coming:
            undo.callback(lambda: _discard(self._staged))
            try:
                for row, item in coming:
                    first, *others = self._under_way.pop(row.digest)
                    self._came[row.digest] = row
                    self._staged.append((first, item))
                    self._staged += [(other, _just_come(row)) for other in others]
                    self._done += row.place.stored
                    uncommitted += row.place.stored
                    total = self._asked + plan.left[1]
                    if self._done >= reported + _REPORT_BYTES or self._done == total:
                        self._progress(self._done, total)
                        reported = self._done
                    if len(self._staged) >= _COMMIT or uncommitted > 4 * REQUEST_BYTES or self._is_due():
                        uncommitted = 0
                        self._commit_staged()
            except (RemoteError, CorruptError):
                self._commit_staged()  # what has come need not travel again
                raise
            self._commit_staged()

    def _wanted(self, plan: _Plan) -> Iterator[dict[bytes, Row]]:
        """The blobs that names want, by their digests, as the names are planned. Names of blobs that are here
        are committed.
        """
        while pairs := self._again or plan.take(all_others=self._blobs.are_scattered):
            self._again = []
            new: dict[bytes, Row] = {}
            for pair in pairs:
                _, row = pair
                if row.digest in self._under_way:
                    self._under_way[row.digest].append(pair)
                elif row.digest in self._came:
                    self._staged.append((pair, _just_come(self._came[row.digest])))
                else:
                    self._under_way[row.digest], new[row.digest] = [pair], row
            known, doubtful = self._known(new)
            self._commit([(pair, known[pair[1].digest]) for pair in pairs if pair[1].digest in known])
            for digest in known:
                del self._under_way[digest], new[digest]
            self._sound |= new.keys() - doubtful
            self._asked += sum(row.place.stored for row in new.values())
            yield new

    def _take_apart(self, rows: list[tuple[str, Row]]) -> bool:
        """Leave out the names of a commit that are in the way of names here, if any are, and have the others
        fetched again; returns whether any are.
        """
        in_way = self._naming.leave_in_way(rows)
        if in_way:
            self._again += [(name, row) for name, row in rows if name not in in_way]
            for _, row in rows:
                self._came.pop(row.digest, None)
        return bool(in_way)

    def _without(
        self, changed: set[str], specs: list[tuple[EntrySpec, Staged]]
    ) -> Iterator[tuple[EntrySpec, Staged]]:
        """The names to commit. Bytes of a name that is left out go to the next one that has them."""
        unnamed: dict[bytes, tuple[Staged, Row]] = {}
        for spec, item in specs:
            if spec.name in changed:
                if not isinstance(item, KnownBlob):  # a name that is planned later has them fetched again
                    unnamed[item.digest] = item, self._came.pop(item.digest)
            elif item.digest in unnamed:
                own, self._came[item.digest] = unnamed.pop(item.digest)
                yield spec, own
            else:
                yield spec, item

    def _commit_meanwhile(self) -> None:
        if len(self._staged) >= _COMMIT_MEANWHILE:
            self._commit_staged()

    def _commit_staged(self) -> None:
        ready, self._staged = self._staged, []
        self._commit(ready)
        self._committed = time.monotonic()

    def _is_due(self) -> bool:
        """Whether what has come must be committed: over a slow link, a pull that is ended loses little."""
        return time.monotonic() - self._committed > _COMMIT_SECONDS

    def _restore(self, rows: list[Row]) -> None:
        """Have the bytes of names that the store has already: those that are away."""
        agreed = {row.digest: row for row in rows}
        known, _ = self._known(agreed)
        wanted = {digest: row for digest, row in agreed.items() if digest not in known}
        total, done = sum(row.place.stored for row in wanted.values()), 0
        batch: list[Staged] = []
        with ExitStack() as undo, closing(self._blobs.staged([wanted])) as coming:
            undo.callback(lambda: _discard_all(batch))
            for row, item in coming:
                batch.append(item)
                done += row.place.stored
                self._progress(done, total)
                size = sum(item.stored for item in batch)
                if len(batch) >= _COMMIT or size > 4 * REQUEST_BYTES or self._is_due():
                    ready, batch = batch, []
                    self._parts.writer.restore(ready)
                    self._committed = time.monotonic()
            self._parts.writer.restore(batch)

    def _known(self, rows: Mapping[bytes, Row]) -> tuple[dict[bytes, Staged], set[bytes]]:
        """The blobs of rows that are here, and the digests of those whose content the pull itself compares:
        they were here, and may have turned out to be damaged, or two trees tell other things of them.
        """
        known: dict[bytes, Staged] = {}
        doubtful: set[bytes] = set()
        digests = list(rows)
        for start in range(0, len(digests), _DIGESTS):
            found = self._parts.index.blobs_of(digests[start : start + _DIGESTS])
            for digest, blob in found.items():
                if blob.is_own or (blob.is_here and _agrees(blob, rows[digest])):
                    known[digest] = KnownBlob(blob, may_be_received=True)
                elif blob.pack != AWAY:
                    doubtful.add(digest)
            away = [digest for digest, blob in found.items() if blob.pack == AWAY]
            came = places.of_away_blobs(self._parts.index, away) if away else {}
            doubtful |= {digest for digest, place in came.items() if place.fetched}
        return known, doubtful

    def _commit(self, staged: list[tuple[tuple[str, Row], Staged]]) -> None:
        unnamed: set[bytes] = set()
        for start in range(0, len(staged), _COMMIT):
            part = staged[start : start + _COMMIT]
            if unnamed:  # the bytes of some names were to come with names that were not committed
                self._again += [pair for pair, item in part if item.digest in unnamed]
                part = [(pair, item) for pair, item in part if item.digest not in unnamed]
            rows = [pair for pair, _ in part]
            specs = [
                (EntrySpec(name, row.serializer, row.metadata, row.expires, False), item)
                for (name, row), item in part
            ]

            def leave_out(_: Write, rows: list[tuple[str, Row]] = rows, specs: list[Any] = specs) -> None:
                if changed := self._naming.leave_out(rows):
                    specs[:] = self._without(changed, specs)

            self._naming.coming(rows)
            try:
                self._parts.writer.name(specs, leave_out)
            except NameConflictError:
                if not self._take_apart(rows):
                    raise
                unnamed |= {row.digest for _, row in rows}
                continue
            except Vanished as error:
                raise RemoteError(
                    f"gc removed blobs of {self._parts.path} while this pull named them; pull again"
                ) from error
            finally:
                _discard(part)
            self._naming.came(rows)


def _just_come(row: Row) -> KnownBlob:
    """The blob of a row, for further names: it is committed with the first one, or has been."""
    return KnownBlob(Blob(row.digest, row.size, 0, row.place.codec, LOOSE, 0), may_be_received=True)


def _agrees(blob: Blob, row: Row) -> bool:
    """Whether bytes that nobody may have compared with their digest can be those of a row."""
    return (blob.size, blob.stored, blob.codec) == (row.size, row.place.stored, row.place.codec)


def _discard(staged: list[tuple[tuple[str, Row], Staged]]) -> None:
    _discard_all([item for _, item in staged])


def _discard_all(items: list[Staged]) -> None:
    for item in items:
        item.discard()
