"""Computes a missing value once, however many threads and processes ask for it.

Threads of a process share a lock per key. Processes lock a byte of ``locks/compute`` chosen by the key, with
an open file description lock: it ends with its process in any case, and leaves no lock files behind. The
locks only save work: if the file system grants a lock to several processes, several compute, and each entry
is still whole.

A Ctrl-C can come between any two steps. The note of a lock's holder may then stay behind, but never the lock:
notes count only while their lock is taken.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import blake3

from castore.errors import InvalidValueError
from castore.system.file_locks import close_inherited, lock_byte, try_lock_byte, unlock_byte
from castore.system.forks import reset_after_fork
from castore.system.temporary import open_with_mode

# A lock file and a key: several objects may stand for one file.
_Place = tuple[str, str]
# The places that each thread holds, with their locks.
_held = threading.local()


class _KeyLock:
    """The lock of a key among the threads of a process, and the thread that took it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.owner: int | None = None

    def is_held_by(self, thread: int) -> bool:
        """Whether the thread has it. An interrupt may have left its number behind."""
        return self.owner == thread and self.lock.locked()


class _WaitGraph:
    """The threads of this process that hold keys, and those that wait for one: no circle may arise."""

    def __init__(self) -> None:
        self._after_fork()
        reset_after_fork(self)

    def _after_fork(self) -> None:
        self._lock = threading.Lock()
        self._holders: dict[_Place, _KeyLock] = {}
        self._waiting: dict[int, _Place] = {}

    def wait(self, place: _Place) -> None:
        """Note that this thread is going to wait for a place.

        Raises:
            InvalidValueError: the thread that holds it waits for this one, over any number of others.
        """
        me, keys = threading.get_ident(), [place[1]]
        with self._lock:
            holder = self._holder(place)
            while holder is not None and holder != me and (next_place := self._waiting.get(holder)):
                keys.append(next_place[1])
                holder = self._holder(next_place)
            if holder != me:
                self._waiting[me] = place
                return
        raise InvalidValueError(
            f"threads would wait for one another for ever: the computation of {keys[-1]!r} asks for"
            f" {keys[0]!r}, whose computation waits for {' and that for '.join(map(repr, keys[1:]))};"
            " compute what both need under a key of its own first"
        )

    def _holder(self, place: _Place) -> int | None:
        lock = self._holders.get(place)
        return lock.owner if lock is not None and lock.lock.locked() else None

    def hold(self, place: _Place, lock: _KeyLock, *, is_own: bool) -> None:
        """Note that this thread has its place, and with ``is_own`` that it alone holds it until `leave`."""
        with self._lock:
            self._waiting.pop(threading.get_ident(), None)
            if is_own:
                self._holders[place] = lock

    def stop_waiting(self) -> None:
        """Note that this thread waits no longer."""
        with self._lock:
            self._waiting.pop(threading.get_ident(), None)

    def leave(self, place: _Place) -> None:
        """Note that nobody holds a place any more. The caller still has its lock."""
        with self._lock:
            self._holders.pop(place, None)


_graph = _WaitGraph()


class ComputeLocks:
    """One lock per key, across the threads and processes of a machine.

    Args:
        path: path of the lock file.
        mode: permission bits of a new lock file.
    """

    def __init__(self, path: Path, mode: int) -> None:
        self._path = path
        self._mode = mode
        self._after_fork()
        reset_after_fork(self)

    def _after_fork(self) -> None:
        if getattr(self, "_threads", None):
            _held.__dict__.clear()
            # The child shares the open file description, and so the lock. It may outlive a killed parent, as
            # workers of pools do. Then other processes would wait for the key for ever.
            close_inherited(self._path)
        self._guard = threading.Lock()
        self._threads: dict[str, tuple[_KeyLock, int]] = {}
        # Another object in each process: a child that was forked in a block holds no lock. Comparing needs no
        # call, so no interrupt can come between the comparison and the step that depends on it.
        self._process = object()

    @contextlib.contextmanager
    def hold(self, key: str, *, may_move: bool = False) -> Iterator[None]:
        """Hold the lock of ``key``. Waits until no other thread or process holds it.

        Args:
            key: the key.
            may_move: the block may end in another thread, so this thread's waits do not show its end.

        Raises:
            InvalidValueError: this thread holds the lock already, or the thread of this process that holds it
                waits for this one: they would wait for ever. Circles over processes are not seen.
        """
        process, me = self._process, threading.get_ident()
        held, place = _held_here(), (str(self._path), key)
        mine = held.get(place)
        if mine is not None and mine.is_held_by(me):
            raise InvalidValueError(
                f"this thread is computing {key!r} already: the computation asks for its own result"
            )
        with self._guard:
            lock, users = self._threads.get(key, (_KeyLock(), 0))
            self._threads[key] = lock, users + 1
        try:
            _graph.wait(place)
            with lock.lock, self._process_lock(key):
                lock.owner, held[place] = me, lock
                _graph.hold(place, lock, is_own=not may_move)
                try:
                    yield
                finally:
                    lock.owner = None
                    _graph.leave(place)
        finally:
            _graph.stop_waiting()
            held.pop(place, None)
            if self._process is process:
                self._leave(key)

    def claim(self, key: str) -> Callable[[], None] | None:
        """Take the lock of ``key`` unless a thread or process holds it; never waits.

        Returns:
            A function that releases the lock, for any thread of this process; None if the lock is held.
        """
        process, held, place = self._process, _held_here(), (str(self._path), key)
        with self._guard:
            lock, users = self._threads.get(key, (_KeyLock(), 0))
            if not lock.lock.acquire(blocking=False):
                return None
            self._threads[key] = lock, users + 1
        stack = contextlib.ExitStack()
        stack.callback(self._leave, key)
        stack.callback(lock.lock.release)
        try:
            fd = open_with_mode(self._path, os.O_RDWR, self._mode)
            stack.callback(os.close, fd)
            if not try_lock_byte(fd, _place(key)):
                stack.close()
                return None
        except BaseException:
            stack.close()
            raise
        lock.owner, held[place] = threading.get_ident(), lock

        def release() -> None:
            if self._process is process:
                held.pop(place, None)
                lock.owner = None
                unlock_byte(fd, _place(key))
                stack.close()

        return release

    def _leave(self, key: str) -> None:
        with self._guard:
            lock, users = self._threads[key]
            if users == 1:
                del self._threads[key]
            else:
                self._threads[key] = lock, users - 1

    @contextlib.contextmanager
    def _process_lock(self, key: str) -> Iterator[None]:
        place, process = _place(key), self._process
        fd = open_with_mode(self._path, os.O_RDWR, self._mode)
        try:
            lock_byte(fd, place)
            try:
                yield
            finally:
                if self._process is process:
                    unlock_byte(fd, place)
        finally:
            if self._process is process:
                os.close(fd)


def _held_here() -> dict[_Place, _KeyLock]:
    """The lock files and keys that this thread holds, with their locks."""
    held: dict[_Place, _KeyLock] = _held.__dict__.setdefault("keys", {})
    return held


def _place(key: str) -> int:
    """The byte of the lock file that stands for a key."""
    return int.from_bytes(blake3.blake3(key.encode()).digest(8), "little") >> 2
