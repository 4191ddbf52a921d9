"""Nodes of one remote, as processes of one machine: they push, pull, mount, warm and collect, and are killed.

Each node is a store of its own. An actor is a process that works on a node until it is told to end, and
writes down what was acknowledged, a line a time. Actors whose work is quick rest a little, since others need
the cores. The parent kills actors and the processes that they have started, and starts killed actors again.
It ends as soon as enough of everything was seen.
"""

from __future__ import annotations

import errno
import json
import os
import random
import signal
import sys
import time
import traceback
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from blake3 import blake3

import castore_fuse
from castore import Store
from castore.errors import ConflictError, RemoteError, RemoteMissingError
from castore.remote import collect, transfer
from castore.remote.fetcher_client import FetcherClient
from castore.remote.remotes import Remotes, RemoteSettings
from castore.repair import doctor
from castore_fuse import MountError
from tests.helpers import agrees_with_disk, noise
from tests.mount.conftest import forget_pages, until
from tests.remote.nodes import end_fetcher

#: Roles of nodes, in the order in which a crowd gets them. The first node's store also collects.
ROLES = ("pusher", "mount", "pusher", "puller", "lazy puller", "mount", "puller", "pusher")
#: Names of a pusher, and their sizes: in packs, and of their own. The last one is read in parts.
_NAMES = 6
_SIZES = [200, 3_000, 40_000, 1_200_000, 500, 5_000_000]
#: A name that all pushers change.
SHARED = "shared/0"
#: Errors of reads through a mount whose daemon was killed, or whose commit is so old that its bytes are gone.
_DEAD = {errno.ENOTCONN, errno.ECONNABORTED, errno.EIO, errno.ENOENT}
#: Actors that run long enough to be killed again and again.
_WORK = ("pushed", "merged", "pulled", "pulled lazily", "collected")
KILLS = ("pusher", "transfer", "fetcher", "daemon", "reader", "collector")


def value(name: str, version: int) -> bytes:
    """The value of a name in a version."""
    head = f"{name} {version} ".encode()
    size = _SIZES[int(name.rpartition("/")[2])]
    body = noise(size, zlib.crc32(head))
    return head + blake3(body).digest() + body


def version_of(name: str, data: bytes) -> int:
    """The version of a name's value, whose bytes must be those of `value`."""
    said, number, rest = data.split(b" ", 2)
    assert said.decode() == name, f"{name} has the bytes of {said!r}"
    assert blake3(rest[32:]).digest() == rest[:32], f"{name} has wrong bytes"
    return int(number)


class Place(NamedTuple):
    """Where a crowd works.

    Attributes:
        folder: has the nodes, their logs, and `over` once all are to end.
        url: of the remote.
        nodes: how many there are.
        grace: seconds that the collector waits.
    """

    folder: Path
    url: str
    nodes: int
    grace: float

    def is_over(self) -> bool:
        return (self.folder / "over").exists()

    def node(self, number: int) -> Path:
        return self.folder / f"node{number}"

    def log(self, number: int, what: str, **fields: Any) -> None:
        """Write down what was done. A line is whole or absent, also if its writer is killed."""
        line = json.dumps({"what": what, "node": number, "at": time.monotonic(), **fields}) + "\n"
        fd = os.open(self.folder / "log", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        os.write(fd, line.encode())
        os.close(fd)

    def events(self) -> list[dict[str, Any]]:
        with suppress(FileNotFoundError):
            return [json.loads(line) for line in (self.folder / "log").read_bytes().splitlines()]
        return []


# Actors


def _push(place: Place, number: int, chance: random.Random) -> None:
    """Give names new values, and push them."""
    with Store(place.node(number), memory=0) as store:
        names = [f"p{number}/{one}" for one in range(_NAMES)]
        team = store.remote("team")
        while not place.is_over():
            for name in [*chance.sample(names, 2), *[SHARED] * (chance.random() < 0.3)]:
                store.put(name, value(name, _version(store, name) + 1))
            if chance.random() < 0.5:  # bytes that the remote has had, and that may be condemned
                store.put(f"again{number}/3", value(f"again{number}/3", chance.randrange(1, 4)))
            versions = {name: found for name in [*names, SHARED] if (found := _version(store, name))}
            try:
                team.push()
                place.log(number, "pushed", versions=versions)
            except ConflictError:
                _take_theirs(place, number, store)
            except RemoteError as error:
                place.log(number, "interrupted", why=str(error))
            if chance.random() < 0.1:
                store.gc(grace=0)


def _take_theirs(place: Place, number: int, store: Store) -> None:
    try:
        store.remote("team").pull(replace=True)
        place.log(number, "merged")
    except RemoteError as error:
        place.log(number, "interrupted", why=str(error))


def _version(store: Store, name: str) -> int:
    """The version of a name, whose bytes must be right; 0 if there is none."""
    data = store.get(name)
    return 0 if data is None else version_of(name, data)


def _pull(place: Place, number: int, chance: random.Random) -> None:
    """Pull all there is, and read it."""
    with Store(place.node(number), memory=0) as store:
        while not place.is_over():
            try:
                store.remote("team").pull()
                place.log(number, "pulled")
            except ConflictError:  # of a node that edits nothing
                raise
            except RemoteMissingError as error:
                place.log(number, "overtaken", why=str(error))
                _check_newest(store)
            except RemoteError as error:
                place.log(number, "interrupted", why=str(error))
            for name in store:
                assert _version(store, name) > 0
            if chance.random() < 0.2:
                store.gc(grace=0)


def _check_newest(store: Store) -> None:
    """Check that a pull which found something missing was of a commit that is not the newest any more."""
    team = store.remote("team")
    with suppress(RemoteError):  # killed, too
        newest = team.log(limit=1)
        try:
            team.pull()
            return
        except RemoteMissingError as error:
            why = str(error)
        assert team.log(limit=1) != newest, f"the newest commit is not whole: {why}"


def _pull_lazily(place: Place, number: int, chance: random.Random) -> None:
    """Pull names, and have their bytes fetched by reading them, until the store's gc drops them."""
    with Store(place.node(number), memory=0) as store:
        while not place.is_over():
            try:
                store.remote("team").pull(lazy=True)
                place.log(number, "pulled lazily")
                for name in chance.sample(sorted(store), min(4, len(store))):
                    # Bytes of a commit that is not kept are a miss once they were collected.
                    place.log(number, "got" if _version(store, name) else "missed")
            except ConflictError:  # of a node that edits nothing
                raise
            except RemoteError as error:
                place.log(number, "interrupted", why=str(error))
            if chance.random() < 0.3:
                store.gc(max_size=0, grace=0)


def _mount(place: Place, number: int, chance: random.Random) -> None:
    """Read files of a mount that follows, and mount again when its daemon was killed."""
    root = place.folder / f"mnt{number}"
    root.mkdir(exist_ok=True)
    while not place.is_over():
        try:
            castore_fuse.mount(place.node(number), root, remote="team", follow=True)
        except MountError as error:
            place.log(number, "not mounted", why=str(error))
            continue
        place.log(number, "mounted")
        while not place.is_over() and _reads(place, number, root, chance):
            pass
    castore_fuse.umount(root)


def _reads(place: Place, number: int, root: Path, chance: random.Random) -> bool:
    """Read a file; False if the daemon is dead."""
    try:
        folder = chance.choice(sorted(os.listdir(root)))
        one = chance.choice(sorted(os.listdir(root / folder)))
        with open(root / folder / one, "rb") as file:
            forget_pages(file.fileno())
            data = file.read()
        version_of(f"{folder}/{one}", data)
        place.log(number, "read")
        time.sleep(0.02)
    except OSError as error:
        if error.errno not in _DEAD:
            raise
        place.log(number, "failed", why=str(error))
        return error.errno not in (errno.ENOTCONN, errno.ECONNABORTED)
    return True


def _warm(place: Place, number: int, chance: random.Random) -> None:
    """Have fetched what a mount of the node reads, until the store's gc drops it."""
    with Store(place.node(number), memory=0) as store:
        while not place.is_over():
            try:
                store.remote("team").warm()
                place.log(number, "warmed")
            except RemoteError as error:
                place.log(number, "interrupted", why=str(error))
            store.gc(max_size=0, grace=0)
            time.sleep(0.2)


def _collect(place: Place, number: int, chance: random.Random) -> None:
    """Collect the remote's garbage. The grace period is shorter than a user can have it."""
    while not place.is_over():
        try:
            done = _collect_once(place, number, place.grace)
            if done["deleted"]:
                place.log(number, "collected", deleted=done["deleted"])
        except RemoteError as error:
            place.log(number, "not collected", why=str(error))
        time.sleep(0.1)


def _collect_once(place: Place, number: int, grace: float) -> Any:
    """Do what the process of `castore remote gc` does, in this one."""
    collect.ABANDONED_SECONDS = grace
    sys.argv = ["transfer", str(os.open(os.devnull, os.O_WRONLY))]
    request = {
        "store": str(place.node(number)), "options": {"max_size": None, "durable": False}, "url": place.url,
        "requests": None, "rate": None, "call": "gc",
        "arguments": {"keep_commits": 1, "grace": grace, "unused": None, "dry_run": False},
    }  # fmt: skip
    return transfer._do(request)


_ACTORS: dict[str, Callable[[Place, int, random.Random], None]] = {
    "pusher": _push,
    "puller": _pull,
    "lazy puller": _pull_lazily,
    "mount": _mount,
    "warmer": _warm,
    "collector": _collect,
}


class _Actor(NamedTuple):
    role: str
    node: int
    pid: int


def _start(place: Place, role: str, node: int, seed: int) -> _Actor:
    pid = os.fork()
    if not pid:
        try:
            _ACTORS[role](place, node, random.Random(seed))
            os._exit(0)
        except BaseException:
            (place.folder / f"failed-{role}{node}").write_text(traceback.format_exc())
        finally:
            os._exit(1)
    return _Actor(role, node, pid)


# The parent


def crowd(place: Place, enough: Callable[[Counter[str]], bool], seed: int = 1) -> Counter[str]:
    """Let a crowd work until it was seen to do enough. Then check that nothing is lost, wrong or left behind.

    Args:
        enough: gets how often each event was seen, and each kind of kill, "killed …".
    """
    chance = random.Random(seed)
    roles = [(role, node) for node, role in enumerate(ROLES[: place.nodes])]
    roles += [("warmer", node) for role, node in roles if role == "mount"]
    _make_nodes(place)
    actors = [
        _start(place, role, node, number) for number, (role, node) in enumerate([*roles, ("collector", 0)])
    ]
    killed: Counter[str] = Counter()
    try:
        while not enough(seen := _counts(place) + killed):
            _wait_for_work(place, chance.randrange(1, 3))
            kind = min(KILLS, key=lambda kind: (seen[f"killed {kind}"], chance.random()))
            if _kill(place, actors, kind, chance):
                killed[f"killed {kind}"] += 1
            actors = [_again(place, actor, chance) for actor in actors]
        (place.folder / "over").touch()
        for actor in actors:
            _, status = os.waitpid(actor.pid, 0)
            assert os.waitstatus_to_exitcode(status) in (0, -signal.SIGKILL), _failures(place)
    except BaseException:
        for actor in actors:
            with suppress(ProcessLookupError, ChildProcessError):
                os.kill(actor.pid, signal.SIGKILL)
                os.waitpid(actor.pid, 0)
        for root in place.folder.glob("mnt*"):
            with suppress(MountError):
                castore_fuse.umount(root)
        raise
    _check(place)
    return seen


def _make_nodes(place: Place) -> None:
    with Store(place.node(0), memory=0) as first:
        first.put(SHARED, value(SHARED, 1))
        first.add_remote("team", place.url).push()
    for number in range(1, place.nodes):
        with Store(place.node(number), memory=0) as store:
            Remotes(store.path, store.settings).add(RemoteSettings("team", place.url))


def _counts(place: Place) -> Counter[str]:
    return Counter(event["what"] for event in place.events())


def _wait_for_work(place: Place, more: int) -> None:
    """Wait until some pieces of work have ended well, so that kills keep nobody from coming to an end."""

    def done() -> int:
        assert not list(place.folder.glob("failed-*")), _failures(place)
        counts = _counts(place)
        return sum(counts[what] for what in _WORK)

    before = done()

    def is_done() -> bool:
        return done() >= before + more

    until(is_done, 200)


def _failures(place: Place) -> str:
    return "\n".join(path.read_text() for path in place.folder.glob("failed-*"))


def _kill(place: Place, actors: list[_Actor], kind: str, chance: random.Random) -> bool:
    """SIGKILL for one process of a kind; whether there was one."""
    if kind in ("pusher", "collector"):
        found = [actor.pid for actor in actors if actor.role == kind]
    elif kind == "reader":
        found = [actor.pid for actor in actors if actor.role in ("puller", "lazy puller", "warmer")]
    elif kind == "transfer":
        found = [
            child
            for actor in actors
            for child in _children(actor.pid)
            if _is(child, b"castore.remote.transfer")
        ]
    else:
        word = {"fetcher": b"castore.remote.fetcher", "daemon": b"castore_fuse"}[kind]
        found = [pid for pid in _helpers(place) if _is(pid, word)]
    if not found:
        return False
    with suppress(ProcessLookupError):
        os.kill(chance.choice(found), signal.SIGKILL)
    return True


def _children(pid: int) -> list[int]:
    with suppress(FileNotFoundError, ProcessLookupError):
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def _is(pid: int, word: bytes) -> bool:
    with suppress(FileNotFoundError, ProcessLookupError):
        return word in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def _helpers(place: Place) -> Iterator[int]:
    """The processes that were started for a node, and outlive who started them."""
    for entry in Path("/proc").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):
            if entry.name.isdigit() and os.fsencode(place.folder) in (entry / "cmdline").read_bytes():
                yield int(entry.name)


def _again(place: Place, actor: _Actor, chance: random.Random) -> _Actor:
    """The actor, or the one in its place if it was killed."""
    pid, status = os.waitpid(actor.pid, os.WNOHANG)
    if not pid:
        return actor
    assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL, _failures(place)
    return _start(place, actor.role, actor.node, chance.randrange(1 << 30))


def _check(place: Place) -> None:
    """Assert that what was acknowledged is there and whole, and that nothing is left behind."""
    acknowledged: dict[str, int] = {}
    for event in place.events():
        for name, version in event.get("versions", {}).items():
            acknowledged[name] = max(version, acknowledged.get(name, 0))
    for number in range(place.nodes):
        FetcherClient(place.node(number)).done()  # a killed reader has not said it
    until(lambda: not list(_helpers(place)))
    with Store(place.folder / "last", memory=0) as last:
        team = last.add_remote("team", place.url)
        team.pull()
        found = {name: _version(last, name) for name in last}
        assert all(found[name] >= version for name, version in acknowledged.items()), (found, acknowledged)
        while _collect_once(place, 0, 0.0)["condemned"]:
            pass
        checked = team.check(deep=True)
        assert (checked.problems, checked.orphans) == ([], 0)
    for number in range(place.nodes):
        with Store(place.node(number), memory=0) as store:
            if any(entry.away for entry in store.entries()):
                store.remote("team").pull(lazy=True)  # to where the bytes are now
            for name in store:
                assert _version(store, name) > 0
            end_fetcher(store)
            agrees_with_disk(store)
        assert all(finding.mended for finding in doctor.examine(place.node(number)))
        assert doctor.examine(place.node(number)) == []
