"""Forks: when this process may fork, and what a forked child must replace.

A child gets copies of SQLite's mutexes and lock tables in their current state. If another thread is inside
SQLite at the fork, the child waits for ever for a mutex that no thread of the child will release. So a fork
waits for `fork_gate`, which a write transaction holds from start to end, and for the lock of every other
thread that is inside SQLite (`block_forks`). Each reader has a lock of its own, so readers never wait for one
another. Before these locks a fork takes Python's import lock, because `os.fork` takes it later.

Locks, threads and connections do not survive into a child. A class whose instances hold such things calls
`reset_after_fork(self)`; in a forked child its `_after_fork()` then runs before anything else can use the
instance. Instances are held weakly: registering keeps nothing alive.

Must never: wait without a time limit for a lock that another thread may hold while it waits for one of these
locks. Finalisers run in any thread, whatever locks that thread holds: a finaliser that uses SQLite goes
through `finalise`.
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
    """An object whose `_after_fork` must replace its locks, threads and connections in a forked child."""

    def _after_fork(self) -> None: ...


#: Held during a write transaction, and while this process forks. One thread of a process writes at a time.
fork_gate: Any = threading.RLock()

# Seconds that a fork waits for each thread that is inside SQLite; attempts until the fork lets other threads
# enter SQLite again; and seconds of the shortest pause between attempts.
_ATTEMPT_SECONDS, _ATTEMPTS, _PAUSE_SECONDS = 0.25, 3, 0.001

# Held while a thread gets its lock, and while this process forks, so that no lock is added during a fork.
_registry_lock: Any = threading.RLock()
# The lock of every live thread that has used SQLite. `_thread_state` keeps each thread's lock alive.
_locks: weakref.WeakSet[Any] = weakref.WeakSet()
_thread_state = threading.local()
# One item per fork that waits for the threads' locks or is under way. `append` and `pop` are atomic.
_forks_under_way: list[None] = []

# Work that finalisers have left. `append` and `pop` are atomic.
_deferred: list[Callable[[], object]] = []

_instances: weakref.WeakSet[ForkAware] = weakref.WeakSet()


def block_forks() -> Any:
    """Return the calling thread's re-entrant lock. While a thread holds its lock, no other thread can fork.

    Use the lock around calls into SQLite outside of write transactions, and where a process is started whose
    pipes no other child may inherit. When the lock is released, no C call may be running, no cursor may be
    left to the garbage collector, and no transaction may be open. Code that holds the lock must not wait for
    another thread.
    """
    try:
        lock = _thread_state.lock
    except AttributeError:  # this thread's first use
        lock = _new_lock()
    # A thread that holds its lock or the gate already must go on: a fork is waiting for it.
    if _forks_under_way and not lock._is_owned() and not fork_gate._is_owned():
        _wait_for_fork()
    return lock


def _wait_for_fork() -> None:
    """Pause for a moment: a thread that runs one query after another would hardly ever let a fork start."""
    until = time.monotonic() + _ATTEMPT_SECONDS
    while _forks_under_way and time.monotonic() < until:
        time.sleep(_PAUSE_SECONDS)


def _new_lock() -> Any:
    with _registry_lock:
        lock = _thread_state.__dict__.setdefault("lock", threading.RLock())
        _locks.add(lock)
        return lock


def reset_after_fork(instance: ForkAware) -> None:
    """Have ``instance._after_fork()`` called in every child forked from now on. Holds the instance weakly."""
    _instances.add(instance)


def finalise(action: Callable[[], object]) -> None:
    """Call ``action`` now, or at the end of a fork that is under way. For finalisers that use SQLite.

    A finaliser never waits for a fork. The garbage collector may run the finaliser in a thread that holds
    another library's lock, and the fork may wait for that lock: `concurrent.futures` and `logging` hold
    theirs while a process forks.
    """
    _deferred.append(action)
    _run_deferred()


def _run_deferred() -> None:
    """Do the work that finalisers have left. A fork that holds the locks does it at its end instead."""
    if not _registry_lock.acquire(timeout=_ATTEMPT_SECONDS):
        return
    try:
        lock = _new_lock()
    finally:
        _registry_lock.release()
    if not lock.acquire(blocking=False):
        return
    try:
        while _deferred:
            try:
                action = _deferred.pop()
            except IndexError:  # another thread was faster
                break
            action()
    finally:
        lock.release()


class _Busy(Exception):
    """The process cannot fork yet."""


class ForkSafeLock:
    """A re-entrant lock that is free in a forked child. For code that has nothing else to replace there.

    Attributes:
        lock: the lock. A forked child has a new one.
    """

    def __init__(self) -> None:
        self._after_fork()
        reset_after_fork(self)

    def _after_fork(self) -> None:
        self.lock = threading.RLock()


class _ImportLock:
    """Python's import lock, which `os.fork` takes after the functions that run before a fork.

    A thread that holds the import lock may wait for `fork_gate`, because the garbage collector may run
    finalisers in it. So a fork takes the import lock first.
    """

    __enter__ = staticmethod(_imp.acquire_lock)  # a C function, which Ctrl-C does not interrupt

    def __exit__(self, *_: object) -> None:
        _imp.release_lock()


def _hold_all_locks() -> Generator[None]:
    """Wait until no other thread is inside SQLite, and keep other threads out until this generator is closed.

    This is a generator because `with` is safe from a Ctrl-C between taking a lock and noting it.

    Raises:
        _Busy: a thread stays inside SQLite for long. All locks are released, so that other threads need not
            wait.
    """
    with _ImportLock():
        if (yield from _take_locks()):
            return
    # A finaliser in a thread that is inside SQLite may wait for the gate in order to write: let it through.
    _forks_under_way.append(None)
    try:
        for attempt in range(_ATTEMPTS):
            time.sleep(_PAUSE_SECONDS * 4**attempt)
            with _ImportLock():
                if (yield from _take_locks()):
                    return
    finally:
        _forks_under_way.pop()
    raise _Busy


def _take_locks() -> Generator[None, None, bool]:
    """Take the gate and all other threads' locks until this generator is closed; False if one stays taken.

    Every wait has a limit: a thread that holds one of these locks may wait for another of them, or for the
    import lock. Locks that this thread holds already stay held: a signal handler may fork in the middle of
    this function.
    """
    common = [lock for lock in (fork_gate, _registry_lock) if not lock._is_owned()]
    others: list[Any] = []
    try:
        if not all(lock.acquire(timeout=_ATTEMPT_SECONDS) for lock in common):
            return False
        _forks_under_way.append(None)
        try:
            mine = _new_lock()  # now, because a finaliser might create it in the middle of the next line
            others = [lock for lock in _locks if lock is not mine and not lock._is_owned()]
            if not all(lock.acquire(timeout=_ATTEMPT_SECONDS) for lock in others):
                return False
            yield
            return True
        finally:
            _forks_under_way.pop()
    finally:
        for lock in (*others, *common):
            if lock._is_owned():
                lock.release()


def _before_fork() -> None:
    forks: list[Generator[None]] = _thread_state.__dict__.setdefault("forks", [])
    interrupted: KeyboardInterrupt | SystemExit | None = None
    while True:
        fork = _hold_all_locks()
        forks.append(fork)
        try:
            next(fork)
            break
        except _Busy:
            forks.remove(fork)
            time.sleep(_PAUSE_SECONDS)
        except (KeyboardInterrupt, SystemExit) as error:  # Python would print it, and fork without the locks
            forks.remove(fork)
            interrupted = error
    if interrupted is not None:
        raise interrupted  # Python prints it


def _end_fork() -> None:
    if forks := _thread_state.__dict__.get("forks"):
        forks.pop().close()


def _after_fork_in_parent() -> None:
    _end_fork()
    _run_deferred()


def _after_fork_in_child() -> None:
    _end_fork()
    for instance in list(_instances):
        instance._after_fork()
    _run_deferred()


os.register_at_fork(
    before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child
)
