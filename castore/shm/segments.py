"""Segments: named files in ``/dev/shm`` that processes share, removed when the last user leaves.

The kernel knows which users are alive: each process holds a shared ``flock`` on the file through its own open
file description, which ends with the process in any case. A process that leaves tries to get the exclusive
lock. If it succeeds, it was the last, and unlinks the file. A segment left by a crash has no lock; the next
process that creates a segment removes it, and so does a process that has used segments, at its end: a
loader's workers may be killed after the process that made the segment has left it. Python's resource tracker
is not used: it unlinks segments that others still use (cpython #82300).

Pages are reserved before they are touched, so a full ``/dev/shm`` is an error here and never a bus error
elsewhere. Bytes are zero at first. The caller decides what they mean, and who may write which bytes when.

A segment begins with a header: a magic number, and a JSON object with the version of all layouts in
`castore.shm` and with the caller's description of the bytes. A process that finds another version or another
description raises an error, and touches nothing.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import mmap
import multiprocessing.util
import os
import re
import stat
import struct
import threading
import uuid
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from castore.errors import FullError, InvalidValueError, SegmentError
from castore.shm.free_space import SHM, memory_free, shm_free, shm_size
from castore.system.file_locks import lock_byte, unlock_byte
from castore.system.forks import reset_after_fork
from castore.units import format_size

_MAGIC = b"castore1"
#: The version of every layout in this package. Raise it with any change to the meaning of a segment's bytes.
LAYOUT_VERSION = 3
_HEAD = struct.Struct("<8sQ")  # magic (written last, so the rest is there too), length of the layout's JSON
_HEADER = 4096
# Pages are reserved in steps of this many bytes, so that Ctrl-C is handled in between.
_STEP = 1 << 28
_NAME = re.compile(r"[A-Za-z0-9._-]{1,200}", re.ASCII)


class Segment:
    """A named piece of shared memory. Attaches to a segment in use, or else creates it.

    Works with fork, forkserver and spawn. A forked child keeps the mapping and takes a lock of its own. A
    pickle holds the name and the layout, and attaches where it is loaded.

    Args:
        name: letters, digits, ".", "_" and "-". All processes of this user on this machine that give the same
            name get the same memory. None for a new, unused name.
        size: bytes of a new segment; a process that attaches gets the existing size. A function is called
            only by the process that creates the segment, because the segment itself changes how much memory
            is free.
        layout: description of the bytes, as a JSON object. A process that attaches must give the same.
        reserve: number of bytes, from the first on, whose pages the creator reserves. Call `reserve` before
            touching bytes behind them. Default: all bytes.
        advice: what to do if the layouts differ, for the error message.

    Raises:
        FullError: ``/dev/shm`` or the machine's memory is too small; nothing was allocated.
        SegmentError: a segment in use has that name and another layout, was made by another version of
            castore, or belongs to another user.
        InvalidValueError: the name or the layout is not valid.
    """

    def __init__(
        self,
        name: str | None,
        size: int | Callable[[], int],
        layout: Mapping[str, Any],
        *,
        reserve: int | None = None,
        advice: str = "take another name",
    ) -> None:
        if name is not None and not _NAME.fullmatch(name):
            raise InvalidValueError(
                f"{name!r} cannot name a shared segment; take 1 to 200 of the characters A-Z a-z 0-9 . _ -"
            )
        #: Name without the prefix that the files of castore and of this user have.
        self.name = name or f"{os.getpid()}-{uuid.uuid4().hex[:16]}"
        self._layout = {"version": LAYOUT_VERSION, **layout}
        handle, self.created = _open(path_of(self.name), self._layout, size, reserve, advice)
        self._attach(handle)

    def _attach(self, handle: _Handle) -> None:
        self._handle = handle
        self.size = os.fstat(handle.fd).st_size - _HEADER
        self._map = mmap.mmap(handle.fd, _HEADER + self.size)
        #: The shared bytes, writable.
        self.buffer = memoryview(self._map)[_HEADER:]
        self._threads = threading.Lock()
        self._finalizer = weakref.finalize(self, handle.release)
        self._finalizer.atexit = False  # atexit would be too early: see _leave_at_exit
        _note_use(self)
        reset_after_fork(self)

    def _after_fork(self) -> None:
        self._threads = threading.Lock()
        self._handle.renew()

    def __reduce__(self) -> tuple[Any, ...]:
        return _rejoin, (self.name, self._layout)

    def __repr__(self) -> str:
        return f"Segment({self.name!r}, {format_size(self.size)})"

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._handle.fd < 0

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the segment's lock against all other threads and processes. It ends with the process."""
        with self._threads:
            fd = self._fd()
            lock_byte(fd, 0)
            try:
                yield
            finally:
                unlock_byte(fd, 0)

    def reserve(self, start: int, end: int) -> None:
        """Have ``buffer[start:end]`` backed by memory. Reserving bytes twice is harmless.

        Raises:
            FullError: ``/dev/shm`` or the machine's memory is too small. Bytes reserved before stay reserved.
        """
        _check_memory(self.name, end - start)
        _reserve(self._fd(), self.name, _HEADER + start, _HEADER + end)

    def private(self) -> memoryview:
        """Return a private mapping: it shows the segment's bytes, and writes to it stay in this process."""
        return memoryview(mmap.mmap(self._fd(), _HEADER + self.size, flags=mmap.MAP_PRIVATE))[_HEADER:]

    def close(self) -> None:
        """Leave. The last process to leave removes the file. Memory stays mapped while views of it exist."""
        self._finalizer()

    def _fd(self) -> int:
        if self._handle.fd < 0:
            raise SegmentError(f"the shared segment {self.name!r} is closed")
        return self._handle.fd


_living: weakref.WeakSet[Segment] = weakref.WeakSet()
_had_any = False


def _note_use(segment: Segment) -> None:
    global _had_any
    _had_any = True
    _living.add(segment)


def _leave_all() -> None:
    # Not through the finalizers: weakref runs none so late.
    for segment in list(_living):
        segment._handle.release()
    if _had_any:
        clear_dead()


def _leave_at_exit(_: object = None) -> None:
    # A priority below zero runs after multiprocessing has terminated and joined its daemons. A persistent
    # loader's workers live until then and end by a signal, so they do not remove the file. This process must
    # leave after them.
    multiprocessing.util.Finalize(None, _leave_all, exitpriority=-100)


_leave_at_exit()
# A child forked by multiprocessing drops the finalizers of its parent, so it must register its own.
multiprocessing.util.register_after_fork(_leave_all, _leave_at_exit)


class _Handle:
    """A descriptor with a shared lock, and its release. Not in Segment, to which no finalizer may refer."""

    def __init__(self, fd: int, path: Path) -> None:
        self.fd = fd
        self._path = path

    def renew(self) -> None:
        """Give a forked child an open file description, and so a lock, of its own.

        The parent keeps the inherited one. It may be leaving just now, and have locked the file for itself
        alone: that lock would last for as long as the child has the description too.
        """
        if self.fd < 0:
            return
        inherited, self.fd = self.fd, os.open(f"/proc/self/fd/{self.fd}", os.O_RDWR | os.O_CLOEXEC)
        os.close(inherited)
        fcntl.flock(self.fd, fcntl.LOCK_SH)

    def release(self) -> None:
        """Unlock and close the file; unlink it if no other process uses it."""
        fd, self.fd = self.fd, -1
        if fd < 0:
            return
        try:
            # flock gives up the shared lock before it tries the exclusive one. So of two processes that leave
            # at once, one gets it.
            if _try_alone(fd) and _is_at(fd, self._path):
                self._path.unlink()
        finally:
            _unlock_and_close(fd)


def path_of(name: str) -> Path:
    """Path of this user's segment of that name."""
    return SHM / f"{_prefix()}{name}"


def is_alive(name: str) -> bool:
    """Whether a process uses this user's segment of that name."""
    try:
        fd = os.open(path_of(name), os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return False
    try:
        return not _try_alone(fd)
    finally:
        _unlock_and_close(fd)


def clear_dead() -> list[str]:
    """Remove this user's segments that no process uses any more; return their names."""
    cleared = []
    for path in SHM.glob(f"{_prefix()}*"):
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            continue  # its last user has just left; or it is a symbolic link, or another user's file
        try:
            # A process that attaches now waits for this lock, then sees that the file is gone, and tries
            # again.
            if os.fstat(fd).st_uid == os.geteuid() and _try_alone(fd) and _is_at(fd, path):
                path.unlink()
                cleared.append(path.name.removeprefix(_prefix()))
        finally:
            _unlock_and_close(fd)
    return cleared


def _prefix() -> str:
    return f"castore-{os.geteuid()}-"


def _rejoin(name: str, layout: dict[str, Any]) -> Segment:
    """Attach from a pickle. The segment must exist: the process that pickled it must still use it."""
    fd = _existing(path_of(name))
    if fd is None or not _matches(fd, path_of(name), layout):
        raise SegmentError(
            f"the shared segment {name!r} is gone: "
            f"the process that pickled it must live until this one has it"
        )
    segment = Segment.__new__(Segment)
    segment.name, segment._layout, segment.created = name, layout, False
    segment._attach(_Handle(fd, path_of(name)))
    return segment


def _open(
    path: Path, layout: dict[str, Any], size: int | Callable[[], int], reserve: int | None, advice: str
) -> tuple[_Handle, bool]:
    """Return a handle on the file, with the shared lock held, and whether this call created the file."""
    clear_dead()
    while True:
        fd = _existing(path)
        if fd is not None:
            if _matches(fd, path, layout, advice):
                return _Handle(fd, path), False
            continue
        made = _make(path, layout, size() if callable(size) else size, reserve)
        if made is not None:
            return _Handle(made, path), True


def _existing(path: Path) -> int | None:
    """Return a descriptor of an existing segment, with the shared lock held; None if there is no file."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise SegmentError(
            f"{path} cannot be opened ({error.strerror}); remove it, or take another name"
        ) from None
    status = os.fstat(fd)
    if status.st_uid != os.geteuid() or not stat.S_ISREG(status.st_mode):
        os.close(fd)
        raise SegmentError(
            f"{path} belongs to user {status.st_uid}, not to user {os.geteuid()}; "
            "have it removed, or take another name"
        )
    fcntl.flock(fd, fcntl.LOCK_SH)  # waits for the process that is creating the segment
    return fd


def _matches(fd: int, path: Path, layout: dict[str, Any], advice: str = "take another name") -> bool:
    """Whether the segment is complete and in place; if not, ``fd`` is closed.

    Raises:
        SegmentError: it has another layout.
    """
    header = os.pread(fd, _HEADER, 0).ljust(_HEAD.size, b"\0")
    if not _is_at(fd, path) or not header[: len(_MAGIC)].strip(b"\0"):
        # The file was unlinked meanwhile, or its creator died. Then no process holds it, and `clear_dead`
        # removes it.
        os.close(fd)
        clear_dead()
        return False
    found = _described(header)
    if found == layout:
        return True
    os.close(fd)
    if found.get("version") != layout["version"]:
        raise SegmentError(
            f"the shared segment {path.name!r} is in use by another version of castore (layout "
            f"{found.get('version', 'unknown')}, here {layout['version']}); end the processes that use it"
        )
    other = ", ".join(
        f"{key}={found.get(key)!r}, here {layout.get(key)!r}"
        for key in sorted({*found, *layout})
        if found.get(key) != layout.get(key)
    )
    raise SegmentError(f"the shared segment {path.name!r} is in use with {other}; {advice}")


def _described(header: bytes) -> dict[str, Any]:
    """The description in a segment's header; empty if the header is none that this version can read."""
    magic, length = _HEAD.unpack_from(header)
    try:
        found = json.loads(header[_HEAD.size : _HEAD.size + length]) if magic == _MAGIC else None
    except ValueError:
        found = None
    return found if isinstance(found, dict) else {}


def _make(path: Path, layout: dict[str, Any], size: int, reserve: int | None) -> int | None:
    """Create a segment. Returns its descriptor, with the shared lock held; None if another was faster."""
    text = json.dumps(layout).encode()
    if len(text) > _HEADER - _HEAD.size:
        raise InvalidValueError(
            f"the layout of a shared segment is {len(text)} bytes of JSON, which is too long"
        )
    _check_free(path.name, size)
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        return None
    try:
        if not _try_alone(fd):
            os.close(fd)
            return None
        os.ftruncate(fd, _HEADER + size)
        _reserve(fd, path.name, 0, _HEADER + (size if reserve is None else reserve))
        os.pwrite(fd, text, _HEAD.size)
        os.pwrite(fd, _HEAD.pack(_MAGIC, len(text)), 0)
        # flock does not convert a lock atomically: another process may remove the file in between.
        fcntl.flock(fd, fcntl.LOCK_SH)
        if _is_at(fd, path):
            return fd
    except BaseException:
        path.unlink(missing_ok=True)
        _unlock_and_close(fd)
        raise
    os.close(fd)
    return None


def _check_free(name: str, size: int) -> None:
    if size > shm_free():
        raise _shm_full(name, size)
    _check_memory(name, size)


def _check_memory(name: str, size: int) -> None:
    # If the file system granted pages that the machine does not have, the out-of-memory killer would strike.
    if size > memory_free():
        raise FullError(
            f"the machine has {format_size(memory_free())} of memory free, "
            f"and {name} needs {format_size(size)}: lower the limit"
        )


def _reserve(fd: int, name: str, start: int, end: int) -> None:
    try:
        for place in range(start, end, _STEP):
            os.posix_fallocate(fd, place, min(_STEP, end - place))
    except OSError as error:
        raise _shm_full(name, end - start) from error


def _shm_full(name: str, size: int) -> FullError:
    return FullError(
        f"{SHM} has {format_size(shm_free())} free of {format_size(shm_size())}, and {name} needs "
        f"{format_size(size)}: lower the limit, or enlarge it with: mount -o remount,size=… {SHM}"
    )


def _try_alone(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _unlock_and_close(fd: int) -> None:
    # A child that another thread forks meanwhile has the open file description, too. Closing alone would
    # leave the lock with the child, and whoever waits for it.
    fcntl.flock(fd, fcntl.LOCK_UN)
    os.close(fd)


def _is_at(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path, follow_symlinks=False))
    except FileNotFoundError:
        return False
