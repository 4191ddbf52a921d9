"""Watches the calls of a step's function on a block: how long they take, and which keys they return.

A run that turns out to be slow is ended between two calls, and begins anew in parts. A block whose first
rows are to tell the features of its result runs on these rows first. A function may remember rows where
nobody sees it, in a cached singleton or in a file, and `map` shows it each row once. So the calls before are
kept, and the run that begins anew takes their results.

Must never give a kept result out twice, for other rows, or one that a later call may have changed.
"""

from __future__ import annotations

import copy
import io
import math
import pickle
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import pyarrow as pa
from datasets.formatting.formatting import LazyDict

from castore.adapters.datasets.operator_state import OperatorState
from castore.system.job_rank import job_rank

# Seconds of a function's work that tell how long a block will take.
_TELLING_SECONDS = 0.5
# Calls after which no run is ended any more: `map` itself writes after as many rows.
_MOST_CALLS = 1000
# After so many calls a function that takes less than that part of the time that is slow counts as quick.
_QUICK_CALLS, _QUICK = 8, 1 / 20
#: The end of the note that an error of a function gets.
OF_INPUT = "of the step's input"
# In the place of a result that is the function's first argument.
_FIRST_ARGUMENT = object()


class TooSlowError(Exception):
    """A block would take long.

    Attributes:
        seconds_a_row: the time that its function takes.
    """

    def __init__(self, seconds_a_row: float) -> None:
        super().__init__(seconds_a_row)
        self.seconds_a_row = seconds_a_row


class _Call(NamedTuple):
    """A call as it was.

    Attributes:
        rows: that the function got.
        seconds: that it took.
        result: a copy, or `_FIRST_ARGUMENT`.
        given: a copy of the first argument as the function has left it: `map` merges the result into it.
    """

    rows: int
    seconds: float
    result: Any
    given: Any


class EarlyCalls:
    """The calls of runs before, of rows that run anew, by the number of the first row.

    As long as a run leaves blocks to other ranks, numbers count the rows of its own blocks alone.
    """

    def __init__(self) -> None:
        self._calls: dict[int, _Call] = {}

    def keep(self, calls: Mapping[int, _Call]) -> None:
        """Keep calls, for the run that begins anew."""
        self._calls |= calls

    def take(self, row: int, rows: int) -> _Call | None:
        """The call on so many rows from that number on, once; None if there was none."""
        call = self._calls.get(row)
        return self._calls.pop(row) if call is not None and call.rows == rows else None

    def forget(self) -> None:
        """Forget all calls: their rows are done, and other rows may get their numbers."""
        self._calls.clear()


class CallWatch:
    """Notes the keys of results, and the time of calls. Ends a run between two calls, early on, if slow.

    The first call, which may load a model, does not count once there are others.

    Args:
        state: of the operator.
        early: calls of runs that were ended; None to keep none.
        first: the number of the block's first row.
        rows: rows of the block.
        at_once: rows that the function gets at one time.
        slow_seconds: a block that takes more of them is slow; infinite if the run may not be ended.
        keeps_all: have `keep_calls` keep all calls, for a run of these rows and others.
    """

    def __init__(
        self,
        state: OperatorState,
        early: EarlyCalls | None,
        first: int,
        rows: int,
        at_once: int,
        slow_seconds: float,
        *,
        keeps_all: bool = False,
    ) -> None:
        self._state, self._early = state, early
        self._keeps_all = keeps_all
        self._begin, self._rows, self._at_once = first, rows, at_once
        self._most = slow_seconds
        self._calls, self._first, self._seconds = 0, 0.0, 0.0
        # None where calls are not kept: the function is quick, or its results cannot be copied.
        self._kept: dict[int, _Call] | None = None if early is None else {}
        #: The keys of the dicts that the function returned: all different sets of them, each in order.
        self.keys: set[tuple[str, ...]] = set()
        self._latest: tuple[str, ...] = ()

    def call(self, function: Callable[..., Any], arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """Call the function, or take the result that it gave before on the same rows.

        Raises:
            TooSlowError: the block takes long; the function has seen these rows.
        """
        row, rows = self._begin + self._calls * self._at_once, _rows_in(arguments, self._at_once)
        if row >= self._begin + self._rows:  # some rows are tried once more, behind the last
            return function(*arguments, **keywords)
        call = None if self._early is None else self._early.take(row, rows)
        if call is None:
            began = time.perf_counter()
            try:
                result = function(*arguments, **keywords)
            except Exception as error:
                _name_rows(error, row, rows)
                raise
            seconds = time.perf_counter() - began
        else:
            result, seconds = _restore(call, arguments), call.seconds
        is_slow = self._count(result, seconds)
        if self._kept is not None and (self._keeps_all or math.isfinite(self._most)):
            try:
                self._kept[row] = _copy_of(rows, seconds, result, arguments, self._at_once)
            except Exception:  # noqa: BLE001 (of whatever a result holds)
                self._kept = None
        if is_slow:
            self.keep_calls()
            raise TooSlowError(self.seconds_a_row() or 0.0)
        return result

    def _count(self, result: Any, seconds: float) -> bool:
        """Count a call; returns whether the run is to end."""
        if isinstance(result, Mapping) and (keys := tuple(result)) != self._latest:
            self._latest = keys
            self.keys.add(tuple(sorted(map(str, keys))))  # texts and numbers have no order
        self._calls += 1
        if self._calls == 1:
            self._first = seconds
        else:
            self._seconds += seconds
        if not math.isfinite(self._most):
            return False
        speed, spent = self.seconds_a_row() or 0.0, self._seconds or self._first
        if self._calls * self._at_once * 2 >= self._rows or self._calls > _MOST_CALLS:
            self._go_on()
        elif self._calls >= _QUICK_CALLS and speed * self._rows < self._most * _QUICK:
            self._drop()
        elif spent > _TELLING_SECONDS and speed * self._rows > self._most:
            if not self._state.has_changed(now=True):
                return True
            self._go_on()
        return False

    def _go_on(self) -> None:
        """Let the run reach its end."""
        self._most = math.inf
        self._drop()

    def _drop(self) -> None:
        """Keep no call, unless all are to be kept: no run begins anew."""
        if not self._keeps_all:
            self._kept = None

    def keep_calls(self) -> None:
        """Keep the calls for the run that begins anew, or goes on."""
        if self._early is not None:
            self._early.keep(self._kept or {})

    def seconds_a_row(self) -> float | None:
        """The time that the function takes; None if it was not called, or is a coroutine function."""
        if self._calls > 1:
            return self._seconds / ((self._calls - 1) * self._at_once)
        return self._first / min(self._rows, self._at_once) if self._calls else None


class CallWatched:
    """A function whose calls are watched.

    Args:
        function: no coroutine function.
        watch: of the `BlockCall`.
    """

    def __init__(self, function: Callable[..., Any], watch: CallWatch) -> None:
        self._function = function
        self._watch = watch

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        """Call the function, and show the call to the watch."""
        return self._watch.call(self._function, arguments, keywords)


def _name_rows(error: Exception, row: int, rows: int) -> None:
    """Note the rows of a call that failed, where Python has notes (3.11) and their numbers are known."""
    _, ranks = job_rank()  # a rank that leaves blocks to others counts its own rows alone
    if ranks == 1 and hasattr(error, "add_note"):
        which = f"row {row:,}" if rows == 1 else f"rows {row:,} to {row + rows - 1:,}"
        error.add_note(f"in {which} {OF_INPUT}")


def _rows_in(arguments: tuple[Any, ...], at_once: int) -> int:
    if at_once == 1 or not arguments:
        return 1
    first = arguments[0]
    if isinstance(first, LazyDict):  # a look at a column would decode it
        return int(first.pa_table.num_rows)
    return len(next(iter(first.values()), ())) if type(first) is dict else len(first)


def _copy_of(rows: int, seconds: float, result: Any, arguments: tuple[Any, ...], at_once: int) -> _Call:
    """A call that later calls do not change.

    `map` writes the result of a batch at once, so a function may fill the same buffers again and again. Rows
    are written together later on, so there a function can reuse no more than the dict itself.
    """
    copied = copy.copy if at_once == 1 else _deep_copy
    first = arguments[0] if arguments else None
    given: Any = None
    if isinstance(first, LazyDict):
        given = copied(first.data), set(first.keys_to_format)
    elif type(first) is dict:
        given = copied(first)
    if result is first:
        return _Call(rows, seconds, _FIRST_ARGUMENT, given)
    if isinstance(result, LazyDict):
        kept: Any = _LazyResult(result, copied(result.data), set(result.keys_to_format))
    elif type(result) is dict or (at_once > 1 and not isinstance(result, pa.Table)):
        kept = copied(result)
    else:
        kept = result
    return _Call(rows, seconds, kept, given)


class _Packed(NamedTuple):
    """A copy of a value of Python's own types."""

    data: bytes


class _Packer(pickle.Pickler):
    """Packs values of Python's own types alone; values of others need not come back."""

    def reducer_override(self, value: Any) -> Any:
        """Refuse a value that is none of them."""
        raise pickle.PicklingError(f"a {type(value).__name__}")


def _deep_copy(value: Any) -> Any:
    """A deep copy; for lists of numbers and the like `_Packed`, in a tenth of the time."""
    packed = io.BytesIO()
    try:
        _Packer(packed, pickle.HIGHEST_PROTOCOL).dump(value)
    except pickle.PicklingError:
        return copy.deepcopy(value)
    return _Packed(packed.getvalue())


def _unpacked(kept: Any) -> Any:
    return pickle.loads(kept.data) if isinstance(kept, _Packed) else kept  # noqa: S301 (of this process)


class _LazyResult(NamedTuple):
    """A row or a batch of `datasets` that a function has returned."""

    row: LazyDict
    data: dict[str, Any]
    keys_to_format: set[str]


def _restore(call: _Call, arguments: tuple[Any, ...]) -> Any:
    """Have a call's first argument as it was afterwards; returns the result."""
    first = arguments[0] if arguments else None
    if isinstance(first, LazyDict):
        data, first.keys_to_format = call.given
        first.data = _unpacked(data)
    elif type(first) is dict:
        first.clear()
        first.update(_unpacked(call.given))
    if isinstance(call.result, _LazyResult):
        row: LazyDict = call.result.row
        row.data, row.keys_to_format = _unpacked(call.result.data), call.result.keys_to_format
        return row
    return first if call.result is _FIRST_ARGUMENT else _unpacked(call.result)
