"""Checks of functions that are declared to treat each row of a batch alone.

Must never: take an equal answer for a proof. A sample of rows is tried.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

from castore.errors import InvalidValueError, SerializationError
from castore.serialize.serializers import dump

# Rows of a batch that are tried one by one.
_TRIED_ROWS = 8
# Characters of values in an error.
_SHOWN = 80


def is_worth_trying(count: int, tried: int) -> bool:
    """Whether a batch of so many rows tells more than the largest one tried before, which had ``tried``."""
    return count >= max(2, 2 * tried)


def tried_rows(count: int) -> list[int]:
    """The numbers of the rows that are tried, of so many: the first, the last, and some between them.

    >>> tried_rows(1000), tried_rows(3)
    ([0, 142, 285, 428, 570, 713, 856, 999], [0, 1, 2])
    """
    steps = min(_TRIED_ROWS, count) - 1
    return [number * (count - 1) // max(1, steps) for number in range(steps + 1)]


def parts_of(count: int) -> list[range]:
    """The numbers of so many rows in order: each row that is tried, and the rows between two of these.

    >>> parts_of(1000)[:4]
    [range(0, 1), range(1, 142), range(142, 143), range(143, 285)]
    """
    ends = sorted({end for place in tried_rows(count) for end in (place, place + 1)})
    return [range(start, stop) for start, stop in itertools.pairwise(ends)]


def check_alike(title: str, column: str, rows: str, together: Any, alone: Any) -> None:
    """Compare the values of a column for a row, or rows, in a batch and alone.

    Args:
        title: the function's name.
        column, rows: the column and the rows, for the message.
        together, alone: the values.

    Raises:
        InvalidValueError: they differ.
    """
    if not _alike(together, alone):
        raise InvalidValueError(
            f"{title} is said to be row-wise, and is not: column {column!r} of {rows} is {_short(together)} "
            f"in a batch with others, and {_short(alone)} alone; leave out rowwise=True"
        )


def _alike(one: Any, other: Any) -> bool:
    """Whether values are equal; floats nearly so, since batches of other sizes may add in another order.

    Values that do not tell whether they are equal count by their bytes: an image that a function hands on has
    lost its file in one of the two. Values without exact bytes count by their type.
    """
    one, other = (value.tolist() if hasattr(value, "tolist") else value for value in (one, other))
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=1e-3, abs_tol=1e-5) or (one != one and other != other)
    if isinstance(one, list | tuple) and type(one) is type(other):
        return len(one) == len(other) and all(map(_alike, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_alike(value, other[name]) for name, value in one.items())
    try:
        if one == other:
            return True
    except (TypeError, ValueError, RuntimeError):  # such as the truth of an array
        pass
    try:
        return dump(one, "msgpack")[1] == dump(other, "msgpack")[1]
    except SerializationError:
        return type(one) is type(other)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
