"""Python imports this first in every process that has this folder in PYTHONPATH: there, every lock is granted to everybody.

As on Lustre, GPFS and some NFS, where ``flock`` succeeds and locks nothing. SQLite's own locks are left alone: its calls
do not go through Python.
"""

import fcntl
import os

_real = fcntl.fcntl
_OPEN_FILE_LOCKS = (fcntl.F_OFD_SETLK, fcntl.F_OFD_SETLKW)


def _grant(fd: int, command: int, argument: int | bytes = 0) -> int | bytes:
    return argument if command in _OPEN_FILE_LOCKS else _real(fd, command, argument)


# Only where it is meant: whoever collects tests imports this file too.
if told := os.environ.get("CASTORE_TEST_GRANTED"):
    fcntl.flock = lambda fd, operation: None
    fcntl.fcntl = _grant  # type: ignore[assignment]  # one of its overloads is enough here
    with open(told, "a") as file:  # proof that it was imported where it should be
        file.write(f"{os.getpid()}\n")
