"""Batches as rows and back, for functions that treat each row alone. Knows nothing of blocks.

A batch is the arguments of one call: a dict of columns, or columns one by one, and the numbers of the rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from castore.errors import InvalidValueError


def rows_of(arguments: Sequence[Any]) -> list[list[Any]] | None:
    """The arguments of each row of a batch, as it would be alone; None if they are no columns of values."""
    columns = [column for given in arguments for column in (given.values() if _is_dict(given) else [given])]
    if not columns or not all(_is_column(column) for column in columns):
        return None
    count = len(columns[0])
    if not all(len(column) == count for column in columns):
        return None
    return [
        [
            {name: column[place] for name, column in given.items()} if _is_dict(given) else given[place]
            for given in arguments
        ]
        for place in range(count)
    ]


def pick_rows(arguments: Sequence[Any], places: list[int]) -> list[Any]:
    """The batch of some rows of a batch."""
    return [
        {name: _picked(column, places) for name, column in given.items()}
        if _is_dict(given)
        else _picked(given, places)
        for given in arguments
    ]


def split_result(output: Any, count: int, title: str) -> list[Any]:
    """A function's result for a batch as one for each row: dicts of a map, values of a filter.

    Raises:
        InvalidValueError: it has another number of rows than the batch.
    """
    columns = output if isinstance(output, Mapping) else {"its result": output}
    for name, column in columns.items():
        if not _is_column(column) or len(column) != count:
            raise InvalidValueError(
                f"{title} is said to be row-wise, and does not give one row for each row, as it must in a "
                f"stream: for {count} rows, {name!r} is not {count} values; leave out rowwise=True"
            )
    if isinstance(output, Mapping):
        return [{name: column[place] for name, column in columns.items()} for place in range(count)]
    return [bool(value) for value in output]


def join_results(pieces: list[Any], title: str) -> Any:
    """The result for a batch, from those of its rows.

    Raises:
        InvalidValueError: rows have other columns than the first one.
    """
    if not isinstance(pieces[0], dict):
        return pieces
    names = list(pieces[0])
    for piece in pieces:
        if list(piece) != names:
            raise InvalidValueError(
                f"{title} is said to be row-wise, and is not: it gives the columns {', '.join(names)} in one "
                f"batch, and {', '.join(piece)} in another; leave out rowwise=True"
            )
    return {name: [piece[name] for piece in pieces] for name in names}


def _is_dict(value: Any) -> bool:
    return type(value) is dict


def _is_column(value: Any) -> bool:
    """Whether a value is a list or a tuple, or an array or tensor whose rows come by number."""
    if isinstance(value, list | tuple):
        return True
    return bool(getattr(value, "shape", ()) and not hasattr(value, "columns"))


def _picked(column: Any, places: list[int]) -> Any:
    return [column[place] for place in places] if isinstance(column, list | tuple) else column[places]
