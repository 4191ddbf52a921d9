"""Each crash window of a remote in docs/format.md: the process, the point where it dies, and the state then.

A table for test_crash_windows.py. A window's `killed` is the first column of its row in the page, `there`
checks the second column, and `done` says how much of the work the third column counts as done. Runs in a
process that has started no thread: each window forks it, and the child runs the code of the process that
dies.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from blake3 import blake3

from castore import Store
from castore.errors import RemoteError
from castore.index import places
from castore.index.journal import Journal
from castore.objects.dictionaries import Dictionaries
from castore.objects.directory import ObjectDirectory
from castore.objects.loose import LooseFolder
from castore.remote import (
    claims,
    collect,
    collection_state,
    commits,
    fetcher,
    fetcher_client,
    folder_bucket,
    marker,
    pull,
    transfer,
    warm,
)
from castore.remote.collection_state import CONDEMNED, DELETING, IDLE, read_state
from castore.remote.fetcher_client import FetcherClient
from castore.remote.folder_bucket import FolderBucket
from castore.remote.kept_bytes import PART_BYTES, Division
from castore.remote.keys import object_key, page_key
from castore.remote.messages import LOCK, SOCKET
from castore.remote.page_cache import PageCache
from castore.remote.pages import Row
from castore.remote.remote import Remote
from castore.remote.remote_tree import RemoteTree
from castore.remote.remotes import Remotes, RemoteSettings
from castore.remote.result_sharing import ResultSharing
from castore.remote.tree import Tree
from castore.repair import doctor
from castore.system import temporary as temporary_files
from castore.system.local_sockets import address
from castore.system.ram_cache import MemoryLRU
from castore.system.temporary import leftover_files
from castore.write.writer import BlobWriter
from tests.helpers import agrees_with_disk, flip, noise, object_files, records, text
from tests.mount.conftest import until
from tests.remote.nodes import ask_once, end_fetcher, fetchers
from tests.remote.test_kills import check_refs
from tests.torture.kills import Stop, after, before, killed
from tests.torture.windows import ahead, strays

DAY = 86_400.0
#: How much of its work the dead process has done, as the third column says it.
NOTHING, SOME, ALL = "nothing", "some", "all"

_SAMPLES = records(400, 1)
_RECORDS = dict(zip((f"rec/{number}" for number in range(6)), records(6, 2), strict=True))
#: Contents of `main` before: blobs in packs, some with a dictionary, of their own, and in parts.
BASE = {
    **{f"small/{number}": text(300, number) for number in range(6)},
    **_RECORDS,
    "large": noise(1_200_000, 1),
    "huge": noise((5 << 20) + 100, 2),
}
#: The blobs that a push brings, in addition or instead.
NEW = {"small/0": text(300, 10), "new/small": text(400, 11), "new/large": noise(1_300_000, 12)}

#: The folder of a window has the stores `one`, which pushes, and `two`, which reads, and the remote `bucket`.
Folder = Path
There = Callable[[Folder], bool]


class Task(NamedTuple):
    """The work of the process that dies.

    Attributes:
        act: runs until it dies.
        true: checks the page's third column, and the next run, given how much was done.
        ready: comes before, and ends.
        asks: the request of a reader to the process that dies, if it is a fetcher.
    """

    act: Callable[[Folder], object]
    true: Callable[[Folder, str], object]
    ready: Callable[[Folder], object] = lambda folder: None
    asks: Callable[[Folder], dict[str, Any]] | None = None


class Window(NamedTuple):
    """One way to die."""

    section: str
    killed: str
    task: Task
    stop: Stop
    there: There
    done: str


# The folder of a window


def make_template(folder: Folder) -> None:
    """A bucket with `BASE`, the store that pushed it, and an empty one."""
    _be_the_process_of_calls()
    marker.prepare(bucket(folder))
    for name in ("one", "two"):
        with opened(folder, name) as store:
            Remotes(store.path, store.settings).add(RemoteSettings("team", (folder / "bucket").as_uri()))
    with opened(folder, "one") as store:
        store.train_dictionary("rec", _SAMPLES)
        store.put_many(BASE.items())
        store.remote("team").push()


def _copy(template: Folder, folder: Folder) -> None:
    shutil.copytree(template, folder, symlinks=True)
    for path in folder.glob("*/remotes/team/remote.json"):
        path.write_text(path.read_text().replace(template.as_uri(), folder.as_uri()))


def _be_the_process_of_calls() -> None:
    """Do the calls of a remote in this process, which a stop can kill: the code is that of the process which
    castore starts for a call.
    """
    sys.argv = ["transfer", str(os.open(os.devnull, os.O_WRONLY))]

    def call(remote: Remote, call: str, arguments: dict[str, Any], progress: object = None) -> Any:
        request = {
            "store": str(remote._parts.path), "options": remote._options, "url": remote.url,
            "file_mode": remote._parts.settings.file_mode,
            "requests": None, "rate": None, "call": call, "arguments": arguments,
        }  # fmt: skip
        return json.loads(json.dumps(transfer._do(request)))

    # A lazy pull has the store's fetcher started beside it: that one would come between those of the windows.
    FetcherClient.prepare = lambda self, remote: None  # type: ignore[method-assign]
    Remote._call = call  # type: ignore[method-assign, assignment]


def opened(folder: Folder, name: str) -> Store:
    return Store(folder / name, memory=0)


def bucket(folder: Folder) -> FolderBucket:
    return FolderBucket(folder / "bucket")


def _in_child(task: Callable[[], object]) -> None:
    """Do something that starts threads, so that this process may go on forking."""
    child = os.fork()
    if not child:
        try:
            task()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, "see the traceback of the child"


def contents(store: Store) -> dict[str, bytes]:
    return {entry.name: store.get(entry.name) or b"a miss" for entry in store.entries()}


def age(path: Path, seconds: float) -> None:
    """Make everything below a folder older."""
    for file in path.rglob("*"):
        if file.is_file():
            before = file.stat().st_mtime - seconds
            os.utime(file, (before, before))


class Collected(NamedTuple):
    """Keys that a collection deleted, and that it condemned."""

    deleted: int
    condemned: int


def garbage(folder: Folder) -> Collected:
    """A collection without a grace period, by the store that pushed."""
    began = time.time()
    until(lambda: _file_time(folder) > began)  # else what was written a moment ago could be too young
    with opened(folder, "one") as store:
        done = store.remote("team")._call(
            "gc", {"keep_commits": 1, "grace": 0.0, "unused": None, "dry_run": False}
        )
    return Collected(done["deleted"], done["condemned"])


def _file_time(folder: Folder) -> float:
    """The time by the clock of files."""
    (folder / "clock").touch()
    return (folder / "clock").stat().st_mtime


def _keys(folder: Folder, prefix: str = "") -> set[str]:
    return {one.key for one in bucket(folder).listing(prefix)}


def is_mended(folder: Folder, name: str) -> None:
    """Assert that a store is sound, the remote too if the store writes to it, and that nothing is left."""
    with opened(folder, name) as store:
        agrees_with_disk(store)
    assert all(finding.mended for finding in doctor.examine(folder / name))
    assert doctor.examine(folder / name) == []
    if name == "two":
        return
    # An epoch that ends also removes what collections have left.
    with opened(folder, "one") as store:
        store.put("last", b"1")
        store.remote("team").push()
        age(folder / "bucket", DAY)
        assert garbage(folder).condemned
        assert garbage(folder).deleted
        checked = store.remote("team").check(deep=True)
    assert (checked.problems, checked.orphans) == ([], 0)
    assert _keys(folder, "gc/") - _keys(folder, collection_state.CUTS) <= {collection_state.STATE}
    assert list((folder / "bucket" / "tmp").iterdir()) == []


# Push


def _change(folder: Folder) -> None:
    with opened(folder, "one") as store:
        store.put_many(NEW.items())


def _push(folder: Folder) -> tuple[int, int, int]:
    with opened(folder, "one") as store:
        pushed = store.remote("team").push()
        assert Remotes(store.path, store.settings).base("team", "main", "") is not None
        return pushed.added, pushed.changed, pushed.sent


def _pushed(folder: Folder, done: str) -> None:
    with opened(folder, "one") as store:
        wanted = {entry.name: bytes.fromhex(entry.digest) for entry in store.entries()}
    # All that any ref means is there, in any case.
    assert (check_refs(bucket(folder)) == wanted) is (done == ALL)
    added, changed, sent = _push(folder)
    assert (added, changed) == ((0, 0) if done == ALL else (2, 1))
    if done == ALL:
        assert sent == 0
    assert check_refs(bucket(folder)) == wanted
    assert _push(folder) == (0, 0, 0)


def _pushed_and_edited(folder: Folder, done: str) -> None:
    """An edit of a name that the dead push brought is no conflict with that push, nor after another store's
    push on top of it.
    """
    with opened(folder, "two") as store:
        store.put("other", b"1")
        store.remote("team").push()
    with opened(folder, "one") as store:
        store.put("small/0", text(300, 20))
        wanted = {entry.name: bytes.fromhex(entry.digest) for entry in store.entries()}
    added, changed, _ = _push(folder)
    assert (added, changed) == ((0, 1) if done == ALL else (2, 1))
    assert check_refs(bucket(folder)) == {**wanted, "other": blake3(b"1").digest()}
    assert _push(folder) == (0, 0, 0)


def _files_below_tmp(folder: Folder) -> bool:
    return any((folder / "bucket" / "tmp").iterdir())


def _lacks(*prefixes: str) -> There:
    """Whether a push has left new keys, and none below these."""
    return lambda folder: (
        len(_keys(folder)) > len(_keys(folder.parent / "template"))
        and all(_keys(folder, one) == _keys(folder.parent / "template", one) for one in prefixes)
    )


def _ref_moved(folder: Folder) -> bool:
    return len(list((folder / "bucket/refs/main~").iterdir())) == 2


def _base(folder: Folder, name: str) -> str | None:
    found = [path.read_text() for path in (folder / name / "remotes/team").glob("main@" + "?" * 16)]
    return found[0] if found else None


def _is_noted(folder: Folder) -> bool:
    return len(list((folder / "one/remotes/team").glob("main@*.pending"))) == 1


def _has_begun(folder: Folder) -> bool:
    return len(list((folder / "two/remotes/team").glob("main@*.pulling"))) == 1


def _base_is(name: str, *, kept: bool) -> There:
    return lambda folder: (_base(folder, name) != _base(folder.parent / "template", name)) is kept


# Pull


def _pull(folder: Folder) -> int:
    pull._COMMIT = 4
    with opened(folder, "two") as store:
        return store.remote("team").pull().added


def _pulled(folder: Folder, done: str) -> None:
    with opened(folder, "two") as store:
        found = contents(store)
        assert found.items() <= BASE.items()
        assert _how_much(len(found), len(BASE)) == done
    assert _pull(folder) == len(BASE) - len(found)
    with opened(folder, "two") as store:
        assert contents(store) == BASE
    assert _base(folder, "two") is not None
    assert not _has_begun(folder)


def _how_much(found: int, of: int) -> str:
    return NOTHING if not found else ALL if found == of else SOME


def _in(name: str, is_there: Callable[[Store], bool]) -> There:
    def look(folder: Folder) -> bool:
        with opened(folder, name) as store:
            return is_there(store)

    return look


def _temporary_files(store: Store) -> bool:
    """Files in ``tmp/`` whose writer is gone, and nothing else."""
    return {stray.path.parent for stray in strays(store)} == {store.path / "tmp"} and not ahead(store)


def _pages(store: Store) -> bool:
    return not strays(store) and len(list((store.path / "pages").iterdir())) > 0


def _has_dictionary(store: Store) -> bool:
    return bool(store.objects.dictionaries.numbers())


def _no_files(store: Store) -> bool:
    """Whether nobody who is gone has left a temporary file."""
    return not list(leftover_files(store.path / "tmp"))


# Collections


def _shrink(folder: Folder) -> None:
    """A push after which most of the first commit's objects are garbage."""
    with opened(folder, "one") as store:
        store.delete_many(["huge", "large"])
        store.put_many(NEW.items())
        store.remote("team").push(delete=True)


def _condemn(folder: Folder) -> None:
    _shrink(folder)
    assert garbage(folder).condemned == _GARBAGE


#: The first commit, its page, and the objects of two blobs; its pack has blobs of the second commit, too.
_GARBAGE = 4


def _collect(folder: Folder) -> None:
    collect._BATCH = 1
    garbage(folder)


def _finding(folder: Folder, done: str) -> None:
    """Nothing is condemned: the next run begins at the beginning."""
    assert read_state(bucket(folder)).phase == IDLE
    _holds_what_is_kept(folder)
    assert garbage(folder) == (0, _GARBAGE)
    assert garbage(folder) == (_GARBAGE, 0)


def _condemned(folder: Folder, done: str) -> None:
    """A later run goes on."""
    _holds_what_is_kept(folder)
    assert garbage(folder) == (_GARBAGE, 0)


def _deleting(folder: Folder, done: str) -> None:
    state = read_state(bucket(folder))
    there = _keys(folder)
    gone = set(collection_state.read_list(bucket(folder), state)) - there
    assert _how_much(len(gone), _GARBAGE) == done
    _holds_what_is_kept(folder)
    for key in _keys(folder, "commits/"):  # nothing that a commit means goes before the commit
        commit = commits.read_commit(bucket(folder), bytes.fromhex(key.partition("/")[2]))
        assert f"trees/{commit.tree.hex()}" in there
        objects = {
            object_key(row.place.object, packed=row.place.is_packed) for row in _rows_of(folder, commit.tree)
        }
        assert objects <= there
    collection_state.WAIT_SECONDS = 0
    with pytest.raises(RemoteError, match="does not end"):
        _push_again(folder, "large")
    _push_again(folder, "unrelated")
    with pytest.raises(RemoteError, match="another collector deletes"):
        garbage(folder)
    age(folder / "bucket", collect.ABANDONED_SECONDS)
    assert garbage(folder).deleted == _GARBAGE - len(gone)
    assert read_state(bucket(folder)).phase in (IDLE, CONDEMNED)
    _push_again(folder, "large")


def _push_again(folder: Folder, name: str) -> None:
    """Push a blob from the other store, which knows nothing of the condemned keys."""
    data = BASE.get(name, b"nobody has it")
    with opened(folder, "two") as store:
        store.put(name, data)
        store.remote("team").push(name)
    assert check_refs(bucket(folder))[name] == blake3(data).digest()


def _ended(folder: Folder, done: str) -> None:
    assert read_state(bucket(folder)).phase == IDLE
    _holds_what_is_kept(folder)
    _push_again(folder, "large")


def _holds_what_is_kept(folder: Folder) -> None:
    """Assert that every name of the newest commit has its bytes."""
    with opened(folder, "one") as store:
        wanted = {entry.name: bytes.fromhex(entry.digest) for entry in store.entries()}
        assert not store.remote("team").check(deep=True).problems
    found = check_refs(bucket(folder))
    assert wanted.items() <= found.items()


def _phase(phase: str, lists: int) -> There:
    """The state, and objects of lists."""
    return lambda folder: (
        read_state(bucket(folder)).phase == phase and len(_keys(folder, "gc/condemned/")) == lists
    )


def _clock(folder: Folder) -> bool:
    return any(key.startswith("gc/clock-") for key in _keys(folder, "gc/"))


# Kept bytes


def _rows(folder: Folder) -> list[Row]:
    seen = commits.read_ref(bucket(folder), "main")
    assert seen is not None
    return _rows_of(folder, commits.read_commit(bucket(folder), seen.commit).tree)


def _rows_of(folder: Folder, tree: bytes) -> list[Row]:
    return list(Tree(tree, lambda digest: bucket(folder).get(page_key(digest)).data).rows())


def _asks_for_blobs(folder: Folder) -> dict[str, Any]:
    rows = [row for row in _rows(folder) if row.name != "huge"]
    return {"do": "blobs", "remote": "team", "rows": rows, "first": len(rows)}


def _asks_for_parts(folder: Folder) -> dict[str, Any]:
    [row] = [row for row in _rows(folder) if row.name == "huge"]
    parts = list(Division(row.place).parts)
    return {"do": "parts", "remote": "team", "digest": row.place.object, "parts": parts, "first": len(parts)}


def _asks_for_a_page(folder: Folder) -> dict[str, Any]:
    [key, *_] = sorted(_keys(folder, "trees/"))
    page = bytes.fromhex(key.partition("/")[2])
    return {"do": "pages", "remote": "team", "pages": [page], "first": 1}


def _says_goodbye(folder: Folder) -> dict[str, Any]:
    return {"do": "done"}


def _fetch(folder: Folder, batch: int = 2) -> None:
    """Be the fetcher of the second store."""
    sys.argv = ["fetcher", str(folder / "two")]
    fetcher._FIRST_BATCH = fetcher._BATCH = batch
    fetcher.DONE_SECONDS = 0.0
    # The fetcher forks to let its starter go on. This process was forked already, and the test waits for it.
    os.fork = lambda: 0
    fetcher.main()


def _kept(asked: Callable[[Folder], dict[str, Any]]) -> Callable[[Folder, str], None]:
    def true(folder: Folder, done: str) -> None:
        message = asked(folder)
        with opened(folder, "two") as store:
            wanted = len(message.get("rows", message.get("parts", "")))
            if wanted:
                assert _how_much(store.totals().entries, wanted) == done
            if done == ALL:
                with _without_objects(folder):  # the next request fetches nothing
                    FetcherClient(store.path).call(**message)
                end_fetcher(store)
        _reads_everything(folder)

    return true


@contextlib.contextmanager
def _without_objects(folder: Folder) -> Iterator[None]:
    """The bucket has no blobs for a while."""
    for name in ("packs", "objects"):
        (folder / "bucket" / name).rename(folder / name)
    yield
    for name in ("packs", "objects"):
        (folder / name).rename(folder / "bucket" / name)


def _reads_everything(folder: Folder) -> None:
    """A reader starts another fetcher, and gets all bytes."""
    _in_child(lambda: _read(folder))
    with opened(folder, "two") as store:
        end_fetcher(store)


def _read(folder: Folder) -> None:
    with opened(folder, "two") as store:
        tree = RemoteTree(store.parts, "team", "main", None)
        found = {row[0]: _bytes(tree, *row[:3]) for row in tree.files("", None, 0.0, 1000)}
        assert found == BASE
        until(lambda: len(fetchers(store)) == 1)  # others end as soon as they find that there is one
        tree.close()


def _bytes(tree: RemoteTree, name: str, digest: bytes, size: int) -> bytes:
    held = tree.open(name, digest, MemoryLRU(0, len))
    try:
        return b"".join(bytes(held.view(at, 1 << 20)) for at in range(0, size, 1 << 20))
    finally:
        held.close()


def _is_free(folder: Folder) -> bool:
    """Whether nobody has the fetcher's lock."""
    with open(folder / "two" / LOCK, "rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def _listens(folder: Folder) -> bool:
    with socket.socket(socket.AF_UNIX) as connection, address(folder / "two" / SOCKET) as short:
        return connection.connect_ex(short) == 0


def _socket(folder: Folder) -> bool:
    """Whether there is a socket that refuses, and nobody has the lock."""
    return (folder / "two" / SOCKET).exists() and not _listens(folder) and _is_free(folder)


def _no_socket(folder: Folder) -> bool:
    return _is_free(folder) and not (folder / "two" / SOCKET).exists()


def _both(*looks: There) -> There:
    return lambda folder: all(look(folder) for look in looks)


def _removed_by_doctor(store: Store) -> bool:
    """Whether `doctor` removes the dictionary, which nothing needs."""
    is_there = _has_dictionary(store)
    assert all(finding.mended for finding in doctor.examine(store.path))
    return is_there and not store.objects.dictionaries.numbers()


def _fetching(asked: Callable[[Folder], dict[str, Any]]) -> Task:
    return Task(_fetch, _kept(asked), asks=asked)


# Shared results


def _compute_and_offer(folder: Folder) -> None:
    """The steps of a node that computes, and of its fetcher, in one process."""
    shared = bucket(folder)
    with opened(folder, "two") as store, ThreadPoolExecutor(2) as pool:
        claim = claims.Claims(shared).take("computed")
        assert claim is not None
        store.put("computed", noise(200_000, 5))
        results = ResultSharing(store.parts, shared, "team", pool, store.writer.commit, renews=True)
        results.offer("computed", None)
        claim.release()


def _is_offered(folder: Folder) -> bool:
    with opened(folder, "one") as store, ThreadPoolExecutor(2) as pool:
        found = ResultSharing(store.parts, bucket(folder), "team", pool, store.writer.commit, renews=True)
        return found.find("computed", None).row is not None


def _offered(folder: Folder, done: str) -> None:
    assert _is_offered(folder) is (done == ALL)
    for _ in range(2):
        age(folder / "bucket", DAY)
        garbage(folder)
    assert _keys(folder, "claims/") == set()
    assert (_keys(folder, "packs/") > _keys(folder.parent / "template", "packs/")) is (done == ALL)
    _compute_and_offer(folder)
    assert _is_offered(folder)


def _has(*prefixes: str) -> There:
    """Whether there is something new below each of these folders of a computation, and not below others."""
    return lambda folder: all(
        (_keys(folder, one) > _keys(folder.parent / "template", one)) is (one in prefixes)
        for one in ("packs/", "keys/", "claims/")
    )


# Lazy reads


def _waits_no_more(folder: Folder, done: str) -> None:
    """The fetcher goes on without the reader, and keeps what comes."""
    with opened(folder, "two") as store:
        until(lambda: store.totals().entries > 0)
    _reads_everything(folder)


def _warm(folder: Folder) -> None:
    warm._ROWS = 2
    with opened(folder, "two") as store:
        store.remote("team").warm()


def _warm_again(folder: Folder, done: str) -> None:
    with opened(folder, "two") as store:
        until(lambda: store.totals().entries > 0)
        _in_child(lambda: store.remote("team").warm())
        end_fetcher(store)
    with _without_objects(folder):
        _reads_everything(folder)


def _damage_a_part(folder: Folder) -> None:
    _reads_everything(folder)
    with opened(folder, "two") as store:
        path = next(path for path in object_files(store) if path.stat().st_size == PART_BYTES)
    flip(path, PART_BYTES // 2)


def _in_quarantine(store: Store) -> bool:
    return len(list((store.path / "quarantine").iterdir())) == 1


# Names without bytes


def _pull_lazily(folder: Folder) -> int:
    pull._FIRST_PLANNED = 4
    with opened(folder, "two") as store:
        return store.remote("team").pull(lazy=True).added


def _named(folder: Folder, done: str) -> None:
    with opened(folder, "two") as store:
        found = {entry.name: entry.away for entry in store.entries()}
    assert _how_much(len(found), len(BASE)) == done
    assert all(found.values())
    assert _pull_lazily(folder) == len(BASE) - len(found)
    assert _base(folder, "two") is not None
    _gets_everything(folder, done)


def _gets_everything(folder: Folder, done: str) -> None:
    """All names are there, and the bytes that are away come when they are read."""
    with opened(folder, "two") as store:
        assert set(store) == set(BASE)
        _in_child(lambda: _get(folder))
        end_fetcher(store)


def _get(folder: Folder) -> None:
    with opened(folder, "two") as store:
        names = list(BASE)
        assert dict(zip(names, store.get_many(names), strict=True)) == BASE


def _here_again(folder: Folder, done: str) -> None:
    with opened(folder, "two") as store:
        here = [entry for entry in store.entries() if not entry.away]
        assert _how_much(len(here), len(BASE) - 1) == done  # the largest comes in parts
    _gets_everything(folder, done)


def _get_lazily(folder: Folder) -> None:
    _pull_lazily(folder)
    with opened(folder, "two") as store:
        _in_child(lambda: _get(folder))
        end_fetcher(store)


def _drop_bytes(folder: Folder) -> None:
    with opened(folder, "two") as store:
        store.gc(max_size=0, grace=0)


def _away(folder: Folder, done: str) -> None:
    with opened(folder, "two") as store:
        assert all(entry.away for entry in store.entries())
        assert store.gc(grace=0).leftovers
    _gets_everything(folder, done)


def _objects(store: Store) -> bool:
    """Whether there are objects that no row means."""
    return any(stray.digest is not None for stray in strays(store))


_pushing = Task(_push, _pushed, _change)
_pushing_before_an_edit = Task(_push, _pushed_and_edited, _change)
_pulling = Task(_pull, _pulled)
_blobs, _parts, _page = map(_fetching, (_asks_for_blobs, _asks_for_parts, _asks_for_a_page))
_ending = _fetching(_says_goodbye)
_starting = Task(_fetch, _kept(_says_goodbye))
_begins = Task(_collect, _finding, _shrink)
_goes_on = Task(_collect, _condemned, _shrink)
_deletes = Task(_collect, _deleting, _condemn)
_ends = Task(_collect, _ended, _condemn)
_reading = Task(_read, _waits_no_more)
_reading_damage = Task(_read, lambda folder, done: _reads_everything(folder), _damage_a_part)
_naming = Task(_pull_lazily, _named)
_bringing = Task(_fetch, _here_again, _pull_lazily, _asks_for_blobs)
_bringing_at_once = _bringing._replace(act=partial(_fetch, batch=100))
_dropping = Task(_drop_bytes, _away, _get_lazily)
_computing = Task(_compute_and_offer, _offered)
_warming = Task(_warm, _warm_again)


def _of(section: str, *rows: tuple[Any, ...]) -> list[Window]:
    """Windows of one section of the page."""
    return [Window(section, *row) for row in rows]


WINDOWS = [
    *_of(
        "Push",
        ("while it uploads", _pushing, after(FolderBucket, "_write"), _files_below_tmp, NOTHING),
        ("while it uploads", _pushing, after(FolderBucket, "upload"), _lacks("trees/", "commits/"), NOTHING),
        ("after the pages, before the commit", _pushing, before(commits, "encode_commit"), _lacks("commits/"),
        NOTHING),
        ("after the commit, before the next base is noted", _pushing, before(Remotes, "set_pending"),
        _lacks("refs/"), NOTHING),
        ("after the next base is noted, before the ref", _pushing, before(commits, "move_ref"),
        _both(_lacks("refs/"), _is_noted), NOTHING),
        ("after the next base is noted, before the ref", _pushing_before_an_edit,
        after(Remotes, "set_pending"), _both(_lacks("refs/"), _is_noted), NOTHING),
        ("after the ref, before the base is kept", _pushing, after(folder_bucket, "_links"),
        _both(_ref_moved, _files_below_tmp), ALL),
        ("after the ref, before the base is kept", _pushing_before_an_edit, before(Remotes, "set_base"),
        _both(_ref_moved, _base_is("one", kept=False), _is_noted), ALL),
        ("after that", _pushing, after(Remotes, "set_base"), _base_is("one", kept=True), ALL),
        ("after that", _pushing_before_an_edit, after(Remotes, "set_base"), _base_is("one", kept=True), ALL),
    ),
    *_of(
        "Pull",
        ("after the pull is noted, before the first blobs", _pulling, after(Remotes, "begin_pull"),
        _has_begun, NOTHING),
        ("while it fetches the first blobs", _pulling, after(temporary_files, "create_temporary"),
        _in("two", _temporary_files), NOTHING),
        ("while it fetches the first blobs", _pulling, after(PageCache, "keep"), _in("two", _pages), NOTHING),
        ("while it fetches the first blobs", _pulling, after(LooseFolder, "create"),
        _in("two", _temporary_files), NOTHING),
        ("after a dictionary that records need, before their commit", _pulling, after(Dictionaries, "add"),
        _in("two", _has_dictionary), NOTHING),
        ("within a commit", _pulling, after(Journal, "append"), _in("two", ahead), NOTHING),
        ("between two commits", _pulling, after(BlobWriter, "name", 2),
        _in("two", lambda store: not ahead(store)), SOME),
        ("after the last commit, before the base is kept", _pulling, before(Remotes, "set_base"),
        _both(_base_is("two", kept=False), _has_begun), ALL),
        ("after that", _pulling, after(Remotes, "set_base"), _base_is("two", kept=True), ALL),
    ),
    *_of(
        "Shared results",
        ("while a node computes", _computing, after(FolderBucket, "create"), _has("claims/"), NOTHING),
        ("after the bytes, before the record", _computing, before(FolderBucket, "create", 2),
        _has("claims/", "packs/"), NOTHING),
        ("after the record, before the claim is removed", _computing, before(FolderBucket, "delete"),
        _has("claims/", "packs/", "keys/"), ALL),
    ),
    *_of(
        "Collections",
        ("while it finds garbage", _begins, after(FolderBucket, "put"), _both(_phase(IDLE, 0), _clock),
        NOTHING),
        ("while it finds garbage", _begins, after(collect, "write_list"), _phase(IDLE, 1), NOTHING),
        ("while keys are condemned", _goes_on, after(collect, "write_state"), _phase(CONDEMNED, 1), NOTHING),
        ("while it deletes", _deletes, after(collect, "write_state"), _phase(DELETING, 1), NOTHING),
        ("while it deletes", _deletes, after(FolderBucket, "delete", 3), _phase(DELETING, 1), SOME),
        ("while it deletes", _deletes, before(collect, "write_state", 2), _phase(DELETING, 1), ALL),
        ("after it has ended, before the list is removed", _ends, after(collect, "write_state", 2),
        _phase(IDLE, 1), ALL),
    ),
    *_of(
        "Kept bytes",
        ("before it listens", _starting, before(fetcher, "Fetcher"), _no_socket, NOTHING),
        ("before it listens", _starting, after(fetcher, "give_to_owner"), _socket, NOTHING),
        ("while it fetches", _blobs, after(LooseFolder, "create"),
        _both(_socket, _in("two", _temporary_files)), NOTHING),
        ("while it fetches", _parts, before(BlobWriter, "commit"),
        _both(_socket, _in("two", _temporary_files)), NOTHING),
        ("while it fetches", _page, after(temporary_files, "create_temporary"),
        _both(_socket, _in("two", _temporary_files)), NOTHING),
        ("after a dictionary that records need, before their commit", _blobs, after(Dictionaries, "add"),
        _in("two", _removed_by_doctor), NOTHING),
        ("within a commit", _blobs, after(Journal, "append"), _in("two", ahead), NOTHING),
        ("between two commits of what came", _blobs, after(BlobWriter, "name", 2), _socket, SOME),
        ("between two commits of what came", _parts, after(BlobWriter, "name"), _socket, SOME),
        ("after the last commit, before its answer", _blobs, before(fetcher, "send"), _socket, ALL),
        ("after the last commit, before its answer", _parts, before(fetcher, "send"), _socket, ALL),
        ("with the socket still there", _starting, before(fetcher._Server, "_is_over"), _socket, NOTHING),
        ("after it has removed its socket", _ending, before(fetcher.Fetcher, "close"), _no_socket, NOTHING),
    ),
    *_of(
        "Names without bytes",
        ("within a commit of a lazy pull", _naming, after(Journal, "append"), _in("two", ahead), NOTHING),
        ("between two commits of a lazy pull", _naming, before(places, "record", 2), _in("two", _no_files),
        SOME),
        ("after the last commit of a lazy pull, before the base is kept", _naming,
        before(Remotes, "set_base"), _both(_base_is("two", kept=False), _has_begun), ALL),
        ("after bytes came, before their commit", _bringing_at_once, before(BlobWriter, "restore"),
        _in("two", _temporary_files), NOTHING),
        ("within their commit", _bringing_at_once, after(LooseFolder, "publish"), _in("two", _objects),
        NOTHING),
        ("between two commits of bytes", _bringing, after(BlobWriter, "restore", 2), _socket, SOME),
        ("after gc recorded that blobs are away, before it unlinks", _dropping,
        before(ObjectDirectory, "remove_loose"), _in("two", _objects), NOTHING),
    ),
    *_of(
        "Lazy reads",
        ("a reader, while it waits", _reading, after(fetcher_client, "send", 3), _in("two", _no_files), SOME),
        ("a reader, after it moved a damaged part, before the commit", _reading_damage,
        after(ObjectDirectory, "quarantine"), _in("two", _in_quarantine), SOME),
        ("`warm`, between two requests", _warming, before(warm, "_finish"), _in("two", _no_files), SOME),
    ),
]  # fmt: skip


@contextlib.contextmanager
def _asking(folder: Folder, task: Task) -> Iterator[None]:
    """A reader that asks the process which dies, once, and gets no answer."""
    if task.asks is None:
        yield
        return
    message = task.asks(folder)
    asker = os.fork()
    if not asker:
        with suppress(BaseException):
            until((folder / "two" / SOCKET).exists)
            os._exit(2 if _answer(folder, message) else 0)
        os._exit(1)
    yield
    assert os.waitstatus_to_exitcode(os.waitpid(asker, 0)[1]) == 0, "the reader got an answer"


def _answer(folder: Folder, message: dict[str, Any]) -> dict[str, Any] | None:
    while True:
        with suppress(ConnectionRefusedError):  # it does not listen yet
            return ask_once(folder / "two", message)


def dies_as_the_page_says(template: Folder, folder: Folder, number: int) -> None:
    """Kill a process in a window. Assert the page's statements, and that the next run goes on."""
    _be_the_process_of_calls()
    window = WINDOWS[number]
    task = window.task
    _copy(template, folder)
    task.ready(folder)
    with _asking(folder, task):
        killed(lambda: task.act(folder), window.stop)
    assert window.there(folder)
    task.true(folder, window.done)
    is_mended(folder, "one" if window.section in ("Push", "Collections") else "two")
