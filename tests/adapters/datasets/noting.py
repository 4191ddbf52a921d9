"""An operator that notes each run of itself, with the number of rows."""

from __future__ import annotations

import logging
from typing import Any

#: One word for each row that ran; to be cleared before each test.
calls: list[str] = []
# A list that an operator writes to counts in its key; a logger does not.
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
