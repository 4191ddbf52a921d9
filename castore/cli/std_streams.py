"""The command's three standard streams, as a shell may hand them over: closed, full, or in another encoding.

Knows no command. After `secure` every descriptor below 3 is in use. So no file of a store is ever opened
under such a number, and no print can write to it.
"""

from __future__ import annotations

import io
import os
import sys
from contextlib import suppress

from castore.errors import CastoreError

_INPUT, _OUTPUT, _ERRORS = 0, 1, 2

_closed: set[int] = set()


class _Output(io.FileIO):
    """Standard output; its errors name it as the stream that failed."""

    def write(self, data: object) -> int | None:  # type: ignore[override]
        try:
            return super().write(data)  # type: ignore[arg-type]
        except OSError as error:
            raise OSError(error.errno, error.strerror, "standard output") from None


def secure() -> None:
    """Open /dev/null in the place of closed streams, and have output take every name.

    Names are UTF-8, and go into pipes and files unchanged, whatever the locale. A terminal gets its own
    encoding, with escapes for other characters.
    """
    while (fd := os.open(os.devnull, os.O_RDWR)) <= _ERRORS:
        os.set_inheritable(fd, True)
        _closed.add(fd)
    os.close(fd)
    before = sys.stdout
    is_terminal = os.isatty(_OUTPUT)
    sys.stdout = io.TextIOWrapper(
        io.BufferedWriter(_Output(_OUTPUT, "wb", closefd=False)),
        encoding=before.encoding if before is not None and is_terminal else "utf-8",
        errors="backslashreplace" if is_terminal else "surrogateescape",
        line_buffering=is_terminal,
    )
    if sys.stderr is None:
        sys.stderr = io.TextIOWrapper(
            io.FileIO(_ERRORS, "wb", closefd=False), errors="backslashreplace", write_through=True
        )


def standard_input() -> io.FileIO:
    """Standard input as bytes, without a buffer; it is not closed with the file.

    Raises:
        CastoreError: it is closed.
    """
    if _INPUT in _closed:
        raise CastoreError("standard input is closed, so there is nothing to read")
    return io.FileIO(_INPUT, "rb", closefd=False)


def need_output() -> None:
    """Check that standard output is open: for commands that only print.

    Raises:
        CastoreError: standard output is closed.
    """
    if _OUTPUT in _closed:
        raise CastoreError("standard output is closed, so there is nowhere to print to")


def flush() -> None:
    """Write buffered output. If that fails, drop it: the error was reported, and exit must not try again."""
    for stream, fd in ((sys.stdout, _OUTPUT), (sys.stderr, _ERRORS)):
        try:
            stream.flush()
        except OSError:
            mute(fd)
            with suppress(OSError):
                stream.flush()


def mute(fd: int) -> None:
    """Send all later output of a standard stream to /dev/null."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, fd)
    os.close(nowhere)
