"""cached_map and cached_filter of iterable datasets: `IterableDataset.map` and `filter` whose function does
not run again for rows that it has seen.

The iterable that plain `datasets` makes for the step stays in charge of everything but the function: batches,
indices, formats, columns, shards, shuffling and `state_dict` are its own, and so are the rows that come out.
Each iteration puts a `Pass` in the place of the function. So the state of a stream is that of a plain one,
and a state of either goes on in the other.

Must never read ahead of the rows that are asked for.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
from datasets.iterable_dataset import MappedExamplesIterable, _BaseExamplesIterable

from castore.adapters.datasets.call_blocks import KeptCalls, Pass
from castore.adapters.datasets.event_loops import loops_closed


def keep_calls(stream: datasets.IterableDataset, kept: KeptCalls, *, rowwise: bool) -> None:
    """Have the function of a stream not run again for what it has seen.

    Args:
        stream: what `map` or `filter` gave, just now; changed in place.
        kept: the function's kept calls.
        rowwise: the function takes batches, and treats each row alone.
    """
    stream._ex_iterable = _KeptExamples(stream._ex_iterable, kept, rowwise=rowwise)


class _KeptExamples(_BaseExamplesIterable):  # type: ignore[misc]
    """A map or a filter of plain `datasets` with its function's kept calls.

    Args:
        ex_iterable: the map or filter. `datasets` finds the iterable behind another by this name.
        kept, rowwise: as for `keep_calls`.
    """

    def __init__(self, ex_iterable: MappedExamplesIterable, kept: KeptCalls, *, rowwise: bool) -> None:
        super().__init__()
        self.ex_iterable = ex_iterable
        self._kept = kept
        self._rowwise = rowwise

    def _around(self, ex_iterable: Any) -> _KeptExamples:
        return _KeptExamples(ex_iterable, self._kept, rowwise=self._rowwise)

    # Iterating

    def __iter__(self) -> Iterator[Any]:
        with contextlib.ExitStack() as ends:
            yield from self._begin(ends)

    @property
    def iter_arrow(self) -> Callable[[], Iterator[Any]] | None:
        """The method that gives tables, if the step works on tables."""
        return self._iter_arrow if self.ex_iterable.iter_arrow else None

    def _iter_arrow(self) -> Iterator[tuple[Any, pa.Table]]:
        with contextlib.ExitStack() as ends:
            yield from self._begin(ends).iter_arrow()

    def _begin(self, ends: contextlib.ExitStack) -> Any:
        """The step for one iteration, at whose end, however it ends, blocks are kept that are not full."""
        step = self.ex_iterable
        # A filter calls its function inside one of its own, which adds a column.
        inside = step.function if hasattr(step, "mask_function") else None
        function = step.function if inside is None else step.mask_function
        present = functools.partial(self._kept.key, function, step.fn_kwargs)
        calls = Pass(self._kept, function, present, _shards_below(step.ex_iterable))
        called: Any
        if inspect.iscoroutinefunction(function):
            called = ends.enter_context(loops_closed(functools.partial(_await, calls)))
        else:
            called = calls.call_rows if self._rowwise else calls.call
        ends.callback(calls.close)
        if inside is not None:
            called = functools.partial(inside.func, called, **inside.keywords)
        run = copy.copy(step)
        run.function = called
        return run

    # State: that of the step, since the step iterates

    def _init_state_dict(self) -> Any:
        self._state_dict = self.ex_iterable._init_state_dict()
        return self._state_dict

    # Shards and types: those of the step

    @property
    def is_typed(self) -> bool:
        """Whether the step declares its features."""
        return bool(self.ex_iterable.is_typed)

    @property
    def features(self) -> Any:
        """The features that the step declares, or None."""
        return self.ex_iterable.features

    @property
    def num_shards(self) -> int:
        """The number of shards."""
        return int(self.ex_iterable.num_shards)

    def shuffle_data_sources(self, generator: np.random.Generator) -> _KeptExamples:
        """The same with its shards in another order."""
        return self._around(self.ex_iterable.shuffle_data_sources(generator))

    def shard_data_sources(self, *arguments: Any, **keywords: Any) -> _KeptExamples:
        """The same over some of its shards."""
        return self._around(self.ex_iterable.shard_data_sources(*arguments, **keywords))

    def reshard_data_sources(self) -> _KeptExamples:
        """The same with more shards, if its source can be split further."""
        return self._around(self.ex_iterable.reshard_data_sources())


async def _await(calls: Pass, *arguments: Any, **keywords: Any) -> Any:
    return await calls.call_async(*arguments, **keywords)


def _shards_below(ex_iterable: Any) -> Callable[[], tuple[Any, ...]]:
    """A function that returns the numbers of the shards that the sources of an iterable are reading."""
    sources: list[Any] = []
    waiting = [ex_iterable]
    while waiting:
        one = waiting.pop()
        behind = getattr(one, "_interleaved", None) or getattr(one, "ex_iterable", None)
        several = getattr(one, "ex_iterables", None) or ([] if behind is None else [behind])
        waiting += several
        if not several:
            sources.append(one)
    return lambda: tuple([(source._state_dict or {}).get("shard_idx") for source in sources])
