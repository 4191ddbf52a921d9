"""Frames in shared memory: decoded once for all processes, always right, and gone with the last user."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import re
import signal
import stat
import time
from collections.abc import Iterator
from contextlib import closing
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from castore import CorruptError, Store
from castore.errors import InvalidValueError, SegmentError
from castore.objects.codecs import FRAME_SIZE
from castore.shm.segments import path_of
from castore.shm.shared_frames import SharedFrames, segment_name
from tests.helpers import flip, in_small_shm, mixed, noise, payload, text

METHODS = ("fork", "forkserver", "spawn")
CODECS = ("zstd", "lz4", "gzip")
SIZE = 10 * FRAME_SIZE + 1000
FRAMES = 11
# With room for the frames of two objects, one run in some hundred thousand has a frame without a place: the
# inode and the time decide which frames are near each other. With 8 MB it was one run in a hundred.
SHARED = "64MB"


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "store"
    assert not segment_of(tmp_path / "store").exists(), "a segment was left behind"


@pytest.fixture
def store(folder: Path) -> Iterator[Store]:
    with Store(folder, memory=0, shared_memory=SHARED) as opened:
        yield opened


def segment_of(folder: Path) -> Path:
    return path_of(segment_name(folder))


def tier(store: Store) -> SharedFrames:
    assert store.shared_frames is not None
    return store.shared_frames


def read_all(store: Store, name: str) -> bytes:
    """Read an object by ranges, not whole."""
    with store.open(name) as file:
        return b"".join(iter(lambda: file.read(50_000), b""))


# --- sharing ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", CODECS)
def test_what_one_store_has_decoded_another_reads_without_the_disk(
    store: Store, folder: Path, codec: str
) -> None:
    data = mixed(SIZE)
    store.put("a", data, codec=codec)
    assert read_all(store, "a") == data
    assert (tier(store).hits, tier(store).misses) == (0, FRAMES)
    with Store(folder, memory=0, shared_memory=SHARED) as other:
        with other.open("a") as file:
            path, _, stored = payload(store, "a")
            before = path.read_bytes()
            for place in range(0, stored, 1000):  # from here on every read of the disk is an error
                flip(path, place)
            assert b"".join(iter(lambda: file.read(50_000), b"")) == data
            assert other.shared_frames is not None
            assert (other.shared_frames.hits > FRAMES, other.shared_frames.misses) == (True, FRAMES)
        path.write_bytes(before)


@pytest.mark.parametrize("codec", CODECS)
def test_whole_reads_take_frames_from_the_tier_and_leave_them_there(store: Store, codec: str) -> None:
    data = mixed(SIZE)
    store.put("a", data, codec=codec)
    assert store.get("a") == data
    assert (tier(store).hits, tier(store).misses) == (0, FRAMES)
    assert store.get("a") == data
    assert (tier(store).hits, tier(store).misses) == (FRAMES, FRAMES)
    assert read_all(store, "a") == data
    assert tier(store).misses == FRAMES


@pytest.mark.parametrize("offset", [0, 1, FRAME_SIZE - 1, FRAME_SIZE, 3 * FRAME_SIZE + 5, SIZE - 7])
@pytest.mark.parametrize("size", [1, 4096, FRAME_SIZE, 2 * FRAME_SIZE + 3])
def test_any_range_is_the_same_from_the_tier_as_from_the_disk(store: Store, offset: int, size: int) -> None:
    data = mixed(SIZE)
    store.put("a", data, codec="zstd")
    for _ in range(2):
        with store.open("a") as file:
            file.seek(offset)
            assert file.read(size) == data[offset : offset + size]


def test_raw_and_small_blobs_leave_the_tier_alone(store: Store) -> None:
    for name, data in (
        ("raw", noise(SIZE)),
        ("one frame", text(FRAME_SIZE)),
        ("packed", b"small"),
        ("empty", b""),
    ):
        store.put(name, data)
        assert store.get(name) == data
        assert read_all(store, name) == data
    assert (tier(store).hits, tier(store).misses, tier(store).held) == (0, 0, 0)


def _child(store: Store, pipe: Connection) -> None:
    before = tier(store).misses
    data = read_all(store, "a")
    pipe.send((len(data), tier(store).misses - before, store.put("from the child", mixed(SIZE, 1)).size))
    read_all(store, "from the child")
    pipe.send("read")
    pipe.recv()


@pytest.mark.parametrize("method", METHODS)
def test_children_of_every_start_method_share(store: Store, method: str) -> None:
    data = mixed(SIZE)
    store.put("a", data, codec="zstd")
    assert store.get("a") == data
    context: Any = multiprocessing.get_context(method)
    here, there = context.Pipe()
    child = context.Process(target=_child, args=(store, there), daemon=True)
    child.start()
    there.close()  # so that a child that fails is an error here, and not a hang
    assert here.recv() == (SIZE, 0, SIZE), "the child decoded what its parent had decoded"
    assert here.recv() == "read"
    before = tier(store).misses
    assert read_all(store, "from the child") == mixed(SIZE, 1)
    assert tier(store).misses == before
    here.send("leave")
    child.join(300)
    assert child.exitcode == 0


def test_the_option_travels_in_a_pickle(store: Store) -> None:
    with pickle.loads(pickle.dumps(store)) as copy:
        assert copy.shared_frames.size == tier(store).size


def test_a_store_without_the_option_has_no_tier(folder: Path) -> None:
    for option in (None, 0, "0"):
        with Store(folder, shared_memory=option) as plain:
            assert plain.shared_frames is None


def test_the_segment_is_the_users_alone_and_goes_with_the_last(folder: Path) -> None:
    first = Store(folder, shared_memory=SHARED)
    second = Store(folder, shared_memory=SHARED)
    path = segment_of(folder)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    first.close()
    assert path.exists()
    second.close()
    assert not path.exists()


def test_a_link_to_the_store_leads_to_the_same_tier(store: Store, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(folder)
    with Store(tmp_path / "link", shared_memory=SHARED) as linked:
        assert tier(linked)._arena.name == tier(store)._arena.name


# --- sizes --------------------------------------------------------------------------------------------------


def test_another_size_is_refused_with_what_to_do(store: Store, folder: Path) -> None:
    with pytest.raises(
        SegmentError, match="shared_memory=64000000, here 9000000; give the same shared_memory"
    ):
        Store(folder, shared_memory="9MB")
    with Store(folder, shared_memory="64 MB") as same:
        assert tier(same).size == tier(store).size


def test_what_cannot_hold_a_frame_is_refused(folder: Path) -> None:
    with pytest.raises(InvalidValueError, match=r"shared_memory=100000 is too small: .* take \d+ bytes"):
        Store(folder, shared_memory="100KB")


def test_more_than_there_is_takes_nothing() -> None:
    script = """
import os, tempfile
from castore import FullError, Store
before = os.statvfs("/dev/shm").f_bavail
with tempfile.TemporaryDirectory() as folder:
    try:
        Store(folder + "/s", shared_memory="100MB")
    except FullError as error:
        print(error)
print(os.statvfs("/dev/shm").f_bavail == before, os.listdir("/dev/shm"))
"""
    told, left = in_small_shm(script, "60M").splitlines()
    assert re.match(r"/dev/shm has .* free of .*, and castore-.* needs .*: lower the limit", told)
    assert left == "True []"


@pytest.mark.parametrize("size", [330_000, 1_000_000, 8_000_000, 123_456_789])
def test_the_tier_never_takes_more_than_it_was_given(tmp_path: Path, size: int) -> None:
    with closing(SharedFrames(tmp_path, size, FRAME_SIZE)) as frames:
        assert frames._arena.segment.size <= size
        assert frames.size > size - 2 * FRAME_SIZE - size // 500


def test_memory_that_somebody_else_takes_is_a_warning_and_frames_go_on() -> None:
    script = f"""
import os, sys, tempfile, warnings
from castore import Store
from tests.helpers import mixed
with tempfile.TemporaryDirectory() as folder, Store(folder + "/s", memory=0, shared_memory="60MB") as store:
    data = mixed(160 * {FRAME_SIZE})
    store.put("a", data, codec="zstd")
    hog = os.open("/dev/shm/hog", os.O_RDWR | os.O_CREAT)
    left = os.statvfs("/dev/shm"); os.posix_fallocate(hog, 0, left.f_bavail * left.f_frsize - (24 << 20))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            assert store.get("a") == data
    print(len(caught), caught[0].message)
    print(store.shared_frames.held > 10 * {FRAME_SIZE}, store.shared_frames.hits > 20)
"""
    told, went_on = in_small_shm(script, "66M").splitlines()
    assert told.startswith("1 no more frames are shared than 1"), "one warning, not hundreds"
    assert "/dev/shm has " in told
    assert went_on == "True True"


# --- the right bytes, whatever happens ----------------------------------------------------------------------


def test_a_name_that_is_put_anew_is_read_anew(store: Store) -> None:
    for seed in range(3):
        store.put("a", mixed(SIZE, seed), codec="zstd")
        assert read_all(store, "a") == mixed(SIZE, seed)
        store.gc(grace=0)


def test_wrong_bytes_in_the_tier_cost_no_good_object_its_place(store: Store) -> None:
    data = mixed(SIZE)
    store.put("a", data, codec="zstd")
    assert store.get("a") == data
    scribble(tier(store), data)
    assert store.get("a") == data, "whole reads check the digest over what they took from the tier too"
    assert store.verify().bad == []
    misses = tier(store).misses
    assert store.get("a") == data
    assert tier(store).misses == misses, "what was decoded anew is there again"


def scribble(frames: SharedFrames, data: bytes) -> None:
    at = bytes(frames._arena.segment.buffer).find(data[:1000])
    assert at >= 0
    frames._arena.segment.buffer[at + 10] ^= 1


def test_verify_reads_the_disk(store: Store) -> None:
    store.put("a", mixed(SIZE), codec="zstd")
    store.get("a")
    path, _, _ = payload(store, "a")
    flip(path, 5000)
    assert [found.names for found in store.verify().bad] == [["a"]]


def test_frames_of_a_damaged_object_are_not_those_of_a_good_one(store: Store) -> None:
    right = mixed(SIZE)
    pieces = [right[place : place + FRAME_SIZE] for place in range(0, SIZE, FRAME_SIZE)]
    wrong = b"".join([*reversed(pieces[:-1]), pieces[-1]])  # which takes as many bytes on disk
    store.put("right", right, codec="zstd")
    store.put("wrong", wrong, codec="zstd")
    place, other = payload(store, "right")[0], payload(store, "wrong")[0]
    os.replace(other, place)  # every frame of it passes its own check
    with store.open("right") as file:
        file.seek(3 * FRAME_SIZE)
        assert file.read(100) == wrong[3 * FRAME_SIZE :][:100], "this tests nothing"
    with Store(store.path, memory=0) as plain:
        assert plain.get("right") is None  # found by a process without the tier
    store.put("right", right, codec="zstd")
    assert read_all(store, "right") == right


def test_damage_is_an_error_as_without_the_tier(store: Store) -> None:
    store.put("a", mixed(SIZE), codec="zstd")
    flip(payload(store, "a")[0], 5000)
    with store.open("a") as file, pytest.raises(CorruptError):
        file.read(10)
    assert store.get("a") is None


@pytest.mark.parametrize("before", [0, 10])
def test_an_open_file_reads_on_when_its_store_is_closed(folder: Path, before: int) -> None:
    data = mixed(SIZE)
    with Store(folder, memory=0, shared_memory=SHARED) as store:
        store.put("a", data, codec="zstd")
        file = store.open("a")
        assert file.read(before) == data[:before]
    with file:
        assert file.read() == data[before:]


def test_the_last_users_kill_leaves_nothing_for_long(folder: Path) -> None:
    with Store(folder, memory=0) as store:
        store.put("a", mixed(SIZE), codec="zstd")
    here, there = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            Store(folder, memory=0, shared_memory=SHARED).get("a")
            os.write(there, b"x")
            time.sleep(600)
        finally:
            os._exit(1)
    assert os.read(here, 1) == b"x"
    os.close(here)
    os.close(there)
    assert segment_of(folder).exists()
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    # No process uses it, so another size is accepted. Any program of this machine that makes a segment may
    # have removed it by now.
    with Store(folder, memory=0, shared_memory="9MB") as store:
        assert tier(store).held == 0
        assert store.get("a") == mixed(SIZE)
