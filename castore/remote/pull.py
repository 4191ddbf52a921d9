"""A pull: the names of a commit come into the store, and the bytes that it lacks are fetched and checked.

Nothing that a remote says is believed. Stored bytes are compared with the frames of the tree's row before
they are decompressed, and the decompressed bytes with the blob's digest before a name points at them. A pull
that is interrupted has committed some names; the next one goes on behind them.
"""

from __future__ import annotations

import os
import re
import time
from collections import defaultdict
from collections.abc import Generator, Iterator
from concurrent.futures import FIRST_COMPLETED, Executor, Future, wait
from contextlib import ExitStack, closing
from typing import NamedTuple

import xxhash
import zstandard
from blake3 import blake3

from castore.errors import ConflictError, CorruptError, FullError, RemoteError, RemoteMissingError
from castore.names import check_name
from castore.objects.codecs import CODECS, FRAME_SIZE
from castore.objects.decode import BlobReader
from castore.objects.dictionaries import Dictionary, derive_number
from castore.objects.packs import PACK_LIMIT
from castore.parts import Parts
from castore.records import LOOSE, LOST, Blob, EntrySpec
from castore.remote import commits
from castore.remote.bucket import Bucket
from castore.remote.compare import Difference, agree, compare, list_names, open_base
from castore.remote.keys import dictionary_key, object_key
from castore.remote.outcomes import Progress, Pulled
from castore.remote.page_cache import PageCache
from castore.remote.pages import FRAME, Place, Row, frame_of
from castore.remote.tree import Tree
from castore.serialize.serializers import SERIALIZERS
from castore.units import format_size
from castore.write.incoming import write_all
from castore.write.open_pack import Vanished
from castore.write.staging import KnownBlob, LargeBlob, SmallBlob, Staged

# Bytes of neighbouring records of a pack that are fetched in one request, and the gap that is fetched along.
_REQUEST, _GAP = 8 << 20, 128 << 10
# Requests under way at once, and names committed together.
_REQUESTS, _COMMIT = 8, 1000
_DIGESTS = 500
_COMMIT_ID = re.compile(r"[0-9a-f]{6,64}")


class _Plan(NamedTuple):
    """The names that a pull changes in the store, in order, and those that are equal already."""

    rows: list[tuple[str, Row]]
    agreed: list[Row]
    is_all: bool  # the base is the commit's tree: nothing of the one before it has to be kept
    added: int
    changed: int
    unchanged: int


def find_commit(bucket: Bucket, ref: str, start: str | None) -> bytes:
    """The commit that ``REF`` or ``REF@COMMIT`` means.

    Args:
        ref: the ref.
        start: at least six of the first digits of a commit in its history, or None for the newest.

    Raises:
        RemoteMissingError: there is no such ref, or no such commit in its history.
        RemoteError: several commits begin so.
    """
    seen = commits.read_ref(bucket, ref)
    if seen is None:
        others = ", ".join(commits.list_refs(bucket)[:10]) or "none"
        raise RemoteMissingError(f"{bucket.url} has no ref {ref!r}; its refs: {others}")
    if start is None:
        return seen.commit
    if not _COMMIT_ID.fullmatch(start):
        raise RemoteMissingError(
            f"{start!r} is no commit: give at least 6 of its hex digits, as `castore log` shows"
        )
    found = [digest for digest, _ in commits.history(bucket, seen.commit) if digest.hex().startswith(start)]
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
    prefix: str,
    below: str,
    replace: bool,
    base: bytes | None,
    progress: Progress,
) -> tuple[Pulled, bytes]:
    """Bring the names of a commit at and below ``prefix`` into the store.

    Args:
        pool: fetches.
        ref: whose commit.
        start: first digits of the commit; None for the newest.
        below: a folder that the names come below, "" for none.
        replace: take the commit's bytes for names that changed here, too.
        base: root of the tree of names on which this store and the ref agreed last, or None.

    Returns:
        The outcome, and the root of the next base.

    Raises:
        ConflictError: names have changed both here and in the commit since ``base``.
        CorruptError: the remote's bytes are not what they should be.
        RemoteError: the remote cannot be used.
        FullError: they do not fit into the budget.
    """
    parts.index.require_writable()
    commit = find_commit(bucket, ref, start)
    tree = Tree(commits.read_commit(bucket, commit).tree, pages.read, pages.expect)
    before = open_base(base, pages)
    _check_budget(parts, tree, prefix, ref)
    plan = _plan(parts, tree, before, prefix, below, replace, ref)
    fetcher = _Fetcher(parts, bucket, pool, progress)
    fetcher.fetch(plan.rows)
    pulled = Pulled(ref, commit.hex(), plan.added, plan.changed, plan.unchanged, fetcher.fetched)
    if plan.is_all:
        return pulled, tree.root
    agreed = sorted([*plan.agreed, *(row for _, row in plan.rows)])
    return pulled, agree(before, ((row.name, row) for row in agreed), pages.read, pages.keep)


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
    parts: Parts, tree: Tree, base: Tree | None, prefix: str, below: str, replace: bool, ref: str
) -> _Plan:
    """The names that the commit has changed since ``base``, and that the store has not."""
    start, now = f"{below}/" if below else "", time.time()
    ours = parts.index.entries(start + prefix if prefix else below, now, damaged=False)
    rows: list[tuple[str, Row]] = []
    agreed: list[Row] = []
    conflicts: list[str] = []
    added = changed = unchanged = 0
    is_all = not prefix
    for compared in compare(ours, tree, base, prefix, below):
        name, entry, row, _ = compared
        difference = compared.difference
        if row is not None and row.expires is not None and row.expires <= now:
            continue
        if row is None:
            # The ref has lost the name: if it comes back, the store must know the old one.
            is_all = is_all and (entry is None or compared.base is None)
            continue
        if entry is None:
            rows.append((check_name(name), row))
            added += 1
        elif difference is Difference.THEIRS or (replace and difference is not Difference.NONE):
            rows.append((name, row))
            changed += 1
        elif difference is Difference.BOTH:
            conflicts.append(name)
        else:
            unchanged += 1
            if difference is Difference.NONE:
                agreed.append(row)
    if prefix and not (rows or unchanged or conflicts):
        raise RemoteMissingError(f"ref {ref!r} has no name at or below {prefix!r}")
    if conflicts:
        raise ConflictError(
            f"{list_names(conflicts)} changed both here and in ref {ref!r}; pull with --replace to take the"
            " ref's bytes, or --as another folder",
            names=tuple(conflicts),
        )
    return _Plan(rows, agreed, is_all, added, changed, unchanged)


# Fetching


class _Request(NamedTuple):
    """Records of one pack that lie near each other, or one object of its own."""

    object: bytes
    rows: list[Row]

    @property
    def start(self) -> int:
        return self.rows[0].place.offset

    @property
    def end(self) -> int:
        return max(row.place.offset + row.place.stored for row in self.rows)


class _Fetcher:
    """Fetches the blobs of rows, and commits their names as they come."""

    def __init__(self, parts: Parts, bucket: Bucket, pool: Executor, progress: Progress) -> None:
        self._parts = parts
        self._bucket = bucket
        self._pool = pool
        self._progress = progress
        self.fetched = 0

    def fetch(self, rows: list[tuple[str, Row]]) -> None:
        """Have all rows' blobs and names in the store."""
        for _, row in rows:
            if row.serializer not in SERIALIZERS or row.serializer == "pickle":
                raise RemoteError(
                    f"{row.name!r} in {self._bucket.url} is a {row.serializer!r}, which runs code when it is"
                    " loaded, or which this castore does not know; pull a prefix without it"
                )
        names: dict[bytes, list[tuple[str, Row]]] = defaultdict(list)
        for name, row in rows:
            names[row.digest].append((name, row))
        known = self._known(list(names))
        self._commit([(pair, known[pair[1].digest]) for pair in rows if pair[1].digest in known])
        wanted = {digest: pairs[0][1] for digest, pairs in names.items() if digest not in known}
        total = sum(row.place.stored for row in wanted.values())
        done = 0
        staged: list[tuple[tuple[str, Row], Staged]] = []
        uncommitted = 0
        with ExitStack() as undo, closing(self._staged(wanted)) as coming:
            undo.callback(lambda: _discard(staged))
            for row, item in coming:
                first, *others = names[row.digest]
                staged.append((first, item))
                known_by_then = KnownBlob(Blob(row.digest, row.size, 0, row.place.codec, LOOSE, 0))
                staged += [(other, known_by_then) for other in others]
                done += row.place.stored
                uncommitted += row.place.stored
                self._progress(done, total)
                if len(staged) >= _COMMIT or uncommitted > 4 * _REQUEST:
                    ready, staged, uncommitted = staged, [], 0
                    self._commit(ready)
            self._commit(staged)

    def _known(self, digests: list[bytes]) -> dict[bytes, Staged]:
        known: dict[bytes, Staged] = {}
        for start in range(0, len(digests), _DIGESTS):
            for digest, blob in self._parts.index.blobs_of(digests[start : start + _DIGESTS]).items():
                if blob.pack != LOST:
                    known[digest] = KnownBlob(blob)
        return known

    def _commit(self, staged: list[tuple[tuple[str, Row], Staged]]) -> None:
        for start in range(0, len(staged), _COMMIT):
            part = staged[start : start + _COMMIT]
            specs = [
                (EntrySpec(name, row.serializer, row.metadata, row.expires, False), item)
                for (name, row), item in part
            ]
            try:
                self._parts.writer.commit(specs)
            except Vanished as error:
                raise RemoteError(
                    f"gc removed blobs of {self._parts.path} while this pull named them; pull again"
                ) from error

    def _staged(self, wanted: dict[bytes, Row]) -> Generator[tuple[Row, Staged]]:
        """Blobs in the order in which they come; some requests are under way ahead."""
        pending: set[Future[list[tuple[Row, Staged]]]] = set()
        requests = _requests(wanted)
        try:
            while True:
                while len(pending) < _REQUESTS and (request := next(requests, None)) is not None:
                    work = self._records if request.rows[0].place.is_packed else self._object
                    pending.add(self._pool.submit(work, request))
                if not pending:
                    return
                done, pending = wait(pending, return_when=FIRST_COMPLETED)
                for future in done:
                    yield from future.result()
        finally:
            for future in pending:
                future.cancel()
            for future in wait(pending).done:
                if not future.cancelled() and future.exception() is None:
                    for _, item in future.result():
                        item.discard()

    def _records(self, request: _Request) -> list[tuple[Row, Staged]]:
        """The blobs of neighbouring records of a pack."""
        key, start = object_key(request.object, packed=True), request.start
        [data] = self._bucket.get_ranges(key, [(start, request.end)])
        self.fetched += len(data)
        view = memoryview(data)
        with ExitStack() as undo:
            staged: list[tuple[Row, Staged]] = []
            for row in request.rows:
                at = row.place.offset - start
                staged.append((row, self._stage(row, view[at : at + row.place.stored], key)))
                undo.callback(staged[-1][1].discard)
            undo.pop_all()
        return staged

    def _stage(self, row: Row, stored: memoryview, key: str) -> Staged:
        place = row.place
        if (
            len(place.frames) > FRAME.size
            or not place.stored <= PACK_LIMIT
            or _ends(place)[-1] != place.stored
        ):
            return self._stage_file(row, key, iter([stored]))
        if frame_of(stored) != place.frames:
            raise self._damaged(row, key, "its bytes differ from what the tree says")
        payload = bytes(stored)
        dictionary = None
        if place.codec == "zstd" and row.size:
            try:
                number = zstandard.get_frame_parameters(payload).dict_id
            except zstandard.ZstdError as error:
                raise self._damaged(row, key, str(error)) from error
            dictionary = self._dictionary(number) if number else None
        dictionaries = self._parts.objects.dictionaries
        try:
            data = CODECS[place.codec].decompress(payload, row.size, dictionaries.decompressor)
        except CorruptError as error:
            raise self._damaged(row, key, str(error)) from error
        if blake3(data).digest() != row.digest:
            raise self._damaged(row, key, "it is another blob than the tree says")
        return SmallBlob(self._parts.writer.pack, row.digest, row.size, place.codec, payload, dictionary)

    def _object(self, request: _Request) -> list[tuple[Row, Staged]]:
        """A blob that is an object of its own."""
        [row] = request.rows
        key = object_key(request.object, packed=False)
        return [(row, self._stage_file(row, key, self._bucket.stream(key)))]

    def _stage_file(self, row: Row, key: str, pieces: Iterator[bytes | memoryview]) -> LargeBlob:
        objects, place = self._parts.objects, row.place
        blob = Blob(row.digest, row.size, place.stored, place.codec, LOOSE, 0)
        fd, temporary = objects.loose.create()
        try:
            with open(fd, "rb", buffering=0) as file:
                length = 0
                for piece in pieces:
                    length += len(piece)
                    if length > place.stored:
                        raise self._damaged(
                            row, key, f"it is longer than the {place.stored} bytes of the tree"
                        )
                    write_all(fd, piece, temporary)
                    if place.offset == 0:
                        self.fetched += len(piece)
                if length != place.stored:
                    raise self._damaged(row, key, f"it ends {place.stored - length} bytes early")
                start, checksums = 0, []
                for index, end in enumerate(_ends(place)):
                    frame = os.pread(fd, end - start, start)
                    if frame_of(frame) != place.frames[FRAME.size * index :][: FRAME.size]:
                        raise self._damaged(row, key, f"frame {index} differs from what the tree says")
                    if place.codec == "none":
                        checksums.append(xxhash.xxh3_64_intdigest(frame).to_bytes(8, "little"))
                    start = end
                kept = b"".join(checksums) if row.size > FRAME_SIZE and checksums else None
                try:
                    with closing(BlobReader(blob, os.dup(fd), checksums=kept, where=key)) as reader:
                        for _ in reader.in_order():
                            pass
                except CorruptError as error:
                    raise self._damaged(row, key, str(error)) from error
                objects.loose.seal(file.fileno(), durable=objects.durable)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        return LargeBlob(objects, blob, temporary, kept)

    def _dictionary(self, number: int) -> Dictionary:
        """A dictionary, which is in the store then."""
        dictionaries = self._parts.objects.dictionaries
        if not dictionaries.has(number):
            data = self._bucket.get(dictionary_key(number)).data
            if derive_number(data) != number:
                raise CorruptError(f"dictionary {number:08x} in {self._bucket.url} is damaged")
            with self._parts.index.write():  # under the write lock, as a trained one
                dictionaries.add(data)
        return dictionaries.load(number)

    def _damaged(self, row: Row, key: str, why: str) -> CorruptError:
        return CorruptError(
            f"the bytes of {row.name!r} in {self._bucket.url}/{key} are damaged: {why};"
            " `castore remote check --repair` uploads them again from a store that has them",
            digest=row.digest.hex(),
            where=key,
        )


def _discard(staged: list[tuple[tuple[str, Row], Staged]]) -> None:
    for _, item in staged:
        item.discard()


def _ends(place: Place) -> list[int]:
    """Where each frame of an object ends."""
    ends, end = [], 0
    for length, _ in FRAME.iter_unpack(place.frames):
        end += length
        ends.append(end)
    return ends


def _requests(wanted: dict[bytes, Row]) -> Iterator[_Request]:
    """The requests for blobs: one an object, and one for records that lie near each other in a pack."""
    packs: dict[bytes, list[Row]] = defaultdict(list)
    for row in wanted.values():
        if row.place.is_packed:
            packs[row.place.object].append(row)
        else:
            yield _Request(row.place.object, [row])
    for digest, rows in packs.items():
        rows.sort(key=lambda row: row.place.offset)
        near: list[Row] = []
        for row in rows:
            if near:
                end = near[-1].place.offset + near[-1].place.stored
                far = row.place.offset - end > _GAP
                if far or row.place.offset + row.place.stored - near[0].place.offset > _REQUEST:
                    yield _Request(digest, near)
                    near = []
            near.append(row)
        yield _Request(digest, near)
