"""Connections to the index are closed by castore, never by the collector."""

from __future__ import annotations

import gc
import os
import sqlite3
import sys
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from castore import Store
from castore.index.connections import Connections, checkpoint_at
from castore.system import forks


def in_a_circle(path: Path) -> None:
    store: Any = Store(path)
    store.get("a")
    store.itself = store


def in_a_circle_with_threads(path: Path) -> None:
    store: Any = Store(path)
    threads = [threading.Thread(target=store.get, args=("a",)) for _ in range(3)]
    for thread in threads:
        thread.start()
        thread.join()
    store.itself = [store, threads]


def simply_dropped(path: Path) -> None:
    Store(path).get("a")


@pytest.mark.parametrize("forking", [False, True])
@pytest.mark.parametrize("leave", [in_a_circle, in_a_circle_with_threads, simply_dropped])
def test_a_store_that_nobody_closes_closes_its_connections_when_it_is_collected(
    leave: Callable[[Path], None], forking: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", told.append)
    with warnings.catch_warnings():
        warnings.simplefilter(
            "error", ResourceWarning
        )  # since 3.13 Python's own finaliser of a connection warns
        for _ in range(5):
            leave(tmp_path / "store")
            with (
                forks._registry_lock if forking else nullcontext()
            ):  # what a fork holds: the connections are closed after it
                gc.collect()
    forks.finalise(lambda: None)
    assert [str(one.exc_value) for one in told] == []
    opened = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if _is_open(fd)]
    assert not [path for path in opened if path.startswith(str(tmp_path / "store" / "index.sqlite"))]


def _is_open(fd: str) -> bool:
    return os.path.lexists(f"/proc/self/fd/{fd}")


def test_closing_beside_a_thread_that_is_inside_sqlite_opens_the_index_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Store(tmp_path / "store") as other:
        other.put("a", b"1")
        store = Store(tmp_path / "store")  # it writes nothing, and leaves the WAL
        is_inside, may_leave = threading.Event(), threading.Event()

        def read() -> None:
            rows = store.index.file.stream("SELECT name FROM entries")
            next(rows)
            is_inside.set()
            may_leave.wait(120)
            rows.close()

        thread = threading.Thread(target=read)
        thread.start()
        assert is_inside.wait(120)
        opened: list[float] = []
        open_reader = Connections._open_reader

        def count(connections: Connections) -> Any:
            opened.append(time.monotonic())
            return open_reader(connections)

        monkeypatch.setattr(Connections, "_open_reader", count)
        threading.Timer(0.3, may_leave.set).start()
        store.parts.release()
        thread.join()
        assert len(opened) == 1
        assert store.index.file._connections._open == []
        monkeypatch.undo()


def test_only_a_closed_connection_may_miss_its_checkpoint_setting(tmp_path: Path) -> None:
    with Store(tmp_path / "store") as store:
        db = store.index.connection()
        # Python 3.10 raises a Warning of SQLite's.
        with pytest.raises((sqlite3.ProgrammingError, sqlite3.Warning), match="one statement"):
            checkpoint_at(db, "1; SELECT 1")  # type: ignore[arg-type]
    checkpoint_at(db, 1)


class _EndsAsItIsAsked(threading.Thread):
    """A thread that is alive when it is asked for the first time, and has ended when the answer is there."""

    def __init__(self, work: Callable[[], object]) -> None:
        super().__init__()
        self.work, self.may_end = work, threading.Event()

    def run(self) -> None:
        self.work()
        self.may_end.wait()

    def is_alive(self) -> bool:
        answer = super().is_alive()
        self.may_end.set()
        self.join()
        return answer


def test_no_connection_stays_of_a_thread_that_ends_while_another_opens_one(tmp_path: Path) -> None:
    """Regression: the threads were asked twice. One that ended in between left its connection open."""
    with Store(tmp_path / "store", memory=0) as store:
        store.put("a", b"1")
        has_read = threading.Event()

        def read() -> None:
            store.get("a")
            has_read.set()

        ending = _EndsAsItIsAsked(read)
        ending.start()
        assert has_read.wait(60)
        other = threading.Thread(target=store.get, args=("a",))
        other.start()
        other.join()
        assert ending.may_end.is_set()
    opened = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if _is_open(fd)]
    assert not [path for path in opened if path.startswith(str(tmp_path / "store" / "index.sqlite"))]
