"""One place that knows about forks: when this process may fork, and what a forked child must replace.

SQLite's own mutexes and lock tables are copied into a child as they are. A child that is born while another thread is
inside SQLite waits for ever for a mutex that nobody in it will let go of. So a fork waits for two things: for
`fork_gate`, which a write transaction holds from first to last, and for the lock of every thread that is inside SQLite
otherwise (`unforked`). Readers take a lock of their own, so they never wait for one another. Before both a fork takes
Python's import lock, which `os.fork` needs in the end.

Locks, threads and connections do not survive into a child. A class whose instances hold such things calls
`reset_after_fork(self)`; in a forked child its `_after_fork()` then runs before anything else can use the instance.
Instances are held weakly: registering keeps nothing alive.

Nothing here may wait without end for a lock that a thread can hold while it waits for one of these. Finalisers run in
any thread, whatever locks that thread holds: theirs go through `finalise`.
"""

from __future__ import annotations

import _imp
import os
import threading
import time
import weakref
from collections.abc import Callable, Generator
from typing import Any, Protocol


class ForkAware(Protocol):
    """What survives a fork only after `_after_fork` has replaced its locks, threads and connections."""

    def _after_fork(self) -> None: ...


#: Held during a write transaction, and while this process forks. One thread of a process writes at a time.
fork_gate: Any = threading.RLock()

# Seconds that a fork waits for each thread that is inside SQLite, how often it does until it lets others in as well, and
# the seconds in between.
_TURN, _TURNS, _PAUSE = 0.25, 3, 0.001

# Held while a thread is given its lock, and while this process forks: no thread appears in the middle of that.
_gathering: Any = threading.RLock()
# The lock of every thread that has used SQLite and lives. Each is kept by its thread's part of `_own`.
_locks: weakref.WeakSet[Any] = weakref.WeakSet()
_own = threading.local()
# One for each fork that waits for the threads' locks or is being made. Both of a list's steps are atomic.
_under_way: list[None] = []

# What finalisers have left to do. Both of a list's steps are atomic.
_owed: list[Callable[[], object]] = []

_live: weakref.WeakSet[ForkAware] = weakref.WeakSet()


def unforked() -> Any:
    """The calling thread's lock, a re-entrant one. While a thread holds its lock, no other thread can fork.

    It is for calls into SQLite outside of write transactions: no C call may be under way, no cursor left to the
    collector, and no transaction be open at its end. Nothing in it may wait for another thread.
    """
    try:
        lock = _own.lock
    except AttributeError:  # this thread's first use
        lock = _new_lock()
    # A fork waits for what holds its lock or the gate already, so that goes on.
    if _under_way and not lock._is_owned() and not fork_gate._is_owned():
        _let_fork()
    return lock


def _let_fork() -> None:
    """Stay out for a moment: a thread that goes from one question to the next would hardly let a fork in between."""
    until = time.monotonic() + _TURN
    while _under_way and time.monotonic() < until:
        time.sleep(_PAUSE)


def _new_lock() -> Any:
    with _gathering:
        lock = _own.__dict__.setdefault("lock", threading.RLock())
        _locks.add(lock)
        return lock


def reset_after_fork(instance: ForkAware) -> None:
    """Have ``instance._after_fork()`` called in every child forked from here on."""
    _live.add(instance)


def finalise(action: Callable[[], object]) -> None:
    """Call ``action`` at once, or at the end of the fork that is under way. For finalisers that use SQLite.

    A finaliser never waits for a fork. The collector may run the finaliser in a thread that holds another library's
    lock, and the fork may wait for that lock: `concurrent.futures` and `logging` hold theirs while a process forks.
    """
    _owed.append(action)
    _call_owed()


def _call_owed() -> None:
    """Do what finalisers have left to do, unless a fork holds the locks: it does this in the end."""
    if not _gathering.acquire(timeout=_TURN):
        return
    try:
        lock = _new_lock()
    finally:
        _gathering.release()
    if not lock.acquire(blocking=False):
        return
    try:
        while _owed:
            try:
                action = _owed.pop()
            except IndexError:  # another thread was faster
                break
            action()
    finally:
        lock.release()


class _Busy(Exception):
    """A fork cannot be made yet."""


class Guard:
    """A lock that a forked child finds free, for what has nothing else to replace there.

    Attributes:
        lock: re-entrant.
    """

    def __init__(self) -> None:
        self._after_fork()
        reset_after_fork(self)

    def _after_fork(self) -> None:
        self.lock = threading.RLock()


class _ImportLock:
    """Python's import lock, which `os.fork` takes after the functions that run before a fork.

    A thread that holds the import lock may wait for `fork_gate`: the collector runs finalisers there as well. So a
    fork takes the import lock first.
    """

    __enter__ = staticmethod(_imp.acquire_lock)  # a C function: no Ctrl-C strikes in the middle

    def __exit__(self, *_: object) -> None:
        _imp.release_lock()


def _fork() -> Generator[None]:
    """Wait until no other thread is inside SQLite, and keep them out until this generator is closed.

    A generator, since `with` is safe from a Ctrl-C that strikes between taking a lock and noting it.

    Raises:
        _Busy: a thread is inside for long. Nothing is held any more, for others are not to wait as well.
    """
    with _ImportLock():
        if (yield from _keep_out()):
            return
    # Where a thread is inside SQLite a finaliser may want to write, and wait for the gate: that is let through.
    _under_way.append(None)
    try:
        for turn in range(_TURNS):
            time.sleep(_PAUSE * 4**turn)
            with _ImportLock():
                if (yield from _keep_out()):
                    return
    finally:
        _under_way.pop()
    raise _Busy


def _keep_out() -> Generator[None, None, bool]:
    """Take the gate and every other thread's lock, until this generator is closed; False if one is not free in time.

    No wait is endless: a thread that holds one of these locks may wait for another of them, or for the import lock.
    What this thread holds already stays as it is: a signal handler may fork in the middle of this function.
    """
    common = [lock for lock in (fork_gate, _gathering) if not lock._is_owned()]
    others: list[Any] = []
    try:
        if not all(lock.acquire(timeout=_TURN) for lock in common):
            return False
        _under_way.append(None)
        try:
            mine = _new_lock()  # now, since a finaliser would make it in the middle of the next line
            others = [lock for lock in _locks if lock is not mine and not lock._is_owned()]
            if not all(lock.acquire(timeout=_TURN) for lock in others):
                return False
            yield
            return True
        finally:
            _under_way.pop()
    finally:
        for lock in (*others, *common):
            if lock._is_owned():
                lock.release()


def _before_fork() -> None:
    forks: list[Generator[None]] = _own.__dict__.setdefault("forks", [])
    interrupted: KeyboardInterrupt | SystemExit | None = None
    while True:
        fork = _fork()
        forks.append(fork)
        try:
            next(fork)
            break
        except _Busy:
            forks.remove(fork)
            time.sleep(_PAUSE)
        except (KeyboardInterrupt, SystemExit) as error:  # Python would print it, and fork all the same
            forks.remove(fork)
            interrupted = error
    if interrupted is not None:
        raise interrupted  # Python prints it


def _end_fork() -> None:
    if forks := _own.__dict__.get("forks"):
        forks.pop().close()


def _after_fork_in_parent() -> None:
    _end_fork()
    _call_owed()


def _after_fork_in_child() -> None:
    _end_fork()
    for instance in list(_live):
        instance._after_fork()
    _call_owed()


os.register_at_fork(
    before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child
)
