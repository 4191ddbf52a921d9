"""No open is reported to the mount, yet no open file loses its bytes: gc asks, and the mount holds them."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import castore_fuse
from castore import Store
from castore.errors import StoreError
from castore.gc import mount_barrier
from castore.gc.mount_barrier import Listener, MountBarrier
from castore.objects.codecs import FRAME_SIZE
from castore.system.temporary import process_started
from castore_fuse import api, mountpoints
from castore_fuse.daemon import DaemonRecord
from castore_fuse.nodes import Lookups
from castore_fuse.operations import Operations
from castore_fuse.view import View
from tests.helpers import mixed, noise, text
from tests.mount.conftest import forget_pages, until

pytestmark = pytest.mark.usefixtures("forked_processes")

KINDS = {
    "zstd": (mixed(3 * FRAME_SIZE + 5), "zstd"),
    "raw": (noise(2 * FRAME_SIZE + 1, 3), "none"),
    "packed": (text(3000, 4), "zstd"),
}


def put_kinds(store: Store) -> None:
    for name, (data, codec) in KINDS.items():
        store.put(f"kinds/{name}", data, codec=codec)


# A daemon that looks for unlinked packs all the time, and not every few seconds.
_LOOKS_OFTEN = (
    "import sys\nfrom castore.objects import packs\nfrom castore_fuse.__main__ import main\n"
    "packs._UNLINKED_SECONDS = 0.0\nsys.exit(main())"
)


@pytest.fixture(params=["default", "pinned"])
def daemon(
    request: pytest.FixtureRequest, store: Store, mountpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[int]:
    """The process that serves ``mountpoint``."""
    command = api._command

    def one_that_looks_often(*given: Any) -> list[str]:
        python, _, _, *words = command(*given)
        return [python, "-c", _LOOKS_OFTEN, *words]

    with monkeypatch.context() as patch:
        patch.setattr(api, "_command", one_that_looks_often)
        castore_fuse.mount(store, mountpoint, pin=request.param == "pinned")
    record = DaemonRecord.read(next((store.path / "locks").glob("mount-*.json")))
    assert record is not None
    yield record.pid
    with contextlib.suppress(ProcessLookupError):
        os.kill(record.pid, signal.SIGCONT)
    castore_fuse.umount(mountpoint)


def removed_but_open(pid: int) -> list[str]:
    """Objects without a name that a process keeps alive by having them open."""
    found = []
    for entry in os.scandir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):
            found.append(os.readlink(entry.path))
    return [path for path in found if "/objects/" in path and path.endswith(" (deleted)")]


def test_file_that_is_open_and_was_never_read_keeps_its_bytes(
    daemon: int, store: Store, mountpoint: Path
) -> None:
    put_kinds(store)
    for listed in (False, True):  # the kernel knows a file from a look-up, or from a listing
        if listed:
            os.listdir(mountpoint / "kinds")
        with contextlib.ExitStack() as stack:
            held = {
                name: stack.enter_context((mountpoint / "kinds" / name).open("rb", buffering=0))
                for name in KINDS
            }
            store.put_many((f"kinds/{name}", b"other " + name.encode()) for name in KINDS)
            store.gc(max_size=0, grace=0)
            for name, file in held.items():
                assert file.read() == KINDS[name][0]
        put_kinds(store)


def test_bytes_are_freed_once_the_last_file_is_closed(daemon: int, store: Store, mountpoint: Path) -> None:
    put_kinds(store)
    path = mountpoint / "kinds" / "zstd"
    with path.open("rb", buffering=0) as file:
        file.read(10)
        store.delete("kinds/zstd")
        store.gc(grace=0)
        assert removed_but_open(daemon)
        assert file.read() == KINDS["zstd"][0][10:]
        assert removed_but_open(daemon)
    until(lambda: not removed_but_open(daemon))


def test_files_that_were_read_and_closed_hold_nothing(daemon: int, store: Store, mountpoint: Path) -> None:
    put_kinds(store)
    for name, (data, _) in KINDS.items():
        assert (mountpoint / "kinds" / name).read_bytes() == data
    store.delete_many([f"kinds/{name}" for name in KINDS])
    store.gc(grace=0)
    assert store.stat().blobs == 0
    until(lambda: not removed_but_open(daemon))


def test_file_that_is_open_by_its_digest_keeps_its_bytes_and_others_do_not(
    daemon: int, store: Store, mountpoint: Path
) -> None:
    one, other = mixed(2 * FRAME_SIZE, 1), mixed(2 * FRAME_SIZE, 2)
    digests = [store.put("one", one).digest, store.put("other", other).digest]
    paths = [mountpoint / ".castore" / "objects" / digest[:2] / digest for digest in digests]
    with paths[0].open("rb", buffering=0) as file:
        assert paths[1].stat().st_size == len(other)
        store.delete_many(["one", "other"])
        store.gc(grace=0)
        assert not paths[1].exists()
        assert file.read() == one
        until(lambda: len(removed_but_open(daemon)) == 1)


def test_mount_that_does_not_answer_keeps_its_bytes_and_gc_says_so(
    daemon: int, store: Store, mountpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = mixed(2 * FRAME_SIZE)
    store.put("name", data)
    with (mountpoint / "name").open("rb", buffering=0) as file:
        store.delete("name")
        os.kill(daemon, signal.SIGSTOP)
        until(lambda: Path(f"/proc/{daemon}/stat").read_text().rpartition(")")[2].split()[0] == "T")
        try:
            with monkeypatch.context() as patch:
                patch.setattr(mount_barrier, "ANSWER_SECONDS", 0.5)
                with pytest.raises(StoreError, match="does not answer"):
                    store.gc(grace=0)
        finally:
            os.kill(daemon, signal.SIGCONT)
        assert file.read() == data
        store.gc(grace=0)
        assert store.stat().blobs == 0
        forget_pages(file.fileno())
        assert os.pread(file.fileno(), len(data), 0) == data


def test_killed_mount_is_asked_nothing_and_leaves_no_socket(
    daemon: int, store: Store, mountpoint: Path
) -> None:
    put_kinds(store)
    assert list((store.path / "locks").glob("mount-*.sock"))
    os.kill(daemon, signal.SIGKILL)
    until(lambda: mountpoints.is_dead(mountpoint) and process_started(daemon) is None)
    store.delete_many([f"kinds/{name}" for name in KINDS])
    store.gc(grace=0)
    assert store.stat().blobs == 0

    def asked_again() -> bool:  # a killed process takes a moment to end
        MountBarrier(store.index, []).close()
        return not list((store.path / "locks").glob("mount-*.sock"))

    until(asked_again)
    castore_fuse.mount(store, mountpoint)  # for the fixture to unmount


def test_files_opened_at_any_moment_read_as_one_blob_while_names_move_and_gc_runs(
    daemon: int, store: Store, mountpoint: Path
) -> None:
    chance = random.Random(7)
    names = [f"d{number % 3}/{number}" for number in range(12)]
    sizes = [500, 5000, FRAME_SIZE + 3, 3 * FRAME_SIZE]

    def version(name: str, turn: int) -> bytes:
        size = sizes[hash((name, turn)) % len(sizes)]
        return f"{name}@{turn}|".encode() + noise(size, turn % 97)

    said: dict[bytes, bytes] = {}
    held: list[int] = []
    stop = threading.Event()

    def write() -> None:
        turn = 0
        while not stop.is_set():
            turn += 1
            name = names[turn % len(names)]
            data = version(name, turn)
            said[data.partition(b"|")[0]] = data
            store.put(name, data)
            if turn % 5 == 0:
                store.delete(names[turn // 5 % len(names)])
            if turn % 3 == 0:
                store.gc(max_size=2_000_000, grace=0)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        opened = 0
        while opened < 300:
            with contextlib.suppress(FileNotFoundError):
                held.append(os.open(mountpoint / chance.choice(names), os.O_RDONLY))
                opened += 1
            if len(held) > 15 or opened >= 300:
                descriptor = held.pop(chance.randrange(len(held)))
                if chance.random() < 0.5:
                    forget_pages(descriptor)
                data = os.pread(descriptor, 1 << 22, 0)
                assert data == said[data.partition(b"|")[0]]
                os.close(descriptor)
    finally:
        stop.set()
        writer.join()
        for descriptor in held:
            os.close(descriptor)


# --- the parts -------------------------------------------------------------------------------------


def test_bytes_that_got_a_name_since_the_mounts_were_asked_stay(store: Store) -> None:
    once, again = (bytes.fromhex(store.put(name, noise(5000, n)).digest) for n, name in enumerate("ab"))
    store.delete_many(["a", "b"])
    listener = Listener(store.path / "locks", 0o600)
    answering = threading.Thread(target=lambda: until(lambda: answer_all(listener)))
    answering.start()
    with contextlib.closing(MountBarrier(store.index, [once, again])) as asked:
        answering.join()
        store.put("c", noise(5000, 1))
        store.delete("c")
        with store.index.write():
            assert asked.still_unnamed() == [once]
    listener.close()


def test_bytes_that_had_a_name_when_the_mounts_were_asked_stay(store: Store) -> None:
    # Regression: gc chose a blob without a name; then the blob got a name, which mounts saw, so they held
    # nothing; then it lost that name before gc removed it.
    once, again = (bytes.fromhex(store.put(name, noise(5000, n)).digest) for n, name in enumerate("ab"))
    store.delete_many(["a", "b"])
    store.put("b", noise(5000, 1))
    listener = Listener(store.path / "locks", 0o600)
    answering = threading.Thread(target=lambda: until(lambda: answer_all(listener)))
    answering.start()
    with contextlib.closing(MountBarrier(store.index, [once, again])) as asked:
        answering.join()
        store.delete("b")
        with store.index.write():
            assert asked.still_unnamed() == [once]
    listener.close()


def answer_all(listener: Listener, failure: str = "") -> bool:
    waiting = listener.accept()
    listener.answer(waiting, failure)
    return bool(waiting)


def test_mount_that_cannot_hold_what_is_open_says_why(store: Store) -> None:
    listener = Listener(store.path / "locks", 0o600)
    answering = threading.Thread(target=lambda: until(lambda: answer_all(listener, "too many open files")))
    answering.start()
    with pytest.raises(StoreError, match="too many open files"):
        MountBarrier(store.index, [])
    answering.join()
    listener.close()


def test_sockets_work_below_paths_longer_than_their_addresses(tmp_path: Path) -> None:
    with Store(tmp_path / ("long" * 40)) as store:
        listener = Listener(store.path / "locks", 0o600)
        answering = threading.Thread(target=lambda: until(lambda: answer_all(listener)))
        answering.start()
        MountBarrier(store.index, []).close()
        answering.join()
        listener.close()


def test_lines_read_before_a_change_count_as_no_lookups(store: Store) -> None:
    store.put_many((f"{number:04}", b"old") for number in range(50))
    operations = Operations(View(store))

    def nodes_of(handle: int) -> list[int]:
        return [line.entry.node for line in operations.readdirplus(1, handle, 2)]

    before = operations.opendir(1).fh
    assert all(nodes_of(before))
    operations.lookups.settle()  # the follower's work when names change
    assert not any(nodes_of(before))
    assert all(nodes_of(operations.opendir(1).fh))


def test_lookups_under_way_are_waited_for() -> None:
    lookups = Lookups()
    lookups.begin()
    assert not lookups.settle(timeout=0.05)
    ending = threading.Timer(0.1, lookups._running.clear)
    ending.start()
    assert lookups.settle(timeout=60.0)


def test_file_in_use_is_known_to_gc_by_its_lookups(store: Store) -> None:
    store.put_many([("read", b"bytes"), ("listed", b"bytes")])
    operations = Operations(View(store))
    for name in (b"read", b"listed"):
        node = operations.lookup(1, name).node
        if name == b"read":
            operations.read(node, 0, 4096, 0)
    store.flush()
    touched = store.source._usage.touched
    touched.clear()
    operations.lookup(1, b"read")  # the kernel has its pages, and asks once an hour
    operations.lookup(1, b"listed")
    assert list(touched) == ["read"]
