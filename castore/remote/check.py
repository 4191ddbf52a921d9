"""Checks that a bucket has all that its refs mean, and finds what no ref means.

Reads listings and trees: one request for each thousand objects. With ``deep`` it has every object read
(deep_check.py). Mends nothing: `push` does that, given the bad objects. A shared result that is damaged or
gone is no problem, because it is computed again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from concurrent.futures import Executor
from typing import NamedTuple

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
from castore.remote.deep_check import Claim, DeepCheck, claim_of
from castore.remote.keys import (
    COMMITS,
    DICTIONARIES,
    HINTS,
    RESULTS,
    TREES,
    commit_key,
    dictionary_key,
    hint_key,
    is_own,
    object_key,
    page_key,
    ref_key,
)
from castore.remote.outcomes import Checked, Progress, RemoteProblem
from castore.remote.page_cache import PageCache
from castore.remote.pages import Row
from castore.remote.result_records import read_records
from castore.remote.tree import Tree

_FOLDERS = ("objects/", "packs/", DICTIONARIES, TREES, COMMITS, HINTS, RESULTS)
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


class _At(NamedTuple):
    """A commit that means something: a ref with it, its digits ("" for the newest of the ref), its tree."""

    ref: str
    digits: str
    tree: bytes

    def problem(self, key: str, why: str, names: Iterable[str]) -> RemoteProblem:
        """The problem that an object is for this commit."""
        of = f"; commit {self.digits} of its history needs it" if self.digits else ""
        return RemoteProblem(self.ref, key, why + of, tuple(names))


class _Use:
    """The bytes of an object that a commit needs, and some of the names that it has there."""

    def __init__(self) -> None:
        self.end = 0
        self.names: list[str] = []

    def add(self, row: Row) -> None:
        """Take note of a name."""
        self.end = max(self.end, row.place.offset + row.place.stored)
        if len(self.names) < _NAMES and row.name not in self.names:
            self.names.append(row.name)


class _Need:
    """An object that commits need.

    Args:
        is_packed: whether the object is a pack.

    Attributes:
        uses: by the commits, in the order in which these were found: the newest ones of all refs first.
        claims: with ``deep``: what rows say of the blobs in it, and the first commit that has such a row.
    """

    def __init__(self, is_packed: bool) -> None:
        self.is_packed = is_packed
        self.uses: dict[_At, _Use] = defaultdict(_Use)
        self.claims: dict[Claim, _At] = {}

    @property
    def is_old(self) -> bool:
        """Whether only older commits need the object."""
        return bool(next(iter(self.uses)).digits)

    def problem(self, key: str, why: str) -> RemoteProblem:
        """The problem that the object is."""
        at, use = next(iter(self.uses.items()))
        return at.problem(key, why, use.names)

    def wrong_size(self, key: str, size: int) -> _Problem | None:
        """The problem that the object has another size than a commit needs: the first for which that is so.
        Either the object is damaged, or the tree lies.
        """
        for at, use in self.uses.items():
            if size < use.end or (not self.is_packed and size != use.end):
                why = f"it has {size} bytes, and the tree needs {use.end}"
                return _Problem(bool(at.digits), at.problem(key, why, use.names))
        return None


class _Problem(NamedTuple):
    """A problem, and whether it is one of older commits alone."""

    is_old: bool
    problem: RemoteProblem


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
    listed = (one for folder in _FOLDERS for one in bucket.listing(folder))
    there = {one.key: one.size for one in listed if is_own(one.key)}
    found = _Meant(bucket, pages, pages.whole_commits(key for key in there if key.startswith(COMMITS)), deep)
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
    problems = [*damaged, *lost, *found.problems, *_wrong_pages(there, found.pages, pages)]
    told = [_Problem(problem.key in found.lost_history, problem) for problem in problems]
    told += [
        _Problem(need.is_old, need.problem(key, _MISSING))
        for key, need in found.needs.items()
        if key not in there
    ]
    sizes = {
        key: wrong
        for key, need in found.needs.items()
        if key in there and (wrong := need.wrong_size(key, there[key])) is not None
    }
    if deep:
        told += _read_all(bucket, pool, there, found, {problem.key for problem in problems}, sizes, progress)
    told += sizes.values()
    hints = set(map(hint_key, refs))
    orphans = [key for key in there.keys() - meant - hints if not key.startswith(DICTIONARIES)]
    is_known = not damaged and not found.problems  # else refs may mean more than was found
    return Checked(
        sorted(refs),
        len(meant & there.keys()),
        [problem for is_old, problem in told if not is_old],
        len(orphans) if is_known else None,
        sum(there[key] for key in orphans) if is_known else None,
        [problem for is_old, problem in told if is_old],
    )


class _Meant:
    """The keys that refs mean, with the refs, and the problems that are met on the way.

    Args:
        bucket, pages: of the remote. The cache may have what the bucket lacks.
        known: commits that were read before.
        deep: keep what rows say of their blobs.
    """

    def __init__(self, bucket: Bucket, pages: PageCache, known: Mapping[bytes, Commit], deep: bool) -> None:
        self._bucket = bucket
        self._cache = pages
        self._known = known
        self._is_deep = deep
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
        at = _At(ref, "" if is_newest else digest.hex()[:_DIGITS], commit.tree)
        try:
            leaves = [leaf for leaf in tree.leaves() if page_key(leaf.page) not in self.pages]
            new = [key for key in map(page_key, tree.pages()) if key not in self.pages]
            self._cache.expect(leaf.page for leaf in leaves)
            for leaf in leaves:
                for row in tree.rows_of(leaf):
                    key = object_key(row.place.object, packed=row.place.is_packed)
                    need = self.needs.get(key)
                    if need is None:
                        need = self.needs[key] = _Need(row.place.is_packed)
                    need.uses[at].add(row)
                    if self._is_deep:
                        need.claims.setdefault(claim_of(row), at)
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

    def untrue(self, claims: Mapping[str, Iterable[Claim]]) -> Iterator[tuple[str, _At, int, list[str]]]:
        """Claims that are not so, by the keys of their objects: each key and commit that has some, how many,
        and some of the names.
        """
        false: dict[_At, dict[str, set[Claim]]] = defaultdict(lambda: defaultdict(set))
        for key, some in claims.items():
            for claim in some:
                false[self.needs[key].claims[claim]][key].add(claim)
        for at, by_key in false.items():
            names: dict[str, list[str]] = defaultdict(list)
            for row in Tree(at.tree, self._read, self._cache.expect).rows():
                key = object_key(row.place.object, packed=row.place.is_packed)
                if key in by_key and claim_of(row) in by_key[key] and len(names[key]) < _NAMES:
                    names[key].append(row.name)
            for key, some in by_key.items():
                yield key, at, len(some), names[key]


def _read_all(
    bucket: Bucket,
    pool: Executor,
    there: dict[str, int],
    found: _Meant,
    bad: Collection[str],
    sizes: dict[str, _Problem],
    progress: Progress,
) -> Iterator[_Problem]:
    """Read all objects that refs mean and that are there, but for pages that are bad, and yield the problems.

    Args:
        bad: keys of bad pages.
        sizes: problems of sizes, by key. Those of objects that are whole go: their trees lie.
    """
    deep = DeepCheck(bucket)
    keys = [key for key in (*found.pages, *found.needs) if key in there and key not in bad]
    done, total = 0, sum(there[key] for key in keys)
    claims = (found.needs[key].claims if key in found.needs else () for key in keys)
    untrue: dict[str, list[Claim]] = {}
    dictionaries: dict[str, RemoteProblem] = {}
    for key, damage in zip(keys, pool.map(deep.damage, keys, claims), strict=True):
        done += there[key]
        progress(done, total)
        need = found.needs.get(key)
        if need is None:
            if damage.why is not None:
                yield _Problem(False, RemoteProblem(found.pages[key], key, damage.why, ()))
            continue
        if damage.why is None:
            sizes.pop(key, None)
        elif key not in sizes:
            yield _Problem(need.is_old, need.problem(key, damage.why))
        if damage.untrue:
            untrue[key] = damage.untrue
        for number, why in damage.dictionaries.items():
            lost = dictionary_key(number)
            dictionaries.setdefault(lost, need.problem(lost, why))
    for problem in dictionaries.values():
        yield _Problem(False, problem)
    for key, at, count, names in found.untrue(untrue):
        why = f"the tree has another digest, size or frames for {count} of the blobs in it"
        yield _Problem(bool(at.digits), at.problem(key, why, names))


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
