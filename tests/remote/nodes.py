"""Nodes that know one remote, what it has, and what a node does with it. For tests of lazy reading."""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from castore import Remote, Store
from castore.remote import commits, marker
from castore.remote.bucket import Bucket
from castore.remote.keys import commit_key, page_key
from castore.remote.messages import SOCKET, receive, send
from castore.remote.pages import Row, digest_of, encode_leaf
from castore.remote.remotes import Remotes, RemoteSettings
from castore.remote.urls import open_bucket
from castore.system.local_sockets import address
from castore.system.temporary import is_running
from tests.helpers import noise, text
from tests.mount.conftest import until

#: Contents of every kind: in packs, of their own, in parts, empty, raw, deep.
CONTENTS = (
    {f"small/{number:03d}": text(3000, number) for number in range(200)}
    | {f"deep/{number}/a/b/c": noise(50, number) for number in range(20)}
    | {
        "empty": b"",
        "one": b"1",
        "middle": noise(2 << 20),
        "large": noise(8 << 20, 7),
        "dup": noise(2 << 20),
    }
    | {"text": noise(2 << 20, 3).hex().encode()}
)


def know(store: Store, name: str, url: str, *, read_only: bool = False, rate: int | None = None) -> Remote:
    """Let a store know a remote, as `Store.add_remote` does.

    No process tries the place out, which takes longer than many a test. A folder becomes a remote here, and
    in a bucket there must be one.
    """
    if url.startswith("file:"):
        marker.prepare(open_bucket(url), create=not read_only)
    Remotes(store.path, store.settings).add(RemoteSettings(name, url, read_only, rate=rate))
    return store.remote(name)


def move(store: Store, name: str, url: str) -> None:
    """Let a store find a remote at another URL, and keep its knowledge of the remote.

    Castore itself offers no such thing.
    """
    described = store.path / "remotes" / name / "remote.json"
    described.write_text(json.dumps(json.loads(described.read_bytes()) | {"url": url}))


def forget_carried(bucket: Path) -> None:
    """Have refs in a folder carry nothing and no hints beside them, as those of large trees do."""
    for path in (bucket / "hints").iterdir():
        path.unlink()
    for path in (bucket / "refs").glob("*~/*"):
        fields = json.loads(path.read_bytes())
        kept = {key: value for key, value in fields.items() if not key.endswith("_bytes")}
        assert len(kept) < len(fields)
        path.write_text(json.dumps(kept))


def put_tree(bucket: Bucket, rows: list[Row], ref: str) -> None:
    """Have a ref with these rows, whatever they say."""
    page = encode_leaf(rows)
    bucket.put(page_key(digest_of(page)), page)
    commit = commits.encode_commit(
        commits.Commit(digest_of(page), None, time.time(), "somebody", "", len(rows), 1)
    )
    bucket.put(commit_key(digest_of(commit)), commit)
    assert commits.move_ref(bucket, ref, commits.read_ref(bucket, ref), digest_of(commit), time.time())


@contextmanager
def node(path: Path, url: str, **options: object) -> Iterator[Store]:
    """A store that knows the remote, and that no process uses at the end."""
    with Store(path, **options) as store:  # type: ignore[arg-type]
        know(store, "team", url, read_only=True)
        try:
            yield store
        finally:
            end_fetcher(store)


def fetchers(store: Store) -> list[int]:
    """The processes that fetch for a store."""
    words = b"castore.remote.fetcher\0" + os.fsencode(store.path) + b"\0"
    found = []
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            if entry.name.isdigit() and words in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
    return found


@contextmanager
def several_nodes(folder: Path, count: int = 4) -> Iterator[None]:
    """Make the stores `node0`, `node1`, … of nodes that know one remote, `team`, and end their fetchers."""
    stores = [Store(folder / f"node{number}") for number in range(count)]
    for store in stores:
        know(store, "team", (folder / "bucket").as_uri())
    try:
        yield
    finally:
        for store in stores:
            store.close()
            end_fetcher(store)


def end_fetcher(store: Store) -> None:
    for pid in fetchers(store):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        until(lambda pid=pid: not is_running(pid))  # type: ignore[misc]


def ask_once(store: Path, message: dict[str, Any]) -> dict[str, Any] | None:
    """The answer of the fetcher that listens, or None if it ends without one."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        with address(store / SOCKET) as short:
            connection.connect(short)
        with suppress(BrokenPipeError, ConnectionResetError):
            send(connection, message)
            return receive(connection)
    return None


def read(root: Path) -> dict[str, bytes]:
    """All files below a mount."""
    return {
        path.relative_to(root).as_posix(): path.read_bytes() for path in root.rglob("*") if path.is_file()
    }


def fails(use: Callable[[], object]) -> bool:
    """Whether bytes that cannot be had are an I/O error, as the kernel tells it."""
    try:
        use()
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        return True
    return False


def here(path: Path) -> int:
    """Stored bytes of a file that the store keeps."""
    return int(os.getxattr(path, "user.castore.here"))
