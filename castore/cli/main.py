"""The `castore` command's first and last moments: Ctrl-C, and the streams that a shell hands over.

Imports next to nothing: until `run` has said what a Ctrl-C does, it would end in Python's traceback.
"""

from __future__ import annotations

import os
import signal
import sys

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
    is_heard = signal.getsignal(signal.SIGINT) is not signal.SIG_IGN
    if is_heard:
        # Loading the commands takes a tenth of a second, and has nothing that would need to be put away.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from castore.cli import commands, std_streams

    std_streams.secure()
    code = INTERRUPTED
    try:
        if is_heard:
            sys.unraisablehook = _raise_again
            signal.signal(signal.SIGINT, _interrupt)
        code = commands.main()
        if is_heard:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
    except KeyboardInterrupt:
        pass  # it came as the command had just ended
    std_streams.flush()
    if code in (INTERRUPTED, TERMINATED):
        # Ctrl-C in the moment in which a pool starts a thread leaves one that the pool does not know of, and Python
        # would wait for it for ever. Stores are closed by now, and nothing else has to be.
        os._exit(code)
    sys.exit(code)


def _interrupt(number: int, frame: FrameType | None) -> None:
    """The first Ctrl-C has everything put away. Another one ends that at once, as SIGKILL would."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    raise KeyboardInterrupt


def _raise_again(unraisable: Any) -> None:
    """Python prints, and forgets, what is raised while an object is taken down. A Ctrl-C is not to be forgotten."""
    if unraisable.exc_type is KeyboardInterrupt:
        import threading

        signal.signal(signal.SIGINT, _interrupt)
        # Raised in here it would be forgotten once more.
        again = threading.Timer(0.01, signal.pthread_kill, (threading.get_ident(), signal.SIGINT))
        again.daemon = True
        again.start()
    else:
        sys.__unraisablehook__(unraisable)
