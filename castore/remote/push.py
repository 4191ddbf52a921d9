"""A push: the names of a store below a prefix come into a ref, and the bytes that the remote lacks travel.

The order is that of trust: blobs, then pages, then the commit, and then the ref by compare-and-swap, so
nothing is referenced before it is there. A push that is interrupted has written objects that no ref names;
the next push finds and uses them. Of two pushes of one ref at once, the second merges by name: a name that
only one of the two changed is taken from that one.
"""

from __future__ import annotations

import getpass
import json
import os
import random
import socket
import time
from collections.abc import Iterator, Set
from concurrent.futures import Executor
from itertools import islice
from operator import itemgetter
from typing import NamedTuple

from castore.errors import (
    ConflictError,
    InvalidValueError,
    NameConflictError,
    NotFoundError,
    RemoteError,
    RemoteMissingError,
)
from castore.names import FilesAbove
from castore.parts import Parts
from castore.records import Blob, Entry, has_expired
from castore.remote import commits
from castore.remote.base import Base
from castore.remote.bucket import Bucket
from castore.remote.collection_state import Guard
from castore.remote.commits import Commit, Ref
from castore.remote.compare import Compared, Difference, agree, compare, list_names
from castore.remote.keys import commit_key, hint_key
from castore.remote.outcomes import Progress, Pushed
from castore.remote.page_cache import PageCache
from castore.remote.pages import Row, digest_of
from castore.remote.send import Sender
from castore.remote.tree import Tree, build, edit

_ATTEMPTS = 20
# Digests that are looked up together.
_DIGESTS = 500


class _Plan(NamedTuple):
    """The names that a push changes.

    Attributes:
        entries: in order; None for a name that goes.
        agreed: rows that the ref has as the store has them; None if the store has nothing to agree on.
        is_all: whether the store and the ref will agree on all names of the store.
    """

    entries: list[tuple[str, Entry | None]]
    agreed: list[Row] | None
    is_all: bool
    added: int
    changed: int
    removed: int
    gone: int


def push(
    parts: Parts,
    bucket: Bucket,
    pages: PageCache,
    pool: Executor,
    *,
    ref: str,
    prefix: str,
    note: str,
    delete: bool,
    restore: bool,
    base: Base,
    bad: Set[bytes],
    remote: str,
    progress: Progress,
) -> Pushed:
    """Bring the names at and below ``prefix`` into ``ref``.

    Args:
        pool: uploads.
        note: text for the history.
        delete: also remove names from the ref that the store does not have. By default they stay: a store is
            a cache, and what it evicted is no less wanted.
        restore: also bring names that others have removed from the ref, and that the store has not changed.
        base: of the ref; the next one is kept there.
        remote: the remote's name in this store, which may know where blobs lie there.
        bad: digests of objects, and numbers of dictionaries, that are missing or damaged. With any of them
            this is a repair: of the names of the ref whose bytes lie there, those bytes are uploaded again
            that the store has under whatever name, and no name of the store comes into the ref.

    Raises:
        ConflictError: names have changed both here and in the ref since ``base``.
        CorruptError: a blob here is damaged.
        InvalidValueError: an entry is a pickle.
        RemoteError: the remote cannot be used.
    """
    guard = Guard(bucket)
    sender = Sender(parts, bucket, pool, bad, guard, remote, progress)
    sender.restore_dictionaries()

    def choose(head: Tree | None, before: Tree | None) -> _Plan:
        if bad:
            return _plan_repair(parts, head, bad)
        return _plan(parts, head, before, prefix, delete, restore, ref)

    def merge_with(seen: Ref | None) -> Pushed | None:
        """Push what the ref lacks that was seen; None if it has changed meanwhile."""
        head = None if seen is None else pages.commit(seen.commit)
        tree = None if head is None else Tree(head.tree, pages.read, pages.expect)
        parent = None if seen is None else seen.commit
        agreed = base.tree(bucket, parent, parts, pages)
        # A ref that is gone has lost its names; nobody has removed them.
        before = None if seen is None else agreed
        plan = choose(tree, before)
        rows = sender.send(plan.entries, tree)
        made: dict[bytes, bytes] = {}
        if tree is None:
            root = build((row for _, row in rows if row), made.__setitem__)
        else:
            root = edit(tree, rows, made.__setitem__)
        if seen is not None and head is not None and root == head.tree:  # a repair may bring back an object
            base.keep(_next_base(plan, rows, root, before, pages))
            return Pushed(ref, seen.commit.hex(), 0, 0, 0, sender.sent, sender.objects, plan.gone)
        sender.send_pages(made, pages)
        bucket.put(hint_key(ref), pages.hint_of(Tree(root, pages.read)))
        entries, logical, _ = Tree(root, pages.read).totals()
        commit = commits.encode_commit(Commit(root, parent, time.time(), _writer(), note, entries, logical))
        sender.put(commit_key(digest_of(commit)), commit)
        pages.keep(digest_of(commit), commit)
        next_base = _next_base(plan, rows, root, before, pages)
        base.note(digest_of(commit), parent, next_base)
        # Nothing may be asked between this and the move, for a collection might begin meanwhile.
        if not guard.is_current():  # one has begun or ended, and may have deleted what was there
            guard.begin()
            sender.forget()
            return None
        carried = commit, pages.read(root)
        if not commits.move_ref(bucket, ref, seen, digest_of(commit), time.time(), carried):
            return None
        base.keep(next_base)
        counts = (plan.added, plan.changed, plan.removed, sender.sent, sender.objects, plan.gone)
        return Pushed(ref, digest_of(commit).hex(), *counts)

    for attempt in range(_ATTEMPTS):
        seen = _find_ref(bucket, ref)
        try:
            done = merge_with(seen)
        except RemoteMissingError:
            # A push that stands still for days may find a commit collected that the ref has left.
            now = commits.read_ref(bucket, ref)
            if seen is None or now is None or now.commit == seen.commit:
                raise
            done = None
        if done is not None:
            return done
        time.sleep(random.SystemRandom().random() * min(2.0, 0.05 * 2**attempt))
    raise RemoteError(
        f"others moved ref {ref!r} in {bucket.url} {_ATTEMPTS} times while this push merged; push again"
    )


def _find_ref(bucket: Bucket, ref: str) -> commits.Ref | None:
    """The ref as it is now; None if there is none.

    Raises:
        RemoteError: a copy of a remote in a folder, which has it elsewhere, must not get a second history.
    """
    seen = commits.read_ref(bucket, ref)
    if seen is None:
        commits.list_refs(bucket)
    return seen


def _writer() -> str:
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"


def _next_base(
    plan: _Plan, rows: list[tuple[str, Row | None]], root: bytes, before: Tree | None, pages: PageCache
) -> bytes | None:
    if plan.agreed is None:
        return None
    if plan.is_all:
        return root
    agreed = sorted([*rows, *((row.name, row) for row in plan.agreed)], key=itemgetter(0))
    return agree(before, agreed, pages.read, pages.keep)


# Choosing


def _plan(
    parts: Parts,
    head: Tree | None,
    base: Tree | None,
    prefix: str,
    delete: bool,
    restore: bool,
    ref: str,
) -> _Plan:
    """The names that the store has changed since ``base``, and that nobody else has, or that have expired in
    the ref.
    """
    chosen: list[tuple[str, Entry | None]] = []
    agreed: list[Row] = []
    is_all = not prefix
    seen = added = changed = removed = gone = 0
    conflicts: list[str] = []
    pickled: list[str] = []
    nested: list[tuple[str, str]] = []
    ours = parts.index.entries(prefix, time.time(), damaged=False)
    for compared in _noting_nested(compare(ours, head, base, prefix), delete, nested):
        difference, entry, row = compared.difference, compared.ours, compared.theirs
        seen += entry is not None
        if entry is None:
            if row is not None and delete:
                chosen.append((compared.name, None))
                removed += 1
            elif difference is not Difference.OURS:
                is_all = False  # the store has never had the name
        elif _travels(difference, row, restore):
            chosen.append((compared.name, entry))
            added += not _lives(row)
            changed += _lives(row)
            if entry.serializer == "pickle":
                pickled.append(entry.name)
        elif difference is Difference.NONE:
            assert row is not None, "what is equal is there"
            agreed.append(row)
        elif difference is Difference.THEIRS:
            is_all = False
            gone += row is None
        else:
            conflicts.append(compared.name)
    if not seen:
        _require_names(parts, prefix, ref, chosen)
    if conflicts:
        raise ConflictError(
            f"{list_names(conflicts)} changed both here and in ref {ref!r}; a pull with replace=True takes"
            " the ref's bytes, and ref=OTHER pushes to another ref",
            names=tuple(conflicts),
        )
    _require_no_file_above(chosen, nested, head, prefix, ref)
    if pickled:
        raise InvalidValueError(
            f"{list_names(pickled)} would have to be unpickled by whoever pulls, which runs code, so no"
            " remote takes pickles; save with another serializer, or push a prefix without them"
        )
    return _Plan(chosen, agreed, is_all, added, changed, removed, gone)


def _require_names(parts: Parts, prefix: str, ref: str, chosen: list[tuple[str, Entry | None]]) -> None:
    """Refuse a push of no names, but for one that removes those below a prefix.

    Raises:
        NotFoundError: there is nothing to push, or the whole ref would be removed.
    """
    if chosen and not prefix:
        raise NotFoundError(
            f"{parts.path} has no entries, so this push would remove all names of ref {ref!r}; give the"
            " prefix that is to go"
        )
    if prefix and not chosen:
        raise NotFoundError(f"{parts.path} has no entry at or below {prefix!r}; `castore ls` lists all")


def _travels(difference: Difference, row: Row | None, restore: bool) -> bool:
    """Whether a name of the store comes into the ref, where it has that row.

    A name that has expired there is nobody's: no pull brings it.
    """
    if difference is Difference.THEIRS:
        return restore and row is None
    return difference is Difference.OURS or not _lives(row)


def _noting_nested(
    names: Iterator[Compared], delete: bool, nested: list[tuple[str, str]]
) -> Iterator[Compared]:
    """The names. Files that other names of the ref would lie inside go to ``nested``, with these names.

    Names of the ref that have expired are in nobody's way: no pull brings them.
    """
    above = FilesAbove()
    for compared in names:
        if compared.ours is None:
            is_there = not delete and _lives(compared.theirs)
        else:  # the difference takes longest, so it comes last
            is_there = (
                _lives(compared.theirs)
                or compared.base is None
                or compared.difference is not Difference.THEIRS
            )
        if is_there and (file := above.find(compared.name)) is not None:
            nested.append((file, compared.name))
        yield compared


def _require_no_file_above(
    chosen: list[tuple[str, Entry | None]],
    nested: list[tuple[str, str]],
    head: Tree | None,
    prefix: str,
    ref: str,
) -> None:
    """Check that no name that is pushed lies inside a file of the ref, or is one that others lie inside.

    Args:
        nested: of `_noting_nested`.
        chosen, head, prefix, ref: of the push.

    Raises:
        NameConflictError: a name does; the message has both.
    """
    pushed = {name for name, entry in chosen if entry is not None}
    pairs = [pair for pair in nested if not pushed.isdisjoint(pair)]
    if pushed and prefix and head is not None:
        parts = prefix.split("/")
        folders = ("/".join(parts[:count]) for count in range(1, len(parts)))
        pairs += [(folder, min(pushed)) for folder in folders if _lives(head.find(folder))]
    if pairs:
        file, name = pairs[0]
        raise NameConflictError(
            f"ref {ref!r} would have a file {file!r} and {name!r} inside it, and a name is a file or a"
            " folder; rename one of them, remove the ref's with --delete (delete=True), or push to another"
            " ref"
        )


def _lives(row: Row | None) -> bool:
    return row is not None and not has_expired(row.expires, time.time())


def _plan_repair(parts: Parts, head: Tree | None, bad: Set[bytes]) -> _Plan:
    """The names of the ref whose bytes lie in bad objects and are in the store."""
    chosen: list[tuple[str, Entry | None]] = []
    rows = (row for row in head.rows() if row.place.object in bad) if head is not None else iter(())
    while some := list(islice(rows, _DIGESTS)):
        found = parts.index.blobs_of(list({row.digest for row in some}))
        for row in some:
            blob = found.get(row.digest)
            if blob is not None and blob.is_here:
                chosen.append((row.name, _entry_of(row, blob)))
    return _Plan(chosen, None, False, 0, len(chosen), 0, 0)


def _entry_of(row: Row, blob: Blob) -> Entry:
    """The entry that a name of a ref would be in a store that has its bytes. The row may lie about them."""
    metadata = json.loads(row.metadata) if row.metadata else {}
    return Entry(
        row.name, row.digest.hex(), blob.size, blob.stored, blob.codec, row.created, row.expires, row.created,
        row.serializer, metadata, False, False,
    )  # fmt: skip
