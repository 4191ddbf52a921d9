"""Worker processes that leave nothing behind: they end with the thread that forks them, and ignore Ctrl-C.

At a terminal every process of a command gets SIGINT. A worker would print a traceback of its own, so workers
ignore SIGINT: the process that forked them ends them.

tqdm's bars have a lock that forked processes share. `datasets` takes it for each `map`, shown or not. A
worker that is killed there, for want of memory say, would keep the lock, and its parent would wait for good
at the next bar. So workers have a lock of their own.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterator

_PR_SET_PDEATHSIG = 1

_libc = ctypes.CDLL(None)


class _ThreadState(threading.local):
    """State of a thread: the process that its workers belong to, and its signal mask before a fork."""

    parent: int | None = None
    mask: set[int] | None = None


_thread_state = _ThreadState()


def allowed(wanted: int | None) -> int:
    """How many processes may share some work: the number wanted, at least this one.

    1 in a daemonic process, such as a worker of `multiprocessing.Pool` or of a `DataLoader`: it may have no
    children.
    """
    return 1 if multiprocessing.current_process().daemon else wanted or 1


@contextlib.contextmanager
def bound_to_thread() -> Iterator[None]:
    """Make the children that this thread forks in a block such workers.

    Raises:
        KeyboardInterrupt: Ctrl-C came in the block, also if another error followed from it.
    """
    before, _thread_state.parent = _thread_state.parent, os.getpid()
    try:
        yield
    except Exception as error:
        cause: BaseException | None = error
        while cause is not None:
            if isinstance(cause, KeyboardInterrupt):
                raise cause from None
            cause = cause.__context__
        raise
    finally:
        _thread_state.parent = before


def _before_fork() -> None:
    if _thread_state.parent is not None:
        # Blocked until the child has set its signal handlers.
        _thread_state.mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})


def _after_fork_in_parent() -> None:
    mask, _thread_state.mask = _thread_state.mask, None
    if mask is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _after_fork_in_child() -> None:
    parent, _thread_state.parent = _thread_state.parent, None
    if parent is None:
        return
    # A handler instead of SIG_IGN: programs that a worker starts would inherit SIG_IGN.
    signal.signal(signal.SIGINT, lambda number, frame: None)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent ended before prctl
        os._exit(1)
    give_bars_a_lock_of_their_own()
    _after_fork_in_parent()


def give_bars_a_lock_of_their_own() -> None:
    """Part a forked child from its parent, whose bars have a lock that both share."""
    bar = getattr(sys.modules.get("tqdm"), "tqdm", None)
    lock, kinds = threading.RLock(), [bar] if bar else []
    for kind in kinds:
        kind.set_lock(lock)
        kinds += kind.__subclasses__()  # one of them may have got a lock of its own


os.register_at_fork(
    before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child
)
