"""A push: the names of a store below a prefix come into a ref, and the bytes that the remote lacks travel.

The order is that of trust: blobs, then pages, then the commit, and then the ref by compare-and-swap, so
nothing is referenced before it is there. A push that is interrupted has written objects that no ref names;
the next push finds and uses them. Of two pushes of one ref at once, the second merges by name: a name that
only one of the two changed is taken from that one.

Every blob is decoded and compared with its digest on its way out, so a damaged blob does not travel.
"""

from __future__ import annotations

import getpass
import itertools
import os
import random
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Set
from concurrent.futures import FIRST_COMPLETED, Executor, Future, wait
from contextlib import closing
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

import zstandard
from blake3 import blake3

from castore.errors import (
    ConflictError,
    CorruptError,
    InvalidValueError,
    NotFoundError,
    RemoteError,
    RemoteMissingError,
)
from castore.index import places
from castore.index.places import RemotePlace
from castore.objects.codecs import CODECS
from castore.objects.packs import FILE_HEAD, build_record, read_record
from castore.parts import Parts
from castore.records import AWAY, HEAD_SIZE, Blob, Entry
from castore.remote import commits
from castore.remote.base import Base
from castore.remote.bucket import Bucket
from castore.remote.collection_state import Guard
from castore.remote.commits import Commit, Ref
from castore.remote.compare import Difference, agree, compare, list_names, open_base
from castore.remote.keys import commit_key, dictionary_key, object_key, page_key
from castore.remote.outcomes import Progress, Pushed
from castore.remote.page_cache import PageCache
from castore.remote.pages import PACKED_LIMIT, Place, Row, digest_of, frame_of
from castore.remote.tree import Tree, build, edit
from castore.write.arguments import dump_metadata

#: Bytes at which a pack is uploaded and another begun.
PACK_BYTES = 16 << 20
# Objects of at most this many uploads are in memory, or open, at once.
_UPLOADS = 6
_ATTEMPTS = 20
_DIGESTS = 500


class _Plan(NamedTuple):
    """The names that a push changes.

    Attributes:
        entries: in order; None for a name that goes.
        agreed: rows that the ref has as the store has them.
        is_all: whether the store and the ref will agree on all names of the store.
    """

    entries: list[tuple[str, Entry | None]]
    agreed: list[Row]
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
        base: of the ref; the next one is kept there.
        remote: the remote's name in this store, which may know where blobs lie there.
        bad: digests of objects that are missing or damaged. Names whose bytes lie there are pushed again, if
            the store has the same bytes.

    Raises:
        ConflictError: names have changed both here and in the ref since ``base``.
        CorruptError: a blob here is damaged.
        InvalidValueError: an entry is a pickle.
        RemoteError: the remote cannot be used.
    """
    guard = Guard(bucket)
    sender = _Sender(parts, bucket, pool, bad, guard, remote, progress)

    def merge_with(seen: Ref | None) -> Pushed | None:
        """Push what the ref lacks that was seen; None if it has changed meanwhile."""
        head = None if seen is None else commits.read_commit(bucket, seen.commit)
        tree = None if head is None else Tree(head.tree, pages.read, pages.expect)
        parent = None if seen is None else seen.commit
        before = open_base(base.root(bucket, parent), pages)
        plan = _plan(parts, tree, before, prefix, delete, bad, ref)
        if head is not None and seen is not None and not plan.entries:
            base.keep(_next_base(plan, [], head.tree, before, pages))
            return Pushed(ref, seen.commit.hex(), 0, 0, 0, sender.sent, sender.objects, plan.gone)
        rows = sender.send(plan.entries, tree)
        made: dict[bytes, bytes] = {}
        if tree is None:
            root = build((row for _, row in rows if row), made.__setitem__)
        else:
            root = edit(tree, rows, made.__setitem__)
        sender.send_pages(made, pages)
        entries, logical, _ = Tree(root, pages.read).totals()
        commit = commits.encode_commit(Commit(root, parent, time.time(), _writer(), note, entries, logical))
        sender.put(commit_key(digest_of(commit)), commit)
        next_base = _next_base(plan, rows, root, before, pages)
        base.note(digest_of(commit), parent, next_base)
        if not guard.is_current():  # a collection has begun or ended, and may have deleted what was there
            guard.begin()
            sender.forget()
            return None
        if not commits.move_ref(bucket, ref, seen, digest_of(commit), time.time()):
            return None
        base.keep(next_base)
        counts = (plan.added, plan.changed, plan.removed, sender.sent, sender.objects, plan.gone)
        return Pushed(ref, digest_of(commit).hex(), *counts)

    for attempt in range(_ATTEMPTS):
        seen = commits.read_ref(bucket, ref)
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
        time.sleep(random.random() * min(2.0, 0.05 * 2**attempt))  # noqa: S311
    raise RemoteError(
        f"others moved ref {ref!r} in {bucket.url} {_ATTEMPTS} times while this push merged; push again"
    )


def _writer() -> str:
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"


def _next_base(
    plan: _Plan, rows: list[tuple[str, Row | None]], root: bytes, before: Tree | None, pages: PageCache
) -> bytes:
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
    bad: Set[bytes],
    ref: str,
) -> _Plan:
    """The names that the store has changed since ``base``, and that nobody else has."""
    chosen: list[tuple[str, Entry | None]] = []
    agreed: list[Row] = []
    is_all = not prefix
    seen = added = changed = removed = gone = 0
    conflicts: list[str] = []
    pickled: list[str] = []
    ours = parts.index.entries(prefix, time.time(), damaged=False)
    for compared in compare(ours, head, base, prefix):
        difference, entry, row = compared.difference, compared.ours, compared.theirs
        seen += entry is not None
        if entry is None:
            if row is not None and delete:
                chosen.append((compared.name, None))
                removed += 1
            elif difference is not Difference.OURS:
                is_all = False  # the store has never had the name
        elif (
            difference is Difference.OURS
            or (difference is Difference.BOTH and row is None)
            or (
                row is not None
                and row.place.object in bad
                and row.digest.hex() == entry.digest
                and not entry.away
            )
        ):
            chosen.append((compared.name, entry))
            added += row is None
            changed += row is not None
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
    if prefix and not chosen and not seen:
        raise NotFoundError(f"{parts.path} has no entry at or below {prefix!r}; `castore ls` lists all")
    if conflicts:
        raise ConflictError(
            f"{list_names(conflicts)} changed both here and in ref {ref!r}; pull it first,"
            " or push to another ref",
            names=tuple(conflicts),
        )
    if pickled:
        raise InvalidValueError(
            f"{list_names(pickled)} would have to be unpickled by whoever pulls, which runs code, so no"
            " remote takes pickles; save with another serializer, or push a prefix without them"
        )
    return _Plan(chosen, agreed, is_all, added, changed, removed, gone)


# Sending


class _Sender:
    """Uploads what the remote lacks, and knows where each blob lies."""

    def __init__(
        self,
        parts: Parts,
        bucket: Bucket,
        pool: Executor,
        bad: Set[bytes],
        guard: Guard,
        remote: str,
        progress: Progress,
    ) -> None:
        self._parts = parts
        self._bucket = bucket
        self._pool = pool
        self._bad = bad
        self._guard = guard
        self._remote = remote
        self._progress = progress
        self._places: dict[bytes, Place] = {}
        self._pending: set[Future[None]] = set()
        self._dictionaries: set[int] = set()
        self._lock = threading.Lock()
        self._done = self._total = 0
        self.sent = self.objects = 0

    def forget(self) -> None:
        """Count on nothing that was in the remote before."""
        self._places.clear()

    def _lacks(self, digest: bytes, key: str, size: int) -> bool:
        """Whether an object has to be uploaded."""
        return bool(self._guard.must_upload([key])) or digest in self._bad or self._bucket.size(key) != size

    def put(self, key: str, data: bytes) -> None:
        """Upload an object of this push."""
        self._guard.must_upload([key])
        self._bucket.put(key, data)
        self._count(len(data), 0, objects=1)

    def _count(self, sent: int, done: int, objects: int = 0) -> None:
        with self._lock:
            self.sent += sent
            self.objects += objects
            self._done += done
        self._progress(self._done, self._total)

    def send(
        self, entries: list[tuple[str, Entry | None]], head: Tree | None
    ) -> list[tuple[str, Row | None]]:
        """Upload the blobs of entries that the remote lacks; returns the rows of all of them."""
        wanted = {bytes.fromhex(entry.digest): entry.stored for _, entry in entries if entry}
        for digest in self._places:
            wanted.pop(digest, None)
        if head is not None and wanted:
            for row in head.rows():  # another name may have the same bytes
                if row.digest in wanted and row.place.object not in self._bad:
                    self._places[row.digest] = row.place
                    del wanted[row.digest]
        self._find_known(wanted)
        self._total += sum(wanted.values())
        try:
            self._send_blobs(wanted)
            self._wait(0)
        except FileNotFoundError as error:
            raise RemoteError(
                f"bytes of {self._parts.path} were gone when this push read them ({error}): push again; if"
                " that recurs, the store's budget is too small to bring from one remote what another lacks"
            ) from error
        finally:
            for future in self._pending:
                future.cancel()
            wait(self._pending)
            self._pending.clear()
        return [
            (name, None if entry is None else self._row(entry, self._places[bytes.fromhex(entry.digest)]))
            for name, entry in entries
        ]

    def _find_known(self, wanted: dict[bytes, int]) -> None:
        """Count on objects of this remote that a lazy pull has recorded, if they are there still."""
        known: dict[tuple[bytes, bool], list[RemotePlace]] = defaultdict(list)
        digests = list(wanted)
        for start in range(0, len(digests), _DIGESTS):
            for place in places.of_blobs(self._parts.index, digests[start : start + _DIGESTS]).values():
                if place.remote == self._remote and place.object not in self._bad:
                    known[place.object, place.offset > 0].append(place)
        for (digest, is_packed), members in known.items():
            key = object_key(digest, packed=is_packed)
            if self._guard.must_upload([key]) or self._bucket.size(key) is None:
                continue
            for place in members:
                self._places[place.digest] = Place(
                    place.object, place.offset, place.stored, place.codec, place.frames
                )
                del wanted[place.digest]

    def _row(self, entry: Entry, place: Place) -> Row:
        return Row(
            entry.name, bytes.fromhex(entry.digest), entry.size, entry.serializer,
            dump_metadata(entry.metadata), entry.created, entry.expires, place,
        )  # fmt: skip

    def _send_blobs(self, digests: Iterable[bytes]) -> None:
        pack = _Pack()
        for blob in self._blobs(digests):
            if blob.stored > PACKED_LIMIT:
                self._begin(self._send_large, blob)
                continue
            pack.add(blob, *self._small(blob))
            if pack.size >= PACK_BYTES:
                self._begin(self._send_pack, pack)
                pack = _Pack()
        if pack.members:
            self._begin(self._send_pack, pack)

    def _blobs(self, digests: Iterable[bytes]) -> Iterator[Blob]:
        left = list(digests)
        for start in range(0, len(left), _DIGESTS):
            part = left[start : start + _DIGESTS]
            found = self._parts.index.blobs_of(part)
            if away := [digest for digest, blob in found.items() if blob.pack == AWAY]:
                self._parts.source.bring(away)
                found |= self._parts.index.blobs_of(away)
            for digest in part:
                blob = found.get(digest)
                if blob is None or not blob.is_here:
                    raise RemoteError(
                        f"blob {digest.hex()} was removed from {self._parts.path} while this push read it;"
                        " push again"
                    )
                yield blob

    def _begin(self, work: Callable[..., None], what: object) -> None:
        self._wait(_UPLOADS - 1)
        self._pending.add(self._pool.submit(work, what))

    def _wait(self, most: int) -> None:
        while len(self._pending) > most:
            done, self._pending = wait(self._pending, return_when=FIRST_COMPLETED)
            for future in done:
                future.result()

    def _small(self, blob: Blob) -> tuple[bytes, list[bytes]]:
        """The stored bytes of a blob that goes into a pack, and its frames; checked."""
        objects = self._parts.objects
        if blob.pack > 0:
            payload = read_record(objects.packs.open(blob.pack).fd, blob)
            data = CODECS[blob.codec].decompress(payload, blob.size, objects.dictionaries.decompressor)
            if blake3(data).digest() != blob.digest:
                raise _damaged(blob, objects.where(blob))
            if blob.codec == "zstd" and blob.size:
                self._send_dictionary(zstandard.get_frame_parameters(payload).dict_id)
            return payload, [frame_of(payload)]
        with closing(objects.open(blob, checksums=self._parts.index.checksums(blob.digest))) as reader:
            for _ in reader.in_order():
                pass
            payload = os.pread(reader.fileno(), blob.stored, 0)
            offsets = reader.table().offsets
            return payload, [frame_of(payload[start:end]) for start, end in itertools.pairwise(offsets)]

    def _send_dictionary(self, number: int) -> None:
        if not number or number in self._dictionaries:
            return
        key = dictionary_key(number)
        if self._bucket.size(key) is None:
            self.put(key, self._parts.objects.dictionaries.load(number).data)
        self._dictionaries.add(number)

    def _send_pack(self, pack: _Pack) -> None:
        data = pack.data()
        digest = digest_of(data)
        key = object_key(digest, packed=True)
        is_new = self._lacks(digest, key, len(data))
        if is_new:
            self._bucket.put(key, data)
        for blob, offset, frames in pack.members:
            self._places[blob.digest] = Place(digest, offset, blob.stored, blob.codec, frames)
        stored = sum(blob.stored for blob, _, _ in pack.members)
        self._count(len(data) if is_new else 0, stored, objects=int(is_new))

    def _send_large(self, blob: Blob) -> None:
        objects = self._parts.objects
        with closing(objects.open(blob, checksums=self._parts.index.checksums(blob.digest))) as reader:
            for _ in reader.in_order():
                pass
            offsets = reader.table().offsets
            hasher, frames = blake3(), []
            for start, end in itertools.pairwise(offsets):
                stored = os.pread(reader.fileno(), end - start, start)
                hasher.update(stored)
                frames.append(frame_of(stored))
            hasher.update(os.pread(reader.fileno(), blob.stored - offsets[-1], offsets[-1]))
            key = object_key(hasher.digest(), packed=False)
            is_new = self._lacks(hasher.digest(), key, blob.stored)
            if is_new:
                # The descriptor keeps the bytes, even if gc unlinks the object meanwhile.
                path = Path(f"/proc/self/fd/{reader.fileno()}")
                self._bucket.upload(key, path, lambda read: self._count(read, read))
        self._places[blob.digest] = Place(hasher.digest(), 0, blob.stored, blob.codec, b"".join(frames))
        self._count(0, 0 if is_new else blob.stored, objects=int(is_new))

    def send_pages(self, made: dict[bytes, bytes], pages: PageCache) -> None:
        """Upload the pages of a tree, and keep them."""
        for _ in self._pool.map(lambda page: self.put(page_key(page[0]), page[1]), made.items()):
            pass
        for digest, data in made.items():
            pages.keep(digest, data)


class _Pack:
    """Records of blobs that travel together, and where each lies."""

    def __init__(self) -> None:
        self._pieces = [FILE_HEAD]
        self.size = len(FILE_HEAD)
        self.members: list[tuple[Blob, int, bytes]] = []

    def add(self, blob: Blob, payload: bytes, frames: list[bytes]) -> None:
        self.members.append((blob, self.size + HEAD_SIZE, b"".join(frames)))
        self._pieces.append(build_record(blob.digest, blob.size, blob.codec, payload))
        self.size += HEAD_SIZE + len(payload)

    def data(self) -> bytes:
        return b"".join(self._pieces)


def _damaged(blob: Blob, where: str) -> CorruptError:
    return CorruptError(
        f"blob {blob.digest.hex()} is damaged in {where}; `castore verify --repair` sets it aside",
        digest=blob.digest.hex(),
        where=where,
    )
