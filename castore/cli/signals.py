"""Has a command that writes files of the user's clean up when it is told to end."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import typer

from castore.cli.exit_codes import TERMINATED
from castore.cli.output import print_error

if TYPE_CHECKING:
    from types import FrameType


@contextmanager
def terminable() -> Iterator[None]:
    """Have SIGTERM clean up as Ctrl-C does. Another SIGTERM ends the cleanup at once."""
    was_terminated = False

    def end(number: int, frame: FrameType | None) -> None:
        nonlocal was_terminated
        was_terminated = True
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    except KeyboardInterrupt:
        if not was_terminated:
            raise
        print_error("terminated")
        raise typer.Exit(TERMINATED) from None
    finally:
        signal.signal(signal.SIGTERM, before)
