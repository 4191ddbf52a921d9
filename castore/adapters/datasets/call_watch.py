"""Watches the calls of a step's function on a block: how long they take, and which keys they return.

A run that turns out to be slow is ended between two calls, and begins anew in parts. A function may remember
rows where nobody sees it, in a cached singleton or in a file, and `map` shows it each row once. So the calls
before the end are kept, and the run that begins anew takes their results.

Must never call a function in the place of its step, or keep what a run has not ended.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from datasets.formatting.formatting import LazyDict

from castore.adapters.datasets.operator_state import OperatorState

# Seconds of a function's work that tell how long a block will take.
_TELLING_SECONDS = 0.5
# Calls after which no run is ended any more: `map` itself writes after as many rows.
_MOST_CALLS = 1000


class TooSlowError(Exception):
    """A block would take long.

    Attributes:
        seconds_a_row: the time that its function takes.
    """

    def __init__(self, seconds_a_row: float) -> None:
        super().__init__(seconds_a_row)
        self.seconds_a_row = seconds_a_row


class _Call(NamedTuple):
    """A call as it was: its result, its seconds, its rows, and what it has made of its first argument."""

    result: Any
    seconds: float
    rows: int
    given: Any


class EarlyCalls:
    """The calls of runs that were ended, by the number of their first row in the step's input."""

    def __init__(self) -> None:
        self._calls: dict[int, _Call] = {}

    def keep(self, calls: Mapping[int, _Call]) -> None:
        """Keep calls, for the run that begins anew."""
        self._calls |= calls

    def take(self, row: int, arguments: tuple[Any, ...], at_once: int) -> _Call | None:
        """The call on the rows from that number on, once; None if there was none, or on other rows."""
        call = self._calls.get(row)
        if call is None or call.rows != _rows_in(arguments, at_once):
            return None
        del self._calls[row]
        _restore(arguments, call.given)
        return call


class CallWatch:
    """Notes the keys of results, and the time of calls. Ends a run between two calls, early on, if slow.

    The first call, which may load a model, does not count once there are others.

    Args:
        state: of the operator.
        early: calls of runs that were ended.
        first: the number of the block's first row.
        rows: rows of the block.
        at_once: rows that the function gets at one time.
        slow_seconds: a block that takes more of them is slow; infinite if the run may not be ended.
    """

    def __init__(
        self,
        state: OperatorState,
        early: EarlyCalls,
        first: int,
        rows: int,
        at_once: int,
        slow_seconds: float,
    ) -> None:
        self._state, self._early = state, early
        self._begin, self._rows, self._at_once = first, rows, at_once
        self._most = slow_seconds
        self._calls, self._first, self._seconds = 0, 0.0, 0.0
        self._kept: dict[int, _Call] = {}
        #: The keys of the dicts that the function returned: all different sets of them, each in order.
        self.keys: set[tuple[str, ...]] = set()
        self._latest: tuple[str, ...] = ()

    def call(self, function: Callable[..., Any], arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """Call the function, or take the result that it gave before on the same rows.

        Raises:
            TooSlowError: the block takes long; the function has seen these rows.
        """
        row = self._begin + self._calls * self._at_once
        call = self._early.take(row, arguments, self._at_once)
        if call is None:
            began = time.perf_counter()
            result = function(*arguments, **keywords)
            seconds = time.perf_counter() - began
        else:
            result, seconds = call.result, call.seconds
        if math.isfinite(self._most):
            given = _present(arguments)
            self._kept[row] = _Call(_own(result), seconds, _rows_in(arguments, self._at_once), given)
        self._note(result, seconds)
        return result

    def _note(self, result: Any, seconds: float) -> None:
        if isinstance(result, Mapping) and (keys := tuple(result)) != self._latest:
            self._latest = keys
            self.keys.add(tuple(sorted(keys)))
        self._calls += 1
        if self._calls == 1:
            self._first = seconds
        else:
            self._seconds += seconds
        if not math.isfinite(self._most):
            return
        speed, spent = self.seconds_a_row() or 0.0, self._seconds or self._first
        done = self._calls * self._at_once
        if done * 2 >= self._rows or self._calls > _MOST_CALLS:
            self._go_on()
        elif spent > _TELLING_SECONDS and speed * self._rows > self._most:
            if self._state.has_changed(now=True):
                self._go_on()
            else:
                self._early.keep(self._kept)
                raise TooSlowError(speed)

    def _go_on(self) -> None:
        """Let the run reach its end."""
        self._most = math.inf
        self._kept.clear()

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


def _rows_in(arguments: tuple[Any, ...], at_once: int) -> int:
    if at_once == 1 or not arguments:
        return 1
    first = arguments[0]
    return len(next(iter(first.values()), ())) if isinstance(first, dict | LazyDict) else len(first)


def _own(result: Any) -> Any:
    """A result that the function does not change any more, as far as `map` takes it over at once."""
    return dict(result) if type(result) is dict else result


def _present(arguments: tuple[Any, ...]) -> Any:
    """The row as a function has left it: `map` merges the result into it."""
    row = arguments[0] if arguments else None
    if isinstance(row, LazyDict):
        return dict(row.data), set(row.keys_to_format)
    return dict(row) if type(row) is dict else None


def _restore(arguments: tuple[Any, ...], given: Any) -> None:
    row = arguments[0] if arguments else None
    if isinstance(row, LazyDict):
        row.data, row.keys_to_format = given
    elif type(row) is dict:
        row.clear()
        row.update(given)
