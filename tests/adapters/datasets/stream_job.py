"""A function of streams that notes its rows in a file, whatever process runs it, and may stop or kill that
process. Apart from the tests: spawned workers import this.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path
from typing import Any


class Notes:
    """Notes rows in a file; does not count in keys.

    Args:
        file: gets a byte for each row.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        #: At so many rows in all, wait for the end of the process.
        self.stop: int | None = None
        #: From so many rows in all on, one process is killed.
        self.kill: int | None = None

    def __castore_key__(self) -> str:
        return "Notes"

    def __call__(self) -> None:
        with self.file.open("ab") as file:
            file.write(b".")
        rows = self.rows()
        if self.kill is not None and rows >= self.kill and self._is_first():
            os.kill(os.getpid(), signal.SIGKILL)
        while self.stop is not None and rows >= self.stop:
            time.sleep(0.01)

    def _is_first(self) -> bool:
        """Whether no other process has asked. Two of them may skip a number of rows between them."""
        with contextlib.suppress(FileExistsError):
            self.file.with_suffix(".killed").touch(exist_ok=False)
            return True
        return False

    def rows(self) -> int:
        """How many rows have run."""
        return self.file.stat().st_size if self.file.exists() else 0


class Doubles:
    """A map."""

    def __init__(self, notes: Notes) -> None:
        self.notes = notes

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        self.notes()
        return {"number": sample["number"] * 2}


class Halves:
    """A filter."""

    def __init__(self, notes: Notes) -> None:
        self.notes = notes

    def __call__(self, sample: dict[str, Any]) -> bool:
        self.notes()
        return bool(sample["number"] % 4)
