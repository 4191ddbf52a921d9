"""Forks beside threads that use the store: a child can read and write, whatever its parent was doing."""

from __future__ import annotations

import faulthandler
import itertools
import os
import select
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path

import pytest

from castore import Store
from castore.objects.codecs import FRAME_SIZE
from castore.system.forks import block_forks, fork_gate
from tests.helpers import in_small_process, noise

#: Seconds that a child may take; its work takes a few milliseconds.
PATIENCE = 120.0


def forked(task: Callable[[], object]) -> int:
    """The process id of a child that runs ``task`` and ends.

    A child that hangs prints its stack, and fails.
    """
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            faulthandler.enable(file=2)
            task()
            status = 0
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            os._exit(status)
    return pid


def ends_well(pid: int) -> None:
    """Assert that a child ends with success."""
    until = time.monotonic() + PATIENCE
    while (ended := os.waitpid(pid, os.WNOHANG)) == (0, 0):
        if time.monotonic() > until:
            os.kill(pid, signal.SIGABRT)
            os.waitpid(pid, 0)
            pytest.fail("the child hangs")
        time.sleep(0.0005)
    assert ended[1] == 0, f"the child ended with {ended[1]}; what it printed tells where"


@contextmanager
def going_on(*steps: Callable[[int], object]) -> Iterator[None]:
    """Run each step in a thread of its own, again and again; an exception in one is raised at the end."""
    stop, errors = threading.Event(), []

    def run(step: Callable[[int], object]) -> None:
        try:
            for turn in itertools.count():
                step(turn)
                if stop.is_set():
                    return
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(step,), daemon=True) for step in steps]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join(PATIENCE)
    assert not errors, errors
    assert not any(thread.is_alive() for thread in threads)


def fill(store: Store) -> None:
    store.put_many((f"n/{number}", noise(200, number)) for number in range(2_000))
    store.put("large", noise(2 * FRAME_SIZE))


@pytest.fixture
def full(store: Store) -> Store:
    fill(store)
    return store


@pytest.fixture
def full_path(full: Store) -> Path:
    """Where a full store is, for a process of its own: forks of one that has run thousands of tests take
    longer than all else.
    """
    full.close()
    return full.path


def _dropped(store: Store) -> None:
    """A store that is not closed."""
    assert Store(store.path, memory=0).entry("large") is not None


READS: dict[str, Callable[[Store, int], object]] = {
    "get": lambda store, turn: store.get(f"n/{turn % 2_000}"),
    "get_many": lambda store, turn: store.get_many([f"n/{number}" for number in range(turn % 50, 2_000, 50)]),
    "entry": lambda store, turn: store.entry(f"n/{turn % 2_000}"),
    "open": lambda store, _: store.open("large").read(),
    "entries": lambda store, _: [entry.size for entry in store.entries("n")],
    "stat": lambda store, _: store.stat(),
    "gc": lambda store, _: store.gc(grace=0),
    "opening": lambda store, _: Store(store.path, memory=0).close(),
    "dropping": lambda store, _: _dropped(store),
}


def can_do_everything(store: Store, number: int) -> None:
    """The operations of each child."""
    assert store.get(f"n/{number}") == noise(200, number)
    store.put(f"child/{number}", b"%d" % number)
    assert store.entry(f"child/{number}") is not None


def fork_beside(path: Path, kinds: list[str], forks: int) -> None:
    """Fork children that do everything beside threads, each of which reads in one way."""
    with Store(path, memory=0) as store:
        with going_on(*(lambda turn, kind=kind: READS[kind](store, turn) for kind in kinds)):
            for number in range(forks):
                ends_well(forked(partial(can_do_everything, store, number)))
        assert [store.get(f"child/{number}") for number in range(forks)] == [
            b"%d" % number for number in range(forks)
        ]


def test_a_child_forked_in_the_middle_of_everything_can_read_and_write(full_path: Path) -> None:
    in_small_process(fork_beside, full_path, [*READS], 10)


@pytest.mark.parametrize("kind", ["entry", "open"])
def test_a_child_forked_beside_a_reader_can_read_and_write(full_path: Path, kind: str) -> None:
    in_small_process(fork_beside, full_path, [kind] * 2, 12)


def test_a_fork_does_not_wait_until_a_writer_gets_the_index(full: Store) -> None:
    done = threading.Event()

    def let_go() -> None:
        done.wait(20)
        done.set()
        other.execute("ROLLBACK")

    with closing(sqlite3.connect(full.index.path, isolation_level=None, check_same_thread=False)) as other:
        other.execute("BEGIN IMMEDIATE")
        writer = threading.Thread(target=full.put, args=("waiting", b"1"))
        holder = threading.Thread(target=let_go)
        writer.start()
        holder.start()
        while fork_gate.acquire(blocking=False):
            fork_gate.release()
            time.sleep(0.0001)
        pid = forked(lambda: full.get("n/1"))
        has_waited = done.is_set()
        done.set()
        holder.join()
        writer.join()
        ends_well(pid)
    assert not has_waited, "the fork took place when the lock was free"
    assert full.get("waiting") == b"1"


def test_a_fork_and_a_thread_that_writes_in_the_middle_of_a_question_do_not_wait_for_each_other(
    full: Store,
) -> None:
    def put(turn: int) -> None:
        with block_forks():  # where a finaliser or a signal handler may run
            full.put(f"amid/{turn % 10}", b"%d" % turn)

    with going_on(put):
        for number in range(6):
            ends_well(forked(lambda number=number: can_do_everything(full, number)))  # type: ignore[misc]


def test_a_signal_handler_forks_wherever_it_strikes(full_path: Path) -> None:
    in_small_process(fork_in_a_handler, full_path)


def fork_in_a_handler(path: Path) -> None:
    full = Store(path, memory=0)
    children: list[int] = []

    def fork(*_: object) -> None:
        number = len(children)
        children.append(forked(lambda: can_do_everything(full, number)))
        if len(children) < 25:  # only now: handlers must not pile up
            signal.setitimer(signal.ITIMER_REAL, 0.005)

    before = signal.signal(signal.SIGALRM, fork)
    try:
        with going_on(lambda turn: full.get(f"n/{turn % 2_000}"), lambda _: [*full.entries()]):
            signal.setitimer(signal.ITIMER_REAL, 0.005)
            turn = 0
            while len(children) < 25:
                full.entry(f"n/{turn % 2_000}")
                turn += 1
            for pid in children:
                ends_well(pid)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_a_child_reads_on_while_others_open_the_index_its_parent_has_closed(tmp_path: Path) -> None:
    """Regression: the next connection truncated the shared memory as a leftover; the child died of SIGBUS."""
    visits = (
        "import sqlite3, sys\n"
        "for _ in range(1500):\n"
        "    db = sqlite3.connect(sys.argv[1])\n"
        "    db.execute('SELECT count(*) FROM entries').fetchone()\n"
        "    db.close()\n"
    )
    parent = Store(tmp_path / "store", memory=0)
    parent.put("first", b"1")
    is_over, end = os.pipe()

    def read_on(child: int) -> None:
        os.close(end)
        parent.put(f"child/{child}", b"is there")
        while not select.select([is_over], [], [], 0)[0]:
            assert parent.entry("first") is not None

    children = [forked(lambda child=child: read_on(child)) for child in range(3)]  # type: ignore[misc]
    os.close(is_over)
    with ExitStack() as held:
        held.callback(os.close, end)
        while any(parent.get(f"child/{child}") is None for child in range(3)):
            time.sleep(0.005)
        parent.close()
        subprocess.run([sys.executable, "-c", visits, str(tmp_path / "store" / "index.sqlite")], check=True)
    for child in children:
        ends_well(child)


def test_a_child_names_its_work_while_its_parent_does(store: Store) -> None:
    from castore.adapters.datasets import scratch  # which takes a second: the small processes do without

    is_held, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        with scratch._guard.lock:
            is_held.set()
            go_on.wait(PATIENCE)

    holder = threading.Thread(target=hold)
    holder.start()
    is_held.wait(PATIENCE)
    try:
        ends_well(forked(lambda: scratch.new_file(store)))
    finally:
        go_on.set()
        holder.join()


BESIDE = """
import _imp, gc, os, sys, threading, time

theirs = threading.Lock()  # as concurrent.futures and logging have one
os.register_at_fork(before=theirs.acquire, after_in_parent=theirs.release, after_in_child=theirs.release)

from castore import Store
from castore.system.forks import fork_gate

store = Store(sys.argv[1])
dropped = [Store(sys.argv[1])]
assert dropped[0].get("there") == b"1"
begun = threading.Event()


def wait_for_the_fork():
    begun.set()
    while fork_gate.acquire(blocking=False):
        fork_gate.release()
        time.sleep(0.0001)


def write_while_it_holds_the_import_lock():  # as a finaliser does that strikes in the middle of an import
    _imp.acquire_lock()
    begun.set()
    while not asked:
        time.sleep(0.0001)
    store.put("amid", b"2")
    _imp.release_lock()


def import_while_it_writes():
    with fork_gate:
        begun.set()
        while not asked:
            time.sleep(0.0001)
        import colorsys


def drop_a_store_while_it_holds_their_lock():
    with theirs:
        wait_for_the_fork()
        dropped.clear()
        gc.collect()


asked = []
os.register_at_fork(before=lambda: asked.append(True))  # the newest comes first: the fork is about to wait
thread = threading.Thread(target={task})
thread.start()
begun.wait()
pid = os.fork()
if pid == 0:
    assert store.get("there") == b"1"
    store.put("child", b"3")
    os._exit(0)
thread.join()
ended = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
assert store.get("child") == b"3"
store.close()
held = [entry.path for entry in os.scandir("/proc/self/fd") if "index.sqlite" in os.path.realpath(entry.path)]
assert dropped or not held, held
sys.exit(ended)
"""


@pytest.mark.parametrize(
    "task",
    [
        "write_while_it_holds_the_import_lock",
        "import_while_it_writes",
        "drop_a_store_while_it_holds_their_lock",
    ],
)
def test_a_fork_and_a_thread_with_a_lock_of_another_library_do_not_wait_for_each_other(
    store: Store, task: str
) -> None:
    store.put("there", b"1")
    store.close()
    script = BESIDE.replace("{task}", task)
    ended = subprocess.run([sys.executable, "-c", script, str(store.path)], timeout=PATIENCE, check=False)
    assert ended.returncode == 0
