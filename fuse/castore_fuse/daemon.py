"""The daemon's side of a mount: report on a pipe that it is ready or why not, write its record, and serve.

May assume that `serve` is the first call in a fresh process: it changes signal handlers, limits and logging,
which belong to the whole process. Threads start only in here, after all forking is done.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import logging
import os
import resource
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from castore.errors import CastoreError
from castore.system.temporary import is_running, open_with_mode, process_started
from castore_fuse.session import Session

log = logging.getLogger("castore.fuse")

READY = "ready"
"""The daemon's message on its ready pipe; anything else is the sentence of an error."""

# From malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


@dataclass(frozen=True)
class DaemonRecord:
    """The process that serves a mount: its process id, and its start time, because process ids are reused."""

    mountpoint: str
    pid: int
    started: int

    @classmethod
    def of_this_process(cls, mountpoint: Path) -> DaemonRecord:
        """The record of the calling process."""
        return cls(os.fspath(mountpoint), os.getpid(), process_started(os.getpid()) or 0)

    @classmethod
    def read(cls, path: Path) -> DaemonRecord | None:
        """The record in a file; None when the file is missing or cannot be parsed."""
        try:
            return cls(**json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return None

    def write(self, path: Path) -> None:
        """Write the record atomically: `read` finds all of it or nothing."""
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{self.pid}")
        with open(open_with_mode(temporary, os.O_WRONLY | os.O_TRUNC, 0o644), "w", encoding="utf-8") as file:
            json.dump(asdict(self), file)
        temporary.replace(path)

    def alive(self) -> bool:
        """Whether exactly that process still runs."""
        return is_running(self.pid, self.started)


def serve(
    make_session: Callable[[], Session],
    *,
    started: Callable[[], object] | None = None,
    ready_fd: int | None = None,
    lifeline_fd: int | None = None,
    record_path: Path | None = None,
) -> int:
    """Make the session, mount it, and serve it to its end.

    Args:
        make_session: opens the store and makes the session. The message of its `CastoreError` goes to the
            caller.
        started: called when the mount answers and threads may start.
        ready_fd: a pipe that gets the line `ready`, or an error message.
        lifeline_fd: a pipe to which nothing is written. The mount ends when the pipe's other end is closed.
        record_path: where the `DaemonRecord` lies while the mount lives.

    Returns:
        The exit code: 0, or 1 when the mount could not be made.
    """
    # With a lifeline the daemon shares its caller's standard error, so it logs warnings and errors only.
    level = logging.INFO if lifeline_fd is None else logging.WARNING
    logging.basicConfig(level=level, format="%(asctime)s %(levelname)s %(name)s[%(process)d]: %(message)s")
    for handler in logging.getLogger().handlers:
        handler.addFilter(_RepeatFilter())
    _raise_file_limit()
    _keep_freed_memory()
    try:
        session = make_session()
        session.mount()
    except CastoreError as error:
        log.error("%s", error)  # noqa: TRY400 (the message is enough; a traceback is for defects)
        _write_line(ready_fd, str(error))
        return 1
    except BaseException as error:
        _write_line(ready_fd, f"unexpected {type(error).__name__} while mounting: {error}")
        raise

    def on_ready() -> None:
        if record_path is not None:
            try:
                DaemonRecord.of_this_process(session.mountpoint).write(record_path)
            # the disk is full, say: without a record, `umount` does not wait for this process
            except OSError as error:
                log.warning("cannot write %s: %s", record_path, error.strerror)
        if started is not None:
            started()
        if lifeline_fd is not None:
            threading.Thread(target=_await_lifeline, args=(lifeline_fd, session), daemon=True).start()
        log.info("mounted at %s", session.mountpoint)
        _write_line(ready_fd, READY)

    try:
        session.run(on_ready)
    finally:
        if record_path is not None:
            record_path.unlink(missing_ok=True)
    log.info("unmounted from %s", session.mountpoint)
    return 0


class _RepeatFilter(logging.Filter):
    """Passes each error once a minute: while an index is broken, every request of a mount fails alike."""

    def __init__(self) -> None:
        super().__init__()
        self._until: dict[str, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.ERROR:
            return True
        key = record.getMessage() if record.exc_info is None else repr(record.exc_info[1])
        now = time.monotonic()
        if self._until.get(key, 0.0) > now:
            return False
        if len(self._until) > 100:
            self._until.clear()
        self._until[key] = now + 60.0
        return True


def _write_line(descriptor: int | None, sentence: str) -> None:
    if descriptor is not None:
        with contextlib.suppress(BrokenPipeError), open(descriptor, "wb") as pipe:
            pipe.write(" ".join(sentence.split()).encode() + b"\n")


def _await_lifeline(lifeline: int, session: Session) -> None:
    """Wait until the last process that holds the other end is gone, then end the session."""
    os.read(lifeline, 1)
    session.exit()


def _keep_freed_memory() -> None:
    """Have malloc keep up to 128 MB of freed memory for the next frames.

    Frames are allocated and freed at the rate of reading. Without this, glibc returns their memory to the
    kernel each time and faults it in again, which takes a fifth of the time of decoding a frame.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # not every C library has it
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, 4 << 20)
        mallopt(_M_TRIM_THRESHOLD, 128 << 20)


def _raise_file_limit() -> None:
    """Raise the limit of open files to the hard limit: every open handle holds a file descriptor."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
