"""Makes every lock succeed: Python imports this first in each process with this folder in PYTHONPATH.

On Lustre, GPFS and some NFS, ``flock`` succeeds too and locks nothing. SQLite's own locks still work: SQLite
does not call Python. So do locks in shared memory, which lies on the machine's own tmpfs: without them this
process would take the segments of all others for those of dead processes, and remove them.
"""

import fcntl
import os

_real, _real_flock = fcntl.fcntl, fcntl.flock
_OPEN_FILE_LOCKS = (fcntl.F_OFD_SETLK, fcntl.F_OFD_SETLKW)


def is_shared_memory(fd: int) -> bool:
    """Whether a file lies in shared memory."""
    return os.readlink(f"/proc/self/fd/{fd}").startswith("/dev/shm/")


def _grant(fd: int, command: int, argument: int | bytes = 0) -> int | bytes:
    if command not in _OPEN_FILE_LOCKS or is_shared_memory(fd):
        return _real(fd, command, argument)
    return argument


def _grant_flock(fd: int, operation: int) -> None:
    if is_shared_memory(fd):
        _real_flock(fd, operation)


# Active only where the tests set the variable: pytest's collection imports this file too.
if told := os.environ.get("CASTORE_TEST_GRANTED"):
    fcntl.flock = _grant_flock  # type: ignore[assignment]  # nobody gives a file object
    fcntl.fcntl = _grant  # type: ignore[assignment]  # one of its overloads is enough here
    with open(told, "a") as file:  # proof that it was imported where it should be
        file.write(f"{os.getpid()}\n")
