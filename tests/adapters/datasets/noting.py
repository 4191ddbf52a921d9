"""An operator that tells which of its kind ran, on how many rows."""

from __future__ import annotations

import logging
from typing import Any

#: What ran, a word a row; to be cleared before each test.
calls: list[str] = []
# A list that an operator writes to is a part of it, and changes it; a logger is not.
log = logging.getLogger("tests.adapters.datasets.noting")


class _Collecting(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        calls.append(record.getMessage())


log.addHandler(_Collecting())
log.setLevel(logging.INFO)
log.propagate = False


class Adds:
    """Notes that it ran, and adds something to the text."""

    def __init__(self, what: str) -> None:
        self.what = what

    def process(self, sample: dict[str, Any]) -> dict[str, Any]:
        """The sample, longer."""
        log.info(self.what)
        return {**sample, "text": sample["text"] + self.what}
