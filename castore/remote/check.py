"""Checks that a bucket has all that its refs mean, and finds what no ref means.

Reads listings and trees: one request for each thousand objects. With ``deep`` it reads every object, and
compares its bytes with its name. Mends nothing: `push` does that, given the bad objects. A shared result that
is damaged or gone is no problem, because it is computed again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import Executor

from blake3 import blake3

from castore.errors import CorruptError, RemoteError, RemoteMissingError
from castore.remote import commits, marker
from castore.remote.bucket import Bucket
from castore.remote.keys import COMMITS, RESULTS, TREES, commit_key, object_key, page_key
from castore.remote.outcomes import Checked, Progress, RemoteProblem
from castore.remote.page_cache import PageCache
from castore.remote.pages import Row
from castore.remote.result_records import read_records
from castore.remote.tree import Tree

_FOLDERS = ("objects/", "packs/", "dicts/", TREES, COMMITS, RESULTS)
# Names of a bad object that a problem lists.
_NAMES = 5


def check(bucket: Bucket, pages: PageCache, pool: Executor, *, deep: bool, progress: Progress) -> Checked:
    """Check all refs of a bucket.

    Args:
        pool: reads objects side by side.
        deep: read every object that a ref means.
        progress: called with the bytes that were read so, and those of all such objects.

    Raises:
        RemoteError: the place is no remote, or cannot be used.
    """
    marker.check(bucket)
    # Refs first: what a push adds meanwhile is in the listing, and is not missed.
    refs = {ref: commits.read_ref(bucket, ref) for ref in commits.list_refs(bucket)}
    there = {listed.key: listed.size for folder in _FOLDERS for listed in bucket.listing(folder)}
    problems: list[RemoteProblem] = []
    meant: set[str] = set()
    pages_of: dict[str, str] = {}
    users: dict[str, list[tuple[str, Row]]] = defaultdict(list)
    for ref, seen in refs.items():
        if seen is None:
            continue
        try:
            for number, (digest, commit) in enumerate(commits.history(bucket, seen.commit)):
                meant.add(commit_key(digest))
                tree = Tree(commit.tree, pages.read, pages.expect)  # the cache may have what the bucket lacks
                pages_of.update((page_key(page), ref) for page in tree.pages())
                for row in tree.rows():
                    key = object_key(row.place.object, packed=row.place.is_packed)
                    meant.add(key)
                    if number == 0:
                        users[key].append((ref, row))
        except (CorruptError, RemoteError) as error:
            problems.append(RemoteProblem(ref, None, str(error), ()))
    meant |= pages_of.keys()
    meant.update(_meant_by_results(bucket))
    problems += [
        RemoteProblem(ref, key, "it is missing", ()) for key, ref in pages_of.items() if key not in there
    ]
    problems += _missing(there, users)
    if deep:
        bad = {problem.key for problem in problems}
        keys = [key for key in (*pages_of, *users) if key not in bad]
        done, total = 0, sum(there[key] for key in keys)
        for key, why in zip(keys, pool.map(lambda key: _damage(bucket, key), keys), strict=True):
            done += there[key]
            progress(done, total)
            if why is not None and key in pages_of:
                problems.append(RemoteProblem(pages_of[key], key, why, ()))
            elif why is not None:
                problems.append(_problem(key, why, users[key]))
    orphans = [key for key in there if key not in meant and not key.startswith("dicts/")]
    return Checked(
        sorted(refs), len(meant & there.keys()), problems, len(orphans), sum(there[key] for key in orphans)
    )


def _meant_by_results(bucket: Bucket) -> Iterator[str]:
    """The keys of shared results, and of their bytes."""
    for listed, record in read_records(bucket):
        if record is not None:
            yield listed.key
            yield record.object_key or listed.key


def _missing(there: dict[str, int], users: dict[str, list[tuple[str, Row]]]) -> Iterator[RemoteProblem]:
    for key, rows in users.items():
        size = there.get(key)
        need = max(row.place.offset + row.place.stored for _, row in rows)
        if size is None:
            yield _problem(key, "it is missing", rows)
        elif size < need or (not rows[0][1].place.is_packed and size != need):
            yield _problem(key, f"it has {size} bytes, and the tree needs {need}", rows)


def _problem(key: str, why: str, rows: list[tuple[str, Row]]) -> RemoteProblem:
    return RemoteProblem(rows[0][0], key, why, tuple(row.name for _, row in rows[:_NAMES]))


def _damage(bucket: Bucket, key: str) -> str | None:
    hasher = blake3()
    try:
        for piece in bucket.stream(key):
            hasher.update(piece)
    except RemoteMissingError:
        return "it is missing"
    return None if hasher.hexdigest() == key.rpartition("/")[2] else "its bytes have another digest"
