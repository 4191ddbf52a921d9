"""The command's exit codes."""

from __future__ import annotations

#: Something was not found or not done, or is left to do.
FAILED = 1
#: The arguments are wrong.
USAGE = 2
#: Ctrl-C.
INTERRUPTED = 130
#: SIGTERM, for commands that clean up first.
TERMINATED = 143
