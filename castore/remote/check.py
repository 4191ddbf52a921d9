"""Checks that a bucket has all that its refs mean, and finds what no ref means.

Reads listings and trees: one request for each thousand objects. With ``deep`` it reads every object, and
compares its bytes with its name. Mends nothing: `push` does that, given the bad objects. A shared result that
is damaged or gone is no problem, because it is computed again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Executor

from blake3 import blake3

from castore.errors import (
    CorruptError,
    RemoteDeniedError,
    RemoteError,
    RemoteMissingError,
    RemoteUnreachableError,
)
from castore.remote import commits, marker
from castore.remote.bucket import Bucket
from castore.remote.collection_state import was_cut
from castore.remote.commits import Commit
from castore.remote.keys import (
    COMMITS,
    HINTS,
    RESULTS,
    TREES,
    commit_key,
    hint_key,
    object_key,
    page_key,
    ref_key,
)
from castore.remote.outcomes import Checked, Progress, RemoteProblem
from castore.remote.page_cache import PageCache
from castore.remote.pages import Row
from castore.remote.result_records import read_records
from castore.remote.tree import Tree

_FOLDERS = ("objects/", "packs/", "dicts/", TREES, COMMITS, HINTS, RESULTS)
# Names of a bad object that a problem lists.
_NAMES = 5
# Digits of a commit in a sentence.
_DIGITS = 12
_MISSING = "it is missing"
_LOST_REF = (
    "it is missing, and this store has seen it; a push makes it again, and without it the next collections"
    " remove what it needs"
)
_MISSING_BETWEEN = "it is missing, and only through it can older commits be found"


class _Need:
    """An object that commits need: the first of them, the bytes that it must have, and some of the names.

    Args:
        ref: a ref with the commit.
        commit: digits of the commit; "" for the newest of the ref.
        is_packed: whether the object is a pack.
    """

    def __init__(self, ref: str, commit: str, is_packed: bool) -> None:
        self.ref = ref
        self.commit = commit
        self.is_packed = is_packed
        self.end = 0
        self.names: list[str] = []

    def add(self, row: Row) -> None:
        """Take note of a name."""
        self.end = max(self.end, row.place.offset + row.place.stored)
        if len(self.names) < _NAMES and row.name not in self.names:
            self.names.append(row.name)

    def problem(self, key: str, why: str) -> RemoteProblem:
        """The problem that the object is."""
        of = f"; commit {self.commit} of its history needs it" if self.commit else ""
        return RemoteProblem(self.ref, key, why + of, tuple(self.names))


def check(
    bucket: Bucket, pages: PageCache, pool: Executor, known: Iterable[str], *, deep: bool, progress: Progress
) -> Checked:
    """Check all refs of a bucket.

    Args:
        known: refs that a store has pushed to or pulled from: they must be there.
        pool: reads objects side by side.
        deep: read every object that a ref means.
        progress: called with the bytes that were read so, and those of all such objects.

    Raises:
        RemoteError: the place is no remote, or cannot be used.
    """
    marker.check(bucket)
    # Refs first: what a push adds meanwhile is in the listing, and is not missed.
    refs: dict[str, commits.Ref | None] = {}
    damaged: list[RemoteProblem] = []
    for ref in commits.list_refs(bucket):
        try:
            refs[ref] = commits.read_ref(bucket, ref)
        except (RemoteUnreachableError, RemoteDeniedError):
            raise
        except RemoteError as error:
            refs[ref] = None
            damaged.append(RemoteProblem(ref, ref_key(ref), str(error), ()))
    lost = [RemoteProblem(ref, ref_key(ref), _LOST_REF, ()) for ref in known if ref not in refs]
    there = {listed.key: listed.size for folder in _FOLDERS for listed in bucket.listing(folder)}
    found = _Meant(bucket, pages, pages.whole_commits(key for key in there if key.startswith(COMMITS)))
    # The newest commits first: an object that any of them needs is no matter of history.
    histories = {
        ref: pages.ahead(found.history(ref, seen.commit)) for ref, seen in refs.items() if seen is not None
    }
    for ref, history in histories.items():
        found.add_next(ref, history, is_newest=True)
    for ref, history in histories.items():
        while found.add_next(ref, history, is_newest=False):
            continue
    meant = {*found.commits, *found.pages, *found.needs, *_meant_by_results(bucket)}
    problems = [
        *damaged,
        *lost,
        *found.problems,
        *_wrong_pages(there, found.pages, pages),
        *_missing(there, found.needs),
    ]
    if deep:
        bad = {problem.key for problem in problems}
        keys = [key for key in (*found.pages, *found.needs) if key not in bad]
        done, total = 0, sum(there[key] for key in keys)
        for key, why in zip(keys, pool.map(lambda key: _damage(bucket, key), keys), strict=True):
            done += there[key]
            progress(done, total)
            if why is not None and key in found.pages:
                problems.append(RemoteProblem(found.pages[key], key, why, ()))
            elif why is not None:
                problems.append(found.needs[key].problem(key, why))
    hints = set(map(hint_key, refs))
    orphans = [key for key in there.keys() - meant - hints if not key.startswith("dicts/")]
    in_history = {key for key, need in found.needs.items() if need.commit} | found.lost_history
    is_known = not damaged and not found.problems  # else refs may mean more than was found
    return Checked(
        sorted(refs),
        len(meant & there.keys()),
        [problem for problem in problems if problem.key not in in_history],
        len(orphans) if is_known else None,
        sum(there[key] for key in orphans) if is_known else None,
        [problem for problem in problems if problem.key in in_history],
    )


class _Meant:
    """The keys that refs mean, with the refs, and the problems that are met on the way.

    Args:
        bucket, pages: of the remote. The cache may have what the bucket lacks.
        known: commits that were read before.
    """

    def __init__(self, bucket: Bucket, pages: PageCache, known: Mapping[bytes, Commit]) -> None:
        self._bucket = bucket
        self._cache = pages
        self._known = known
        self.commits: set[str] = set()
        self.pages: dict[str, str] = {}
        self.needs: dict[str, _Need] = {}
        self.problems: list[RemoteProblem] = []
        #: Keys of lost pages that only older commits need.
        self.lost_history: set[str] = set()
        self._reading = b""

    def _read(self, digest: bytes) -> bytes:
        self._reading = digest
        return self._cache.read(digest)

    def history(self, ref: str, newest: bytes) -> Iterator[tuple[bytes, Commit]]:
        """The commits of a ref, newest first. Ends where older ones were removed, and at a lost one."""
        at: bytes | None = newest
        after = None
        while at is not None:
            key = commit_key(at)
            try:
                commit = self._known.get(at) or commits.read_commit(self._bucket, at)
            except (RemoteUnreachableError, RemoteDeniedError):
                raise
            except (CorruptError, RemoteError) as error:
                is_missing = isinstance(error, RemoteMissingError)
                if is_missing and after is not None and was_cut(self._bucket, at, after):
                    return
                why = str(error) if not is_missing else _MISSING if after is None else _MISSING_BETWEEN
                self.problems.append(RemoteProblem(ref, key, why, ()))
                if not self._cache.has(at):
                    return
                commit = self._cache.commit(at)
            self.commits.add(key)
            yield at, commit
            at, after = commit.parent, at

    def add_next(self, ref: str, history: Iterator[tuple[bytes, Commit]], *, is_newest: bool) -> bool:
        """Add all that the next commit of a ref means; returns whether there is one."""
        found = next(history, None)
        if found is None:
            return False
        digest, commit = found
        tree = Tree(commit.tree, self._read, self._cache.expect)
        try:
            leaves = [leaf for leaf in tree.leaves() if page_key(leaf.page) not in self.pages]
            new = [key for key in map(page_key, tree.pages()) if key not in self.pages]
            self._cache.expect(leaf.page for leaf in leaves)
            for leaf in leaves:
                for row in tree.rows_of(leaf):
                    key = object_key(row.place.object, packed=row.place.is_packed)
                    need = self.needs.get(key)
                    if need is None:
                        digits = "" if is_newest else digest.hex()[:_DIGITS]
                        need = self.needs[key] = _Need(ref, digits, row.place.is_packed)
                    need.add(row)
            self.pages.update(dict.fromkeys(new, ref))
        except (RemoteUnreachableError, RemoteDeniedError):
            raise
        except (CorruptError, RemoteError) as error:
            key = page_key(self._reading)
            if all(problem.key != key for problem in self.problems):
                why = _MISSING if isinstance(error, RemoteMissingError) else str(error)
                if not is_newest:
                    why += f"; commit {digest.hex()[:_DIGITS]} of its history needs it"
                    self.lost_history.add(key)
                self.problems.append(RemoteProblem(ref, key, why, ()))
        return True


def _meant_by_results(bucket: Bucket) -> Iterator[str]:
    """The keys of shared results, and of their bytes."""
    for listed, record in read_records(bucket):
        if record is not None:
            yield listed.key
            yield record.object_key or listed.key


def _wrong_pages(there: dict[str, int], found: dict[str, str], cache: PageCache) -> Iterator[RemoteProblem]:
    """Pages that the bucket lacks, or has with another length than this store's cache."""
    for key, ref in found.items():
        size, right = there.get(key), cache.size(bytes.fromhex(key.removeprefix(TREES)))
        if size is None:
            yield RemoteProblem(ref, key, _MISSING, ())
        elif right is not None and size != right:
            yield RemoteProblem(ref, key, f"it has {size} bytes, and should have {right}", ())


def _missing(there: dict[str, int], needs: dict[str, _Need]) -> Iterator[RemoteProblem]:
    for key, need in needs.items():
        size = there.get(key)
        if size is None:
            yield need.problem(key, _MISSING)
        elif size < need.end or (not need.is_packed and size != need.end):
            yield need.problem(key, f"it has {size} bytes, and the tree needs {need.end}")


def _damage(bucket: Bucket, key: str) -> str | None:
    hasher = blake3()
    try:
        for piece in bucket.stream(key):
            hasher.update(piece)
    except RemoteMissingError:
        return _MISSING
    return None if hasher.hexdigest() == key.rpartition("/")[2] else "its bytes have another digest"
