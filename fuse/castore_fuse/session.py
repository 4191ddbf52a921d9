"""A mount served by Python threads: libfuse's session on one side, a `LowLevel` file system on the other.

Reasons for libfuse's low-level interface, and not the path-based one that mfusepy wraps:

- An open handle must never get bytes of two blobs. The path-based layer gives a name the same kernel inode as
  long as any handle of it is open. After the name is pointed to another blob, old and new handles would share
  one page cache and one size. Here a node stands for a name *and* its blob: the changed name gets a new node,
  and the old handle keeps its own inode, pages and size.
- Callbacks on libfuse's own threads make CPython create and destroy a thread state each time. Here Python's
  threads run the loop, so thread-locals (database connections, decoders) live as long as the mount.
- Only the low-level interface has `readdirplus`, invalidation by (folder, name), and timeouts per node.

Knows nothing of castore. Must never touch the mounted tree itself: a thread that waits for its own mount
while it holds the GIL waits for ever.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

from castore_fuse import libfuse, mountpoints
from castore_fuse.dispatch import Dispatcher
from castore_fuse.errors import MountError
from castore_fuse.lowlevel import LowLevel

log = logging.getLogger("castore.fuse")


def default_threads() -> int:
    """Enough threads for decoding to use all cores while other threads wait for the disk."""
    return min(16, max(4, (os.cpu_count() or 1) + 2))


class Session:
    """One mount, from `mount()` to the return of `run()`.

    Args:
        ops: the file system.
        mountpoint: an existing folder.
        options: mount options, such as `ro`, `allow_other`, `fsname=...`; commas in them need no escaping.
        threads: number of requests handled at once; the default is that of `default_threads`.

    Attributes:
        device: major and minor number of the mounted file system, such as ``0:57``; None before `mount`.
    """

    def __init__(
        self,
        ops: LowLevel,
        mountpoint: str | os.PathLike[str],
        options: Sequence[str],
        threads: int | None = None,
    ) -> None:
        self.mountpoint = Path(os.path.realpath(mountpoint))
        self._lib = libfuse.load()
        self._threads = threads or default_threads()
        # C keeps pointers into the table: it must live as long as the session.
        self._table = Dispatcher(ops, self._lib).table()
        self._notify_lock = threading.Lock()
        self.device: str | None = None
        self._wake_read, self._wake_write = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._wake_write, False)  # signal.set_wakeup_fd requires it
        self._session = self._new(options)

    def _new(self, options: Sequence[str]) -> Any:
        # libfuse splits options at commas that follow no backslash.
        escaped = [option.replace("\\", "\\\\").replace(",", "\\,") for option in options]
        argv = [b"castore", *(argument for option in escaped for argument in (b"-o", os.fsencode(option)))]
        args = libfuse.Args(len(argv), (ctypes.c_char_p * (len(argv) + 1))(*argv, None), 0)
        session = self._lib.session_new(args, self._table, ctypes.sizeof(self._table), None)
        if not session:
            raise MountError(f"libfuse refused the mount options {', '.join(options)!r}; see the log")
        return session

    def mount(self) -> None:
        """Attach to the mountpoint. Nobody may access the mount before `run`, which answers the requests.

        Raises:
            MountError: the mount failed, with the message of the kernel or of fusermount3; or a castore is
                mounted there already.
        """
        with mountpoints.claimed(self.mountpoint), _captured_stderr() as captured:
            failed = self._lib.session_mount(self._session, os.fsencode(self.mountpoint))
        if failed:
            raise MountError(f"cannot mount at {self.mountpoint}: {captured() or 'libfuse gives no reason'}")
        found = mountpoints.mount_at(self.mountpoint)
        self.device = found.device if found else None

    def run(self, on_ready: Callable[[], None] | None = None, grace: float = 5.0) -> None:
        """Serve until the mount is unmounted, `exit()` is called, or SIGTERM or SIGINT arrives.

        Signals are handled in the main thread only.

        Args:
            on_ready: called once requests are being answered.
            grace: seconds for which handles still open after `exit()` or a signal are served; a second signal
                cuts them off.
        """
        workers = [
            threading.Thread(target=self._work, name=f"castore-fuse-{n}", daemon=True)
            for n in range(self._threads)
        ]
        with self._signals():
            for worker in workers:
                worker.start()
            if on_ready is not None:
                on_ready()
            os.read(self._wake_read, 1)  # a worker that ended, exit(), or a signal
            self._detach()
            finished = self._wait_for(workers, grace)
        if finished:
            self._destroy()
        else:
            log.warning("files of %s were still open; they are cut off now", self.mountpoint)

    def exit(self) -> None:
        """End `run` soon. May be called from any thread and from a signal handler."""
        with suppress(BlockingIOError):
            os.write(self._wake_write, b"x")

    def invalidate_entry(self, parent: int, name: bytes) -> bool:
        """Make the kernel look `name` up again, and list `parent` again. False if `name` was not cached.

        May wait for requests under way in that folder: never call it from a `LowLevel` method.
        """
        return self._notify(self._lib.notify_inval_entry, parent, name, len(name))

    def invalidate_inode(self, node: int) -> bool:
        """Drop cached attributes, and cached pages or the cached listing. False if the node was not cached.

        Waits for reads under way that hold pages of the node: never call it from a `LowLevel` method.
        """
        return self._notify(self._lib.notify_inval_inode, node, 0, 0)

    def _notify(self, function: Callable[..., int], *arguments: Any) -> bool:
        with self._notify_lock:
            if self._session is None:
                return False
            result = -function(self._session, *arguments)
        if result in (0, errno.ENOENT, errno.ENODEV, errno.EBADF, errno.ENOTCONN):
            return result == 0
        raise OSError(result, f"the kernel refused to invalidate: {os.strerror(result)}")

    def _work(self) -> None:
        """One thread's loop. It ends when the connection does."""
        session, buffer = self._session, libfuse.Buf()
        receive, process, pointer = (
            self._lib.session_receive_buf,
            self._lib.session_process_buf,
            ctypes.byref(buffer),
        )
        try:
            while True:
                size = receive(session, pointer)
                if size > 0:
                    process(session, pointer)
                elif size not in (-errno.EINTR, -errno.EAGAIN):
                    break
            if size not in (0, -errno.ENODEV):
                log.error("reading requests of %s failed: %s", self.mountpoint, os.strerror(-size))
        finally:
            self.exit()

    def _detach(self) -> None:
        """Unmount lazily, unless that was done already. Open handles keep the mount alive."""
        found = mountpoints.mount_at(self.mountpoint)
        if found is not None and found.device == self.device:
            mountpoints.detach(self.mountpoint, lazy=True)

    def _wait_for(self, workers: list[threading.Thread], grace: float) -> bool:
        """Wait until all workers end. False if `grace` seconds, or a second signal, came first."""
        deadline = time.monotonic() + grace
        while any(_still_alive(worker) for worker in workers):
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            ready, _, _ = select.select([self._wake_read], [], [], min(left, 0.05))
            if ready and any(
                byte in (signal.SIGTERM, signal.SIGINT) for byte in os.read(self._wake_read, 64)
            ):
                return False
        return True

    def _destroy(self) -> None:
        with self._notify_lock:
            self._lib.session_unmount(self._session)
            self._lib.session_destroy(self._session)
            self._session = None

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """SIGTERM and SIGINT write their number into the wake-up pipe.

        Threads started inside leave signals to this thread.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def ignore(number: int, frame: FrameType | None) -> None:
            """The signal's number is already in the wake-up pipe."""

        before = {number: signal.signal(number, ignore) for number in (signal.SIGTERM, signal.SIGINT)}
        wakeup = signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        try:
            yield
        finally:
            signal.set_wakeup_fd(wakeup)
            for number, handler in before.items():
                signal.signal(number, handler)


def _still_alive(worker: threading.Thread) -> bool:
    worker.join(0.002)  # a worker calls exit() a moment before it ends
    return worker.is_alive()


@contextmanager
def _captured_stderr() -> Iterator[Callable[[], str]]:
    """Collect what C code and fusermount3 write to descriptor 2; the yielded function returns it as one line.

    Use it before threads start: the descriptor belongs to the whole process.
    """
    captured = os.memfd_create("castore-stderr")
    before = os.dup(2)
    os.dup2(captured, 2)
    text = ""
    try:
        yield lambda: text
    finally:
        os.dup2(before, 2)
        os.close(before)
        text = " / ".join(os.pread(captured, 4096, 0).decode(errors="replace").split("\n")).strip(" /")
        os.close(captured)
