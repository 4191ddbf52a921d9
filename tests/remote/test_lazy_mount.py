"""A remote is mounted before it is here: names at once; bytes when they are read, checked, in the budget."""

from __future__ import annotations

import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import castore_fuse
from castore import Store
from castore.errors import CorruptError, InvalidValueError, NotFoundError, RemoteError, RemoteMissingError
from castore.remote.fetcher_client import FetcherClient
from castore.remote.messages import SOCKET
from castore.remote.pages import FRAME
from castore.system.local_sockets import address
from castore_fuse import MountError
from tests.helpers import agrees_with_disk, flip, in_processes, noise
from tests.mount.conftest import forget_pages, until
from tests.remote.nodes import (
    CONTENTS,
    ask_once,
    end_fetcher,
    fails,
    fetchers,
    forget_carried,
    here,
    know,
    node,
    read,
)
from tests.remote.proxy import LOST_REQUEST, Proxy, answer, cut, proxy, stall
from tests.remote.servers import Place, environment

pytestmark = pytest.mark.usefixtures("forked_processes")

ALWAYS = 100_000


# Reading


def test_every_file_of_a_mounted_ref_is_there_before_any_byte_is(other: Store) -> None:
    with castore_fuse.mounted(other, remote="team") as root:
        sizes = {
            path.relative_to(root).as_posix(): path.stat().st_size
            for path in root.rglob("*") if path.is_file()
        }  # fmt: skip
        assert sizes == {name: len(data) for name, data in CONTENTS.items()}
        assert other.totals().blobs == here(root / "large") == here(root / "small/000") == 0
        assert read(root) == CONTENTS
        assert here(root / "large") > len(CONTENTS["large"]) * 0.99
        assert here(root / "small/000") > 0
    agrees_with_disk(other)


def test_what_was_read_is_read_from_here_when_the_remote_is_gone(other: Store, copied: Path) -> None:
    with castore_fuse.mounted(other, remote="team") as root:
        assert read(root) == CONTENTS
        shutil.rmtree(copied)
        for path in root.rglob("*"):
            if path.is_file():
                forget_pages(path)
        assert read(root) == CONTENTS
    end_fetcher(other)
    with castore_fuse.mounted(other, remote="team") as root:
        assert read(root) == CONTENTS
    with (
        pytest.raises(MountError, match="is its file system mounted"),
        castore_fuse.mounted(other, remote="team", ref="two"),
    ):
        pass


def test_gc_removes_pages_of_commits_that_nobody_shows_any_more(copied: Path, tmp_path: Path) -> None:
    with (
        node(tmp_path / "writer", copied.as_uri()) as writer,
        node(tmp_path / "b", copied.as_uri()) as reader,
    ):
        writer.remove_remote("team")
        team = know(writer, "team", copied.as_uri())
        team.pull()
        with castore_fuse.mounted(reader, remote="team") as root:
            list(root.rglob("*"))
        first = set(os.listdir(reader.path / "pages"))
        writer.put_many((f"more/{number}", noise(50, number)) for number in range(3000))
        team.push()
        with castore_fuse.mounted(reader, remote="team") as root:
            before = sorted(path.name for path in root.rglob("*"))
        both = set(os.listdir(reader.path / "pages"))
        reader.gc()
        assert set(os.listdir(reader.path / "pages")) == both, "they are young"
        for store in (reader, writer):
            for path in (store.path / "pages").iterdir():
                os.utime(path, (1, 1))
            store.gc()
        left = set(os.listdir(reader.path / "pages"))
        assert left < both
        assert not first <= left
        assert team.push().added == 0, "a base is whole"
        shutil.rmtree(copied)
        end_fetcher(reader)
        with castore_fuse.mounted(reader, remote="team") as root:
            assert sorted(path.name for path in root.rglob("*")) == before


def test_a_prefix_and_an_older_commit_are_mounted(pushed: Store, copied: Path, tmp_path: Path) -> None:
    with (
        node(tmp_path / "writer", copied.as_uri()) as writer,
        node(tmp_path / "b", copied.as_uri()) as reader,
    ):
        writer.remove_remote("team")
        team = know(writer, "team", copied.as_uri())
        team.pull()
        old = team.log()[0].commit
        writer.put("small/000", b"new")
        writer.put("small/more", b"more")
        team.push()
        with castore_fuse.mounted(reader, remote="team", prefix="small") as new:
            assert (new / "000").read_bytes() == b"new"
            assert (new / "more").read_bytes() == b"more"
            assert len(list(new.iterdir())) == 201
        with castore_fuse.mounted(reader, remote="team", ref=f"main@{old[:8]}") as root:
            assert (root / "small/000").read_bytes() == CONTENTS["small/000"]
            assert not (root / "small/more").exists()


def test_names_of_kept_bytes_are_in_no_listing_and_do_not_travel(
    other: Store, copied: Path, tmp_path: Path
) -> None:
    other.put("!first", b"1")
    other.put("mine", b"2")
    with castore_fuse.mounted(other, remote="team") as root:
        assert read(root) == CONTENTS
    assert list(other) == ["!first", "mine"]
    assert len(other) == other.stat().entries == 2
    assert [entry.name for entry in other.entries()] == ["!first", "mine"]
    with castore_fuse.mounted(other) as root:
        assert read(root) == {"!first": b"1", "mine": b"2"}
    team = know(other, "mine", (tmp_path / "mine").as_uri())
    assert team.push().added == 2
    assert not other.verify().bad
    assert subprocess.run(
        [sys.executable, "-m", "castore", "--store", other.path, "doctor"], capture_output=True, text=True
    ).returncode == 0  # fmt: skip


def test_random_ranges_of_a_large_file_are_right(other: Store) -> None:
    chance = random.Random(5)
    data = CONTENTS["text"]
    with castore_fuse.mounted(other, remote="team") as root, open(root / "text", "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        for _ in range(50):
            start, size = chance.randrange(len(data)), chance.choice([1, 4096, 65_536, 700_000])
            assert os.pread(file.fileno(), size, start) == data[start : start + size]


def test_processes_that_read_one_file_cold_fetch_it_once(
    seaweedfs: Place, tmp_path: Path, link: Proxy, team: str
) -> None:
    with node(tmp_path / "two", team) as two, castore_fuse.mounted(two, remote="team") as root:
        before = len(link.seen)

        def reads(number: int) -> bool:
            return (root / "large").read_bytes() == CONTENTS["large"]

        assert in_processes(8, reads) == [True] * 8
        fetched = [one for one in link.seen[before:] if "/objects/" in one.path and one.method == "GET"]
        kept = two.totals().stored
    assert kept <= len(CONTENTS["large"]) * 1.05
    # Parts of a megabyte and more, none of them twice.
    assert 1 <= len(fetched) <= 12


# The budget


def test_the_budget_holds_and_keeps_the_names(copied: Path, tmp_path: Path) -> None:
    budget = 8 << 20
    # The store is made with this budget, so the processes of a mount have it too.
    with node(tmp_path / "small", copied.as_uri(), max_size=budget) as store:
        with castore_fuse.mounted(store, remote="team") as root:
            for _ in range(2):
                for name, data in CONTENTS.items():
                    forget_pages(root / name)
                    assert (root / name).read_bytes() == data, name
                    assert store.totals().stored <= budget
            assert {path.name for path in root.iterdir()} == {name.split("/")[0] for name in CONTENTS}
            # A collection in the background frees the space of evicted bytes in packs.
            until(lambda: disk_use(store) < 8 * budget)
        store.gc()
        agrees_with_disk(store)


def disk_use(store: Store) -> int:
    """Bytes of all objects and packs."""
    found = 0
    for path in kept_files(store):
        with suppress(FileNotFoundError):
            found += path.stat().st_size
    return found


def test_gc_may_take_everything_while_readers_read(other: Store) -> None:
    ended = threading.Event()

    def collect() -> int:
        freed = 0
        with Store(other.path) as store:
            while not ended.is_set():
                freed += store.gc(max_size=0, grace=0).freed
        return freed

    with castore_fuse.mounted(other, remote="team") as root, ThreadPoolExecutor(1) as pool:
        freed = pool.submit(collect)
        try:
            for _ in range(3):
                for name, data in CONTENTS.items():
                    forget_pages(root / name)
                    assert (root / name).read_bytes() == data, name
        finally:
            ended.set()
        assert freed.result() > 0
    agrees_with_disk(other)


# Damage


def kept_files(store: Store) -> list[Path]:
    objects = [path for path in (store.path / "objects").glob("??/*") if path.is_file()]
    return sorted(objects + list((store.path / "objects/packs").iterdir()))


def test_kept_bytes_that_are_damaged_are_fetched_again(other: Store) -> None:
    with castore_fuse.mounted(other, remote="team") as root:
        assert read(root) == CONTENTS
        for path in kept_files(other):
            for at in range(100, path.stat().st_size, max(1, path.stat().st_size // 5)):
                flip(path, at)
        for name in CONTENTS:
            forget_pages(root / name)
    # A mount of its own, so that no frame is in RAM.
    with castore_fuse.mounted(other, remote="team") as root:
        assert read(root) == CONTENTS
    assert other.stat().corrupt > 0


def test_a_damaged_page_is_fetched_again(other: Store) -> None:
    with castore_fuse.mounted(other, remote="team") as root:
        assert (root / "one").read_bytes() == b"1"
    for path in (other.path / "pages").iterdir():
        flip(path, path.stat().st_size // 2)
    with castore_fuse.mounted(other, remote="team") as root:
        assert (root / "one").read_bytes() == b"1"


def test_a_bucket_that_lies_gives_an_error_and_never_other_bytes(other: Store, copied: Path) -> None:
    chance = random.Random(1)
    objects = list((copied / "objects").glob("??/*")) + list((copied / "packs").iterdir())
    for path in objects:
        for _ in range(3):
            flip(path, chance.randrange(path.stat().st_size))
    wrong = 0
    with castore_fuse.mounted(other, remote="team") as root:
        for name, data in CONTENTS.items():
            wrong += fails(partial(_check, root / name, data))
    assert 2 <= wrong <= 12, "only what was damaged is an error: its neighbours are not"
    until(lambda: other.stat().remotes.reads > 0)
    assert other.stat().remotes.reads < 100, "good neighbours are not fetched again for each bad one"


def _check(path: Path, data: bytes) -> None:
    assert path.read_bytes() == data, path


def test_swapped_and_cut_objects_give_an_error(other: Store, copied: Path) -> None:
    objects = sorted((copied / "objects").glob("??/*"), key=lambda path: path.stat().st_size)
    data = [path.read_bytes() for path in objects]
    for path, other_data in zip(objects, [*data[1:], data[0][: len(data[0]) // 2]], strict=True):
        path.write_bytes(other_data)
    with castore_fuse.mounted(other, remote="team") as root:
        for name in ("large", "text", "middle"):
            assert fails((root / name).read_bytes)
        assert (root / "small/000").read_bytes() == CONTENTS["small/000"]


def test_a_tree_that_lies_gives_an_error(other: Store, copied: Path) -> None:
    for path in (copied / "trees").iterdir():
        flip(path, path.stat().st_size // 2)
    forget_carried(copied)
    with castore_fuse.mounted(other, remote="team") as root:
        assert fails(lambda: os.listdir(root))
        assert fails((root / "one").read_bytes)


# The fetcher


def test_a_fetcher_that_is_killed_again_and_again_is_replaced(other: Store) -> None:
    ended = threading.Event()

    def kill() -> int:
        """Kill a fetcher each time that another one has brought something."""
        killed, stored = 0, -1
        while not ended.is_set():
            if other.totals().stored > stored:
                stored = other.totals().stored
                for pid in fetchers(other):
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                        killed += 1
            ended.wait(0.005)
        return killed

    with castore_fuse.mounted(other, remote="team") as root, ThreadPoolExecutor(1) as pool:
        killed = pool.submit(kill)
        try:
            for name, data in CONTENTS.items():
                assert (root / name).read_bytes() == data, name
        finally:
            ended.set()
        assert killed.result() > 1
    other.gc()
    agrees_with_disk(other)


def test_there_is_one_fetcher_and_it_ends_with_the_last_reader(other: Store) -> None:
    with ExitStack() as mounts:
        roots = [mounts.enter_context(castore_fuse.mounted(other, remote="team")) for _ in range(3)]
        with ThreadPoolExecutor(3) as pool:
            assert list(pool.map(lambda root: (root / "one").read_bytes(), roots)) == [b"1"] * 3
        # Those that several readers started at once end as soon as they find that there is one.
        until(lambda: len(fetchers(other)) == 1)
    until(lambda: not fetchers(other))
    assert not (other.path / SOCKET).exists()


def test_the_fetcher_survives_nonsense(other: Store) -> None:
    client = FetcherClient(other.path)
    with pytest.raises(NotFoundError, match="no remote 'nobody'"):
        client.call("ref", remote="nobody", ref="main", start=None)
    until(lambda: len(fetchers(other)) == 1)
    [pid] = fetchers(other)
    for nonsense in (b"", b"\0", b"\xff" * 4, b"\4\0\0\0abcd", b"\xff\xff\xff\x01" + bytes(1000), bytes(4)):
        with socket.socket(socket.AF_UNIX) as asking, address(other.path / SOCKET) as short:
            asking.connect(short)
            asking.sendall(nonsense)
            asking.shutdown(socket.SHUT_WR)
            assert asking.recv(10) == b""
    told = ask_once(other.path, {})
    assert told is not None
    assert "knows no None" in told["error"]["message"]
    nonsense_calls: dict[str, dict[str, Any]] = {
        "nothing": {},
        "pages": {"remote": "team"},
        "blobs": {"remote": "team", "rows": [1]},
        "near_blobs": {"remote": "team", "digests": [1.5, []]},
    }
    for call, fields in nonsense_calls.items():
        with pytest.raises(RemoteError, match="fetcher"):
            client.call(call, **fields)
    assert client.call("near_blobs", remote="team", digests=[bytes(32), b""]) is None
    frame = FRAME.pack(1 << 31, bytes(16))
    for digest, part in [
        (bytes(32), (0, 1 << 31, 0, frame)),  # more than anybody has memory for
        (bytes(32), (0, 100, 0, frame)),
        (bytes(32), (-5, 100, 0, frame)),
        (b"short", (0, 100, 0, FRAME.pack(100, bytes(16)))),
    ]:
        with pytest.raises(CorruptError, match="frames that cannot be"):
            client.call("parts", remote="team", digest=digest, parts=[part], first=1)
    assert client.call("ref", remote="team", ref="main", start=None)[2] > 0
    assert fetchers(other) == [pid]
    assert other.totals().entries == 0


def test_a_request_by_a_fork_of_a_process_that_has_asked_is_answered(other: Store) -> None:
    client = FetcherClient(other.path)
    first = client.call("ref", remote="team", ref="main", start=None)

    def asks(number: int) -> bool:
        return bool(client.call("ref", remote="team", ref="main", start=None) == first)

    assert in_processes(4, asks) == [True] * 4


def test_a_request_that_is_abandoned_while_it_connects_ends(tmp_path: Path) -> None:
    class Abandoned(FetcherClient):
        def _open(self) -> socket.socket:
            connection = super()._open()
            connection.settimeout(30)  # the request would wait for ever
            self.abandon()
            return connection

    (tmp_path / SOCKET).parent.mkdir()
    with socket.socket(socket.AF_UNIX) as silent:
        with address(tmp_path / SOCKET) as short:
            silent.bind(short)
        silent.listen()
        with pytest.raises(RemoteError, match="interrupted"):
            Abandoned(tmp_path).call("ref", remote="team", ref="main", start=None)


def test_a_request_that_is_abandoned_starts_no_fetcher(tmp_path: Path) -> None:
    (tmp_path / SOCKET).parent.mkdir()
    client = FetcherClient(tmp_path)
    client.abandon()
    with pytest.raises(RemoteError, match="interrupted"):
        client.call("ref", remote="team", ref="main", start=None)


# The network


@pytest.fixture
def link(seaweedfs: Place) -> Iterator[Proxy]:
    with proxy(seaweedfs.port) as made:
        yield made


@pytest.fixture(scope="module")
def stored(seaweedfs: Place, pushed: Store) -> str:
    """The URL of a bucket on object storage with the same names. Tests only read it."""
    url = f"{seaweedfs.url}/{uuid.uuid4().hex}"
    with environment(seaweedfs.environment):
        name = f"r{uuid.uuid4().hex[:8]}"
        pushed.add_remote(name, url).push()
        pushed.remove_remote(name)
    return url


@pytest.fixture
def team(seaweedfs: Place, link: Proxy, stored: str) -> Iterator[str]:
    """The URL of that bucket, which lies behind the link."""
    there = {
        **seaweedfs.environment,
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{link.port}",
        "CASTORE_REMOTE_TIMEOUT": "60",  # more than a busy machine needs
    }
    with environment(there):
        yield stored


def test_faults_of_the_network_are_not_felt(team: str, link: Proxy, tmp_path: Path) -> None:
    with node(tmp_path / "two", team) as two, castore_fuse.mounted(two, remote="team") as root:
        link.inject(answer(503), 2)
        link.inject(answer(500), 1)
        link.inject(LOST_REQUEST, 1)
        link.inject(cut(1000), 2, path="/objects/")
        link.inject(cut(1000), 1, path="/packs/")
        assert read(root) == CONTENTS


def test_bytes_that_are_here_are_read_at_once_while_the_network_hangs(
    team: str, link: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CASTORE_REMOTE_TIMEOUT", "300")
    with node(tmp_path / "two", team) as two:
        with castore_fuse.mounted(two, remote="team") as root:
            assert read(root) == CONTENTS
        # Another daemon, which has nothing in RAM, and nobody to ask.
        with castore_fuse.mounted(two, remote="team") as root:
            end_fetcher(two)
            link.inject(stall(0), ALWAYS)
            began = time.monotonic()
            assert read(root) == CONTENTS
            assert here(root / "large") == int(os.getxattr(root / "large", "user.castore.stored"))
            assert time.monotonic() - began < 150, "nobody has waited for an answer"


@pytest.mark.parametrize("is_pulled", [False, True], ids=["mounted", "pulled"])
def test_readers_that_wait_for_a_network_that_hangs_hold_up_no_others(
    team: str, link: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_pulled: bool
) -> None:
    monkeypatch.setenv("CASTORE_REMOTE_TIMEOUT", "90")
    with node(tmp_path / "two", team) as two, ThreadPoolExecutor(16) as pool:
        if is_pulled:
            two.pull(remote="team", lazy=True)
        with castore_fuse.mounted(two, remote="" if is_pulled else "team") as root:
            assert (root / "middle").read_bytes() == CONTENTS["middle"]
            list(root.iterdir())
            link.inject(stall(0), ALWAYS)
            names = ["large", "text", "one", "small/100"] * 4
            waiting = [pool.submit((root / name).read_bytes) for name in names]
            forget_pages(root / "middle")
            assert (root / "middle").read_bytes() == CONTENTS["middle"]
            assert not any(reader.done() for reader in waiting)
            link.heal()
            end_fetcher(two)  # its requests hang on
            for reader, name in zip(waiting, names, strict=True):
                assert reader.result() == CONTENTS[name]


def test_credentials_that_are_refused_do_not_stick(
    team: str, link: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with node(tmp_path / "two", team) as two:
        with monkeypatch.context() as patch:
            patch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
            with pytest.raises(MountError, match="credentials"):
                _mount(two, remote="team")
        with castore_fuse.mounted(two, remote="team") as root:
            assert (root / "one").read_bytes() == b"1"


def test_without_a_network_reads_fail_in_time_and_go_on_after_it(
    team: str, link: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CASTORE_REMOTE_TIMEOUT", "8")
    with node(tmp_path / "two", team) as two, castore_fuse.mounted(two, remote="team") as root:
        assert (root / "middle").read_bytes() == CONTENTS["middle"]
        link.inject(LOST_REQUEST, ALWAYS)
        forget_pages(root / "middle")
        began = time.monotonic()
        assert (root / "middle").read_bytes() == CONTENTS["middle"]
        for name in ("large", "one", "small/001"):
            assert fails((root / name).read_bytes)
        # One of the three waits for the time-out, and the others hear of it.
        assert time.monotonic() - began < 120
        link.heal()
        until(lambda: not fails(partial(_check, root / "large", CONTENTS["large"])))
        assert read(root) == CONTENTS


def test_credentials_that_expire_are_an_error_until_they_are_renewed(
    team: str, link: Proxy, tmp_path: Path
) -> None:
    with node(tmp_path / "two", team) as two, castore_fuse.mounted(two, remote="team") as root:
        link.inject(answer(403), ALWAYS)
        assert fails((root / "large").read_bytes)
        link.heal()
        assert (root / "large").read_bytes() == CONTENTS["large"]


# Following


@pytest.fixture
def writer(copied: Path, tmp_path: Path) -> Iterator[Store]:
    """A node that has all names of the bucket, and pushes."""
    with Store(tmp_path / "writer") as store:
        know(store, "team", copied.as_uri()).pull()
        yield store


def test_a_mount_that_follows_its_ref_shows_each_new_commit(writer: Store, other: Store) -> None:
    with castore_fuse.mounted(other, remote="team", follow=True) as root:
        assert (root / "one").read_bytes() == b"1"
        assert not (root / "added").exists()
        assert "small" in os.listdir(root)
        with open(root / "middle", "rb") as held:
            writer.put("one", b"two")
            writer.put("added/deep", b"3")
            writer.put("middle", b"other")
            writer.delete("dup")
            writer.remote("team").push(delete=True)
            until(lambda: _reads_now(root / "one", b"two"))
            until(lambda: _reads_now(root / "added/deep", b"3"))
            until(lambda: "dup" not in os.listdir(root) and "added" in os.listdir(root))
            assert (root / "middle").read_bytes() == b"other"
            forget_pages(held.fileno())
            assert held.read() == CONTENTS["middle"]


def _reads_now(path: Path, data: bytes) -> bool:
    return path.exists() and path.read_bytes() == data


def test_a_mount_that_does_not_follow_stays_at_its_commit(writer: Store, other: Store) -> None:
    with (
        castore_fuse.mounted(other, remote="team") as root,
        castore_fuse.mounted(other, remote="team", follow=True) as following,
    ):
        writer.put("one", b"two")
        writer.remote("team").push()
        until(lambda: (following / "one").read_bytes() == b"two")
        forget_pages(root / "one")
        assert (root / "one").read_bytes() == b"1"


def test_a_mount_that_follows_outlives_a_remote_that_is_gone_for_a_while(
    writer: Store, other: Store, copied: Path
) -> None:
    with castore_fuse.mounted(other, remote="team", follow=True) as root:
        assert (root / "one").read_bytes() == b"1"
        copied.rename(copied.with_name("away"))
        assert (root / "one").read_bytes() == b"1"
        copied.with_name("away").rename(copied)
        writer.put("one", b"two")
        writer.remote("team").push()
        until(lambda: (root / "one").read_bytes() == b"two")


# Wrong use


def test_what_cannot_be_mounted_is_told(other: Store, tmp_path: Path) -> None:
    cases: list[tuple[type[Exception], str, Callable[[], object]]] = [
        (MountError, "no ref 'nothing'", lambda: _mount(other, remote="team", ref="nothing")),
        (MountError, "no commit 123456", lambda: _mount(other, remote="team", ref="main@123456")),
        (MountError, "no remote 'nobody'", lambda: _mount(other, remote="nobody")),
        (MountError, "never changes", lambda: _mount(other, remote="team", ref="main@123456", follow=True)),
        (InvalidValueError, "cannot pin", lambda: _mount(other, remote="team", pin=True)),
        (InvalidValueError, "say which remote", lambda: _mount(other, follow=True)),
        (InvalidValueError, "say which remote", lambda: _mount(other, ref="main")),
        (RemoteMissingError, "no ref 'x'", lambda: other.remote("team").warm(ref="x")),
    ]
    for kind, message, use in cases:
        with pytest.raises(kind, match=message):
            use()


def _mount(store: Store, **options: object) -> None:
    with castore_fuse.mounted(store, **options):  # type: ignore[arg-type]
        pass


def test_a_prefix_without_names_is_told(other: Store, tmp_path: Path) -> None:
    castore = [sys.executable, "-m", "castore", "--store", os.fspath(other.path)]
    mountpoint = tmp_path / "mnt"
    words = [*castore, "mount", os.fspath(mountpoint), "--remote", "team", "--prefix", "nothing"]
    ran = subprocess.run(words, capture_output=True, text=True)
    try:
        assert ran.returncode == 0
        assert "no name below 'nothing', so the mount is empty" in ran.stderr
        assert list(mountpoint.iterdir()) == []
    finally:
        subprocess.run([*castore, "umount", os.fspath(mountpoint)], check=True)


def test_all_that_is_fetched_ahead_is_what_the_mount_shows(other: Store) -> None:
    with castore_fuse.mounted(other, remote="team", prefix="small", prefetch="all") as root:
        until(lambda: all(here(path) for path in root.iterdir()))
    end_fetcher(other)
    with castore_fuse.mounted(other, remote="team") as root:
        # In the order of names these come before all of "small".
        assert [here(root / name) for name in ("large", "middle", "one")] == [0, 0, 0]


def test_all_of_each_commit_that_is_followed_is_fetched_ahead(writer: Store, other: Store) -> None:
    with castore_fuse.mounted(other, remote="team", prefix="small", follow=True, prefetch="all") as root:
        until(lambda: all(here(path) for path in root.iterdir()))
        writer.put_many([("small/000", b"changed"), ("small/new", noise(5000)), ("large", noise(3 << 20))])
        writer.remote("team").push()
        until(lambda: (root / "new").exists() and here(root / "new") > 0 and here(root / "000") < 10)
        until(lambda: all(here(path) for path in root.iterdir()))
    end_fetcher(other)
    with castore_fuse.mounted(other, remote="team") as root:
        assert here(root / "large") == 0, "it is not shown"


def test_the_rest_of_a_file_that_is_read_is_fetched_ahead(other: Store) -> None:
    with castore_fuse.mounted(other, remote="team", prefetch="open") as root:
        with open(root / "large", "rb") as file:
            assert file.read(10) == CONTENTS["large"][:10]
        until(lambda: here(root / "large") == int(os.getxattr(root / "large", "user.castore.stored")))
        assert here(root / "text") == 0
