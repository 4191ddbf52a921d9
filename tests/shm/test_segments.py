"""Segments of shared memory: one for all who name it, gone with the last, and never a bus error."""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from castore.errors import FullError, InvalidValueError, SegmentError
from castore.shm.free_space import SHM, memory_free, shm_free, shm_size
from castore.shm.segments import Segment, clear_dead, is_alive, path_of

METHODS = ("fork", "forkserver", "spawn")


@pytest.fixture
def name() -> Iterator[str]:
    unique = f"test-{os.getpid()}-{time.monotonic_ns()}"
    yield unique
    gc.collect()
    assert not path_of(unique).exists(), "a test left its segment behind"


def _double(segment: Segment, pipe: Connection) -> None:
    pipe.send(bytes(segment.buffer[:4]))
    segment.buffer[0] *= 2
    pipe.send(segment.closed)
    pipe.close()


@pytest.mark.parametrize("method", METHODS)
def test_children_of_every_start_method_share_the_bytes(method: str, name: str) -> None:
    context: Any = multiprocessing.get_context(method)
    segment = Segment(name, 4096, {"kind": "test"})
    segment.buffer[:4] = b"\x05abc"
    here, there = context.Pipe()
    child = context.Process(target=_double, args=(segment, there))
    child.start()
    there.close()  # so that the end of a child that failed is seen
    assert here.recv() == b"\x05abc"
    assert here.recv() is False
    child.join(120)
    assert child.exitcode == 0
    assert segment.buffer[0] == 10
    assert path_of(name).exists(), "a child that leaves must not take the segment along"
    segment.close()


def test_bytes_are_zero_at_first_and_shared_by_name(name: str) -> None:
    one = Segment(name, 10_000, {})
    other = Segment(name, 10_000, {})
    assert (one.created, other.created) == (True, False)
    assert bytes(other.buffer) == bytes(10_000)
    one.buffer[9_999] = 7
    assert other.buffer[9_999] == 7
    one.close()
    assert other.buffer[9_999] == 7
    assert is_alive(name)
    other.close()
    assert not is_alive(name)


def test_the_last_user_removes_the_file_also_by_garbage_collection(name: str) -> None:
    segment = Segment(name, 100, {})
    view = segment.buffer
    assert path_of(name).exists()
    del segment
    gc.collect()
    assert not path_of(name).exists()
    view[0] = 1  # the memory lives as long as a view of it


def test_who_attaches_takes_the_size_that_is_there(name: str) -> None:
    with_size = Segment(name, 5000, {"items": 3})
    assert Segment(name, 9999, {"items": 3}).size == 5000
    with_size.close()


def test_another_layout_is_an_error_with_both_values(name: str) -> None:
    segment = Segment(name, 100, {"items": 3, "dtype": "uint8"})
    with pytest.raises(SegmentError, match=r"items=3, here 4; take another name"):
        Segment(name, 100, {"items": 4, "dtype": "uint8"})
    segment.close()


def test_more_than_dev_shm_has_is_an_error_with_the_sizes_before_anything_is_taken(name: str) -> None:
    with pytest.raises(
        FullError, match=r"/dev/shm has .* free of .*, and castore-.* needs 1\.1 PB: lower the limit"
    ):
        Segment(name, 1_100_000_000_000_000, {})
    assert not path_of(name).exists()
    assert memory_free() > 0
    assert shm_free() <= shm_size()


FULL = """
import os, sys
import castore.shm.segments as segments
from castore.errors import FullError
segment = segments.Segment("grows", 64 << 20, {}, reserve=1 << 20)
segment.buffer[: 1 << 20] = bytes(1 << 20)
with open("/dev/shm/hog", "wb", buffering=0) as hog:  # somebody else fills the rest
    try:
        while True:
            assert hog.write(bytes(1 << 16))
    except OSError:
        pass
try:
    segment.reserve(1 << 20, 64 << 20)
except FullError as error:
    print("full:", error)
segment.buffer[: 1 << 20] = bytes(1 << 20)
try:
    segments.Segment("more", 80 << 20, {})
except FullError as error:
    print("full:", error)
"""


def test_a_dev_shm_that_fills_up_meanwhile_is_an_error_and_no_bus_error(tmp_path: Path) -> None:
    script = tmp_path / "full.py"
    script.write_text(FULL)
    # A mount namespace of its own, so that only this child has the small /dev/shm.
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c",
        f"mount -t tmpfs -o size=66M tmpfs /dev/shm && {sys.executable} {script}"],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 2
    assert all(line.startswith("full: /dev/shm has ") and "of 69.2 MB" in line for line in lines), lines


def _hold_until_killed(name: str, pipe: Connection) -> None:
    held = Segment(name, 4096, {})
    held.buffer[0] = 1
    pipe.send("held")
    signal.pause()


def test_what_a_killed_process_left_is_cleared_by_the_next_run(name: str) -> None:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    child = context.Process(target=_hold_until_killed, args=(name, there))
    child.start()
    there.close()
    assert here.recv() == "held"
    assert is_alive(name)
    assert name not in clear_dead(), "a living process's segment was cleared"
    assert child.pid is not None
    assert path_of(name).exists()
    os.kill(child.pid, signal.SIGKILL)
    child.join(120)
    # Nobody is left to remove it, but any program of this machine that makes a segment.
    fresh = Segment(name, 4096, {"another": "layout"})
    assert fresh.created
    assert fresh.buffer[0] == 0
    fresh.close()


def test_making_any_segment_clears_all_dead_ones(name: str) -> None:
    here, there = os.pipe()
    pid = os.fork()
    if not pid:
        held = Segment(f"{name}-dead", 4096, {})
        os.write(there, b"x" if held.created else b"")
        signal.pause()
    assert os.read(here, 1) == b"x"
    os.close(here)
    os.close(there)
    assert path_of(f"{name}-dead").exists()
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    Segment(name, 100, {}).close()
    assert not path_of(f"{name}-dead").exists()


_LEAVES_BEFORE_ITS_CHILD = """
import os, signal, sys
from castore.shm.segments import Segment
segment = Segment(sys.argv[1], 4096, {})
here, there = os.pipe()
if not (child := os.fork()):
    os.write(there, b"x")
    signal.pause()
os.read(here, 1)
segment.close()
os.kill(child, signal.SIGKILL)
os.waitpid(child, 0)
"""


def test_a_process_that_ends_clears_what_its_killed_child_left(name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _LEAVES_BEFORE_ITS_CHILD, name], capture_output=True, text=True, timeout=60
    )
    assert (done.stdout, done.stderr, done.returncode) == ("", "", 0)
    assert not path_of(name).exists()


def test_half_made_segments_are_made_anew(name: str) -> None:
    path_of(name).write_bytes(bytes(8192))  # its maker died before it wrote the header
    segment = Segment(name, 100, {})
    assert segment.created
    segment.close()


def _join_and_count(name: str, rounds: int, pipe: Connection) -> None:
    for _ in range(rounds):
        segment = Segment(name, 64, {"kind": "race"})
        word = segment.buffer[:8].cast("Q")
        with segment.lock():
            word[0] += 1
        word.release()
        segment.close()
    pipe.send("done")


def test_processes_that_come_and_go_never_meet_a_broken_segment(name: str) -> None:
    context = multiprocessing.get_context("fork")
    held = Segment(name, 64, {"kind": "race"})
    pipes = []
    for _ in range(4):
        here, there = context.Pipe()
        context.Process(target=_join_and_count, args=(name, 200, there)).start()
        there.close()
        pipes.append(here)
    assert [pipe.recv() for pipe in pipes] == ["done"] * 4
    assert held.buffer[:8].cast("Q")[0] == 800
    held.close()
    # Without a process that stays: each round may be the first or the last.
    for _ in range(4):
        here, there = context.Pipe()
        context.Process(target=_join_and_count, args=(name, 200, there)).start()
        there.close()
        pipes.append(here)
    assert [pipe.recv() for pipe in pipes[4:]] == ["done"] * 4
    for child in multiprocessing.active_children():
        child.join(120)


def test_another_users_segment_is_an_error_that_says_whose(name: str) -> None:
    path = path_of(name)
    other = SHM / f"test {name}"  # as long as it is ours, any process of this machine may clear it
    other.write_bytes(b"not ours")
    os.chown(other, 12345, 12345)
    other.rename(path)
    try:
        with pytest.raises(SegmentError, match=r"belongs to user 12345, not to user 0"):
            Segment(name, 100, {})
    finally:
        path.unlink()


def test_a_link_in_the_place_of_a_segment_is_not_followed(name: str, tmp_path: Path) -> None:
    target = tmp_path / "precious"
    target.write_bytes(b"precious")
    path_of(name).symlink_to(target)
    try:
        with pytest.raises(SegmentError, match="cannot be opened"):
            Segment(name, 100, {})
    finally:
        path_of(name).unlink()
    assert target.read_bytes() == b"precious"


@pytest.mark.parametrize("bad", ["", "a/b", "../x", "x" * 201, "a b", "ü"])
def test_names_that_are_no_file_names_are_refused(bad: str) -> None:
    with pytest.raises(InvalidValueError, match="cannot name a shared segment"):
        Segment(bad, 100, {})


def test_a_pickle_holds_no_data_and_needs_a_living_segment(name: str) -> None:
    segment = Segment(name, 1 << 20, {})
    pickled = pickle.dumps(segment)
    assert len(pickled) < 300
    again = pickle.loads(pickled)
    segment.buffer[77] = 3
    assert again.buffer[77] == 3
    again.close()
    segment.close()
    with pytest.raises(SegmentError, match="is gone: the process that pickled it must live"):
        pickle.loads(pickled)


def test_the_lock_keeps_threads_and_processes_apart(name: str) -> None:
    segment = Segment(name, 64, {})
    word = segment.buffer[:8].cast("Q")

    def count() -> None:
        for _ in range(500):
            with segment.lock():
                value = word[0]
                time.sleep(0)
                word[0] = value + 1

    children = []
    for _ in range(3):
        pid = os.fork()
        if not pid:
            count()
            os._exit(0)
        children.append(pid)
    threads = [threading.Thread(target=count) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for pid in children:
        assert os.waitpid(pid, 0)[1] == 0
    assert word[0] == 3000
    segment.close()


def test_a_killed_holder_of_the_lock_leaves_nobody_waiting(name: str) -> None:
    segment = Segment(name, 64, {})
    pid = os.fork()
    if not pid:
        with segment.lock():
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    with segment.lock():
        pass
    segment.close()


_LEAVES_AFTER_A_FORK = """
import os, sys
ready, go = os.pipe()
# Runs in the child before castore's own: the parent has left by then.
os.register_at_fork(after_in_child=lambda: (os.close(go), os.read(ready, 1)))
from castore.shm.segments import Segment
segment = Segment(None, 64, {})
buffer = segment.buffer
pid = os.fork()
if not pid:
    buffer[0] = 7
    os._exit(buffer[0])
segment.close()
os.close(go)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


def test_a_child_does_not_hang_whose_parent_leaves_just_after_the_fork() -> None:
    done = subprocess.run([sys.executable, "-c", _LEAVES_AFTER_A_FORK], timeout=60, check=False)
    assert done.returncode == 7


_FORKS_WHILE_A_THREAD_LEAVES = """
import fcntl, os, sys
from castore.shm import segments
segment = segments.Segment(sys.argv[1], 64, {})
unlock, held = segments._unlock_and_close, []
def fork_first(fd):  # as another thread might, while this one holds the lock for itself alone
    ready, go = os.pipe()
    pid = os.fork()
    if not pid:
        os.close(go)
        os.read(ready, 1)
        os._exit(0)
    held.append((go, pid))
    unlock(fd)
segments._unlock_and_close = fork_first
assert not segments.is_alive("nobody")
fd = os.open(segments.path_of(sys.argv[1]), os.O_RDWR)
segment.close()
fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)  # nobody has the lock any more, though the child lives
for go, pid in held:
    os.close(go)
    os.waitpid(pid, 0)
"""


def test_a_child_forked_while_a_segment_is_left_keeps_nobody_waiting(name: str) -> None:
    command = [sys.executable, "-c", _FORKS_WHILE_A_THREAD_LEAVES, name]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_writes_to_the_private_bytes_stay_here(name: str) -> None:
    segment = Segment(name, 100, {})
    private = segment.private()
    segment.buffer[3] = 9
    assert private[3] == 9
    private[3] = 1
    assert segment.buffer[3] == 9
    segment.close()


def test_a_closed_segment_says_so(name: str) -> None:
    segment = Segment(name, 100, {})
    segment.close()
    segment.close()
    with pytest.raises(SegmentError, match="is closed"), segment.lock():
        pass


def test_no_resource_tracker_warns_about_segments() -> None:
    script = "from castore.shm.segments import Segment; s = Segment(None, 1 << 20, {}); print(s.name)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    assert done.stderr == ""
    assert not path_of(done.stdout.strip()).exists()
