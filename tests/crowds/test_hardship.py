"""Hardship caused by users and disks: Ctrl-C at a bad moment, and no space left."""

from __future__ import annotations

import gc
import io
import itertools
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from castore import FullError, Store
from castore.index.transaction import Write
from castore.objects.codecs import FRAME_SIZE
from castore.write.incoming import BUFFERED_BYTES
from tests.helpers import in_processes, noise, recount, wait_for_call


def journal_agrees(store: Store) -> bool:
    """Whether replaying the names journal gives the names and digests of the index."""
    last: dict[str, bytes | None] = {}
    for record in store.index.journal.replay():
        assert record is not None
        last[record.name] = record.digest
    kept = {name: digest.hex() for name, digest in last.items() if digest is not None}
    return kept == {entry.name: entry.digest for entry in store.entries()}


def test_an_interrupted_put_lets_go_of_the_index(store: Store) -> None:
    # Regression: a Ctrl-C while a put waited for the write lock was raised after the lock was taken, outside
    # the block that releases it.
    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    store.put("before", b"0")
    held, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        # Not a write of castore's: other threads of this process would not come as far as SQLite's lock
        # during one.
        with closing(sqlite3.connect(store.path / "index.sqlite", isolation_level=None)) as db:
            db.execute("BEGIN IMMEDIATE")
            held.set()
            go_on.wait(60)

    def interrupt_and_let_go() -> None:
        try:
            wait_for_call(Write.begin)
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGALRM)
        finally:
            go_on.set()

    def interrupted_put() -> None:
        threading.Thread(target=interrupt_and_let_go).start()
        store.put("interrupted", b"x")

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        for _ in range(5):
            held.clear()
            go_on.clear()
            holder = threading.Thread(target=hold)
            holder.start()
            assert held.wait(60)
            with pytest.raises(KeyboardInterrupt):
                interrupted_put()
            holder.join()
            in_processes(1, lambda _: store.put("after", b"%d" % time.monotonic_ns()))
    finally:
        signal.signal(signal.SIGALRM, before)
    assert journal_agrees(store)
    recount(store)


# Python itself drops exceptions in callbacks of weak references, as here in those of `forks`.
@pytest.mark.filterwarnings(
    "ignore:Exception ignored in. <function WeakSet:pytest.PytestUnraisableExceptionWarning"
)
def test_interrupts_at_any_moment_leave_index_and_journal_agreeing(store: Store) -> None:
    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    interrupted = 0
    # An interrupt inside one of these, as hypothesis has one, would go past the test.
    callbacks = gc.callbacks[:]
    gc.callbacks.clear()
    try:
        for turn in range(150):
            try:
                signal.setitimer(signal.ITIMER_REAL, 0.0002 + turn * 0.00002)
                for i in range(100):
                    store.put(f"n/{turn}/{i % 20}", noise(500, turn * 100 + i))
            except KeyboardInterrupt:
                interrupted += 1
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
            in_processes(1, lambda _: store.delete("n/0/0")) if turn % 30 == 0 else None
    finally:
        signal.signal(signal.SIGALRM, before)
        gc.callbacks.extend(callbacks)
    assert interrupted > 50
    assert journal_agrees(store)
    assert store.verify().bad == []
    recount(store)


def interrupted_at(step: int, call: Callable[[], object]) -> bool:
    """Raise Ctrl-C at one step of the bytecode that a call runs in castore. False if the call has fewer."""
    steps = 0

    def trace(frame: FrameType, event: str, _: object) -> Callable[..., Any] | None:
        nonlocal steps
        # Python drops an interrupt in a finaliser.
        if "castore" not in frame.f_code.co_filename or frame.f_code.co_name == "__del__":
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            steps += 1
            if steps == step:
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys._getframe().f_trace_opcodes = True  # Python 3.12 looks for a frame that wants them only at `settrace`
    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


@pytest.mark.parametrize("part", ["pack", "journal"])
def test_an_interrupt_at_any_step_of_a_close_leaves_files_that_can_be_written(
    store: Store, part: str
) -> None:
    # Regression: between the close of a file and the note that it is closed, its number stood for a file that
    # was no longer there, or for another one.
    closing_one = store.parts.writer.pack.close if part == "pack" else store.index.journal.close
    for step in itertools.count(1):
        store.put(f"before/{step}", noise(500, step))
        was_interrupted = interrupted_at(step, closing_one)
        store.put(f"after/{step}", noise(600, step))
        assert store.get(f"before/{step}") == noise(500, step)
        assert store.get(f"after/{step}") == noise(600, step)
        if not was_interrupted:
            break
    assert step > 10
    assert journal_agrees(store)
    assert store.verify().bad == []


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 3 MB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=3M", "tmpfs", str(disk)]
    if subprocess.run(command, capture_output=True).returncode:
        pytest.skip("mounting a small disk takes root")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


def test_a_full_disk_is_a_clear_error_and_costs_nothing_that_was_there(small_disk: Path) -> None:
    with Store(small_disk / "store", memory=0) as store:
        spare = small_disk / "spare"
        spare.write_bytes(bytes(300_000))
        kept = {}
        for size in (300_000, 3_000, 50):
            refused: list[str] = []
            for i in range(2_000):
                name, data = f"n/{size}/{i}", noise(size, i)
                try:
                    store.put(name, data)
                    kept[name] = data
                except FullError as error:
                    refused.append(str(error))
                    if len(refused) == 10:
                        break
            assert len(refused) == 10
            assert all(f"the disk of {store.path} is full" in message for message in refused)
        with pytest.raises(FullError):
            store.put_many((f"m/{i}", noise(3_000, i)) for i in range(100))
        store.source._usage.due = 0.0  # the next read writes the counted uses
        assert {name: store.get(name) for name in kept} == kept
        assert store.stat().entries == len(kept)
        assert store.verify().bad == []
        assert list((store.path / "tmp").iterdir()) == []
        assert journal_agrees(store)
        recount(store)
        spare.unlink()
        assert store.put("fits again", noise(3_000)).size == 3_000
        store.gc(max_size=1_000_000, grace=0)
        assert store.put("and again", noise(300_000)).size == 300_000
        assert journal_agrees(store)
        assert store.verify().bad == []
        recount(store)


def test_a_disk_that_gets_full_while_a_file_is_written_is_a_clear_error_and_leaves_nothing(
    small_disk: Path,
) -> None:
    data = noise(BUFFERED_BYTES + 20 * FRAME_SIZE)
    with Store(small_disk / "store", memory=0) as store:
        store.put("before", b"kept")
        with pytest.raises(FullError, match="is full; free some space"), store.create("a") as file:
            file.write(data)
        with pytest.raises(FullError, match="is full; free some space"):
            store.put_stream("a", io.BytesIO(data))
        assert list(store) == ["before"]
        assert [path for path in (store.path / "tmp").iterdir() if path.is_file()] == []
