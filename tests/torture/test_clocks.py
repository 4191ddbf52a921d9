"""A clock that jumps by a year, forth and back, costs misses at most: no crash, and nothing stays wrong.

Only `time.time` jumps, as when a user sets the date: the monotonic clock continues. Daemons started here have
the same date (the folder of a `sitecustomize.py` comes first on their path).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import castore_fuse
from castore import Store
from castore.index import mounts
from castore.repair import doctor
from tests.helpers import agrees_with_disk, in_processes, noise, text
from tests.mount.conftest import forget_pages
from tests.torture.crowd import crowd
from tests.torture.random_kills import kill_at_random

YEAR = 365 * 86_400.0
_DAEMONS_CLOCK = """
import time

real, shift = time.time, {shift!r}
time.time = lambda: real() + float(open(shift).read())
"""
real_time = time.time
Clock = Callable[[float], None]


@pytest.fixture
def clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Clock:
    """``clock(seconds)`` sets the clock of all processes that much ahead of the true one."""
    folder = tmp_path / "clock"
    folder.mkdir()
    shift = folder / "shift"
    (folder / "sitecustomize.py").write_text(_DAEMONS_CLOCK.format(shift=os.fspath(shift)))
    monkeypatch.syspath_prepend(folder)  # daemons inherit this process's path

    def set_clock(seconds: float) -> None:
        new = folder / str(os.getpid())
        new.write_text(repr(seconds))
        new.rename(shift)
        monkeypatch.setattr(time, "time", lambda: real_time() + seconds)

    set_clock(0.0)
    return set_clock


@pytest.fixture(params=[YEAR, -YEAR], ids=["ahead", "back"])
def jump(request: pytest.FixtureRequest) -> float:
    return float(request.param)


def test_puts_gets_and_expiry_go_on_over_a_jump(store: Store, clock: Clock, jump: float) -> None:
    store.put("before", text(5_000))
    for shift in (jump, 0.0):
        clock(shift)
        assert store.get("before") == text(5_000), "what has no expiry went"
        store.put("kept", noise(40_000), ttl="1h")
        assert store.get("kept") == noise(40_000)
        store.put("short", text(100), ttl=1000)
        assert store.get("short") == text(100)
        clock(shift + 2000)
        assert store.get("short") is None
        store.gc()
        store.put("before", text(5_000))
        assert store.entry("kept") is not None
        assert store.stat().entries == 2
        assert store.verify().bad == []
    agrees_with_disk(store)
    assert doctor.examine(store.path) == []


def test_an_expiry_put_under_a_wrong_clock_is_right_again_with_the_next_put(
    store: Store, clock: Clock, jump: float
) -> None:
    clock(jump)
    store.put("name", b"x", ttl="1d")
    clock(0.0)
    assert (store.get("name") is None) == (jump < 0)  # the expiry is a date, and that date is over
    store.put("name", b"x", ttl="1d")
    entry = store.entry("name")
    assert entry is not None
    assert entry.expires == pytest.approx(time.time() + 86_400, abs=60)
    assert store.get("name") == b"x"


def test_orphans_of_a_wrong_clock_go_when_their_grace_is_over(
    store: Store, clock: Clock, jump: float
) -> None:
    clock(jump)
    store.put("name", noise(40_000))
    store.delete("name")
    assert store.gc(grace="1h").waiting > 0
    clock(0.0)
    store.gc(grace="1h")
    assert store.stat().blobs == 0
    agrees_with_disk(store)


def test_what_was_read_since_the_clock_was_set_right_outlives_what_was_not(
    store: Store, clock: Clock, jump: float
) -> None:
    def put_read_and_collect(folder: str, seed: int) -> None:
        """Put four values, and make room for them by removing the three least recently used others."""
        names = [f"{folder}/{number}" for number in range(4)]
        store.put_many((name, noise(20_000, seed + number)) for number, name in enumerate(names))
        kept = [*names, *read]
        assert None not in store.get_many(kept)
        store.gc(max_size=store.stat().stored - 50_000, grace=0)
        assert {entry.name for entry in store.entries()} >= set(kept)

    read: list[str] = []
    store.put_many((f"first/{number}", noise(20_000, number)) for number in range(4))
    clock(jump)
    put_read_and_collect("second", 10)
    clock(0.0)
    read = ["second/0"]
    put_read_and_collect("third", 20)


@pytest.mark.parametrize("memory", [0, "64MB"])
def test_what_is_remembered_changes_and_expires_whatever_the_clock_says(
    tmp_path: Path, clock: Clock, jump: float, memory: int | str
) -> None:
    with Store(tmp_path / "store", memory=memory) as reader, Store(tmp_path / "store", memory=0) as writer:
        writer.put("name", b"old")
        writer.put("hour", b"x", ttl="1h")
        for name in ("name", "hour") * 3:
            assert reader.get(name) is not None
        unread = writer.entry("name")
        clock(jump)
        assert reader.get("hour") == (None if jump > 0 else b"x")
        assert reader.get("name") == b"old"
        assert writer.entry("name") != unread, "what was counted waits for the clock"
        writer.put("name", b"new")
        assert reader.get("name") == b"new"
        clock(0.0)
        assert [reader.get(name) for name in ("name", "hour")] == [b"new", b"x"]


def test_a_pinned_mount_keeps_what_lost_its_name_whatever_the_clock_says(
    store: Store, clock: Clock, jump: float
) -> None:
    values = {f"n/{number}": noise(300_000, number) for number in range(4)}
    store.put_many(values.items())
    clock(jump)
    with castore_fuse.mounted(store, pin=True) as root:
        opened = {name: (root / name).open("rb", buffering=0) for name in values}
        for turn, shift in enumerate((0.0, jump, -jump)):
            clock(shift)
            store.put_many((name, b"new %d" % turn) for name in values)
            store.gc(max_size=0, grace=0)
            for name, file in opened.items():
                forget_pages(file.fileno())
                file.seek(0)
                assert file.read() == values[name]
        for file in opened.values():
            file.close()
    clock(0.0)
    store.gc(max_size=0, grace=0)
    assert store.stat().blobs == 0
    agrees_with_disk(store)


def test_a_live_mount_that_was_taken_for_dead_is_on_the_list_again_with_its_next_beat(
    store: Store, clock: Clock, jump: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    mount = mounts.Registration(store.index, "/mnt", "", pinned=True)
    clock(jump)
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(mounts, "pid_namespace", lambda: 1)  # as in another container
        assert mounts.remove_dead(store.index) == ["/mnt"]
    mount.refresh()
    assert store.stat().mounts == ["/mnt"]
    mount.remove()
    assert store.stat().mounts == []


def test_crowds_and_kills_come_through_with_clocks_that_differ(
    store: Store,
    tmp_path: Path,
    clock: Clock,
    jump: float,
    scale: Callable[[int, int], int],
    figure: Callable[[str], None],
) -> None:
    clock(jump)
    crowd(store, scale(0, 30))
    kills = scale(3, 100)
    kill_at_random(tmp_path / "killed", kills)

    def put_at(process: int) -> None:
        clock((process - 1) * jump)  # three processes, three years
        for turn in range(50):
            store.put(f"{process}/{turn}", noise(2_000, turn))
            assert store.get(f"{process}/{turn}") == noise(2_000, turn)
            store.put(f"hour {process}/{turn}", noise(2_000, turn), ttl="1h")
            # A gc whose clock is a year ahead may have removed it.
            assert store.get(f"hour {process}/{turn}") in (noise(2_000, turn), None)
            if turn % 10 == 0:
                store.gc(grace=0)

    clock(0.0)
    in_processes(3, put_at)
    agrees_with_disk(store)
    direction = "ahead" if jump > 0 else "back"
    figure(f"clock a year {direction}: a crowd and {kills} kills, nothing lost")
