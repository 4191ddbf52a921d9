"""Locks of keys across threads and processes: waiting for one, and claiming one."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from castore import Store
from castore.errors import InvalidValueError
from castore.system import single_flight
from castore.system.single_flight import ComputeLocks


@pytest.fixture
def locks(tmp_path: Path) -> ComputeLocks:
    return ComputeLocks(tmp_path / "locks", 0o600)


def elsewhere(function: Callable[[], Any]) -> Any:
    """The result of a function in another thread."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(function()))
    thread.start()
    thread.join()
    return found[0]


def in_child(function: Callable[[], bool]) -> bool:
    """Whether a function returns true in a forked child, which then ends."""
    child = os.fork()
    if not child:
        os._exit(0 if function() else 1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_claimed_key_cannot_be_claimed_by_any_thread_or_process_until_it_is_released(
    locks: ComputeLocks, tmp_path: Path
) -> None:
    release = locks.claim("key")
    assert release is not None
    assert locks.claim("key") is None
    assert elsewhere(lambda: locks.claim("key")) is None
    assert in_child(lambda: locks.claim("key") is None)
    assert in_child(lambda: ComputeLocks(tmp_path / "locks", 0o600).claim("key") is None)
    other = locks.claim("other key")
    assert other is not None
    elsewhere(release)
    again = elsewhere(lambda: locks.claim("key"))
    assert again is not None
    again()
    other()
    assert locks._threads == {}


def test_a_key_that_is_held_cannot_be_claimed(locks: ComputeLocks) -> None:
    with locks.hold("key"):
        assert locks.claim("key") is None
        assert in_child(lambda: locks.claim("key") is None)
    release = locks.claim("key")
    assert release is not None
    release()


def test_who_waits_for_a_claimed_key_goes_on_at_its_release(locks: ComputeLocks) -> None:
    release = locks.claim("key")
    assert release is not None
    waiting, got = threading.Event(), threading.Event()

    def wait() -> None:
        waiting.set()
        with locks.hold("key"):
            got.set()

    thread = threading.Thread(target=wait)
    thread.start()
    waiting.wait()
    assert not got.is_set()
    release()
    thread.join()
    assert got.is_set()


def test_a_thread_that_waits_for_its_own_claim_is_told(locks: ComputeLocks) -> None:
    release = locks.claim("key")
    assert release is not None
    with pytest.raises(InvalidValueError, match="asks for its own result"), locks.hold("key"):
        pass
    release()
    with locks.hold("key"):
        pass


def test_a_claim_ends_with_its_process_though_a_child_of_it_lives_on(
    locks: ComputeLocks, tmp_path: Path
) -> None:
    """A worker inherits the file of its parent's claim, and may outlive a killed parent."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        release = locks.claim("key")
        grandchild = os.fork()
        if not grandchild:
            os.write(write, f"{release is not None} {os.getpid()}\n".encode())
            os.close(write)
        threading.Event().wait(600)
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as lines:
        was_claimed, grandchild_id = lines.readline().split()
    try:
        assert was_claimed == "True"
        assert locks.claim("key") is None
        os.kill(child, 9)
        os.waitpid(child, 0)
        release = locks.claim("key")
        assert release is not None
        release()
    finally:
        os.kill(int(grandchild_id), 9)


def test_processes_that_claim_at_once_never_have_the_same_key(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    with context.Pool(3) as pool:
        claimed = pool.map(_claim_many, [tmp_path] * 3, chunksize=1)
        # The end of the context sends SIGTERM, for which some other test may have left a handler.
        pool.close()
        pool.join()
    assert sorted(key for keys in claimed for key in keys) == list(range(200))


def _claim_many(folder: Path) -> list[int]:
    """The keys that this process gets, of 200, and keeps."""
    locks = ComputeLocks(folder / "locks", 0o600)
    kept = [(number, locks.claim(str(number))) for number in range(200)]
    (folder / str(os.getpid())).touch()
    while len(list(folder.iterdir())) < 4:
        pass
    return [number for number, release in kept if release is not None]


@pytest.mark.parametrize("count", [2, 3, 5])
def test_threads_that_compute_each_others_keys_end_with_an_error_in_one_of_them(
    tmp_path: Path, count: int
) -> None:
    # Each thread has a `Store` of its own every second time: the circle leads over the lock file.
    stores = [Store(tmp_path / "store", memory=0) for _ in range(2)]
    started = threading.Barrier(count)
    found: list[object] = [None] * count

    def compute(number: int) -> object:
        started.wait(120)
        return [stores[number % 2].get_or_compute(f"k{(number + 1) % count}", lambda: "asked for")]

    def run(number: int) -> None:
        try:
            found[number] = stores[number % 2].get_or_compute(f"k{number}", lambda: compute(number))
        except InvalidValueError as error:
            found[number] = error

    threads = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()
    [at] = [number for number, one in enumerate(found) if isinstance(one, InvalidValueError)]
    assert "threads would wait for one another for ever" in str(found[at])
    assert f"the computation of 'k{at}' asks for 'k{(at + 1) % count}'" in str(found[at])
    for store in stores:
        store.close()


def test_threads_that_wait_without_a_circle_get_what_they_ask_for(tmp_path: Path) -> None:
    with Store(tmp_path / "store", memory=0) as store:

        def need(number: int) -> int:
            if number == 0:
                return 1
            return int(store.get_or_compute(f"k{number}", lambda: need(number - 1) + 1))

        found: list[int] = []
        threads = [threading.Thread(target=lambda at=at: found.append(need(at))) for at in (5, 4, 3, 5, 2, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(found) == [2, 3, 4, 5, 6, 6]


def test_a_lock_that_ends_in_another_thread_closes_no_circle(locks: ComputeLocks) -> None:
    block = locks.hold("a", may_move=True)
    block.__enter__()
    asks = threading.Event()

    def other() -> None:
        with locks.hold("b"):
            asks.set()
            with locks.hold("a"):
                pass

    thread = threading.Thread(target=other)
    thread.start()
    asks.wait(120)

    def end_when_both_wait() -> None:
        deadline = time.monotonic() + 240
        while len(single_flight._graph._waiting) < 2 and time.monotonic() < deadline:
            time.sleep(0.001)
        block.__exit__(None, None, None)

    ender = threading.Thread(target=end_when_both_wait)
    ender.start()
    with locks.hold("b"):
        pass
    thread.join()
    ender.join()
    assert locks._threads == {}


def test_a_forked_child_knows_no_holders_of_its_parent(locks: ComputeLocks) -> None:
    with locks.hold("a"):
        waits = threading.Thread(target=lambda: _hold_both(locks))
        waits.start()
        while not single_flight._graph._waiting:
            pass
        assert in_child(lambda: not single_flight._graph._waiting and not single_flight._graph._holders)
    waits.join()


def _hold_both(locks: ComputeLocks) -> None:
    with locks.hold("b"), locks.hold("a"):
        pass


# An interrupt in a finaliser is told to nobody.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_at_any_call_leaves_a_key_that_can_be_computed(tmp_path: Path) -> None:
    """Python looks for Ctrl-C at the beginning of each function."""
    left = 0

    def interrupt(frame: FrameType, event: str, argument: object) -> None:
        nonlocal left
        # In Python 3.10 an error of this function in a generator that goes on ends the generator without its
        # `finally`. An error of a signal's handler does not.
        if sys.version_info < (3, 11) and frame.f_lasti >= 0:
            return
        left -= 1
        if not left:
            sys.settrace(None)
            raise KeyboardInterrupt

    with Store(tmp_path / "store", memory=0) as store:
        store.get_or_compute("other", lambda: 0)
        before = sys.gettrace()
        for number in itertools.count(1):
            left = number
            try:
                sys.settrace(interrupt)
                store.get_or_compute("key", lambda: 1)
            except KeyboardInterrupt:
                pass
            finally:
                sys.settrace(before)
            store.delete("key")
            assert store.get_or_compute("key", lambda: 2) == 2
            store.delete("key")
            assert elsewhere(lambda: store.get_or_compute("key", lambda: 3)) == 3
            store.delete("key")
            if left > 0:
                break
    assert number > 50
    assert single_flight._graph._waiting == {}
