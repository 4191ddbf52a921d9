"""The RAM tier: its bound is real, a value is loaded once, and no error or fork leaves a thread waiting."""

from __future__ import annotations

import gc
import os
import random
import sys
import threading
import time
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from castore import Store
from castore.system.ram_cache import MAX_SKIPS, SLOT_BYTES, MemoryLRU
from tests.helpers import in_processes, noise

MB = 1_000_000


@pytest.mark.parametrize("size", [0, 100, 5_000, 300_000])
def test_the_bound_holds_for_what_is_really_held(size: int) -> None:
    memory: MemoryLRU[bytes] = MemoryLRU(4 * MB)
    gc.collect()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for number in range(6 * MB // (size + SLOT_BYTES) + 10):
            memory.put(number.to_bytes(32, "little"), bytes(size))
            assert memory.bytes <= 4 * MB
        held = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert memory.evictions > 0
    assert held <= 4.2 * MB
    assert len(memory) * (size + 33) <= held


def test_the_least_recently_used_goes_first() -> None:
    memory: MemoryLRU[bytes] = MemoryLRU(3 * (1_033 + SLOT_BYTES))
    for key in "abc":
        memory.put(key, bytes(1_000))
    assert memory.get("a") is not None
    memory.put("d", bytes(1_000))
    assert [key for key in "abcd" if memory.get(key) is not None] == ["a", "c", "d"]


def test_the_number_of_values_is_bounded_too() -> None:
    memory: MemoryLRU[bytes] = MemoryLRU(MB, max_items=3)
    for key in "abc":
        memory.put(key, b"x")
    assert memory.get("a") is not None
    memory.put("c", bytes(1_000))
    assert memory.evictions == 0, "a new value of a key that is held takes nobody's place"
    memory.put("d", b"x")
    assert [key for key in "abcd" if memory.get(key) is not None] == ["a", "c", "d"]
    assert (memory.evictions, memory.bytes) == (1, 3 * (33 + SLOT_BYTES) + 1_002)
    none: MemoryLRU[bytes] = MemoryLRU(MB, max_items=0)
    none.put("a", b"x")
    assert (len(none), none.bytes) == (0, 0)
    assert none.get_or_load("a", lambda: b"loaded") == b"loaded"


def test_what_is_larger_than_the_bound_is_not_kept_and_costs_nobody_his_place() -> None:
    memory: MemoryLRU[bytes] = MemoryLRU(10_000)
    memory.put("small", b"x")
    memory.put("large", bytes(20_000))
    assert memory.get("large") is None
    assert memory.get("small") == b"x"
    memory.put("small", bytes(20_000))
    assert memory.get("small") is None, "an old value must not outlive the one that replaced it"
    assert memory.bytes == 0


def test_any_order_of_calls_keeps_the_count_right() -> None:
    chance = random.Random(3)
    memory: MemoryLRU[bytes] = MemoryLRU(20_000)
    for _ in range(5_000):
        key = chance.randrange(30)
        act = chance.randrange(4)
        if act == 0:
            memory.discard(key)
        elif act == 1:
            assert memory.get_or_load(key, lambda: bytes(chance.randrange(3_000))) is not None
        else:
            memory.put(key, bytes(chance.randrange(3_000)))
        held = [value for value in map(memory.get, range(30)) if value is not None]
        assert memory.bytes == sum(len(value) + 33 + SLOT_BYTES for value in held) <= 20_000
    memory.clear()
    assert (memory.bytes, len(memory)) == (0, 0)


def let_nine_wait(memory: MemoryLRU[bytes]) -> None:
    """Wait until nine threads wait for the load of "key"."""
    done: Any = memory._flights["key"].done
    deadline = time.monotonic() + 240
    while len(done._cond._waiters) < 9:
        assert time.monotonic() < deadline, "they do not wait for who loads"
        time.sleep(0.01)


@pytest.mark.parametrize("bound", [0, MB])
def test_ten_threads_that_ask_at_once_load_once(bound: int) -> None:
    memory: MemoryLRU[bytes] = MemoryLRU(bound)
    loads: list[int] = []

    def load() -> bytes:
        loads.append(threading.get_ident())
        let_nine_wait(memory)
        return b"value"

    with ThreadPoolExecutor(10) as pool:
        answers = list(pool.map(lambda _: memory.get_or_load("key", load), range(10)))
    assert answers == [b"value"] * 10
    assert len(loads) == 1
    assert all(answer is answers[0] for answer in answers)


def test_an_error_reaches_all_who_wait_and_the_next_tries_again() -> None:
    memory: MemoryLRU[bytes] = MemoryLRU(MB)
    loads: list[int] = []

    def load() -> bytes:
        loads.append(1)
        let_nine_wait(memory)
        raise OSError("the disk is gone")

    def ask(_: int) -> str:
        try:
            memory.get_or_load("key", load)
        except OSError as error:
            return str(error)
        return "no error"

    with ThreadPoolExecutor(10) as pool:
        assert list(pool.map(ask, range(10))) == ["the disk is gone"] * 10
    assert len(loads) == 1
    assert memory.get_or_load("key", lambda: b"back") == b"back"


def test_a_slow_load_keeps_nobody_else_waiting() -> None:
    memory: MemoryLRU[bytes] = MemoryLRU(MB)
    started, go_on = threading.Event(), threading.Event()

    def slow() -> bytes:
        started.set()
        assert go_on.wait(60)
        return b"slow"

    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(memory.get_or_load, "slow", slow)
        assert started.wait(60)
        assert memory.get_or_load("quick", lambda: b"quick") == b"quick"
        assert memory.get("slow") is None
        go_on.set()
        assert first.result(60) == b"slow"


def test_a_child_forked_while_a_lock_and_a_load_are_held_goes_on() -> None:
    memory: MemoryLRU[bytes] = MemoryLRU(MB)
    memory.put("known", b"k")
    started, go_on = threading.Event(), threading.Event()

    def slow() -> bytes:
        started.set()
        assert go_on.wait(100)
        return b"slow"

    def hold_lock() -> None:
        with memory._lock:
            locked.set()
            assert go_on.wait(100)

    locked = threading.Event()
    with ThreadPoolExecutor(2) as pool:
        load = pool.submit(memory.get_or_load, "slow", slow)
        assert started.wait(60)
        pool.submit(hold_lock)
        assert locked.wait(60)
        child = os.fork()
        if child == 0:
            right = memory.get("known") == b"k" and memory.get_or_load("slow", lambda: b"mine") == b"mine"
            os._exit(0 if right else 1)
        deadline = time.monotonic() + 240
        done = (0, 0)
        while done[0] == 0 and time.monotonic() < deadline:
            done = os.waitpid(child, os.WNOHANG)
            time.sleep(0.01)
        if done[0] == 0:
            os.kill(child, 9)
            os.waitpid(child, 0)
        go_on.set()
        assert done == (child, 0), "the child waited for a thread that it does not have"
        assert load.result(60) == b"slow"


def test_a_store_decodes_once_for_ten_threads(tmp_path: Path) -> None:
    with Store(tmp_path / "store", memory=64 * MB) as store:
        data = noise(3 * MB)
        store.put("a", data)
        barrier = threading.Barrier(10)

        def ask(_: int) -> bytes | None:
            barrier.wait()
            return store.get("a")

        with ThreadPoolExecutor(10) as pool:
            answers = list(pool.map(ask, range(10)))
        assert answers == [data] * 10
        assert len({id(answer) for answer in answers}) == 1


def test_a_stores_ram_stays_within_its_bound(tmp_path: Path) -> None:
    with Store(tmp_path / "store", memory=2 * MB) as store:
        names = [f"n/{i}" for i in range(8_000)]
        store.put_many((name, name.encode() * 20) for name in names)
        store.get_many(names[:10])
        gc.collect()
        tracemalloc.start()
        try:
            before = tracemalloc.get_traced_memory()[0]
            for name in names:
                assert store.get(name) is not None
            store.flush()
            gc.collect()
            held = tracemalloc.get_traced_memory()[0] - before
        finally:
            tracemalloc.stop()
        assert store.stat().memory_bytes <= 2 * MB
        assert held < 2.2 * MB, f"{held} bytes are held where 2 MB were allowed"


def test_each_process_has_a_ram_tier_of_its_own(tmp_path: Path) -> None:
    with Store(tmp_path / "store", memory=MB) as store:
        store.put("a", b"x")
        assert store.get("a") == b"x"
        held = store.stat().memory_bytes

        def child(number: int) -> int:
            store.put(f"child/{number}", noise(50_000, number))
            assert store.get(f"child/{number}") == noise(50_000, number)
            return store.stat().memory_bytes

        assert all(inside > held for inside in in_processes(2, child))
        assert store.stat().memory_bytes == held


def test_a_value_that_is_read_in_passing_is_passed_over_once() -> None:
    memory: MemoryLRU[bytes] = MemoryLRU(MB, max_items=3)
    slots = {key: memory.put(key, key.encode()) for key in "abc"}
    read = slots["a"]
    assert read is not None
    assert read.value == b"a"
    read.used = True
    memory.put("d", b"d")
    assert [key for key in "abcd" if memory.get(key) is not None] == ["a", "c", "d"]
    gone = slots["b"]
    assert gone is not None
    assert gone.value is None, "who keeps a slot must not keep its value"
    memory.put("e", b"e")
    assert [key for key in "acde" if memory.get(key) is not None] == ["c", "d", "e"]


def test_a_new_value_finds_room_where_all_others_are_used() -> None:
    count = 3 * MAX_SKIPS
    memory: MemoryLRU[int] = MemoryLRU(MB, max_items=count)
    for turn in range(3):
        for number in range(count):
            slot = memory.slot(number) or memory.put(number, number)
            assert slot is not None
            slot.used = True
        memory.put(("new", turn), turn)
        assert memory.get(("new", turn)) == turn
        assert len(memory) == count


def test_readers_that_take_no_lock_never_disturb_one_who_makes_room() -> None:
    held: MemoryLRU[bytes] = MemoryLRU(1 << 30, max_items=8)
    errors: list[BaseException] = []
    over = threading.Event()

    def read(number: int) -> None:
        while not over.is_set():
            held.get(number)

    def write() -> None:
        try:
            for number in range(100_000):
                held.put(number % 16, b"value")
        except BaseException as error:
            errors.append(error)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        readers = [threading.Thread(target=read, args=(number,)) for number in range(3)]
        for reader in readers:
            reader.start()
        writer = threading.Thread(target=write)
        writer.start()
        writer.join()
        over.set()
        for reader in readers:
            reader.join()
    finally:
        sys.setswitchinterval(before)
    assert not errors
    assert len(held) == 8
