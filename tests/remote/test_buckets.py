"""Every kind of bucket keeps the same promises: a folder, and object storages that run on loopback."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path

import pytest

from castore.errors import RemoteDeniedError, RemoteError, RemoteMissingError, RemoteUnreachableError
from castore.remote import cloud_bucket, folder_bucket
from castore.remote.bucket import Bucket
from castore.remote.folder_bucket import UNFINISHED, FolderBucket
from tests.helpers import noise
from tests.remote.servers import BUCKET, READER, READERS_SECRET, SECRET, Place, free_ports, has_azurite

STORAGES = ["folder", "moto", "seaweedfs", "gcs", *(["azurite"] if has_azurite() else [])]


@pytest.fixture(params=STORAGES)
def place(request: pytest.FixtureRequest) -> Place:
    found = request.getfixturevalue(request.param)
    assert isinstance(found, Place)
    return found


@pytest.fixture
def bucket(place: Place) -> Bucket:
    return place.fresh()


@pytest.fixture(scope="module")
def processes() -> Iterator[Executor]:
    """Two of them, not forked: that would take along obstore's threads, which run in this process."""
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield pool


def keys(bucket: Bucket, prefix: str = "") -> list[str]:
    return sorted(listed.key for listed in bucket.listing(prefix))


# --- all of them ---------------------------------------------------------------------------------


def test_an_object_is_read_back_whole_in_ranges_and_as_a_stream(bucket: Bucket) -> None:
    data = noise(300_000)
    bucket.put("objects/ab/one", data)
    assert bucket.get("objects/ab/one").data == data
    assert b"".join(bucket.stream("objects/ab/one")) == data
    assert bucket.size("objects/ab/one") == len(data)
    for start, end in [(7, 20), (299_990, 300_000), (20, 20), (0, 300_000), (5, 6)]:
        assert bucket.get_range("objects/ab/one", start, end) == data[start:end]


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_buffers_of_any_kind_and_empty_ones_are_written(
    bucket: Bucket, kind: Callable[[bytes], bytes]
) -> None:
    bucket.put("full", kind(b"1234"))
    bucket.put("empty", kind(b""))
    assert (bucket.get("full").data, bucket.size("full")) == (b"1234", 4)
    assert (bucket.get("empty").data, bucket.size("empty"), list(bucket.stream("empty"))) == (b"", 0, [])


def test_an_object_may_be_written_again(bucket: Bucket) -> None:
    bucket.put("one", b"older and longer")
    bucket.put("one", b"newer")
    assert (bucket.get("one").data, bucket.size("one")) == (b"newer", 5)


def test_an_object_that_is_not_there_is_missing(bucket: Bucket) -> None:
    bucket.put("folder/one", b"1")
    for key in ("none", "folder", "folder/none", "folder/one/none"):
        assert bucket.size(key) is None
        for read in (
            bucket.get,
            lambda key: list(bucket.stream(key)),
            lambda key: bucket.get_range(key, 0, 1),
        ):
            with pytest.raises(RemoteMissingError, match=key):
                read(key)


def test_a_range_ends_where_its_object_ends(bucket: Bucket) -> None:
    bucket.put("truncated", b"0123456789")
    bucket.put("empty", b"")
    assert bucket.get_range("truncated", 5, 11) == b"56789"
    assert bucket.get_range("truncated", 10, 12) == b""
    assert bucket.get_range("truncated", 100, 101) == b""
    assert bucket.get_range("empty", 0, 4) == b""


def test_an_object_too_large_for_memory_is_not_read_into_it(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    for room in (folder_bucket, cloud_bucket):
        monkeypatch.setattr(room, "SMALL", 1000)
    bucket.put("small", bytes(1000))
    bucket.put("large", bytes(1001))
    assert bucket.get("small").data == bytes(1000)
    with pytest.raises(RemoteError, match=r"large in .* is larger than castore writes it"):
        bucket.get("large")


def test_an_object_is_created_once(bucket: Bucket) -> None:
    assert bucket.create("refs/one", b"first")
    assert not bucket.create("refs/one", b"second")
    assert (bucket.get("refs/one").data, bucket.size("refs/one")) == (b"first", 5)
    bucket.put("plain", b"put")
    assert not bucket.create("plain", b"created")
    assert bucket.get("plain").data == b"put"


def test_an_object_is_replaced_only_as_the_version_that_was_read(bucket: Bucket) -> None:
    assert bucket.create("refs/one", b"1")
    first = bucket.get("refs/one").version
    assert bucket.replace("refs/one", b"2", first)
    assert not bucket.replace("refs/one", b"3", first)
    second = bucket.get("refs/one")
    assert second.data == b"2"
    assert second.version != first
    assert not bucket.replace("refs/none", b"3", first)
    assert bucket.size("refs/none") is None
    bucket.delete(["refs/one"])
    assert not bucket.replace("refs/one", b"3", second.version)
    assert bucket.create("refs/one", b"again")
    assert bucket.get("refs/one").data == b"again"


def at_once(count: int, task: Callable[[int], bool]) -> list[int]:
    """Which of so many threads were told that they won."""
    barrier = threading.Barrier(count)

    def run(number: int) -> bool:
        barrier.wait(60)
        return task(number)

    with ThreadPoolExecutor(count) as threads:
        return [number for number, won in enumerate(threads.map(run, range(count))) if won]


def test_of_twelve_that_create_or_replace_one_object_one_wins(bucket: Bucket) -> None:
    (winner,) = at_once(12, lambda writer: bucket.create("refs/one", b"created by %d" % writer))
    found = bucket.get("refs/one")
    assert found.data == b"created by %d" % winner
    (winner,) = at_once(12, lambda writer: bucket.replace("refs/one", b"by %d" % writer, found.version))
    assert bucket.get("refs/one").data == b"by %d" % winner


def count_up(place: Place, prefix: str, who: int, times: int) -> int:
    """Raise a counter by compare-and-swap; how often another one was quicker."""
    bucket, lost = place.open(prefix), 0
    for _ in range(times):
        while True:
            found = bucket.get("refs/counter")
            value = int(found.data.split()[0]) + 1
            if bucket.replace(
                "refs/counter", b"%d %d %s" % (value, who, uuid.uuid4().hex.encode()), found.version
            ):
                break
            lost += 1
    return lost


def test_no_update_of_processes_that_swap_at_once_is_lost(place: Place, processes: Executor) -> None:
    prefix = uuid.uuid4().hex
    assert place.open(prefix).create("refs/counter", b"0")
    list(processes.map(count_up, [place] * 2, [prefix] * 2, range(2), [25] * 2))
    assert int(place.open(prefix).get("refs/counter").data.split()[0]) == 50


def test_a_listing_has_what_lies_in_a_folder_with_sizes_and_times(bucket: Bucket) -> None:
    began = time.time()
    for number, key in enumerate(["a/1", "a/2", "a/b/c", "ab", "a.txt", "b/1"]):
        bucket.put(key, b"x" * number)
    assert bucket.create("a/made", b"1234567")
    assert bucket.replace("a/made", b"12345678", bucket.get("a/made").version)
    assert keys(bucket, "a/") == ["a/1", "a/2", "a/b/c", "a/made"]
    assert keys(bucket) == ["a.txt", "a/1", "a/2", "a/b/c", "a/made", "ab", "b/1"]
    assert keys(bucket, "none/") == keys(bucket, "a/1/") == []
    sizes = {listed.key: listed.size for listed in bucket.listing("")}
    assert (sizes["a/b/c"], sizes["b/1"], sizes["a/made"]) == (2, 5, 8)
    # The storages run here, and tell time in seconds.
    assert all(began - 2 < listed.modified < time.time() + 2 for listed in bucket.listing(""))


def test_what_is_deleted_is_gone_and_the_rest_stays(bucket: Bucket) -> None:
    for key in ("a/1", "a/2", "a/3", "b"):
        bucket.put(key, b"1")
    assert bucket.create("c", b"1")
    bucket.delete(iter(["a/1", "none", "c", "a/3", "a/none"]))
    assert keys(bucket) == ["a/2", "b"]
    bucket.delete(["a/1", "none"])
    bucket.delete([])
    assert keys(bucket) == ["a/2", "b"]


def test_a_large_file_is_uploaded_in_parts_and_streamed_in_pieces(bucket: Bucket, tmp_path: Path) -> None:
    data = noise(1 << 20) * 20 + b"the end"
    (tmp_path / "large").write_bytes(data)
    bucket.upload("packs/large", tmp_path / "large", lambda read: None)
    pieces = list(bucket.stream("packs/large"))
    assert b"".join(pieces) == data
    assert len(pieces) > 1
    bucket.put("packs/put", data)
    assert bucket.get("packs/put").data == data
    bucket.upload("packs/large", Path(os.devnull), lambda read: None)
    assert bucket.size("packs/large") == 0


def test_a_file_that_cannot_be_read_is_no_fault_of_the_remote(bucket: Bucket, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nothing") as caught:
        bucket.upload("one", tmp_path / "nothing", lambda read: None)
    assert not isinstance(caught.value, RemoteError)
    assert bucket.size("one") is None


# --- object storage ------------------------------------------------------------------------------


def test_more_objects_than_fit_a_page_are_listed_and_deleted(seaweedfs: Place) -> None:
    bucket = seaweedfs.fresh()
    wanted = [f"many/{number:04d}" for number in range(1010)]
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda key: bucket.put(key, b"1"), wanted))
    assert keys(bucket) == wanted
    bucket.delete(wanted)
    assert keys(bucket) == []


def upload_and_stream(place: Place, path: Path) -> tuple[int, int]:
    """Bytes streamed, and how much memory that took, in bytes."""
    bucket, before = place.fresh(), peak()
    bucket.upload("large", path, lambda read: None)
    streamed = sum(map(len, bucket.stream("large")))
    return streamed, peak() - before


def peak() -> int:
    """The most memory that this process ever had, in bytes."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


def test_a_file_of_any_size_moves_in_constant_memory(
    seaweedfs: Place, tmp_path: Path, processes: Executor
) -> None:
    size = 160 << 20
    with open(tmp_path / "large", "wb") as file:
        file.truncate(size)
    streamed, memory = processes.submit(upload_and_stream, seaweedfs, tmp_path / "large").result()
    assert streamed == size
    assert memory < 96 << 20


REFUSED = {
    "an unknown key": ({"AWS_ACCESS_KEY_ID": "castore-nobody"}, "InvalidAccessKeyId"),
    "a wrong secret": ({"AWS_SECRET_ACCESS_KEY": "not-the-secret-at-all"}, "SignatureDoesNotMatch"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_credentials_are_told_with_where_they_come_from(seaweedfs: Place, case: str) -> None:
    changes, code = REFUSED[case]
    bucket = seaweedfs.fresh(**changes)
    asks: list[Callable[[], object]] = [
        lambda: bucket.get("one"),
        lambda: bucket.get_range("one", 0, 1),
        lambda: list(bucket.stream("one")),
        lambda: list(bucket.listing("")),
        lambda: bucket.put("one", b"1"),
        lambda: bucket.create("one", b"1"),
        lambda: bucket.replace("one", b"1", {"e_tag": '"1"'}),
        lambda: bucket.delete(["one"]),
    ]
    for ask in asks:
        with pytest.raises(RemoteDeniedError) as caught:
            ask()
        assert "AWS_ACCESS_KEY_ID" in str(caught.value)
        assert "~/.aws/credentials" in str(caught.value)
        assert code in str(caught.value)
        told = "".join(traceback.format_exception(caught.value))
        assert SECRET not in told
        assert "not-the-secret-at-all" not in told
        assert "RequestId" not in told  # nor the storage's whole answer, where a signature may stand
    with pytest.raises(RemoteDeniedError):
        bucket.size("one")


def test_a_reader_may_not_write(seaweedfs: Place) -> None:
    prefix = uuid.uuid4().hex
    seaweedfs.open(prefix).put("one", b"1")
    reader = seaweedfs.open(prefix, AWS_ACCESS_KEY_ID=READER, AWS_SECRET_ACCESS_KEY=READERS_SECRET)
    assert (reader.get("one").data, keys(reader)) == (b"1", ["one"])
    for write in (
        lambda: reader.put("two", b"2"),
        lambda: reader.create("two", b"2"),
        lambda: reader.delete(["one"]),
    ):
        with pytest.raises(RemoteDeniedError, match="AccessDenied"):
            write()
    assert keys(reader) == ["one"]


@pytest.mark.parametrize("place", STORAGES[1:], indirect=True)
def test_a_bucket_that_is_not_there_is_no_missing_object(place: Place) -> None:
    bucket = place._replace(url=place.url.replace(BUCKET, "no-such-bucket")).open()
    for ask in (
        lambda: bucket.get("one"),
        lambda: list(bucket.listing("")),
        lambda: list(bucket.stream("one")),
    ):
        with pytest.raises(RemoteError, match=r"there is no bucket for .*no-such-bucket") as caught:
            ask()
        assert not isinstance(caught.value, RemoteMissingError)


@pytest.mark.parametrize(
    ("endpoint", "told"),
    [
        ("http://127.0.0.1:{port}", "connection refused"),
        ("http://castore.invalid", "name is unknown"),
    ],
)
def test_a_storage_that_nobody_answers_for_is_unreachable_in_time(
    seaweedfs: Place, endpoint: str, told: str
) -> None:
    endpoint = endpoint.format(port=free_ports(1)[0])
    bucket, began = seaweedfs.fresh(AWS_ENDPOINT_URL=endpoint), time.monotonic()
    asks: list[Callable[[], object]] = [
        lambda: bucket.get("one"),
        lambda: bucket.create("one", b"1"),
        lambda: list(bucket.listing("")),
    ]
    for ask in asks:
        with pytest.raises(RemoteUnreachableError, match=told) as caught:
            ask()
        assert endpoint.removeprefix("http://") in str(caught.value)
    assert time.monotonic() - began < 120


def test_plain_http_must_be_allowed(seaweedfs: Place) -> None:
    with pytest.raises(RemoteError, match="AWS_ALLOW_HTTP=true"):
        seaweedfs.fresh(AWS_ALLOW_HTTP="false").get("one")


def test_a_forked_child_is_told_instead_of_waiting_for_ever(seaweedfs: Place) -> None:
    bucket = seaweedfs.fresh()
    bucket.put("one", b"1")
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            bucket.get("one")
        except RemoteError as error:
            os.write(writer, str(error).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader, "rb") as answer:
        assert b"forked" in answer.read()
    os.waitpid(child, 0)


# --- folders -------------------------------------------------------------------------------------


WHOLE = 2 << 20


def write_for_ever(folder: Path, source: Path, ready: Path) -> None:
    """Objects of which each has one byte in all places, by every way to write one."""
    bucket = FolderBucket(folder)
    bucket.create("refs/one", b"\0" * WHOLE)
    ready.touch()
    for number in range(1 << 30):
        data = bytes([number % 256]) * WHOLE
        source.write_bytes(data)
        bucket.put("objects/one", data)
        bucket.upload("packs/one", source, lambda read: None)
        assert bucket.replace("refs/one", data, bucket.get("refs/one").version)


@pytest.mark.parametrize("kill", [1, 2, 3, 25])
def test_a_writer_killed_in_the_middle_leaves_no_half_object(tmp_path: Path, kill: int) -> None:
    bucket, tmp = FolderBucket(tmp_path / "bucket"), tmp_path / "bucket" / UNFINISHED
    # A folder needs no obstore.
    writer = multiprocessing.get_context("fork").Process(
        target=write_for_ever, args=(tmp_path / "bucket", tmp_path / "source", tmp_path / "ready")
    )
    writer.start()
    try:
        while not (tmp_path / "ready").exists():
            assert writer.is_alive()
        seen: set[str] = set()
        while len(seen) <= kill:  # each object begins as a file of its own
            seen.update(os.listdir(tmp))
            assert writer.is_alive()
            check_whole(bucket)
    finally:
        writer.kill()
        writer.join()
    assert writer.exitcode == -signal.SIGKILL
    check_whole(bucket)
    found = bucket.get("refs/one")
    assert bucket.replace("refs/one", b"goes on", found.version)
    assert not [key for key in keys(bucket) if key.startswith(UNFINISHED)]


def test_an_object_is_not_seen_before_its_last_byte(tmp_path: Path) -> None:
    bucket, source = FolderBucket(tmp_path / "bucket"), tmp_path / "source"
    os.mkfifo(source)
    with ThreadPoolExecutor(1) as thread:
        done = thread.submit(bucket.upload, "packs/one", source, lambda read: None)
        with open(source, "wb") as pipe:
            pipe.write(noise(9 << 20))
            pipe.flush()
            assert keys(bucket) == []
            assert bucket.size("packs/one") is None
        done.result()
    assert bucket.size("packs/one") == 9 << 20


def check_whole(bucket: FolderBucket) -> None:
    for listed in bucket.listing(""):
        data = bucket.get(listed.key).data
        assert len(data) == WHOLE
        assert data.count(data[:1]) == len(data)


def test_the_versions_of_a_ref_in_a_folder_do_not_pile_up(tmp_path: Path) -> None:
    bucket = FolderBucket(tmp_path)
    assert bucket.create("refs/one", b"0")
    for number in range(1, 80):
        assert bucket.replace("refs/one", b"%d" % number, bucket.get("refs/one").version)
    assert bucket.get("refs/one").data == b"79"
    assert len(os.listdir(tmp_path / "refs" / "one~")) < 70
    assert keys(bucket) == ["refs/one"]
    bucket.delete(["refs/one"])
    assert os.listdir(tmp_path / "refs") == []


class Suspended(FolderBucket):
    """A writer that stands still between its look at the newest version and its `link`."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.looked, self.go_on = threading.Event(), threading.Event()

    def _write(self, data: object) -> Path:
        path = super()._write(data)  # type: ignore[arg-type]
        self.looked.set()
        assert self.go_on.wait(60)
        return path


@pytest.mark.parametrize("first", ["create", "replace"])
def test_a_writer_that_stood_still_for_long_has_lost(tmp_path: Path, first: str) -> None:
    bucket, suspended = FolderBucket(tmp_path), Suspended(tmp_path)
    if first == "replace":
        assert bucket.create("refs/one", b"0")
    with ThreadPoolExecutor(1) as thread:
        late = (
            thread.submit(suspended.create, "refs/one", b"late")
            if first == "create"
            else thread.submit(suspended.replace, "refs/one", b"late", bucket.get("refs/one").version)
        )
        try:
            assert suspended.looked.wait(60)
            if first == "create":
                assert bucket.create("refs/one", b"0")
            for number in range(1, 80):
                assert bucket.replace("refs/one", b"%d" % number, bucket.get("refs/one").version)
        finally:
            suspended.go_on.set()
        assert not late.result()
    assert bucket.get("refs/one").data == b"79"
    assert bucket.replace("refs/one", b"80", bucket.get("refs/one").version)


def test_a_link_and_a_pipe_in_a_folder_are_no_objects(tmp_path: Path) -> None:
    bucket = FolderBucket(tmp_path / "bucket")
    bucket.put("objects/one", b"1")
    (tmp_path / "secret").write_bytes(b"secret")
    (tmp_path / "bucket" / "objects" / "link").symlink_to(tmp_path / "secret")
    os.mkfifo(tmp_path / "bucket" / "objects" / "pipe")
    for key in ("objects/link", "objects/pipe"):
        with pytest.raises(RemoteMissingError):
            bucket.get(key)
        assert bucket.size(key) is None
    assert keys(bucket) == ["objects/one"]


@pytest.mark.parametrize("damage", ["folder", "link", "dangling link", "pipe"])
def test_what_is_no_file_in_the_place_of_a_version_is_an_error(tmp_path: Path, damage: str) -> None:
    """Regression: a reader looked for the version for ever."""
    bucket = FolderBucket(tmp_path / "bucket")
    assert bucket.create("refs/main", b"1")
    assert bucket.replace("refs/main", b"2", 1)
    path = tmp_path / "bucket" / "refs" / "main~" / "00000002"
    path.unlink()
    if damage == "folder":
        path.mkdir()
    elif damage == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("00000001" if damage == "link" else "gone")
    for ask in (bucket.get, bucket.size, lambda key: bucket.create(key, b"3")):
        with pytest.raises(RemoteError, match=r"cannot use refs/main in .*: .*/00000002 is not a file"):
            ask("refs/main")
    path.rmdir() if damage == "folder" else path.unlink()
    assert bucket.get("refs/main").data == b"1"


def test_a_file_beside_the_versions_is_none_of_them(tmp_path: Path) -> None:
    """Regression: a reader looked for version 7 for ever where a file had the name ``7``."""
    bucket = FolderBucket(tmp_path / "bucket")
    assert bucket.create("refs/main", b"1")
    for name in ("7", "00000009.orig", "9" * 200):
        (tmp_path / "bucket" / "refs" / "main~" / name).write_bytes(b"other")
    assert bucket.get("refs/main").data == b"1"
    assert [one.key for one in bucket.listing("refs/")] == ["refs/main"]
    assert bucket.replace("refs/main", b"2", 1)
    assert bucket.get("refs/main").data == b"2"


def test_a_dead_link_in_the_place_of_a_folder_is_refused(tmp_path: Path) -> None:
    """Regression: a writer tried for ever to make the folder."""
    bucket = FolderBucket(tmp_path / "bucket")
    (tmp_path / "bucket" / "refs").mkdir(parents=True)
    (tmp_path / "bucket" / "refs" / "main~").symlink_to(tmp_path / "gone")
    (tmp_path / "bucket" / "objects").symlink_to(tmp_path / "gone")
    with pytest.raises(RemoteError, match=r"cannot use refs/main in .*: a file lies in the way"):
        bucket.create("refs/main", b"1")
    with pytest.raises(RemoteError, match=r"cannot use objects/one in .*: a file lies"):
        bucket.put("objects/one", b"1")
    assert list((tmp_path / "bucket" / UNFINISHED).iterdir()) == []


def test_a_folder_without_permission_is_denied_and_one_below_a_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RemoteDeniedError, match="no permission for one in file:///sys/castore"):
        FolderBucket(Path("/sys/castore")).put("one", b"1")
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(RemoteError, match="cannot use one in"):
        FolderBucket(tmp_path / "file" / "bucket").put("one", b"1")


def test_a_folder_that_another_takes_the_place_of_ends_a_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when a file system is unmounted, and an empty folder is left: between two steps of the write."""
    bucket = FolderBucket(tmp_path / "bucket")
    write = FolderBucket._write

    def unmount_after(self: FolderBucket, data: bytes) -> Path:
        written = write(self, data)
        (tmp_path / "bucket").rename(tmp_path / "elsewhere")
        return written

    monkeypatch.setattr(FolderBucket, "_write", unmount_after)
    with pytest.raises(RemoteMissingError):
        bucket.create("keys/one", b"1")
