"""The `castore` command's first and last moments: Ctrl-C, and the streams that a shell hands over.

Imports next to nothing: until `run` has set the handler of SIGINT, a Ctrl-C would end in Python's traceback.
"""

from __future__ import annotations

import os
import signal
import sys
import time

from castore.cli.exit_codes import INTERRUPTED, TERMINATED

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import FrameType
    from typing import Any, NoReturn


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        arguments: the words after `castore`; default those of this process.

    Returns:
        The exit code: 0, 1 (it failed), 2 (usage), 130 (interrupted), 143 (terminated).
    """
    from castore.cli import commands

    return commands.main(arguments)


def run() -> NoReturn:
    """The entry point of the `castore` command."""
    # A shell has background jobs ignore it.
    takes_interrupts = signal.getsignal(signal.SIGINT) is not signal.SIG_IGN
    if takes_interrupts:
        # Loading the commands takes a tenth of a second, and leaves nothing that needs cleaning up.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from castore.cli import commands, std_streams

    std_streams.secure()
    code = INTERRUPTED
    try:
        if takes_interrupts:
            sys.unraisablehook = _resend_interrupt
            signal.signal(signal.SIGINT, _interrupt)
        code = commands.main()
        if takes_interrupts:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
    except KeyboardInterrupt:
        pass  # Ctrl-C came when the command had just ended
    std_streams.flush()
    if code in (INTERRUPTED, TERMINATED):
        from castore.system import temporary

        temporary.remove_own()
        # Ctrl-C at the moment when a pool starts a thread leaves a thread that the pool does not know, and
        # Python would wait for that thread for ever. Stores are closed by now, and nothing else needs
        # closing.
        os._exit(code)
    sys.exit(code)


def _interrupt(number: int, frame: FrameType | None) -> None:
    """The first Ctrl-C ends the command after its cleanup. Another one ends it at once, as SIGKILL would."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    raise KeyboardInterrupt


def _resend_interrupt(unraisable: Any) -> None:
    """Raise a Ctrl-C again that came inside a finaliser: Python only prints such exceptions."""
    if unraisable.exc_type is KeyboardInterrupt:
        import threading

        signal.signal(signal.SIGINT, _interrupt)
        threading.Thread(target=_interrupt_later, args=(threading.get_ident(),), daemon=True).start()
    else:
        sys.__unraisablehook__(unraisable)


def _interrupt_later(thread: int) -> None:
    """Send Ctrl-C to a thread that has left `_resend_interrupt`: in there it would be dropped again."""
    hook, frame = _resend_interrupt.__code__, sys._current_frames().get(thread)
    while frame is not None:
        if frame.f_code is hook:
            time.sleep(0.005)
            frame = sys._current_frames().get(thread)
        else:
            frame = frame.f_back
    signal.pthread_kill(thread, signal.SIGINT)
