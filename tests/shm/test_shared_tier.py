"""The tier of shared frames by itself: never another object's bytes, never half a frame; evictions."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from contextlib import closing
from pathlib import Path

import pytest

from castore.shm.segments import path_of
from castore.shm.shared_frames import (
    _HEAD,
    ObjectFrames,
    SharedFrames,
    _needed,
    segment_name,
)
from tests.helpers import LONG, in_processes


class Pieces:
    """Frames of known bytes, put through a tier by themselves."""

    size = 1000

    def __init__(self, frames: SharedFrames, digest: bytes = bytes(32)) -> None:
        self.frames = frames
        # Keys of no file: with its inode and times, other keys would share a place in every run.
        self.object = ObjectFrames(frames, digest + bytes(16))

    @classmethod
    def bytes_of(cls, index: int) -> bytes:
        return (b"%08d" % index * (cls.size // 8))[: cls.size - index % 7]

    def read(self, index: int) -> bool:
        """Read as a reader does; returns whether the tier had the frame."""
        want = self.bytes_of(index)
        found = self.object.read(index, 0, len(want))
        if found is None:
            self.object.offer(index, want)
            return False
        assert found == want, f"{index} is another frame's, or half"
        return True


def small_tier(folder: Path, frames: int) -> SharedFrames:
    """A tier for exactly that many of these frames."""
    made = SharedFrames(folder, _needed(frames, _HEAD + Pieces.size), Pieces.size)
    assert made.size == frames * 1088
    return made


@pytest.mark.parametrize("room", [1, 3, 40])
def test_frames_that_meet_in_a_place_are_misses_and_never_each_other(tmp_path: Path, room: int) -> None:
    with closing(small_tier(tmp_path, room)) as frames:
        one, other = Pieces(frames), Pieces(frames, b"\1" * 32)
        chance = random.Random(room)
        for _ in range(5000):
            (one if chance.random() < 0.5 else other).read(int(chance.paretovariate(0.7)) % 200)
        assert frames.hits > 500
        assert frames.held <= frames.size


def test_epochs_larger_than_the_tier_hit_the_part_that_fits(tmp_path: Path) -> None:
    with closing(small_tier(tmp_path, 100)) as frames:
        pieces, chance = Pieces(frames), random.Random(0)
        for shuffled in (True, False):
            for _ in range(4):
                order = list(range(200))
                if shuffled:
                    chance.shuffle(order)
                found = sum(pieces.read(index) for index in order)
            assert found >= 95, "LRU would have hit hardly any"


def test_what_becomes_hot_comes_in(tmp_path: Path) -> None:
    with closing(small_tier(tmp_path, 100)) as frames:
        pieces = Pieces(frames)
        for start in (0, 1000, 2000):
            for _ in range(8):
                found = sum(pieces.read(index) for index in range(start, start + 50))
            assert found >= 45


def test_many_processes_over_a_small_tier_read_the_right_bytes(tmp_path: Path) -> None:
    frames = small_tier(tmp_path, 20)

    def work(number: int) -> int:
        pieces, chance = Pieces(frames), random.Random(number)
        stop = time.monotonic() + (2 if LONG else 0.5)
        hits = 0
        while time.monotonic() < stop or hits <= 100:
            hits += pieces.read(int(chance.paretovariate(0.8)) % 100)
        return hits

    assert min(in_processes(4, work)) > 100
    frames.close()


def test_a_process_killed_while_it_writes_leaves_no_half_frame(tmp_path: Path) -> None:
    frames = small_tier(tmp_path, 20)
    pieces = Pieces(frames)
    path = path_of(segment_name(tmp_path))
    chance = random.Random(0)
    for _ in range(30 if LONG else 12):
        began, begin = os.pipe()
        pid = os.fork()
        if not pid:
            try:
                for turn in range(10**9):
                    pieces.object.offer(turn % 60, pieces.bytes_of(turn % 60))
                    if not turn:
                        os.write(begin, b"x")
            finally:
                os._exit(1)
        os.close(begin)
        assert os.read(began, 1) == b"x"
        os.close(began)
        time.sleep(0.01 + 0.02 * chance.random())
        os.kill(pid, signal.SIGKILL)
        assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGKILL
        assert path.exists()
        for index in range(60):
            pieces.read(index)
    frames.close()
    assert not path.exists()


class Killer(bytes):
    """A frame whose writer is killed when it has written the key and not yet the frame."""

    asked = 0

    def __len__(self) -> int:
        self.asked += 1
        if self.asked == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__len__()


def test_the_extents_of_killed_writers_serve_again(tmp_path: Path) -> None:
    frames = small_tier(tmp_path, 20)
    pieces = Pieces(frames)
    for index in range(12):
        pid = os.fork()
        if not pid:
            try:
                pieces.object.offer(100 + index, Killer(800))
            finally:
                os._exit(1)
        assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGKILL
    assert frames.held == 12 * 1088, "they were killed before they wrote: this tests nothing"
    for _ in range(20):
        found = sum(pieces.read(index) for index in range(18))
    assert found >= 17
    frames.close()


def test_a_frame_that_two_decoded_at_once_is_kept_once(tmp_path: Path) -> None:
    with closing(small_tier(tmp_path, 20)) as frames:
        pieces = Pieces(frames)
        for _ in range(3):
            pieces.object.offer(1, pieces.bytes_of(1))
        assert frames.held == 1088
        assert pieces.read(1)


def test_a_child_forked_while_threads_write_is_not_stuck(tmp_path: Path) -> None:
    frames = small_tier(tmp_path, 20)
    pieces, stop = Pieces(frames), threading.Event()

    def work() -> None:
        chance = random.Random()
        while not stop.is_set():
            pieces.read(chance.randrange(40))

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(20 if LONG else 6):
            in_processes(1, lambda _: [pieces.read(index) for index in range(40)])
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    frames.close()
