"""An arena: parts that do not overlap, the same in all processes, refused by other versions of castore."""

from __future__ import annotations

import fcntl
import json
import multiprocessing
import os
import pickle
import signal
import struct
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from castore.errors import FullError, SegmentError
from castore.shm.arena import Arena, Layout, Table
from castore.shm.extents import Extents
from castore.shm.free_space import SHM
from castore.shm.segments import LAYOUT_VERSION, path_of
from castore.shm.shared_frames import SharedFrames, segment_name

METHODS = ("fork", "forkserver", "spawn")
TABLES = [Table("bytes", "B", 13), Table("ints", "I", 7), Table("longs", "Q", 5), Table("none", "B", 0)]


def layout(extents: int | None = 9) -> Layout:
    return Layout(9, extents=extents, counters=2, tables=TABLES)


@pytest.fixture
def name() -> Iterator[str]:
    unique = f"test-{os.getpid()}-{time.monotonic_ns()}"
    yield unique
    assert not path_of(unique).exists(), "a test left its arena behind"


# --- parts --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("extents", [None, 9])
def test_the_parts_of_an_arena_do_not_overlap(extents: int | None) -> None:
    with closing(Arena(None, layout(extents), 1000, {})) as arena:
        names = ["bytes", "ints", "longs", "none", "counters", "slots"]
        parts = [arena.table(part) for part in (*names, "extent of slot", "rows")[: None if extents else 6]]
        parts.append(arena.data)
        for number, part in enumerate(parts, 1):
            part.cast("B")[:] = bytes([number]) * part.nbytes
        assert [set(part.tobytes()) for part in parts] == [
            {number} if part.nbytes else set() for number, part in enumerate(parts, 1)
        ]
        assert sum(part.nbytes for part in parts) <= arena.segment.size


def test_an_arena_has_all_of_its_tables_in_memory_before_another_process_attaches(name: str) -> None:
    wide = Layout(100_000, extents=100_000, tables=[Table("uses", "Q", 100_000)])
    with closing(Arena(name, wide, 1 << 30, {})) as arena:
        taken = os.stat(path_of(name)).st_blocks * 512
        assert wide.reserved <= taken < wide.reserved + (1 << 20), "the data are reserved as they are used"
        assert arena.size == 1 << 30


def test_slots_of_one_size_are_reserved_whole(name: str) -> None:
    with closing(Arena(name, Layout(10), 10 << 20, {})):
        assert os.stat(path_of(name)).st_blocks * 512 >= 10 << 20


def _write_and_count(arena: Arena, pipe: Connection) -> None:
    extents, tallies = Extents(arena), arena.tallies()
    record = extents.read(3)
    with arena.lock():
        extents.put(4, [b"from the child"], 14)
        arena.table("longs")[4] = 7
    tallies.add(1, 5)
    pipe.send(record)
    pipe.close()


@pytest.mark.parametrize("method", METHODS)
def test_children_of_every_start_method_share_records_tables_and_counters(method: str) -> None:
    context: Any = multiprocessing.get_context(method)
    with closing(Arena(None, layout(), 10_000, {})) as arena:
        extents, tallies = Extents(arena), arena.tallies()
        with arena.lock():
            extents.put(3, [b"from the parent"], 15)
        tallies.add(1)
        here, there = context.Pipe()
        child = context.Process(target=_write_and_count, args=(arena, there))
        child.start()
        there.close()  # so that the end of a child that failed is seen
        assert here.recv() == b"from the parent"
        child.join(60)
        assert child.exitcode == 0
        assert bytes(extents.read(4) or b"") == b"from the child"
        assert arena.table("longs")[4] == 7
        assert (tallies.total(0), tallies.total(1)) == (0, 6)


def test_a_pickle_holds_no_data() -> None:
    with closing(Arena(None, layout(), 1 << 20, {})) as arena:
        assert len(pickle.dumps(arena)) < 1000


def test_the_size_is_asked_of_the_creator_alone(name: str) -> None:
    with closing(Arena(name, layout(), lambda: 5000, {})) as arena:
        other = Arena(name, layout(), lambda: pytest.fail("asked although the arena is there"), {})
        assert other.size == arena.size == 5000
        other.close()


def test_an_arena_that_the_machine_cannot_hold_is_an_error_that_leaves_nothing(name: str) -> None:
    with pytest.raises(FullError, match="lower the limit"):
        Arena(name, layout(), 1_100_000_000_000_000, {})
    assert not path_of(name).exists()


# --- other versions of castore ------------------------------------------------------------------------------


@contextmanager
def held_by_another_process(name: str, header: bytes) -> Iterator[None]:
    """A segment with this header, in use by a process that runs another version of castore."""
    here, there = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            # Nothing at that path may be without a lock: any process of this machine would clear it.
            other = SHM / f"test {name}"
            with open(other, "wb") as file:
                fcntl.flock(file, fcntl.LOCK_SH)
                file.write(header.ljust(8192, b"\0"))
                file.flush()
                other.rename(path_of(name))
                os.write(there, b"x")
                signal.pause()
        finally:
            os._exit(1)
    os.close(there)
    try:
        assert os.read(here, 1) == b"x", "it failed"
        yield
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(here)
        path_of(name).unlink(missing_ok=True)


def header_of(description: dict[str, Any], magic: bytes = b"castore1") -> bytes:
    text = json.dumps(description).encode()
    return struct.pack("<8sQ", magic, len(text)) + text


FOREIGN = {
    "before layouts had versions": (header_of({"kind": "test"}), "unknown"),
    "a later one": (header_of({"version": 99, "kind": "test"}), "99"),
    "another magic number": (header_of({"version": 99}, b"castore9"), "unknown"),
    "a header of another form": (b"castore1" + bytes([255]) * 100, "unknown"),
    "a list": (struct.pack("<8sQ", b"castore1", 2) + b"[]", "unknown"),
}


@pytest.mark.parametrize(("header", "version"), FOREIGN.values(), ids=FOREIGN)
def test_an_arena_of_another_version_of_castore_is_refused_and_left_alone(
    name: str, header: bytes, version: str
) -> None:
    with held_by_another_process(name, header):
        before = path_of(name).read_bytes()
        expected = (
            rf"another version of castore \(layout {version}, here {LAYOUT_VERSION}\); end the processes"
        )
        with pytest.raises(SegmentError, match=expected):
            Arena(name, layout(), 1000, {"kind": "test"})
        assert path_of(name).read_bytes() == before


def test_shared_frames_of_another_version_are_refused(tmp_path: Path) -> None:
    old = header_of({"kind": "frames", "shared_memory": 9_000_000, "frame": 1000})
    with (
        held_by_another_process(segment_name(tmp_path), old),
        pytest.raises(SegmentError, match=r"layout unknown, here \d+\); end the processes"),
    ):
        SharedFrames(tmp_path, 9_000_000, 1000)


def test_an_arena_that_a_dead_process_of_another_version_left_is_made_anew(name: str) -> None:
    path_of(name).write_bytes(header_of({"version": 99}, b"castore9").ljust(8192, b"\0"))
    with closing(Arena(name, layout(), 1000, {})) as arena:
        assert arena.segment.created
