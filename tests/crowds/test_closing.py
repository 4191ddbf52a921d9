"""A store that one thread closes while others use it: they go on, as after any `close`."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path

from castore import Store
from tests.helpers import in_small_process, noise

_LARGE = noise(600_000)
_CLOSES = 60


def test_threads_go_on_while_another_closes_the_store(tmp_path: Path) -> None:
    """Regression: the process died of a segmentation fault, inside SQLite."""
    errors, operations = in_small_process(_use_and_close, tmp_path / "store")
    assert errors == []
    assert operations > _CLOSES


def _use_and_close(path: Path) -> tuple[list[str], int]:
    """The errors and the number of operations of threads that use a store while it is closed all the time."""
    store, ended = Store(path, memory=0), threading.Event()
    store.put("small", b"x" * 100)
    store.put("large", _LARGE)
    errors: list[str] = []
    done = [0] * 4

    def use(thread: int) -> None:
        chance = random.Random(thread)
        operations = _operations(store, f"own/{thread}")
        while not ended.is_set():
            try:
                chance.choice(operations)()
            except Exception as error:
                errors.append(repr(error))
            done[thread] += 1

    threads = [threading.Thread(target=use, args=(number,)) for number in range(len(done))]
    for thread in threads:
        thread.start()
    for _ in range(_CLOSES):
        before = sum(done)
        store.close()
        while sum(done) < before + 4:  # they go on
            time.sleep(0.001)
    ended.set()
    for thread in threads:
        thread.join()
    store.close()
    links = [os.path.join("/proc/self/fd", number) for number in os.listdir("/proc/self/fd")]
    opened = [os.readlink(link) for link in links if os.path.lexists(link)]
    left = [name for name in opened if "index.sqlite" in name or name.endswith((".pack", ".names"))]
    return errors + [f"left open: {name}" for name in left], sum(done)


def _operations(store: Store, own: str) -> list[Callable[[], object]]:
    def check(name: str, data: bytes) -> None:
        assert store.get(name) == data

    def stream() -> None:
        with store.open("large") as file:
            assert file.read(1000) == _LARGE[:1000]

    def save() -> None:
        store.save(f"{own}/saved", {"a": 1})
        assert store.load(f"{own}/saved") == {"a": 1}

    return [
        lambda: check("small", b"x" * 100),
        lambda: check("large", _LARGE),
        lambda: list(store),
        lambda: store.get_many(["small", "large"]),
        lambda: store.put(f"{own}/put", os.urandom(300)),
        lambda: store.delete(f"{own}/put"),
        lambda: "small" in store,
        store.stat,
        stream,
        save,
    ]
