"""The command's exit codes."""

from __future__ import annotations

#: Something was not found, not done, or is left to do.
FAILED = 1
#: The command was asked for something that cannot be.
USAGE = 2
#: Ctrl-C.
INTERRUPTED = 130
#: SIGTERM, where the command puts everything away first.
TERMINATED = 143
