"""A statement that changes many rows, run as few statements of many rows each.

`executemany` runs a statement for each row, and each run gives up the interpreter's lock and takes it again.
While other threads work, that wait costs more than the row: a commit beside threads that decode took two to
four times as long.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from functools import cache
from itertools import chain
from typing import Any, NamedTuple

# Rows of one statement. SQLite allows 32,766 parameters, and keeps 128 parsed statements a connection.
_COUNTS = (128, 16, 1)


class ManyRows(NamedTuple):
    """A statement with a list of rows in it.

    Attributes:
        head: the text before the rows.
        row: the text of a row, with a ``?`` for each value.
        tail: the text behind the rows.

    >>> ManyRows("INSERT INTO t VALUES ", "(?, ?, 1)").text(2)
    'INSERT INTO t VALUES (?, ?, 1), (?, ?, 1)'
    """

    head: str
    row: str
    tail: str = ""

    def text(self, count: int) -> str:
        """The SQL for that many rows."""
        return _text(self, count)

    def run(self, db: sqlite3.Connection, rows: Sequence[tuple[Any, ...]]) -> int:
        """Run the statement on all rows, in their order; returns how many of the table's it has changed."""
        changed = done = 0
        for count in _COUNTS:
            while len(rows) - done >= count:
                values = list(chain.from_iterable(rows[done : done + count]))
                changed += db.execute(self.text(count), values).rowcount
                done += count
        return changed


@cache
def _text(statement: ManyRows, count: int) -> str:
    return statement.head + ", ".join([statement.row] * count) + statement.tail
